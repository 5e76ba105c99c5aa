# SPDX-License-Identifier: GPL-2.0-or-later
"""What a QEMU's command line says: its name, its QMP sockets, its group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

POOLS = "/run/ksm-pool"


@dataclass
class CommandLine:
    name: str | None = None
    uuid: str | None = None
    #: no machine: libvirt asks what this QEMU can do
    probe: bool = False
    #: where QMP can be spoken; a leading zero byte: an abstract name
    sockets: list[str] = field(default_factory=list)
    #: it has QMP, by a descriptor that somebody (libvirt) opened for it
    given: bool = False
    #: sockets of the daemons of its groups
    pools: list[str] = field(default_factory=list)


def properties(text: str, first: str = "") -> dict[str, str]:
    """ "a=1,b,c=2,,3": a comma in a value is written twice.  `first` is the key
    of the first value, which may come without."""
    found: dict[str, str] = {}
    parts = text.replace(",,", "\0").split(",")
    for number, part in enumerate(parts):
        key, equals, value = part.replace("\0", ",").partition("=")
        if number == 0 and first and not equals:
            key, value, equals = first, key, "="
        found[key] = value if equals else "on"
    return found


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """-option VALUE; an option without a value has the next one's name, which
    nobody asks for."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            yield word.lstrip("-"), value


def object_properties(text: str) -> dict[str, str]:
    """-object takes both forms."""
    if not text.startswith("{"):
        return properties(text, "qom-type")
    try:
        return {str(k): str(v) for k, v in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {}


def socket_of(chardev: dict[str, str]) -> str | None:
    """The path at which it listens, if it does."""
    # both, for "server=on" and the old "server"
    if chardev.get("server", "off") != "on" or "path" not in chardev:
        return None
    abstract = chardev.get("abstract", "off") == "on"
    return "\0" * abstract + chardev["path"]


def pool_of(memory: dict[str, str]) -> str | None:
    """scope=host has one even if none is named: not every host has its daemon."""
    if memory.get("qom-type") != "memory-backend-ksm":
        return None
    named = f"{POOLS}/{memory['group']}.sock" if "group" in memory else None
    return memory.get("group-socket", named)


def parse(words: Sequence[str]) -> CommandLine:
    line = CommandLine()
    chardevs: dict[str, dict[str, str]] = {}
    monitors: list[dict[str, str]] = []
    for option, value in options(words):
        if option == "name":
            line.name = properties(value, "guest").get("guest")
        elif option in ("machine", "M"):
            line.probe |= properties(value, "type").get("type") == "none"
        elif option == "uuid":
            line.uuid = value
        elif option == "chardev":
            chardev = properties(value, "backend")
            # -mon may have come first
            chardevs.setdefault(chardev.get("id", ""), {}).update(chardev)
        elif option == "mon":
            mon = properties(value, "chardev")
            if mon.get("mode") == "control" and "chardev" in mon:
                monitors.append(chardevs.setdefault(mon["chardev"], {}))
        elif option in ("qmp", "qmp-pretty"):
            kind, _, rest = value.partition(":")
            if kind == "unix":
                monitors.append(properties(rest, "path"))
            elif kind == "chardev":
                monitors.append(chardevs.setdefault(rest, {}))
        elif option == "object":
            pool = pool_of(object_properties(value))
            if pool and pool not in line.pools:
                line.pools.append(pool)
    for monitor in monitors:
        path = socket_of(monitor)
        if path:
            line.sockets.append(path)
        line.given |= "fd" in monitor
    return line
