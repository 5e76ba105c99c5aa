# SPDX-License-Identifier: GPL-2.0-or-later
"""The Debian packages in fresh minimal root file systems: built, installed, used,
upgraded with guests running, removed and purged (scripts/check deb).

The tests of a release belong together, in this order: each goes on where the one
before it has ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deb_root import Root

from guest.qemu import Guest, GuestSpec, guest_image
from host.paths import TOP

pytestmark = pytest.mark.timeout(2400)

PACKAGES = ("ksm-poold", "ksm-tools", "libksm-dev", "libksm1", "qemu-system-ksm")
EMULATOR = "/usr/bin/qemu-system-x86_64-ksm"
SOCKET = "/run/ksm-pool/tenant.sock"
IMAGE = "/guest"
DEBS = "/packages"
#: The second version has nothing new in it but its number.
VERSIONS = ("0", "1")


@dataclass
class Host:
    """A release's root file system, and what runs in it."""

    root: Root
    #: directories by number of the version, as seen inside
    debs: list[str]
    stack: ExitStack
    guests: list[Guest] = field(default_factory=list)
    daemon: subprocess.Popen[str] | None = None
    before: dict[str, str] = field(default_factory=dict)

    def daemon_pid(self) -> str:
        return self.root.run("pidof", "ksm-poold").strip()


def build(release: str, version: str, *options: str) -> Path:
    """Builds the packages, or packs what is built with another version."""
    out = TOP / "build" / "deb" / f"{release}-{version}"
    done = subprocess.run(
        [TOP / "scripts/build-deb", "--release", release, "--out", out]
        + ["--version", f"0.1~test{version}", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-4000:]
    print(done.stdout)
    return out


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(release: str) -> list[Path]:
    """Directories with the packages, which lintian has nothing against."""
    return [
        build(release, version, *(["--lintian"] if version == "0" else []))
        for version in VERSIONS
    ]


@pytest.fixture(scope="module")
def host(release: str, packages: list[Path]) -> Iterator[Host]:
    # where build-deb has what it has installed for the build
    archives = guest_image().parent / "deb" / f"archives-{release}"
    binds = [(guest_image(), IMAGE), (archives, "/var/cache/apt/archives")]
    debs = []
    for path in packages:
        debs.append(f"{DEBS}/{path.name}")
        binds.append((path, debs[-1]))
    with ExitStack() as stack:
        root = stack.enter_context(
            Root(release, TOP / "build" / "deb" / f"root-{release}", binds)
        )
        root.apt("update")
        yield Host(root, debs, stack)


def glob(host: Host, version: int) -> list[str]:
    """apt takes no patterns."""
    return host.root.run("sh", "-c", f"ls {host.debs[version]}/*.deb").split()


def test_built(packages: list[Path]) -> None:
    for directory, version in zip(packages, VERSIONS, strict=True):
        names = sorted(path.name for path in directory.glob("*.deb"))
        assert names == [f"{name}_0.1~test{version}_amd64.deb" for name in PACKAGES]


def test_installed(host: Host) -> None:
    """In a system that has what they depend on, so that it is known what is theirs."""
    debs = glob(host, 0)
    planned = host.root.apt("install", "--simulate", *debs)
    needed = set(re.findall(r"^Inst (\S+)", planned, re.MULTILINE)) - set(PACKAGES)
    # and what the next tests need: a compiler and libvirt
    host.root.apt(
        "install", *sorted(needed), "gcc", "libc6-dev", "pkgconf", "man-db", "procps",
        "libvirt-daemon-system", "libvirt-clients",
    )  # fmt: skip
    host.before = host.root.files()
    host.root.apt("install", *debs)
    said = host.root.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n")
    for name in PACKAGES:
        assert f"{name} ii" in said
    # nothing was started
    assert host.root.attempt("pidof", "ksm-poold").returncode
    assert "ksm-pool" in host.root.run("getent", "group", "ksm-pool")
    assert (host.root.path / "run/ksm-pool").is_dir()


def test_programs(host: Host) -> None:
    run = host.root.run
    assert "QEMU" in run("cat", "/usr/share/doc/qemu-system-ksm/copyright.qemu")
    assert "qemu-ksm" in run(EMULATOR, "--version")
    assert "scope=<" in run(EMULATOR, "-object", "memory-backend-ksm,help")
    for accelerator in ("kvm", "tcg"):
        assert accelerator in run(EMULATOR, "-accel", "help").split()
    devices = run(EMULATOR, "-device", "help")
    for name in ("virtio-vga", "virtio-net-pci", "vhost-vsock-pci", "tpm-crb",
                 "usb-host", "virtio-9p-pci", "vfio-pci"):  # fmt: skip
        assert f'name "{name}"' in devices
    run("ksm-top", "--once", "--json")
    run("ksm-top", "--once")
    run("virt-ksm", "--help")
    run("ksm-run", "--max-cpu", "100", "true")
    run("ksm-poold", "--help")
    assert run("ksm-poold", "--image-version").strip().isdigit()
    run("ksm-hostd", "--help")
    for page in ("qemu-system-x86_64-ksm", "virt-ksm", "ksm-top", "ksm-run",
                 "ksm-poold", "ksm-hostd", "libksm"):  # fmt: skip
        found = list((host.root.path / "usr/share/man").glob(f"man*/{page}.?.gz"))
        assert len(found) == 1, page


def test_library(host: Host) -> None:
    source = Path(__file__).with_name("libksm-user.c").read_text()
    (host.root.path / "tmp/user.c").write_text(source)
    host.root.run(
        "sh", "-c", "cd /tmp && gcc -O2 -Wall user.c $(pkg-config --cflags --libs libksm)"
    )  # fmt: skip
    assert "libksm.so.1 =>" in host.root.run("ldd", "/tmp/a.out")
    print(host.root.run("/tmp/a.out"))


def spec(host: Host, number: int) -> GuestSpec:
    return GuestSpec(
        name=f"guest{number}",
        memory_mib=384,
        seed=number,
        properties={"scope": "group", "group": "tenant", "max-cpu": "50"},
        prefix=host.root.prefix,
        qemu=Path(EMULATOR),
        userland=False,
        # for ksm-top
        extra=["-qmp", f"unix:/tmp/guest{number}.sock,server=on,wait=off"],
    )


def boot(host: Host, number: int) -> Guest:
    guest = host.stack.enter_context(Guest(spec(host, number), Path(IMAGE)))
    host.guests.append(guest)
    return guest


def wait_shared(guest: Guest, members: int) -> int:
    """MiB that it saves, once the daemon has told of so many members."""

    def saved() -> int:
        group = guest.backend_stats()["group"]
        if group.get("members") != members:
            return 0
        mib = int(group["saved"]) * 4096 >> 20
        return mib if mib >= 8 else 0

    return int(guest.wait_for(f"sharing by {members}", saved, 300))


def test_guests_share(host: Host) -> None:
    host.daemon = host.root.start(
        "setpriv", "--pdeathsig", "TERM", "ksm-poold", "--socket", SOCKET, "--size", "1G"
    )  # fmt: skip
    for number in (1, 2):
        boot(host, number)
    for guest in host.guests:
        guest.wait_ready()
    for guest in host.guests:
        print(f"{guest.spec.name} saves {wait_shared(guest, 2)} MiB by its group")
    status = json.loads(
        host.root.run("ksm-poold", "--status", "--json", "--socket", SOCKET)
    )
    assert len(status["members"]) == 2
    shown = json.loads(host.root.run("ksm-top", "--once", "--json"))
    assert sorted(guest["name"] for guest in shown["guests"]) == ["guest1", "guest2"]
    assert all(guest["saved"]["group"] > 0 for guest in shown["guests"])
    print(host.root.run("ksm-top", "--once"))


def test_upgraded_under_guests(host: Host) -> None:
    pid = host.daemon_pid()
    assert "upgraded" in host.root.apt("install", *glob(host, 1))
    said = host.root.run("dpkg-query", "-W", "-f", "${Version}\n", *PACKAGES)
    assert set(said.split()) == {"0.1~test1"}
    # what systemd's reload does
    host.root.run("kill", "-HUP", pid)

    def renewed() -> bool:
        return "(deleted)" not in host.root.run("readlink", f"/proc/{pid}/exe")

    host.guests[0].wait_for("the new daemon", renewed, 30)
    assert host.daemon_pid() == pid
    for guest in host.guests:
        assert guest.alive()
        assert guest.verify() == 0
    # one of the new version among them
    boot(host, 3).wait_ready()
    for guest in host.guests:
        print(f"{guest.spec.name} saves {wait_shared(guest, 3)} MiB by its group")
        assert guest.verify() == 0


DOMAIN = f"""\
<domain type='qemu'>
  <name>domain</name>
  <memory unit='MiB'>384</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{IMAGE}/vmlinuz</kernel>
    <initrd>{IMAGE}/initrd</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 guest.cache=170 guest.private=32 guest.seed=9 guest.load=20 guest.userland=0</cmdline></os>
  <features><acpi/></features>
  <devices>
    <emulator>{EMULATOR}</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/>
      <source file='{IMAGE}/root.img'/><target dev='vda' bus='virtio'/><readonly/></disk>
    <serial type='file'><source path='/tmp/console'/><target port='0'/></serial>
    <serial type='file'><source path='/tmp/agent'/><target port='1'/></serial>
    <graphics type='vnc' port='-1' autoport='yes'/>
    <video><model type='virtio'/></video>
    <memballoon model='none'/>
  </devices>
</domain>
"""
NUMA = "<cpu><numa><cell id='0' cpus='0' memory='384' unit='MiB'/></numa></cpu>"
#: A libvirtd that has no systemd, and nobody else to be careful of.
QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = [ ]
cgroup_controllers = [ ]
stdio_handler = "file"
"""


def wait_until(what: str, test: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(1)


def run_domain(host: Host, xml: str, ways: str) -> None:
    """Enables, runs and disables merging of a domain."""
    root = host.root
    (root.path / "tmp/domain.xml").write_text(xml)
    for name in ("console", "agent"):
        (root.path / "tmp" / name).unlink(missing_ok=True)
    root.run("virsh", "define", "/tmp/domain.xml")
    plain = root.run("virsh", "dumpxml", "domain")
    said = root.run("virt-ksm", "enable", "domain", "--scope", "group", "--group",
                    "tenant", "--max-cpu", "50")  # fmt: skip
    assert ways in said
    root.run("virsh", "start", "domain")
    agent = root.path / "tmp/agent"
    wait_until(
        "booted domain", lambda: agent.exists() and '"ready"' in agent.read_text()
    )

    def merged() -> bool:
        status = root.run("virt-ksm", "status", "domain")
        found = re.search(r"scope group, .* (\d+) MiB merged", status)
        return found is not None and int(found[1]) >= 16

    wait_until("merged domain", merged)
    print(root.run("virt-ksm", "status", "domain"))
    assert '"error"' not in agent.read_text()
    root.run("virsh", "destroy", "domain")
    root.run("virt-ksm", "disable", "domain")
    assert root.run("virsh", "dumpxml", "domain") == plain
    root.run("virsh", "undefine", "domain")


def test_libvirt(host: Host) -> None:
    root = host.root
    (root.path / "etc/libvirt/qemu.conf").write_text(QEMU_CONF)
    daemon = root.start("setpriv", "--pdeathsig", "TERM", "libvirtd")
    try:
        wait_until("libvirtd", lambda: root.attempt("virsh", "uri").returncode == 0, 60)
        run_domain(host, DOMAIN, "commandline")
        run_domain(host, DOMAIN.replace("<devices>", f"{NUMA}<devices>"), "/wrapper/")
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
    assert not (root.path / "usr/local/libexec/qemu-ksm").exists()


def test_removed(host: Host) -> None:
    """Guests run on; settings stay, and nothing else."""
    host.root.apt("remove", *PACKAGES)
    for guest in host.guests:
        assert guest.verify() == 0
    left = host.root.files().keys() - host.before.keys()
    settings = {name for name in left if name.startswith("/etc/")}
    assert settings >= {
        "/etc/apparmor.d/abstractions/libvirt-qemu.d/qemu-ksm",
        "/etc/needrestart/conf.d/ksm-poold.conf",
    }
    assert not any(name.startswith("/usr/") for name in left), sorted(left)


def test_purged(host: Host) -> None:
    for guest in host.guests:
        guest.stop()
    if host.daemon is not None:
        host.root.run("kill", host.daemon_pid())
        host.daemon.wait(30)
    (host.root.path / "etc/ksm-pool").mkdir(exist_ok=True)
    (host.root.path / "etc/ksm-pool/tenant.conf").write_text("")
    # apt does not know those that have left nothing
    host.root.run("dpkg", "--purge", *PACKAGES)
    after = host.root.files()
    left = {name: what for name, what in after.items() if host.before.get(name) != what}
    assert not left
    assert not host.before.keys() - after.keys()
    assert host.root.attempt("getent", "group", "ksm-pool").returncode
