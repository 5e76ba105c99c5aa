# SPDX-License-Identifier: GPL-2.0-or-later
"""Real guests that share one pool (scope=group), beside all that can happen.

Guests are killed, migrate and change their memory, and the daemon comes and
goes; at the end each guest verifies every page and every file.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_scope_vm import churn, pages_saved, spec_of, wait_merged

from guest.qemu import Guest, GuestSpec, migrate
from host.poold import Poold

pytestmark = pytest.mark.timeout(900)

GUESTS = 3


def group_spec(daemon: Poold, name: str = "guest", **changes: object) -> GuestSpec:
    spec = spec_of("group", name=name, **changes)
    spec.properties |= {"group": "tenant", "group-socket": str(daemon.socket)}
    return spec


@pytest.fixture
def daemon(image: Path, scope_vm: str) -> Iterator[Poold]:
    with Poold() as daemon:
        yield daemon


def boot(stack: ExitStack, image: Path, spec: GuestSpec) -> Guest:
    guest = stack.enter_context(Guest(spec, image))
    # asked before merging begins
    guest.ram()
    return guest


def start(stack: ExitStack, image: Path, daemon: Poold) -> list[Guest]:
    """Guests that have the same files, and seconds of merging behind them."""
    guests = [
        boot(stack, image, group_spec(daemon, f"guest{i}", seed=i + 1))
        for i in range(GUESTS)
    ]
    for guest in guests:
        guest.wait_ready()
    for guest in guests:
        wait_shared(guest)
    return guests


def pooled(guest: Guest) -> int:
    return guest.ram_usage().pooled


def wait_shared(guest: Guest, mib: int = 48) -> None:
    guest.wait_for(
        f"{mib} MiB of the pool mapped", lambda: pooled(guest) >= mib << 20, 120
    )


def group_of(guest: Guest, members: int) -> dict[str, object]:
    """Its group, once the daemon has told of so many, and what they share.

    It is asked every 10 s, first while the guest boots.
    """

    def told() -> dict[str, object] | None:
        group: dict[str, object] = guest.backend_stats()["group"]
        return group if group.get("members") == members and group["share"] else None

    return guest.wait_for(f"a group of {members}", told, 60)


def kinds(guest: Guest) -> set[str]:
    return {reason["kind"] for reason in guest.backend_stats()["reasons"]}


def test_guests_share(image: Path, daemon: Poold) -> None:
    """What is equal across guests is there once, and stays right."""
    with ExitStack() as stack:
        guests = start(stack, image, daemon)
        mapped = sum(pooled(guest) for guest in guests)
        assert daemon.pool_bytes() < mapped // 2
        group = group_of(guests[0], GUESTS)
        assert group["connected"] and group["name"] == "tenant"
        assert 0 < int(str(group["share"])) < int(str(group["held"]))
        assert "saved with others" in guests[0].hmp("info ksm")
        for guest in guests:
            churn(guest, 4)
        # one is killed while it maps what the others map, too
        guests[0].stop()
        for guest in guests[1:]:
            assert guest.verify() == 0
        assert len(daemon.status()["members"]) == GUESTS - 1
        # all of one guest's memory is its own again
        one = guests[1]
        one.qmp("qom-set", path="/objects/ram0", property="run", value=False)
        one.qmp("ksm-unmerge", id="ram0")
        assert (
            pooled(one) == 0 and pages_saved(one) == one.backend_stats()["zero-pages"]
        )
        for guest in guests[1:]:
            assert guest.verify() == 0
    # the last member has left
    assert daemon_empties(daemon)


def daemon_empties(daemon: Poold) -> bool:
    for _ in range(100):
        if daemon.pool_bytes() == 0:
            return True
        time.sleep(0.1)
    return False


def held(daemon: Poold) -> int:
    return sum(int(member["held"]) for member in daemon.status()["members"])


def test_daemon_comes_and_goes(image: Path, daemon: Poold) -> None:
    daemon.stop()
    with ExitStack() as stack:
        guest = boot(stack, image, group_spec(daemon))
        guest.wait_ready()
        stats = guest.backend_stats()
        assert stats["state"] == "inhibited"
        assert "no-daemon" in kinds(guest)
        assert not stats["group"]["connected"]
        guest.wait_for(
            "zero pages given back",
            lambda: guest.backend_stats()["zero-pages"] > 1000,
            60,
        )
        daemon.start()
        other = boot(stack, image, group_spec(daemon, "other", seed=2))
        other.wait_ready()
        both = (guest, other)
        for each in both:
            wait_shared(each)
            assert "no-daemon" not in kinds(each)
        generation = int(group_of(guest, 2)["generation"])
        before = held(daemon)
        for how in (signal.SIGKILL, signal.SIGTERM):
            daemon.stop(how)
            for each in both:
                churn(each, 1)
                # what is mapped stays
                assert pooled(each) >= 16 << 20
            guest.wait_for("no daemon", lambda: "no-daemon" in kinds(guest), 30)
            daemon.start()
            guest.wait_for(
                "another generation",
                lambda g=generation: guest.backend_stats()["group"]["generation"] != g,
                60,
            )
            generation = int(guest.backend_stats()["group"]["generation"])
            for each in both:
                each.command("alloc 16 pattern")
                assert each.verify() == 0
        # what was merged before either follows, as does what is merged since
        guest.wait_for("all in the new pool", lambda: held(daemon) > before * 0.8, 120)
        # the daemon's figures are some seconds old
        guest.wait_for(
            "a pool that both share",
            lambda: daemon.pool_bytes() < held(daemon) * 4096 * 0.75,
            30,
        )


def test_migration(image: Path, daemon: Poold) -> None:
    """The pool has its content: an incoming guest is merged in seconds."""
    with ExitStack() as stack:
        guests = start(stack, image, daemon)
        target = stack.enter_context(
            Guest(group_spec(daemon, "target", incoming=True), image)
        )
        migrate(guests[0], target)
        guests[0].stop()
        target.wait_for("pages merged again", lambda: pages_saved(target) > 2000, 30)
        churn(target, 3)
        for guest in (target, *guests[1:]):
            assert guest.verify() == 0


def test_two_groups(image: Path, daemon: Poold) -> None:
    """Equal content of two groups is there twice."""
    with Poold() as second, ExitStack() as stack:
        pair = [
            boot(stack, image, group_spec(one, f"guest{i}"))
            for i, one in enumerate((daemon, second))
        ]
        for guest in pair:
            guest.wait_ready()
            guest.command("alloc 8 pattern")
            wait_merged(guest)
            group_of(guest, 1)
        # a pattern, and what a guest has twice; not what the other has
        for guest in pair:
            assert guest.verify() == 0
            assert pooled(guest) < 40 << 20
