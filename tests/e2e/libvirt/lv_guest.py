# SPDX-License-Identifier: GPL-2.0-or-later
"""The guests of these tests: a Debian kernel and an initramfs of one program,
or a boot sector (for KVM).

Leaves to others: starting them (lv_host.py), what must hold (test_*.py).
"""

from __future__ import annotations

import functools
import re
import stat
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[2]
SOURCES = TOP / "tests" / "guest"
BUILD = TOP / "build" / "libvirt-tests"
QEMU = TOP / "build" / "qemu" / "qemu-system-x86_64"

#: What a guest under TCG may take to boot and fill its memory on a busy host.
BOOT_SECONDS = 120


def _cpio_entry(name: str, mode: int, content: bytes = b"", rdev: int = 0) -> bytes:
    """One member of a cpio archive in the "newc" format."""
    encoded = name.encode() + b"\0"
    fields = (1, mode, 0, 0, 1, 0, len(content), 0, 0)
    fields += (rdev >> 8, rdev & 0xFF, len(encoded), 0)
    entry = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    entry += b"\0" * (-len(entry) % 4)
    return entry + content + b"\0" * (-len(content) % 4)


@functools.cache
def kernel() -> Path:
    out = subprocess.run(
        [HERE / "fetch-guest-kernel"], stdout=subprocess.PIPE, check=True, text=True
    )
    return Path(out.stdout.strip())


@functools.cache
def initrd() -> Path:
    """Builds the initramfs (once per test run; half a second)."""
    BUILD.mkdir(parents=True, exist_ok=True)
    program = BUILD / "guest-init"
    subprocess.run(
        ["gcc", "-O2", "-static", "-Wall", "-o", program, SOURCES / "guest-init.c"],
        check=True,
    )
    archive = _cpio_entry("dev", stat.S_IFDIR | 0o755)
    archive += _cpio_entry("dev/console", stat.S_IFCHR | 0o600, rdev=5 << 8 | 1)
    archive += _cpio_entry("init", stat.S_IFREG | 0o755, program.read_bytes())
    archive += _cpio_entry("TRAILER!!!", 0)
    path = BUILD / "initramfs"
    path.write_bytes(archive)
    return path


@functools.cache
def boot_sector() -> Path:
    """Assembles guest-boot.S; a disk of 512 bytes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    source, obj, disk = SOURCES / "guest-boot.S", BUILD / "guest-boot.o", BUILD / "boot"
    subprocess.run(["gcc", "-m32", "-c", "-o", obj, source], check=True)
    link = ["ld", "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary"]
    subprocess.run([*link, "-o", disk, obj], check=True)
    return disk


@dataclass
class Guest:
    """A domain to be: its XML, and its console once it runs."""

    name: str
    serial: Path
    #: what goes into <memoryBacking>, empty for none of it
    backing: str = ""
    memory_mib: int = 128
    common_mib: int = 24
    private_mib: int = 4
    seed: int = 1
    emulator: Path = QEMU
    #: more elements of <domain>, of <devices>, of <qemu:commandline>
    extra: str = ""
    cpu: str = ""
    devices: str = ""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    #: under KVM, running the boot sector
    kvm: bool = False
    #: a directory with copies of kernel and initrd, for other users than root
    files: Path | None = None

    def boot(self) -> tuple[str, str]:
        """What it boots from: elements of <os>, and of <devices>."""
        if self.kvm:
            disk = f"""<disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file={quoteattr(str(boot_sector()))}/>
      <target dev='hda' bus='ide'/></disk>"""
            return "<boot dev='hd'/>", disk
        cmdline = (
            "console=ttyS0 quiet panic=-1 memhp_default_state=online "
            f"common={self.common_mib} private={self.private_mib} seed={self.seed}"
        )
        paths = (kernel(), initrd())
        if self.files:
            paths = (self.files / "kernel", self.files / "initrd")
        words = f"""<kernel>{escape(str(paths[0]))}</kernel>
    <initrd>{escape(str(paths[1]))}</initrd>
    <cmdline>{cmdline}</cmdline>"""
        return words, ""

    def xml(self) -> str:
        commandline = "".join(
            f"<qemu:arg value={quoteattr(word)}/>" for word in self.arguments
        ) + "".join(
            f"<qemu:env name={quoteattr(name)} value={quoteattr(value)}/>"
            for name, value in self.environment.items()
        )
        if commandline:
            commandline = f"<qemu:commandline>{commandline}</qemu:commandline>"
        backing = ""
        if self.backing:
            backing = f"<memoryBacking>{self.backing}</memoryBacking>"
        system, disk = self.boot()
        return f"""\
<domain type='{"kvm" if self.kvm else "qemu"}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{escape(self.name)}</name>
  {self.extra}
  <memory unit='MiB'>{self.memory_mib}</memory>
  {backing}
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type>
    {system}</os>
  <features><acpi/></features>
  {self.cpu}
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>{escape(str(self.emulator))}</emulator>
    <serial type='file'>
      <source path={quoteattr(str(self.serial))} append='on'/></serial>
    <memballoon model='none'/>
    {disk}{self.devices}
  </devices>
  {commandline}
</domain>
"""

    def console(self) -> str:
        try:
            return self.serial.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def turns(self) -> list[tuple[int, int]]:
        """(turn, MiB of memory the guest sees) of each line that said OK."""
        text = self.console()
        assert "GUEST-BAD" not in text, f"{self.name} lost memory:\n{text[-2000:]}"
        found = re.findall(r"GUEST-OK turn (\d+) memory (\d+) MiB wrong 0", text)
        return [(int(turn), int(mib)) for turn, mib in found]

    def wait_turns(self, count: int = 1, seconds: float = BOOT_SECONDS) -> None:
        """Waits until the guest has checked its memory `count` more times."""
        target = len(self.turns()) + count
        deadline = time.monotonic() + seconds
        while len(self.turns()) < target:
            assert time.monotonic() < deadline, (
                f"{self.name} does not get on:\n{self.console()[-2000:]}"
            )
            time.sleep(0.2)
