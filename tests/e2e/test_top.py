# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/ksm-top beside real guests, a real daemon and the real ksmd.

Its figures are compared with query-ksm-stats of each guest, with ksm-poold
--status, and with what the kernel says of the processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_guest import FAST, small
from test_scope_group import group_spec, wait_shared

from guest.qemu import Guest, GuestSpec
from host import ksmsys
from host.paths import TOP
from host.poold import Poold

pytestmark = pytest.mark.timeout(900)

PAGE = 4096
CHUNK = 2 << 20
#: Other guests of the host may be those of another run.
ONE, TWO, PLAIN = (f"{name}-{os.getpid()}" for name in ("top1", "top2", "plain"))
BOTH = f"top?-{os.getpid()}"
#: As when typed: Debian's Python, not that of the tests.
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
ENV["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def ksm_top(*words: str | Path) -> str:
    done = subprocess.run(
        [TOP / "scripts/ksm-top", *words],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_socket(spec: GuestSpec, directory: Path) -> GuestSpec:
    """A QMP socket beside that of the harness."""
    path = directory / spec.name
    spec.extra = [*spec.extra, "-qmp", f"unix:{path},server=on,wait=off"]
    return spec


@pytest.fixture
def daemon(image: Path, scope_vm: str) -> Iterator[Poold]:
    with Poold() as daemon:
        yield daemon


@pytest.fixture
def pair(image: Path, daemon: Poold, tmp_path: Path) -> Iterator[list[Guest]]:
    """Two members that share, and stand still."""
    with ExitStack() as stack:
        specs = [
            group_spec(daemon, name, seed=n) for n, name in enumerate((ONE, TWO), 1)
        ]
        guests = []
        for spec in specs:
            guests.append(
                stack.enter_context(Guest(with_socket(spec, tmp_path), image))
            )
            guests[-1].ram()
        for guest in guests:
            guest.wait_ready()
            guest.command("alloc 8 pattern")
        for guest in guests:
            wait_shared(guest)
            guest.wait_for("a group of two", lambda g=guest: members(g) == 2, 60)
            guest.qmp("stop")
        yield guests


def members(guest: Guest) -> int:
    return int(guest.backend_stats()["group"].get("members", 0))


def expected(guest: Guest, stats: dict[str, Any]) -> dict[str, Any]:
    """A guest's figures, from its own words."""
    (one,) = stats["backends"]
    times = ("scan-time", "merge-time", "log-time")
    first = one["reasons"][0]["kind"] if one["reasons"] else None
    saved = one["pages-sharing"] + one["zero-pages"] + one["group"]["saved"]
    return {
        "pid": guest.pid,
        "state": one["state"],
        "scope": "group",
        "reason": first,
        "size": guest.spec.memory_mib << 20,
        "resident": one["resident"],
        "own": (one["pages-sharing"] + one["zero-pages"]) * PAGE,
        "group": one["group"]["saved"] * PAGE,
        "kernel": 0,
        "cpu": sum(one.get(name, 0) for name in times) / 1e9,
        "metadata": one["metadata"],
        "page_tables": one["page-tables"],
        "profit": saved * PAGE - one["metadata"] - one["page-tables"],
        "stalls": one["stall"]["count"],
        "p50": one["stall"]["p50"] / 1e9,
        "p99": one["stall"]["p99"] / 1e9,
        "max": one["stall"]["max"] / 1e9,
        "name": "tenant",
        "connected": one["group"]["connected"],
        "members": one["group"]["members"],
    }


def shown(guest: dict[str, Any]) -> dict[str, Any]:
    """The same, from the program."""
    assert guest["saved"]["total"] == sum(
        guest["saved"][by] for by in ("own", "group", "kernel")
    )
    names = ("pid", "state", "scope", "size", "resident", "profit")
    found = {name: guest[name] for name in names}
    found |= {name: guest["saved"][name] for name in ("own", "group", "kernel")}
    found |= {name: guest["cost"][name] for name in ("metadata", "page_tables")}
    found["reason"] = guest["reasons"][0]["kind"] if guest["reasons"] else None
    found["cpu"] = guest["cost"]["cpu_seconds"]
    found["stalls"] = guest["stall"]["count"]
    found |= {name: guest["stall"][name] for name in ("p50", "p99", "max")}
    found |= {name: guest["group"][name] for name in ("name", "connected", "members")}
    return found


def by_name(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {guest["name"]: guest for guest in snapshot["guests"]}


def look(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ksm_top("--json", "--limit", "20", *words))
    return found


def test_figures_are_the_guests(
    knobs: ksmsys.KsmKnobs, pair: list[Guest], daemon: Poold
) -> None:
    """To the byte, while nothing moves: neither they, the daemon nor ksmd."""
    for one in pair:
        one.qmp("qom-set", path="/objects/ram0", property="run", value=False)
    figures, status, snapshot = look_at_rest(pair, daemon)
    found = by_name(snapshot)
    for one in pair:
        name = one.spec.name
        assert shown(found[name]) == figures[name]
        assert found[name]["saved"]["own"] > 1000 * PAGE
        assert found[name]["saved"]["group"] > 1000 * PAGE
    check_pool(snapshot, daemon, status, pair)
    check_total(snapshot)


def look_at_rest(
    pair: list[Guest], daemon: Poold
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What guests and daemon say, and what is shown, when nothing moves.

    What a guest knows of its group may be a minute old, and the daemon's tables
    shrink after a while; khugepaged makes memory resident around a stopped guest.
    """
    for _ in range(240):
        before = said(pair, daemon)
        snapshot = look("--pool", str(daemon.socket))
        if before == said(pair, daemon) and agree(pair, *before):
            return *before, snapshot
        time.sleep(0.5)
    raise AssertionError(f"they never rest, or never agree: {before}")


def said(pair: list[Guest], daemon: Poold) -> tuple[dict[str, Any], dict[str, Any]]:
    status = daemon.status()
    for name in ("cpu_ns", "uptime"):
        del status[name]
    return {g.spec.name: expected(g, g.ksm_stats()) for g in pair}, status


def agree(pair: list[Guest], figures: dict[str, Any], status: dict[str, Any]) -> bool:
    """Do the guests know their memory as the kernel has it, and what they
    save as the daemon has it?"""
    for guest in pair:
        if figures[guest.spec.name]["resident"] != guest.ram_usage().resident:
            return False
    shared = sum(int(guest.backend_stats()["group"]["saved"]) for guest in pair)
    saved = sum(member["held"] for member in status["members"]) - status["used"]
    return abs(shared - saved) <= 0.02 * saved and books_agree(pair, shared, status)


def books_agree(pair: list[Guest], shared: int, status: dict[str, Any]) -> bool:
    """Have the guests found all merged pages that were written?

    They look for them by turns, and seldom while nothing is merged.
    """
    stats = [guest.backend_stats() for guest in pair]
    inside = sum(one["pages-sharing"] for one in stats)
    mapped = sum(guest.ram_usage().mapped for guest in pair) // PAGE
    return abs(inside + shared - (mapped - status["used"])) <= 0.03 * mapped


def check_pool(
    snapshot: dict[str, Any], daemon: Poold, status: dict[str, Any], pair: list[Guest]
) -> None:
    (pool,) = [p for p in snapshot["pools"] if p["socket"] == str(daemon.socket)]
    assert pool["state"] == "up"
    for name in ("generation", "metadata"):
        assert pool[name] == status[name]
    assert pool["used"] == status["used"] * PAGE
    assert pool["limit"] == status["slots"] * PAGE
    assert 0 < pool["cpu_seconds"] <= daemon.status()["cpu_ns"] / 1e9
    told = {each["pid"]: each for each in status["members"]}
    assert sorted(told) == sorted(guest.pid for guest in pair)
    for member in pool["members"]:
        assert member["held"] == told[member["pid"]]["held"] * PAGE
        assert member["connected"]
    # what the kernel says of the pool's memory and of its mappings
    assert pool["used"] == pytest.approx(daemon.pool_bytes(), rel=0.05)
    found = by_name(snapshot)
    mine = [found[guest.spec.name] for guest in pair]
    shared = sum(guest["saved"]["group"] for guest in mine)
    assert shared == pytest.approx(pool["saved"], rel=0.05)
    zeroes = sum(guest.backend_stats()["zero-pages"] for guest in pair) * PAGE
    inside = sum(guest["saved"]["own"] for guest in mine) - zeroes
    mapped = sum(guest.ram_usage().mapped for guest in pair)
    assert inside + shared == pytest.approx(mapped - pool["used"], rel=0.05)


def check_total(snapshot: dict[str, Any]) -> None:
    guests, total = snapshot["guests"], snapshot["total"]
    tables = sum(pool["metadata"] or 0 for pool in snapshot["pools"])
    assert total["guests"] == len(guests)
    for by in ("own", "group", "kernel", "total"):
        assert total["saved"][by] == sum(guest["saved"][by] or 0 for guest in guests)
    assert total["profit"] == sum(guest["profit"] or 0 for guest in guests) - tables


def test_guests_that_do_not_answer(pair: list[Guest], tmp_path: Path) -> None:
    one, other = pair
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / ONE))
        assert client.recv(1 << 16)
        found = by_name(look())
        assert (found[ONE]["state"], found[TWO]["saved"]["own"] > 0) == (
            "busy",
            True,
        )
        # of the whole process, and it is not nothing
        assert found[ONE]["resident"] > 64 << 20
    one.wait_for("a free monitor", lambda: state(ONE) not in ("busy", "silent"), 20)
    os.kill(one.pid, signal.SIGSTOP)
    assert state(ONE) == "stopped" and state(TWO) not in ("busy", "silent")
    os.kill(one.pid, signal.SIGCONT)
    assert state(ONE) not in ("stopped", "gone")
    one.stop()
    assert ONE not in by_name(look())


def state(name: str) -> str:
    return str(by_name(look())[name]["state"])


def metrics(path: Path) -> dict[tuple[str, ...], float]:
    ksm_top("--openmetrics", path)
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_daemon_dies(pair: list[Guest], daemon: Poold, tmp_path: Path) -> None:
    """What the alerts look at."""
    path, where = tmp_path / "qemu_ksm.prom", str(daemon.socket)
    found = metrics(path)
    group = daemon.socket.stem
    assert found["qemu_ksm_pool_up", where, group] == 1
    assert found["qemu_ksm_domain_group_connected", "tenant", ONE] == 1
    saved = found["qemu_ksm_domain_saved_bytes", "group", ONE]
    assert saved == pair[0].backend_stats()["group"]["saved"] * PAGE
    daemon.stop(signal.SIGKILL)
    pair[0].wait_for(
        "no daemon", lambda: not pair[0].backend_stats()["group"]["connected"], 60
    )
    found = metrics(path)
    # the guests' command lines name its socket
    assert found["qemu_ksm_pool_up", where, group] == 0
    assert found["qemu_ksm_domain_group_connected", "tenant", ONE] == 0
    assert found["qemu_ksm_domain_reason", "no-daemon", ONE] == 1


def test_plain_guest_and_ksmd(
    image: Path, knobs: ksmsys.KsmKnobs, tmp_path: Path
) -> None:
    """A guest with no object of ours, that the kernel merges."""
    spec = with_socket(small(name=PLAIN, backend=None), tmp_path)
    with Guest(spec, image) as guest:
        guest.wait_ready()
        knobs.set(**FAST)
        knobs.set(run=1)
        guest.wait_for("merged pages", lambda: guest.memory().ksm_merged > 2000, 300)
        knobs.set(run=0)
        guest.qmp("stop")
        snapshot = look()
        found, memory = by_name(snapshot)[PLAIN], guest.memory()
        assert (found["state"], found["scope"]) == ("plain", None)
        assert found["resident"] == pytest.approx(memory.resident, rel=0.02)
        assert found["saved"]["own"] is None and found["saved"]["group"] is None
        # of all merged pages of the host so many are saved
        shared, saved = ksmsys.read("pages_shared"), ksmsys.read("pages_sharing")
        assert shared and saved
        part = memory.ksm_merged * saved / (saved + shared) * PAGE + memory.ksm_zero
        assert found["saved"]["kernel"] == pytest.approx(part, rel=0.02)
        tracked = memory.ksm_rmap_items * 64
        assert found["cost"]["metadata"] == tracked
        assert found["profit"] == found["saved"]["kernel"] - tracked
        kernel = snapshot["kernel"]
        assert (kernel["running"], kernel["saved"]) == (False, saved * PAGE)
        assert kernel["cpu_seconds"] == pytest.approx(ksmsys.ksmd_cpu_s(), rel=0.01)


def contents(guest: Guest) -> set[bytes]:
    """Of all of its pages, but for zeroes."""
    start, end = guest.ram()
    found = set()
    with open(f"/proc/{guest.pid}/mem", "rb", buffering=0) as memory:
        for at in range(start, end, CHUNK):
            memory.seek(at)
            data = memory.read(CHUNK)
            for page in range(0, len(data), PAGE):
                one = data[page : page + PAGE]
                if any(one):
                    found.add(hashlib.blake2b(one, digest_size=16).digest())
    return found


def unknown(guest: Guest) -> int:
    """Pages that were not looked at since they were written."""
    reasons = guest.backend_stats()["reasons"]
    kinds = ("volatile", "not-scanned")
    return sum(int(each["pages"]) for each in reasons if each["kind"] in kinds)


def test_similar_guests(pair: list[Guest], daemon: Poold) -> None:
    """The estimate against a count of every page."""
    for one in pair:
        one.wait_for("all is known", lambda g=one: unknown(g) < 100, 120)
    pages = [contents(one) for one in pair]
    both = len(pages[0] & pages[1])
    (found,) = json.loads(ksm_top("--json", "--similar", BOTH))["pairs"]
    # four standard deviations, or nearly
    assert found["shared"] / PAGE == pytest.approx(both, rel=0.15)
    for known, one in zip(pages, look("--sketch", BOTH)["guests"], strict=True):
        assert one["sketch"]["contents"] == pytest.approx(len(known), rel=0.125)
