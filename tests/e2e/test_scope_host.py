# SPDX-License-Identifier: GPL-2.0-or-later
"""Real guests with scope=host: the host's group, and ksmd for what stands alone.

Without a daemon the kernel does it all: test_guest.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from test_hostd import wait
from test_scope_group import boot, kinds, pooled, wait_shared
from test_scope_vm import churn, spec_of
from test_top import PAGE, by_name, look, with_socket

from guest.qemu import Guest, GuestError, GuestSpec, need_qemu
from host import ksmsys
from host.hostd import Hostd
from host.ksm_guard import guard
from host.poold import Poold

pytestmark = pytest.mark.timeout(900)

KNOBS = ("run", "sleep_millisecs", "pages_to_scan")
#: QEMU keeps 6100 of these for itself: enough for all runs that a guest has merged
#: when it is ready, not for each page that stands alone
MAPPINGS = 7200
#: pages of a guest that ksmd merges then, of some 1500 at most: others are merged
#: with the pool.  A chunk that one guest gave before the other did is tried again
#: after two minutes
SOME = 60
FAST = {"pages_to_scan": 20000, "sleep_millisecs": 10, "smart_scan": 0}


def host_spec(daemon: Poold, name: str, seed: int) -> GuestSpec:
    spec = spec_of("host", name=name, seed=seed)
    spec.properties["group-socket"] = str(daemon.socket)
    return spec


def need_mappings() -> None:
    """Whoever has as many as that already could not go on."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            many = len(maps.read_bytes().splitlines())
        except OSError:
            continue
        if many > MAPPINGS // 2:
            pytest.skip(f"{maps.parent} has {many} mappings, to be limited")


def leave_some(guests: list[Guest]) -> None:
    """Memory with pages that stand alone, and no mappings for them.

    With mappings the engine merges them itself where they are cold.  They are not
    written any more: what each guest writes anew differs.
    """
    for guest in guests:
        guest.command("alloc 24 alone")
    for guest in guests:
        guest.command("load 0")


def by_kernel(guest: Guest) -> int:
    return int(guest.backend_stats()["kernel-pages"])


def left(guest: Guest) -> int:
    return int(guest.backend_stats()["kernel-left"])


def test_ours_first_then_the_kernel(image: Path, scope_vm: str) -> None:
    """The pool has most, ksmd gets the rest, and only that."""
    reason = ksmsys.why_not_controllable()
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:
        stack.enter_context(guard())
        knobs = stack.enter_context(ksmsys.KsmKnobs())
        need_mappings()
        knobs.set(run=0, max_map_count=MAPPINGS)
        daemon = stack.enter_context(Poold())
        guests = [
            boot(stack, image, host_spec(daemon, f"guest{i}", i + 1)) for i in range(2)
        ]
        for guest in guests:
            guest.wait_ready()
        leave_some(guests)
        for guest in guests:
            wait_shared(guest)
            guest.wait_for("something given to ksmd", lambda g=guest: left(g) > 0, 120)
            # as it was before: the kernel has merged nothing, nor all been given
            assert by_kernel(guest) == 0
            assert left(guest) < guest.spec.memory_mib << 20
            assert guest.memory().ksm_merged == 0
        assert guests[0].backend_stats()["group"]["name"] == "host"
        for name, value in FAST.items():
            if ksmsys.read(name) is not None:
                knobs.set(**{name: value})
        knobs.set(run=1)
        for guest in guests:
            guest.wait_for("merged by ksmd", lambda g=guest: by_kernel(g) > 0, 120)
            assert "merged by ksmd" in guest.hmp("info ksm")
            assert "pinned" not in kinds(guest)
        for guest in guests:
            churn(guest, 4)
        for guest in guests:
            assert guest.verify() == 0
        # all of one guest's memory is its own again, the kernel's part too
        guests[0].qmp("qom-set", path="/objects/ram0", property="run", value=False)
        guests[0].qmp("ksm-unmerge", id="ram0")
        assert pooled(guests[0]) == 0
        guests[0].wait_for("nothing of ksmd's", lambda: by_kernel(guests[0]) == 0, 60)
        assert left(guests[0]) == 0
        for guest in guests:
            assert guest.verify() == 0


def profit_is_right(guest: Guest) -> bool:
    """ksmd's saving is in it once, although QEMU's own profit has it, too."""
    found = by_name(look())[guest.spec.name]
    one, kernel = guest.backend_stats(), found["saved"]["kernel"]
    ours = one["pages-sharing"] + one["zero-pages"] + one["group"]["saved"]
    costs = found["cost"]["metadata"] + one["page-tables"]
    # twice or not at all is more than half of it away
    return abs(found["profit"] - (ours * PAGE + kernel - costs)) < kernel / 2


def test_driven(image: Path, scope_vm: str, tmp_path: Path) -> None:
    """ksm-hostd runs ksmd for what is left, and not longer."""
    reason = ksmsys.why_not_controllable()
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:
        stack.enter_context(guard())
        knobs = stack.enter_context(ksmsys.KsmKnobs())
        need_mappings()
        knobs.set(run=0, max_map_count=MAPPINGS)
        found = {name: ksmsys.read(name) for name in KNOBS}
        daemon = stack.enter_context(Poold())
        hostd = stack.enter_context(Hostd(daemon.socket, "--max-cpu", "100"))
        # before there are guests: they leave something two seconds after their boot
        wait(lambda: hostd.status().get("state") == "rests")
        assert ksmsys.read("run") == 0
        specs = [host_spec(daemon, f"driven{i}", i + 1) for i in range(2)]
        guests = [boot(stack, image, with_socket(each, tmp_path)) for each in specs]
        for guest in guests:
            guest.wait_ready()
        leave_some(guests)
        try:
            guests[0].wait_for(
                "merged by ksmd", lambda: all(by_kernel(g) >= SOME for g in guests), 300
            )
        except GuestError as error:
            # was nothing left, or was it not driven?
            said = [each.backend_stats() for each in guests]
            raise AssertionError(
                f"{hostd.status()}, {daemon.status()}, {said}"
            ) from error
        status = daemon.status()
        assert status["left"] == sum(each["left"] for each in status["members"]) > 0
        assert status["left_merged"] > 0

        def rests() -> bool:
            knobs = {name: ksmsys.read(name) for name in KNOBS}
            return hostd.status()["state"] == "rests" and found == knobs

        # it may have been begun again, for what was given meanwhile
        guests[0].wait_for("ksmd stopped", rests, 60)
        for guest in guests:
            # the figures are told at different times: not while they change
            guest.wait_for("its profit", lambda g=guest: profit_is_right(g), 120)
            assert guest.verify() == 0


def test_without_daemon(image: Path, scope_vm: str, tmp_path: Path) -> None:
    """The kernel does it all, and tunables of the engine are refused."""
    spec = spec_of("host")
    spec.properties = {"scope": "host", "group-socket": str(tmp_path / "none")}
    with Guest(spec, image) as guest:
        guest.wait_ready()
        stats = guest.backend_stats()
        assert "group" not in stats and "kernel-left" not in stats


def test_may_not_connect() -> None:
    """A daemon is there, and not for us: the kernel merges, and QEMU says why."""
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    with TemporaryDirectory() as place, Poold(socket=Path(place) / "host.sock") as pool:
        # where another user may look
        Path(place).chmod(0o755)
        qemu = shutil.copy(need_qemu(), place)
        ram = f"memory-backend-ksm,id=ram0,size=16M,group-socket={pool.socket}"
        words = [qemu, "-machine", "none", "-qmp", "stdio", "-object", ram]
        asked = ("qmp_capabilities", "query-ksm-stats", "quit")
        done = subprocess.run(
            [*nobody, *words],
            input="".join(json.dumps({"execute": name}) for name in asked),
            capture_output=True,
            text=True,
            timeout=60,
        )
        tuned = [*words[:-1], f"{ram},max-cpu=5"]
        refused = subprocess.run([*nobody, *tuned], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    (backend,) = next(
        answer["return"]["backends"]
        for answer in answers
        if "backends" in answer.get("return", {})
    )
    found = [reason for reason in backend["reasons"] if "socket's" in reason["text"]]
    assert [reason["kind"] for reason in found] == ["not-permitted"]
    assert "may not connect" in done.stderr
    assert refused.returncode == 1
    assert "where the kernel merges" in refused.stderr
    assert "may not connect" in refused.stderr
