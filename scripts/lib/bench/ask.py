# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench ask: what a question costs a member and the daemon.

A member of its own, which speaks the protocol (docs/interop/ksm-pool.rst) and has
no memory, asks about hashes: as many in a message as the daemon takes, or
fewer.  The hashes are new to the daemon, or all were
asked before.  Leaves to others: the daemon (host/poold.py).
"""

from __future__ import annotations

import socket
import struct
import time
from array import array
from pathlib import Path
from random import Random
from statistics import median

from bench.harness import Metrics, Session
from host.poold import Poold

HELLO, WELCOME, ASK, ANSWER = 1, 2, 5, 6
MAGIC = 0x504D534B
HEAD = struct.Struct("<IIQ")
#: hashes: pages of 4 GiB
HASHES = 1 << 20
BATCHES = (512, 8192)
ROUNDS = 5
#: questions without an answer
IN_FLIGHT = 2
MESSAGE_MAX = 1 << 20


class Member:
    """A connection of this process's; one daemon has one at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(path))
        hello = struct.pack("<IIQQQQ64s", MAGIC, 1, 0, 0, 0, HASHES, b"bench")
        self._socket.send(HEAD.pack(HELLO, 0, 0) + hello)
        welcome, _, _, _ = self._socket.recvmsg(MESSAGE_MAX, 256)
        kind, _, _ = HEAD.unpack_from(welcome)
        if kind != WELCOME:
            raise OSError(f"the daemon said {kind} instead of WELCOME")

    def close(self) -> None:
        self._socket.close()

    def ask(self, questions: list[bytes]) -> None:
        """All of them, as a member does: the next is there when one is answered."""
        waiting = 0
        for question in questions:
            if waiting == IN_FLIGHT:
                self._answer()
                waiting -= 1
            self._socket.send(question)
            waiting += 1
        for _ in range(waiting):
            self._answer()

    def _answer(self) -> None:
        while True:
            kind, _, _ = HEAD.unpack_from(self._socket.recv(MESSAGE_MAX))
            if kind == ANSWER:
                return


def questions(random: Random, batch: int) -> list[bytes]:
    """All the messages, made in advance."""
    made = []
    for i in range(HASHES // batch):
        hashes = array("Q", (random.getrandbits(64) for _ in range(batch)))
        made.append(HEAD.pack(ASK, batch, i + 1) + hashes.tobytes())
    return made


def measure(asked: list[bytes], daemon: Poold, member: Member) -> tuple[float, float]:
    """ns of the daemon's CPU, and by the clock, for each hash."""
    cpu, began = daemon.cpu_s(), time.perf_counter()
    member.ask(asked)
    took = time.perf_counter() - began
    return (daemon.cpu_s() - cpu) * 1e9 / HASHES, took * 1e9 / HASHES


def ask(session: Session) -> Metrics:
    """Questions to the daemon of a group: ns for each hash."""
    rounds = 2 if session.quick else ROUNDS
    metrics: Metrics = {"hashes": float(HASHES)}
    for batch in BATCHES:
        figures: dict[str, list[tuple[float, float]]] = {"new": [], "known": []}
        for i in range(rounds):
            session.say(f"ask: {batch} in a message, {i + 1} of {rounds}")
            asked = questions(Random(i), batch)
            with Poold() as daemon:
                member = Member(daemon.socket)
                for name in figures:
                    figures[name].append(measure(asked, daemon, member))
                member.close()
        for name, values in figures.items():
            metrics[f"{name}_{batch}_daemon_ns"] = median(v[0] for v in values)
            metrics[f"{name}_{batch}_ns"] = median(v[1] for v in values)
    return metrics
