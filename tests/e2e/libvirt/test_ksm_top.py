# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/ksm-top: domains, whose only monitor libvirt has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lv_host
import pytest
from lv_guest import TOP, Guest
from lv_host import Daemon

PAGE = 4096
#: the figures that are compared with what ksm-top says
COMPARED = ("resident", "pages-sharing", "zero-pages", "profit", "stall")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    lv_host.ensure_packages()
    with lv_host.daemons(lv_host.debian(), 1) as (daemon,):
        yield daemon


@pytest.fixture
def host(daemon: Daemon) -> Iterator[Daemon]:
    yield daemon
    daemon.undefine_all()


def run(*words: str, limit: str = "20") -> dict[str, Any]:
    """Debian's Python, as when typed: libvirt's binding is Debian's."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [TOP / "scripts" / "ksm-top", "--json", "--limit", limit, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=lv_host.VIRSH_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def the(name: str, snapshot: dict[str, Any]) -> dict[str, Any]:
    (guest,) = [each for each in snapshot["guests"] if each["name"] == name]
    return guest  # type: ignore[no-any-return]


def query(host: Daemon, guest: Guest) -> dict[str, Any]:
    (stats,) = host.qmp(guest.name, "query-ksm-stats")["backends"]
    found: dict[str, Any] = stats
    return found


def quiet(host: Daemon, guest: Guest) -> tuple[dict[str, Any], dict[str, Any]]:
    """A snapshot of all, and what `guest` said just before and just after it:
    what it wrote before it was stopped comes into its books a pass later."""
    for _ in range(20):
        before = query(host, guest)
        snapshot = run("--connect", host.uri)
        after = query(host, guest)
        if all(before[name] == after[name] for name in COMPARED):
            return snapshot, after
    pytest.fail("the figures of a stopped guest change for ever")


def define(host: Daemon, place: Path, name: str) -> Guest:
    guest = Guest(name, place / f"serial-{name}")
    xml = place / f"{name}.xml"
    xml.write_text(guest.xml())
    host.virsh("define", xml)
    return guest


def test_domains(host: Daemon, tmp_path: Path) -> None:
    """One with our object, one without; once each, though /proc has them too."""
    ours, plain = (define(host, tmp_path, name) for name in ("topks", "topplain"))
    subprocess.run(
        [TOP / "scripts/virt-ksm", "-c", host.uri, "enable", ours.name]
        + ["--scope", "vm"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for guest in (ours, plain):
        host.virsh("start", guest.name)
        guest.wait_turns(1)
    host.virsh("suspend", ours.name)
    path = {"path": "/objects/ksm0", "property": "run", "value": False}
    host.qmp(ours.name, "qom-set", **path)
    snapshot, stats = quiet(host, ours)
    found = the(ours.name, snapshot)
    assert (found["source"], found["state"]) == ("libvirt", stats["state"])
    assert found["resident"] == stats["resident"]
    saved = (stats["pages-sharing"] + stats["zero-pages"]) * PAGE
    assert found["saved"]["own"] == saved > 0
    assert found["profit"] == stats["profit"]
    assert found["stall"]["count"] == stats["stall"]["count"]
    assert Path(f"/proc/{found['pid']}/exe").exists()
    assert the(plain.name, snapshot)["state"] == "plain"
    # without libvirt: seen, and it is said why no more is known
    alone = the(ours.name, run())
    assert "try --libvirt" in alone["reasons"][0]["text"]
    assert alone["state"] in ("busy", "unseen") and alone["pid"] == found["pid"]
    # QEMU stops: nobody waits the half minute that libvirt would
    os.kill(found["pid"], signal.SIGSTOP)
    try:
        begin = time.monotonic()
        snapshot = run("--connect", host.uri, limit="2")
        assert time.monotonic() - begin < 10
        assert the(ours.name, snapshot)["state"] == "stopped"
        assert the(plain.name, snapshot)["state"] == "plain"
    finally:
        os.kill(found["pid"], signal.SIGCONT)


def test_no_libvirt_there(tmp_path: Path) -> None:
    """It says so, and shows what there is."""
    uri = f"qemu+unix:///system?socket={tmp_path}/none"
    snapshot = run("--no-scan", "--connect", uri)
    assert snapshot["guests"] == [] and snapshot["notes"]
