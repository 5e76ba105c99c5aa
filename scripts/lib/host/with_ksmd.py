# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs a program while ksmd runs fast: launch.py host.with_ksmd PROGRAM...

With KSM_TEST_KSMD set, so that tests know.  Where ksmd cannot be started the
program runs all the same, without it, and its tests say what they lack.
"""

from __future__ import annotations

import os
import subprocess
import sys

from host import ksm_guard, ksmsys


def main() -> int:
    command = sys.argv[1:]
    why = ksmsys.why_not_controllable()
    if why:
        print(f"# without ksmd: {why}", flush=True)
        return subprocess.run(command).returncode
    with ksm_guard.guard(), ksmsys.KsmKnobs() as knobs:
        knobs.set(
            pages_to_scan=20000,
            sleep_millisecs=1,
            smart_scan=0,
            use_zero_pages=0,
            run=1,
        )
        return subprocess.run(
            command, env=os.environ | {"KSM_TEST_KSMD": "1"}
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
