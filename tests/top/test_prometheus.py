# SPDX-License-Identifier: GPL-2.0-or-later
"""Prometheus' own programs: the alerts, the dashboard's queries, the collector."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from test_metrics import snapshot, values

from host.paths import TOP
from top import metrics, output

CONTRIB = TOP / "contrib/ksm"
DASHBOARD = json.loads((CONTRIB / "grafana-dashboard.json").read_text())
Find = Callable[[str, str], str]


def names() -> set[str]:
    """Of all samples there can be."""
    return {sample for sample, _ in values(list(parse_text(written())))}


def written() -> str:
    return metrics.text(snapshot(), openmetrics=False)


def used(query: str) -> set[str]:
    return set(re.findall(r"\bqemu_ksm_\w+", query))


@pytest.fixture
def promtool(debian_program: Find) -> Callable[..., str]:
    program = debian_program("prometheus", "promtool")

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_alerts(promtool: Callable[..., str]) -> None:
    said = promtool("check", "rules", CONTRIB / "alerts.yml")
    count = (CONTRIB / "alerts.yml").read_text().count("- alert:")
    assert f"{count} rules found" in said
    promtool("test", "rules", CONTRIB / "alerts_test.yml")


def test_every_alert_is_tested() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (CONTRIB / "alerts.yml").read_text()))
    tests = (CONTRIB / "alerts_test.yml").read_text()
    for alert in alerts:
        # once it is raised, and once not
        parts = re.split(r"- eval_time", tests)
        of_it = [part for part in parts if f"alertname: {alert}\n" in part]
        assert any("exp_alerts" in part for part in of_it), alert


def test_metrics_of_alerts_and_dashboard_exist() -> None:
    text = (CONTRIB / "alerts.yml").read_text() + json.dumps(DASHBOARD)
    assert used(text) and used(text) <= names(), used(text) - names()
    assert used((CONTRIB / "alerts_test.yml").read_text()) <= names()


def test_reasons_of_alerts_exist() -> None:
    schema = (TOP / "qapi/ksm-common.json").read_text()
    text = (CONTRIB / "alerts.yml").read_text()
    for reason in re.findall(r'reason="([^"]+)"', text):
        assert f"'{reason}'" in schema


def test_promtool_likes_the_metrics(debian_program: Find) -> None:
    """Its linter knows the conventions for names and texts."""
    program = debian_program("prometheus", "promtool")
    done = subprocess.run(
        [program, "check", "metrics"],
        input=written(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- the dashboard ------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARD["panels"]
    return found


def queries() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


def test_dashboard_has_grafanas_shape() -> None:
    """As kinds/dashboard/dashboard_kind.cue of Grafana's source has it."""
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert DASHBOARD["graphTooltip"] in (0, 1, 2)
    assert DASHBOARD["style"] in ("light", "dark")
    assert isinstance(DASHBOARD["editable"], bool)
    assert set(DASHBOARD["time"]) == {"from", "to"}
    assert 1 <= len(DASHBOARD["uid"]) <= 40
    kinds = "query adhoc constant datasource interval textbox custom system".split()
    for variable in DASHBOARD["templating"]["list"]:
        assert variable["type"] in kinds and variable["hide"] in (0, 1, 2)
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert panel["type"] and isinstance(panel["options"], dict)
        assert isinstance(panel["transformations"], list)
        assert panel["repeatDirection"] in ("h", "v")
        config = panel["fieldConfig"]
        assert set(config) == {"defaults", "overrides"}
        thresholds = config["defaults"].get("thresholds")
        if thresholds:
            assert thresholds["mode"] in ("absolute", "percentage")
            # the first is minus infinity, which JSON has as null
            steps = [step["value"] for step in thresholds["steps"]]
            assert steps[0] is None and steps[1:] == sorted(steps[1:])
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        grid = panel["gridPos"]
        assert grid["x"] >= 0 and grid["x"] + grid["w"] <= 24
        cells = {
            (grid["x"] + x, grid["y"] + y)
            for x in range(grid["w"])
            for y in range(grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_labels_of_queries_exist() -> None:
    """A selector, `by (...)` or {{label}} that no sample has shows nothing."""
    labels: dict[str, set[str]] = {}
    for sample, pairs in values(list(parse_text(written()))):
        known = labels.setdefault(sample, {"instance", "job"})
        known |= {key for key, _ in pairs}  # type: ignore[misc]
    for panel in panels():
        for target in panel["targets"]:
            for name, inside in re.findall(r"(qemu_ksm_\w+)\{(.*?)\}", target["expr"]):
                wanted = set(re.findall(r'(\w+)=~?"', inside))
                wanted |= set(re.findall(r"\bby \((\w+)\)", target["expr"]))
                wanted |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert wanted <= labels[name], (panel["title"], name)


def test_queries_are_promql(promtool: Callable[..., str], tmp_path: Path) -> None:
    rules = []
    for number, query in enumerate(queries()):
        plain = query.replace("$__rate_interval", "5m").replace("$", "")
        rules.append({"record": f"q:{number}", "expr": plain})
    # JSON is YAML
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)


# -- node_exporter ------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_textfile_collector(debian_program: Find, tmp_path: Path) -> None:
    """What node_exporter gives to Prometheus is what was written."""
    program = debian_program("prometheus-node-exporter", "prometheus-node-exporter")
    output.write(str(tmp_path / "qemu_ksm.prom"), written())
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [
            *(program, f"--web.listen-address={address}"),
            *("--collector.disable-defaults", "--collector.textfile"),
            f"--collector.textfile.directory={tmp_path}",
        ],
        stderr=subprocess.PIPE,
    ) as process:
        try:
            text = scrape(f"http://{address}/metrics")
        finally:
            process.kill()
    assert "node_textfile_scrape_error 0" in text
    given = [each for each in parse_text(text) if each.name.startswith("qemu_ksm")]
    wanted = list(parse_text(written()))
    assert values(given) == values(wanted)
    types = {each.name: (each.type, each.documentation) for each in given}
    assert types == {each.name: (each.type, each.documentation) for each in wanted}


def scrape(url: str) -> str:
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
