# SPDX-License-Identifier: GPL-2.0-or-later
"""Why a program cannot go on, and its exit code (those of common.sh).

launch.py prints the text and exits with the code.
"""


class Failure(RuntimeError):
    """It was tried, and failed."""

    code = 1


class WrongUse(Failure):
    """The user asked for something that does not exist."""

    code = 2


class Lacking(Failure):
    """The machine lacks a package, a right or a kernel feature."""

    code = 3
