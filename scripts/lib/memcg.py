# SPDX-License-Identifier: GPL-2.0-or-later
"""Memory control groups, to put pressure on a program in them.

Version 1 or 2, whichever has the memory controller.  Leaves to others: what
the pressure is to show.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

MIB = 1 << 20


class Group:
    """A memory control group of its own, version 1 or 2."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.v2 = (path / "memory.max").exists()

    @staticmethod
    def make() -> Group | None:
        """None where this process may not make one."""
        text = Path("/proc/self/mountinfo").read_text()
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2" or (
                kind == "cgroup" and "memory" in options.split(",")
            ):
                path = Path(left.split(" ")[4]) / f"qemu-ksm-{uuid.uuid4()}"
                try:
                    path.mkdir()
                except OSError:
                    continue
                group = Group(path)
                if group.v2 or (path / "memory.limit_in_bytes").exists():
                    return group
                path.rmdir()
        return None

    def prefix(self) -> list[str]:
        """A command in front of one that is to run in the group."""
        script = f'echo $$ >"{self.path}/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, "sh"]

    def usage(self) -> int:
        name = "memory.current" if self.v2 else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def limit(self, size: int) -> None:
        """The kernel reclaims until the group is below; -1: no limit."""
        name = "memory.max" if self.v2 else "memory.limit_in_bytes"
        value = "max" if self.v2 and size < 0 else str(size)
        (self.path / name).write_text(value)

    def reclaim(self, size: int) -> None:
        """Makes the kernel take back as much, if it can."""
        try:
            if (self.path / "memory.reclaim").exists():
                (self.path / "memory.reclaim").write_text(str(size))
            else:
                self.limit(max(self.usage() - size, MIB))
        except OSError:
            pass  # it took what there was
        finally:
            self.limit(-1)

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
