# SPDX-License-Identifier: GPL-2.0-or-later
"""The view for people, drawn by rich."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from top import units
from top.model import ANSWERED, Guest, Kernel, Pool, Snapshot, Total
from top.similar import Pair

#: Lines that are no rows of guests: heads, total, space between tables.
OTHER_LINES = 7
STYLES = {
    "active": "green",
    "idle": "cyan",
    "plain": "dim",
    "off": "dim",
    "inhibited": "yellow",
}


@dataclass(frozen=True)
class Column:
    head: str
    guest: Callable[[Guest], str]
    total: Callable[[Total], str] = lambda total: ""
    right: bool = True


def reason(guest: Guest) -> str:
    if not guest.reasons:
        return ""
    first = guest.reasons[0]
    if not guest.answered:
        return first.text
    amount = f" ({units.size(first.bytes)})" if first.bytes else ""
    return f"{first.kind}{amount}: {first.text}"


def group_name(guest: Guest) -> str:
    return guest.group.name if guest.group else ""


COLUMNS = (
    Column("guest", lambda g: g.name, lambda t: "all guests", right=False),
    Column(
        "state", lambda g: g.state, lambda t: f"{t.answered} of {t.guests}", right=False
    ),
    Column("scope", lambda g: g.scope or "", right=False),
    Column("group", group_name, right=False),
    Column(
        "resident", lambda g: units.size(g.resident), lambda t: units.size(t.resident)
    ),
    Column(
        "saved",
        lambda g: units.size(g.saved.total),
        lambda t: units.size(t.saved.total),
    ),
    Column(
        "itself", lambda g: units.size(g.saved.own), lambda t: units.size(t.saved.own)
    ),
    Column(
        "in group",
        lambda g: units.size(g.saved.group),
        lambda t: units.size(t.saved.group),
    ),
    Column(
        "by ksmd",
        lambda g: units.size(g.saved.kernel),
        lambda t: units.size(t.saved.kernel),
    ),
    Column(
        "cpu%",
        lambda g: units.percent(g.cost.cpu_share),
        lambda t: units.percent(t.cost.cpu_share),
    ),
    Column(
        "cpu",
        lambda g: units.seconds(g.cost.cpu_seconds),
        lambda t: units.seconds(t.cost.cpu_seconds),
    ),
    Column(
        "data",
        lambda g: units.size(g.cost.metadata),
        lambda t: units.size(t.cost.metadata),
    ),
    Column(
        "tables",
        lambda g: units.size(g.cost.page_tables),
        lambda t: units.size(t.cost.page_tables),
    ),
    Column("profit", lambda g: units.size(g.profit), lambda t: units.size(t.profit)),
    Column("stall p99", lambda g: units.seconds(g.stall.p99 if g.stall else None)),
    Column("reason", reason, right=False),
)
#: Left out where the terminal is narrow, in this order.
DROPPED = (
    *("scope", "tables", "cpu", "data", "group", "itself", "in group", "by ksmd"),
    *("cpu%", "stall p99", "reason"),
)
#: Between columns; of the guest's name at most; of the reason at least.
GAP, NAME_MAX, REASON_MIN = 2, 24, 16


def plain(text: str) -> str:
    """What guests and daemons say does not rule the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def style_of(column: str, text: str, guest: Guest) -> str:
    if column == "state":
        return STYLES.get(guest.state, "red")
    if column == "profit" and text.startswith("-") and text != units.UNKNOWN:
        return "red"
    if column == "reason" and guest.state in ANSWERED:
        return "dim"
    return ""


def natural(column: Column, guests: list[Guest], total: Total) -> int:
    """The width that nothing of it is cut at, but for long names."""
    texts = [column.head, column.total(total)]
    texts += [plain(column.guest(guest)) for guest in guests]
    width = max(map(cell_len, texts))
    return min(width, NAME_MAX) if column.head == "guest" else width


def layout(room: int, guests: list[Guest], total: Total) -> list[tuple[Column, int]]:
    """As many columns as there is room for.  The reason, the last, has what is
    left; figures are never cut."""
    widths = {each.head: natural(each, guests, total) for each in COLUMNS}
    wanted = widths["reason"]
    widths["reason"] = min(wanted, REASON_MIN)
    # rich counts the gap after the last one, too
    for name in ("", *DROPPED):
        widths.pop(name, None)
        left = room - sum(widths.values()) - GAP * len(widths)
        if left >= 0:
            break
    if "reason" in widths:
        widths["reason"] = min(wanted, widths["reason"] + max(0, left))
    return [(each, widths[each.head]) for each in COLUMNS if each.head in widths]


def guest_table(
    guests: list[Guest], total: Total, columns: list[tuple[Column, int]]
) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, GAP, 0, 0),
        show_footer=True,
        footer_style="bold",
    )
    for column, width in columns:
        table.add_column(
            column.head,
            footer=Text(column.total(total)),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=width,
        )
    for guest in guests:
        cells = [(each.head, plain(each.guest(guest))) for each, _ in columns]
        table.add_row(
            *(Text(text, style_of(head, text, guest)) for head, text in cells)
        )
    return table


def pool_table(pools: list[Pool]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    heads = ("pool", "state", "members", "used", "limit", "saved", "cpu%", "cpu")
    for number, head in enumerate((*heads, "data", "")):
        justify = "left" if number < 2 or not head else "right"
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for pool in pools:
        cells = (
            pool.group,
            pool.state,
            str(len(pool.members)) if pool.state == "up" else units.UNKNOWN,
            units.size(pool.used),
            units.size(pool.limit),
            units.size(pool.saved),
            units.percent(pool.cpu_share),
            units.seconds(pool.cpu_seconds),
            units.size(pool.metadata),
            f"{pool.socket}: {pool.reason}" if pool.reason else "",
        )
        style = "" if pool.state == "up" else "red"
        table.add_row(*(Text(plain(cell), style) for cell in cells))
    return table


def named(name: str, host: str | None) -> str:
    return plain(name if host is None else f"{name} ({host})")


def pair_table(pairs: list[Pair], strange: int) -> Group:
    """Who would share how much with whom."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for head, justify in (("guest", "left"), ("and", "left"), ("share", "right")):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("of the smaller", justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(
            Text(named(pair.one, pair.one_host)),
            Text(named(pair.other, pair.other_host)),
            Text(units.size(pair.shared)),
            Text(f"{units.percent(pair.share)} %"),
        )
    lines: list[RenderableType] = [table]
    if not pairs:
        lines = [Text("no two guests can be compared", "yellow")]
    if strange:
        text = (
            f"{strange} pairs are of groups with different keys: "
            "give their daemons one (ksm-poold --key)"
        )
        lines.append(Text(text, "yellow"))
    return Group(*lines)


def ksmd_line(kernel: Kernel) -> str:
    if kernel.running is None:
        return "ksmd: the kernel has no KSM, or does not show it"
    words = ["runs" if kernel.running else "does not run"]
    if kernel.cpu_share is not None:
        words.append(f"cpu {units.percent(kernel.cpu_share)} %")
    words.append(f"{units.seconds(kernel.cpu_seconds)} since boot")
    words.append(f"saved {units.size(kernel.saved)}")
    words.append(f"profit {units.size(kernel.profit)}")
    return "ksmd: " + ", ".join(words)


def head_line(snapshot: Snapshot, shown: int) -> str:
    kernel, total = snapshot.kernel, snapshot.total
    used = None
    if kernel.memory is not None and kernel.available is not None:
        used = kernel.memory - kernel.available
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    words = [f"ksm-top {clock}", os.uname().nodename]
    words.append(f"memory {units.size(used)} of {units.size(kernel.memory)} used")
    count = f"{total.guests} guest{'s' * (total.guests != 1)}"
    words.append(count if shown == total.guests else f"{shown} of {count}")
    return ", ".join(words)


def parts(
    console: Console,
    snapshot: Snapshot,
    shown: list[Guest],
    notes: list[str],
    rows: int | None,
) -> Iterator[RenderableType]:
    yield Text(head_line(snapshot, len(shown)), "bold", no_wrap=True)
    yield Text(ksmd_line(snapshot.kernel), no_wrap=True)
    yield Text("")
    some = shown if rows is None else shown[: max(1, rows)]
    columns = layout(console.width, some, snapshot.total)
    yield guest_table(some, snapshot.total, columns)
    if len(some) < len(shown):
        yield Text(f"... and {len(shown) - len(some)} more", "dim")
    if snapshot.pools:
        yield Text("")
        yield pool_table(snapshot.pools)
    for note in notes:
        yield Text(plain(note), "yellow")


def view(
    console: Console,
    snapshot: Snapshot,
    shown: list[Guest],
    notes: list[str],
    *,
    whole: bool,
) -> Group:
    """`whole`: all guests, however high the terminal is."""
    rows = None
    if not whole:
        below = len(snapshot.pools) + 2 * bool(snapshot.pools) + len(notes)
        rows = console.height - OTHER_LINES - below
    return Group(*parts(console, snapshot, shown, notes, rows))
