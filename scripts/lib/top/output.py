# SPDX-License-Identifier: GPL-2.0-or-later
"""A file that readers see whole: the old one, or the new one."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from host.exits import Failure


def write(path: str, text: str) -> None:
    """To stdout if the path is -."""
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(path)
    try:
        # in the same directory, for rename; node_exporter reads only *.prom
        number, made = tempfile.mkstemp(prefix=".ksm-top-", dir=target.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            os.replace(made, target)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
