# SPDX-License-Identifier: GPL-2.0-or-later
"""The running domains of a libvirt, and their answers through its monitor.

libvirt has each domain's only QMP connection, so it has to ask.  A call may
take as long as it likes: all of this is for a Crew.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

from host.exits import Lacking
from top.qmp import NoAnswer, clean, failed

PACKAGE = "python3-libvirt"


@dataclass
class Domain:
    name: str
    uuid: str
    handle: Any
    library: Any

    def ask(self, command: str) -> Any:
        """What it returns; None: QEMU does not know it."""
        try:
            text = self.library.qemuMonitorCommand(
                self.handle, json.dumps({"execute": command}), 0
            )
        except Exception as error:  # libvirt.libvirtError, which mypy cannot see
            raise NoAnswer(*self._why(error)) from None
        answer = clean(json.loads(text))
        if "error" in answer:
            return failed(answer["error"], command)
        return answer["return"]

    def _why(self, error: Exception) -> tuple[str, str]:
        try:
            if not self.handle.isActive():
                return "gone", ""
        except Exception:  # the domain, or libvirt, is not there any more
            return "gone", ""
        text = str(error)
        return ("silent" if "lock" in text else "refused"), f"libvirt: {text}"


class Libvirt:
    """One connection, made anew when it is lost."""

    def __init__(self, uri: str | None) -> None:
        self.uri = uri
        self._connection: Any = None
        try:
            # not by `import`: for mypy, the directory libvirt/ of this
            # repository would be the module of that name
            self._libvirt: Any = importlib.import_module("libvirt")
            self._qemu: Any = importlib.import_module("libvirt_qemu")
        except ImportError:
            raise Lacking(
                f"asking libvirt needs a package: apt-get install {PACKAGE}"
            ) from None
        # libvirt's binding would print each error itself
        self._libvirt.registerErrorHandler(lambda context, error: None, None)

    def domains(self) -> list[Domain] | str:
        """Those that run; a text: why it cannot be known."""
        try:
            if self._connection is None or not self._connection.isAlive():
                self._connection = self._libvirt.open(self.uri)
            active = self._libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
            return [
                Domain(each.name(), each.UUIDString(), each, self._qemu)
                for each in self._connection.listAllDomains(active)
            ]
        except self._libvirt.libvirtError as error:
            self._connection = None
            return str(error)
