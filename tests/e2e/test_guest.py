# SPDX-License-Identifier: GPL-2.0-or-later
"""Real guests with their RAM on memory-backend-ksm, scope=host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guest.qemu import (
    Guest,
    GuestError,
    GuestSpec,
    RamUsage,
    accelerator,
    migrate,
)
from host import ksmsys

pytestmark = pytest.mark.timeout(900)

FAST = {"pages_to_scan": 4000, "sleep_millisecs": 5}
LOCKED_IN = (
    "-sandbox",
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
)


def small(**changes: object) -> GuestSpec:
    spec = GuestSpec(memory_mib=224, cache_mib=48, private_mib=16, load=10)
    spec.userland = False
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def stats_of_still_memory(guest: Guest) -> tuple[dict[str, Any], RamUsage]:
    """
    What QEMU says, between two readings of smaps that agree: the guest is
    stopped, but khugepaged still makes memory resident around it.
    """
    for _ in range(20):
        before = guest.ram_usage()
        stats = guest.ksm_stats()
        if guest.ram_usage() == before:
            return stats, before
    pytest.fail("the memory of a stopped guest changes at every look")


def merge_until(guest: Guest, knobs: ksmsys.KsmKnobs, pages: int) -> None:
    """ksmd runs until so many pages of the guest are merged, then stops."""
    knobs.set(**FAST)
    knobs.set(run=1)
    guest.wait_for("merged pages", lambda: guest.memory().ksm_merged >= pages, 300)


@pytest.fixture
def guest(image: Path) -> Iterator[Guest]:
    with Guest(small(), image) as guest:
        guest.wait_ready()
        yield guest


def test_figures_are_the_kernels(guest: Guest, knobs: ksmsys.KsmKnobs) -> None:
    guest.ram()
    merge_until(guest, knobs, 2000)
    knobs.set(run=0)
    guest.qmp("stop")
    time.sleep(0.5)

    stats, ram = stats_of_still_memory(guest)
    memory = guest.memory()
    process = stats["process"]
    assert process["pages-merged"] == memory.ksm_merged >= 2000
    assert process["rmap-items"] == memory.ksm_rmap_items
    assert process["zero-pages"] * 4096 == memory.ksm_zero

    host = stats["host"]
    assert host["ksmd"] == "stopped"
    for name in ("pages_to_scan", "sleep_millisecs", "run", "full_scans"):
        assert host[name.replace("_", "-")] == ksmsys.read(name)
    for name in ("pages_shared", "pages_sharing", "pages_unshared"):
        # others on the host may free merged memory meanwhile
        assert host[name.replace("_", "-")] == pytest.approx(
            ksmsys.read(name), rel=0.05
        )

    backend = stats["backends"][0]
    assert backend["id"] == "ram0"
    assert backend["scope"] == "host"
    assert backend["mergeable"] is True
    assert backend["size"] == 224 << 20
    assert backend["resident"] == ram.resident
    assert "ksmd-stopped" in [reason["kind"] for reason in backend["reasons"]]

    text = guest.hmp("info ksm")
    assert "ram0" in text and "MiB" in text
    guest.qmp("cont")
    assert guest.verify() == 0


def test_sandbox(image: Path, knobs: ksmsys.KsmKnobs) -> None:
    """As libvirt starts QEMU."""
    with Guest(small(extra=LOCKED_IN), image) as guest:
        guest.wait_ready()
        merge_until(guest, knobs, 500)
        assert guest.ksm_stats()["process"]["pages-merged"] >= 500
        assert guest.verify() == 0


def test_unprivileged_user(image: Path, root: None) -> None:
    """A real userland, and QEMU with no right to anything."""
    if accelerator() == "kvm":
        pytest.skip("/dev/kvm is root's here")
    with Guest(small(user="65534", userland=True), image) as guest:
        assert os.stat(f"/proc/{guest.pid}").st_uid == 65534
        guest.wait_ready()
        stats = guest.ksm_stats()
        assert stats["backends"][0]["state"] in ("inhibited", "active", "idle")
        for reason in stats["backends"][0]["reasons"]:
            assert reason["text"]
        assert guest.verify() == 0


def test_unreadable_knobs(image: Path, root: None) -> None:
    """A guest starts and says what it does not know."""
    script = 'mount -t tmpfs -o mode=000 t /sys/kernel/mm/ksm && exec "$0" "$@"'
    hide = ("unshare", "-m", "sh", "-c", script)
    spec = small(user="65534", prefix=hide, cache_mib=4, private_mib=4)
    with Guest(spec, image) as guest:
        stats = guest.ksm_stats()
        kinds = [reason["kind"] for reason in stats["backends"][0]["reasons"]]
        assert {"unreadable", "no-kernel-support", "not-permitted"} & set(kinds)
        guest.wait_ready()
        assert guest.verify() == 0


def test_migration_to_plain_memory_and_back(
    image: Path, knobs: ksmsys.KsmKnobs
) -> None:
    knobs.set(**FAST)
    knobs.set(run=1)
    plain = small(incoming=True, backend="memory-backend-ram", name="plain")
    with (
        Guest(small(name="first"), image) as first,
        Guest(plain, image) as second,
        Guest(small(incoming=True, name="third"), image) as third,
    ):
        first.wait_ready()
        merge_until(first, knobs, 500)
        migrate(first, second)
        first.stop()
        assert second.verify() == 0
        migrate(second, third)
        second.stop()
        assert third.verify() == 0
        third.wait_for("merged pages", lambda: third.memory().ksm_merged > 500, 300)
        assert third.verify() == 0


def test_balloon(image: Path, knobs: ksmsys.KsmKnobs) -> None:
    """What the guest gives back leaves the host's memory; nothing else does."""
    spec = small(extra=("-device", "virtio-balloon-pci,id=balloon0"))
    with Guest(spec, image) as guest:
        guest.wait_ready()
        merge_until(guest, knobs, 500)
        guest.command("alloc 40")
        guest.command("free 40")
        before = guest.memory()
        guest.qmp("balloon", value=(224 - 40) << 20)

        def inflated() -> bool:
            return bool(guest.qmp("query-balloon")["actual"] <= (224 - 40) << 20)

        guest.wait_for("inflated balloon", inflated, 120)

        def given_back() -> bool:
            now = guest.memory()
            taken = now.resident - now.lazy_free + now.ksm_zero
            # not all 40: the balloon also takes free pages that the guest never
            # touched, and some were gone when "before" was taken (17 to 30 seen)
            return taken < before.resident + before.ksm_zero - (10 << 20)

        guest.wait_for("memory given back", given_back, 60)
        assert guest.verify() == 0
        guest.qmp("balloon", value=224 << 20)
        assert guest.verify() == 0


def test_guest_that_powers_off(guest: Guest) -> None:
    guest.send("quit")
    assert guest.process is not None
    assert guest.process.wait(120) == 0


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"scope": "group"}, "group"),
        ({"scope": "all"}, "scope"),
        ({"share": "on"}, "share"),
        ({"merge": "off"}, "merge"),
        ({"max-cpu": "0"}, "max-cpu"),
        ({"max-cpu": "101"}, "max-cpu"),
        ({"max-cpu": "much"}, "max-cpu"),
        ({"nonsense": "1"}, "nonsense"),
        ({"iothread": "none"}, "none"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refused_properties(
    image: Path, properties: dict[str, str], words: str
) -> None:
    """QEMU does not start, and its message names what is wrong."""
    with pytest.raises(GuestError, match=words):
        with Guest(small(properties=properties), image):
            pass
