# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel's KSM, for all programs of the host, and the host's memory."""

from __future__ import annotations

import re
from pathlib import Path

from host import ksmsys
from top.model import PAGE, Kernel

MEMINFO = Path("/proc/meminfo")


class KernelReader:
    def __init__(self) -> None:
        self._ksmd: int | None = None

    def read(self) -> Kernel:
        if self._ksmd is None:
            self._ksmd = ksmsys.ksmd_pid()
        shared, sharing = ksmsys.read("pages_shared"), ksmsys.read("pages_sharing")
        run, zero = ksmsys.read("run"), ksmsys.read("ksm_zero_pages")
        kernel = Kernel(
            running=None if run is None else run == 1,
            shared=None if shared is None else shared * PAGE,
            saved=None if sharing is None else (sharing + (zero or 0)) * PAGE,
            zero=None if zero is None else zero * PAGE,
            profit=ksmsys.read("general_profit"),
            pages_to_scan=ksmsys.read("pages_to_scan"),
            full_scans=ksmsys.read("full_scans"),
        )
        if self._ksmd is not None:
            kernel.cpu_seconds = ksmsys.ksmd_cpu_s(self._ksmd)
        self._memory(kernel)
        return kernel

    @staticmethod
    def _memory(kernel: Kernel) -> None:
        try:
            found = dict(re.findall(r"^(\w+): +(\d+) kB$", MEMINFO.read_text(), re.M))
        except OSError:
            return
        if "MemTotal" in found:
            kernel.memory = int(found["MemTotal"]) << 10
        if "MemAvailable" in found:
            kernel.available = int(found["MemAvailable"]) << 10
