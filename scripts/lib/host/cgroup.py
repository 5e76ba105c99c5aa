# SPDX-License-Identifier: GPL-2.0-or-later
"""Memory control groups, to put pressure on the programs in them.

Version 1 or 2, whichever has the memory controller.  Leaves to others: what
the pressure is to show.
"""

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
    """By controller (version 2: ""), where in its hierarchy this process is."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path.lstrip("/")
    return found


def _parents() -> Iterator[Path]:
    """Groups that may have a child with a limit: first our own, last the root,
    which is all that a container may see."""
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
                    (group / "cgroup.subtree_control").write_text("+memory")
                except OSError:
                    continue
                yield group


class Group:
    """A memory control group of its own; made by make()."""

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
