# SPDX-License-Identifier: GPL-2.0-or-later
"""Results of scripts/bench as the tables of docs/devel/ksm-bench.rst.

Turns each JSON file of `scripts/bench --json` into a section: a line of
provenance and, for each bench in it, the tables laid out below.  The cell of a
missing figure stays empty; rows of such cells and of noise are left out.
Leaves to others: measuring (harness.py), what a column means (the page).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from host.exits import WrongUse

BEGIN, END = ".. begin generated\n", ".. end generated\n"

Metrics = dict[str, float]


@dataclass(frozen=True)
class Column:
    """`{}` in the name of the metric stands for the row's key."""

    head: str  # lines are separated by \n
    metric: str
    unit: float = 1.0  # the metric is divided by it


@dataclass(frozen=True)
class Layout:
    """One table of a bench, and figures that stand alone below it."""

    first: str  # head of the first column
    rows: dict[str, str]  # key: what is shown for it
    columns: list[Column]
    caption: str = ""
    noise: float = 0.0  # what is less is not told apart from nothing
    alone: dict[str, str] = field(default_factory=dict)  # text: metric


US, MS, PERCENT = 1e3, 1e6, 0.01


def loads(names: tuple[str, ...]) -> dict[str, str]:
    return {
        f"{name}_{n}": f"{name}, {n}".replace("_", ", ")
        for name in names
        for n in (1, 2, 4)
    }


def balloon(caption: str, suffix: str) -> Layout:
    counts = (1, 4, 8)
    return Layout(
        "processes\nx threads",
        {f"{p}_{t}{suffix}": f"{p} x {t}" for p in counts for t in counts},
        [
            Column("plain\n/s", "plain_blocks_per_s_{}"),
            Column("eager\n/s", "eager_blocks_per_s_{}"),
            Column("lazy\n/s", "lazy_blocks_per_s_{}"),
            Column("auto\n/s", "auto_blocks_per_s_{}"),
            Column("lazy\nratio", "lazy_ratio_{}"),
            Column("auto\nratio", "auto_ratio_{}"),
            Column("lazy\nCPU", "lazy_cpu_ratio_{}"),
            Column("auto\nCPU", "auto_cpu_ratio_{}"),
        ],
        caption,
    )


LAYOUTS: dict[str, list[Layout]] = {
    "ksmpages": [
        Layout(
            "case",
            {"worst": "worst", "third": "third copy", "best": "best"},
            [
                Column("libksm\nMB/s", "{}_mbps"),
                Column("ksmd\nMB/s", "{}_ksmd_mbps"),
                Column("ratio", "{}_ratio"),
                Column("ratio\nof CPU", "{}_cpu_ratio"),
                Column("two threads\nMB/s", "two_{}_mbps"),
                Column("ratio", "two_{}_ratio"),
                Column("ratio\nof CPU", "two_{}_cpu_ratio"),
            ],
            alone={
                "read loop, before over after merging": "read_loop_ratio",
                "the same, worst case": "read_loop_worst_ratio",
                "metadata, bytes a page": "metadata_bytes_per_page",
            },
        )
    ],
    "rescan": [
        Layout(
            "ksmd",
            {"": "every page", "_smart": "smart scan"},
            [
                Column("us\nper GiB", "ksmd{}_us_per_gib"),
                Column("libksm,\nlog", "us_per_gib"),
                Column("ratio", "ratio{}"),
                Column("libksm,\npagemap", "pagemap_us_per_gib"),
                Column("ratio", "pagemap_ratio{}"),
            ],
        )
    ],
    "smart-scan": [
        Layout(
            "engine",
            {"": "libksm", "ksmd_": "ksmd"},
            [
                Column("pages scanned\noff", "{}pages_scanned_off"),
                Column("pages scanned\non", "{}pages_scanned_on"),
                Column("fewer\n%", "{}saving_percent"),
                Column("CPU, ms\noff", "{}cpu_ms_off"),
                Column("CPU, ms\non", "{}cpu_ms_on"),
            ],
        )
    ],
    "fork": [
        Layout(
            "pages",
            {f"{1 << n}": f"{1 << n:,}" for n in (4, 6, *range(8, 16))},
            [
                Column("small\nus", "us_small_{}"),
                Column("huge\nus", "us_huge_{}"),
                Column("merged\nus", "us_merged_{}"),
            ],
            noise=100,
        )
    ],
    "stall": [
        Layout(
            "pages,\nwriters",
            loads(("small", "huge")),
            [
                Column("write p99\noff, us", "stall_off_p99_ns_{}", US),
                Column("write p99\nus", "stall_p99_ns_{}", US),
                Column("max\nms", "stall_max_ns_{}", MS),
                Column("throughput\nratio", "write_throughput_ratio_{}"),
                Column("isolated\np50, ms", "isolation_p50_ns_{}", MS),
                Column("isolated\np99, ms", "isolation_p99_ns_{}", MS),
            ],
        )
    ],
    "unit": [
        Layout(
            "memory, pages,\nthreads",
            loads(("guest_huge", "guest_small", "runs_huge", "runs_small")),
            [
                Column("CPU\nus", "us_per_saved_page_{}"),
                Column("run by run\nus", "runwise_us_per_saved_page_{}"),
                Column("ratio", "ratio_{}"),
                Column("merge\nus", "merge_us_per_saved_page_{}"),
                Column("run by run\nus", "runwise_merge_us_per_saved_page_{}"),
                Column("ratio", "merge_ratio_{}"),
            ],
        )
    ],
    "images": [
        Layout(
            "pages",
            {
                "": "small",
                "_huge": "huge",
                **{f"_aged_{n}": f"huge, blocks of {n}" for n in (8, 16, 32)},
            },
            [
                Column("equal\nMiB", "achievable_mib{}"),
                Column("saved\nMiB", "saved_mib{}"),
                Column("\n%", "saved_fraction{}", PERCENT),
                Column("not zero\n%", "saved_fraction_nonzero{}", PERCENT),
                Column("profit\nMiB", "profit_mib{}"),
                Column("runs", "runs{}"),
                Column("huge pages\nsplit", "huge_split{}"),
                Column("CPU\ns", "cpu_s{}"),
                Column("time\ns", "seconds{}"),
                Column("two threads\nCPU, s", "two_cpu_s{}"),
                Column("time\ns", "two_seconds{}"),
                Column("ratio", "two_ratio{}"),
            ],
        )
    ],
    "balloon": [
        balloon("Without pressure:", ""),
        balloon("With a memory limit of about half of what is touched:", "_pressure"),
        balloon("Without pressure, any block as likely as another:", "_uniform"),
        Layout(
            "MiB",
            {"": "one process"},
            [
                Column("resident", "resident_mib"),
                Column("lazily\nfree", "lazy_mib"),
                Column("not counted\nas used", "attributed_drop_mib"),
                Column("reclaimed\nwhen asked", "reclaimed_mib"),
            ],
            "Lazily freed memory, and what the kernel gets of it:",
        ),
    ],
    "group": [
        Layout(
            "processes,\n% shared",
            {f"{n}x{p}": f"{n}, {p}" for n in (1, 2, 4, 8, 16) for p in (0, 50, 100)}
            | {f"2x{p}x1024": f"2, {p}, 1 GiB" for p in (50, 100)},
            [
                Column("can be\nMiB", "achievable_mib_{}"),
                Column("saved\nMiB", "saved_mib_{}"),
                Column("ksmd\nMiB", "ksmd_saved_mib_{}"),
                Column("95 %\ns", "seconds_95_{}"),
                Column("max-cpu\n100, s", "full_seconds_95_{}"),
                Column("ksmd\ns", "ksmd_seconds_95_{}"),
                Column("CPU\ns", "cpu_95_{}"),
                Column("of it the\ndaemon", "daemon_cpu_95_{}"),
                Column("ksmd\ns", "ksmd_cpu_95_{}"),
                Column("ratio", "cpu_ratio_{}"),
                Column("CPU in\nall, s", "cpu_end_{}"),
                Column("ksmd\ns", "ksmd_cpu_end_{}"),
                Column("daemon\nB a page", "daemon_bytes_per_page_{}"),
                Column("B a\ncontent", "daemon_bytes_per_content_{}"),
            ],
        )
    ],
    "churn": [
        Layout(
            "while it is written",
            {"first": "first half", "second": "second half"},
            [
                Column("saved MiB\nmedian", "{}_saved_mib"),
                Column("least", "{}_least_mib"),
                Column("mappings\nat most", "{}_maps"),
                Column("engine\nCPU %", "{}_cpu_percent"),
            ],
        ),
        Layout(
            "in the end",
            {"old": "after churn", "new": "a new engine"},
            [
                Column("saved\nMiB", "{}_saved_mib"),
                Column("mappings", "{}_maps"),
                Column("metadata\nMiB", "{}_metadata_mib"),
                Column("resident\nMiB", "{}_pss_mib"),
                Column("engine\nCPU, s", "{}_cpu_s"),
            ],
        ),
    ],
    "threads": [
        Layout(
            "by",
            {
                "helped": "one engine of two threads",
                "threads": "two engines",
                "processes": "two processes",
            },
            [
                Column("merging\nMiB/s", "{}_merge_mbps"),
                Column("one engine\nMiB/s", "one_merge_mbps"),
                Column("ratio", "{}_merge_ratio"),
                Column("scanning\nMiB/s", "{}_scan_mbps"),
                Column("one engine\nMiB/s", "one_scan_mbps"),
                Column("ratio", "{}_scan_ratio"),
            ],
        ),
    ],
    "scale": [
        Layout(
            title,
            {
                f"{source}_{gib}{end}": f"{gib}, {source}"
                for source in ("pagemap", "log")
                for gib in sizes
            },
            [
                Column("added\nms", "add_ms_{}"),
                Column("first pass\nCPU, ms", "first_pass_cpu_ms_{}"),
                Column("merged\nCPU, ms", "merged_cpu_ms_{}"),
                Column("metadata\nMiB", "metadata_mib_{}"),
                Column("idle\n%", "idle_percent_{}"),
                Column("a pass\nus", "us_per_pass_{}"),
                Column("noticed\ns", "noticed_s_{}"),
                Column("unmerged\nms", "unmerge_ms_{}"),
                Column("removed\nms", "remove_ms_{}"),
                Column("wait, busy\nus", "busy_discard_wait_us_{}"),
                Column("idle\nus", "idle_discard_wait_us_{}"),
            ],
        )
        for title, end, sizes in (
            ("GiB, source", "", (1, 4, 16, 64, 256, 1024)),
            ("7/8 in use", "_full", (1, 4, 16)),
        )
    ],
    "guests": [
        Layout(
            "scope",
            {
                "ksmd": "ksmd alone",
                "host": "host, max-cpu=10",
                "host_full": "host, max-cpu=100",
                "group": "group, max-cpu=10",
                "group_full": "group, max-cpu=100",
                "ksmd_again": "ksmd alone, again",
                "ksmd_six": "ksmd alone, six guests",
                "host_six": "host, six guests",
                "ksmd_single": "ksmd, one guest",
                "zero": "zero, one guest",
                "vm": "vm, one guest",
            },
            [
                Column("resident\nMiB", "{}_resident_mib"),
                Column("equal\nMiB", "{}_achievable_mib"),
                Column("saved\nMiB", "{}_saved_mib"),
                Column("\n%", "{}_saved_fraction", PERCENT),
                Column("of ksmd's\n%", "{}_saved_by_ksmds", PERCENT),
                Column("to 95 %\ns", "{}_seconds_to_95"),
                Column("CPU to 95 %\ns", "{}_cpu_to_95"),
                Column("CPU\nratio", "{}_cpu_ratio"),
                Column("in huge\npages, MiB", "{}_huge_before_mib"),
                Column("after\nMiB", "{}_huge_after_mib"),
                Column("isolated\np99, ms", "{}_stall_p99_ns", MS),
                Column("ksmd stops\nafter, s", "{}_ksmd_stops_s"),
            ],
        )
    ],
    "guest-stall": [
        Layout(
            "scope,\nmerging",
            {
                f"{scope}_{merging}": f"{scope}, {merging}"
                for scope in ("vm", "group")
                for merging in ("off", "on")
            },
            [
                Column("writes\n/s", "{}_per_second"),
                Column("ratio", "{}_ratio"),
                Column("write p99\nus", "{}_p99_ns", US),
                Column("p99.9\nus", "{}_p999_ns", US),
                Column("max\nms", "{}_max_ns", MS),
                Column("isolated", "{}_isolations"),
                Column("p50\nms", "{}_isolated_p50_ns", MS),
                Column("p99\nms", "{}_isolated_p99_ns", MS),
                Column("max\nms", "{}_isolated_max_ns", MS),
            ],
        )
    ],
    "balloon-guest": [
        Layout(
            "policy",
            {"eager": "eager", "lazy": "lazy", "auto": "auto"},
            [
                Column("counts as\nfree after, s", "{}_freed_s"),
                Column("taken\nagain in, s", "{}_take_s"),
                Column("reclaimed\nMiB", "{}_reclaimed_mib"),
                Column("taken again\nafter that, s", "{}_take_after_reclaim_s"),
            ],
        )
    ],
    "dirty": [
        Layout(
            "source",
            {"off": "none", "pagemap": "pagemap", "log": "log"},
            [
                Column("TCG\nratio", "tcg_{}_throughput_ratio"),
                Column("engine\nms per s", "tcg_{}_cpu_ms_per_s"),
                Column("KVM\nratio", "kvm_{}_throughput_ratio"),
                Column("engine\nms per s", "kvm_{}_cpu_ms_per_s"),
            ],
        )
    ],
    "shuffle": [
        Layout(
            title,
            {str(n): str(n) for n in (1, 2, 4)},
            [
                Column("ksmd alone\nMiB", "ksmd_saved_mib_{}"),
                Column("host\nMiB", f"{name}_saved_mib_{{}}"),
                Column("of that\nours", f"{name}_own_mib_{{}}"),
                Column("ratio", f"{name}_saved_ratio_{{}}"),
                Column("CPU, ksmd\ns", "ksmd_cpu_98_{}"),
                Column("CPU, host\ns", f"{name}_cpu_98_{{}}"),
                Column("in the end\ns", f"{name}_cpu_end_{{}}"),
                Column("of that\nours", f"{name}_own_cpu_{{}}"),
                Column("ratio\nof CPU", f"{name}_cpu_ratio_{{}}"),
                Column("mappings", f"{name}_runs_{{}}"),
            ],
        )
        for title, name in (
            ("blocks, pages", "host"),
            ("2^20 mappings", "more"),
        )
    ],
    "exhaustive": [
        Layout(
            "guests",
            {str(n): str(n) for n in (2, 3, 4)},
            [
                Column("could be\nsaved, MiB", "achievable_mib_{}"),
                Column("saved\nMiB", "saved_mib_{}"),
                Column("\n%", "saved_percent_{}"),
                Column("stats\nMiB", "stats_saved_mib_{}"),
                Column("zero\nMiB", "given_back_mib_{}"),
                Column("pooled\nMiB", "pooled_mib_{}"),
                Column("pool\nMiB", "pool_mib_{}"),
                Column("left\nMiB", "left_mib_{}"),
                Column("in short\nruns, MiB", "left_short_mib_{}"),
            ],
        )
    ],
    "sketch": [
        Layout(
            "guests",
            {
                "1_2": "Debian 12, Debian 12",
                "1_3": "Debian 12, Debian 13",
                "2_3": "another 12, Debian 13",
            },
            [
                Column("contents\nMiB", "contents_mib_{}"),
                Column("in both\nMiB", "common_mib_{}"),
                Column("estimate\nMiB", "estimate_mib_{}"),
                Column("error\n%", "error_percent_{}"),
            ],
        )
    ],
    "volatile": [
        Layout(
            "three quiet guests",
            {
                "host_alone": "scope host",
                "host_beside": "... beside a writer",
                "ksmd_alone": "ksmd",
                "ksmd_beside": "... beside a writer",
            },
            [
                Column("they save\nMiB", "{}_quiet_saved_mib"),
                Column("their engines'\nCPU, s", "{}_quiet_cpu_s"),
                Column("ksmd's\nCPU, s", "{}_ksmd_cpu_s"),
                Column("writer's engine\nCPU, s", "{}_writer_cpu_s"),
                Column("its memory\nwritten, MiB", "{}_hot_mib"),
                Column("left to\nksmd, MiB", "{}_left_mib"),
                Column("in huge\npages, MiB", "{}_huge_before_mib"),
                Column("after\nMiB", "{}_huge_after_mib"),
            ],
        )
    ],
    "density": [
        Layout(
            "guests on",
            {
                "plain": "plain QEMU",
                "ksmd": "plain QEMU, ksmd",
                "group": "scope group",
            },
            [
                Column("guests", "{}_guests"),
                Column("ratio", "{}_ratio"),
                Column("used\nMiB", "{}_used_mib"),
                Column("per guest\nMiB", "{}_mib_per_guest"),
                Column("most\nMiB", "{}_peak_mib"),
                Column("pool\nMiB", "{}_pool_mib"),
                Column("merging\nCPU, s", "{}_cpu_s"),
            ],
            alone={
                "limit of the cgroup, MiB": "limit_mib",
                "kept free, MiB": "reserve_mib",
                "memory of a guest, MiB": "guest_mib",
                "ksmd's own data, which no cgroup pays for, MiB": "ksmd_uncharged_mib",
            },
        )
    ],
    "ask": [
        Layout(
            "hashes, in a message",
            {
                "new_512": "new, 512",
                "known_512": "asked before, 512",
                "new_8192": "new, 8192",
                "known_8192": "asked before, 8192",
            },
            [
                Column("daemon's CPU\nns a hash", "{}_daemon_ns"),
                Column("by the clock\nns a hash", "{}_ns"),
            ],
        )
    ],
    "idle": [
        Layout(
            "source",
            {"log": "log", "pagemap": "pagemap", "group": "group, a member"},
            [
                Column("guests", "{}_guests"),
                Column("GiB\neach", "{}_guest_gib"),
                Column("engine\n% of a core", "{}_engine_cpu_percent"),
                Column("most\n%", "{}_engine_cpu_percent_max"),
                Column("main loop\n% of a core", "{}_log_cpu_percent"),
                Column("daemon\n% of a core", "{}_daemon_cpu_percent"),
                Column("passes\na minute", "{}_passes_per_minute"),
                Column("us\na pass", "{}_us_per_pass"),
            ],
        ),
        Layout(
            "source",
            {"log": "log", "pagemap": "pagemap", "group": "group, a member"},
            [
                Column("engine\n% of a core", "against_{}_engine_cpu_percent"),
                Column("daemon\n% of a core", "against_{}_daemon_cpu_percent"),
                Column("passes\na minute", "against_{}_passes_per_minute"),
                Column("us\na pass", "against_{}_us_per_pass"),
                Column("ratio\nof CPU", "{}_engine_cpu_percent_ratio"),
                Column("ratio of\na pass", "{}_us_per_pass_ratio"),
            ],
            "Another build at the same time:",
        ),
    ],
}

#: benches that plots.py draws; the page shows these plots
PLOTTED = (
    "ksmpages rescan smart-scan fork stall unit images balloon group scale churn "
    "exhaustive density"
).split()


def shown(value: float | None, noise: float = 0.0) -> str:
    """A figure as a person reads it."""
    if value is None:
        return ""
    if noise and value < noise:
        return f"< {noise:g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def grid(rows: list[list[str]]) -> str:
    """A simple table; the first row is its head, the first column text."""
    heads = []
    for cell in rows[0]:
        # the lines of a cell must begin in one column
        lines_of = cell.split("\n")
        heads.append([line.ljust(max(map(len, lines_of))) for line in lines_of])
    lines = [*(list(line) for line in zip_longest(*heads, fillvalue="")), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = " ".join("=" * width for width in widths)
    text = [
        " ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    head = len(lines) - len(rows) + 1
    return "\n".join([rule, *text[:head], rule, *text[head:], rule, ""])


def laid_out(layout: Layout, metrics: Metrics) -> list[str]:
    """The table and what stands below it, as far as it was measured."""
    rows = []
    for key, label in layout.rows.items():
        cells = []
        for column in layout.columns:
            value = metrics.get(column.metric.format(key))
            value = value if value is None else value / column.unit
            cells.append(shown(value, layout.noise))
        if not set(cells) <= {"", f"< {layout.noise:g}"}:
            rows.append([label, *cells])
    blocks = []
    if rows:
        head = [layout.first, *(column.head for column in layout.columns)]
        blocks = [f"{layout.caption}\n"] if layout.caption else []
        blocks.append(grid([head, *rows]))
    alone = [
        f"{text}: {shown(metrics[metric])}"
        for text, metric in layout.alone.items()
        if metric in metrics
    ]
    if alone:
        alone[0] = alone[0][0].upper() + alone[0][1:]
        blocks.append(f"{'; '.join(alone)}.\n")
    return blocks


def titled(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def bench(name: str, metrics: Metrics) -> list[str]:
    blocks = [titled(name, "~")]
    if name not in LAYOUTS:
        rows = [[metric, shown(value)] for metric, value in metrics.items()]
        return [*blocks, grid([["metric", "value"], *rows])]
    for layout in LAYOUTS[name]:
        blocks += laid_out(layout, metrics)
    if name in PLOTTED:
        image = f".. image:: ../images/ksm-bench-{name}.png\n"
        blocks.append(f"{image}   :alt: plot of {name}\n")
    return blocks


def provenance(host: dict[str, Any]) -> str:
    """On what, and how quiet it was."""
    words = [
        f"{host['cpu']} ({host['cpus']} CPUs, {host['memory_mib']:,} MiB)",
        f"Linux {host['kernel']}",
        f"load {host['load']:.2g} at the start",
    ]
    if host.get("quick"):
        words.append("--quick: a look, not figures")
    return f"{', '.join(words)}.\n"


def rst(data: dict[str, Any]) -> str:
    """What one JSON file holds, as reStructuredText."""
    host = data["host"]
    title = f"Commit {host['commit']}, {str(host['date'])[:10]}"
    blocks = [titled(title, "-"), provenance(host)]
    for name, metrics in data["benches"].items():
        blocks += bench(name, metrics)
    return "\n".join(blocks)


def update(page: str, text: str) -> str:
    """The page with the text between its markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise WrongUse(f"the page lacks {BEGIN.strip()!r} or {END.strip()!r}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def table_of(file: Path) -> str:
    try:
        return rst(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongUse(
            f"{file} is not what scripts/bench --json writes: {error!r}"
        ) from error


def show(files: list[Path], page: Path | None) -> None:
    """Prints what scripts/bench --json wrote, or puts it into the page."""
    text = "\n".join(table_of(file) for file in files)
    if page:
        page.write_text(update(page.read_text(), text))
    else:
        print(text, end="")
