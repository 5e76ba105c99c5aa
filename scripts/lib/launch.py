# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs a program of this directory: launch.py tools.check ARGUMENT...

Python puts the directory of this file first in its path: so the packages host,
top, guest, bench and tools find each other.  Each imports itself and those before
it (tools/floors.py).  For all programs, a Failure becomes message and exit
code here.
"""

import importlib
import sys
import textwrap

from host.exits import Failure


def main() -> int:
    del sys.argv[0]
    module = importlib.import_module(sys.argv[0])
    name = sys.argv[0] = sys.argv[0].rpartition(".")[2].replace("_", "-")
    try:
        return int(module.main())
    except Failure as error:
        # lines that are set in belong to the one before
        text = textwrap.indent(str(error), f"{name}: ", lambda s: not s[0].isspace())
        print(text, file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
