# SPDX-License-Identifier: GPL-2.0-or-later
"""libksm's tests on other kernels than this machine's (scripts/check kernels).

libksm builds on calls that are younger than most kernels in use, and that
differ from one to the next.  So each of Debian's cloud kernels is started in
QEMU, under TCG, with an initramfs of libksm's test programs (those meson
knows), their libraries and busybox.  The guest writes the tests' output to its
second serial port and ends; this program reads it, test by test.

Where QEMU_KSM_QEMU names a QEMU for arm64, kernels are that, and so has the build
directory to be: guest-sysroot prints where a cross file for meson is.

A kernel before Linux 6.8 has to be refused: there a test passes when it is
skipped for the reason that libksm gives.  A complaint of the kernel itself is
a failure.

Leaves to others: where a kernel comes from (guest-kernel), the tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from guest.qemu import FIRMWARE, GuestError, need_qemu, qemu_arch
from host.exits import Lacking, WrongUse
from host.paths import TOP

LOGS = TOP / "build" / "check"
FETCH = TOP / "scripts/lib/guest/guest-kernel"
SYSROOT = TOP / "scripts/lib/guest/guest-sysroot"
#: Debian's releases: with a kernel that is refused, the next, and the newest
RELEASES = ("bookworm", "trixie", "forky")
#: of the default run of scripts/check
QUICK_RELEASES = ("bookworm", "forky")
QUICK_SUITES = ("unit",)
#: Not of that run: the same tests over the fake remote store, and those of what is
#: merged when.  What the kernel does is the same, and emulated they take minutes.
NOT_QUICK = re.compile("-fake$|^answers$|^scan$")
#: Another step runs beside it.
QUICK_CPUS = 1
#: What has to be in the reason of a skip where the kernel lacks it.
NEEDED = re.compile("UFFDIO_MOVE|PAGEMAP_SCAN")
NEEDED_SINCE = (6, 8)
#: the biggest program (answers) takes 870 MiB, and all of them lie in memory
MEMORY_MIB = 1536
CPUS = 2
BOOT_SECONDS = 180
#: Emulated, and the machine has other things to do.
SLOWER = 8
#: The engine sees a 300th of its CPU time (tests/slower.h).
CPU_SLOWER = 300
#: Every so many positions of test-fault: it is minutes otherwise.
FAULT_STEP = 5
#: How long the tests take that run for as long as they are told.
RUN_SECONDS = 30
#: Complaints of the kernel.  What it says of a CPU that was late is left out:
#: an emulated one is.
COMPLAINT = re.compile(
    r"\b(WARNING: (?!.*(?:rcu|clocksource|tsc))|kernel BUG at|BUG: (?!soft lockup|"
    r"workqueue lockup)|Oops|Bad (?:page|rss)|general protection fault|"
    r"Kernel panic|INFO: task .* blocked|UBSAN|refcount_t:|list_(?:add|del) corruption)",
    re.IGNORECASE,
)
SEPARATOR = "the tests begin"

INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /bin /var /etc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
ln -s /tmp /var/tmp
if mount -t cgroup2 cgroup /sys/fs/cgroup; then
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
fi
# not from the start: see guest/qemu.py
for cpu in /sys/devices/system/cpu/cpu[1-9]; do
    echo 1 >$cpu/online
done
exec </dev/null >/dev/PORT 2>&1
echo "@linux $(uname -r)"
echo "{SEPARATOR}" >/dev/kmsg

# where each thread of the test is, and what the kernel has it wait for
look_at() {{
    for thread in /proc/$1/task/*; do
        echo "# thread $(cat $thread/comm), state $(cut -d' ' -f3 $thread/stat)"
        sed 's/^/#   /' $thread/stack
    done
}}

# run NAME SECONDS COMMAND...
run() {{
    name=$1 limit=$2
    shift 2
    echo "@begin $name"
    started=$(cut -d. -f1 /proc/uptime)
    setsid "$@" &
    pid=$!
    (
        sleep $limit
        echo "# not over after $limit s"
        look_at $pid
        kill -9 -$pid
    ) &
    watch=$!
    wait $pid
    code=$?
    kill $watch 2>/dev/null
    wait $watch 2>/dev/null
    echo "@end $name $code $(($(cut -d. -f1 /proc/uptime) - started))"
}}

. /tests
echo "@done"
poweroff -f
"""

#: Tests that make no system call, and calculate for minutes on an emulated CPU.
ARITHMETIC = {"cut"}


@dataclass
class Test:
    """A test as meson describes it, with what it needs in the guest."""

    name: str
    suites: list[str]
    command: list[str]
    env: dict[str, str]
    seconds: int
    files: list[Path]


@dataclass
class Outcome:
    """What one kernel came to."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def introspect(build: Path, what: str) -> Any:
    out = subprocess.run(
        ["meson", "introspect", what, str(build)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    ).stdout
    return json.loads(out)


def bounded(command: list[str], seconds: int) -> list[str]:
    """The command with --seconds N at most @seconds."""
    words = list(command)
    for at, word in enumerate(words[:-1]):
        if word == "--seconds":
            words[at + 1] = f"{min(float(words[at + 1]), seconds):g}"
    return words


def meson_tests(build: Path, seconds: int, fault_step: int) -> list[Test]:
    """The tests of a build directory."""
    made = {t["id"]: t["filename"] for t in introspect(build, "--targets")}
    tests = []
    for known in introspect(build, "--tests"):
        if {"ksmd", "build"} & set(known["suite"][0].split(":")):
            continue  # run by a program that is not on board, or of what was built
        if known["name"] in ARITHMETIC:
            continue
        # relative to the build directory, where they run
        files = [Path(name) for target in known["depends"] for name in made[target]]
        files += [build / word for word in known["cmd"] if (build / word).is_file()]
        env = {
            **known["env"],
            "KSM_FAULT_STEP": str(fault_step),
            "KSM_TEST_SLOWER": str(CPU_SLOWER),
        }
        tests.append(
            Test(
                name=known["name"],
                suites=[suite.rpartition(":")[2] for suite in known["suite"]],
                command=bounded(known["cmd"], seconds),
                env=env,
                seconds=known["timeout"] * SLOWER,
                files=files,
            )
        )
    return tests


def libraries(program: Path) -> dict[Path, Path]:
    """The shared libraries a program needs: where it looks for each, and a copy."""
    if qemu_arch().name != os.uname().machine:
        return foreign_libraries(program)
    done = subprocess.run(
        ["ldd", str(program)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    missing = re.search(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)
    if missing:
        raise GuestError(f"{program} needs {missing[1]}, which is not to be found")
    names = re.findall(r"(?:^|=>)\s*(/\S+) \(0x", done.stdout, re.MULTILINE)
    return {Path(name): Path(name) for name in names}


@cache
def sysroot() -> Path:
    """Debian's libraries for arm64, as they are in an installed system."""
    done = subprocess.run(
        [SYSROOT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise GuestError(f"{SYSROOT} failed, so there are no libraries")
    return Path(done.stdout.strip()) / "root"


def foreign_libraries(program: Path) -> dict[Path, Path]:
    """The same for another machine's program, which ldd cannot run."""
    found: dict[Path, Path] = {}
    todo = [program]
    while todo:
        path = todo.pop()
        text = subprocess.run(
            ["readelf", "--wide", "-dl", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout
        places = [Path("/usr/lib/aarch64-linux-gnu"), Path("/lib/aarch64-linux-gnu")]
        names = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
        wanted = {name: [place / name for place in places] for name in names}
        for name in re.findall(r"program interpreter: (.+)\]", text):
            wanted[name] = [Path(name)]
        for name, choices in wanted.items():
            here = [(at, sysroot() / at.relative_to("/")) for at in choices]
            for runpath in re.findall(r"\(RUNPATH\).*\[(.+)\]", text):
                for place in runpath.replace("$ORIGIN", str(path.parent)).split(":"):
                    here.append((Path(place) / name, Path(place) / name))
            known = [pair for pair in here if pair[1].is_file()]
            if not known:
                raise GuestError(f"{path} needs {name}, which is not to be found")
            at, copy = known[0]
            if at not in found:
                found[at] = copy
                todo.append(copy)
    return found


class Archive:
    """A cpio archive (newc), which the kernel unpacks as its first root."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.names: set[str] = {"/"}

    def _entry(self, name: str, mode: int, data: bytes, rdev: int) -> None:
        encoded = name.lstrip("/").encode() + b"\0"
        # ino, mode, uid, gid, nlink, mtime, size, device, rdevice, name, sum
        numbers = [len(self.names), mode, 0, 0, 1, 0, len(data), 0, 0]
        numbers += [rdev >> 8, rdev & 0xFF, len(encoded), 0]
        self.data += b"070701" + b"".join(b"%08x" % n for n in numbers) + encoded
        self.data += bytes(-len(self.data) % 4) + data
        self.data += bytes(-len(self.data) % 4)
        self.names.add(name)

    def add(self, name: str, mode: int, data: bytes = b"", rdev: int = 0) -> None:
        """Adds an entry, and the directories above it; once."""
        if name in self.names:
            return
        self.add(os.path.dirname(name), stat.S_IFDIR | 0o755)
        self._entry(name, mode, data, rdev)

    def add_file(self, path: Path, copy: Path | None = None) -> None:
        """A file of this machine's; its content from a copy elsewhere."""
        self.add(str(path), stat.S_IFREG | 0o755, (copy or path).read_bytes())

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", 0, b"", 0)
        return gzip.compress(bytes(self.data), compresslevel=1)


def initramfs(busybox: Path, build: Path, tests: Sequence[Test]) -> bytes:
    archive = Archive()
    archive.add("/dev/console", stat.S_IFCHR | 0o600, rdev=5 << 8 | 1)
    port = qemu_arch().console.replace("0", "1")
    init = INIT.replace("/dev/PORT", f"/dev/{port}")
    archive.add("/init", stat.S_IFREG | 0o755, init.encode())
    archive.add("/bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())
    script = [f"cd {shlex.quote(str(build))}"]
    for test in tests:
        for path in test.files:
            archive.add_file(path)
            for library, copy in libraries(path).items():
                archive.add_file(library, copy)
        words = ["env", *(f"{k}={v}" for k, v in test.env.items()), *test.command]
        script.append(f"run {test.name} {test.seconds} {shlex.join(words)}")
    text = "".join(f"{line}\n" for line in script)
    archive.add("/tests", stat.S_IFREG | 0o644, text.encode())
    return archive.finish()


def fetch_kernel(release: str) -> Path | str:
    """The directory of a release's kernel, or why there is none."""
    done = subprocess.run(
        [FETCH, "--arch", qemu_arch().debian, release],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sys.stdout.write(done.stderr)
    sys.stdout.flush()
    why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == Lacking.code:
        return why
    if done.returncode:
        raise GuestError(f"{FETCH} {release} failed: {why}")
    return Path(done.stdout.strip())


def run_guest(
    kernel: Path, initrd: Path, logs: Path, seconds: float, cpus: int = CPUS
) -> str | None:
    """Runs the guest to its end; why it was ended, if it did not by itself."""
    arch = qemu_arch()
    command: list[str] = ["setpriv", "--pdeathsig", "KILL", "--", str(need_qemu())]
    for directory in FIRMWARE:
        if os.path.isdir(directory):
            command += ["-L", directory]
    command += [
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", arch.machine, *(arch.options or ("-cpu", "max"))),
        *("-smp", str(cpus), "-m", f"{MEMORY_MIB}M"),
        *("-accel", "tcg,thread=multi"),
        *("-serial", f"file:{logs}-console.log", "-serial", f"file:{logs}-tests.log"),
        *("-kernel", str(kernel / "vmlinuz"), "-initrd", str(initrd)),
        "-append",
        f"console={arch.console} panic=-1 oops=panic maxcpus=1 "
        # only the tests' own doing shall count, and be waited for
        "random.trust_cpu=on nowatchdog",
    ]
    done: str | None = None
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        try:
            code = process.wait(timeout=seconds)
            if code:
                done = f"QEMU ended with exit code {code}"
        except subprocess.TimeoutExpired:
            done = f"the guest was not over after {seconds:.0f} s"
        finally:
            process.kill()
    return done


def quoted(lines: Sequence[str]) -> str:
    """Lines of a guest, not to be mistaken for ours."""
    return "\n".join(f"    | {line.rstrip()}" for line in lines)


def last_lines(path: Path, count: int) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = ["(nothing)"]
    return quoted(lines[-count:])


def version_of(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def assertion(lines: Sequence[str]) -> str:
    """Which one failed, as GLib prints it; what is printed around may be cut."""
    for line in lines:
        if match := re.match(r"ERROR:(?:.*/)?([^/]+:\d+:.*)$", line):
            return f": {match[1]}"
    return ""


def judge_test(name: str, lines: list[str], code: int, refused: bool) -> Outcome:
    """Reads the TAP of one test; one without TAP counts by its exit code."""
    outcome = Outcome()
    planned = 0
    for line in lines:
        if plan := re.match(r"1\.\.(\d+)$", line):
            planned = int(plan[1])
        match = re.match(r"(not )?ok\b\s*\d*\s*(?:- )?(.*)$", line)
        whole = re.match(r"1\.\.0\b\s*(# SKIP.*)$", line)
        if whole:
            # there may have been a longer plan, and cases
            planned = 0
        if not match and not whole:
            continue
        words = match[2] if match else whole[1] if whole else ""
        title, skip, reason = words.partition("# SKIP")
        what = f"{name} {title.strip()}".strip()
        if match and match[1]:
            outcome.failed.append(what)
        elif not skip or (refused and NEEDED.search(reason)):
            outcome.passed += 1
        else:
            outcome.skipped.append(f"{what}: {reason.strip() or 'no reason given'}")
    known = outcome.passed + len(outcome.failed) + len(outcome.skipped)
    if code not in (0, 77) and not outcome.failed:
        outcome.failed.append(f"{name} (exit {code}{assertion(lines)})")
    elif not known:
        if code == 77:
            outcome.skipped.append(f"{name}: no reason given")
        else:
            outcome.passed += 1
    elif known < planned and not outcome.failed:
        outcome.failed.append(f"{name} ({known} of {planned} cases)")
    return outcome


def judge(kernel: str, text: str, expected: Sequence[Test]) -> Outcome:
    """What the guest said, test by test."""
    total = Outcome()
    begun: str | None = None
    lines: list[str] = []
    seen: set[str] = set()
    refused = False
    for line in text.splitlines():
        line = line.rstrip()
        words = line.split()
        if line.startswith("@linux "):
            refused = version_of(words[1]) < NEEDED_SINCE
        elif line.startswith("@begin "):
            begun, lines = words[1], []
        elif line.startswith("@end ") and begun:
            outcome = judge_test(begun, lines, int(words[2]), refused)
            seen.add(begun)
            report(f"{kernel}: {begun} ({words[3]} s)", outcome, lines)
            total.passed += outcome.passed
            total.failed += [f"{kernel}: {what}" for what in outcome.failed]
            total.skipped += [f"{kernel}: {what}" for what in outcome.skipped]
            begun = None
        else:
            lines.append(line)
    for test in expected:
        if test.name not in seen:
            end = "did not end" if test.name == begun else "was not run"
            total.failed.append(f"{kernel}: {test.name} {end}")
    if begun:
        print(quoted(lines[-40:]))
    return total


def report(title: str, outcome: Outcome, lines: list[str]) -> None:
    print(
        f"{title}: {outcome.passed} passed, {len(outcome.failed)} failed, "
        f"{len(outcome.skipped)} skipped",
        flush=True,
    )
    if outcome.failed:
        print(quoted(lines[-40:]), flush=True)


def complaints(console: Path) -> list[str]:
    """What the kernel complained of once the tests had begun."""
    try:
        text = console.read_text(errors="replace")
    except OSError:
        return []
    lines = text.partition(SEPARATOR)[2].splitlines()
    return [line.strip() for line in lines if COMPLAINT.search(line)]


def run_kernel(
    release: str, build: Path, tests: Sequence[Test], cpus: int = CPUS
) -> Outcome:
    found = fetch_kernel(release)
    if isinstance(found, str):
        return Outcome(skipped=[f"Debian's {release}: {found}"])
    name = f"Linux {(found / 'version').read_text().strip()} ({release})"
    logs = LOGS / f"kernels-{release}"
    tests_log, console = Path(f"{logs}-tests.log"), Path(f"{logs}-console.log")
    for log in (tests_log, console):
        log.unlink(missing_ok=True)
    print(f"{name}: {len(tests)} tests (logs: {logs}-*.log)", flush=True)
    started = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="qemu-ksm-initrd-") as initrd:
        initrd.write(initramfs(found / "busybox", build, tests))
        initrd.flush()
        limit = BOOT_SECONDS + sum(test.seconds for test in tests)
        ended = run_guest(found, Path(initrd.name), logs, limit, cpus)
    text = tests_log.read_text(errors="replace") if tests_log.exists() else ""
    if "@linux" not in text:
        print(last_lines(console, 40))
        why = ended or "the guest ended before its tests began"
        return Outcome(failed=[f"{name}: did not boot: {why}"])
    outcome = judge(name, text, tests)
    bad = complaints(console)
    outcome.failed += [f"{name}: the kernel complained: {line}" for line in bad]
    if ended or "@done" not in text or bad:
        print(last_lines(console, 40))
    if ended or "@done" not in text:
        outcome.failed.append(f"{name}: {ended or 'the guest ended before its tests'}")
    elif not bad:
        outcome.passed += 1
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return outcome


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kernels", description="Runs libksm's tests on Debian's kernels."
    )
    parser.add_argument("build", type=Path, help="a build directory of libksm")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"only the suite {', '.join(QUICK_SUITES)}, but for what is merged when, "
        f"over one kind of store, on {', '.join(QUICK_RELEASES)}",
    )
    parser.add_argument(
        "--release", action="append", metavar="NAME", help="only this one's kernel"
    )
    parser.add_argument("--suite", help="only the tests of this suite")
    parser.add_argument("--test", action="append", help="only this test")
    parser.add_argument(
        "--seconds", type=int, default=RUN_SECONDS, help="for test-prop and the like"
    )
    parser.add_argument(
        "--fault-step",
        type=int,
        default=FAULT_STEP,
        help="test-fault fails every so-manieth call (1: each)",
    )
    parser.add_argument(
        "--cpus",
        type=int,
        help=f"of the guest ({CPUS}; --quick: {QUICK_CPUS}); on a busy machine one gets "
        "much more done than two",
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    build = args.build.resolve()
    tests = meson_tests(build, args.seconds, args.fault_step)
    cpus = args.cpus or (QUICK_CPUS if args.quick else CPUS)
    if args.quick:
        tests = [
            test
            for test in tests
            if set(test.suites) & set(QUICK_SUITES) and not NOT_QUICK.search(test.name)
        ]
    if args.suite:
        tests = [test for test in tests if args.suite in test.suites]
    if args.test:
        tests = [test for test in tests if test.name in args.test]
    if not tests:
        raise WrongUse("there is no such test")
    LOGS.mkdir(parents=True, exist_ok=True)
    total = Outcome()
    for release in args.release or (QUICK_RELEASES if args.quick else RELEASES):
        try:
            outcome = run_kernel(release, build, tests, cpus)
        except (GuestError, OSError, subprocess.SubprocessError) as error:
            outcome = Outcome(failed=[f"{release}: {error}"])
        total.passed += outcome.passed
        total.failed += outcome.failed
        total.skipped += outcome.skipped
    for what in total.failed:
        print(f"FAIL: {what}")
    for what in total.skipped:
        print(f"SKIPPED: {what}")
    print(
        f"{total.passed} passed, {len(total.failed)} failed, "
        f"{len(total.skipped)} skipped"
    )
    return 1 if total.failed or not total.passed + len(total.skipped) else 0
