# SPDX-License-Identifier: GPL-2.0-or-later
"""Memory control groups, version 1 or 2: pressure on programs, and what they use."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from host.exits import Failure

MIB = 1 << 20


class NoCgroup(Failure):
    """No memory control group can be made here."""


def _own_paths() -> dict[str, str]:
    """This process's group by controller (version 2: "")."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path.lstrip("/")
    return found


def _parents() -> Iterator[Path]:
    """Groups that may have a child with a limit, our own first."""
    own = _own_paths()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        root = Path(mount)
        if kind == "cgroup" and "memory" in options.split(","):
            yield root / own.get("memory", "")
            yield root
        elif kind == "cgroup2":
            base = root / own.get("", "")
            # no group with processes can have such children, except the root
            for group in (base, base.parent, root):
                try:
                    # r+: "w" would make the file beside a mount on a tmpfs
                    with (group / "cgroup.subtree_control").open("r+") as control:
                        control.write("+memory")
                except OSError:
                    continue
                yield group


class Group:
    """A memory control group of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.v2 = (path / "memory.max").exists()

    @staticmethod
    def make() -> Group:
        """Raises NoCgroup where this process may not make one."""
        why = "no memory controller of cgroups can be used here"
        for parent in _parents():
            path = parent / f"qemu-ksm-{uuid.uuid4()}"
            try:
                path.mkdir()
            except OSError as error:
                why = f"no memory cgroup can be made: {error}"
                continue
            group = Group(path)
            if group.v2 or (path / "memory.limit_in_bytes").exists():
                return group
            path.rmdir()
            why = f"{parent} does not hand the memory controller to its children"
        raise NoCgroup(why)

    @staticmethod
    def make_or_none() -> Group | None:
        try:
            return Group.make()
        except NoCgroup:
            return None

    def prefix(self) -> list[str]:
        """A command in front of one that is to run in the group."""
        script = f'echo $$ >"{self.path}/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, "sh"]

    def join(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def usage(self) -> int:
        name = "memory.current" if self.v2 else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def limit(self, size: int) -> None:
        """The kernel reclaims until the group is below; -1: no limit."""
        name = "memory.max" if self.v2 else "memory.limit_in_bytes"
        value = "max" if self.v2 and size < 0 else str(size)
        (self.path / name).write_text(value)

    def forbid_swap(self) -> None:
        """What is in the group stays in memory; there may be no swap at all."""
        name, value = ("memory.swap.max", "0")
        if not self.v2:
            name, value = ("memory.swappiness", "0")
        with suppress(OSError):
            (self.path / name).write_text(value)

    def _number(self, file: str, name: str) -> int:
        """A "name 12" line of a file, 0 where it is not."""
        for line in (self.path / file).read_text().splitlines():
            words = line.split()
            if words[0] == name:
                return int(words[1])
        return 0

    def swapped(self) -> int:
        """Bytes of the group that are in swap."""
        if not self.v2:
            return self._number("memory.stat", "swap")
        file = self.path / "memory.swap.current"
        return int(file.read_text()) if file.exists() else 0

    def limit_hits(self) -> int:
        """How often the limit was in the way, or the OOM killer came."""
        if not self.v2:
            fails = int((self.path / "memory.failcnt").read_text())
            return fails + self._number("memory.oom_control", "oom_kill")
        return sum(self._number("memory.events", n) for n in ("max", "oom", "oom_kill"))

    def reclaim(self, size: int) -> None:
        """Has the kernel take back as much as it can, up to `size` bytes."""
        # an error: there was less than that to take
        with suppress(OSError):
            if self.v2:
                (self.path / "memory.reclaim").write_text(str(size))
            elif size >= self.usage():
                (self.path / "memory.force_empty").write_text("0")
            else:
                self._squeeze(size)

    def _squeeze(self, size: int) -> None:
        """As version 1 can: a lower limit for a moment."""
        try:
            self.limit(max(self.usage() - size, MIB))
        finally:
            self.limit(-1)

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
