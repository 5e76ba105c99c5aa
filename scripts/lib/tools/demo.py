# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/demo: real Debian guests, their memory merged before your eyes.

Boots guests, starts merging, shows a live table until nothing more is gained,
has every guest verify all its data, and sums up.  Leaves to others: the run
itself (guest/run.py).
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from guest import run as guest_run
from guest.qemu import accelerator, guest_image, need_qemu
from guest.run import BY_KERNEL, MIB, Run, RunResult, Sample
from host.exits import Lacking
from host.outfile import check_file, write_file
from host.paths import TOP
from host.warm import available

OUTPUT = TOP / "build/demo"

out = Console(highlight=False)
if not out.is_terminal:
    out.width = 100
err = Console(stderr=True, highlight=False)


class Scope(str, Enum):
    """Who may share memory with whom."""

    group = "group"
    host = "host"
    vm = "vm"
    zero = "zero"
    compare = "compare"


TITLES = {
    "plain": "plain QEMU and ksmd",
    "host": "memory-backend-ksm, scope=host (ksm-poold, ksmd for the rest)",
    "zero": "memory-backend-ksm, scope=zero",
    "vm": "memory-backend-ksm, scope=vm",
    "group": "memory-backend-ksm, scope=group (ksm-poold)",
}


SHORT = {
    "plain": "plain + ksmd",
    "host": "host",
    "zero": "zero",
    "vm": "vm",
    "group": "group",
}


def mib(size: float) -> str:
    return f"{size / MIB:.0f} MiB"


def table_of(run: Run, sample: Sample) -> Table:
    """The live table."""
    who = "ksmd" if run.scope in BY_KERNEL else "merging"
    table = Table(title=TITLES[run.scope], title_justify="left")
    table.add_column("guest")
    for name in ("resident", "shared", "saved", f"{who} CPU", "verified"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for guest in sample.guests:
        table.add_row(
            guest.name,
            mib(guest.resident - guest.lazy_free),
            mib(guest.shared * 4096),
            mib(guest.saved),
            "" if run.scope in BY_KERNEL else f"{guest.cpu_s:.2f} s",
            f"{guest.verified} pages",
            f"{guest.errors} ERRORS" if guest.errors else guest.state,
        )
    table.add_section()
    table.add_row(
        f"after {sample.seconds:.0f} s",
        mib(sample.resident),
        "",
        mib(sample.saved),
        f"{sample.merge_cpu_s:.2f} s",
    )
    return table


class Display:
    """A live table on a terminal, a line now and then elsewhere."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.live = Live(console=out, auto_refresh=False) if out.is_terminal else None
        self._next = 0.0
        self._ready = -1

    def __call__(self, sample: Sample) -> None:
        if self.live:
            self.live.update(table_of(self.run, sample), refresh=True)
        elif not sample.seconds:
            ready = sum(guest.state != "booting" for guest in sample.guests)
            if ready != self._ready:
                self._ready = ready
                print(f"{ready} of {len(sample.guests)} guests are up", flush=True)
        elif sample.seconds >= self._next:
            self._next = sample.seconds + 5
            errors = sum(guest.errors for guest in sample.guests)
            print(
                f"{sample.seconds:4.0f} s: saved {mib(sample.saved)} of "
                f"{self.run.result.resident_mib:.0f} MiB, "
                f"CPU {sample.merge_cpu_s:.2f} s, {errors} errors",
                flush=True,
            )

    def context(self) -> AbstractContextManager[Any]:
        return self.live if self.live else nullcontext()


def measure(
    scope: str, guests: int, memory: int, seconds: float, image: Path
) -> RunResult:
    """One run with its display."""
    with Run(scope, guests, memory, image) as run:
        run.result.accel = accelerator()
        display = Display(run)
        out.print(
            f"{guests} guests of {memory} MiB, {TITLES[scope]}, {run.result.accel}"
        )
        with display.context():
            run.boot(display)
            run.start()
            run.merge(seconds, display)
            run.verify(display)
        return run.result


def summary(result: RunResult) -> None:
    """Before and after."""
    table = Table(title="Before and after", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    before, saved = result.resident_mib, result.saved_mib
    each = before / result.guests
    table.add_row(
        "memory of all guests", f"{before:.0f} MiB", f"{before - saved:.0f} MiB"
    )
    table.add_row(
        "per guest", f"{each:.0f} MiB", f"{(before - saved) / result.guests:.0f} MiB"
    )
    out.print(table)
    who = "ksmd" if result.scope in BY_KERNEL else "merging"
    out.print(
        f"The host saves {saved:.0f} MiB, {result.saved_percent:.0f} % of what the "
        f"guests had resident, after {result.seconds:.0f} s"
        f"{'' if result.settled else ' (still growing)'}; {who} used "
        f"{result.cpu_s:.1f} s of CPU and {result.metadata_mib:.1f} MiB for its own data."
    )
    if result.data_intact:
        verified = sum(guest.verified for guest in result.samples[-1].guests)
        out.print(
            f"Every guest's data is intact ({verified} pages verified by the guests)."
        )
    else:
        err.print("DATA IS NOT INTACT:", *result.errors[:20], sep="\n  ")


def comparison(results: list[RunResult]) -> None:
    table = Table(title="Comparison", title_justify="left")
    table.add_column("scope")
    for name in ("resident", "saved", "", "CPU", "95 % after", "CPU until then"):
        table.add_column(name, justify="right")
    table.add_column("data")
    for result in results:
        reached, cpu = result.seconds_to(0.95), result.cpu_to(0.95)
        table.add_row(
            SHORT[result.scope],
            f"{result.resident_mib:.0f} MiB",
            f"{result.saved_mib:.0f} MiB",
            f"{result.saved_percent:.0f} %",
            f"{result.cpu_s:.2f} s",
            "" if math.isnan(reached) else f"{reached:.0f} s",
            "" if math.isnan(cpu) else f"{cpu:.2f} s",
            "intact" if result.data_intact else "DAMAGED",
        )
    out.print(table)


def plot(results: list[RunResult], path: Path) -> None:
    """Memory saved over time."""
    # slow to import, and only needed now
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        times = [0.0] + [sample.seconds for sample in result.samples]
        saved = [0.0] + [sample.saved / MIB for sample in result.samples]
        axes.plot(times, saved, marker=".", label=TITLES[result.scope])
    first = results[0]
    axes.axhline(first.resident_mib, linestyle=":", color="gray")
    axes.annotate(
        "resident before merging",
        (0, first.resident_mib),
        textcoords="offset points",
        xytext=(4, -12),
        color="gray",
    )
    axes.set_ylim(0, first.resident_mib * 1.05)
    axes.set_xlabel("seconds of merging")
    axes.set_ylabel("memory saved, MiB")
    axes.set_title(f"{first.guests} Debian guests of {first.memory_mib} MiB")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def as_json(result: RunResult) -> dict[str, Any]:
    """What --json writes of a run."""
    data = asdict(result)
    data["saved_percent"] = round(result.saved_percent, 1)
    cpu = data.pop("cpu_s")
    data["cpu_s"] = cpu
    data["ksmd_cpu_s"] = cpu if result.scope in BY_KERNEL else 0.0
    data["samples"] = [
        {
            "seconds": round(sample.seconds, 2),
            "saved_mib": round(sample.saved / MIB, 1),
            "resident_mib": round(sample.resident / MIB, 1),
            "cpu_s": round(sample.merge_cpu_s, 3),
        }
        for sample in result.samples
    ]
    return data


def check_room(guests: int, memory: int) -> None:
    """Guests that do not fit would take the host down with them."""
    there = available() // MIB
    # QEMU itself takes some 150 MiB for a guest under TCG
    needed = guests * (memory + 150)
    if there and needed > there:
        raise Lacking(
            f"{guests} guests of {memory} MiB need {needed} MiB before they "
            f"are merged, and this machine has {there} MiB available; "
            "choose fewer with --guests or smaller ones with --memory"
        )


def on_signal(number: int, frame: FrameType | None) -> None:
    """Signals end the program as an exception does, tidily."""
    if number == signal.SIGINT:
        guest_run.interrupted = True
        raise KeyboardInterrupt
    sys.exit(128 + number)


def demo(
    guests: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 3,
    memory: Annotated[
        int, typer.Option(min=192, max=65536, help="MiB of each guest.")
    ] = 512,
    seconds: Annotated[
        float, typer.Option(min=1, max=86400, help="Merge for so long at most.")
    ] = 120,
    scope: Annotated[
        Scope,
        typer.Option(
            help="Who shares with whom; compare: the same guests with each scope "
            "and with plain QEMU and ksmd."
        ),
    ] = Scope.group,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            dir_okay=False,
            writable=True,
            help="Write the figures to FILE.",
        ),
    ] = None,
) -> None:
    """Boots Debian guests with their RAM on memory-backend-ksm, merges it until
    nothing more is gained, and has each guest verify its data.

    Writes build/demo/savings.png.  Exit codes: 0 all well, 1 failed or data not
    intact, 2 wrong usage, 3 something is missing on this machine.
    """
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGHUP, on_signal)
    if json_file is not None:
        check_file(json_file)
    check_room(guests, memory)
    scopes = (
        ["plain", "host", "zero", "vm", "group"]
        if scope is Scope.compare
        else [scope.value]
    )
    need_qemu()
    image = guest_image()
    results = []
    for each in scopes:
        results.append(measure(each, guests, memory, seconds, image))
        summary(results[-1])
    if len(results) > 1:
        comparison(results)
    picture = OUTPUT / "savings.png"
    try:
        plot(results, picture)
        out.print(f"Saved over time: {os.path.relpath(picture)}")
    except OSError as error:
        err.print(f"demo: no picture: {error}")
    if json_file is not None:
        data = as_json(results[-1])
        if len(results) > 1:
            data["runs"] = [as_json(result) for result in results]
        write_file(json_file, json.dumps(data, indent=1) + "\n")
    if not all(result.data_intact for result in results):
        raise typer.Exit(1)


def main() -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    try:
        app()
    except KeyboardInterrupt:
        return 130
    return 0
