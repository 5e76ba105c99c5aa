# SPDX-License-Identifier: GPL-2.0-or-later
"""Scope group: guests of libvirt, confined as user libvirt-qemu, share a pool.

A libvirt with our insertions connects to the daemon for them: the socket is
root's alone.  With Debian's own libvirt QEMU connects itself, and the socket is
for the group kvm.  Each libvirtd sees a /run/ksm-pool of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lv_host
import pytest
from host.poold import Poold
from lv_guest import Guest
from lv_host import Daemon

pytestmark = pytest.mark.skipif(
    not Path("/dev/userfaultfd").exists(), reason="this kernel has no /dev/userfaultfd"
)

FILES = lv_host.TOP / "libvirt" / "confinement"
KSM = "<source type='ksm'/><ksm scope='group' group='tenant-a' max-cpu='100'/>"
CELLS = """<cpu><numa><cell id='0' cpus='0' memory='96' unit='MiB'/>
  <cell id='1' memory='32' unit='MiB'/></numa></cpu>"""
DIMM = """<memory model='dimm'>
  <target><size unit='MiB'>128</size><node>0</node></target></memory>"""
SLOTS = "<maxMemory slots='4' unit='MiB'>1024</maxMemory>"


@contextmanager
def confined(
    libvirt: lv_host.Libvirt, conf: str, count: int = 1
) -> Iterator[list[Daemon]]:
    lv_host.ensure_packages()
    setup = lv_host.CONFINED_SETUP + lv_host.LIKE_UDEV.format("userfaultfd")
    with lv_host.pools() as pools:
        setup += f"mkdir -p pools; mount --bind pools {pools}\n"
        with lv_host.daemons(libvirt, count, conf, setup) as daemons:
            yield daemons


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Daemon]]:
    # this build has no library for a /dev of QEMU's own
    conf = lv_host.CONFINED_CONF.replace('[ "mount" ]', "[ ]")
    with confined(lv_host.patched(), conf, 2) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def patched(hosts: list[Daemon]) -> Daemon:
    return hosts[0]


@pytest.fixture(scope="module")
def unpatched() -> Iterator[Daemon]:
    conf = lv_host.CONFINED_CONF + (FILES / "qemu.conf").read_text()
    with confined(lv_host.debian(), conf) as (daemon,):
        yield daemon


@contextmanager
def poold(host: Daemon, name: str = "tenant-a") -> Iterator[Poold]:
    try:
        with Poold(socket=host.root / "pools" / f"{name}.sock") as daemon:
            yield daemon
    finally:
        host.undefine_all()


@pytest.fixture
def daemon(patched: Daemon) -> Iterator[Poold]:
    with poold(patched) as daemon:
        yield daemon


def let_qemu_connect(daemon: Poold) -> None:
    """As SocketGroup=kvm of the systemd unit does."""
    shutil.chown(daemon.socket, group="kvm")


def start(host: Daemon, name: str, **fields: Any) -> Guest:
    guest = lv_host.confined_guest(host, name, **fields)
    lv_host.create(host, guest)
    return guest


def backends(host: Daemon, guest: Guest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = host.qmp(guest.name, "query-ksm-stats")["backends"]
    return found


def group_of(host: Daemon, guest: Guest) -> dict[str, Any]:
    group: dict[str, Any] = backends(host, guest)[0]["group"]
    return group


def no_daemon(host: Daemon, guest: Guest) -> bool:
    (backend,) = backends(host, guest)
    said = "no-daemon" in {reason["kind"] for reason in backend["reasons"]}
    assert said == (not backend["group"]["connected"])
    return said


def members(daemon: Poold) -> set[str]:
    return {m["name"] for m in daemon.status()["members"] if m["connected"]}


def wait_shared(host: Daemon, guests: list[Guest]) -> None:
    """Most of what they have in common is merged, and theirs together."""
    pages = guests[0].common_mib << 8

    def shared() -> bool:
        return all(
            group_of(host, guest).get("saved", 0) > pages * 0.9 / 2 for guest in guests
        )

    lv_host.wait_for("pages saved with the others", 120, shared)
    for guest in guests:
        assert backends(host, guest)[0]["pages-merged"] > pages * 0.9
        guest.wait_turns(1)


def pool_is_shared(daemon: Poold) -> bool:
    held = sum(member["held"] for member in daemon.status()["members"])
    return daemon.pool_bytes() < held * 4096 * 0.75


def test_libvirt_connects_for_a_confined_qemu(patched: Daemon, daemon: Poold) -> None:
    assert os.stat(daemon.socket).st_mode & 0o777 == 0o660
    assert os.stat(daemon.socket).st_gid == 0  # libvirt-qemu may not connect
    guests = [start(patched, f"g{i}", backing=KSM, seed=i) for i in (1, 2)]
    for guest in guests:
        lv_host.check_confined(patched, guest)
        guest.wait_turns(1)
    wait_shared(patched, guests)
    assert members(daemon) == {"g1", "g2"}
    group = group_of(patched, guests[0])
    assert group["connected"] and group["name"] == "tenant-a"
    assert group["members"] == 2
    assert 0 < group["share"] < group["held"]
    # the pool has once what both map
    lv_host.wait_for("a pool for two", 60, lambda: pool_is_shared(daemon))
    stats = patched.domstats("g1", "--memory")
    assert stats["memory.ksm.backend.0.scope"] == "group"
    assert stats["memory.ksm.group.name"] == "tenant-a"
    assert stats["memory.ksm.group.connected"] == "yes"
    assert stats["memory.ksm.group.members"] == "2"
    assert int(stats["memory.ksm.group.saved"]) > 0
    # a new program in the daemon's place has the same connections
    os.kill(daemon.pid, signal.SIGHUP)
    lv_host.wait_for("both members", 30, lambda: members(daemon) == {"g1", "g2"})
    guests[0].wait_turns(1)
    again = group_of(patched, guests[0])
    assert again["connected"] and again["generation"] == group["generation"]
    # one goes; the other's memory stays
    patched.virsh("destroy", "g1")
    lv_host.wait_for("a member less", 30, lambda: members(daemon) == {"g2"})
    guests[1].wait_turns(2)


def files_of(pid: int) -> set[str]:
    """Paths of what a process maps and has open, as the kernel tells them."""
    proc = Path(f"/proc/{pid}")
    found = set(re.findall(r" (/\S+)", (proc / "maps").read_text()))
    for each in (proc / "fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(each).removesuffix(" (deleted)"))
    return found


def test_apparmor_names_what_is_used(patched: Daemon, daemon: Poold) -> None:
    """Paths of files that no directory shows, as AppArmor has them, too."""
    guest = start(patched, "g1", backing=KSM)
    lv_host.wait_for("the member", 30, lambda: members(daemon) == {"g1"})
    guest.wait_turns(1)
    used = files_of(qemu_pid(patched, guest))
    # but for what a directory shows, as the emulator
    ours = {each for each in used if "ksm-" in each and not Path(each).exists()}
    assert ours == {"/ksm-pool", "/memfd:ksm-ring"}
    rules = (FILES / "apparmor-libvirt-qemu").read_text()
    assert "  /ksm-pool r,\n" in rules and "  /memfd:ksm-ring rw,\n" in rules


def test_groups_do_not_meet(patched: Daemon, daemon: Poold) -> None:
    second = Poold(socket=daemon.socket.with_name("tenant-b.sock"))
    with second:
        guests = [
            start(patched, f"g{i}", backing=KSM.replace("tenant-a", name), seed=i)
            for i, name in ((1, "tenant-a"), (2, "tenant-b"))
        ]
        for guest in guests:
            guest.wait_turns(2)
            assert group_of(patched, guest)["members"] == 1
            assert group_of(patched, guest).get("saved", 0) == 0
        assert members(daemon) == {"g1"} and members(second) == {"g2"}
        patched.destroy_all()


def test_one_connection_for_all_objects(patched: Daemon, daemon: Poold) -> None:
    """NUMA cells, a memory module and one plugged in; saved and restored."""
    guest = lv_host.confined_guest(patched, "g1", backing=KSM, memory_mib=256)
    guest.extra, guest.cpu, guest.devices = SLOTS, CELLS, DIMM
    # what libvirt would run is shown without asking the daemon
    xml = guest.serial.with_suffix(".xml")
    xml.write_text(guest.xml())
    argv = patched.virsh("domxml-to-native", "qemu-argv", "--xml", xml)
    assert '"group":"tenant-a"' in argv and "group-fd" not in argv
    assert daemon.status()["members"] == []

    lv_host.create(patched, guest)
    words = Path(f"/proc/{qemu_pid(patched, guest)}/cmdline").read_text()
    assert len(re.findall('"group-fd":"[0-9]+"', words)) == 1
    guest.wait_turns(1)
    dimm = xml.with_name("dimm.xml")
    dimm.write_text(DIMM)
    patched.virsh("attach-device", "g1", dimm, "--live")
    found = backends(patched, guest)
    ids = {b["id"] for b in found if b["group"]["connected"]}
    assert ids == {"ram-node0", "ram-node1", "memdimm0", "memdimm1"}
    assert [m["name"] for m in daemon.status()["members"]] == ["g1"]
    # libvirtd keeps no connection
    assert patched_sockets(patched, daemon) == 0

    patched.virsh("save", "g1", patched.root / "state")
    lv_host.wait_for("no member", 30, lambda: not members(daemon))
    patched.virsh("restore", patched.root / "state")
    guest.wait_turns(1)
    lv_host.wait_for("a member again", 30, lambda: members(daemon) == {"g1"})


def test_migration_into_another_group(
    hosts: list[Daemon], patched: Daemon, daemon: Poold
) -> None:
    there = hosts[1]
    with poold(there, "tenant-b") as other:
        guest = start(patched, "g1", backing=KSM)
        guest.wait_turns(1)
        assert members(daemon) == {"g1"}
        text = patched.virsh("dumpxml", "--migratable", "g1")
        text = text.replace("tenant-a", "tenant-b")
        xml = guest.serial.with_name("target.xml")
        # each sees QEMU at a place of its own
        xml.write_text(text.replace(f"{patched.root}/qemu", f"{there.root}/qemu"))
        patched.virsh(
            *("migrate", "--live", "g1", there.uri, "--xml", xml),
            *("--migrateuri", "tcp://127.0.0.1"),
        )
        guest.wait_turns(2)
        lv_host.wait_for("the member", 60, lambda: members(other) == {"g1"})
        assert group_of(there, guest)["name"] == "tenant-b"
        lv_host.wait_for("no member", 30, lambda: not members(daemon))


def qemu_pid(host: Daemon, guest: Guest) -> int:
    return int(lv_host.process_status(host, guest)["Pid"])


def patched_sockets(host: Daemon, daemon: Poold) -> int:
    """How many sockets of libvirtd are connected to the daemon's."""
    pid = int((host.root / "libvirtd.pid").read_text())
    ours = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        ours |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    # Num RefCount Protocol Flags Type St Inode Path; 0005: SOCK_SEQPACKET
    lines = Path(f"/proc/{daemon.pid}/net/unix").read_text().splitlines()[1:]
    packets = {line.split()[6] for line in lines if line.split()[4] == "0005"}
    return len(ours & packets)


def test_without_a_daemon_the_guest_runs(patched: Daemon, daemon: Poold) -> None:
    daemon.stop()
    first = start(patched, "g1", backing=KSM)
    first.wait_turns(1)
    assert no_daemon(patched, first)
    (backend,) = backends(patched, first)
    assert backend["state"] == "inhibited"
    log = (patched.root / "libvirtd.log").read_text()
    assert "domain 'g1' starts without the daemon of its group 'tenant-a'" in log
    assert "is ksm-poold@tenant-a.socket started?" in log
    stats = patched.domstats("g1", "--memory")
    assert stats["memory.ksm.group.connected"] == "no"
    assert "no-daemon" in stats["memory.ksm.backend.0.reasons"]

    # a guest that starts now is connected; the first one may not connect itself
    daemon.start()
    second = start(patched, "g2", backing=KSM, seed=2)
    second.wait_turns(1)
    lv_host.wait_for("the second", 30, lambda: members(daemon) == {"g2"})
    assert no_daemon(patched, first)
    let_qemu_connect(daemon)
    both = [first, second]
    wait_shared(patched, both)

    # and both come back to the successor of a daemon that dies
    generation = group_of(patched, first)["generation"]
    daemon.stop(signal.SIGKILL)
    for guest in both:
        lv_host.wait_for("no daemon", 30, lambda: no_daemon(patched, guest))
        guest.wait_turns(1)
        assert backends(patched, guest)[0]["pages-merged"] > 0
    daemon.start()
    let_qemu_connect(daemon)
    for guest in both:
        lv_host.wait_for("the daemon", 60, lambda: not no_daemon(patched, guest))
        assert group_of(patched, guest)["generation"] != generation
        guest.wait_turns(1)


@pytest.mark.parametrize("way", ["commandline", "wrapper"])
def test_unpatched(unpatched: Daemon, way: str) -> None:
    """QEMU connects itself, where the socket lets it."""
    with poold(unpatched) as daemon:
        guests = [confined_by(unpatched, way, f"g{i}", i) for i in (1, 2)]
        for guest in guests:
            lv_host.create(unpatched, guest)
            lv_host.check_confined(unpatched, guest)
        for guest in guests:
            guest.wait_turns(1)
            assert no_daemon(unpatched, guest)
        let_qemu_connect(daemon)
        wait_shared(unpatched, guests)
        assert members(daemon) == {"g1", "g2"}


def confined_by(host: Daemon, way: str, name: str, seed: int) -> Guest:
    guest = lv_host.confined_guest(host, name, seed=seed)
    if way == "commandline":
        backend = f"memory-backend-ksm,id=ksm0,size={guest.memory_mib}M,scope=group"
        guest.arguments = ("-object", f"{backend},group=tenant-a,max-cpu=100")
        guest.arguments += ("-machine", "memory-backend=ksm0")
        return guest
    wrapper = host.root / "guest" / "qemu-ksm"
    real = wrapper.with_name(f"{wrapper.name}.real")
    if not real.is_symlink():
        shutil.copy(lv_host.TOP / "scripts" / "qemu-ksm-emulator", wrapper)
        real.symlink_to(guest.emulator)
    guest.emulator = wrapper
    properties = '"scope":"group","group":"tenant-a","max-cpu":100'
    guest.environment = {"QEMU_KSM_PROPERTIES": properties}
    return guest
