# SPDX-License-Identifier: GPL-2.0-or-later
"""A fresh minimal root file system, and what runs in it.

It lives as long as one process that has its namespaces (scripts/lib/deb/in-root);
with that end all others, and the mounts.  Leaves to others: what is installed, and
what must hold (test_deb.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from host.paths import TOP

LIB = TOP / "scripts" / "lib" / "deb"
#: What is looked at for what is left.  Not /proc, /sys, /dev, /tmp: nobody's, or
#: the test's.
PLACES = ("etc", "usr", "var", "run", "opt", "srv", "home", "root", "boot", "media")
#: What dpkg, apt, ldconfig, man-db and python keep for themselves; previous
#: versions of the files of users and groups.
THEIRS = re.compile(
    r"/var/(lib|cache|log)/(apt|dpkg|debconf|man|ldconfig|pam)(/|$)"
    r"|/var/log/(dpkg|alternatives|apt|bootstrap)[^/]*$|/etc/ld\.so\.cache$"
    r"|/etc/(group|gshadow|passwd|shadow|subuid|subgid)-$|/etc/resolv\.conf$"
    r"|/etc/\.pwd\.lock$|/run/(lock|mount|systemd)(/|$)"
    # of the libvirtd that the test runs
    r"|/(etc|run|var/(lib|cache|log))/libvirt(/|$)|/run/libvirtd\.pid$"
    r"|/run/utmp$|/etc/machine-id$|/root/\.(cache|config)(/|$)"
)


class Root:
    """`with Root(release, directory, binds) as root: root.run("dpkg", "-l")`"""

    def __init__(
        self, release: str, directory: Path, binds: Sequence[tuple[Path, str]]
    ) -> None:
        self.release = release
        self.path = directory
        self._binds = binds
        self._keeper: subprocess.Popen[str] | None = None
        self._inside = 0

    def __enter__(self) -> Root:
        archive = subprocess.run(
            [LIB / "minbase", self.release],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        subprocess.run(["tar", "-C", self.path, "-xf", archive], check=True)
        words: list[str | Path] = [LIB / "in-root", self.path]
        for place, name in self._binds:
            words += ["--bind", place, name]
        self._keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *words]
            # it waits for daemons, too, which have no other parent
            + ["sh", "-c", "echo here; sleep infinity & wait"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "here\n":
            raise AssertionError(f"no root file system of {self.release}")
        children = f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children"
        self._inside = int(Path(children).read_text().split()[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
        # its mounts were in a namespace that is gone: these are plain files
        for _ in range(20):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                return
            time.sleep(0.5)

    @property
    def prefix(self) -> list[str]:
        """A command in front of another has that run inside."""
        enter = ["nsenter", "--target", str(self._inside), "--mount", "--pid"]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [
            *enter,
            *("--root", "env", "-C", "/", "-i", f"PATH={path}", "HOME=/root"),
            *("LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"),
        ]

    def attempt(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=1500,
        )

    def run(self, *words: str) -> str:
        """What it prints; it must succeed."""
        done = self.attempt(*words)
        assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-6000:]}"
        return done.stdout

    def apt(self, *words: str) -> str:
        # nobody needs this root file system after a crash
        fast = ["-o", "Dpkg::Options::=--force-unsafe-io"]
        return self.run("apt-get", "-q", "-y", "--no-install-recommends", *fast, *words)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.prefix, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def files(self) -> dict[str, str]:
        """Path -> what it is, for all that is not other packages' own."""
        found = {}
        for place in PLACES:
            for directory, names, files in os.walk(self.path / place):
                for name in [*names, *files]:
                    path = Path(directory, name)
                    inside = f"/{path.relative_to(self.path)}"
                    if not THEIRS.search(inside):
                        found[inside] = describe(path, inside)
        return found


def describe(path: Path, inside: str) -> str:
    """Of settings the content, too."""
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    if path.is_file() and inside.startswith("/etc/"):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return "directory" if path.is_dir() else "file"
