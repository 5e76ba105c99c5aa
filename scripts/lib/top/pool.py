# SPDX-License-Identifier: GPL-2.0-or-later
"""Asks the daemon of a group how it is (docs/interop/ksm-pool.rst, STATUS).

As `ksm-poold --status --json` does, without the program.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from top.model import PAGE, Member, Pool

STATUS, STATE, REFUSED = 14, 15, 3
HEAD = struct.Struct("<IIQ")
#: after a code of four bytes
REFUSED_TEXT = HEAD.size + 4
#: generation to cpu_ns, what is left to the kernel, then members and a zero
NUMBERS = struct.Struct("<19QII")
MEMBER = struct.Struct("<64sIIQQQQQ24x")
MEMBERS_MAX = 1024
MESSAGE_MAX = HEAD.size + NUMBERS.size + MEMBERS_MAX * MEMBER.size


def gone(path: str, text: str, state: str = "gone") -> Pool:
    return Pool(Path(path).stem, path, state, text)


def text_of(name: bytes) -> str:
    return name.partition(b"\0")[0].decode(errors="replace")


def member(packet: bytes, at: int) -> Member:
    name, pid, connected, _, _, held, share, published = MEMBER.unpack_from(packet, at)
    return Member(
        name=text_of(name),
        pid=pid,
        connected=bool(connected),
        held=held * PAGE,
        share=share * PAGE / 1000,
        published=published * PAGE,
    )


def decode(path: str, packet: bytes) -> Pool:
    """A STATE; anything else says why there is none."""
    if len(packet) < HEAD.size:
        return gone(path, "it ended the connection")
    kind, count, _ = HEAD.unpack_from(packet)
    if kind == REFUSED:
        return gone(path, text_of(packet[REFUSED_TEXT:]) or "refused", "refused")
    begin = HEAD.size + NUMBERS.size
    if kind != STATE or len(packet) != begin + count * MEMBER.size:
        return gone(path, "what answers there is no ksm-poold", "garbled")
    numbers = NUMBERS.unpack_from(packet, HEAD.size)
    generation, uptime, slots, used, _, metadata = numbers[:6]
    pool = Pool(
        group=Path(path).stem,
        socket=path,
        generation=generation,
        uptime=uptime,
        used=used * PAGE,
        limit=slots * PAGE,
        metadata=metadata,
        cpu_seconds=numbers[15] / 1e9,
        refused=dict(zip(("full", "share", "memory"), numbers[10:13], strict=True)),
    )
    starts = range(begin, len(packet), MEMBER.size)
    pool.members = [member(packet, at) for at in starts]
    pool.saved = max(0, sum(each.held for each in pool.members) - used * PAGE)
    return pool


def ask(path: str, seconds: float) -> Pool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(path)
            connection.send(HEAD.pack(STATUS, 0, 0))
            return decode(path, connection.recv(MESSAGE_MAX))
        except (TimeoutError, BlockingIOError):
            return gone(path, "it did not answer in time", "silent")
        except (FileNotFoundError, ConnectionRefusedError):
            return gone(path, "no daemon listens there")
        except OSError as error:
            return gone(path, error.strerror or str(error), "refused")
