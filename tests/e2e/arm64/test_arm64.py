# SPDX-License-Identifier: GPL-2.0-or-later
"""What arm64 guests have that x86's have not: a device tree, other pages.

Merging, balloon and migration are those of tests/e2e, run with an arm64 QEMU.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guest import qemu
from guest.qemu import Guest, GuestSpec

pytestmark = pytest.mark.timeout(900)

MIB = 1 << 20

#: start and bytes of ranges of memory, by NUMA node
Layout = dict[int, list[tuple[int, int]]]


@pytest.fixture(scope="module", autouse=True)
def arm64() -> None:
    if qemu.qemu_arch().name != "aarch64":
        pytest.skip("QEMU_KSM_QEMU names no qemu-system-aarch64")


def pages_saved(stats: dict[str, object]) -> int:
    return int(str(stats["pages-sharing"])) + int(str(stats["zero-pages"]))


# --- NUMA and the device tree ---


def libfdt() -> ctypes.CDLL:
    """The library that QEMU writes device trees with."""
    library = ctypes.CDLL("libfdt.so.1")
    library.fdt_getprop.restype = ctypes.c_void_p
    return library


def tree_layout(tree: bytes) -> Layout:
    """The memory nodes of a device tree."""
    fdt = libfdt()
    assert fdt.fdt_check_header(tree) == 0
    length = ctypes.c_int()

    def cells(node: int, name: str) -> tuple[int, ...]:
        at = fdt.fdt_getprop(tree, node, name.encode(), ctypes.byref(length))
        assert at, f"no property {name}"
        data = ctypes.string_at(at, length.value)
        return struct.unpack(f">{len(data) // 4}I", data)

    assert cells(0, "#address-cells") == cells(0, "#size-cells") == (2,)
    layout: Layout = {}
    what = (b"device_type", b"memory\0", 7)
    node = fdt.fdt_node_offset_by_prop_value(tree, -1, *what)
    while node >= 0:
        (number,) = cells(node, "numa-node-id")
        words = iter(cells(node, "reg"))
        for high, low, size_high, size_low in zip(*[words] * 4, strict=True):
            one = (high << 32 | low, size_high << 32 | size_low)
            layout.setdefault(number, []).append(one)
        node = fdt.fdt_node_offset_by_prop_value(tree, node, *what)
    return layout


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, with neighbours made one."""
    whole: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if whole and sum(whole[-1]) == start:
            start, size = whole[-1][0], whole.pop()[1] + size
        whole.append((start, size))
    return whole


def sysfs_layout(events: list[dict[str, object]]) -> Layout:
    """The guest's: blocks of memory in /sys/devices/system/node."""
    layout: Layout = {}
    for event in events:
        size = int(str(event["block_bytes"]))
        blocks = event["blocks"]
        assert isinstance(blocks, list)
        layout[int(str(event["node"]))] = joined([(n * size, size) for n in blocks])
    return layout


def node_events(guest: Guest) -> list[dict[str, object]]:
    since = len(guest.events)
    guest.command("nodes")
    return [event for event in guest.events[since:] if event["event"] == "node"]


#: Of each node, in MiB: blocks of memory are of 128 MiB with pages of 4 KiB.
NODES = (256, 384)


def numa_spec(scope: str, **changes: object) -> GuestSpec:
    extra: list[str] = []
    for number, size in enumerate(NODES):
        extra += [
            "-object",
            f"memory-backend-ksm,id=ram{number},size={size}M,scope={scope},max-cpu=100",
            "-numa",
            f"node,nodeid={number},memdev=ram{number},cpus={number}",
        ]
    spec = GuestSpec(
        memory_mib=sum(NODES),
        cpus=len(NODES),
        backend=None,
        cache_mib=32,
        private_mib=24,
        load=50,
        extra=extra,
    )
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def check_layout(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "tree.dtb"
    guest.qmp("dumpdtb", filename=str(path))
    tree = tree_layout(path.read_bytes())
    start = guest.arch.ram_start
    expected: Layout = {}
    for number, size in enumerate(NODES):
        expected[number] = [(start, size * MIB)]
        start += size * MIB
    assert tree == expected
    events = node_events(guest)
    assert sysfs_layout(events) == tree
    for event, size in zip(events, NODES, strict=True):
        assert event["cpus"] == str(event["node"])
        # less what the kernel keeps for itself before it counts
        assert 0.75 * size < int(str(event["total_kib"])) / 1024 <= size


def test_numa(image: Path, scope_vm: str, tmp_path: Path) -> None:
    """Two nodes on two objects: where the device tree says, and both merged."""
    with Guest(numa_spec(scope_vm), image) as guest:
        guest.wait_ready()
        check_layout(guest, tmp_path)
        # more than either node has
        guest.command("alloc 360 pattern")
        guest.wait_for(
            "pages merged in both nodes",
            lambda: all(
                pages_saved(backend) >= 40 * 256
                for backend in guest.ksm_stats()["backends"]
            ),
            300,
        )
        sizes = {b["id"]: b["size"] for b in guest.ksm_stats()["backends"]}
        assert sizes == {f"ram{n}": size * MIB for n, size in enumerate(NODES)}
        assert guest.verify() == 0
        check_layout(guest, tmp_path)


# --- pages of 16 KiB ---


@pytest.fixture(scope="module")
def image_16k() -> Path:
    return qemu.guest_image("trixie", "16k")


def spec_16k(scope: str, tracking: str) -> GuestSpec:
    return GuestSpec(
        memory_mib=512,
        cache_mib=64,
        private_mib=24,
        load=50,
        userland=False,
        properties={"scope": scope, "max-cpu": "100", "dirty-tracking": tracking},
    )


@pytest.fixture(params=["auto", "log"])
def tracking(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)


def test_pages_of_16k(image_16k: Path, scope_vm: str, tracking: str) -> None:
    """A guest's page is four of the host's, whatever tells what it wrote."""
    with Guest(spec_16k(scope_vm, tracking), image_16k) as guest:
        guest.wait_ready()
        assert [e["page_bytes"] for e in node_events(guest)] == [16384]
        guest.command("alloc 48 pattern")
        guest.command("alloc 16 zero")
        guest.wait_for(
            "merged pages",
            lambda: pages_saved(guest.backend_stats()) >= 56 * 256,
            300,
        )
        end = time.monotonic() + 10
        while time.monotonic() < end:
            guest.command("rewrite 1")
            guest.command("direct 4")
            guest.command("free 8")
            guest.command("alloc 8 pattern")
        assert guest.verify() == 0
        assert guest.backend_stats()["cow-broken"] > 0


def test_zero_pages_of_16k(image_16k: Path, scope_vm: str) -> None:
    with Guest(spec_16k("zero", "auto"), image_16k) as guest:
        guest.wait_ready()
        guest.command("alloc 32 zero")
        guest.wait_for(
            "zero pages given back",
            lambda: guest.backend_stats()["zero-pages"] >= 28 * 256,
            300,
        )
        assert guest.verify() == 0
