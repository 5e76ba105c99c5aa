# SPDX-License-Identifier: GPL-2.0-or-later
"""What the storm can do to a guest: one function each, chosen by its weight.

Each draws from the generator it is given and returns its result for the log;
StormError: this must not happen; Refused: QEMU answered with an error.  Those
marked so may also be done while the guest is being migrated.  Leaves to
others: when (storm.py).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

from guest.qemu import adopt
from guest.storm import (
    BALLOON_MIB,
    DIMM_MIB,
    GUEST_S,
    MEMORY_MIB,
    MIB,
    OBJECT,
    OWN_MIB,
    Storm,
    Vm,
    action,
)
from guest.storm_watch import Refused, StormError

MIGRATION_S = 120.0

#: What both ends of a migration say when it is cut in the middle: QEMU has a
#: message for each place where that can be noticed.
SAY_CUT = [
    r"qemu-system-x86_64: .*(migration|multifd|ram_save|ram_load|SaveStateEntry|"
    r"section|stream|[Cc]hannel|socket|Broken pipe|Connection re(set|fused))",
]
#: The one that was to receive never had the guest: its errors, not warnings,
#: are those of a stream that ends too soon, wherever that is.
SAY_HALF = [r"^qemu-system-x86_64: (?!warning: )"]

# --- the guest's own doing --------------------------------------------------


@action(6, beside=True)
def do_memory(storm: Storm, rng: Random) -> object:
    """Memory comes and goes."""
    mib = rng.randint(4, 32)
    kind = rng.choice(("random", "zero", "pattern"))
    if storm.own_mib + mib > OWN_MIB:
        storm.send(f"free {storm.own_mib - 16}")
        storm.own_mib = 16
    storm.send(f"alloc {mib} {kind}")
    storm.own_mib += mib
    return f"alloc {mib} {kind}"


@action(6, beside=True)
def do_guest(storm: Storm, rng: Random) -> object:
    """Something that takes the guest a while."""
    line = rng.choice(
        ("drop", "read 48", "read 24", "direct 8", "disks 8", "touch 1", "verify")
        + ("io 10", "io 60", "load 100", "load 30", "rewrite 1", "rewrite 2")
    )
    storm.send(line)
    return line


@action(4)
def do_settle(storm: Storm, rng: Random) -> object:
    return storm.settle()


@action(1)
def do_rest(storm: Storm, rng: Random) -> object:
    """Time to merge."""
    time.sleep(rng.uniform(1, 4))
    return storm.settle()


# --- the balloon, the host's memory -----------------------------------------


@action(4, beside=True)
def do_balloon(storm: Storm, rng: Random) -> object:
    taken = rng.choice((0, 0, rng.randint(0, MEMORY_MIB - BALLOON_MIB)))
    return balloon_takes(storm, taken)


def balloon_takes(storm: Storm, taken: int) -> object:
    """QEMU wants to hear what is left, of all there is with the DIMM."""
    mib = MEMORY_MIB + (DIMM_MIB if storm.dimm else 0) - taken
    storm.qmp("balloon", value=mib * MIB)
    return f"{mib} MiB"


@action(3)
def do_pressure(storm: Storm, rng: Random) -> object:
    """The host wants memory back: page cache, and what is lazily free."""
    if storm.group is None:
        return "no control group here"
    before = storm.group.usage()
    storm.group.reclaim(rng.choice((16, 64, 256)) * MIB)
    return f"{(before - storm.group.usage()) / MIB:.0f} MiB reclaimed"


@action(3, beside=True)
def do_daemon(storm: Storm, rng: Random) -> object:
    """The group's daemon dies, begins anew, stands still, or is replaced."""
    how = rng.choice(("kill", "end", "away", "stop", "reload"))
    if how == "reload":
        os.kill(storm.poold.pid, signal.SIGHUP)
    elif how == "stop":
        os.kill(storm.poold.pid, signal.SIGSTOP)
        time.sleep(rng.random() * 2)
        os.kill(storm.poold.pid, signal.SIGCONT)
    else:
        storm.poold.stop(signal.SIGTERM if how == "end" else signal.SIGKILL)
        time.sleep(rng.random() * 3 if how == "away" else 0)
        storm.poold.start()
    return how


# --- monitor commands -------------------------------------------------------

#: property: values it takes, values it refuses
TUNABLES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "run": ((True, False), (0, 1, "on", 1 << 40, None)),
    "max-cpu": (
        (1, 5, 10, 50, 100),
        (0, 101, 255, 256, 300, -1, "50", "many", 1 << 40, 1.5, True),
    ),
    "target-scan-time": (
        (0, 1, 5, 600, (1 << 32) - 1),
        (-1, "soon", 1 << 32, 1 << 40, 0.5, False),
    ),
    "smart-scan": ((True, False), (0, "off", -1, 1 << 40)),
}
#: cannot change any more once the guest has its memory
FIXED: dict[str, tuple[object, ...]] = {
    "scope": ("vm", "zero", "host", "group", "none", 1),
    "group": ("tenant", ""),
    "dirty-tracking": ("log", "pagemap", "checksum", "auto", "none"),
    "free-policy": ("lazy", "eager", "auto", 0),
    "merge-across-nodes": (True, False),
    "iothread": ("io0", "nobody", ""),
    "size": (1 << 20, 0, -1),
    "share": (True,),
    "reserve": (True, False),
    "no-such-property": (1,),
}


#: refused by QEMU's own code, in words of its own
BASE = ("share", "reserve", "iothread")


def must_be_refused(storm: Storm, name: str, value: object) -> str:
    try:
        storm.set(name, value)
    except Refused as refused:
        if name not in str(refused) and name not in BASE:
            raise StormError(
                f"qom-set {name} {value!r}: the error does not name the property: "
                f"{refused}"
            ) from refused
        return f"{name}={value!r}: {refused}"
    raise StormError(f"qom-set {name} {value!r} was not refused")


@action(6, beside=True)
def do_tune(storm: Storm, rng: Random) -> object:
    """Tunables; those of the engine are refused where there is none."""
    vm = storm.vm
    name = rng.choice(list(TUNABLES))
    value = rng.choice(TUNABLES[name][0])
    if vm.flavour.backend == "memory-backend-ram":
        return "nothing to tune"
    if not vm.flavour.ours and name != "run":
        return must_be_refused(storm, name, value)
    storm.set(name, value)
    if name == "run":
        vm.run = bool(value)
    got = storm.qmp("qom-get", path=OBJECT, property=name)
    if got != value:
        raise StormError(f"qom-set {name} {value!r}, but qom-get has {got!r}")
    return f"{name}={value!r}"


@action(3, beside=True)
def do_absurd(storm: Storm, rng: Random) -> object:
    """Invalid values, and properties that cannot change any more."""
    name = rng.choice(list(TUNABLES) + list(FIXED))
    values = TUNABLES[name][1] if name in TUNABLES else FIXED[name]
    value = rng.choice(values)
    if storm.vm.flavour.backend == "memory-backend-ram":
        return "not on plain memory"
    return must_be_refused(storm, name, value)


@action(2)
def do_attributes(storm: Storm, rng: Random) -> object:
    """Attributes of all memory backends, back and forth."""
    name = rng.choice(("merge", "dump"))
    values = rng.choice(((False, True), (False,), (True,)))
    results = []
    for value in values:
        try:
            storm.set(name, value)
            results.append(f"{name}={value}")
            if name == "dump":
                storm.vm.dump = value
        except Refused as refused:
            results.append(f"{name}={value} refused: {refused}")
            if name not in str(refused):
                raise StormError(f"{name}: the error does not name it") from refused
    return ", ".join(results)


@action(4, beside=True)
def do_unmerge(storm: Storm, rng: Random) -> object:
    """A piece of memory gets its own pages back."""
    vm = storm.vm
    if not vm.flavour.ours:
        return "not with this scope"
    size = MEMORY_MIB * MIB
    offset = rng.randrange(size) & -4096
    length = min(rng.choice((4096, 64 * 4096, 2 * MIB, 64 * MIB)), size - offset)
    kind = rng.choice(
        ("good", "good", "good", "some", "all", "odd", "beyond", "running")
    )
    was = vm.run
    storm.set("run", kind == "running")
    try:
        if kind == "all":
            storm.qmp("ksm-unmerge", id="ram0")
        elif kind == "some":
            limit: dict[str, Any] = {"max-time": rng.randrange(20)}
            done = storm.qmp(
                "ksm-unmerge", id="ram0", offset=offset, size=length, **limit
            )
            if done["complete"] != (done["offset"] == offset + length):
                raise StormError(f"ksm-unmerge {offset} {length}: {done}")
        elif kind == "odd":
            storm.qmp("ksm-unmerge", id="ram0", offset=offset + 1, size=4096)
        elif kind == "beyond":
            storm.qmp("ksm-unmerge", id="ram0", offset=offset, size=size)
        else:
            storm.qmp("ksm-unmerge", id="ram0", offset=offset, size=length)
    except Refused as refused:
        # a snapshot may be taken meanwhile
        beside = "a migration or snapshot is running" in str(refused)
        if kind in ("good", "some", "all") and not beside:
            raise StormError(f"ksm-unmerge {offset} {length}: {refused}") from refused
        return f"{kind}: {refused}"
    finally:
        storm.set("run", was)
    if kind in ("odd", "running") or (kind == "beyond" and offset):
        raise StormError(f"ksm-unmerge {kind} {offset} was not refused")
    return f"{kind} {offset} {length}"


@action(4)
def do_stop_cont(storm: Storm, rng: Random) -> object:
    times = rng.choice((1, 1, 5, 20))
    for _ in range(times):
        storm.qmp("stop")
        time.sleep(rng.choice((0, 0.01, 0.05)))
        storm.qmp("cont")
    storm.settle()
    return f"{times} times"


@action(1)
def do_stopped(storm: Storm, rng: Random) -> object:
    """A stopped guest's memory stays what it is, while it is merged."""
    storm.qmp("stop")
    files = [storm.directory / f"memory{i}" for i in range(2)]
    try:
        for file in files:
            storm.qmp("pmemsave", val=0, size=MEMORY_MIB * MIB, filename=str(file))
            if file is files[0]:
                time.sleep(rng.uniform(0.5, 3))
                do_tune(storm, rng)
        compare_files(files[0], files[1])
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    storm.qmp("cont")
    storm.settle()
    return "equal"


def compare_files(first: Path, second: Path) -> None:
    with first.open("rb") as a, second.open("rb") as b:
        differ = []
        for page in range(first.stat().st_size // MIB):
            x, y = a.read(MIB), b.read(MIB)
            if x != y:
                differ += [
                    page * 256 + i
                    for i in range(256)
                    if x[i * 4096 : i * 4096 + 4096] != y[i * 4096 : i * 4096 + 4096]
                ]
    if differ:
        raise StormError(
            f"memory of a stopped guest changed: {len(differ)} pages: {differ[:20]}"
        )


@action(1)
def do_dump(storm: Storm, rng: Random) -> object:
    file = storm.directory / "dump"
    detach = rng.random() < 0.5
    try:
        storm.qmp(
            "dump-guest-memory", paging=False, protocol=f"file:{file}", detach=detach
        )
        storm.wait(
            "end of the dump",
            lambda: storm.qmp("query-dump")["status"] in ("completed", "failed"),
            GUEST_S,
        )
        status = storm.qmp("query-dump")["status"]
        size = file.stat().st_size
        if status != "completed" or size < MEMORY_MIB * MIB:
            raise StormError(f"dump: {status}, {size} bytes")
    finally:
        file.unlink(missing_ok=True)
    storm.settle()
    return f"{size / MIB:.0f} MiB, detach={detach}"


@action(1)
def do_reset(storm: Storm, rng: Random) -> object:
    """The guest boots again, on memory that is merged from before."""
    guest = storm.vm.guest
    for delay in rng.choice(((), (), (0.5,), (2,))):
        storm.qmp("system_reset")
        time.sleep(delay)
    guest.events.clear()
    storm.qmp("system_reset")
    guest.wait_ready()
    storm.send("io 30")
    return storm.settle()


@action(2)
def do_dirty_rate(storm: Storm, rng: Random) -> object:
    """Another user of the dirty log comes and goes."""
    mode = rng.choice(("page-sampling", "dirty-bitmap"))
    storm.qmp("calc-dirty-rate", calc_time=1, mode=mode)
    storm.wait(
        "measured dirty rate",
        lambda: storm.qmp("query-dirty-rate")["status"] == "measured",
        60,
    )
    return f"{mode}: {storm.qmp('query-dirty-rate').get('dirty-rate')} MiB/s"


# --- memory modules ---------------------------------------------------------


def dimm_plugged(storm: Storm) -> bool:
    names = [each["name"] for each in storm.qmp("qom-list", path="/machine/peripheral")]
    return "dimm0" in names


@action(2)
def do_dimm(storm: Storm, rng: Random) -> object:
    """Memory is plugged, or the guest is asked to give it back."""
    if not storm.dimm:
        kind = storm.vm.flavour
        storm.qmp(
            "object-add",
            storm.vm,
            qom_type=kind.backend,
            id="mem0",
            size=DIMM_MIB * MIB,
            **storm.dimm_properties(kind),
        )
        storm.dimm = True
        storm.qmp("device_add", driver="pc-dimm", id="dimm0", memdev="mem0")
        storm.settle()
        return "plugged"
    # the guest needs room for the DIMM's content
    balloon_takes(storm, 0)
    storm.settle()
    try:
        storm.qmp("device_del", id="dimm0")
    except Refused as refused:
        return f"not now: {refused}"
    deadline = time.monotonic() + 10
    while dimm_plugged(storm):
        if time.monotonic() > deadline:
            return "the guest keeps it"
        time.sleep(0.1)
    # RCU may hold on to it for a moment
    for attempt in range(100):
        try:
            storm.qmp("object-del", id="mem0")
            break
        except Refused:
            if attempt == 99:
                raise
            time.sleep(0.1)
    storm.dimm = False
    return "unplugged"


# --- snapshots in an image --------------------------------------------------


def job(storm: Storm, command: str, **arguments: Any) -> None:
    storm.qmp(command, job_id="job", **arguments)

    def over() -> bool:
        jobs = [each for each in storm.qmp("query-jobs") if each["id"] == "job"]
        return bool(jobs and jobs[0]["status"] == "concluded")

    storm.wait(f"end of {command}", over, MIGRATION_S)
    info = next(each for each in storm.qmp("query-jobs") if each["id"] == "job")
    storm.qmp("job-dismiss", id="job")
    if "error" in info:
        raise Refused(f"{command}: {info['error']}")


def need_state(storm: Storm) -> None:
    vm = storm.vm
    if vm.state:
        return
    file = storm.directory / f"{vm.name}.qcow2"
    file.write_bytes(b"")
    storm.qmp(
        "blockdev-add",
        driver="file",
        node_name="file0",
        filename=str(file),
        locking="off",
    )
    job(
        storm,
        "blockdev-create",
        options={"driver": "qcow2", "file": "file0", "size": MIB},
    )
    storm.qmp("blockdev-add", driver="qcow2", node_name="state", file="file0")
    vm.state = True


@action(2)
def do_savevm(storm: Storm, rng: Random) -> object:
    need_state(storm)
    tag = rng.choice("ab")
    vm = storm.vm
    if tag in vm.tags:
        job(storm, "snapshot-delete", tag=tag, devices=["state"])
        del vm.tags[tag]
    job(storm, "snapshot-save", tag=tag, vmstate="state", devices=["state"])
    vm.tags[tag] = storm.dimm
    storm.settle()
    return tag


@action(3)
def do_loadvm(storm: Storm, rng: Random) -> object:
    """What was saved before goes on."""
    tags = [tag for tag, dimm in storm.vm.tags.items() if dimm == storm.dimm]
    if not tags:
        return do_savevm(storm, rng)
    if storm.qmp("query-migrate").get("status") in ("failed", "cancelled"):
        # docs/devel/ksm-known-issues.rst
        return "QEMU would take the error of that migration for one of its own"
    tag = rng.choice(tags)
    job(storm, "snapshot-load", tag=tag, vmstate="state", devices=["state"])
    if storm.qmp("query-status")["status"] != "running":
        storm.qmp("cont")
    storm.settle()
    return tag


# --- migration --------------------------------------------------------------

#: The capabilities of a kind of migration, on both sides.
KINDS: dict[str, tuple[str, ...]] = {
    "precopy": (),
    "xbzrle": ("xbzrle",),
    "auto-converge": ("auto-converge",),
    "multifd": ("multifd",),
    "postcopy": ("postcopy-ram",),
    "preempt": ("postcopy-ram", "postcopy-preempt"),
    "file": (),
    "mapped-ram": ("mapped-ram",),
    "mapped-ram-multifd": ("mapped-ram", "multifd"),
    "background": ("background-snapshot",),
}


def capabilities(storm: Storm, vm: Vm, names: tuple[str, ...], on: bool) -> None:
    states = [{"capability": name, "state": on} for name in sorted(names)]
    storm.qmp("migrate-set-capabilities", vm, capabilities=states)


def migration_status(storm: Storm, vm: Vm) -> str:
    return str(storm.qmp("query-migrate", vm).get("status", "none"))


def beside(storm: Storm, rng: Random) -> list[str]:
    """Some things that happen while the guest is on its way."""
    results = []
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        time.sleep(rng.choice((0, 0.05, 0.3)))
        name = rng.choice(list(storm.beside))
        try:
            result = storm.beside[name](storm, rng)
        except Refused as refused:
            # a command that comes in the wrong moment of a migration
            result = f"refused: {refused}"
        storm.log(f"  beside: {name}: {result}")
        results.append(name)
    return results


def wait_status(storm: Storm, vm: Vm, *wanted: str) -> str:
    """Waits for the end of a migration; it must be one of the wanted."""
    start = time.monotonic()
    eased = False

    def over() -> bool:
        nonlocal eased
        if not eased and time.monotonic() - start > 15:
            # a machine too busy for it to end by itself
            eased = True
            storm.qmp("migrate-set-parameters", vm, downtime_limit=20000)
        return migration_status(storm, vm) in ("completed", "failed", "cancelled")

    try:
        storm.wait("end of the migration", over, MIGRATION_S)
    except StormError as error:
        info = storm.qmp("query-migrate", vm)
        raise StormError(f"{error}: {info}, {storm.qmp('query-status', vm)}") from None
    status = migration_status(storm, vm)
    if status not in wanted:
        raise StormError(
            f"migration {status}: {storm.qmp('query-migrate', vm)}"
            f"{vm.guest.last_words()}"
        )
    return status


def parameters(storm: Storm, rng: Random, bandwidth: int, *vms: Vm) -> None:
    """The same for both sides: with other numbers of channels they hang."""
    values = {
        "max-bandwidth": bandwidth,
        "downtime-limit": rng.choice((50, 300, 300, 2000)),
        "multifd-channels": rng.choice((1, 2, 4)),
    }
    for vm in vms:
        storm.qmp("migrate-set-parameters", vm, **values)


def arrived(storm: Storm, source: Vm, target: Vm, rng: Random) -> None:
    """The guest is in the other QEMU now, and the old one ends."""
    storm.wait(
        "guest in its new QEMU",
        lambda: storm.qmp("query-status", target)["status"] in ("running", "paused"),
        MIGRATION_S,
    )
    adopt(source.guest, target.guest)
    target.failures_seen = len(target.guest.failures)
    storm.vm = target
    if storm.qmp("query-status")["status"] == "paused":
        storm.qmp("cont")
    storm.stopped = False
    if rng.random() < 0.8:
        storm.settle()
    storm.judge(source)
    storm.end_qemu(source, rng)
    (storm.directory / f"{source.name}.qcow2").unlink(missing_ok=True)
    capabilities(storm, target, tuple({c for k in KINDS.values() for c in k}), False)


def before_it_goes(storm: Storm, rng: Random) -> None:
    """Most guests write while they are sent, some stand still, or come to."""
    if rng.random() < 0.7:
        line = rng.choice(("rewrite 1", "rewrite 2", "rewrite 4", "load 100"))
        storm.log(f"  {line}")
        storm.send(line)
    if rng.random() < 0.15:
        storm.log("  stopped")
        storm.qmp("stop")
        storm.stopped = True


@action(6)
def do_migrate(storm: Storm, rng: Random) -> object:
    """To a QEMU of any kind, in any way that needs no file."""
    names = ("precopy", "xbzrle", "auto-converge", "multifd", "postcopy", "preempt")
    name = rng.choice(names)
    source = storm.vm
    target = storm.start_qemu(rng, storm.flavour(rng), incoming=True)
    uri = f"unix:{storm.directory}/{target.name}.migrate"
    for vm in (source, target):
        capabilities(storm, vm, KINDS[name], True)
    parameters(storm, rng, rng.choice((100, 400, 4000)) * MIB, source, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    before_it_goes(storm, rng)
    storm.qmp("migrate", source, uri=uri)
    if name in ("postcopy", "preempt"):
        storm.wait(
            "active migration",
            lambda: migration_status(storm, source) not in ("none", "setup"),
            GUEST_S,
        )
        time.sleep(rng.choice((0, 0.1, 0.5, 1.5)))
        try:
            storm.qmp("migrate-start-postcopy", source)
        except Refused as refused:
            storm.log(f"  postcopy: {refused}")
    others = beside(storm, rng)
    wait_status(storm, source, "completed")
    arrived(storm, source, target, rng)
    return f"{name}, beside: {others}, now {target.flavour}"


@action(4)
def do_broken_migration(storm: Storm, rng: Random) -> object:
    """Cancelled, or the other end is killed, in the middle."""
    how = rng.choice(("cancel", "cancel", "kill"))
    name = rng.choice(("precopy", "multifd", "xbzrle"))
    source = storm.vm
    target = storm.start_qemu(rng, storm.flavour(rng), incoming=True)
    uri = f"unix:{storm.directory}/{target.name}.migrate"
    for vm in (source, target):
        capabilities(storm, vm, KINDS[name], True)
    parameters(storm, rng, rng.choice((4, 16, 64)) * MIB, source, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    source.expected += SAY_CUT
    target.expected += SAY_HALF
    target.ending = True
    before_it_goes(storm, rng)
    storm.qmp("migrate", source, uri=uri)
    others = beside(storm, rng)
    time.sleep(rng.choice((0, 0.2, 1, 2)))
    storm.watcher.drop(target.name)
    if how == "kill":
        storm.end_qemu(target)
    else:
        storm.qmp("migrate_cancel", source)
    status = wait_status(storm, source, "cancelled", "failed", "completed")
    if status == "completed":
        if how == "kill":
            raise StormError("a killed destination, and the migration completed")
        target.ending = False
        target.expected.clear()
        arrived(storm, source, target, rng)
        return f"{name}: {how} came too late"
    if how != "kill":
        storm.end_qemu(target)
    capabilities(storm, source, KINDS[name], False)
    if storm.stopped or storm.qmp("query-status")["status"] != "running":
        storm.qmp("cont")
        storm.stopped = False
    storm.settle()
    storm.judge(source)
    source.expected.clear()
    return f"{name}: {how}: {status}, beside: {others}"


@action(3)
def do_saved(storm: Storm, rng: Random) -> object:
    """The guest is saved to a file and goes on from that."""
    name = rng.choice(("file", "mapped-ram", "mapped-ram-multifd"))
    source = storm.vm
    file = storm.directory / "saved"
    uri = f"file:{file}"
    try:
        capabilities(storm, source, KINDS[name], True)
        parameters(storm, rng, 4000 * MIB, source)
        before_it_goes(storm, rng)
        storm.qmp("migrate", source, uri=uri)
        others = beside(storm, rng)
        wait_status(storm, source, "completed")
        target = restore(storm, rng, uri, name)
        arrived(storm, source, target, rng)
    finally:
        file.unlink(missing_ok=True)
    return f"{name}, beside: {others}, now {target.flavour}"


def restore(storm: Storm, rng: Random, uri: str, name: str) -> Vm:
    target = storm.start_qemu(rng, storm.flavour(rng), incoming=True)
    capabilities(storm, target, KINDS[name], True)
    parameters(storm, rng, 4000 * MIB, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    storm.wait(
        "end of loading",
        lambda: migration_status(storm, target) in ("completed", "failed"),
        MIGRATION_S,
    )
    return target


def begin_tracking(storm: Storm, source: Vm) -> None:
    """Everything is unmerged for that, but where a device is writing."""
    source.expected += [r"cannot be unmerged: Device or resource busy"]
    for attempt in range(30):
        try:
            capabilities(storm, source, ("background-snapshot",), True)
            return
        except Refused as refused:
            # a page that a device is writing to stays merged until it is done
            storm.log(f"  background-snapshot: {refused}")
            if attempt == 29:
                raise
            time.sleep(0.1)


@action(3)
def do_background_snapshot(storm: Storm, rng: Random) -> object:
    """A snapshot of the running guest; it goes on, or the snapshot does."""
    source = storm.vm
    file = storm.directory / "saved"
    uri = f"file:{file}"
    follow = rng.random() < 0.6
    try:
        begin_tracking(storm, source)
        before_it_goes(storm, rng)
        parameters(storm, rng, rng.choice((100, 4000)) * MIB, source)
        storm.qmp("migrate", source, uri=uri)
        others = beside(storm, rng)
        wait_status(storm, source, "completed")
        capabilities(storm, source, ("background-snapshot",), False)
        if storm.stopped:
            storm.qmp("cont")
            storm.stopped = False
        storm.settle()
        if not follow:
            return f"taken, beside: {others}"
        storm.qmp("stop")
        target = restore(storm, rng, uri, "file")
        arrived(storm, source, target, rng)
    finally:
        file.unlink(missing_ok=True)
    return f"taken and followed, beside: {others}, now {target.flavour}"
