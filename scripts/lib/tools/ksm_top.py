# SPDX-License-Identifier: GPL-2.0-or-later
"""All guests of the host: what merging saves, what it costs (scripts/ksm-top)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import FrameType

from host.exits import Failure, WrongUse
from top import choose, metrics, output, similar
from top.collect import Host, Sources
from top.model import Guest, Snapshot

INTERVAL = 5.0
SECONDS_MAX = 86400


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ksm-top",
        description="Shows what merging saves each guest of the host, and what it "
        "costs.  Changes nothing.",
        epilog="fields: " + ", ".join(choose.FIELDS),
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only guests of this name (or a*)"
    )
    where = parser.add_argument_group("where guests are found")
    where.add_argument(
        "--libvirt",
        dest="connect",
        action="append_const",
        const=None,
        default=[],
        help="also the domains of this host's libvirt, which marks them as tainted",
    )
    where.add_argument(
        "-c",
        "--connect",
        metavar="URI",
        action="append",
        help="also those of another libvirt",
    )
    where.add_argument(
        "--qmp",
        metavar="SOCKET",
        action="append",
        default=[],
        help="also the guest with this QMP socket",
    )
    where.add_argument(
        "--pool",
        metavar="SOCKET",
        action="append",
        default=[],
        help="also the ksm-poold with this socket",
    )
    where.add_argument(
        "--no-scan",
        action="store_true",
        help="only what --libvirt, --connect, --qmp and --pool name, not all QEMUs of /proc",
    )
    where.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=Sources.limit,
        help="how long a guest may take to answer (default: %(default)s)",
    )
    what = parser.add_argument_group("what is shown")
    what.add_argument(
        "--sort",
        metavar="FIELD",
        choices=choose.FIELDS,
        default="saved",
        help="texts from a to z, numbers from the largest (default: %(default)s)",
    )
    what.add_argument("--reverse", action="store_true", help="the other way round")
    what.add_argument(
        "--filter",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only guests for which this holds; also != < <= > >=, and 100M, 2ms",
    )
    what.add_argument(
        "--sketch",
        action="store_true",
        help="also a sketch of what each has in memory (with --json), for --with",
    )
    what.add_argument(
        "--similar",
        action="store_true",
        help="instead: which two guests would share how much memory on one host",
    )
    what.add_argument(
        "--with",
        dest="others",
        metavar="FILE",
        action="append",
        default=[],
        help="also guests of another host: what ksm-top --sketch --json wrote there",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--once", action="store_true", help="show it and end")
    how.add_argument(
        "-d",
        "--interval",
        metavar="SECONDS",
        type=float,
        help=f"between two looks (default: {INTERVAL:.0f}; without a terminal, and "
        "for files: only one look)",
    )
    form = how.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument(
        "--openmetrics",
        metavar="FILE",
        help="for Prometheus; to a file *.prom as node_exporter reads it; -: stdout",
    )
    form.add_argument("--svg", metavar="FILE", help="the table as a picture")
    args = parser.parse_args()
    if args.interval is not None and not 0 < args.interval <= SECONDS_MAX:
        parser.error(f"--interval must be more than 0 and up to {SECONDS_MAX} seconds")
    if not 0 < args.limit <= SECONDS_MAX:
        parser.error(f"--limit must be more than 0 and up to {SECONDS_MAX} seconds")
    if args.once and args.interval is not None:
        parser.error("--once looks once: it has no --interval")
    check_similar(parser, args)
    return args


def check_similar(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.others and not args.similar:
        parser.error("--with is for --similar only")
    if args.sketch and not args.json:
        parser.error("--sketch is for --json only")
    if args.similar and (args.interval is not None or args.openmetrics or args.svg):
        parser.error("--similar looks once, and prints a table or, with --json, that")


class View:
    """What was asked for, of each snapshot."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        self.args = args
        self.host = host
        self.filters = [choose.parse_filter(each) for each in args.filter]
        if args.names:
            self.filters.append(choose.name_filter(args.names))

    def shown(self, snapshot: Snapshot) -> list[Guest]:
        return choose.choose(
            snapshot.guests, self.filters, self.args.sort, reverse=self.args.reverse
        )

    def json(self, snapshot: Snapshot) -> None:
        """One line each if there are several."""
        shown = replace(snapshot, guests=self.shown(snapshot))
        indent = 2 if self.args.interval is None else None
        found = asdict(shown) | {"notes": self.host.notes}
        output.write("-", json.dumps(found, indent=indent) + "\n")

    def similar(self, snapshot: Snapshot) -> None:
        guests = [
            similar.Known(guest.name, None, guest.sketch)
            for guest in self.shown(snapshot)
            if guest.sketch is not None
        ]
        for path in self.args.others:
            guests += similar.of_file(path)
        pairs, strange = similar.pairs(guests)
        if self.args.json:
            found = {"pairs": [asdict(pair) for pair in pairs], "strange": strange}
            output.write("-", json.dumps(found, indent=2) + "\n")
            return
        from rich.console import Console

        from top import table

        console = Console()
        if not console.is_terminal:
            console = Console(width=10000, soft_wrap=True)
        console.print(table.pair_table(pairs, strange))

    def metrics(self, snapshot: Snapshot) -> None:
        path = self.args.openmetrics
        form = not path.endswith(".prom")
        shown = replace(snapshot, guests=self.shown(snapshot))
        output.write(path, metrics.text(shown, openmetrics=form))
        for note in self.host.notes:
            # of a libvirt's words a terminal might make commands
            plain = "".join(each if each.isprintable() else "?" for each in note)
            print(f"ksm-top: {plain}", file=sys.stderr)

    def table(self, snapshot: Snapshot) -> None:
        # only here: what the others print needs no rich
        from rich.console import Console

        from top import table

        console = Console()
        if not console.is_terminal:
            console = Console(width=10000, soft_wrap=True)
        shown = self.shown(snapshot)
        console.print(table.view(console, snapshot, shown, self.host.notes, whole=True))

    def svg(self, snapshot: Snapshot) -> None:
        from rich.console import Console

        from top import table

        with open("/dev/null", "w") as nowhere:
            console = Console(record=True, width=150, file=nowhere, force_terminal=True)
            shown = self.shown(snapshot)
            console.print(
                table.view(console, snapshot, shown, self.host.notes, whole=True)
            )
            output.write(self.args.svg, console.export_svg(title="ksm-top"))

    def live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from top import table

        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for snapshot in looks(self.host, self.args.interval or INTERVAL):
                shown = self.shown(snapshot)
                view = table.view(
                    console, snapshot, shown, self.host.notes, whole=False
                )
                live.update(view, refresh=True)


def looks(host: Host, interval: float | None) -> Iterator[Snapshot]:
    """One, or for ever."""
    while True:
        begin = time.monotonic()
        yield host.look()
        if interval is None:
            return
        time.sleep(max(0.1, interval - (time.monotonic() - begin)))


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> int:
    args = parse()
    sources = Sources(
        scan=not args.no_scan,
        sockets=args.qmp,
        uris=args.connect,
        pools=args.pool,
        limit=args.limit,
        sketch=args.sketch or args.similar,
    )
    if args.no_scan and not (args.qmp or args.connect or args.pool):
        raise WrongUse("--no-scan needs --qmp, --connect or --pool")
    view = View(args, Host(sources))
    # the terminal is put back by `with`
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    if args.similar:
        show = view.similar
    elif args.json:
        show = view.json
    elif args.openmetrics:
        show = view.metrics
    elif args.svg:
        show = view.svg
    elif sys.stdout.isatty() and not args.once:
        view.live()
        return 0
    else:
        show = view.table
    for snapshot in looks(view.host, args.interval):
        try:
            show(snapshot)
            sys.stdout.flush()
        except OSError as error:
            # the interpreter would complain when it closes stdout
            sys.stdout = None  # type: ignore[assignment]
            if isinstance(error, BrokenPipeError):  # `| head`
                break
            raise Failure(f"cannot write: {error.strerror}") from error
    return 0
