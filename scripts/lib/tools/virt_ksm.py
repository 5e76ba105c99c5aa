# SPDX-License-Identifier: GPL-2.0-or-later
"""Turns merging of a libvirt domain's memory on and off (scripts/virt-ksm).

Three ways, the first that will do is taken:

native       <memoryBacking><source type='ksm'/>: where libvirt knows it
             (scripts/build-libvirt)
commandline  <qemu:commandline>: any libvirt, domains without NUMA cells and
             memory modules
wrapper      <emulator> becomes scripts/qemu-ksm-emulator, which rewrites
             libvirt's command line: any libvirt, any domain

What was changed is noted in the domain's <metadata>, so that `disable` leaves
the domain as it was.  Leaves to others: the host's knobs (/sys/kernel/mm/ksm).
"""

from __future__ import annotations

import argparse
import difflib
import grp
import importlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lxml import etree

from host.exits import Failure, Lacking
from host.paths import TOP

# not by `import`: for mypy, the directory libvirt/ of this repository would be
# the module of that name
libvirt: Any = importlib.import_module("libvirt")
libvirt_qemu: Any = importlib.import_module("libvirt_qemu")

QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
NOTE = "urn:qemu-ksm:virt-ksm:1"
BACKEND = "memory-backend-ksm"
OBJECT_ID = "ksm0"
#: Where QEMU looks for the daemon of a group, and what it takes for a name.
POOLS = Path("/run/ksm-pool")
GROUP_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
WRAPPER_DIR = Path("/usr/local/libexec/qemu-ksm")
#: Where Debian's package qemu-system-ksm has that of its emulator.
PACKAGED_WRAPPERS = Path("/usr/lib/qemu-ksm/wrapper")

#: What may be given for the object, and how the native <ksm/> calls it.
TUNABLES = {
    "scope": ("zero", "vm", "group", "host"),
    "group": None,
    "max-cpu": int,
    "threads": int,
    "target-scan-time": int,
    "free-policy": ("auto", "lazy", "eager"),
    "dirty-tracking": ("auto", "log", "pagemap", "checksum"),
}
TUNABLE_HELP = {
    "scope": (None, "who may share (default: host)"),
    "group": ("NAME", "the group, with --scope group"),
    "max-cpu": ("PERCENT", "of a core, 1 to 100 for each thread"),
    "threads": ("N", "that merge, 1 to 16"),
    "target-scan-time": ("SECONDS", "for one look at all memory"),
    "free-policy": (None, "how memory that the guest gives back is released"),
    "dirty-tracking": (None, "how QEMU learns what was written"),
}

Element = Any  # lxml has no types of its own


class Refused(Failure):
    """The domain cannot be changed; the text says why and what to do."""


@dataclass
class Note:
    """What <metadata> says about what was changed."""

    method: str
    #: the emulator before, where it was changed
    emulator: str | None = None
    #: type of <source> before, where it was changed
    source: str | None = None
    #: elements made that were not there
    made: list[str] = field(default_factory=list)

    def store(self, root: Element) -> None:
        metadata = root.find("metadata")
        if metadata is None:
            metadata = etree.Element("metadata")
            # after <name>, <uuid>, <title>..., where libvirt prints it
            after = [root.find(tag) for tag in ("uuid", "name")]
            place = next(item for item in after if item is not None)
            place.addnext(metadata)
            self.made.append("metadata")
        note = etree.SubElement(metadata, f"{{{NOTE}}}ksm", nsmap={"virt-ksm": NOTE})
        for name in ("method", "emulator", "source"):
            if getattr(self, name):
                note.set(name, getattr(self, name))
        if self.made:
            note.set("made", " ".join(self.made))

    @staticmethod
    def load(root: Element) -> Note | None:
        note = root.find(f"metadata/{{{NOTE}}}ksm")
        if note is None:
            return None
        made = (note.get("made") or "").split()
        return Note(note.get("method"), note.get("emulator"), note.get("source"), made)

    @staticmethod
    def drop(root: Element) -> None:
        note = root.find(f"metadata/{{{NOTE}}}ksm")
        if note is not None:
            note.getparent().remove(note)


def memory_bytes(root: Element) -> int:
    """<memory>, which libvirt prints in KiB."""
    element = root.find("memory")
    units = {"b": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = element.get("unit", "KiB")
    if unit not in units:
        raise Refused(f"cannot read <memory unit='{unit}'>")
    return int(element.text) * units[unit]


def uses_modules(root: Element) -> bool:
    """NUMA cells or memory modules, which <qemu:commandline> cannot reach."""
    return root.find("cpu/numa") is not None or root.find("devices/memory") is not None


def refusals(root: Element) -> list[str]:
    """Why the domain's memory cannot be merged."""
    found = []
    backing = root.find("memoryBacking")

    def has(path: str) -> bool:
        return backing is not None and backing.find(path) is not None

    if has("nosharepages"):
        found.append("<nosharepages/> asks for the opposite: remove it")
    if has("hugepages"):
        found.append("<hugepages/>: pages of hugetlbfs cannot be merged")
    if has("locked"):
        found.append("<locked/>: locked memory cannot be merged")
    if has("allocation[@mode='immediate']"):
        found.append(
            "<allocation mode='immediate'/>: merging gives back what was allocated"
        )
    if root.xpath(".//@mode[.='shared'][parent::access] | .//@memAccess[.='shared']"):
        found.append("shared memory cannot be merged (access mode, memAccess)")
    if root.xpath("./devices/memory[@access='shared']"):
        found.append("a memory module with access='shared' cannot be merged")
    source = backing.find("source") if has("source") else None
    if source is not None and source.get("type") in ("file", "memfd"):
        kind = source.get("type")
        found.append(f"<source type='{kind}'/>: only anonymous memory can be merged")
    for arg in root.iter(f"{{{QEMU}}}arg"):
        if BACKEND in arg.get("value", ""):
            found.append(
                f"<qemu:commandline> has a {BACKEND} already, which virt-ksm did "
                "not put there: remove it"
            )
    if root.find("launchSecurity") is not None:
        found.append("<launchSecurity>: encrypted memory has no equals")
    return found


def warnings_for(root: Element, method: str) -> list[str]:
    """What works, but not quite as one might think."""
    found = []
    if root.xpath("./devices/hostdev[@type='pci' or @type='mdev']"):
        found.append(
            "a host device is assigned: it pins the guest's memory, and nothing "
            "is merged while it does"
        )
    if method == "wrapper" and root.find("maxMemory") is not None:
        found.append(
            "memory plugged in while the domain runs will not be merged; it will "
            "be after the domain's next start"
        )
    if method == "commandline":
        found.append(
            "a migration needs the same change on both sides: the memory's name "
            f"in the stream is {OBJECT_ID}"
        )
        found.append("after a change of <memory>, run 'virt-ksm enable' again")
    return found


def qemu_is_in(gid: int) -> bool:
    """Is libvirt's user for QEMU in the group, as far as its usual names go?"""
    for name in ("libvirt-qemu", "qemu"):
        with suppress(KeyError):
            if gid in os.getgrouplist(name, pwd.getpwnam(name).pw_gid):
                return True
    return False


def group_warnings(group: str, method: str) -> list[str]:
    """Is there a daemon on this host, and can the domain's QEMU connect?"""
    path = POOLS / f"{group}.sock"
    if not path.exists():
        return [
            f"group {group} has no daemon here ({path} is absent): systemctl "
            f"enable --now ksm-poold@{group}.socket; until then only zero pages "
            "are merged"
        ]
    if method == "native":
        return []
    status = path.stat()
    if status.st_mode & 0o002 or qemu_is_in(status.st_gid):
        return []
    try:
        group_of_socket = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group_of_socket = str(status.st_gid)
    return [
        f"the domain's QEMU connects to {path} itself: its user must be in the "
        f"socket's group, {group_of_socket} (SocketGroup= of its unit)"
    ]


def host_warnings(tunables: dict[str, Any]) -> list[str]:
    """For a domain on this host: will the kernel do its part?"""
    if tunables["scope"] not in (None, "host") or (POOLS / "host.sock").exists():
        if not os.path.exists("/dev/userfaultfd"):
            return ["merging by QEMU needs /dev/userfaultfd, which is absent"]
        return []
    try:
        run = Path("/sys/kernel/mm/ksm/run").read_text().strip()
    except OSError:
        return ["/sys/kernel/mm/ksm cannot be read: does this kernel have KSM?"]
    if run != "1":
        return [
            "nobody merges for scope host: start ksm-poold@host (systemctl enable "
            "--now ksm-poold@host.socket ksm-hostd), or, slower, the kernel's ksmd "
            "(echo 1 > /sys/kernel/mm/ksm/run), as root"
        ]
    return []


def knows_natively(connection: Any, root: Element) -> bool:
    """Does this libvirt have <source type='ksm'/> for the domain's emulator?"""
    emulator = root.findtext("devices/emulator")
    kind = root.find("os/type")
    try:
        text = connection.getDomainCapabilities(
            emulator, kind.get("arch"), kind.get("machine"), root.get("type"), 0
        )
    except libvirt.libvirtError:
        return False
    values = etree.fromstring(text).xpath(
        "./memoryBacking/enum[@name='sourceType']/value/text()"
    )
    return "ksm" in values


def run_emulator(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input='{"execute":"qmp_capabilities"}{"execute":"quit"}',
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise Lacking(f"{words[0]} cannot be run: {error}") from error


def check_emulator(path: str, tunables: dict[str, Any]) -> list[str]:
    """Has this QEMU the object, and takes it the settings?  Returns warnings."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise Lacking(f"{path} is no program, or you may not run it")
    if "QEMU emulator" not in run_emulator(path, "--version").stdout:
        raise Lacking(f"{path} is not a QEMU, or does not start")
    words = [path, "-machine", "none", "-nodefaults", "-display", "none"]
    words += ["-qmp", "stdio", "-object", object_option("check", 2 << 20, tunables)]
    done = run_emulator(*words)
    if done.returncode == 0 and '"QMP"' in done.stdout:
        return []
    said = done.stderr.strip().replace("\n", " ")
    if "qom-type" in said or "invalid object type" in said:
        raise Lacking(
            f"{path} has no {BACKEND}; name one that has with --emulator "
            "(the package qemu-system-ksm has it, and scripts/build-qemu builds it)"
        )
    if "not available with scope=host" in said:
        raise Refused(f"the emulator says: {said}")
    # the domain's QEMU may have rights that this one has not, or the reverse
    return [f"the emulator, run by you, says: {said or 'nothing, and ends'}"]


def object_option(name: str, size: int, tunables: dict[str, Any]) -> str:
    """The word after -object."""
    properties = {"size": size, **tunables}
    words = [f"{BACKEND},id={name}"]
    # a comma in a value is written twice
    words += [f"{k}={str(v).replace(',', ',,')}" for k, v in properties.items()]
    return ",".join(words)


def child(root: Element, note: Note, path: str, before: str = "") -> Element:
    """The element at path below root, made (and noted) if it is not there."""
    element = root.find(path)
    if element is None:
        element = etree.Element(path)
        following = root.find(before) if before else None
        if following is not None:
            following.addprevious(element)
        else:
            root.append(element)
        note.made.append(path.replace(f"{{{QEMU}}}", "qemu:"))
    return element


def make_native(root: Element, note: Note, tunables: dict[str, Any]) -> None:
    backing = child(root, note, "memoryBacking", before="vcpu")
    source = child(backing, note, "source")
    note.source = source.get("type")
    source.set("type", "ksm")
    if tunables:
        for ksm in backing.findall("ksm"):
            backing.remove(ksm)
        ksm = etree.SubElement(backing, "ksm")
        for name, value in tunables.items():
            ksm.set(name, str(value))


def commandline(root: Element, note: Note) -> Element:
    return child(root, note, f"{{{QEMU}}}commandline")


def make_commandline(root: Element, note: Note, tunables: dict[str, Any]) -> None:
    line = commandline(root, note)
    for value in (
        *("-object", object_option(OBJECT_ID, memory_bytes(root), tunables)),
        *("-machine", f"memory-backend={OBJECT_ID}"),
    ):
        etree.SubElement(line, f"{{{QEMU}}}arg").set("value", value)


def make_wrapper(
    root: Element, note: Note, tunables: dict[str, Any], directory: Path
) -> None:
    """Names the wrapper; install_wrapper() places it."""
    emulator = root.find("devices/emulator")
    note.emulator = note.emulator or emulator.text
    emulator.text = str(directory / Path(emulator.text).name)
    if tunables:
        inside = json.dumps(tunables, separators=(",", ":"))[1:-1]
        variable = etree.SubElement(commandline(root, note), f"{{{QEMU}}}env")
        variable.set("name", "QEMU_KSM_PROPERTIES")
        variable.set("value", inside)


def wrapper_directory(real: Path) -> Path:
    """Where the emulator's wrapper is, or will be."""
    link = PACKAGED_WRAPPERS / f"{real.name}.real"
    if link.exists() and real.exists() and link.samefile(real):
        return PACKAGED_WRAPPERS
    return WRAPPER_DIR


def install_wrapper(real: Path, directory: Path) -> None:
    """Places a wrapper for the emulator into directory."""
    if directory == PACKAGED_WRAPPERS:
        return
    wrapper = directory / real.name
    link = directory / f"{real.name}.real"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and Path(os.readlink(link)) != real:
            raise Refused(
                f"{link} is for another QEMU, {os.readlink(link)}; "
                "choose a directory of its own with --wrapper-dir"
            )
        if not link.is_symlink():
            link.symlink_to(real)
        source = TOP / "scripts/qemu-ksm-emulator"
        if not wrapper.exists() or wrapper.read_bytes() != source.read_bytes():
            # a new file has a new ctime, by which libvirt probes again
            new = wrapper.with_name(f".{wrapper.name}.new")
            shutil.copyfile(source, new)
            new.chmod(0o755)
            new.replace(wrapper)
    except OSError as error:
        raise Lacking(
            f"cannot install the emulator wrapper: {error}; run as root, or name "
            "a directory with --wrapper-dir"
        ) from None


def remove_ours(root: Element, note: Note) -> None:
    """Takes our arguments and variables out of <qemu:commandline>."""
    line = root.find(f"{{{QEMU}}}commandline")
    if line is None:
        return
    args = line.findall(f"{{{QEMU}}}arg")
    for first, second in zip(args, args[1:]):
        pair = (first.get("value"), second.get("value"))
        ours = pair == ("-machine", f"memory-backend={OBJECT_ID}") or (
            pair[0] == "-object" and pair[1].startswith(f"{BACKEND},id={OBJECT_ID},")
        )
        if ours:
            line.remove(first)
            line.remove(second)
    for variable in line.findall(f"{{{QEMU}}}env"):
        if variable.get("name") == "QEMU_KSM_PROPERTIES":
            line.remove(variable)


def disable(root: Element) -> bool:
    """Undoes what `enable` did; False if there was nothing."""
    note = Note.load(root)
    if note is None:
        return False
    remove_ours(root, note)
    if note.emulator:
        root.find("devices/emulator").text = note.emulator
    backing = root.find("memoryBacking")
    if note.method == "native" and backing is not None:
        for ksm in backing.findall("ksm"):
            backing.remove(ksm)
        source = backing.find("source")
        if source is not None and note.source:
            source.set("type", note.source)
        elif source is not None:
            backing.remove(source)
    Note.drop(root)
    # remove the elements that we made, unless they have become useful
    for name in note.made:
        element = root.find(name.replace("qemu:", f"{{{QEMU}}}"))
        if element is not None and len(element) == 0:
            root.remove(element)
    return True


def choose_method(connection: Any, root: Element, wanted: str) -> str:
    if wanted == "auto":
        if knows_natively(connection, root):
            return "native"
        return "wrapper" if uses_modules(root) else "commandline"
    if wanted == "native" and not knows_natively(connection, root):
        raise Lacking(
            "this libvirt does not know <source type='ksm'/>, or the domain's "
            f"emulator has no {BACKEND}; leave out --method"
        )
    if wanted == "commandline" and uses_modules(root):
        raise Refused(
            "<qemu:commandline> cannot reach the memory of NUMA cells and memory "
            "modules; use --method wrapper"
        )
    return wanted


def enable(connection: Any, root: Element, args: argparse.Namespace) -> str:
    """Changes the XML; returns the way that was taken."""
    disable(root)  # so that a second time brings everything up to date
    reasons = refusals(root)
    if reasons:
        raise Refused("; ".join(reasons))
    note = Note("")
    emulator = root.find("devices/emulator")
    if emulator is None or not emulator.text:
        raise Refused("it names no emulator: merging is for domains run by QEMU")
    if args.emulator:
        note.emulator = emulator.text
        emulator.text = args.emulator
    tunables = {name: args.tunables[name] for name in TUNABLES if args.tunables[name]}
    if args.local:
        args.host_warnings += check_emulator(emulator.text, tunables)
    note.method = choose_method(connection, root, args.method)
    if args.local and tunables.get("group"):
        args.host_warnings += group_warnings(tunables["group"], note.method)
    elif args.local and tunables.get("scope") in (None, "host"):
        # QEMU connects to it itself, whatever the method
        if (POOLS / "host.sock").exists():
            args.host_warnings += group_warnings("host", "commandline")
    if note.method == "native":
        make_native(root, note, tunables)
    elif note.method == "commandline":
        make_commandline(root, note, tunables)
    else:
        args.wrapped = Path(emulator.text)
        args.wrapper_dir = args.wrapper_dir or wrapper_directory(args.wrapped)
        make_wrapper(root, note, tunables, args.wrapper_dir)
    note.store(root)
    return note.method


def normalized(text: str) -> Element:
    parser = etree.XMLParser(remove_blank_text=True)
    return etree.fromstring(text.encode(), parser)


def printed(root: Element) -> list[str]:
    etree.cleanup_namespaces(root, keep_ns_prefixes=["qemu"] if uses_qemu(root) else [])
    etree.indent(root)
    return etree.tostring(root, encoding="unicode").splitlines(keepends=True)


def uses_qemu(root: Element) -> bool:
    return any(str(item.tag).startswith(f"{{{QEMU}}}") for item in root)


def with_qemu_namespace(root: Element) -> Element:
    """libvirt looks for its QEMU namespace on <domain> itself."""
    if not uses_qemu(root) or "qemu" in root.nsmap:
        return root
    new = etree.Element(root.tag, root.attrib, nsmap={**root.nsmap, "qemu": QEMU})
    new.extend(list(root))
    return new


def change(connection: Any, domain: Any, args: argparse.Namespace) -> int:
    if not domain.isPersistent():
        raise Refused(
            f"domain {domain.name()} is transient: it has no configuration to change"
        )
    flags = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE
    text = domain.XMLDesc(flags)
    root = normalized(text)
    before = printed(normalized(text))
    method = None
    if args.command == "enable":
        method = enable(connection, root, args)
    elif not disable(root):
        print(f"{domain.name()}: virt-ksm has changed nothing here")
        return 0
    root = with_qemu_namespace(root)
    after = printed(root)
    diff = list(difflib.unified_diff(before, after, "before", "after"))
    sys.stdout.writelines(line if line.endswith("\n") else line + "\n" for line in diff)
    if not diff:
        print(f"{domain.name()}: nothing to change")
    sys.stdout.flush()
    for warning in warnings_for(root, method) + args.host_warnings if method else []:
        print(f"warning: {warning}", file=sys.stderr)
    if args.dry_run:
        print("nothing was changed (--dry-run)")
        return 0
    if method == "wrapper":
        install_wrapper(args.wrapped, args.wrapper_dir)
    if diff:
        connection.defineXMLFlags("".join(after), 0)
    if diff and domain.isActive():
        print("The domain is running: the change takes effect at its next start.")
    return 0


def describe(root: Element) -> list[str]:
    """What the configuration says, and whether it is consistent."""
    note = Note.load(root)
    native = root.find("memoryBacking/source[@type='ksm']") is not None
    if note is None and not native:
        ours = f"./q:commandline/q:arg[contains(@value, '{BACKEND}')]"
        if root.xpath(ours, namespaces={"q": QEMU}):
            return ["configured: by hand (<qemu:commandline>)"]
        if os.path.lexists(f"{root.findtext('devices/emulator')}.real"):
            return ["configured: by hand (the emulator wrapper)"]
        return ["configured: no"]
    method = note.method if note else "native, by hand"
    lines = [f"configured: yes ({method})"]
    if note and note.method == "commandline":
        args = [arg.get("value") for arg in root.iter(f"{{{QEMU}}}arg")]
        want = f"size={memory_bytes(root)}"
        objects = [value for value in args if value.startswith(f"{BACKEND},")]
        if not objects or want not in objects[0].split(","):
            lines.append(
                "warning: the size does not match <memory>, and the domain will "
                "not start; run 'virt-ksm enable' again"
            )
        if uses_modules(root):
            lines.append(
                "warning: NUMA cells or memory modules have been added since, and "
                "the domain will not start; run 'virt-ksm enable' again"
            )
    return lines


def live_status(domain: Any) -> list[str]:
    """What the running QEMU says."""
    try:
        text = libvirt_qemu.qemuMonitorCommand(
            domain, '{"execute":"query-ksm-stats"}', 0
        )
        stats = json.loads(text)["return"]
    except (libvirt.libvirtError, KeyError, ValueError):
        return [f"running: with a QEMU that has no {BACKEND}"]
    count = len(stats["backends"])
    lines = [f"running: {count} object{'s' * (count != 1)} {BACKEND}"]
    for backend in stats["backends"]:
        # an older QEMU has pages only
        pages = backend.get("pages-merged", backend.get("pages-sharing", 0))
        merged = backend.get("merged-bytes", pages * 4096)
        lines.append(
            f"  {backend['id']}: scope {backend['scope']}, {backend['state']}, "
            f"{backend['size'] >> 20} MiB, {merged >> 20} MiB merged"
        )
        lines += [f"    {reason['text']}" for reason in backend["reasons"]]
    return lines


def status(domain: Any) -> int:
    flags = libvirt.VIR_DOMAIN_XML_INACTIVE if domain.isPersistent() else 0
    lines = describe(normalized(domain.XMLDesc(flags)))
    lines += live_status(domain) if domain.isActive() else ["running: no"]
    print("\n".join(lines))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="virt-ksm", description="Turns merging of a domain's memory on and off."
    )
    parser.add_argument("-c", "--connect", metavar="URI", help="libvirt's URI")
    commands = parser.add_subparsers(dest="command", required=True)
    on = commands.add_parser("enable", help="have the memory merged")
    off = commands.add_parser("disable", help="undo what enable did")
    show = commands.add_parser("status", help="say what is configured and what runs")
    for command in (on, off, show):
        command.add_argument("domain", metavar="DOMAIN", help="name or UUID")
    for command in (on, off):
        command.add_argument(
            "-n", "--dry-run", action="store_true", help="only show the change"
        )
    for name, kind in TUNABLES.items():
        metavar, text = TUNABLE_HELP[name]
        if isinstance(kind, tuple):
            on.add_argument(f"--{name}", choices=kind, help=text)
        else:
            on.add_argument(f"--{name}", type=kind or str, metavar=metavar, help=text)
    on.add_argument("--emulator", metavar="FILE", help="a QEMU that has the object")
    on.add_argument(
        "--method",
        choices=("auto", "native", "commandline", "wrapper"),
        default="auto",
        help="how (default: the first that will do)",
    )
    on.add_argument(
        "--wrapper-dir",
        type=Path,
        metavar="DIR",
        help="where the method wrapper puts its wrapper",
    )
    args = parser.parse_args()
    values = vars(args)
    args.tunables = {name: values.get(name.replace("-", "_")) for name in TUNABLES}
    group = args.tunables["group"]
    if (args.tunables["scope"] == "group") != bool(group):
        on.error("--scope group and --group NAME go together")
    if group and not GROUP_NAME.fullmatch(group):
        on.error(
            f"--group must be a name of up to 64 letters, digits, '.', '_' and "
            f"'-', without '.' in front, not '{group}'"
        )
    if args.command == "enable" and args.emulator and not args.emulator.startswith("/"):
        on.error(f"--emulator must be an absolute path, not '{args.emulator}'")
    threads = args.tunables["threads"]
    if threads is not None and not 1 <= threads <= 16:
        on.error("--threads must be between 1 and 16")
    cpu = args.tunables["max-cpu"]
    if cpu is not None and not 1 <= cpu <= 100 * (threads or 1):
        on.error(
            "--max-cpu must be between 1 and 100 (percent of one core) for each of "
            "--threads"
        )
    scan = args.tunables["target-scan-time"]
    if scan is not None and not 0 <= scan < 1 << 32:
        on.error("--target-scan-time must be a number of seconds")
    return args


def find(connection: Any, name: str) -> Any:
    try:
        return connection.lookupByName(name)
    except libvirt.libvirtError:
        return connection.lookupByUUIDString(name)


def main() -> int:
    args = parse()
    # libvirt's binding would print each error itself, before we do
    libvirt.registerErrorHandler(lambda context, error: None, None)
    try:
        try:
            connection = libvirt.open(args.connect)
        except libvirt.libvirtError as error:
            raise Failure(
                f"{error.get_error_message()}; does libvirt run here? Guests without "
                "it are shown by ksm-top"
            ) from None
        try:
            domain = find(connection, args.domain)
        except libvirt.libvirtError:
            raise Refused(
                f"no domain '{args.domain}' at {connection.getURI()}"
            ) from None
        if args.command == "status":
            return status(domain)
        # a URI without a host; what libvirt calls this one may be its name with
        # the domain, or localhost
        args.local = not urlsplit(connection.getURI()).hostname
        args.host_warnings = host_warnings(args.tunables) if args.local else []
        return change(connection, domain, args)
    except libvirt.libvirtError as error:
        raise Failure(error.get_error_message()) from error
