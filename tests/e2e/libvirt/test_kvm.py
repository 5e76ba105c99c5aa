# SPDX-License-Identifier: GPL-2.0-or-later
"""<domain type='kvm'>, by both ways to the object.

The guest is a boot sector: there are hosts whose KVM runs a guest, but Linux
only in an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lv_host
import pytest
from lv_guest import Guest
from lv_host import Connection


def why_not() -> str:
    """Why no guest of ours can run under KVM here; empty if one can."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm does not open: {error.strerror}"
    return ""


pytestmark = pytest.mark.skipif(why_not() != "", reason=why_not())


@pytest.fixture(scope="module")
def patched() -> Iterator[Connection]:
    lv_host.ensure_packages()
    with lv_host.daemons(lv_host.patched(), 1) as (daemon,):
        yield daemon


@pytest.fixture(scope="module")
def unpatched() -> Iterator[Connection]:
    lv_host.ensure_packages()
    with lv_host.embedded(lv_host.debian()) as connection:
        yield connection


def start(host: Connection, place: Path, guest: Guest) -> None:
    xml = place / "a.xml"
    xml.write_text(guest.xml())
    host.virsh("create", xml)
    guest.wait_turns(2)
    assert host.qmp(guest.name, "query-kvm")["enabled"] is True


def guest_in(place: Path) -> Guest:
    """What guest-boot.S is."""
    return Guest("k", place / "serial", kvm=True, memory_mib=64, common_mib=8)


def test_scope_host(patched: Connection, tmp_path: Path) -> None:
    guest = guest_in(tmp_path)
    guest.backing = "<source type='ksm'/>"
    try:
        start(patched, tmp_path, guest)
        lv_host.check_merging(patched, [guest])
        stats = patched.domstats("k", "--memory")
        assert stats["memory.ksm.backend.0.id"] == "pc.ram"
        assert stats["memory.ksm.size"] == str(64 << 20)
        assert int(stats["memory.ksm.resident"]) >= 8 << 20
    finally:
        patched.destroy_all()


@pytest.mark.parametrize("way", ["patched", "unpatched"])
def test_scope_vm(way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    host = request.getfixturevalue(way)
    guest = guest_in(tmp_path)
    if way == "patched":
        guest.backing = "<source type='ksm'/><ksm scope='vm' max-cpu='100'/>"
    else:
        backend = "memory-backend-ksm,id=ksm0,size=64M,scope=vm,max-cpu=100"
        guest.arguments = ("-object", backend, "-machine", "memory-backend=ksm0")

    def count(name: str) -> int:
        (backend,) = host.qmp("k", "query-ksm-stats")["backends"]
        return int(backend[name])

    try:
        start(host, tmp_path, guest)
        # all but the pages that the guest writes in every turn
        pages = guest.common_mib << 8
        lv_host.wait_for(
            "merging of 90 % of the pages",
            90,
            lambda: count("pages-merged") > pages * 0.9,
        )
        # and some of those, too, when the guest pauses long enough
        guest.wait_turns(3)
        if way == "patched":
            stats = host.domstats("k", "--memory")
            assert stats["memory.ksm.backend.0.scope"] == "vm"
            assert int(stats["memory.ksm.pages_merged"]) > pages * 0.9
    finally:
        host.destroy_all()
