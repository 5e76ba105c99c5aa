# SPDX-License-Identifier: GPL-2.0-or-later
"""What the end-to-end tests share: QEMU, the guest's image, KSM's knobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from guest import qemu
from host import ksmsys
from host.ksm_guard import guard


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long test_storm lasts; test_soak has guests verify their memory "
        "for half of it (default: 60)",
    )
    parser.addoption(
        "--seed",
        type=int,
        metavar="N",
        help="the sequence of test_storm (default: 1, in a longer soak another one "
        "each time), and of what test_migration draws",
    )
    parser.addoption(
        "--storm-sources",
        default="pagemap,log,checksum,auto",
        metavar="NAMES",
        help="what test_storm uses for dirty-tracking (default: all)",
    )
    parser.addoption(
        "--storm-without",
        default="",
        metavar="NAMES",
        help="actions that test_storm leaves out",
    )
    parser.addoption(
        "--storm-steps",
        type=int,
        metavar="N",
        help="end test_storm after that many steps",
    )
    parser.addoption(
        "--storm-keep",
        action="store_true",
        help="keep test_storm's log whatever comes of it",
    )


@pytest.fixture(scope="session")
def image() -> Path:
    """The Debian guest; QEMU is built if need be."""
    qemu.need_qemu()
    return qemu.guest_image()


@pytest.fixture
def knobs() -> Iterator[ksmsys.KsmKnobs]:
    """KSM's knobs, ksmd stopped; put back afterwards."""
    reason = ksmsys.why_not_controllable()
    if reason:
        pytest.skip(reason)
    with guard(), ksmsys.KsmKnobs() as held:
        held.set(run=0)
        yield held


@pytest.fixture
def root() -> None:
    """For tests that take another user's part, or mount."""
    if os.getuid() != 0:
        pytest.skip("only root can start programs as another user")


@pytest.fixture(scope="session")
def scope_vm(image: Path) -> str:
    """The scope vm, where the kernel has what it takes."""
    reason = qemu.probe_scope(image, "vm")
    if reason:
        pytest.skip(reason.replace("\n", " "))
    return "vm"
