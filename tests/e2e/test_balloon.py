# SPDX-License-Identifier: GPL-2.0-or-later
"""What real guests give back: free page reporting and the balloon.

Lazily freed memory stays resident until the host wants it, so what a guest
takes is its resident memory less that ("used" in query-ksm-stats).  Under
pressure, here of a memory control group, the resident memory itself falls.
In each test the guest verifies all its memory and files at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guest.qemu import Guest, GuestSpec, migrate
from host.cgroup import Group, NoCgroup

pytestmark = pytest.mark.timeout(900)

MIB = 1 << 20
FREED = 300
#: what must come back of that, and how long it may take on a busy machine;
#: on an idle one see docs/devel/ksm-bench.rst
SHARE = 0.9
PATIENCE = 60.0
BALLOON = "virtio-balloon-pci,id=balloon,free-page-reporting=on"


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        made = Group.make()
    except NoCgroup as error:
        pytest.skip(str(error))
    yield made
    made.remove()


def spec_of(**changes: object) -> GuestSpec:
    spec = GuestSpec(
        memory_mib=512,
        cache_mib=32,
        private_mib=8,
        load=5,
        extra=["-device", BALLOON],
    )
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def used(guest: Guest) -> int:
    return int(guest.backend_stats()["used"])


def resident(guest: Guest) -> int:
    return int(guest.backend_stats()["resident"])


def free_and_wait(guest: Guest, mib: int) -> float:
    """The guest frees memory; seconds until it counts on the host."""
    before = used(guest)
    start = time.monotonic()
    guest.command(f"free {mib}")
    guest.wait_for(
        f"fall of used memory by {SHARE:.0%} of {mib} MiB",
        lambda: before - used(guest) >= SHARE * mib * MIB,
        PATIENCE,
        0.1,
    )
    return time.monotonic() - start


def assert_not_inert(guest: Guest) -> None:
    kinds = [reason["kind"] for reason in guest.backend_stats()["reasons"]]
    assert "balloon-inert" not in kinds


def balloon_to(guest: Guest, mib: int) -> None:
    guest.qmp("balloon", value=mib * MIB)
    guest.wait_for(
        f"balloon that leaves {mib} MiB",
        lambda: guest.qmp("query-balloon")["actual"] == mib * MIB,
        PATIENCE,
    )


def assert_freed(guest: Guest, capsys: pytest.CaptureFixture[str]) -> int:
    """The guest frees memory; bytes that were resident before."""
    guest.command(f"alloc {FREED} random")
    assert_not_inert(guest)
    before = resident(guest)
    seconds = free_and_wait(guest, FREED)
    stats = guest.backend_stats()
    with capsys.disabled():
        print(
            f"\n  {FREED} MiB freed: used fell by {SHARE:.0%} of that in "
            f"{seconds:.1f} s, resident by {(before - stats['resident']) / MIB:.0f} "
            f"MiB, lazily free {stats['lazy-free'] / MIB:.0f} MiB"
        )
    assert stats["free-hinted"] * 4096 >= SHARE * FREED * MIB
    return before


def assert_reclaimed(guest: Guest, group: Group, before: int) -> None:
    """Under memory pressure what is resident falls, too."""

    def fell() -> bool:
        missing = int(SHARE * FREED * MIB) - (before - resident(guest))
        if missing > 0:
            # what was reported since the last time can be had now
            group.reclaim(missing)
        return missing <= 0

    guest.wait_for("fall of resident memory", fell, PATIENCE)


def test_host(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """scope=host: reporting, the balloon, and a migration; nothing is lazy."""
    spec = spec_of(properties={"free-policy": "lazy"})
    with Guest(spec, image) as guest:
        guest.wait_ready()
        before = assert_freed(guest, capsys)
        stats = guest.backend_stats()
        assert stats["lazy-free"] == 0
        assert before - stats["resident"] >= SHARE * FREED * MIB
        guest.command(f"alloc {FREED} pattern")
        assert guest.verify() == 0
        free_and_wait(guest, FREED)

        before = used(guest)
        balloon_to(guest, 384)
        assert used(guest) < before + 64 * MIB
        assert guest.backend_stats()["free-hinted"] >= 128 * MIB // 4096
        assert_not_inert(guest)
        balloon_to(guest, 512)
        guest.command("alloc 200")

        # free pages are on their way while the guest moves
        target = spec_of(incoming=True, properties={"free-policy": "lazy"})
        guest.command("free 150")
        with Guest(target, image) as moved:
            migrate(guest, moved)
            guest.stop()
            moved.command("alloc 150")
            assert moved.verify() == 0
            free_and_wait(moved, 150)
            assert moved.verify() == 0


def test_vm(
    image: Path, group: Group, scope_vm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """scope=vm, merging at full speed meanwhile."""
    properties = {"scope": scope_vm, "max-cpu": "100", "free-policy": "lazy"}
    spec = spec_of(properties=properties, prefix=group.prefix())
    with Guest(spec, image) as guest:
        guest.wait_ready()
        assert_reclaimed(guest, group, assert_freed(guest, capsys))
        guest.command(f"alloc {FREED} pattern")
        assert guest.verify() == 0
        # merged memory is freed, too
        guest.command(f"free {FREED}")
        assert guest.verify() == 0


def write_files(group: Group, directory: str) -> None:
    """A process in the group fills its page cache and drops it again."""
    script = 'dd if=/dev/zero of="$0" bs=1M count=48 2>/dev/null; rm -f "$0"'
    subprocess.run(
        [*group.prefix(), "sh", "-c", script, os.path.join(directory, "file")],
        check=False,
    )


def test_auto_under_pressure(image: Path, group: Group, scope_vm: str) -> None:
    """free-policy=auto frees at once while the group is at its limit.

    The limit is in the way before anything is freed: what was freed lazily
    until then may stay, once there is room below the limit.
    """
    with (
        tempfile.TemporaryDirectory(prefix="qemu-ksm-", dir="/var/tmp") as directory,
        Guest(
            spec_of(properties={"scope": scope_vm}, prefix=group.prefix()), image
        ) as guest,
    ):
        guest.wait_ready()
        guest.command(f"alloc {FREED} random")
        group.limit(group.usage() + 24 * MIB)
        hits = group.limit_hits()

        def at_limit() -> bool:
            write_files(group, directory)
            return group.limit_hits() > hits

        guest.wait_for("limit that is in the way", at_limit, PATIENCE)
        hinted = int(guest.backend_stats()["free-hinted"])
        guest.command("free 100")

        def eager() -> bool:
            write_files(group, directory)
            stats = guest.backend_stats()
            given = (int(stats["free-hinted"]) - hinted) * 4096
            if given > 32 * MIB and stats["lazy-free"] < 8 * MIB:
                return True
            # reports come every two seconds: give something to report
            if guest.state["own_mib"] > 20:
                guest.command("free 20")
            return False

        guest.wait_for("memory that is freed at once", eager, PATIENCE)
        group.limit(-1)
        assert guest.verify() == 0


def test_info_ksm(image: Path) -> None:
    """People are told why nothing comes back."""
    spec = spec_of(extra=["-device", "virtio-balloon-pci"])
    with Guest(spec, image) as guest:
        guest.wait_ready()
        text = guest.hmp("info ksm")
        assert "free-page-reporting of the virtio-balloon device is off" in text
        assert re.search(r"^  used +\S+", text, re.M)
        balloon_to(guest, 448)
        assert "gives no memory back" not in guest.hmp("info ksm")
        assert int(guest.backend_stats()["free-hinted"]) >= 32 * MIB // 4096
        assert guest.verify() == 0
