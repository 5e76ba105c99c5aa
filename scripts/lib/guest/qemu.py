# SPDX-License-Identifier: GPL-2.0-or-later
"""Real Debian guests in QEMU: start them, talk to them, never leave one behind.

A guest's QMP monitor and serial ports are socket pairs, so no directory gets
files, and the kernel kills QEMU when the process that started it dies.  Leaves
to others: the image (guest-image), the program in the guest
(tests/guest/guest-agent.c), what to measure.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from qemu.qmp import QMPError
from qemu.qmp.legacy import QEMUMonitorProtocol

from host.exits import Failure, Lacking
from host.paths import TOP


@dataclass(frozen=True)
class Arch:
    """What guests of an architecture have that others have not."""

    #: QEMU's name, and Debian's
    name: str
    debian: str
    machine: str
    #: further arguments of QEMU
    options: tuple[str, ...]
    #: an option that makes a serial port, and its value without the chardev's id
    serial: tuple[str, str]
    #: the first of them, as the kernel calls it
    console: str
    ram_start: int


#: arm64: a CPU with pages of 4, 16 and 64 KiB, and without pointer authentication,
#: which is slow where it is emulated
ARCHES = {
    arch.name: arch
    for arch in (
        Arch(
            name="x86_64",
            debian="amd64",
            machine="q35",
            options=(),
            serial=("-device", "isa-serial,chardev="),
            console="ttyS0",
            ram_start=0,
        ),
        Arch(
            name="aarch64",
            debian="arm64",
            machine="virt",
            options=("-cpu", "neoverse-n1"),
            serial=("-serial", "chardev:"),
            console="ttyAMA0",
            ram_start=1 << 30,
        ),
    )
}

#: Debian's firmware, for a QEMU that was not told where it is
FIRMWARE = ("/usr/share/seabios", "/usr/share/qemu", "/usr/lib/ipxe/qemu")
#: A guest under TCG boots in seconds; on a machine that is busy with other
#: things it may take minutes.  Nothing is measured with this.
BOOT_TIMEOUT = 300.0
MAKE_IMAGE = TOP / "scripts/lib/guest/guest-image"
FILES = ("vmlinuz", "initrd", "root.img")


class GuestError(Failure):
    """A guest did not do what it should; the text has its last words."""


def qemu_binary() -> Path:
    """build/qemu's, or what QEMU_KSM_QEMU names."""
    chosen = os.environ.get("QEMU_KSM_QEMU")
    return Path(chosen) if chosen else TOP / "build/qemu/qemu-system-x86_64"


def qemu_arch(binary: Path | None = None) -> Arch:
    """The architecture of its guests, by its name."""
    name = (binary or qemu_binary()).name
    return next((a for a in ARCHES.values() if a.name in name), ARCHES["x86_64"])


def need_qemu() -> Path:
    """Builds QEMU if that has not been done, and returns the binary."""
    binary = qemu_binary()
    if not binary.exists() and "QEMU_KSM_QEMU" in os.environ:
        raise GuestError(f"QEMU_KSM_QEMU names {binary}, which is not there")
    if not binary.exists():
        # its progress goes to stderr: our stdout is the caller's
        done = subprocess.run(
            [TOP / "scripts/build-qemu", "--no-tests"],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        if done.returncode == Lacking.code:
            raise Lacking("scripts/build-qemu cannot build QEMU here")
        if done.returncode or not binary.exists():
            raise GuestError("scripts/build-qemu failed, so there is no QEMU to run")
    return binary


def guest_image(release: str = "bookworm", pages: str = "4k") -> Path:
    """The directory with vmlinuz, initrd and root.img, made if need be.

    For the architecture of qemu_binary().
    """
    arch = qemu_arch().debian
    done = subprocess.run(
        [MAKE_IMAGE, "--release", release, "--arch", arch, "--pages", pages],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode == Lacking.code:
        raise Lacking(f"{MAKE_IMAGE} cannot make the guest here")
    if done.returncode:
        raise GuestError(f"{MAKE_IMAGE} failed, so there is no guest to run")
    return Path(done.stdout.strip())


def accelerator(arch: Arch | None = None) -> str:
    """ "kvm" where this CPU can run guests and /dev/kvm opens, else "tcg"."""
    if (arch or qemu_arch()).name != os.uname().machine:
        return "tcg"
    try:
        flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        if flags and {"vmx", "svm"} & set(flags[1].split()):
            os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
            return "kvm"
    except OSError:
        pass
    return "tcg"


@dataclass
class Memory:
    """What a QEMU process takes, in bytes, as the kernel accounts for it."""

    resident: int = 0
    #: its share of resident memory: a page that n mappings share counts 1/n
    proportional: int = 0
    #: what sharing of anonymous memory saves: the kernel's KSM
    shared_saving: int = 0
    lazy_free: int = 0
    #: in huge pages
    anon_huge: int = 0
    #: pages that ksmd replaced by the zero page; they are not resident
    ksm_zero: int = 0
    #: pages of the process that are merged pages of ksmd
    ksm_merged: int = 0
    #: pages that ksmd keeps track of
    ksm_rmap_items: int = 0

    @property
    def saved(self) -> int:
        return self.shared_saving + self.ksm_zero


def _numbers(path: str) -> dict[str, int]:
    """ "name: 12 kB" and "name 12" lines of a file of /proc."""
    found = {}
    for line in Path(path).read_text().splitlines():
        match = re.match(r"(\w+):?\s+(-?\d+)( kB)?$", line)
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def process_memory(pid: int) -> Memory:
    """Reads the kernel's figures for a process."""
    rollup = _numbers(f"/proc/{pid}/smaps_rollup")
    memory = Memory(
        resident=rollup["Rss"],
        proportional=rollup["Pss"],
        shared_saving=rollup["Anonymous"] - rollup["Pss_Anon"],
        lazy_free=rollup.get("LazyFree", 0),
        anon_huge=rollup.get("AnonHugePages", 0),
    )
    try:
        ksm = _numbers(f"/proc/{pid}/ksm_stat")
    except OSError:  # before Linux 6.1, or not permitted
        ksm = {}
    memory.ksm_zero = ksm.get("ksm_zero_pages", 0) * 4096
    memory.ksm_merged = ksm.get("ksm_merging_pages", 0)
    memory.ksm_rmap_items = ksm.get("ksm_rmap_items", 0)
    return memory


def anonymous_memory(pid: int) -> int:
    """Bytes, by counters: no lock is taken, and none of ksmd's sharing told."""
    return _numbers(f"/proc/{pid}/status")["RssAnon"]


def ram_range(pid: int, size: int) -> tuple[int, int]:
    """Where the guest's RAM is in the process, start and end.

    To be asked before merging begins, while it is one mapping.
    """
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0", line)
        if match:
            start, end = int(match[1], 16), int(match[2], 16)
            if end - start == size:
                return start, end
    raise LookupError(f"process {pid} has no private mapping of {size} bytes")


@dataclass
class RamUsage:
    """Bytes of a guest's RAM, whatever it is mapped to."""

    resident: int = 0
    #: of which pages of libksm's pool
    pooled: int = 0
    #: mapped to the pool, and not written since: in the page tables or not
    mapped: int = 0


def ram_usage(pid: int, where: tuple[int, int]) -> RamUsage:
    """Reads smaps: some milliseconds per GiB."""
    usage = RamUsage()
    inside = pool = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = where[0] <= int(match[1], 16) < where[1]
            pool = "/memfd:" in line or "/ksm-pool" in line
        elif inside and pool and line.startswith("Size:"):
            usage.mapped += int(line.split()[1]) * 1024
        elif inside and line.startswith("Rss:"):
            rss = int(line.split()[1]) * 1024
            usage.resident += rss
            usage.pooled += rss if pool else 0
        elif inside and pool and line.startswith("Anonymous:"):
            # written since they were merged: no longer the pool's
            written = int(line.split()[1]) * 1024
            usage.pooled -= written
            usage.mapped -= written
    return usage


def pool_size(pid: int) -> int:
    """Bytes of libksm's pool, used or not: a memfd of the process."""
    size = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "/memfd:" in os.readlink(link) and "ksm" in os.readlink(link):
                size = max(size, link.stat().st_blocks * 512)
        except OSError:
            continue  # closed meanwhile
    return size


@dataclass
class GuestSpec:
    """What a guest is made of."""

    name: str = "guest"
    memory_mib: int = 512
    #: properties of the backend beside id and size; None for the type means
    #: -m alone, as a plain QEMU has it
    backend: str | None = "memory-backend-ksm"
    properties: dict[str, str] = field(default_factory=dict)
    #: q35 or virt, if this is empty
    machine: str = ""
    cpus: int = 1
    accel: str = ""
    #: page cache and own memory, by default in proportion to the memory
    cache_mib: int | None = None
    private_mib: int | None = None
    seed: int = 1
    #: some of Debian's programs run beside the agent (a second or two of
    #: boot where the CPU is emulated)
    userland: bool = True
    #: share of a CPU the guest verifies its memory with
    load: int = 20
    #: further words for the kernel's command line
    kernel: str = ""
    #: further arguments of QEMU
    extra: Sequence[str] = ()
    #: start as this user (needs root)
    user: str | None = None
    #: a command in front of QEMU's
    prefix: Sequence[str] = ()
    #: a reset restarts the guest rather than ending QEMU
    reboot: bool = False
    incoming: bool = False
    #: a disk whose boot sector is the guest, in the place of Debian
    disk: Path | None = None
    qemu: Path | None = None

    def cache(self) -> int:
        if self.cache_mib is not None:
            return self.cache_mib
        return max(16, (self.memory_mib - 96) * 6 // 10)

    def private(self) -> int:
        if self.private_mib is not None:
            return self.private_mib
        return max(4, self.memory_mib // 12)


def make_socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


_running: set[Guest] = set()


class Guest:
    """One QEMU with a Debian guest in it.

    with Guest(GuestSpec(name="a"), image) as guest:
        guest.wait_ready()
        guest.qmp("query-ksm-stats")
        guest.verify()
    """

    def __init__(self, spec: GuestSpec, image: Path) -> None:
        self.spec = spec
        self.image = image
        self.arch = qemu_arch(spec.qemu)
        self.process: subprocess.Popen[bytes] | None = None
        self.events: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.failures: list[str] = []
        self._qmp: QEMUMonitorProtocol | None = None
        self._sockets: list[socket.socket] = []
        self._files: list[int] = []
        self._threads: list[threading.Thread] = []
        self._console: deque[str] = deque(maxlen=40)
        self._stderr: deque[str] = deque(maxlen=40)
        #: everything of both, for who has to judge each line
        self.stderr_lines: list[str] = []
        self.console_lines: list[str] = []
        self._changed = threading.Condition()
        self._ram: tuple[int, int] | None = None

    # -- life ----------------------------------------------------------------

    def __enter__(self) -> Guest:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def arguments(self, monitor: int, console: int, port: int) -> list[str]:
        """QEMU's command line, given the numbers of the file descriptors."""
        spec = self.spec
        arch = self.arch
        accel = spec.accel or accelerator(arch)
        if accel == "tcg":
            # a translation buffer of the default 1 GiB is nothing for
            # machines that are to be counted by the MiB
            accel = "tcg,tb-size=64"
        machine = spec.machine or arch.machine
        memory = ["-m", f"{spec.memory_mib}M"]
        if spec.backend:
            machine += ",memory-backend=ram0"
            properties = "".join(f",{k}={v}" for k, v in spec.properties.items())
            memory += [
                "-object",
                f"{spec.backend},id=ram0,size={spec.memory_mib}M{properties}",
            ]
        append = (
            f"console={arch.console} quiet panic=-1 memhp_default_state=online "
            f"guest.cache={spec.cache()} guest.private={spec.private()} "
            f"guest.seed={spec.seed} guest.load={spec.load} "
            f"guest.userland={int(spec.userland)} {spec.kernel}"
        )
        if spec.cpus > 1:
            # The agent starts the others once every device has its driver.
            # Multi-threaded TCG of 10.0.13 looks up MMIO in the new memory
            # map before the vCPU has dropped its TLB: an interrupt that is
            # acknowledged while another vCPU sizes a BAR ends in an assertion
            # of iotlb_to_section(), or in another device.
            append += " maxcpus=1"
        files = {name: f"{self.image}/{name}" for name in FILES}
        files["qemu"] = str(spec.qemu or qemu_binary())
        if spec.user:
            # that user may not be able to walk to where they are
            for name, path in files.items():
                self._files.append(os.open(path, os.O_RDONLY))
                files[name] = f"/dev/fd/{self._files[-1]}"
        arguments = [files["qemu"]]
        for directory in FIRMWARE:
            if os.path.isdir(directory):
                arguments += ["-L", directory]
        arguments += [
            *("-name", f"{spec.name},debug-threads=on"),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *(() if spec.reboot else ("-no-reboot",)),
            *("-machine", machine),
            *arch.options,
            *("-accel", accel),
            *("-smp", str(spec.cpus)),
            *memory,
            *("-chardev", f"socket,id=monitor,fd={monitor}"),
            *("-mon", "chardev=monitor,mode=control"),
            *("-chardev", f"socket,id=console,fd={console}"),
            *(arch.serial[0], f"{arch.serial[1]}console"),
            *("-chardev", f"socket,id=port,fd={port}"),
            *(arch.serial[0], f"{arch.serial[1]}port"),
            *(("-incoming", "defer") if spec.incoming else ()),
            *(self._disk(spec.disk) if spec.disk else self._debian(files, append)),
            *spec.extra,
        ]
        # the kernel ends QEMU when we end, even by kill -9
        prefix = ["setpriv", "--pdeathsig", "KILL"]
        if spec.user:
            prefix += [f"--reuid={spec.user}", "--clear-groups"]
            prefix += ["--inh-caps=-all", "--no-new-privs"]
        return [*spec.prefix, *prefix, "--", *arguments]

    @staticmethod
    def _debian(files: dict[str, str], append: str) -> list[str]:
        return [
            "-blockdev",
            "driver=file,node-name=root,read-only=on,locking=off,"
            f"filename={files['root.img']}",
            *("-device", "virtio-blk-pci,drive=root"),
            *("-kernel", files["vmlinuz"], "-initrd", files["initrd"]),
            *("-append", append),
        ]

    @staticmethod
    def _disk(path: Path) -> list[str]:
        drive = f"if=none,id=disk,format=raw,file.locking=off,file={path}"
        return ["-drive", drive, "-device", "ide-hd,drive=disk,bootindex=0"]

    def start(self) -> None:
        """Starts QEMU; the guest boots meanwhile (not with incoming)."""
        pairs = [make_socketpair() for _ in range(3)]
        fds = [theirs.fileno() for _, theirs in pairs]
        try:
            arguments = self.arguments(*fds)
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=fds + self._files,
                # Ctrl-C is for us; we end QEMU in our own order
                start_new_session=True,
            )
        finally:
            for _, theirs in pairs:
                theirs.close()
            while self._files:
                os.close(self._files.pop())
        _running.add(self)
        monitor, console, port = (ours for ours, _ in pairs)
        self._sockets = [monitor, console, port]
        assert self.process.stderr is not None
        stderr = self.process.stderr
        for read, take in (
            (lambda: stderr.readline(), self._stderr_line),
            (console.makefile("rb").readline, self._console_line),
            (port.makefile("rb").readline, self._port_line),
        ):
            thread = threading.Thread(target=self._pump, args=(read, take), daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            self._connect(monitor)
        except BaseException:
            words = self.last_words(wait=2)
            self.stop()
            raise GuestError(f"{self.spec.name}: QEMU did not start{words}") from None

    def _connect(self, monitor: socket.socket) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                asyncio.get_event_loop()
            except RuntimeError:
                asyncio.set_event_loop(asyncio.new_event_loop())
            self._qmp = QEMUMonitorProtocol(monitor, nickname=self.spec.name)
        # connect() has no timeout of its own: end QEMU if it hangs
        watchdog = threading.Timer(120, self._kill)
        watchdog.start()
        try:
            self._qmp.connect()
        finally:
            watchdog.cancel()
        self._qmp.settimeout(300)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def stop(self) -> None:
        """Ends QEMU whatever state it is in; may be called twice."""
        if self.process is None:
            return
        try:
            self._kill()
            self.process.wait()
        finally:
            _running.discard(self)
            if self._qmp is not None:
                try:
                    self._qmp.close()
                except (QMPError, OSError, EOFError, asyncio.CancelledError):
                    pass  # it was killed: of course the line is cut
                self._qmp = None
            for thread in self._threads:
                thread.join(10)
            for sock in self._sockets:
                sock.close()
            if self.process.stderr is not None:
                self.process.stderr.close()
            self._threads, self._sockets = [], []

    def quit(self, timeout: float = 120) -> int:
        """Has QEMU end by itself, as `quit` does; returns its exit code."""
        assert self.process is not None and self._qmp is not None
        try:
            self._qmp.cmd("quit")
        except (QMPError, OSError, EOFError):
            pass  # it may be gone before it has answered
        code = self.process.wait(timeout)
        self.stop()
        return code

    # -- its lines -----------------------------------------------------------

    @staticmethod
    def _pump(read: Callable[[], bytes], take: Callable[[str], None]) -> None:
        try:
            while line := read():
                take(line.decode("utf-8", "replace").strip())
        except (OSError, ValueError):
            pass

    def _stderr_line(self, line: str) -> None:
        self._stderr.append(line)
        self.stderr_lines.append(line)

    def _console_line(self, line: str) -> None:
        self._console.append(line)
        self.console_lines.append(line)

    def _port_line(self, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            # after a migration or a reset the first line may be half a line
            return
        with self._changed:
            if "uptime_ms" in event:
                self.state = event
            if kind in ("error", "failed"):
                self.failures.append(event.get("text", kind))
            if kind != "state":
                self.events.append(event)
            self._changed.notify_all()

    def last_words(self, wait: float = 0) -> str:
        """What QEMU and the guest said last, for messages."""
        if wait and self.process is not None:
            try:
                self.process.wait(wait)
                self._threads[0].join(wait)
            except subprocess.TimeoutExpired:
                pass
        code = self.process.poll() if self.process else None
        text = f" (exit code {code})" if code is not None else ""
        for lines in (self._stderr, self._console):
            for line in list(lines)[-10:]:
                text += f"\n    {line}"
        return text

    # -- talking -------------------------------------------------------------

    def qmp(self, name: str, **arguments: Any) -> Any:
        """Executes a QMP command; '_' in argument names becomes '-'."""
        if self._qmp is None:
            raise GuestError(f"{self.spec.name}: not running")
        arguments = {k.replace("_", "-"): v for k, v in arguments.items()}
        try:
            return self._qmp.command(name, **arguments)
        except (OSError, EOFError, asyncio.CancelledError, asyncio.TimeoutError) as e:
            if self.alive():
                raise
            raise GuestError(
                f"{self.spec.name}: QEMU died during {name}{self.last_words(2)}"
            ) from e

    def hmp(self, line: str) -> str:
        return str(self.qmp("human-monitor-command", command_line=line))

    def ksm_stats(self) -> dict[str, Any]:
        return dict(self.qmp("query-ksm-stats"))

    def backend_stats(self) -> dict[str, Any]:
        return dict(self.ksm_stats()["backends"][0])

    def qmp_events(self) -> list[dict[str, Any]]:
        assert self._qmp is not None
        return [dict(event) for event in self._qmp.get_events()]

    def wait_for(
        self, what: str, test: Callable[[], Any], timeout: float, step: float = 0.2
    ) -> Any:
        """Polls until test() is true; GuestError when it does not become so."""
        deadline = time.monotonic() + timeout
        while True:
            value = test()
            if value:
                return value
            if not self.alive():
                raise GuestError(
                    f"{self.spec.name}: QEMU ended before {what}{self.last_words(1)}"
                )
            if time.monotonic() > deadline:
                raise GuestError(
                    f"{self.spec.name}: no {what} within {timeout:.0f} s"
                    f"{self.last_words()}"
                )
            time.sleep(step)

    def wait_event(
        self, test: Callable[[dict[str, Any]], Any], since: int, timeout: float
    ) -> dict[str, Any] | None:
        """The first of the events from number since on that fits, or None."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for event in self.events[since:]:
                    if test(event):
                        return event
                since = len(self.events)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(min(left, 1)):
                    if left <= 0 or not self.alive():
                        return None

    def _seen(self, kind: str, since: int) -> dict[str, Any] | None:
        with self._changed:
            for event in self.events[since:]:
                if event["event"] == kind:
                    return event
                if event["event"] == "failed":
                    raise GuestError(f"{self.spec.name}: {event.get('text')}")
        return None

    def ready(self) -> bool:
        return self._seen("ready", 0) is not None

    def wait_ready(self, timeout: float = BOOT_TIMEOUT) -> None:
        """Waits until the guest has booted and filled its memory."""
        self.wait_for("sign of a booted guest", self.ready, timeout)

    def send(self, line: str) -> None:
        self._sockets[2].sendall(line.encode() + b"\n")

    def command(self, line: str, timeout: float = 300) -> dict[str, Any]:
        """Gives the agent in the guest a command and waits for its answer."""
        since = len(self.events)
        self.send(line)

        def answer() -> dict[str, Any] | None:
            done = self._seen("done", since)
            if done is None and self._seen("error", since):
                time.sleep(0.5)
                done = self._seen("done", since)
                if done is None:
                    raise GuestError(f"{self.spec.name}: {line}: {self.failures[-1]}")
            return done

        return dict(self.wait_for(f"answer to '{line}'", answer, timeout))

    def verify(self, timeout: float = 300) -> int:
        """Has the guest verify everything once; returns its errors so far."""
        done = self.command("verify", timeout)
        return max(int(done["errors"]), len(self.failures))

    def memory(self) -> Memory:
        return process_memory(self.pid)

    def ram(self) -> tuple[int, int]:
        """Where RAM is in QEMU; first asked before merging begins."""
        if self._ram is None:
            self._ram = ram_range(self.pid, self.spec.memory_mib << 20)
        return self._ram

    def ram_usage(self) -> RamUsage:
        return ram_usage(self.pid, self.ram())


def probe_scope(image: Path, scope: str) -> str | None:
    """Why this QEMU, on this host, cannot do the scope, or None."""
    spec = GuestSpec(memory_mib=128, properties={"scope": scope}, extra=["-S"])
    try:
        with Guest(spec, image):
            return None
    except GuestError as error:
        return str(error)


def adopt(source: Guest, target: Guest) -> None:
    """After a migration: target takes over the record of the guest."""
    target.events = list(source.events)
    target.state = dict(source.state)
    target.failures = list(source.failures)


def migrate(source: Guest, target: Guest, timeout: float = 300) -> None:
    """Moves the guest of source to target (started with incoming)."""
    with tempfile.TemporaryDirectory(prefix="qemu-ksm-") as directory:
        uri = f"unix:{directory}/migration"
        target.qmp("migrate-incoming", uri=uri)
        adopt(source, target)
        source.qmp("migrate-set-parameters", max_bandwidth=1 << 32)
        source.qmp("migrate", uri=uri)

        def over() -> bool:
            info = source.qmp("query-migrate")
            if info.get("status") == "failed":
                raise GuestError(f"migration failed: {info}{target.last_words()}")
            return bool(info.get("status") == "completed")

        source.wait_for("end of the migration", over, timeout)
        target.wait_for(
            "running guest",
            lambda: target.qmp("query-status")["status"] == "running",
            timeout,
        )


@atexit.register
def _stop_all() -> None:
    for guest in list(_running):
        guest.stop()
