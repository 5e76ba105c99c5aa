# SPDX-License-Identifier: GPL-2.0-or-later
"""Benches with real Debian guests: `guests`, `guest-stall`, RAM images.

`guests` holds each scope against plain QEMU with ksmd at full speed: how much
of the equal memory is saved, after what time, for how much CPU.  Every guest
verifies all its data first.  Leaves to others: the runs (guest/run.py), the
count of equal pages (guest/content.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from bench.harness import Metrics, Session
from guest import content
from guest.qemu import (
    Guest,
    GuestError,
    GuestSpec,
    guest_image,
    need_qemu,
    probe_scope,
)
from guest.run import BY_KERNEL, MIB, WITH_KSMD, Run, RunResult, Sample
from host import ksmsys

#: "at full speed", as 2009's table has it, and without the smart scan of 2023,
#: with which ksmd saves less in the first minutes
KSMD_FULL = {"pages_to_scan": 99999, "sleep_millisecs": 0, "smart_scan": 0}


def contents(run: Run) -> list[content.Content]:
    """What the guests of a run hold, all stopped at one time."""
    for guest in run.guests:
        guest.qmp("stop")
    found = []
    for guest in run.guests:
        found.append(content.read(guest.pid, guest.ram()))
    for guest in run.guests:
        guest.qmp("cont")
    return found


def ksmd_stops(seconds: float) -> float:
    """How long ksmd, driven by ksm-hostd, runs on after its last gain.

    From when this is called: what it gained before counts as gained now.
    """
    began = gained = time.monotonic()
    most = 0
    while ksmsys.read("run") == 1:
        if time.monotonic() - began > seconds:
            raise GuestError(f"ksmd still runs after {seconds:.0f} s")
        saved = ksmsys.read("pages_sharing") or 0
        if saved > most:
            most, gained = saved, time.monotonic()
        time.sleep(0.1)
    return time.monotonic() - gained


def huge_pages(run: Run) -> int:
    """MiB of guest RAM in huge pages."""
    return sum(guest.memory().anon_huge for guest in run.guests) // MIB


def measure(
    scope: str,
    guests: int,
    memory_mib: int,
    image: Path,
    seconds: float,
    say: Callable[[str], None],
    max_cpu: int = 20,
) -> tuple[RunResult, list[content.Content]]:
    """One run; what was equal before it merged comes with it."""

    def show(sample: Sample) -> None:
        say(f"guests: {scope}, {guests} x {memory_mib} MiB, {sample.seconds:.0f} s")

    # 20 % of a core for the engine: the CPU used is what is compared, not
    # the time taken
    with Run(
        scope, guests, memory_mib, image, max_cpu=max_cpu, ksmd=KSMD_FULL, alone=True
    ) as run:
        run.boot(show)
        found = contents(run)
        huge = huge_pages(run)
        run.start()
        # ksmd splits a huge page in one pass and merges in a later one:
        # its gains may pause
        run.merge(
            seconds,
            show,
            interval=0.25,
            settle_s=30 if scope in WITH_KSMD else 10,
            glance=True,
        )
        if scope == "host":
            # nobody knows of anything more that could be merged, then
            run.result.ksmd_stops_s = ksmd_stops(300)
        run.verify(show)
        run.result.huge_mib = huge, huge_pages(run)
    if not run.result.data_intact:
        raise GuestError(
            f"scope {scope}: a guest's data is damaged: {run.result.errors[:3]}"
        )
    return run.result, found


def metrics_of(name: str, result: RunResult, achievable_pages: int) -> Metrics:
    achievable = achievable_pages * 4096 / MIB
    metrics = {
        f"{name}_resident_mib": result.resident_mib,
        f"{name}_saved_mib": result.saved_mib,
        f"{name}_achievable_mib": achievable,
        f"{name}_saved_fraction": result.saved_mib / achievable if achievable else 0.0,
        f"{name}_cpu_s": result.cpu_s,
        f"{name}_metadata_mib": result.metadata_mib,
        f"{name}_huge_before_mib": float(result.huge_mib[0]),
        f"{name}_huge_after_mib": float(result.huge_mib[1]),
    }
    if result.ksmd_stops_s is not None:
        metrics[f"{name}_ksmd_stops_s"] = result.ksmd_stops_s
    for key, value in (
        ("seconds_to_95", result.seconds_to(0.95)),
        ("cpu_to_95", result.cpu_to(0.95)),
    ):
        if not math.isnan(value):
            metrics[f"{name}_{key}"] = value
    for key, value in result.stall.items():
        if key != "count":
            metrics[f"{name}_stall_{key}_ns"] = value
    return metrics


def beside_ksmd(metrics: Metrics, name: str, ksmds: list[str]) -> None:
    """Holds a run against the mean of those by ksmd alone.

    Other guests booted in each, which have more or less that is equal: what
    is compared is how much of it was saved.
    """

    def mean_of(what: str) -> float:
        return mean(metrics.get(f"{ksmd}_{what}", math.nan) for ksmd in ksmds)

    saved, cpu = (metrics.get(f"{name}_{k}") for k in ("saved_fraction", "cpu_to_95"))
    if saved is not None and mean_of("saved_fraction") > 0:
        metrics[f"{name}_saved_by_ksmds"] = saved / mean_of("saved_fraction")
    if cpu and mean_of("cpu_to_95") > 0:
        metrics[f"{name}_cpu_ratio"] = mean_of("cpu_to_95") / cpu


def guests(session: Session) -> Metrics:
    """Real Debian guests: what each scope saves of what is equal."""
    need_qemu()
    image = guest_image()
    memory = 256 if session.quick else 512
    number = 2 if session.quick else 3
    limit = 120 if session.quick else 300
    metrics: Metrics = {}

    # several guests, merged across them: by the kernel, and by QEMU
    for scope, name, max_cpu, count in (
        ("plain", "ksmd", 0, number),
        ("host", "host", 10, number),
        ("host", "host_full", 100, number),
        ("group", "group", 10, number),
        ("group", "group_full", 100, number),
        ("plain", "ksmd_again", 0, number),
        ("plain", "ksmd_six", 0, 2 * number),
        ("host", "host_six", 10, 2 * number),
    ):
        reason = None if scope in BY_KERNEL else probe_scope(image, "vm")
        if reason:
            session.note(f"scope={scope} cannot be had here: {reason.splitlines()[0]}")
            continue
        result, found = measure(
            scope, count, memory, image, limit, session.say, max_cpu
        )
        metrics |= metrics_of(name, result, content.achievable(found))
    beside_ksmd(metrics, "host_six", ["ksmd_six"])
    for name in ("host", "host_full", "group", "group_full"):
        # its CPU differs by half and more from run to run
        beside_ksmd(metrics, name, ["ksmd", "ksmd_again"])

    # one guest, merged within itself
    single, found = measure("plain", 1, memory, image, limit, session.say)
    metrics |= metrics_of("ksmd_single", single, content.achievable(found))
    for scope in ("zero", "vm"):
        reason = probe_scope(image, scope)
        if reason:
            session.note(f"scope={scope} cannot be had here: {reason.splitlines()[0]}")
            continue
        result, found = measure(scope, 1, memory, image, limit, session.say)
        worth = content.achievable_worth(found[0], scope)
        metrics |= metrics_of(scope, result, worth)
        # the CPU ksmd needs for as much of such a guest
        ours, theirs = result.cpu_to(0.95), single.cpu_to(0.95, result.saved_mib)
        if math.isnan(theirs):
            session.note(f"ksmd does not reach what scope={scope} saves")
        elif ours > 0:
            metrics[f"{scope}_cpu_ratio"] = theirs / ours
    return metrics


#: Scopes whose stalls are held against each other.
STALL_SCOPES = ("vm", "group")


def stall_scope(session: Session, scope: str, image: Path) -> Metrics:
    """One guest of three writes, while all three are merged, and while none is."""
    seconds = 3 if session.quick else 10
    rounds = 2 if session.quick else 5
    writes: dict[str, list[dict[str, int]]] = {"off": [], "on": []}
    # the default max-cpu; guests that have something to merge in each round
    with Run(scope, 3, 512, image, load=0) as run:
        run.boot()
        writer = run.guests[0]
        writer.command("touch 1")
        for i in range(rounds):
            # the two take turns, so that a busy host is busy for both
            for merging in ("off", "on"):
                session.say(f"guest-stall: {scope}, {i + 1} of {rounds}")
                for guest in run.guests:
                    guest.qmp(
                        "qom-set",
                        path="/objects/ram0",
                        property="run",
                        value=merging == "on",
                    )
                    guest.command("alloc 16 pattern")
                writer.command(f"touch {seconds}")
                touched = [e for e in writer.events if e["event"] == "touched"][-1]
                writes[merging].append(touched)
                for guest in run.guests:
                    guest.command("free 16")
        stalls = [guest.backend_stats()["stall"] for guest in run.guests]
        for guest in run.guests:
            if guest.verify():
                raise GuestError(f"the guest's data is damaged: {guest.failures[:3]}")
    metrics: Metrics = {}
    rate = {}
    for merging, touches in writes.items():
        rate[merging] = median(t["pages"] / t["ns"] * 1e9 for t in touches)
        for name in ("p99_ns", "p999_ns", "max_ns"):
            metrics[f"{scope}_{merging}_{name}"] = median(t[name] for t in touches)
        metrics[f"{scope}_{merging}_per_second"] = rate[merging]
    metrics[f"{scope}_on_ratio"] = rate["on"] / rate["off"]
    # all that were away, in any guest
    metrics[f"{scope}_on_isolations"] = sum(stall["count"] for stall in stalls)
    for name in ("p50", "p99", "max"):
        metrics[f"{scope}_on_isolated_{name}_ns"] = median(s[name] for s in stalls)
    return metrics


def guest_stall(session: Session) -> Metrics:
    """Writes in a guest, with and without merging: how fast, how long."""
    need_qemu()
    image = guest_image()
    metrics: Metrics = {}
    reason = probe_scope(image, "vm")
    if reason:
        session.note(f"scope=vm cannot be had here: {reason.splitlines()[0]}")
        return metrics
    for scope in STALL_SCOPES:
        metrics |= stall_scope(session, scope, image)
    return metrics


def make_images(directory: Path, number: int = 2, memory_mib: int = 512) -> list[Path]:
    """RAM images of running guests, for the bench `images`."""
    need_qemu()
    image = guest_image()
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(number):
        spec = GuestSpec(
            name=f"guest{i + 1}",
            memory_mib=memory_mib,
            backend="memory-backend-ram",
            seed=i + 1,
        )
        path = directory / f"guest{i + 1}-{memory_mib}.ram"
        with Guest(spec, image) as guest:
            guest.wait_ready()
            guest.verify()
            guest.qmp("stop")
            content.save_image(guest.pid, guest.ram(), path)
        paths.append(path)
    return paths
