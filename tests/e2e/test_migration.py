# SPDX-License-Identifier: GPL-2.0-or-later
"""Differential migration: is the RAM that arrives the RAM that left?

The source has stopped, the destination has not begun to run: every page is
compared.  With postcopy, too: a destination that may not run takes all pages
nevertheless, those that were discarded because they were written meanwhile
among them.  Then the guest goes on there, verifies all it has, and is
the source of the next migration.

Two guests.  Debian verifies and writes its memory all the time (TCG only,
where KVM cannot run it).  The payload is a boot sector: each CPU adds one
to some pages without a pause, for ever.  It never flushes a TLB and knows no
interrupt, so a write that QEMU is not told of is not told of later either; it
also knows itself what each page has to say.

--soak SECONDS goes on with combinations drawn at random; --seed N draws
the same again.
"""

from __future__ import annotations

import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from guest import ram
from guest.migrate import WAYS, Pace, arrived, travel
from guest.qemu import Guest, GuestError, GuestSpec

pytestmark = pytest.mark.timeout(900)

Record = Callable[[str, object], None]
TOP = Path(__file__).resolve().parents[2]
SOURCES = ("log", "pagemap", "checksum")

#: The payload's: see ksm-payload.h
STATE = 0x9000
#: as many as any TLB of QEMU's holds
HOT_PAGES = 64


def properties(tracking: str, max_cpu: int = 5) -> dict[str, str]:
    return {
        "scope": "vm",
        "max-cpu": str(max_cpu),
        "dirty-tracking": tracking,
    }


class Traveller:
    """A guest that goes from QEMU to QEMU, each of which merges its memory."""

    def __init__(
        self, spec: GuestSpec, image: Path, pace: Pace, directory: Path
    ) -> None:
        self.spec = spec
        self.image = image
        self.pace = pace
        self.directory = directory
        self.hops = 0
        self.seconds = 0.0
        self._stack = ExitStack()
        self.guest = self._new(incoming=False)
        self._stack.callback(lambda: self.guest.stop())

    def _new(self, incoming: bool) -> Guest:
        extra = (*self.spec.extra, "-S") if incoming else self.spec.extra
        spec = replace(
            self.spec, name=f"hop{self.hops}", incoming=incoming, extra=extra
        )
        guest = Guest(spec, self.image)
        guest.start()
        return guest

    def __enter__(self) -> Traveller:
        try:
            self.wait_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_up(self) -> None:
        self.guest.wait_ready()

    def check(self) -> None:
        """The guest runs and has lost nothing."""
        assert self.guest.verify() == 0, self.guest.failures

    def settle(self) -> None:
        """Until merging goes on: then the guest's writes are asked for."""
        stats = self.guest.backend_stats()
        scans = int(stats.get("full-scans", 0))

        def scanned() -> bool:
            stats = self.guest.backend_stats()
            if stats["state"] not in ("active", "idle"):
                return False
            # a pass begins at once
            self.guest.qmp(
                "qom-set",
                path="/objects/ram0",
                property="max-cpu",
                value=int(self.spec.properties["max-cpu"]),
            )
            return int(stats.get("full-scans", 0)) > scans

        self.guest.wait_for("pass of the engine", scanned, 120, step=0.3)
        # the passes that were asked for end
        time.sleep(0.5)

    def hop(self, way: str) -> None:
        self.settle()
        self.hops += 1
        source, target = self.guest, self._new(incoming=True)
        try:
            travel(source, target, way, self.pace)
            difference = ram.compare(source, target, self.directory)
            assert not difference, f"{way}: {difference}"
        except BaseException:
            target.stop()
            raise
        self.guest = target
        source.stop()
        target.qmp("cont")
        self.check()


class PayloadTraveller(Traveller):
    """The boot sector in the place of Debian."""

    def state(self, cpu: int) -> tuple[int, int, int]:
        """Passes, failed, the page that failed."""
        path = self.directory / "state"
        self.guest.qmp("pmemsave", val=STATE + 64 * cpu, size=64, filename=str(path))
        passes, _, failed, offset, _ = struct.unpack_from("<5I", path.read_bytes())
        return passes, failed, offset

    def _passes(self) -> list[int]:
        states = [self.state(cpu) for cpu in range(self.spec.cpus)]
        for passes, failed, offset in states:
            assert not failed, f"page at 0x{offset:x} lost a write, pass {passes}"
        return [passes for passes, _, _ in states]

    def wait_up(self) -> None:
        self.guest.wait_for("first passes", lambda: min(self._passes()) > 5, 120)

    def check(self) -> None:
        before = self._passes()

        def on() -> bool:
            return all(
                then + 2 < now for then, now in zip(before, self._passes(), strict=True)
            )

        self.guest.wait_for("passes", on, 120)


def debian(tracking: str, **changes: object) -> GuestSpec:
    spec = GuestSpec(
        memory_mib=160,
        cache_mib=24,
        private_mib=32,
        load=80,
        userland=False,
        # without kernel page-table isolation TLB entries live longer
        kernel="mitigations=off",
        properties=properties(tracking),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def payload_disk(directory: Path) -> Path:
    """The boot sector of ksm-payload-test, made to write without a pause."""
    text = (TOP / "tests/qtest/ksm-payload.h").read_text()
    array = text[text.index("payload_code") :]
    code = bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-f]{2})\b", array))
    pages = struct.pack("<I", HOT_PAGES)
    for old, new in (
        # jump back until the test has said "go"
        (b"\x83\x3d\xf4\x8f\0\0\0\x74\xf7", b"\x83\x3d\xf4\x8f\0\0\0\x90\x90"),
        # number of pages, in "and" and "cmp"
        (b"\x25\xff\x07\0\0", b"\x25" + struct.pack("<I", HOT_PAGES - 1)),
        (b"\x81\xf9\0\x08\0\0", b"\x81\xf9" + pages),
    ):
        assert code.count(old) == 1, "ksm-payload.h is another one"
        code = code.replace(old, new)
    path = directory / "payload"
    path.write_bytes(code.ljust(510, b"\0") + b"\x55\xaa")
    return path


def payload(accel: str, tracking: str, disk: Path, **changes: object) -> GuestSpec:
    spec = GuestSpec(
        memory_mib=64,
        machine="pc",
        cpus=2,
        accel=accel,
        disk=disk,
        # the kernel writes kvmclock's page itself, on both sides
        # some KVM has an MSR 0x10a that cannot be set as it reads
        extra=("-cpu", "max,kvmclock=off,arch-capabilities=off"),
        properties=properties(tracking, max_cpu=100),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


#: Over in a moment: a write that is not told of must not be followed by one
#: that is, because the engine has asked for that.
PAYLOAD_PACE = Pace(first=1 << 30, slow=128 << 10, rounds=1)

ACCELS = ("tcg", "kvm", "kvm,dirty-ring-size=1024")
#: The ring is asked in one place, whichever way a migration takes.
PAYLOADS = [(accel, way) for accel in ACCELS[:2] for way in WAYS]
PAYLOADS.append((ACCELS[2], "precopy"))


def why_not(accel: str, image: Path, disk: Path) -> str | None:
    """What is missing for a payload with that accelerator."""
    if accel == "tcg":
        return None
    if "ring" in accel and Path("/sys/module/kvm_pvm").exists():
        return (
            "the dirty ring of this KVM (PVM) does not work: whoever logs, a "
            "vCPU gets KVM_EXIT_DIRTY_RING_FULL for ever"
        )
    try:
        with Guest(payload(accel, "checksum", disk, extra=("-S",)), image):
            return None
    except GuestError as error:
        return f"no guest with -accel {accel}: {error}".replace("\n", " ")


class Travellers:
    """One guest of each kind, which goes on as long as nothing was lost."""

    def __init__(self) -> None:
        self._now: tuple[object, Traveller] | None = None

    def get(self, key: object, make: Callable[[], Traveller]) -> Traveller:
        if self._now is None or self._now[0] != key:
            self.drop()
            self._now = (key, make().__enter__())
        return self._now[1]

    def drop(self) -> None:
        if self._now is not None:
            self._now[1].__exit__()
            self._now = None


@pytest.fixture(scope="module")
def travellers() -> Iterator[Travellers]:
    known = Travellers()
    yield known
    known.drop()


def hop(travellers: Travellers, traveller: Traveller, way: str, times: int) -> None:
    try:
        for _ in range(times):
            traveller.hop(way)
    except BaseException:
        travellers.drop()
        raise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tracking", SOURCES)
def test_debian(
    travellers: Travellers,
    image: Path,
    scope_vm: str,
    tmp_path: Path,
    tracking: str,
    way: str,
) -> None:
    traveller = travellers.get(
        ("debian", tracking),
        lambda: Traveller(debian(tracking), image, Pace(), tmp_path),
    )
    hop(travellers, traveller, way, 1)


@pytest.mark.parametrize(("accel", "way"), PAYLOADS)
def test_payload(
    travellers: Travellers,
    image: Path,
    scope_vm: str,
    tmp_path: Path,
    accel: str,
    way: str,
) -> None:
    """Three each with QEMU's dirty log, where a write can get lost."""
    disk = payload_disk(tmp_path)
    reason = why_not(accel, image, disk)
    if reason:
        pytest.skip(reason)
    traveller = travellers.get(
        ("payload", accel),
        lambda: PayloadTraveller(
            payload(accel, "log", disk), image, PAYLOAD_PACE, tmp_path
        ),
    )
    hop(travellers, traveller, way, 3)


# --- background snapshots ---


def capability(guest: Guest, name: str, on: bool) -> float:
    """Seconds that the main loop, which answers, was busy with it."""
    start = time.monotonic()
    guest.qmp(
        "migrate-set-capabilities",
        capabilities=[{"capability": name, "state": on}],
    )
    return time.monotonic() - start


def pages_saved(guest: Guest) -> int:
    return int(guest.backend_stats()["pages-sharing"])


def snapshot(guest: Guest, path: Path) -> float:
    """Into a file; how long the monitor's slowest answer took meanwhile."""
    slowest = 0.0
    guest.qmp("migrate", uri=f"file:{path}")
    while True:
        start = time.monotonic()
        status = guest.qmp("query-migrate").get("status")
        slowest = max(slowest, time.monotonic() - start)
        assert status not in ("failed", "cancelled"), guest.qmp("query-migrate")
        if status == "completed":
            return slowest
        time.sleep(0.001)


def test_background_snapshot(
    image: Path, scope_vm: str, tmp_path: Path, record_property: Record
) -> None:
    """Allowing one leaves memory merged; taking one unmerges it bit by bit.

    What is in it is what was in RAM: the guest verifies it, and that of a
    stopped one is the same page by page.
    """
    spec = debian("pagemap", memory_mib=448, properties=properties("pagemap", 100))
    path = tmp_path / "snapshot"
    loaded = replace(spec, incoming=True, properties={"scope": "vm"})
    with Guest(spec, image) as guest:
        guest.wait_ready()
        # what it writes anew in each round does not stay merged
        guest.command("load 0")
        guest.command("alloc 280 pattern")
        guest.wait_for("merged", lambda: pages_saved(guest) > 270 * 256, 300)
        times = [
            capability(guest, name, True)
            for name in ("background-snapshot", "events", "background-snapshot")
        ]
        record_property("capabilities", times)
        assert pages_saved(guest) > 270 * 256
        guest.command("load 80")
        record_property("slowest answer", snapshot(guest, path))
        guest.command("load 0")
        guest.wait_for("merged", lambda: pages_saved(guest) > 270 * 256, 300)
        with Guest(loaded, image) as copy:
            copy.qmp("migrate-incoming", uri=f"file:{path}")
            copy.wait_for(
                "running guest",
                lambda: copy.qmp("query-status")["status"] == "running",
                300,
            )
            assert copy.verify() == 0
        guest.qmp("stop")
        assert pages_saved(guest) > 270 * 256
        snapshot(guest, path)
        with Guest(replace(loaded, extra=("-S",)), image) as copy:
            copy.qmp("migrate-incoming", uri=f"file:{path}")
            arrived(copy)
            assert not ram.compare(guest, copy, tmp_path)
        guest.qmp("cont")
        assert guest.verify() == 0


# --- for hours ---


def soak_seconds(config: pytest.Config) -> float:
    """What --soak says, if it was given."""
    given = any(str(arg).startswith("--soak") for arg in config.invocation_params.args)
    return float(config.getoption("--soak")) if given else 0.0


def drawn(
    draw: random.Random, image: Path, accels: list[str], directory: Path
) -> Traveller:
    """Any guest with any source of dirty pages, at any pace."""
    tracking = draw.choice(SOURCES)
    max_cpu = draw.choice((1, 5, 20, 100))
    if draw.random() < 0.5:
        spec = payload(
            draw.choice(accels),
            tracking,
            payload_disk(directory),
            properties=properties(tracking, max_cpu),
        )
        pace = replace(PAYLOAD_PACE, first=1 << draw.randrange(20, 31))
        return PayloadTraveller(spec, image, pace, directory)
    spec = debian(
        tracking,
        memory_mib=draw.choice((160, 256, 384)),
        load=draw.choice((20, 80, 100)),
        cpus=draw.choice((1, 1, 2)),
        seed=draw.randrange(1000),
        kernel=draw.choice(("", "mitigations=off")),
        properties=properties(tracking, max_cpu),
    )
    pace = Pace(
        first=draw.choice((16, 64, 256)) << 20, downtime=draw.choice((5, 50, 300))
    )
    return Traveller(spec, image, pace, directory)


@pytest.mark.timeout(0)
def test_soak(
    image: Path,
    scope_vm: str,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    record_property: Record,
) -> None:
    seconds = soak_seconds(pytestconfig)
    if not seconds:
        pytest.skip("only with --soak SECONDS")
    seed = int(pytestconfig.getoption("--seed", None) or time.time())
    draw = random.Random(seed)
    disk = payload_disk(tmp_path)
    accels = [accel for accel in ACCELS if not why_not(accel, image, disk)]
    end = time.monotonic() + seconds
    done: list[str] = []
    while time.monotonic() < end:
        with drawn(draw, image, accels, tmp_path) as traveller:
            for _ in range(draw.randrange(1, 8)):
                way = draw.choice(list(WAYS))
                kind = f"{traveller.spec} {traveller.pace} {way}"
                try:
                    traveller.hop(way)
                except BaseException as error:
                    error.add_note(f"--seed {seed}, hop {len(done) + 1}: {kind}")
                    raise
                done.append(way)
    record_property("seed", seed)
    record_property("hops", len(done))
    print(f"seed {seed}: {len(done)} hops, all equal")
