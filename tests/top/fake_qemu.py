# SPDX-License-Identifier: GPL-2.0-or-later
"""A process that looks like a QEMU, and serves QMP at its -qmp socket.

The last word says how: good, plain, hang; one without a socket: none.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from fakes import BACKEND, good, server, stats

from top import commandline

HOW = {
    "good": good({"query-name": {}, "query-ksm-stats": stats(BACKEND)}),
    "plain": good({"query-name": {}}),
    "hang": lambda connection: time.sleep(100),
}

if __name__ == "__main__":
    with ExitStack() as stack:
        if sys.argv[-1] in HOW:
            for path in commandline.parse(sys.argv).sockets:
                stack.enter_context(server(path, HOW[sys.argv[-1]], clients=1000))
        print("ready", flush=True)
        time.sleep(600)
