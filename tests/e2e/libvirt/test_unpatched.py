# SPDX-License-Identifier: GPL-2.0-or-later
"""Debian's own libvirt, unmodified: memory-backend-ksm by <qemu:commandline>.

The recipe is the one of docs/system/ksm-libvirt.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lv_host
import pytest
from host import ksmsys
from lv_guest import Guest
from lv_host import Connection, Embedded


@pytest.fixture(scope="module")
def host() -> Iterator[Embedded]:
    lv_host.ensure_packages()
    with lv_host.embedded(lv_host.debian()) as connection:
        yield connection


def recipe(size_mib: int, properties: str = "") -> tuple[str, ...]:
    """The words for <qemu:commandline>."""
    backend = f"memory-backend-ksm,id=ksm0,size={size_mib}M{properties}"
    return ("-object", backend, "-machine", "memory-backend=ksm0")


def start(host: Connection, guest: Guest) -> None:
    xml = guest.serial.with_suffix(".xml")
    xml.write_text(guest.xml())
    host.virsh("create", xml)


@pytest.fixture
def place(host: Embedded, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    host.destroy_all()


def test_the_recipe_selects_the_backend(host: Embedded, place: Path) -> None:
    guest = Guest("ksm", place / "serial", arguments=recipe(128))
    start(host, guest)
    assert (
        host.qmp("ksm", "qom-get", path="/machine", property="memory-backend")
        == "/objects/ksm0"
    )
    stats = host.qmp("ksm", "query-ksm-stats")
    (backend,) = stats["backends"]
    assert backend["id"] == "ksm0"
    assert backend["scope"] == "host"
    assert backend["size"] == 128 << 20
    assert backend["mergeable"] is True
    guest.wait_turns(1)
    # the guest's pages are there, and counted
    (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
    assert backend["resident"] > (guest.common_mib + guest.private_mib) << 20
    # the unused default RAM can be given back, as the manual says
    host.qmp("ksm", "object-del", id="pc.ram")
    guest.wait_turns(1)


def test_the_monitor_shows_it(host: Embedded, place: Path) -> None:
    start(host, Guest("ksm", place / "serial", arguments=recipe(128)))
    out = host.virsh("qemu-monitor-command", "ksm", "--hmp", "info ksm")
    assert "ksm0" in out
    assert "host" in out


@pytest.mark.skipif(
    ksmsys.why_not_controllable() is not None,
    reason=str(ksmsys.why_not_controllable()),
)
def test_two_guests_merge(host: Embedded, place: Path) -> None:
    guests = [
        Guest(f"ksm{i}", place / f"serial{i}", seed=i, arguments=recipe(128))
        for i in (1, 2)
    ]
    for guest in guests:
        start(host, guest)
    for guest in guests:
        guest.wait_turns(1)
    lv_host.check_merging(host, guests)


def test_errors_reach_the_user(host: Embedded, place: Path) -> None:
    guest = Guest("ksm", place / "serial", arguments=recipe(127))
    xml = place / "wrong-size.xml"
    xml.write_text(guest.xml())
    text = host.refused("create", xml)
    assert "does not match the size of the memory backend" in text

    guest.arguments = recipe(128, ",share=on")
    xml.write_text(guest.xml())
    text = host.refused("create", xml)
    assert "only private memory can be merged" in text

    guest.arguments = recipe(128)
    guest.cpu = (
        "<cpu><numa><cell id='0' cpus='0' memory='128' unit='MiB'/></numa></cpu>"
    )
    xml.write_text(guest.xml())
    assert "mutually exclusive" in host.refused("create", xml)


def test_save_and_restore(host: Embedded, place: Path) -> None:
    guest = Guest("ksm", place / "serial", arguments=recipe(128))
    start(host, guest)
    guest.wait_turns(1)
    host.virsh("save", "ksm", place / "state")
    host.virsh("restore", place / "state")
    guest.wait_turns(2)
    (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
    assert backend["resident"] > guest.common_mib << 20
