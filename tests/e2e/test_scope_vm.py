# SPDX-License-Identifier: GPL-2.0-or-later
"""Real guests merged by QEMU itself (scope=vm), beside all else QEMU does.

In each test the engine runs at full speed (max-cpu=100) from the guest's first
instruction, and at the end the guest verifies every page and every file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from guest.qemu import Guest, GuestError, GuestSpec, migrate, pool_size

pytestmark = pytest.mark.timeout(900)

Record = Callable[[str, object], None]

FULL_SPEED = {"max-cpu": "100"}


def spec_of(scope: str, **changes: object) -> GuestSpec:
    spec = GuestSpec(
        memory_mib=256,
        cache_mib=64,
        private_mib=24,
        load=50,
        userland=False,
        properties={"scope": scope, **FULL_SPEED},
    )
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def pages_saved(guest: Guest) -> int:
    """Pages merged or given back, by the engine's own count."""
    stats = guest.backend_stats()
    return int(stats["pages-sharing"]) + int(stats["zero-pages"])


def wait_merged(guest: Guest, pages: int = 1000) -> None:
    guest.wait_for("merged pages", lambda: pages_saved(guest) >= pages, 300)


@pytest.fixture(scope="module")
def merged(image: Path, scope_vm: str) -> Iterator[Guest]:
    """A guest with memory that is merged, and more being merged.

    Booted once: each test leaves it running and intact.
    """
    with Guest(spec_of(scope_vm, userland=True), image) as guest:
        guest.ram()
        guest.wait_ready()
        guest.command("alloc 24 pattern")
        wait_merged(guest)
        yield guest


def churn(guest: Guest, seconds: float) -> None:
    """The guest takes, writes and frees memory, verifies and reads disks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        guest.command("alloc 8 zero")
        guest.command("alloc 8 pattern")
        guest.command("alloc 4 random")
        guest.command("verify")
        guest.command("direct 8")
        guest.command("free 20")
        guest.command("touch 1")
    assert guest.failures == []


def test_everything_at_once(merged: Guest) -> None:
    """Verified all the time while memory comes and goes and DMA runs."""
    churn(merged, 25)
    assert merged.backend_stats()["merged-runs"] > 0
    assert merged.verify() == 0


def helpers(guest: Guest) -> int:
    """Threads of QEMU that help the one that merges."""
    tasks = Path(f"/proc/{guest.pid}/task").glob("*/comm")
    return sum(task.read_text().strip() == "ksm-helper" for task in tasks)


def test_smp(image: Path, scope_vm: str) -> None:
    """Four virtual CPUs at once, multi-threaded TCG or KVM; two threads merge."""
    spec = spec_of(scope_vm, cpus=4, load=100)
    spec.properties |= {"threads": "2", "max-cpu": "200"}
    with Guest(spec, image) as guest:
        guest.wait_ready()
        assert helpers(guest) == 1
        assert guest.state["cpus"] == 4
        guest.command("alloc 16 pattern")
        wait_merged(guest)
        churn(guest, 5)
        assert guest.verify() == 0


@pytest.mark.timeout(0)
def test_soak(
    image: Path, scope_vm: str, pytestconfig: pytest.Config, record_property: Record
) -> None:
    """Half a minute, or half of --soak SECONDS: merged and verified all the while.

    Two virtual CPUs that verify as fast as they can.  In each round memory
    comes that can be merged, is merged, verified, written, and goes; the
    engine is not left to rest.
    """
    spec = spec_of(scope_vm, cpus=2, load=100, memory_mib=384)
    # test_storm, which does this and all else, has twice as long
    end = time.monotonic() + pytestconfig.getoption("--soak") / 2
    rounds = 0
    with Guest(spec, image) as guest:
        guest.wait_ready()
        assert guest.state["cpus"] == 2
        while time.monotonic() < end:
            guest.command("alloc 48 pattern")
            guest.command("alloc 16 zero")
            # a pass begins at once, again and again
            for _ in range(12):
                guest.qmp(
                    "qom-set", path="/objects/ram0", property="max-cpu", value=100
                )
                time.sleep(0.25)
            wait_merged(guest, 40 * 256)
            guest.command("verify")
            churn(guest, 1)
            guest.command("free 64")
            rounds += 1
        assert guest.verify() == 0
        record_property("rounds", rounds)
        record_property("stats", guest.backend_stats())


def test_saves_what_is_equal(merged: Guest) -> None:
    """24 MiB of one pattern become a few pages."""
    merged.wait_for("saving", lambda: pages_saved(merged) >= 22 * 256 or None, 300)
    merged.wait_for(
        "pattern in the pool", lambda: merged.ram_usage().pooled >= 16 << 20, 300
    )
    # one pattern takes a replicated run of 2 MiB, however much there is of it
    assert pool_size(merged.pid) < merged.ram_usage().pooled
    assert merged.verify() == 0


def test_hot_memory_stays_huge(image: Path, scope_vm: str) -> None:
    """Looking at what a guest writes all the time does not split it."""
    hot = 256
    spec = spec_of(scope_vm, memory_mib=384, cache_mib=16, private_mib=hot, load=0)
    spec.properties["run"] = "off"
    with Guest(spec, image) as guest:
        guest.wait_ready()
        with ThreadPoolExecutor() as beside:
            writes = beside.submit(guest.command, "rewrite 20")
            time.sleep(2)
            before = guest.memory().anon_huge >> 20
            guest.qmp("qom-set", path="/objects/ram0", property="run", value=True)
            wait_merged(guest, 100)
            time.sleep(10)
            after = guest.memory().anon_huge >> 20
            assert not writes.done()
            writes.result()
        if before < hot:
            pytest.skip(f"only {before} MiB of the guest are in huge pages")
        assert after >= 0.9 * hot
        assert guest.verify() == 0


def test_stop_cont_reset(image: Path, scope_vm: str) -> None:
    with Guest(spec_of(scope_vm, reboot=True), image) as guest:
        guest.wait_ready()
        wait_merged(guest)
        for _ in range(10):
            guest.qmp("stop")
            time.sleep(0.05)
            guest.qmp("cont")
        assert guest.verify() == 0
        # once before it has come far
        guest.qmp("system_reset")
        time.sleep(1)
        guest.events.clear()
        guest.qmp("system_reset")
        guest.wait_ready()
        guest.command("alloc 8 pattern")
        wait_merged(guest)
        assert guest.verify() == 0
        assert guest.quit() == 0


def test_run_off_and_on(merged: Guest) -> None:
    """What is merged stays merged; nothing new comes."""
    merged.qmp("qom-set", path="/objects/ram0", property="run", value=False)
    merged.wait_for("state off", lambda: merged.backend_stats()["state"] == "off", 60)
    runs = merged.backend_stats()["merged-runs"]
    assert runs > 0
    merged.command("alloc 8 pattern")
    time.sleep(1)
    assert merged.backend_stats()["merged-runs"] <= runs
    assert merged.verify() == 0
    merged.qmp("qom-set", path="/objects/ram0", property="run", value=True)
    merged.wait_for(
        "merging again",
        lambda: merged.backend_stats()["state"] in ("active", "idle"),
        60,
    )
    assert merged.verify() == 0


def test_quit_in_the_middle(image: Path, scope_vm: str) -> None:
    with Guest(spec_of(scope_vm), image) as guest:
        guest.wait_for("merging", lambda: pages_saved(guest) > 0, 300, step=0.02)
        assert guest.quit() == 0


def test_migration_to_plain_memory_and_back(image: Path, scope_vm: str) -> None:
    """Merging ends while memory is sent, and begins where it has arrived."""
    plain = spec_of(
        scope_vm,
        incoming=True,
        backend="memory-backend-ram",
        properties={},
        name="plain",
    )
    with (
        Guest(spec_of(scope_vm, name="first"), image) as first,
        Guest(plain, image) as second,
        Guest(spec_of(scope_vm, name="third", incoming=True), image) as third,
    ):
        first.wait_ready()
        first.command("alloc 24 pattern")
        wait_merged(first)
        migrate(first, second)
        first.stop()
        assert second.verify() == 0
        migrate(second, third)
        second.stop()
        wait_merged(third)
        assert third.verify() == 0


def test_savevm_loadvm(image: Path, scope_vm: str, tmp_path: Path) -> None:
    """A snapshot taken while merging holds the guest's memory, whole."""
    disk = tmp_path / "state.qcow2"
    with Guest(spec_of(scope_vm), image) as guest:
        guest.wait_ready()
        guest.command("alloc 16 pattern")
        wait_merged(guest)
        disk.write_bytes(b"")
        try:
            guest.qmp(
                "blockdev-create",
                job_id="create",
                options={
                    "driver": "file",
                    "filename": str(disk),
                    "size": 0,
                },
            )
        except Exception as error:
            pytest.skip(f"no blockdev-create here: {error}")

        def job_over() -> bool:
            jobs = guest.qmp("query-jobs")
            return bool(jobs and jobs[0]["status"] == "concluded")

        guest.wait_for("the job's end", job_over, 60)
        guest.qmp("job-dismiss", id="create")
        guest.qmp("blockdev-add", driver="file", node_name="file0", filename=str(disk))
        try:
            guest.qmp(
                "blockdev-create",
                job_id="format",
                options={"driver": "qcow2", "file": "file0", "size": 1 << 20},
            )
        except Exception as error:
            pytest.skip(f"this QEMU has no qcow2: {error}")
        guest.wait_for("the job's end", job_over, 60)
        assert "error" not in guest.qmp("query-jobs")[0]
        guest.qmp("job-dismiss", id="format")
        guest.qmp("blockdev-add", driver="qcow2", node_name="state", file="file0")

        for job, command in (("save", "snapshot-save"), ("load", "snapshot-load")):
            guest.qmp(
                command, job_id=job, tag="one", vmstate="state", devices=["state"]
            )
            guest.wait_for("the job's end", job_over, 300)
            info = guest.qmp("query-jobs")[0]
            assert "error" not in info, info
            guest.qmp("job-dismiss", id=job)
            if job == "save":
                churn(guest, 2)
        guest.qmp("cont")
        # the guest goes on from where it was saved, with what it had then
        assert guest.verify() == 0
        wait_merged(guest)
        assert guest.verify() == 0


def test_dump_and_gdb_style_reads(merged: Guest, tmp_path: Path) -> None:
    """Memory reads the same to everyone while it is merged."""
    merged.qmp("stop")
    first, second = tmp_path / "first", tmp_path / "second"
    start = merged.arch.ram_start
    merged.qmp("pmemsave", val=start, size=256 << 20, filename=str(first))
    time.sleep(3)
    merged.qmp("pmemsave", val=start, size=256 << 20, filename=str(second))
    assert first.read_bytes() == second.read_bytes()
    try:
        merged.qmp("dump-guest-memory", paging=False, protocol=f"file:{tmp_path}/dump")
        assert (tmp_path / "dump").stat().st_size >= 256 << 20
    except Exception as error:
        assert "not" in str(error).lower(), error
    merged.qmp("cont")
    assert merged.verify() == 0


def test_unprivileged_user_and_sandbox(image: Path, scope_vm: str, root: None) -> None:
    """Merges where userfaultfd is allowed; runs and says why where not."""
    sandbox = (
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    )
    spec = spec_of(scope_vm, user="65534", extra=sandbox)
    spec.properties["threads"] = "2"
    try:
        with Guest(spec, image) as guest:
            guest.wait_ready()
            stats = guest.backend_stats()
            if stats["state"] == "inhibited":
                assert stats["reasons"]
            else:
                wait_merged(guest, 100)
                assert helpers(guest) == 1
            assert guest.verify() == 0
    except GuestError as error:
        # refused at creation: then it names what is missing
        assert "userfaultfd" in str(error), error


def test_zero_scope(image: Path, scope_vm: str) -> None:
    """Only zero pages go, and they go to the host."""
    with Guest(spec_of("zero"), image) as guest:
        guest.ram()
        guest.wait_ready()
        guest.command("alloc 32 zero")
        guest.wait_for(
            "zero pages given back",
            lambda: guest.backend_stats()["zero-pages"] >= 28 * 256,
            300,
        )
        stats = guest.backend_stats()
        assert stats["pages-sharing"] == 0
        assert guest.ram_usage().pooled == 0
        assert guest.verify() == 0
