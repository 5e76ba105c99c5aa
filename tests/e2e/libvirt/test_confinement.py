# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU as libvirt confines it: user libvirt-qemu, no capabilities, seccomp, a
/dev of its own; with and without the files of libvirt/confinement.

Debian's own libvirt, for it can make that /dev, which needs libraries that
scripts/build-libvirt leaves out.  AppArmor is not run here (it needs the
kernel's help): our rules are compiled within Debian's.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lv_host
import pytest
from lv_guest import TOP, Guest
from lv_host import Daemon

FILES = TOP / "libvirt" / "confinement"


@contextmanager
def confined(conf: str, setup: str) -> Iterator[Daemon]:
    lv_host.ensure_packages()
    # binds inside the subshell of Daemon are binds of the whole namespace
    setup = lv_host.CONFINED_SETUP + setup
    with lv_host.daemons(lv_host.debian(), 1, conf, setup) as (daemon,):
        yield daemon


def start(host: Daemon, properties: str) -> Guest:
    guest = lv_host.confined_guest(host, "ksm")
    backend = f"memory-backend-ksm,id=ksm0,size={guest.memory_mib}M,{properties}"
    guest.arguments = ("-object", backend, "-machine", "memory-backend=ksm0")
    lv_host.create(host, guest)
    return guest


def test_scope_host_needs_nothing() -> None:
    with confined(lv_host.CONFINED_CONF, "") as host:
        guest = start(host, "scope=host")
        guest.wait_turns(1)
        lv_host.check_confined(host, guest)
        stats = host.qmp("ksm", "query-ksm-stats")
        (backend,) = stats["backends"]
        assert backend["mergeable"] is True
        assert backend["resident"] > guest.common_mib << 20
        # the kernel's counts are readable without any right
        assert "ksmd" in stats["host"] and "pages-sharing" in stats["host"]
        assert "rmap-items" in stats["process"]


def test_scope_vm_says_what_is_missing() -> None:
    if Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() != "0":
        pytest.skip("vm.unprivileged_userfaultfd is set: nothing is missing here")
    with confined(lv_host.CONFINED_CONF, "") as host:
        # a guest is never kept from running because it cannot be merged, or
        # else the error says why
        try:
            guest = start(host, "scope=vm")
        except lv_host.VirshError as error:
            text = str(error)
        else:
            guest.wait_turns(1)
            (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
            text = " ".join(reason["text"] for reason in backend["reasons"])
        assert "/dev/userfaultfd" in text
        assert "vm.unprivileged_userfaultfd" in text


def test_scope_vm_with_our_files() -> None:
    if not Path("/dev/userfaultfd").exists():
        pytest.skip("this kernel has no /dev/userfaultfd")
    conf = lv_host.CONFINED_CONF + (FILES / "qemu.conf").read_text()
    with confined(conf, lv_host.LIKE_UDEV.format("userfaultfd")) as host:
        guest = start(host, "scope=vm,max-cpu=100")
        guest.wait_turns(1)
        lv_host.check_confined(host, guest)

        def scanned() -> bool:
            (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
            kinds = {reason["kind"] for reason in backend["reasons"]}
            assert not kinds & {"not-permitted", "no-kernel-support"}, backend
            return backend.get("pages-scanned", 0) > 0

        lv_host.wait_for("scanned pages", 60, scanned)
        guest.wait_turns(1)


def test_the_udev_rule_is_what_was_tested() -> None:
    rule = (FILES / "70-qemu-ksm.rules").read_text()
    assert 'KERNEL=="userfaultfd"' in rule
    assert 'GROUP="kvm", MODE="0660"' in rule


def apparmor_base(place: Path) -> Path:
    """/etc/apparmor.d with Debian's profiles for libvirt, and our files where
    the manual puts them."""
    script = ". scripts/lib/common.sh; need_apt apparmor"
    subprocess.run(["bash", "-eu", "-c", script], cwd=TOP, check=True)
    fetch = [TOP / "scripts" / "build-libvirt", "--graft-only"]
    subprocess.run(fetch, check=True, stdin=subprocess.DEVNULL, timeout=600)
    base = place / "apparmor.d"
    shutil.copytree("/etc/apparmor.d", base)
    (base / "libvirt").mkdir(exist_ok=True)
    (base / "local" / "abstractions").mkdir(parents=True, exist_ok=True)
    source = TOP / "build" / "libvirt-src" / "src" / "security" / "apparmor"
    for name, target in (
        ("TEMPLATE.qemu", "libvirt/TEMPLATE.qemu"),
        ("libvirt-qemu", "abstractions/libvirt-qemu"),
        ("usr.sbin.libvirtd.in", "usr.sbin.libvirtd"),
    ):
        text = (source / name).read_text().replace("@sbindir@", "/usr/sbin")
        (base / target).write_text(text.replace("@libexecdir@", "/usr/lib/libvirt"))
    return base


@pytest.mark.parametrize(
    ("name", "local", "profile"),
    [
        (
            "apparmor-libvirt-qemu",
            "abstractions/libvirt-qemu",
            "libvirt/TEMPLATE.qemu",
        ),
        ("apparmor-libvirtd", "usr.sbin.libvirtd", "usr.sbin.libvirtd"),
    ],
)
def test_apparmor_takes_our_rules(
    name: str, local: str, profile: str, tmp_path: Path
) -> None:
    """In Debian's own profiles, which they must not contradict."""
    base = apparmor_base(tmp_path)

    def compiled(rules: str) -> bytes:
        (base / "local" / local).write_text(rules)
        return subprocess.run(
            # compiles, and neither loads the result nor keeps it
            ["apparmor_parser", "--skip-kernel-load", "--skip-cache", "--stdout"]
            + ["--base", base, base / profile],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ).stdout

    # that they are read at all shows in the result
    assert compiled((FILES / name).read_text()) != compiled("")
