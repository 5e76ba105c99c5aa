# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench volatile: a guest that writes all its memory, beside three quiet ones.

The quiet three by themselves first, then with it: what they cost then, what of
it is left to ksmd, and what becomes of its huge pages; in scope host, and with
plain QEMU and ksmd at full speed.  Leaves to others: the runs (guest/run.py).
"""

from __future__ import annotations

import time
from dataclasses import replace

from bench.dirty import ENGINE, thread_cpu
from bench.guests import KSMD_FULL
from bench.harness import Metrics, Session, divide
from guest.qemu import GuestError, guest_image, need_qemu, probe_scope
from guest.run import MIB, Run, Sample
from host import ksmsys

QUIET = 3
#: what of the writer's memory it does not write
COLD_MIB = 112
#: after merging has settled
WATCHED_S = 60


def run_of(scope: str, memory: int, beside: bool) -> Run:
    """The quiet guests, and behind them the one that writes."""
    run = Run(scope, QUIET + beside, memory, guest_image(), ksmd=KSMD_FULL, load=0)
    if beside:
        writer = run.guests[-1]
        writer.spec = replace(
            writer.spec, name="writer", cache_mib=16, private_mib=memory - COLD_MIB
        )
    return run


def one(session: Session, name: str, scope: str, memory: int, beside: bool) -> Metrics:
    """What `beside` changes is told by two of these."""

    def show(sample: Sample) -> None:
        session.say(f"volatile: {name}, {sample.seconds:.0f} s")

    watched = 10 if session.quick else WATCHED_S
    with run_of(scope, memory, beside) as run:
        run.boot(show)
        quiet, writers = run.guests[:QUIET], run.guests[QUIET:]
        for writer in writers:
            # for longer than this takes: it is not waited for
            writer.send("rewrite 3600")
        huge = [writer.memory().anon_huge for writer in writers]
        engines = [thread_cpu(guest.pid, ENGINE) for guest in quiet]
        ksmd = ksmsys.ksmd_cpu_s(ksmsys.ksmd_pid())
        run.start()
        run.merge(120, show, settle_s=30)
        session.say(f"volatile: {name}, {watched} s more")
        time.sleep(watched)
        out = {
            "seconds": time.monotonic() - run.began,
            "quiet_cpu_s": sum(
                thread_cpu(guest.pid, ENGINE) - then
                for guest, then in zip(quiet, engines, strict=True)
            )
            / 1e9,
            "ksmd_cpu_s": ksmsys.ksmd_cpu_s(ksmsys.ksmd_pid()) - ksmd,
            "quiet_saved_mib": sum(g.saved for g in run.sample().guests[:QUIET]) / MIB,
        }
        for writer, before in zip(writers, huge, strict=True):
            out["writer_cpu_s"] = thread_cpu(writer.pid, ENGINE) / 1e9
            out["hot_mib"] = memory - COLD_MIB
            out["huge_before_mib"] = before / MIB
            out["huge_after_mib"] = writer.memory().anon_huge / MIB
            if scope == "host":
                out["left_mib"] = int(writer.backend_stats()["kernel-left"]) / MIB
        if any(guest.verify() for guest in quiet) or any(w.failures for w in writers):
            raise GuestError(f"volatile: {name}: a guest's data is damaged")
    return {f"{name}_{key}": value for key, value in out.items()}


def volatile(session: Session) -> Metrics:
    """Three quiet guests, alone and beside one that writes all its memory."""
    need_qemu()
    reason = probe_scope(guest_image(), "vm") or ksmsys.why_not_controllable()
    if reason:
        session.note(f"scope=host cannot be had here: {reason.splitlines()[0]}")
        return {}
    memory = 256 if session.quick else 512
    out: Metrics = {}
    for scope, head in (("host", "host"), ("plain", "ksmd")):
        for beside in (False, True):
            name = f"{head}_{'beside' if beside else 'alone'}"
            out |= one(session, name, scope, memory, beside)
        for key in ("quiet_cpu", "ksmd_cpu"):
            alone, both = (f"{head}_{each}_{key}_s" for each in ("alone", "beside"))
            divide(out, f"{head}_beside_{key}_ratio", out[both], out[alone])
    return out
