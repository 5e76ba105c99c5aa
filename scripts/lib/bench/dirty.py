# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench dirty: the cost of knowing which pages a guest writes.

The boot sector of tests/qtest/ksm-payload-test.c writes all its pages
as fast as it can: how much does each dirty source slow it down under each
accelerator, and how much CPU does the engine take?
"""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.harness import Metrics, Session
from guest.qemu import FIRMWARE, GuestError, need_qemu, qemu_binary
from host.paths import TOP

SOURCES = ("pagemap", "log")
ACCELS = {
    "tcg": "tcg,thread=multi",
    "kvm": "kvm",
}


def thread_cpu(pid: int, comm: str | None = None) -> int:
    """ns of CPU of the threads whose names begin so, or of the first thread."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text()
        if name.startswith(comm) if comm else task.name == str(pid):
            total += int((task / "schedstat").read_text().split()[0])
    return total


#: as ksm-runner.c calls it, and QEMU all iothreads
ENGINE = "IO ksm"
VCPUS = "CPU "


class Payload:
    """A QEMU that runs the boot sector, spoken to in qtest's protocol."""

    CPUS = 2

    def __init__(self, accel: str, properties: str, directory: Path) -> None:
        header = (TOP / "tests/qtest/ksm-payload.h").read_text()
        self.at = {
            name: int(value, 0)
            for name, value in re.findall(r"#define PAYLOAD_(\w+)\s+(\w+)", header)
        }
        code = bytes(
            int(byte, 16)
            for byte in re.findall(r"0x([0-9a-f]{2})\b", header.split("{")[-1])
        )
        disk = directory / "sector"
        # no pauses: as much as the CPU can write
        disk.write_bytes(code.ljust(510, b"\0") + b"\x55\xaa")
        path = directory / "qtest"
        self.process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--", str(qemu_binary())),
                *(word for d in FIRMWARE for word in ("-L", d)),
                *("-name", "payload,debug-threads=on"),
                *("-accel", accel, "-smp", str(self.CPUS), "-m", "512M"),
                *("-machine", "pc,memory-backend=ram0", "-display", "none"),
                *("-nodefaults", "-no-user-config"),
                *("-object", f"memory-backend-ksm,id=ram0,size=512M{properties}"),
                *("-drive", f"file={disk},format=raw,if=ide"),
                *("-qtest", f"unix:{path},server=on,wait=off"),
                *("-qtest-log", "none"),
            ],
            stdin=subprocess.DEVNULL,
            # KVM may warn of features of the CPU, each time
            stderr=subprocess.DEVNULL,
        )
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for _ in range(600):
            try:
                self.socket.connect(str(path))
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise GuestError("QEMU does not answer")
        self.lines = self.socket.makefile("r")

    def ask(self, command: str) -> str:
        self.socket.sendall(command.encode() + b"\n")
        return self.lines.readline().strip()

    def read(self, address: int) -> int:
        return int(self.ask(f"readl {address:#x}").split()[1], 16)

    def start(self) -> None:
        """Fills memory once the boot sector runs, and lets it count."""
        end = time.monotonic() + 120
        while self.read(self.at["READY"]) != 1:
            if time.monotonic() > end:
                raise GuestError("the boot sector does not run")
            time.sleep(0.05)
        size = self.at["PAGES"] * self.CPUS * 4096
        self.ask(f"memset {self.at['BASE']:#x} {size:#x} 0x61")
        for page in range(self.at["BASE"], self.at["BASE"] + size, 4096):
            self.ask(f"writel {page:#x} 0")
        self.ask(f"writel {self.at['GO']:#x} 1")

    def written(self) -> int:
        """Pages written so far, by all CPUs."""
        total = 0
        for cpu in range(self.CPUS):
            done, pos, failed = (
                self.read(self.at["STATE"] + cpu * 64 + field) for field in (0, 4, 8)
            )
            if failed:
                raise GuestError("a write was lost")
            total += done * self.at["PAGES"] + pos
        return total

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self.socket.close()


@contextmanager
def payload(accel: str, properties: str) -> Iterator[Payload]:
    with tempfile.TemporaryDirectory(prefix="qemu-ksm-") as directory:
        guest = Payload(accel, properties, Path(directory))
        try:
            guest.start()
            yield guest
        finally:
            guest.stop()


def rates(accel: str, properties: str, seconds: float) -> tuple[float, float]:
    """Pages written per second of the vCPUs' time; ms of CPU per s for the rest.

    A vCPU's own time has all that tracking costs it (faults, exits), and does
    not have what other programs take of the machine.
    """
    with payload(accel, properties) as guest:
        time.sleep(2)
        pid = guest.process.pid

        def sample() -> tuple[int, int, int, float]:
            return (
                guest.written(),
                thread_cpu(pid, VCPUS),
                thread_cpu(pid, ENGINE) + thread_cpu(pid),
                time.monotonic(),
            )

        before = sample()
        time.sleep(seconds)
        after = sample()
        pages, vcpus, rest, took = (b - a for a, b in zip(before, after, strict=True))
        return pages * 1e9 / vcpus, rest / took / 1e6


def runs_here(accel: str) -> bool:
    words = f"-accel {accel} -machine none -display none -device no-such-device"
    done = subprocess.run(
        [str(qemu_binary()), *words.split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return "is not a valid device" in done.stderr


def dirty(session: Session) -> Metrics:
    """Guest that writes all the time: its speed, by dirty source."""
    need_qemu()
    rounds, seconds = (1, 2.0) if session.quick else (3, 4.0)
    out: Metrics = {}
    for name, accel in ACCELS.items():
        if not runs_here(accel):
            session.note(f"dirty: no {name} here")
            continue
        variants = {"off": ",scope=vm,run=off"}
        for source in SOURCES:
            variants[source] = f",scope=vm,dirty-tracking={source}"
        speed: dict[str, list[float]] = {v: [] for v in variants}
        cpu: dict[str, list[float]] = {v: [] for v in variants}
        for i in range(rounds):
            for variant, properties in variants.items():
                session.say(f"dirty: {name}, {variant}, {i + 1} of {rounds}")
                a, b = rates(accel, properties, seconds)
                speed[variant].append(a)
                cpu[variant].append(b)
        for variant in variants:
            out[f"{name}_{variant}_pages_per_cpu_s"] = median(speed[variant])
            if variant != "off":
                out[f"{name}_{variant}_throughput_ratio"] = median(
                    speed[variant]
                ) / median(speed["off"])
            out[f"{name}_{variant}_cpu_ms_per_s"] = median(cpu[variant])
    return out
