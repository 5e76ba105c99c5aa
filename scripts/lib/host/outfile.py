# SPDX-License-Identifier: GPL-2.0-or-later
"""Files that results go to: whether they can be written is asked before the work."""

from __future__ import annotations

import os
from pathlib import Path

from host.exits import Failure, WrongUse


def check_file(path: Path) -> None:
    """WrongUse if it cannot be written; leaves it as it was."""
    existed = os.path.lexists(path)
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise WrongUse(f"{path} cannot be written: {error.strerror}") from error


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}") from error
