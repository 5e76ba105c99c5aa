# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench idle: the CPU that merging takes when there is nothing left to do.

Debian guests whose programs sleep, merged, then left alone.  By dirty source
one guest of its own (scope vm), and the members of one group with their
daemon.  With `--against` another build of QEMU is measured at the same time:
guests of both take turns in being started, so that what the machine does
meanwhile it does to both.  Leaves to others: guests (guest/qemu.py).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.dirty import ENGINE, SOURCES, thread_cpu
from bench.harness import Metrics, Session, divide
from guest.qemu import Guest, GuestSpec, guest_image, need_qemu, probe_scope
from host.poold import Poold

#: the back-off between passes is to be at its end, what was written while a guest
#: booted restored, merged again and given up, and huge pages looked at three times
QUIET_S = 240
#: guests of each of two builds
PAIRS = 3


@dataclass(frozen=True)
class Setting:
    """What stands idle."""

    name: str
    guests: int
    memory_mib: int
    #: how written pages are found; None: as the object chooses
    source: str | None = None
    in_group: bool = False


@dataclass
class Reading:
    """One guest, or the difference of two readings; ns."""

    engine: int
    log: int
    passes: int

    @staticmethod
    def of(guest: Guest) -> Reading:
        stats = guest.backend_stats()
        engine = thread_cpu(guest.pid, ENGINE)
        return Reading(engine, int(stats.get("log-time", 0)), int(stats["full-scans"]))

    def since(self, then: Reading) -> Reading:
        return Reading(
            self.engine - then.engine, self.log - then.log, self.passes - then.passes
        )


@dataclass
class Build:
    """One QEMU's guests, and the daemon of their group."""

    head: str  # of its metrics
    qemu: Path
    guests: list[Guest]
    poold: Poold | None = None

    def read(self) -> list[Reading]:
        return [Reading.of(guest) for guest in self.guests]

    def daemon_s(self) -> float:
        return self.poold.cpu_s() if self.poold is not None else 0.0


def spec_of(setting: Setting, build: Build, number: int) -> GuestSpec:
    mib = setting.memory_mib
    properties = {"scope": "vm", "max-cpu": "100"}
    if setting.source is not None:
        properties["dirty-tracking"] = setting.source
    if build.poold is not None:
        properties |= {"scope": "group", "group": "idle"}
        properties["group-socket"] = str(build.poold.socket)
    return GuestSpec(
        name=f"guest{number + 1}",
        memory_mib=mib,
        cache_mib=mib // 16,
        private_mib=mib // 2,
        seed=number + 1,
        load=0,
        userland=False,
        # khugepaged copies all of a guest's memory once, for many minutes:
        # 16 MiB every ten seconds
        kernel="transparent_hugepage=never",
        properties=properties,
        qemu=build.qemu,
    )


def boot(
    session: Session, stack: ExitStack, setting: Setting, builds: list[Build]
) -> None:
    """All guests, until no engine finds anything to do."""
    image = guest_image()
    for build in builds:
        if setting.in_group:
            build.poold = stack.enter_context(Poold())
    for i in range(setting.guests):
        session.say(f"idle: {setting.name}: guest {i + 1} of {setting.guests} boots")
        # neither is always the first
        for build in builds if i % 2 == 0 else reversed(builds):
            guest = stack.enter_context(Guest(spec_of(setting, build, i), image))
            guest.wait_ready()
            build.guests.append(guest)
    session.say(f"idle: {setting.name}: everything is looked at once")
    for build in builds:
        for guest in build.guests:

            def is_idle(guest: Guest = guest) -> bool:
                return bool(guest.backend_stats()["state"] == "idle")

            guest.wait_for("idle engine", is_idle, 300)
            guest.qmp("qom-set", path="/objects/ram0", property="max-cpu", value=10)


def measure(session: Session, setting: Setting, builds: list[Build]) -> Metrics:
    """Percent of a core, and passes, while nothing is to be gained any more."""
    seconds = 20 if session.quick else 60
    out: Metrics = {}
    with ExitStack() as stack:
        boot(session, stack, setting, builds)
        session.say(f"idle: {setting.name}: {QUIET_S} s until all is quiet")
        time.sleep(QUIET_S)
        session.say(f"idle: {setting.name}: {seconds} s of nothing")
        before = [(build.read(), build.daemon_s()) for build in builds]
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        for build, (readings, daemon) in zip(builds, before, strict=True):
            daemon_s = build.daemon_s() - daemon
            now = build.read()
            each = [b.since(a) for a, b in zip(readings, now, strict=True)]
            row = metrics_of(each, took)
            if setting.in_group:
                row["daemon_cpu_percent"] = 100 * daemon_s / took
            head = f"{build.head}{setting.name}"
            out |= {f"{head}_{name}": value for name, value in row.items()}
    return out


def metrics_of(each: list[Reading], took: float) -> Metrics:
    """Of several guests the median, and the one that takes most."""
    engine = [one.engine / took / 1e7 for one in each]
    out = {
        "engine_cpu_percent": median(engine),
        "log_cpu_percent": median(one.log / took / 1e7 for one in each),
        "passes_per_minute": median(one.passes * 60 / took for one in each),
    }
    if len(each) > 1:
        out["engine_cpu_percent_max"] = max(engine)
    passes = sum(one.passes for one in each)
    if passes:
        out["us_per_pass"] = sum(one.engine for one in each) / passes / 1e3
    return out


def settings_of(session: Session) -> list[Setting]:
    against = session.options.against is not None
    mib = 1024 if session.quick or against else 4096
    single = PAIRS if against else 1
    settings = [Setting(source, single, mib, source) for source in SOURCES]
    members = 2 if session.quick else PAIRS if against else 4
    reason = probe_scope(guest_image(), "vm")
    if reason:
        session.note(f"scope=group cannot be had here: {reason.splitlines()[0]}")
        return settings
    # each as large as a quarter of the guest that is alone
    member_mib = 512 if session.quick else 1024
    return [*settings, Setting("group", members, member_mib, in_group=True)]


def idle(session: Session) -> Metrics:
    """Guests that do nothing: what looking at them costs."""
    ours, other = need_qemu(), session.options.against
    out: Metrics = {}
    for setting in settings_of(session):
        out[f"{setting.name}_guests"] = float(setting.guests)
        out[f"{setting.name}_guest_gib"] = setting.memory_mib / 1024
        builds = [Build("", ours, [])]
        if other is not None:
            builds.append(Build("against_", other, []))
        out |= measure(session, setting, builds)
        for name in ("engine_cpu_percent", "us_per_pass"):
            key = f"{setting.name}_{name}"
            theirs = out.get(f"against_{key}")
            divide(out, f"{key}_ratio", theirs, out.get(key))
    # the main loop reads the log, and counts its own time
    out["idle_cpu_percent"] = max(
        out[f"{source}_engine_cpu_percent"] + out[f"{source}_log_cpu_percent"]
        for source in SOURCES
    )
    return out
