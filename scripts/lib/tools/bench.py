# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/bench: runs benches and shows results: a table, JSON, plots.

Leaves to others: the benches (bench/registry.py).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import tables
from bench.harness import BenchError, Metrics, Options, Session, build
from bench.registry import BENCHES, LONG
from host import ksmsys
from host.exits import WrongUse
from host.outfile import check_file, write_file
from host.paths import TOP


def host() -> dict[str, str | int | float]:
    """The machine, without a name."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    commit = subprocess.run(
        ["git", "-C", str(TOP), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count() or 0,
        "memory_mib": pages * size >> 20,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "thp": thp.read_text().strip() if thp.exists() else "none",
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
    }


def shown(value: float) -> str:
    """A number as a person reads it."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(name: str, metrics: Metrics) -> Table:
    doc = (BENCHES[name].__doc__ or "").splitlines()[0]
    out = Table(f"{name}: {doc}", "")
    out.columns[1].justify = "right"
    for metric, value in metrics.items():
        out.add_row(metric, shown(value), style="bold" if "ratio" in metric else None)
    return out


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Of {', '.join(BENCHES)}; without one, all are run but "
            f"{', '.join(LONG)}, which takes hours.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Small and few runs: a look, not a figure.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures here, plots beside it."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="A guest's RAM, for the bench images."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=512,
            metavar="MIB",
            help="Memory of the cgroup, for the bench density. [default: 4096]",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            min=192,
            metavar="MIB",
            help="Memory of its guests. [default: 512]",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="QEMU",
            help="Another build of QEMU, measured beside ours by the bench idle.",
        ),
    ] = None,
    rst: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Measure nothing: show this JSON file as rST."),
    ] = None,
    update: Annotated[
        Path | None, typer.Option(exists=True, help="Put that into this page.")
    ] = None,
) -> None:
    """Measures libksm beside the kernel's ksmd.

    What each of them does is in docs/devel/ksm-bench.rst.  Root is needed for
    ksmd's side and for memory pressure.
    """
    if rst:
        return tables.show(rst, update)
    console = Console()
    for name in names or ():
        if name not in BENCHES:
            raise WrongUse(
                f"no bench is called '{name}'; there are: {', '.join(BENCHES)}"
            )
    if json_file:
        check_file(json_file)
    build()
    results: dict[str, Metrics] = {}
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        options = Options(image or [], limit, memory, against)
        session = Session(quick, options, progress)
        data = {"host": host() | {"quick": quick}, "benches": results}
        for name in names or [each for each in BENCHES if each not in LONG]:
            try:
                results[name] = BENCHES[name](session)
            except ksmsys.KsmUnavailable as error:
                # the machine will do for others: this one failed
                raise BenchError(str(error)) from error
            console.print(table(name, results[name]))
            if json_file:
                write_file(json_file, json.dumps(data, indent=2) + "\n")
    for note in session.notes:
        console.print(f"note: {note}")
    if json_file:
        # slow to load, and not needed for a table
        from bench import plots

        for path in plots.draw(results, json_file):
            console.print(f"plot: {path}")


def main() -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(bench)
    app()
    return 0
