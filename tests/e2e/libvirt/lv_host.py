# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt in these tests: the embedded driver, and a daemon of our own.

Nothing of the machine's own libvirt is touched: the embedded driver has a
root directory of its own, a daemon lives in a mount namespace where
/run/libvirt, /var/lib/libvirt and the like are empty directories of the
test's.  Leaves to others: the domains (lv_guest.py), what must hold
(test_*.py).
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from host import ksmsys
from lv_guest import QEMU, TOP, Guest, initrd, kernel

QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = [ ]
cgroup_controllers = [ ]
stdio_handler = "file"
"""

#: As Debian has it, but for what a libvirtd of ours cannot do.
CONFINED_CONF = """\
user = "libvirt-qemu"
group = "kvm"
security_driver = "none"
remember_owner = 0
namespaces = [ "mount" ]
cgroup_controllers = [ ]
stdio_handler = "file"
"""

#: A device as a udev rule makes it, for a daemon's mount namespace alone.
LIKE_UDEV = """
mknod {0} c $(stat -c '%Hr %Lr' /dev/{0}); chgrp kvm {0}; chmod 0660 {0}
mount --bind {0} /dev/{0}
"""
#: A home of its own may not be open to libvirt-qemu, so QEMU is shown to it at
#: another place.  /dev/kvm is as Debian's udev has it; otherwise libvirt, which
#: probes with more rights than it checks with later, probes again for every
#: command.
CONFINED_SETUP = f"mkdir -p qemu; mount --bind {QEMU.parent} qemu\n" + (
    LIKE_UDEV.format("kvm") if Path("/dev/kvm").exists() else ""
)

PROMPT = "virsh # "

#: No command of these tests takes longer, not even the first one, which has
#: libvirt probe the emulator.
VIRSH_SECONDS = 180


class VirshError(AssertionError):
    """virsh said "error:"; the text is all it said."""


@dataclass(frozen=True)
class Libvirt:
    """Which libvirt: Debian's own, or one that scripts/build-libvirt built."""

    virsh: Path
    daemon: Path
    environment: dict[str, str] = field(default_factory=dict)


def patched(name: str = os.environ.get("LIBVIRT_BUILD", "libvirt")) -> Libvirt:
    """What scripts/build-libvirt made; it finds its modules by its own path."""
    build = TOP / "build" / name
    return Libvirt(build / "tools" / "virsh", build / "src" / "libvirtd")


def debian() -> Libvirt:
    return Libvirt(Path("/usr/bin/virsh"), Path("/usr/sbin/libvirtd"))


class Connection:
    """What the tests ask of a connection, whichever way virsh is run."""

    def virsh(self, *words: str | Path) -> str:
        raise NotImplementedError

    def refused(self, *words: str | Path) -> str:
        """Runs what must fail; returns the error text."""
        try:
            out = self.virsh(*words)
        except VirshError as error:
            return str(error)
        raise AssertionError(f"virsh {words} should have failed, but said: {out}")

    def qmp(self, domain: str, command: str, **arguments: object) -> Any:
        request: dict[str, object] = {"execute": command}
        if arguments:
            request["arguments"] = arguments
        out = self.virsh("qemu-monitor-command", domain, json.dumps(request))
        answer = json.loads(out)
        if "error" in answer:
            raise VirshError(out)
        return answer["return"]

    def domstats(self, domain: str, *words: str) -> dict[str, str]:
        out = self.virsh("domstats", domain, *words)
        return dict(re.findall(r"^\s+([\w.-]+)=(.*)$", out, re.MULTILINE))

    def destroy_all(self) -> None:
        for name in self.virsh("list", "--name").split():
            try:
                self.virsh("destroy", name)
            except VirshError:
                pass


def with_log(text: str, root: Path) -> str:
    """What is said of a QEMU that ended at once.

    Its last words, but not where libvirt looks for it between its end and the
    moment when it is reaped: then they are in the guest's log alone.
    """
    if "monitor socket: Connection refused" in text:
        logs = sorted((root / "log" / "qemu").glob("*.log"), key=os.path.getmtime)
        text += "".join(f"\n{log.read_text()}" for log in logs[-1:])
    return text


def _quote(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


class Embedded(Connection):
    """One virsh process that is libvirt, driver and client in one."""

    def __init__(self, libvirt: Libvirt, root: Path, conf: str = QEMU_CONF) -> None:
        self.root = root
        (root / "etc").mkdir(parents=True, exist_ok=True)
        (root / "etc" / "qemu.conf").write_text(conf)
        self._marks = 0
        self._process = subprocess.Popen(
            # virsh's answers to a pipe would otherwise stay in its buffer
            ["stdbuf", "-oL", libvirt.virsh, "-q", "-c", f"qemu:///embed?root={root}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={
                **os.environ,
                "LC_ALL": "C",
                # its warnings would stand between virsh's answers
                "LIBVIRT_LOG_OUTPUTS": f"3:file:{root}/libvirt.log",
                **libvirt.environment,
            },
        )

    def virsh(self, *words: str | Path) -> str:
        process = self._process
        assert process.stdin and process.stdout
        self._marks += 1
        mark = f"MARK-{self._marks}-KRAM"
        line = " ".join(_quote(str(word)) for word in words)
        # virsh repeats each line after its prompt, so that the mark alone
        # stands at the beginning of a line when the command has ended
        process.stdin.write(f"{line}\necho {mark}\n".encode())
        process.stdin.flush()
        out = b""
        deadline = time.monotonic() + VIRSH_SECONDS
        while b"\n" + mark.encode() not in out:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], left)
            data = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not data:
                process.kill()
                raise VirshError(f"virsh ended at {line}:\n{out.decode()}")
            out += data
        text = out.decode(errors="replace")
        text = text[: text.rindex(f"{PROMPT}echo {mark}")]
        text = text.partition("\n")[2]  # the repeated line
        if re.search(r"^error: ", text, re.MULTILINE):
            raise VirshError(with_log(text.strip(), self.root))
        return text.strip("\n")

    def close(self) -> None:
        # the embedded driver leaves its domains running
        try:
            self.destroy_all()
        except (VirshError, OSError):
            pass
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


LIBVIRTD_CONF = """\
host_uuid = "{uuid}"
unix_sock_dir = "{sockets}"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:file:{log}"
"""

#: What a daemon keeps of its own, where it cannot be told to go elsewhere.
PRIVATE = {
    "etc": "/etc/libvirt",
    "lib": "/var/lib/libvirt",
    "cache": "/var/cache/libvirt",
    "log": "/var/log/libvirt",
    "run": "/run/libvirt",
}


class Daemon(Connection):
    """A libvirtd run by hand, and virsh talking to it."""

    def __init__(
        self, libvirt: Libvirt, root: Path, conf: str = QEMU_CONF, setup: str = ""
    ) -> None:
        """setup: bash commands for the mount namespace, run in root."""
        self.libvirt = libvirt
        self.root = root
        sockets = root / "sock"
        for name in [*PRIVATE, "sock"]:
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "etc" / "qemu.conf").write_text(conf)
        settings = LIBVIRTD_CONF.format(
            uuid=uuid.uuid4(), sockets=sockets, log=root / "libvirtd.log"
        )
        (root / "libvirtd.conf").write_text(settings)
        self.uri = f"qemu+unix:///system?socket={sockets}/libvirt-sock"
        binds = "".join(
            f"mkdir -p {there}; mount --bind {root}/{name} {there}; "
            for name, there in PRIVATE.items()
        )
        self._output = (root / "output").open("w")
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "bash", "-euc"]
            + [f'{binds} (cd {root}; {setup}:); exec "$@"', "libvirtd", libvirt.daemon]
            + ["-f", root / "libvirtd.conf", "-p", root / "libvirtd.pid"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", **libvirt.environment},
        )
        try:
            wait_for("answer of libvirtd", 60, self._answers)
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            text = (self.root / "output").read_text()
            log = self.root / "libvirtd.log"
            text += log.read_text() if log.exists() else ""
            raise AssertionError(
                f"libvirtd ended ({self._process.returncode}): {text[-2000:]}"
            )
        if not (self.root / "sock" / "libvirt-sock").exists():
            return False
        try:
            self.virsh("uri")
        except VirshError:
            return False
        return True

    def virsh(self, *words: str | Path) -> str:
        done = subprocess.run(
            [self.libvirt.virsh, "-q", "-c", self.uri, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=VIRSH_SECONDS,
            env={**os.environ, "LC_ALL": "C", **self.libvirt.environment},
        )
        if done.returncode != 0:
            raise VirshError(with_log(done.stdout.strip(), self.root))
        return done.stdout.strip("\n")

    def undefine_all(self) -> None:
        self.destroy_all()
        for name in self.virsh("list", "--all", "--name").split():
            self.virsh("undefine", "--managed-save", name)

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self.destroy_all()
            except (VirshError, subprocess.SubprocessError):
                pass
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()


@contextmanager
def daemons(
    libvirt: Libvirt, count: int, conf: str = QEMU_CONF, setup: str = ""
) -> Iterator[list[Daemon]]:
    able = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "true"],
        capture_output=True,
        text=True,
    )
    if able.returncode != 0:
        pytest.skip(f"no mount namespace for libvirtd: {able.stderr.strip()}")
    directory = short_directory()
    running: list[Daemon] = []
    try:
        for i in range(count):
            running.append(Daemon(libvirt, directory / f"{i}", conf, setup))
        yield running
    finally:
        for daemon in running:
            daemon.close()
        kill_leftovers(directory)
        shutil.rmtree(directory, ignore_errors=True)


def short_directory() -> Path:
    """A directory whose name leaves room for UNIX sockets (108 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="lv", dir="/tmp"))
    path.chmod(0o755)
    return path


def kill_leftovers(directory: Path) -> None:
    """Ends what still runs with files of `directory` on its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            if str(directory).encode() + b"/" in words:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


@contextmanager
def embedded(libvirt: Libvirt) -> Iterator[Embedded]:
    directory = short_directory()
    connection = Embedded(libvirt, directory / "root")
    try:
        yield connection
    finally:
        connection.close()
        kill_leftovers(directory)
        shutil.rmtree(directory, ignore_errors=True)


#: Where libvirt and QEMU look for the daemon of a group.
POOLS = Path("/run/ksm-pool")


@contextmanager
def pools() -> Iterator[Path]:
    """POOLS is there, for as long as it takes."""
    made = not POOLS.exists()
    POOLS.mkdir(exist_ok=True)
    try:
        yield POOLS
    finally:
        if made:
            POOLS.rmdir()


def confined_guest(host: Daemon, name: str, **fields: Any) -> Guest:
    """A guest whose files libvirt-qemu can reach, with CONFINED_SETUP."""
    place = host.root / "guest"
    place.mkdir(exist_ok=True)
    for path, source in (("kernel", kernel()), ("initrd", initrd())):
        if not (place / path).exists():
            shutil.copyfile(source, place / path)
    emulator = host.root / "qemu" / QEMU.name
    serial = place / f"{name}.serial"
    serial.unlink(missing_ok=True)
    return Guest(name, serial, emulator=emulator, files=place, **fields)


def create(host: Daemon, guest: Guest) -> None:
    xml = guest.serial.with_suffix(".xml")
    xml.write_text(guest.xml())
    host.virsh("create", xml)


def process_status(host: Daemon, guest: Guest) -> dict[str, str]:
    """/proc/PID/status of the domain's QEMU."""
    pid = (host.root / "run" / "qemu" / f"{guest.name}.pid").read_text().strip()
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(re.findall(r"^(\w+):\s+(.*)$", text, re.MULTILINE))


def check_confined(host: Daemon, guest: Guest) -> None:
    status = process_status(host, guest)
    assert status["Uid"].split()[0] != "0"
    assert int(status["CapEff"], 16) == 0
    assert status["Seccomp"] == "2"


def ensure_packages() -> None:
    """Debian's libvirt, and the user its driver looks up even when told to
    run QEMU as root (libvirt-daemon-system would make it, but needs systemd).
    """
    if os.geteuid() != 0:
        pytest.skip("needs root: libvirt's privileged driver, mount namespaces")
    script = (
        ". scripts/lib/common.sh; need_apt adduser gcc libc6-dev coreutils "
        "libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients; "
        "getent group kvm >/dev/null || addgroup --quiet --system kvm; "
        "getent passwd libvirt-qemu >/dev/null || adduser --quiet --system "
        "--ingroup kvm --home /var/lib/libvirt --no-create-home libvirt-qemu; "
        "getent group libvirt-qemu >/dev/null || "
        "addgroup --quiet --system libvirt-qemu"
    )
    subprocess.run(["bash", "-eu", "-c", script], cwd=TOP, check=True)


def wait_for(what: str, seconds: float, condition: Any) -> Any:
    """Calls condition() until it is true; returns what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.3)


def check_merging(host: Connection, guests: list[Guest]) -> None:
    """With ksmd running, most of what the guests have in common is merged,
    the statistics say so, and the guests' memory stays what it was.
    """
    pages = guests[0].common_mib << 8

    def merged() -> bool:
        counts = []
        for guest in guests:
            stats = host.qmp(guest.name, "query-ksm-stats")
            counts.append(sum(b["pages-merged"] for b in stats["backends"]))
        return all(count > pages * 0.9 for count in counts)

    with ksmsys.KsmKnobs() as knobs:
        knobs.set(run=0)
        knobs.set(advisor_mode="none", pages_to_scan=20000, sleep_millisecs=10)
        knobs.set(run=1)
        wait_for("merging of 90 % of the common pages", 90, merged)
        for guest in guests:
            guest.wait_turns(1)
            stats = host.qmp(guest.name, "query-ksm-stats")
            assert stats["host"]["ksmd"] == "running"
            assert stats["host"]["pages-sharing"] > pages * 0.9
            assert {b["state"] for b in stats["backends"]} <= {"active", "idle"}
        knobs.unmerge_all()
    for guest in guests:
        guest.wait_turns(1)
