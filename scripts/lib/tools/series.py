# SPDX-License-Identifier: GPL-2.0-or-later
"""Does the series of patches hold?  (scripts/check series)

For each version of QEMU: 'git am' applies the series to the pristine tree and makes
the grafted one, file by file; checkpatch.pl of that version has nothing to say; QEMU
builds after each patch, and passes our qtests after the last; its documentation is
built without a warning.

All is kept below build/series: what was built once is not built again, so a run
that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from host.exits import Failure
from host.paths import TOP

WHERE = TOP / "build" / "series"
#: What checkpatch.pl warns of and we know: MAINTAINERS is the last patch; it takes
#: __has_include() and the LP64 of x32 for machines.
KNOWN = re.compile(
    r"WARNING: (added, moved or deleted file\(s\)|"
    r"architecture specific defines should be avoided)"
)
IDENTITY = ("-c", "user.name=series", "-c", "user.email=series@example.org")


class Tally:
    """Prints what holds and what does not; scripts/check reads the last line."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def test(self, name: str, test: Callable[[], None]) -> bool:
        try:
            test()
        except Failure as error:
            self.failed += 1
            print(f"{error}\nnot ok - {name}", flush=True)
            return False
        self.passed += 1
        print(f"ok - {name}", flush=True)
        return True


def run(*command: str | Path, cwd: Path = TOP, **env: str) -> str:
    """Its output; a Failure with the end of it if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-40:])
        raise Failure(f"{' '.join(words)}: exit {done.returncode}\n{end}")
    return done.stdout


def shell(command: str, *args: str | Path) -> str:
    """With the functions of common.sh."""
    script = f"set -eu; . scripts/lib/common.sh; {command}"
    return run("bash", "-c", script, "series", *args).strip()


class Version:
    """A version of QEMU: its tree (a git repository), its series, its build."""

    def __init__(self, version: str) -> None:
        self.version = version
        # build-qemu names the build directory after the tree
        self.tree = WHERE / f"series-{version}"
        self.patches = WHERE / f"patches-{version}"
        self.build = TOP / "build" / f"qemu-series-{version}"
        self.built = WHERE / f"built-{version}"

    def git(self, *args: str | Path) -> str:
        return run("git", *IDENTITY, *args, cwd=self.tree).strip()

    def unpack(self) -> None:
        """The pristine tree, as branch 'pristine'."""
        WHERE.mkdir(parents=True, exist_ok=True)
        shell(
            'dir=$(fetch_qemu "$1"); unpack_source "$dir" "$2"', self.version, self.tree
        )
        if not (self.tree / ".git").is_dir():
            self.git("init", "-q", "-b", "pristine")
            self.git("add", "-A", "-f")
            self.git("commit", "-q", "-m", "pristine")

    def apply(self) -> None:
        """The series, onto the pristine tree, as branch 'series'."""
        shutil.rmtree(self.patches, ignore_errors=True)
        self.git("checkout", "-q", "-f", "pristine")
        run("scripts/graft", "--series", self.patches, self.tree)
        self.git("checkout", "-q", "-B", "series")
        shutil.rmtree(self.tree / ".git" / "rebase-apply", ignore_errors=True)
        self.git("am", "-q", "--empty=drop", "--whitespace=error", *self.mails())

    def mails(self) -> list[Path]:
        return sorted(self.patches.glob("[0-9]*.patch"))

    def commits(self) -> list[str]:
        return self.git("rev-list", "--reverse", "pristine..series").split()

    def compare(self) -> None:
        """git's name of a tree is a digest of all its files."""
        grafted = WHERE / f"grafted-{self.version}"
        shutil.rmtree(grafted, ignore_errors=True)
        self.git("worktree", "prune")
        self.git("worktree", "add", "-q", "--detach", grafted, "pristine")
        run("scripts/graft", grafted)
        (grafted / ".graft.json").unlink()
        run("git", "add", "-A", "-f", cwd=grafted)
        tree = run("git", "write-tree", cwd=grafted).strip()
        if tree != self.git("rev-parse", "series^{tree}"):
            raise Failure(self.git("diff", "--stat", "series", tree))

    def checkpatch(self, patch: Path) -> None:
        said = subprocess.run(
            ["perl", "scripts/checkpatch.pl", "-q", str(patch)],
            cwd=self.tree,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        ).stdout
        bad = [
            line
            for line in re.findall("^(?:ERROR|WARNING): .*", said, re.MULTILINE)
            if not KNOWN.match(line)
        ]
        if bad:
            raise Failure(said)

    def compile(self, commit: str, *options: str) -> None:
        """QEMU after this patch; the list of what was built knows trees by name."""
        key = " ".join([self.git("rev-parse", f"{commit}^{{tree}}"), *options])
        if self.built.exists() and key in self.built.read_text().splitlines():
            return
        self.git("checkout", "-q", "-f", commit)
        command = ("scripts/build-qemu", "--as-is", "--source", self.tree)
        run(*command, *options)
        with self.built.open("a") as file:
            file.write(f"{key}\n")

    def qtests(self) -> None:
        # also where all was built before: not necessarily the last patch last
        self.git("checkout", "-q", "-f", "series")
        run("scripts/build-qemu", "--as-is", "--source", self.tree)
        said = run("tests/qtest/run", QEMU_BUILD=str(self.build))
        print("\n".join(said.splitlines()[-1:]))

    def docs(self) -> None:
        """As QEMU's build does it with --enable-docs and --enable-werror."""
        shell("need_apt python3-sphinx python3-sphinx-rtd-theme")
        self.git("checkout", "-q", "-f", "series")
        out = WHERE / f"docs-{self.version}"
        shutil.rmtree(out, ignore_errors=True)
        for builder in ("html", "man"):
            run(
                *("/usr/bin/sphinx-build", "-q", "-W", "--keep-going"),
                *("-Dkerneldoc_werror=1", f"-Dversion={self.version}", "-Drelease="),
                *("-b", builder, "-d", out / f"{builder}.p"),
                *(self.tree / "docs", out / builder),
                CONFDIR="/etc/qemu",
            )

    def check(self, tally: Tally, build: bool) -> None:
        name = f"QEMU {self.version}"
        self.unpack()
        if not tally.test(f"{name}: git am", self.apply):
            return
        tally.test(f"{name}: equals the grafted tree", self.compare)
        mails = self.mails()[1:]
        for patch in mails:
            title = f"{name}: checkpatch {patch.name}"
            tally.test(title, functools.partial(self.checkpatch, patch))
        if not build:
            return
        for patch, commit in zip(mails, self.commits(), strict=True):
            title = f"{name}: builds after {patch.name}"
            tally.test(title, functools.partial(self.compile, commit, "--no-tests"))
        tally.test(f"{name}: our qtests", self.qtests)
        tally.test(f"{name}: docs", self.docs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="series", description="Tries scripts/graft --series."
    )
    parser.add_argument("--qemu", metavar="VERSION", help="only this version")
    parser.add_argument(
        "--no-build", action="store_true", help="only what takes some seconds"
    )
    args = parser.parse_args()
    tally = Tally()
    versions = shell('echo "${QEMU_VERSIONS[*]}"').split()
    for version in [args.qemu] if args.qemu else versions:
        Version(version).check(tally, not args.no_build)
    print(f"{tally.passed} passed, {tally.failed} failed, 0 skipped")
    return 1 if tally.failed else 0
