# SPDX-License-Identifier: GPL-2.0-or-later
"""Figures of a guest, against what was worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes import BACKEND, older, stats

from host.paths import TOP
from top import figures, model
from top.model import Guest, Kernel, Pool
from top.procfs import KsmStat


def filled(*backends: dict[str, Any], **more: Any) -> Guest:
    guest = Guest("one", resident=900_000_000)
    stat = figures.fill(guest, stats(*backends, **more))
    figures.fill_kernel(guest, stat, Kernel(saved=0, shared=0))
    return guest


def test_group() -> None:
    guest = filled(BACKEND)
    assert (guest.state, guest.scope, guest.size) == ("active", "group", 536870912)
    assert guest.resident == 400_000_000
    assert guest.saved.own == 2700 * 4096
    assert guest.saved.group == 1300 * 4096
    assert guest.saved.kernel == 0
    assert guest.saved.total == 4000 * 4096
    assert guest.cost.cpu_seconds == pytest.approx(1.8)
    assert (guest.cost.metadata, guest.cost.page_tables) == (2_100_000, 310_000)
    assert guest.profit == 4000 * 4096 - 2_410_000
    assert guest.stall is not None and guest.stall.count == 321
    assert guest.stall.p99 == pytest.approx(0.00087)
    assert guest.stall.max == pytest.approx(0.0024)
    assert guest.group is not None and guest.group.connected
    assert (guest.group.name, guest.group.members) == ("tenant", 2)
    assert [(r.kind, r.bytes) for r in guest.reasons] == [
        ("volatile", 40960),
        ("vma-limit", 256 * 4096),
    ]


def test_two_objects() -> None:
    """What is the engine's counts once, what is an object's is added up."""
    other = BACKEND | {
        "id": "dimm0",
        "state": "inhibited",
        "reasons": [
            {"kind": "inhibited", "text": "a migration runs"},
            {"kind": "vma-limit", "text": "no more mappings", "bytes": 44 * 4096},
        ],
        "zero-bytes": 33 * 4096,
        "resident": 1_000_000,
    }
    guest = filled(BACKEND, other)
    # what needs attention comes first
    assert guest.state == "inhibited"
    assert [(r.kind, r.bytes) for r in guest.reasons] == [
        ("inhibited", None),
        ("vma-limit", 300 * 4096),
        ("volatile", 40960),
    ]
    assert guest.saved.own == (2 * 2000 + 733) * 4096
    assert guest.saved.group == 1300 * 4096
    assert guest.cost.cpu_seconds == pytest.approx(1.8)
    assert guest.cost.metadata == 4_200_000
    assert guest.profit == guest.saved.total - 4_820_000
    assert guest.resident == 401_000_000
    assert guest.stall is not None and guest.stall.count == 321


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("active idle", "active"),
        ("idle off", "idle"),
        ("off active inhibited", "inhibited"),
        ("off off", "off"),
    ],
)
def test_state_of_several(states: str, expected: str) -> None:
    objects = [BACKEND | {"state": state} for state in states.split()]
    assert filled(*objects).state == expected


HOST_OBJECT = {
    "id": "ram0",
    "scope": "host",
    "state": "active",
    "reasons": [],
    "size": 1 << 30,
    "resident": 300_000_000,
    "merged-bytes": 900 * 4096,
}


def test_kernel_shares() -> None:
    """Of 1000 merged pages of the host 750 are saved: so it is with a guest's."""
    process = {
        "rmap-items": 50,
        "merged-bytes": 900 * 4096,
        "zero-bytes": 10 * 4096,
    }
    process["profit"] = 910 * 4096 - 50 * 64
    guest = Guest("one")
    stat = figures.fill(guest, stats(HOST_OBJECT, process=process))
    figures.fill_kernel(guest, stat, Kernel(saved=750 * 4096, shared=250 * 4096))
    assert guest.saved.kernel == (675 + 10) * 4096
    assert guest.saved.total == guest.saved.kernel
    assert guest.saved.own is None and guest.saved.group is None
    assert guest.cost.metadata == 3200
    assert guest.profit == 685 * 4096 - 3200
    assert guest.stall is None and guest.cost.cpu_seconds is None


def test_ours_and_the_kernels() -> None:
    guest = Guest("one")
    figures.fill(guest, stats(BACKEND))
    figures.fill_kernel(guest, KsmStat(100, 0, 6400), Kernel())
    assert guest.saved.total == (2700 + 1300 + 100) * 4096
    assert guest.cost.metadata == 2_106_400
    # ksmd's part counts once
    assert guest.profit == guest.saved.total - 2_106_400 - 310_000


def test_kernels_zero_pages() -> None:
    """Part of what the kernel saves, and no measure for the others."""
    guest = Guest("one")
    kernel = Kernel(saved=1750 * 4096, zero=1000 * 4096, shared=250 * 4096)
    figures.fill_kernel(guest, KsmStat(100, 8, 0), kernel)
    assert guest.saved.kernel == (75 + 8) * 4096


@pytest.mark.parametrize("given", [None, stats()])
def test_plain(given: dict[str, Any] | None) -> None:
    """No such command, or no such object: what the kernel says is left."""
    guest = Guest("one", resident=900_000_000)
    figures.fill(guest, given)
    assert guest.state == "plain" and guest.answered
    figures.fill_kernel(guest, KsmStat(8, 2, 640), Kernel(saved=1, shared=1))
    assert guest.resident == 900_000_000
    assert guest.saved.total == (4 + 2) * 4096
    assert guest.profit == 6 * 4096 - 640


def test_nothing_is_known() -> None:
    guest = Guest("one")
    figures.fill_kernel(guest, None, Kernel())
    assert (guest.saved.total, guest.profit, guest.cost.metadata) == (None, None, None)


def test_no_daemon() -> None:
    group = {"name": "tenant", "connected": False, "generation": 0}
    guest = filled(BACKEND | {"group": group})
    assert guest.saved.group == 0 and guest.group is not None
    assert not guest.group.connected and guest.group.members is None


@pytest.mark.parametrize(
    "broken",
    [
        {"state": "asleep"},
        {"state": None},
        {"scan-time": "long"},
        {"scan-time": 10**400},
        {"size": float("inf")},
        {"size": float("nan")},
        {"zero-bytes": 1 << 64},
        {"stall": BACKEND["stall"] | {"max": 1e999}},  # type: ignore[operator]
        {"group": BACKEND["group"] | {"members": "two"}},  # type: ignore[operator]
        {"reasons": 5},
        {"reasons": [{}]},
        {"stall": {}},
        {"group": 1},
        {"size": []},
    ],
)
def test_odd_answers(broken: dict[str, Any]) -> None:
    """An error that the one who asks expects, not another."""
    from top.subject import ODD

    with pytest.raises(ODD):
        filled(BACKEND | broken)


def test_odd_process() -> None:
    from top.subject import ODD

    with pytest.raises(ODD):
        filled(BACKEND, process={"merged-bytes": 10**400})


def test_older_qemu() -> None:
    """It has sizes in pages, and says the same."""
    process = {"merged-bytes": 100 * 4096, "zero-bytes": 7 * 4096, "profit": 400_000}
    answer = stats(BACKEND, process=process)
    before = older(answer)
    assert "zero-pages" in before["backends"][0] and "zero-pages" in before["process"]
    assert "saved" in before["backends"][0]["group"]
    assert "bytes" not in str(before).replace("pool-bytes", "")
    one, two = Guest("one"), Guest("one")
    for guest, given in ((one, answer), (two, before)):
        figures.fill_kernel(guest, figures.fill(guest, given), Kernel())
    assert one == two and one.saved.kernel == 107 * 4096


def test_names_are_the_schemas() -> None:
    """What figures.py asks for exists, and with the states it knows."""
    schema = "".join(path.read_text() for path in TOP.glob("qapi/ksm*.json"))
    source = (TOP / "scripts/lib/top/figures.py").read_text()
    for name in set(re.findall(r'"([a-z]+(?:-[a-z0-9]+)+)"', source)):
        assert f"'{name}'" in schema or f"'*{name}'" in schema, name
    states = re.search(r"'enum': 'MemoryKsmState',\s*'data': \[(.*?)\]", schema, re.S)
    assert states is not None
    assert sorted(re.findall(r"\w+", states[1])) == sorted(figures.STATES)


def test_total() -> None:
    """Nothing is counted twice; the daemon's tables are paid for."""
    one, two = filled(BACKEND), filled(BACKEND | {"zero-bytes": 0})
    silent = Guest("three", resident=5)
    silent.unanswered("silent")
    pools = [Pool("tenant", "/a", metadata=1000, cpu_seconds=0.5, cpu_share=0.1)]
    total = model.total([one, two, silent], pools, Kernel(cpu_seconds=10))
    assert (total.guests, total.answered) == (3, 2)
    assert total.resident == 800_000_005
    assert total.saved.own == (2700 + 2000) * 4096
    assert total.saved.group == 2600 * 4096
    assert total.saved.total == 7300 * 4096
    assert total.cost.metadata == 4_201_000
    assert total.cost.page_tables == 620_000
    assert total.cost.cpu_seconds == pytest.approx(1.8 * 2 + 0.5)
    assert total.profit == 7300 * 4096 - 2 * 2_410_000 - 1000
