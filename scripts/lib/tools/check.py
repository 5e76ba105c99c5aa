# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs every test of the repository and counts what passed (scripts/check).

Each step is a few commands with a log, build/check/STEP.log, and a short report
on the terminal.  Results are read from JUnit XML or from a closing line
'N passed, N failed, N skipped'.  A step that ends badly without a failed test
counts as one failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from host.paths import TOP

LOGS = TOP / "build" / "check"
#: How a program of scripts/lib is run; its name follows.
PROGRAM = ("python", "scripts/lib/launch.py")
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$")
#: What a case that failed has in JUnit XML.
BAD = ("failure", "error")
SKIP_LINE = re.compile(r"^\s*(?:ok \d+ .*# SKIP|SKIP(?:PED)?:?)\s*(.*)$", re.IGNORECASE)


@dataclass
class Result:
    """What a step (or a part of one) came to."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


#: Commands that run now: they have sessions of their own, which no ^C reaches.
running: set[int] = set()
#: Set by ^C: no step begins another command.
stopping = threading.Event()
#: Held while something is built that several steps need.
building = threading.Lock()


def is_bad(case: ET.Element) -> bool:
    return any(case.find(bad) is not None for bad in BAD)


def why_bad(case: ET.Element) -> str:
    """In a line: the report's end has no more."""
    said = [line.get("message") or "" for bad in BAD for line in case.findall(bad)]
    bails = re.findall("Bail out!.*", case.findtext("system-out") or "")
    words = " ".join([*said, *bails[:1]]).split()
    return f": {' '.join(words)[:300]}" if words else ""


DEATH = re.compile(
    r"^(?:Bail out! )?(ERROR:.*|\*\* .*ERROR.*|.*runtime error: .*|SUMMARY: \w+Sanitizer.*)$",
    re.MULTILINE,
)


def why_died(build: Path, name: str) -> str:
    """Of a test of meson's: what its last words are about, for the line of the test."""
    try:
        log = (build / "meson-logs" / "testlog.txt").read_text(errors="replace")
    except OSError:
        return ""
    test = re.search(rf"^test: +{re.escape(name)}$.*?(?=^test: |\Z)", log, re.M | re.S)
    words = DEATH.search(test[0]) if test else None
    return f": {words[1][:200]}" if words else ""


class Step:
    """A step's log, what it has to say, and the running of its commands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: list[str] = []
        LOGS.mkdir(parents=True, exist_ok=True)
        self.path = LOGS / f"{name}.log"
        self.log = self.path.open("w", encoding="utf-8", errors="replace")

    def run(
        self,
        *command: str | Path,
        env: dict[str, str] | None = None,
        minutes: float = 30,
    ) -> tuple[int, list[str]]:
        """Runs a command; returns its exit code and its output's lines."""
        if stopping.is_set():
            raise RuntimeError("interrupted")
        words = [str(word) for word in command]
        self.log.write(f"$ {' '.join(words)}\n")
        self.log.flush()
        start = self.path.stat().st_size
        with subprocess.Popen(
            words,
            cwd=TOP,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            running.add(process.pid)
            try:
                code = process.wait(timeout=minutes * 60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                self.log.write(f"check: killed after {minutes} minutes\n")
                code = 124
            finally:
                running.discard(process.pid)
        self.log.flush()
        with self.path.open("rb") as log:
            log.seek(start)
            text = log.read().decode(errors="replace")
        return code, text.splitlines()

    def say(self, lines: Sequence[str]) -> None:
        """Printed when the step ends: another one may run beside it."""
        self.said += [f"    {line}" for line in lines]

    def simple(self, title: str, *command: str | Path) -> Result:
        """A command that is one test: its exit code decides."""
        code, lines = self.run(*command)
        if code == 0:
            return Result(passed=1)
        self.say(lines[-15:])
        return Result(failed=[f"{title} (exit {code})"])

    def build(self, title: str, *command: str | Path) -> Result | None:
        """A command others rest on: None if it went well."""
        result = self.simple(title, *command)
        return result if result.failed else None

    def counted(
        self,
        title: str,
        *command: str | Path,
        minutes: float = 20,
        env: dict[str, str] | None = None,
    ) -> Result:
        """A command that ends with 'N passed, N failed, N skipped'."""
        code, lines = self.run(*command, minutes=minutes, env=env)
        result = Result()
        closing = [match for line in lines if (match := CLOSING.match(line))]
        if closing:
            result.passed = int(closing[-1][1])
            bad = [line for line in lines if re.match(r"^(not ok|FAIL)", line)]
            result.failed = (bad + [title] * int(closing[-1][2]))[: int(closing[-1][2])]
            reasons = [m[1] or line for line in lines if (m := SKIP_LINE.match(line))]
            count = int(closing[-1][3] or 0)
            result.skipped = [f"{title}: {reason}" for reason in reasons][:count]
            result.skipped += [f"{title}: no reason given"] * (
                count - len(result.skipped)
            )
        if code != 0 and not result.failed or not closing:
            result.failed.append(f"{title} (exit {code}; see {self.path})")
        if result.failed:
            self.say(lines[-30:])
        return result

    def say_why(self, root: ET.Element) -> None:
        """What failed tests wrote to stdout: meson keeps TAP's comments to itself."""
        for suite in root.iter("testsuite"):
            bad = [case for case in suite.findall("testcase") if is_bad(case)]
            for at in [suite, *bad] if bad else []:
                said = (at.findtext("system-out") or "").splitlines()
                said = [line for line in said if "Bail out!" in line] + said[-40:]
                self.say([f"{at.get('name')}:", *(line[:300] for line in said)])

    def junit(self, xml: Path, code: int, title: str, lines: list[str]) -> Result:
        """Reads JUnit XML of pytest or meson."""
        result = Result()
        try:
            root = ET.parse(xml).getroot()
            cases = list(root.iter("testcase"))
            self.say_why(root)
        except (OSError, ET.ParseError) as error:
            cases = []
            self.log.write(f"check: {xml}: {error}\n")
        for case in cases:
            name = f"{case.get('classname') or title}.{case.get('name')}"
            skipped = case.find("skipped")
            if is_bad(case):
                result.failed.append(f"{name}{why_bad(case)}")
            elif skipped is not None:
                # meson has the reason of a TAP skip in the case's output
                reason = (
                    skipped.get("message")
                    or skipped.text
                    or case.findtext("system-out")
                    or "no reason given"
                )
                result.skipped.append(f"{name}: {reason.strip()}")
            else:
                result.passed += 1
        if not cases or (code != 0 and not result.failed):
            result.failed.append(f"{title} (exit {code}; see {self.path})")
        if result.failed:
            self.say(lines[-60:])
        return result

    def pytest(
        self,
        title: str,
        *args: str | Path,
        minutes: float = 15,
        env: dict[str, str] | None = None,
    ) -> Result:
        xml = LOGS / f"{self.name}-{title}.xml"
        xml.unlink(missing_ok=True)
        code, lines = self.run(
            *("python", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"),
            "--durations=30",
            f"--junitxml={xml}",
            *args,
            minutes=minutes,
            env=env,
        )
        return self.junit(xml, code, title, lines)

    def meson_tests(self, build: Path, *args: str, minutes: float = 20) -> Result:
        xml = build / "meson-logs" / "testlog.junit.xml"
        xml.unlink(missing_ok=True)
        code, lines = self.run(
            *(
                "meson",
                "test",
                "-C",
                build,
                "--print-errorlogs",
                "--num-processes",
                "2",
            ),
            *args,
            minutes=minutes,
        )
        result = self.junit(xml, code, build.name, lines)
        # a test that died in the middle has no failed case in the XML
        summary = "\n".join(lines).partition("Summary of Failures:")[2]
        for name in re.findall(r"^\s*\d+/\d+ (\S+ / \S+)", summary, re.MULTILINE):
            if not any(name.split(" / ")[0] in known for known in result.failed):
                result.failed.append(f"{name}{why_died(build, name)}")
        return result


def tracked(*patterns: str) -> list[str]:
    """Files of the repository (of its index: new files count once added)."""
    out = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=TOP, capture_output=True, check=True
    ).stdout.decode()
    return [name for name in out.split("\0") if name and (TOP / name).is_file()]


def shell_scripts() -> list[str]:
    names = []
    for name in tracked():
        with (TOP / name).open("rb") as file:
            first = file.readline(80)
        if re.match(rb"#!.*\b(ba)?sh\b", first) or name.endswith(".sh"):
            names.append(name)
    return names


def checkpatch_path(step: Step) -> Path:
    """QEMU's checkpatch.pl, taken out of its source package."""
    code, lines = step.run(
        "bash",
        "-c",
        ". scripts/lib/common.sh; dir=$(fetch_source qemu trixie) && out=$top/build/check "
        '&& tar -C "$out" -xf "$dir"/qemu_*.orig.tar.* --wildcards --strip-components=2 '
        '"*/scripts/checkpatch.pl" && echo "$out/checkpatch.pl"',
    )
    if code != 0:
        raise RuntimeError(f"no checkpatch.pl: {' '.join(lines[-3:])}")
    return Path(lines[-1])


def without_licence() -> list[str]:
    """Files that should have an SPDX line and do not."""
    exempt = re.compile(
        r"(^LICENSE$|\.(png|svg|rst|md|json|xml|toml|txt|rng|css|err|args)$|\.gitignore$|^\.ci/"
        # lists, and what Debian gives a form
        r"|^debian/(control|changelog|copyright|README\.source|source/format)$"
        r"|^debian/.*\.(install|links|dirs|docs|examples|manpages|symbols|Debian)$)"
    )
    missing = []
    for name in tracked():
        if exempt.search(name):
            continue
        text = (TOP / name).read_text(errors="replace")[:2000]
        if text.strip() and "SPDX-License-Identifier: GPL-2.0-or-later" not in text:
            missing.append(name)
    return missing


def step_style(step: Step) -> Result:
    result = Result()
    python = tracked("*.py")
    result.add(step.simple("ruff check", "ruff", "check", *python))
    result.add(step.simple("ruff format", "ruff", "format", "--check", *python))
    result.add(step.simple("mypy", "mypy", "--no-error-summary", "scripts/lib"))
    result.add(step.simple("floors of scripts/lib", *PROGRAM, "tools.floors"))
    result.add(step.pytest("floors", "tests/floors"))
    result.add(step.simple("shellcheck", "shellcheck", "-x", *shell_scripts()))
    missing = without_licence()
    result.add(
        Result(failed=[f"no SPDX line: {name}" for name in missing])
        if missing
        else Result(passed=1)
    )
    checkpatch = ("perl", checkpatch_path(step), "-q", "--no-tree", "-f")

    def check(name: str) -> Result:
        return step.simple(f"checkpatch {name}", *checkpatch, name)

    # what it finds names the file: two may write to the log
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(check, tracked("*.c", "*.h")):
            result.add(found)
    return result


def step_graft(step: Step) -> Result:
    result = step.pytest("graft", "tests/graft")
    result.add(step.pytest("package-scripts", "tests/deb/test_scripts.py"))
    return result


def step_top(step: Step) -> Result:
    return step.pytest("top", "tests/top")


def libksm_build(step: Step, name: str, *options: str) -> Path | Result:
    build = TOP / "build" / name
    if not (build / "build.ninja").exists():
        shutil.rmtree(build, ignore_errors=True)
        bad = step.build(f"meson setup {name}", "meson", "setup", build, *options)
        if bad:
            return bad
    return step.build(f"build {name}", "meson", "compile", "-C", build, "-j2") or build


def step_unit(step: Step) -> Result:
    build = libksm_build(step, "libksm", "--buildtype=debugoptimized", "--werror")
    return build if isinstance(build, Result) else step.meson_tests(build)


def sanitized(step: Step, name: str, sanitizers: str, *tests: str) -> Result:
    build = libksm_build(
        step, name, "--buildtype=debugoptimized", f"-Db_sanitize={sanitizers}"
    )
    if isinstance(build, Result):
        return build
    return step.meson_tests(build, "--timeout-multiplier", "4", *tests)


def step_asan(step: Step) -> Result:
    return sanitized(step, "libksm-asan", "address,undefined")


def step_tsan(step: Step) -> Result:
    return sanitized(step, "libksm-tsan", "thread")


def with_qemu(step: Step, tests: Callable[[], Result], *options: str) -> Result:
    """Tests that need the grafted QEMU (seconds when it is up to date)."""
    with building:
        bad = step.build("scripts/build-qemu", "scripts/build-qemu", *options)
    return bad or tests()


#: Environment variables that choose a QEMU.
Env = dict[str, str] | None


def our_qtests(step: Step, env: Env = None) -> Result:
    return step.counted("our qtests", "tests/qtest/run", env=env)


def qemus_own(step: Step, env: Env = None, *tests: str) -> Result:
    """All of them, or those named."""
    return step.counted("QEMU's own tests", "tests/qemu/run", *tests, env=env)


#: End-to-end tests of what is about the whole host: KSM's knobs, all guests.
HOST = ("balloon", "demo", "guest", "hostd", "scope_host", "top")


def e2e(step: Step, env: Env = None) -> Result:
    of_host = {f"test_{name}.py" for name in HOST}
    tests = sorted((TOP / "tests/e2e").glob("test_*.py"))
    return step.pytest(
        "e2e",
        *(test for test in tests if test.name not in of_host),
        minutes=25,
        env=env,
    )


def e2e_host(step: Step, env: Env = None) -> Result:
    tests = (f"tests/e2e/test_{name}.py" for name in HOST)
    return step.pytest("e2e-host", *tests, minutes=25, env=env)


def step_qtest(step: Step) -> Result:
    return with_qemu(step, lambda: our_qtests(step))


def step_qemu(step: Step) -> Result:
    return with_qemu(step, lambda: qemus_own(step))


def step_e2e(step: Step) -> Result:
    return with_qemu(step, lambda: e2e(step))


def step_e2e_host(step: Step) -> Result:
    return with_qemu(step, lambda: e2e_host(step))


def step_qemu_10_2(step: Step) -> Result:
    build = TOP / "build" / "qemu-10.2"
    env = {
        "QEMU_BUILD": str(build),
        "QEMU_KSM_QEMU": str(build / "qemu-system-x86_64"),
    }

    def tests() -> Result:
        result = Result()
        for test in (our_qtests, qemus_own):
            result.add(test(step, env))
        with ThreadPoolExecutor(2) as pool:
            lanes = [pool.submit(lane, step, env) for lane in (e2e, e2e_host)]
            for lane in lanes:
                result.add(lane.result())
        return result

    return with_qemu(step, tests, "--qemu", "10.2")


def libksm_on_arm64(step: Step, env: Env) -> Result:
    """libksm's unit tests, by a cross build, on Debian 13's kernel."""
    code, lines = step.run("scripts/lib/guest/guest-sysroot")
    if code:
        return Result(failed=[f"guest-sysroot (exit {code}; see {step.path})"])
    cross = ("--cross-file", f"{lines[-1]}/cross")
    build = libksm_build(
        step, "libksm-aarch64", "--buildtype=debugoptimized", "--werror", *cross
    )
    if isinstance(build, Result):
        return build
    command = (*PROGRAM, "tools.kernels", build, "--suite", "unit")
    return step.counted("kernels", *command, "--release", "trixie", env=env, minutes=90)


#: End-to-end tests that arm64 guests have in common with x86's.
ARM64_TOO = ("test_scope_vm.py", "test_balloon.py", "test_migration.py")


def step_aarch64(step: Step) -> Result:
    build = TOP / "build" / "qemu-aarch64"
    env = {
        "QEMU_BUILD": str(build),
        "QEMU_KSM_QEMU": str(build / "qemu-system-aarch64"),
    }

    def tests() -> Result:
        result = libksm_on_arm64(step, env)
        result.add(our_qtests(step, env))
        result.add(qemus_own(step, env, "numa-test", "migration-test"))
        where = ["tests/e2e/arm64", *(f"tests/e2e/{name}" for name in ARM64_TOO)]
        # the payload is a program in x86's machine code
        chosen = ("-k", "not payload", *where)
        result.add(step.pytest("e2e", *chosen, minutes=45, env=env))
        return result

    return with_qemu(step, tests, "--target", "aarch64-softmmu")


BUILD_LIBVIRT = ("scripts/build-libvirt", "--release")


def step_libvirt_build(step: Step) -> Result:
    """While others mostly wait."""
    return step.simple("scripts/build-libvirt", *BUILD_LIBVIRT, "bookworm")


def step_libvirt(
    step: Step, release: str = "bookworm", name: str = "libvirt"
) -> Result:
    def tests() -> Result:
        return step.build(
            "scripts/build-libvirt", *BUILD_LIBVIRT, release
        ) or step.pytest("libvirt", "tests/e2e/libvirt", env={"LIBVIRT_BUILD": name})

    return with_qemu(step, tests)


def step_libvirt_trixie(step: Step) -> Result:
    return step_libvirt(step, "trixie", "libvirt-trixie")


def step_deb(step: Step) -> Result:
    return step.pytest("deb", "tests/deb", minutes=90)


def step_series(step: Step) -> Result:
    return step.counted("series", *PROGRAM, "tools.series", minutes=600)


def kernels(step: Step, *options: str) -> Result:
    with building:
        build = libksm_build(step, "libksm", "--buildtype=debugoptimized", "--werror")
    if isinstance(build, Result):
        return build
    return with_qemu(
        step,
        lambda: step.counted(
            "kernels", *PROGRAM, "tools.kernels", build, *options, minutes=90
        ),
    )


def step_kernels(step: Step) -> Result:
    return kernels(step)


def step_kernels_quick(step: Step) -> Result:
    result = kernels(step, "--quick")
    # how a guest's words count: by now QEMU is there
    result.add(step.pytest("kernels", "tests/kernels"))
    return result


STEPS: dict[str, tuple[Callable[[Step], Result], str]] = {
    "style": (step_style, "ruff, mypy, shellcheck, licence lines, checkpatch.pl"),
    "graft": (step_graft, "scripts/graft and its tables; scripts of the packages"),
    "top": (step_top, "ksm-top beside guests that hang; metrics, alerts, dashboard"),
    "unit": (step_unit, "libksm: unit, fault injection, property, system tests"),
    "asan": (step_asan, "libksm under address and undefined-behaviour sanitizers"),
    "tsan": (step_tsan, "libksm under the thread sanitizer"),
    "qtest": (step_qtest, "our qtests of the grafted QEMU"),
    "qemu": (step_qemu, "QEMU's own tests with guest RAM on our backend"),
    "libvirt-build": (step_libvirt_build, "libvirt is built, for its tests later"),
    "e2e": (step_e2e, "real guests: scopes vm and group, migration, a storm"),
    "e2e-host": (
        step_e2e_host,
        "real guests: the demo, the host's ksmd, balloon, ksm-top",
    ),
    "qemu-10.2": (
        step_qemu_10_2,
        "the last four with QEMU 10.2 in the place of 10.0 (only when named)",
    ),
    "aarch64": (
        step_aarch64,
        "arm64: qtests, some of QEMU's own, and guests on virt (only when named)",
    ),
    "kernels-quick": (
        step_kernels_quick,
        "libksm's unit tests on a kernel that is too old and on the newest",
    ),
    "kernels": (
        step_kernels,
        "all tests of libksm on Linux 6.1, 6.12 and the newest (only when named)",
    ),
    "libvirt": (step_libvirt, "libvirt, unmodified and with our insertions"),
    "libvirt-trixie": (
        step_libvirt_trixie,
        "the same with libvirt 11.3 in the place of 9.0 (only when named)",
    ),
    "series": (
        step_series,
        "scripts/graft --series: applies, builds after each patch (only when named)",
    ),
    "deb": (
        step_deb,
        "the Debian packages: built, installed, used, upgraded, purged (only when named)",
    ),
}
#: As long as all others together, or as those before it, and finds little that
#: the others do not.
ONLY_WHEN_NAMED = {
    *("aarch64", "deb", "kernels", "libvirt-trixie", "qemu-10.2", "series")
}
#: They mostly wait, or have one processor do all, or (libvirt-build) use what
#: the others leave: two at a time, the next one when one of them has ended.
BESIDE = (
    ("style", "graft", "top"),
    ("qtest", "qemu", "libvirt-build", "e2e", "e2e-host"),
    ("kernels-quick", "libvirt"),
)
AT_ONCE = 2


def run_step(name: str) -> Result:
    print(f"== {name}: {STEPS[name][1]}", flush=True)
    start = time.monotonic()
    step = Step(name)
    try:
        result = STEPS[name][0](step)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        result = Result(failed=[f"{name}: {error}"])
    finally:
        step.log.close()
    lines = [
        *step.said,
        *(f"   FAILED {failure}" for failure in result.failed),
        *(f"   skipped {reason}" for reason in result.skipped),
        f"   {name}: {result.passed} passed, {len(result.failed)} failed, "
        f"{len(result.skipped)} skipped in {time.monotonic() - start:.0f} s",
    ]
    print("\n".join(lines), flush=True)
    return result


def together(names: Sequence[str]) -> list[list[str]]:
    """Steps in the order given; those that may are next to one another."""
    groups: list[list[str]] = []
    for name in names:
        if groups and any({name, groups[-1][0]} <= {*each} for each in BESIDE):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def run_group(names: Sequence[str]) -> Result:
    total = Result()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for result in pool.map(run_step, names):
                total.add(result)
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for pid in running.copy():
                os.killpg(pid, signal.SIGTERM)
            raise
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/check",
        description="Runs the tests, half an hour and more; logs: build/check.",
        epilog="steps: " + "; ".join(f"{k}: {v[1]}" for k, v in STEPS.items()),
    )
    parser.add_argument(
        "steps",
        nargs="*",
        metavar="STEP",
        help=f"only these steps (default: all but {', '.join(sorted(ONLY_WHEN_NAMED))})",
    )
    args = parser.parse_args()
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are: {', '.join(STEPS)}")
    total = Result()
    names = args.steps or [name for name in STEPS if name not in ONLY_WHEN_NAMED]
    for group in together(names):
        total.add(run_group(group))
    for failure in total.failed:
        print(f"FAILED {failure}")
    print(
        f"{total.passed} passed, {len(total.failed)} failed, "
        f"{len(total.skipped)} skipped"
    )
    return 1 if total.failed or not total.passed else 0
