# SPDX-License-Identifier: GPL-2.0-or-later
"""A few questions over a guest's QMP socket, answered in time or not at all.

QMP serves one client at a time: the connection of a second one waits, without a
greeting.  So a connection is held only for the questions, and whoever has the
socket is not disturbed.  Leaves to others: whose socket it is (procfs.py), what
the answers mean (figures.py).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: More than any answer has.
LONGEST = 8 << 20


class NoAnswer(Exception):
    """The state (model.UNANSWERED) that the guest is in for us."""

    def __init__(self, state: str, text: str = "") -> None:
        super().__init__(text)
        self.state = state
        self.text = text


class Session:
    """One connection, with a moment by which all has to be done."""

    def __init__(self, path: str, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(path)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _connect(self, path: str) -> None:
        self._limit()
        try:
            self._socket.connect(path)
        except BlockingIOError:  # clients that wait fill its queue
            raise NoAnswer("busy") from None
        except TimeoutError:
            raise NoAnswer("silent") from None
        except (FileNotFoundError, ConnectionRefusedError):
            if Path(path).exists() and not Path(path).is_socket():
                raise NoAnswer("refused", f"{path} is no socket") from None
            raise NoAnswer("gone", f"nobody listens at {path}") from None
        except OSError as error:
            raise NoAnswer("refused", f"{path}: {error.strerror or error}") from None

    def _limit(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise NoAnswer("silent")
        self._socket.settimeout(left)

    @property
    def pid(self) -> int:
        """Who listens; for a socket that QEMU was given: who gave it."""
        room = struct.calcsize("3i")
        peer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, room)
        return int(struct.unpack("3i", peer)[0])

    def _receive(self) -> None:
        if len(self._buffer) > LONGEST:
            raise NoAnswer("garbled", f"an answer of more than {LONGEST >> 20} MiB")
        self._limit()
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            raise NoAnswer("silent") from None
        except OSError as error:
            raise NoAnswer("gone", error.strerror or "") from None
        if not data:
            raise NoAnswer("gone")
        self._buffer += data

    def message(self) -> dict[str, Any]:
        """The next one.  It may have many lines (pretty=on)."""
        while True:
            text = self._buffer.decode(errors="replace").lstrip()
            if text and text[0] != "{":
                raise NoAnswer("garbled")
            if "}" in text:
                try:
                    value, end = json.JSONDecoder().raw_decode(text)
                    value = clean(value)
                except RecursionError:
                    raise NoAnswer("garbled") from None
                except json.JSONDecodeError as error:
                    if not _may_go_on(error, text):
                        raise NoAnswer("garbled") from None
                else:
                    self._buffer = text[end:].encode()
                    return dict(value)
            self._receive()

    def command(self, name: str) -> Any:
        """What it returns; None: QEMU does not know it."""
        self._limit()
        try:
            self._socket.sendall(json.dumps({"execute": name}).encode() + b"\r\n")
        except TimeoutError:
            raise NoAnswer("silent") from None
        except OSError as error:
            raise NoAnswer("gone", error.strerror or "") from None
        while True:
            message = self.message()
            if "return" in message:
                return message["return"]
            if "error" in message:
                return failed(message["error"], name)
            # else an event


def clean(value: Any) -> Any:
    """Without what no text can hold: JSON can have half a character (\\ud800)."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return json.loads(text)


def _may_go_on(error: json.JSONDecodeError, text: str) -> bool:
    """Is it the end of the text that is wrong?"""
    return error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - 6


def failed(error: Any, command: str) -> None:
    """Returns if the command is unknown to QEMU."""
    found = error if isinstance(error, dict) else {}
    if found.get("class") != "CommandNotFound":
        raise NoAnswer("garbled", f"{command}: {found.get('desc', 'failed')}")


def ask(
    path: str, commands: Sequence[str], seconds: float, pid: int | None = None
) -> tuple[list[Any], int]:
    """What the commands return, and the process that listens: @pid, if given."""
    with Session(path, seconds) as session:
        if pid not in (None, session.pid):
            raise NoAnswer("refused", f"another process listens at {path}")
        if "QMP" not in session.message():
            raise NoAnswer("garbled")
        session.command("qmp_capabilities")
        return [session.command(name) for name in commands], session.pid
