# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/virt-ksm: all three ways, there and back."""

from __future__ import annotations

import grp
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import lv_host
import pytest
from host import ksmsys
from host.poold import Poold
from lv_guest import QEMU, TOP, Guest
from lv_host import Daemon

NUMA = "<cpu><numa><cell id='0' cpus='0' memory='128' unit='MiB'/></numa></cpu>"
SLOTS = "<maxMemory slots='4' unit='MiB'>1024</maxMemory>"
DIMM = """<memory model='dimm'>
  <target><size unit='MiB'>128</size><node>0</node></target></memory>"""


@pytest.fixture(scope="module")
def unpatched() -> Iterator[Daemon]:
    lv_host.ensure_packages()
    with lv_host.daemons(lv_host.debian(), 1) as (daemon,):
        yield daemon


@pytest.fixture(scope="module")
def patched() -> Iterator[Daemon]:
    lv_host.ensure_packages()
    with lv_host.daemons(lv_host.patched(), 1) as (daemon,):
        yield daemon


@pytest.fixture
def host(unpatched: Daemon) -> Iterator[Daemon]:
    yield unpatched
    unpatched.undefine_all()


def virt_ksm(host: Daemon, *words: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [TOP / "scripts" / "virt-ksm", "--connect", host.uri, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=lv_host.VIRSH_SECONDS,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def define(host: Daemon, place: Path, guest: Guest) -> str:
    xml = place / "define.xml"
    xml.write_text(guest.xml())
    host.virsh("define", xml)
    return host.virsh("dumpxml", "--inactive", guest.name)


def backends(host: Daemon, guest: Guest) -> set[str]:
    host.virsh("start", guest.name)
    guest.wait_turns(1)
    stats = host.qmp(guest.name, "query-ksm-stats")
    return {backend["id"] for backend in stats["backends"]}


def test_commandline_there_and_back(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("d", tmp_path / "serial")
    before = define(host, tmp_path, guest)
    assert "configured: no" in virt_ksm(host, "status", "d")
    out = virt_ksm(host, "enable", "d", "--scope", "vm", "--max-cpu", "20")
    assert "+    <qemu:arg value=" in out
    assert f"size={128 << 20},scope=vm,max-cpu=20" in out
    assert backends(host, guest) == {"ksm0"}
    out = virt_ksm(host, "status", "d")
    assert "configured: yes (commandline)" in out
    assert "ksm0: scope vm" in out and "128 MiB" in out
    assert "next start" in virt_ksm(host, "disable", "d")
    host.virsh("destroy", "d")
    assert host.virsh("dumpxml", "--inactive", "d") == before
    assert "has changed nothing" in virt_ksm(host, "disable", "d")


def test_arguments_of_the_user_stay(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("d", tmp_path / "serial", arguments=("-machine", "hpet=off"))
    before = define(host, tmp_path, guest)
    virt_ksm(host, "enable", "d")
    assert "hpet=off" in host.virsh("dumpxml", "--inactive", "d")
    virt_ksm(host, "disable", "d")
    assert host.virsh("dumpxml", "--inactive", "d") == before


def test_dry_run_changes_nothing(host: Daemon, tmp_path: Path) -> None:
    before = define(host, tmp_path, Guest("d", tmp_path / "serial"))
    for method in ("commandline", "wrapper"):
        words = ("--method", method, "--wrapper-dir", tmp_path / "wrapper")
        out = virt_ksm(host, "enable", "d", "--dry-run", *words)
        assert "nothing was changed" in out
        assert not (tmp_path / "wrapper").exists()
    assert host.virsh("dumpxml", "--inactive", "d") == before


def test_says_that_nobody_merges(
    host: Daemon, tmp_path: Path, knobs: ksmsys.KsmKnobs
) -> None:
    """Unless somebody else merges."""
    define(host, tmp_path, Guest("d", tmp_path / "serial"))
    warning = "warning: nobody merges for scope host"
    assert warning in virt_ksm(host, "enable", "d", "--dry-run")
    assert warning not in virt_ksm(host, "enable", "d", "--dry-run", "--scope", "vm")
    tuned = ("enable", "d", "--max-cpu", "20")
    out = virt_ksm(host, *tuned, code=1)
    assert "'max-cpu' is not available with scope=host" in out
    knobs.set(run=1)
    assert warning not in virt_ksm(host, "enable", "d", "--dry-run")
    knobs.set(run=0)
    with lv_host.pools() as pools, Poold(socket=pools / "host.sock"):
        out = virt_ksm(host, *tuned)
        assert warning not in out
        assert "its user must be in the socket's group, root" in out
        socket = pools / "host.sock"
        os.chown(socket, 0, grp.getgrnam("kvm").gr_gid)
        assert "socket's group" not in virt_ksm(host, *tuned)


def test_group(host: Daemon, tmp_path: Path) -> None:
    """Without its daemon, and with it."""
    guest = Guest("d", tmp_path / "serial")
    define(host, tmp_path, guest)
    group = f"virt-ksm-{uuid.uuid4().hex[:8]}"
    words = ("enable", "d", "--scope", "group", "--group", group)
    out = virt_ksm(host, *words)
    assert f"size={128 << 20},scope=group,group={group}" in out
    assert f"enable --now ksm-poold@{group}.socket" in out
    assert backends(host, guest) == {"ksm0"}
    assert "no daemon serves the group" in virt_ksm(host, "status", "d")
    with lv_host.pools() as pools, Poold(socket=pools / f"{group}.sock") as daemon:
        # this one has a QEMU of root
        out = virt_ksm(host, *words)
        assert "its user must be in the socket's group, root" in out
        lv_host.wait_for("a member", 60, lambda: daemon.status()["members"])
        # the daemon knows of it before it hears that it is a member
        lv_host.wait_for(
            "a status with the daemon",
            60,
            lambda: "no daemon" not in virt_ksm(host, "status", "d"),
        )
        host.virsh("destroy", "d")


def test_size_is_kept_consistent(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("d", tmp_path / "serial")
    define(host, tmp_path, guest)
    virt_ksm(host, "enable", "d")
    text = host.virsh("dumpxml", "--inactive", "d")
    changed = tmp_path / "changed.xml"
    changed.write_text(re.sub(r">131072<", ">163840<", text))
    host.virsh("define", changed)
    assert "size does not match <memory>" in virt_ksm(host, "status", "d")
    assert f"size={160 << 20}" in virt_ksm(host, "enable", "d")
    assert "warning" not in virt_ksm(host, "status", "d")
    # NUMA cells that came later: the other way is taken, or it is refused
    text = host.virsh("dumpxml", "--inactive", "d")
    numa = NUMA.replace("128", "160")
    changed.write_text(text.replace("  <devices>", f"  {numa}\n  <devices>", 1))
    host.virsh("define", changed)
    assert "NUMA cells or memory modules have been added" in virt_ksm(
        host, "status", "d"
    )
    out = virt_ksm(host, "enable", "d", "--method", "commandline", code=1)
    assert "use --method wrapper" in out
    virt_ksm(host, "enable", "d", "--wrapper-dir", tmp_path / "wrapper")
    assert "yes (wrapper)" in virt_ksm(host, "status", "d")


def test_wrapper_for_numa_and_dimms(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("d", tmp_path / "serial", memory_mib=256, cpu=NUMA, extra=SLOTS)
    guest.devices = DIMM
    before = define(host, tmp_path, guest)
    directory = tmp_path / "wrapper"
    words = ("enable", "d", "--wrapper-dir", directory)
    words += ("--scope", "vm", "--target-scan-time", "100")
    words += ("--threads", "2", "--max-cpu", "150")
    out = virt_ksm(host, *words)
    assert f"+    <emulator>{directory}/{QEMU.name}</emulator>" in out
    assert "plugged in while the domain runs will not be merged" in out
    assert backends(host, guest) == {"ram-node0", "memdimm0"}
    # the settings arrive, and the ids are libvirt's own
    for name, value in (("target-scan-time", 100), ("threads", 2), ("max-cpu", 150)):
        path = "/objects/memdimm0"
        assert host.qmp("d", "qom-get", path=path, property=name) == value
    host.virsh("destroy", "d")
    virt_ksm(host, "disable", "d")
    assert host.virsh("dumpxml", "--inactive", "d") == before
    # and the same emulator, named by hand
    guest.emulator = directory / QEMU.name
    host.undefine_all()
    define(host, tmp_path, guest)
    assert "by hand (the emulator wrapper)" in virt_ksm(host, "status", "d")


def test_another_emulator_and_back(host: Daemon, tmp_path: Path) -> None:
    link = tmp_path / "my-qemu"
    link.symlink_to(QEMU)
    before = define(host, tmp_path, Guest("d", tmp_path / "serial"))
    virt_ksm(host, "enable", "d", "--emulator", link)
    assert f"<emulator>{link}</emulator>" in host.virsh("dumpxml", "--inactive", "d")
    virt_ksm(host, "disable", "d")
    assert host.virsh("dumpxml", "--inactive", "d") == before


@pytest.mark.parametrize("backing", ["", "<source type='anonymous'/>"])
def test_native_there_and_back(patched: Daemon, tmp_path: Path, backing: str) -> None:
    guest = Guest("d", tmp_path / "serial", backing=backing)
    before = define(patched, tmp_path, guest)
    try:
        out = virt_ksm(patched, "enable", "d", "--scope", "zero")
        assert '<source type="ksm"/>' in out
        assert backends(patched, guest) == {"pc.ram"}
        assert "configured: yes (native)" in virt_ksm(patched, "status", "d")
        patched.virsh("destroy", "d")
        virt_ksm(patched, "disable", "d")
        assert patched.virsh("dumpxml", "--inactive", "d") == before
    finally:
        patched.undefine_all()


def test_native_needs_a_libvirt_that_knows_it(host: Daemon, tmp_path: Path) -> None:
    define(host, tmp_path, Guest("d", tmp_path / "serial"))
    out = virt_ksm(host, "enable", "d", "--method", "native", code=3)
    assert "does not know <source type='ksm'/>" in out


@pytest.mark.parametrize(
    ("backing", "message"),
    [
        ("<nosharepages/>", "asks for the opposite"),
        ("<hugepages/>", "hugetlbfs"),
        ("<locked/>", "locked memory"),
        ("<allocation mode='immediate'/>", "gives back what was allocated"),
        ("<access mode='shared'/>", "shared memory cannot be merged"),
        ("<source type='memfd'/>", "only anonymous memory"),
    ],
)
def test_refused(host: Daemon, tmp_path: Path, backing: str, message: str) -> None:
    before = define(host, tmp_path, Guest("d", tmp_path / "serial", backing=backing))
    assert message in virt_ksm(host, "enable", "d", code=1)
    assert host.virsh("dumpxml", "--inactive", "d") == before


def test_shared_cells_and_modules_are_refused(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("d", tmp_path / "serial", memory_mib=256, extra=SLOTS)
    guest.cpu = NUMA.replace("unit=", "memAccess='shared' unit=")
    guest.devices = DIMM
    define(host, tmp_path, guest)
    assert "shared memory cannot be merged" in virt_ksm(host, "enable", "d", code=1)
    guest.cpu = NUMA
    guest.devices = DIMM.replace("'dimm'", "'dimm' access='shared'")
    host.undefine_all()
    define(host, tmp_path, guest)
    out = virt_ksm(host, "enable", "d", code=1)
    assert "a memory module with access='shared'" in out


def test_arguments_by_hand_are_not_touched(host: Daemon, tmp_path: Path) -> None:
    words = ("-object", "memory-backend-ksm,id=ksm0,size=128M")
    words += ("-machine", "memory-backend=ksm0")
    define(host, tmp_path, Guest("d", tmp_path / "serial", arguments=words))
    assert "configured: by hand" in virt_ksm(host, "status", "d")
    assert "did not put there" in virt_ksm(host, "enable", "d", code=1)


def test_bad_words(host: Daemon, tmp_path: Path) -> None:
    define(host, tmp_path, Guest("d", tmp_path / "serial"))
    assert "no domain 'e'" in virt_ksm(host, "enable", "e", code=1)
    for words in (
        ("--max-cpu", "0"),
        ("--max-cpu", "lots"),
        ("--scope", "world"),
        ("--scope", "group"),
        ("--group", "a"),
        ("--scope", "group", "--group", "../a"),
        ("--scope", "group", "--group", ".a"),
        ("--scope", "group", "--group", "a" * 65),
        ("--emulator", "qemu-system-x86_64"),
        ("--scope", "vm", "--max-cpu", "0"),
        ("--scope", "vm", "--max-cpu", "101"),
        ("--scope", "vm", "--max-cpu", "201", "--threads", "2"),
        ("--scope", "vm", "--threads", "0"),
        ("--scope", "vm", "--threads", "17"),
        ("--target-scan-time", "-1"),
        ("--speed", "1"),
    ):
        virt_ksm(host, "enable", "d", *words, code=2)
    for emulator in ("/bin/true", "/bin/false", "/bin/cat"):
        out = virt_ksm(host, "enable", "d", "--emulator", emulator, code=3)
        assert f"{emulator} is not a QEMU" in out
    for emulator in ("/nonexistent/qemu", "/tmp", "/etc/passwd"):
        out = virt_ksm(host, "enable", "d", "--emulator", emulator, code=3)
        assert f"{emulator} is no program" in out
    script = tmp_path / "script"
    script.write_text("#!/nonexistent/interpreter\n")
    script.chmod(0o755)
    out = virt_ksm(host, "enable", "d", "--emulator", script, code=3)
    assert "cannot be run" in out
    # as QEMU without our object would
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo QEMU emulator && exit\n'
        "echo \"Parameter 'qom-type' does not accept value\" >&2; exit 1\n"
    )
    out = virt_ksm(host, "enable", "d", "--emulator", script, code=3)
    assert f"{script} has no memory-backend-ksm" in out
    guest = Guest("t", tmp_path / "serial")
    xml = tmp_path / "transient.xml"
    xml.write_text(guest.xml())
    host.virsh("create", "--paused", xml)
    assert "is transient" in virt_ksm(host, "enable", "t", code=1)
