# SPDX-License-Identifier: GPL-2.0-or-later
"""The metrics, as Prometheus' own parsers read them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fakes import BACKEND, stats
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from host.exits import Failure
from top import figures, metrics, model, output
from top.model import Guest, Kernel, Member, Pool, Snapshot

ODD_NAME = 'we"ird\\na\nme {x="y"} ü'


def guest(name: str) -> Guest:
    found = Guest(name, pid=1234, source="qmp", resident=5)
    stat = figures.fill(found, stats(BACKEND))
    figures.fill_kernel(found, stat, Kernel())
    return found


def snapshot() -> Snapshot:
    """One that has a sample of each family."""
    silent = Guest("silent")
    silent.unanswered("silent")
    guests = [guest("one"), guest(ODD_NAME), silent]
    members = [Member("one", 1234, True, 4096, 2048.0, 0)]
    pools = [
        Pool(
            *("tenant", "/run/ksm-pool/tenant.sock"),
            used=1 << 20,
            limit=1 << 30,
            saved=1 << 19,
            metadata=70_000,
            cpu_seconds=0.25,
            refused={"full": 1, "share": 2, "memory": 3},
            members=members,
        ),
        Pool("other", "/run/ksm-pool/other.sock", "gone", "no daemon runs"),
    ]
    kernel = Kernel(running=True, saved=4096, shared=0, profit=-640, cpu_seconds=1.5)
    sums = model.total(guests, pools, kernel)
    return Snapshot(1_700_000_000.5, 0.01, guests, pools, kernel, sums)


def values(families: list[Metric]) -> dict[tuple[str, frozenset[object]], float]:
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            # a second sample of the same series makes node_exporter fail
            assert key not in found
            assert sample.timestamp is None
            found[key] = sample.value
    return found


@pytest.fixture(params=["openmetrics", "text"])
def families(request: pytest.FixtureRequest) -> list[Metric]:
    openmetrics = request.param == "openmetrics"
    text = metrics.text(snapshot(), openmetrics=openmetrics)
    return list((parse_openmetrics if openmetrics else parse_text)(text))


def test_values(families: list[Metric]) -> None:
    found = values(families)

    def value(name: str, **labels: str) -> float:
        return found[f"qemu_ksm_{name}", frozenset(labels.items())]

    for name in ("one", ODD_NAME):
        assert value("domain_up", domain=name) == 1
        assert value("domain_resident_bytes", domain=name) == 400_000_000
        assert value("domain_saved_bytes", domain=name, by="own") == 2700 * 4096
        assert value("domain_saved_bytes", domain=name, by="group") == 1300 * 4096
        assert value("domain_saved_bytes", domain=name, by="kernel") == 0
        assert value("domain_cpu_seconds_total", domain=name) == pytest.approx(1.8)
        assert value("domain_metadata_bytes", domain=name) == 2_100_000
        assert value("domain_page_tables_bytes", domain=name) == 310_000
        assert value("domain_profit_bytes", domain=name) == 4000 * 4096 - 2_410_000
        assert value("domain_stalls_total", domain=name) == 321
        p99 = value("domain_stall_p99_seconds", domain=name)
        assert p99 == pytest.approx(0.00087)
        assert value("domain_state", domain=name, state="active") == 1
        assert value("domain_state", domain=name, state="busy") == 0
        assert value("domain_reason", domain=name, reason="vma-limit") == 1
        size = value("domain_reason_bytes", domain=name, reason="vma-limit")
        assert size == 256 * 4096
        assert value("domain_group_connected", domain=name, group="tenant") == 1
    assert value("domain_up", domain="silent") == 0
    assert value("domain_state", domain="silent", state="silent") == 1
    tenant = {"group": "tenant", "socket": "/run/ksm-pool/tenant.sock"}
    assert value("pool_up", **tenant) == 1
    assert value("pool_used_bytes", **tenant) == 1 << 20
    assert value("pool_cpu_seconds_total", **tenant) == 0.25
    assert value("pool_refused_pages_total", **tenant, short="share") == 2
    other = {"group": "other", "socket": "/run/ksm-pool/other.sock"}
    assert value("pool_up", **other) == 0
    assert ("qemu_ksm_pool_used_bytes", frozenset(other.items())) not in found
    assert value("ksmd_profit_bytes") == -640
    assert value("collect_timestamp_seconds") == 1_700_000_000.5


def test_types_and_texts(families: list[Metric]) -> None:
    assert {family.type for family in families} == {"gauge", "counter"}
    assert all(family.documentation for family in families)
    assert len(families) == len(metrics.FAMILIES)
    for family in families:
        counted = all(sample.name.endswith("_total") for sample in family.samples)
        assert counted == (family.type == "counter"), family.name


def test_units() -> None:
    """Base units, named at the end; OpenMetrics states them."""
    text = metrics.text(snapshot(), openmetrics=True)
    for family in parse_openmetrics(text):
        unit = re.search(r"_(bytes|seconds)$", family.name)
        assert family.unit == (unit[1] if unit else "")
    units = re.compile(r"_(kb|kib|mb|pages|ms|ns|millis|percent)\b")
    assert not units.search(text.replace("refused_pages", ""))


def test_text_has_nothing_of_openmetrics() -> None:
    text = metrics.text(snapshot(), openmetrics=False)
    assert "# UNIT" not in text and "# EOF" not in text
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            assert line.split()[3] in ("gauge", "counter")


def test_all_counters_are_families() -> None:
    assert set(metrics.COUNTERS) <= set(metrics.FAMILIES)


def test_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "qemu_ksm.prom"
    os.umask(os.umask(0o077) | 0o077)
    path.write_text("old")
    before = path.stat().st_ino
    with path.open() as reader:
        output.write(str(path), "new\n")
        # who reads has the old one to its end
        assert reader.read() == "old"
    assert path.read_text() == "new\n" and path.stat().st_ino != before
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "qemu_ksm.prom"
    path.write_text("old")

    def full(number: int, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(Failure, match="No space left"):
        output.write(str(path), "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(Failure, match="cannot write"):
        output.write(str(tmp_path / "none" / "x.prom"), "new")
