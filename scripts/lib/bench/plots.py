# SPDX-License-Identifier: GPL-2.0-or-later
"""Plots of scripts/bench: PNG files beside the JSON file.

A metric that is not there leaves its bar out.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

from bench.harness import Metrics  # noqa: E402

OURS, THEIRS, THIRD = "#2060a0", "#c0c0c0", "#d08030"


def _bars(
    title: str, unit: str, groups: list[str], sides: dict[str, list[float | None]]
) -> plt.Figure:
    """Groups of bars side by side, each with its figure."""
    figure, axes = plt.subplots(figsize=(1.6 + 1.1 * len(groups), 3.6))
    width = 0.8 / len(sides)
    for n, (label, values) in enumerate(sides.items()):
        at = [i + (n - (len(sides) - 1) / 2) * width for i in range(len(groups))]
        heights = [value or 0 for value in values]
        color = (OURS, THEIRS, THIRD)[n % 3]
        bars = axes.bar(at, heights, width, label=label, color=color)
        axes.bar_label(bars, [f"{v:.3g}" if v else "" for v in values], fontsize=7)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return figure


def ksmpages(m: Metrics) -> plt.Figure:
    cases = ("worst", "third", "best")
    return _bars(
        "ksmpages: equal memory merged",
        "MB/s",
        list(cases),
        {
            "libksm": [m.get(f"{case}_mbps") for case in cases],
            "two threads": [m.get(f"two_{case}_mbps") for case in cases],
            "ksmd at full speed": [m.get(f"{case}_ksmd_mbps") for case in cases],
        },
    )


def rescan(m: Metrics) -> plt.Figure:
    names = {
        "dirty log": "us_per_gib",
        "pagemap": "pagemap_us_per_gib",
        "ksmd,\nsmart scan": "ksmd_smart_us_per_gib",
        "ksmd": "ksmd_us_per_gib",
    }
    there = {label: m[name] for label, name in names.items() if name in m}
    figure = _bars(
        "rescan: a pass over unchanged memory",
        "us of CPU per GiB",
        list(there),
        {"CPU": list(there.values())},
    )
    figure.axes[0].set_yscale("log")
    return figure


def smart_scan(m: Metrics) -> plt.Figure:
    return _bars(
        "smart scan: pages looked at",
        "pages",
        ["libksm", "ksmd"],
        {
            "on": [m.get("pages_scanned_on"), m.get("ksmd_pages_scanned_on")],
            "off": [m.get("pages_scanned_off"), m.get("ksmd_pages_scanned_off")],
        },
    )


def fork(m: Metrics) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6, 3.8))
    for kind, label, color in (
        ("small", "anonymous, 4 KiB pages", THEIRS),
        ("huge", "anonymous, huge pages", THIRD),
        ("merged", "merged", OURS),
    ):
        head = f"us_{kind}_"
        points = sorted((int(k[len(head) :]), v) for k, v in m.items() if head in k)
        axes.plot(*zip(*points, strict=True), "o-", label=label, color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_xlabel("pages mapped")
    axes.set_ylabel("us of CPU per process beyond the fixed cost")
    axes.set_title("fork: create and reap a process", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def stall(m: Metrics) -> plt.Figure:
    rows = [f"{kind}_{n}" for kind in ("small", "huge") for n in (1, 2, 4)]
    figure = _bars(
        "stall: a write to memory that is being merged, by pages and threads",
        "us",
        rows,
        {
            name: [m.get(f"stall_{name}_ns_{row}", 0) / 1e3 for row in rows]
            for name in ("p50", "p99", "max")
        },
    )
    figure.axes[0].set_yscale("log")
    return figure


def unit(m: Metrics) -> plt.Figure:
    rows = [f"{what}_{k}_2" for what in ("guest", "runs") for k in ("huge", "small")]
    return _bars(
        "unit: CPU per page saved in a process with two busy threads",
        "us",
        [row.removesuffix("_2").replace("_", ",\n") for row in rows],
        {
            "libksm": [m.get(f"us_per_saved_page_{row}") for row in rows],
            "run by run": [m.get(f"runwise_us_per_saved_page_{row}") for row in rows],
        },
    )


def images(m: Metrics) -> plt.Figure:
    sides: dict[str, list[float | None]] = {
        "saved": [m.get("saved_mib"), m.get("saved_mib_huge")],
        "equal (exhaustive count)": [
            m.get("achievable_mib"),
            m.get("achievable_mib_huge"),
        ],
    }
    return _bars("images: RAM of guests", "MiB", ["small pages", "huge pages"], sides)


def balloon(m: Metrics) -> plt.Figure:
    counts = (1, 4, 8)
    rows = [f"{p}_{t}{x}" for x in ("", "_pressure") for p in counts for t in counts]
    rows = [row for row in rows if f"lazy_ratio_{row}" in m]
    labels = [row.replace("_pressure", "\npressure").replace("_", ".") for row in rows]
    figure = _bars(
        "balloon: blocks taken and given back, against eager (processes.threads)",
        "ratio to eager",
        labels,
        {
            "auto": [m[f"auto_ratio_{row}"] for row in rows],
            "lazy": [m[f"lazy_ratio_{row}"] for row in rows],
        },
    )
    figure.axes[0].axhline(1, color="black", linewidth=0.8)
    return figure


def group(m: Metrics) -> plt.Figure:
    rows = [f"{n}x{p}" for p in (50, 100) for n in (2, 4, 8, 16)]
    rows = [row for row in rows if f"cpu_95_{row}" in m]
    return _bars(
        "group: CPU until 95 % is saved (processes x percent shared)",
        "s",
        rows,
        {
            "group, max-cpu=10": [m.get(f"cpu_95_{row}") for row in rows],
            "group, max-cpu=100": [m.get(f"full_cpu_95_{row}") for row in rows],
            "ksmd": [m.get(f"ksmd_cpu_95_{row}") for row in rows],
        },
    )


def scale(m: Metrics) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6, 3.8))
    for name, label, color in (
        ("add_ms", "added, ms", OURS),
        ("remove_ms", "removed, ms", THIRD),
        ("first_pass_cpu_ms", "first pass, ms of CPU", "#208040"),
        ("us_per_pass", "an idle pass, us of CPU", THEIRS),
        ("metadata_mib", "metadata, MiB", "#804080"),
    ):
        for end, line in (("", "o-"), ("_full", "o:")):
            found = {k: re.fullmatch(rf"{name}_pagemap_(\d+){end}", k) for k in m}
            points = sorted((int(at[1]), m[k]) for k, at in found.items() if at)
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    line,
                    label=None if end else label,
                    color=color,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("GiB registered, of which 512 MiB are populated (dotted: 7/8)")
    axes.set_title("scale: what much memory costs", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def churn(m: Metrics) -> plt.Figure:
    """What is saved and mapped over time; last: a new engine's, of the same."""
    moments = sorted(k.removesuffix("_maps") for k in m if re.match(r"at\d+_maps", k))
    figure, axes = plt.subplots(figsize=(6, 3.8))
    right = axes.twinx()
    for side, name, label, color in (
        (axes, "saved_mib", "saved, MiB", OURS),
        (axes, "pool_mib", "pool, MiB", THEIRS),
        (right, "maps", "mappings (right)", THIRD),
    ):
        at = range(1, len(moments) + 1)
        side.plot(at, [m[f"{each}_{name}"] for each in moments], color=color)
        for style, which in (("o", "old"), ("x", "new")):
            side.plot([len(moments) + 3], [m[f"{which}_{name}"]], style, color=color)
        axes.plot([], [], color=color, label=label)
    for each in (axes, right):
        each.set_ylim(bottom=0)
    axes.set_xlabel("moments of churn; o: settled, x: by a new engine")
    axes.set_title("churn: merging for hours", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def exhaustive(m: Metrics) -> plt.Figure:
    rows = [n for n in ("2", "3", "4") if f"saved_mib_{n}" in m]
    return _bars(
        "exhaustive: RAM of a group's guests",
        "MiB",
        [f"{n} guests" for n in rows],
        {
            "saved": [m.get(f"saved_mib_{n}") for n in rows],
            "could be saved": [m.get(f"achievable_mib_{n}") for n in rows],
        },
    )


def density(m: Metrics) -> plt.Figure:
    names = {
        "plain": "plain QEMU",
        "ksmd": "plain QEMU\nand ksmd",
        "group": "scope group",
    }
    there = {name: label for name, label in names.items() if f"{name}_guests" in m}
    return _bars(
        f"density: guests of {m['guest_mib']:.0f} MiB "
        f"in a cgroup of {m['limit_mib']:.0f} MiB",
        "guests",
        list(there.values()),
        {"guests": [m[f"{name}_guests"] for name in there]},
    )


PLOTS = {
    "ksmpages": ksmpages,
    "rescan": rescan,
    "smart-scan": smart_scan,
    "fork": fork,
    "stall": stall,
    "unit": unit,
    "images": images,
    "balloon": balloon,
    "group": group,
    "scale": scale,
    "churn": churn,
    "exhaustive": exhaustive,
    "density": density,
}


def draw(benches: dict[str, Metrics], json_file: Path) -> list[Path]:
    """Draws each bench there is a plot for: STEM-NAME.png."""
    paths = []
    for name, metrics in benches.items():
        if name in PLOTS:
            figure = PLOTS[name](metrics)
            path = json_file.with_name(f"{json_file.stem}-{name}.png")
            figure.tight_layout()
            figure.savefig(path, dpi=130)
            plt.close(figure)
            paths.append(path)
    return paths
