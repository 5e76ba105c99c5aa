# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt with our insertions: <memoryBacking><source type='ksm'/>.

Two libvirtd of scripts/build-libvirt, run by hand on one host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import lv_host
import pytest
from host import ksmsys
from lv_guest import Guest
from lv_host import Daemon
from lxml import etree


KSM = "<source type='ksm'/>"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Daemon]]:
    lv_host.ensure_packages()
    with lv_host.daemons(lv_host.patched(), 2) as running:
        yield running


@pytest.fixture
def host(hosts: list[Daemon]) -> Iterator[Daemon]:
    yield hosts[0]
    for daemon in hosts:
        daemon.undefine_all()


def write(path: Path, guest: Guest) -> Path:
    path.write_text(guest.xml())
    return path


def objects(host: Daemon, xml: Path) -> list[dict[str, object]]:
    """The -object words that libvirt would give QEMU."""
    argv = host.virsh("domxml-to-native", "qemu-argv", "--xml", xml)
    found = [json.loads(text) for text in re.findall(r"-object '(\{.*?\})'", argv)]
    return [item for item in found if item["qom-type"].startswith("memory-backend")]


def test_domcapabilities(host: Daemon) -> None:
    out = host.virsh("domcapabilities", "--emulatorbin", Guest("x", Path()).emulator)
    tree = etree.fromstring(out.encode())
    values = tree.xpath("./memoryBacking/enum[@name='sourceType']/value/text()")
    assert set(values) == {"anonymous", "file", "memfd", "ksm"}


def test_define_and_dumpxml_round_trip(host: Daemon, tmp_path: Path) -> None:
    tunables = {
        "scope": "group",
        "group": "tenant_7.blue-green",
        "max-cpu": "125",
        "threads": "2",
        "target-scan-time": "200",
        "free-policy": "lazy",
        "dirty-tracking": "pagemap",
    }
    words = " ".join(f'{k}="{v}"' for k, v in tunables.items())
    guest = Guest("ksm", tmp_path / "serial", backing=f"{KSM}<ksm {words}/>")
    host.virsh("define", "--validate", write(tmp_path / "a.xml", guest))
    first = host.virsh("dumpxml", "--inactive", "ksm")
    backing = etree.fromstring(first.encode()).find("memoryBacking")
    assert backing.find("source").get("type") == "ksm"
    assert dict(backing.find("ksm").attrib) == tunables
    (tmp_path / "b.xml").write_text(first)
    host.virsh("define", "--validate", tmp_path / "b.xml")
    assert host.virsh("dumpxml", "--inactive", "ksm") == first
    (backend,) = objects(host, tmp_path / "b.xml")
    expected = {**tunables, "max-cpu": 125, "threads": 2, "target-scan-time": 200}
    expected |= {"qom-type": "memory-backend-ksm", "id": "pc.ram"}
    assert expected.items() <= backend.items()


def test_without_tunables_none_are_set(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=f"{KSM}<ksm/>")
    (backend,) = objects(host, write(tmp_path / "a.xml", guest))
    size = guest.memory_mib << 20
    assert backend == {
        "qom-type": "memory-backend-ksm",
        "id": "pc.ram",
        "size": size,
    }
    guest.backing = ""
    (backend,) = objects(host, write(tmp_path / "a.xml", guest))
    assert backend["qom-type"] == "memory-backend-ram"


def test_private_access_stays_mergeable(host: Daemon, tmp_path: Path) -> None:
    """For other sources <access/> chooses a file."""
    guest = Guest("ksm", tmp_path / "s", backing=f"{KSM}<access mode='private'/>")
    (backend,) = objects(host, write(tmp_path / "a.xml", guest))
    assert backend["qom-type"] == "memory-backend-ksm"
    assert "share" not in backend


CELL = "<cpu><numa><cell id='0' cpus='0' memory='128' unit='MiB'{}/></numa></cpu>"
DIMM = """<memory model='dimm'{}><source><pagesize unit='KiB'>{}</pagesize></source>
  <target><size unit='MiB'>128</size><node>0</node></target></memory>"""
SLOTS = "<maxMemory slots='4' unit='MiB'>1024</maxMemory>"

REFUSED = {
    "nosharepages": ({"backing": KSM + "<nosharepages/>"}, "asks for the opposite"),
    "hugepages": (
        {"backing": KSM + "<hugepages/>"},
        "<hugepages/> is not allowed with memory source 'ksm'",
    ),
    "locked": (
        {"backing": KSM + "<locked/>"},
        "<locked/> is not allowed with memory source 'ksm'",
    ),
    "allocation": (
        {"backing": KSM + "<allocation mode='immediate'/>"},
        "<allocation mode='immediate'/> is not allowed with memory source 'ksm'",
    ),
    "shared": (
        {"backing": KSM + "<access mode='shared'/>"},
        "shared memory is not allowed with memory source 'ksm': "
        "only private memory can be merged",
    ),
    "shared-cell": (
        {"backing": KSM, "cpu": CELL.format(" memAccess='shared'")},
        "a NUMA cell with shared memory is not allowed",
    ),
    "shared-dimm": (
        {
            "backing": KSM,
            "extra": SLOTS,
            "cpu": CELL.format(""),
            "memory_mib": 256,
            "devices": DIMM.format(" access='shared'", 4),
        },
        "a memory device with shared memory is not allowed",
    ),
    "tunables-without-source": (
        {"backing": "<ksm scope='vm'/>"},
        "memoryBacking/ksm needs <source type='ksm'/>",
    ),
    "tunables-beside-memfd": (
        {"backing": "<source type='memfd'/><ksm scope='vm'/>"},
        "memoryBacking/ksm needs <source type='ksm'/>",
    ),
    "unknown-source": (
        {"backing": "<source type='ksm2'/>"},
        "unknown memoryBacking/source/type 'ksm2'",
    ),
    "group-without-name": (
        {"backing": KSM + "<ksm scope='group'/>"},
        "needs the attribute 'group'",
    ),
    "empty-group": (
        {"backing": KSM + "<ksm scope='group' group=''/>"},
        "needs the attribute 'group'",
    ),
    "group-path": (
        {"backing": KSM + "<ksm scope='group' group='a/b'/>"},
        "must be a name of up to 64 letters",
    ),
    "group-hidden": (
        {"backing": KSM + "<ksm scope='group' group='.a'/>"},
        "must be a name of up to 64 letters",
    ),
    "group-long": (
        {"backing": KSM + f"<ksm scope='group' group='{'a' * 65}'/>"},
        "must be a name of up to 64 letters",
    ),
    "name-without-group": (
        {"backing": KSM + "<ksm scope='vm' group='a'/>"},
        "needs scope='group'",
    ),
    "max-cpu-0": (
        {"backing": KSM + "<ksm max-cpu='0'/>"},
        "Invalid value for attribute 'max-cpu'",
    ),
    "max-cpu-101": (
        {"backing": KSM + "<ksm max-cpu='101'/>"},
        "must be between 1 and 100",
    ),
    "max-cpu-of-two": (
        {"backing": KSM + "<ksm max-cpu='201' threads='2'/>"},
        "for each of its 'threads'",
    ),
    "threads-0": (
        {"backing": KSM + "<ksm threads='0'/>"},
        "Invalid value for attribute 'threads'",
    ),
    "threads-17": (
        {"backing": KSM + "<ksm threads='17'/>"},
        "must be between 1 and 16",
    ),
    "max-cpu-text": (
        {"backing": KSM + "<ksm max-cpu='much'/>"},
        "Invalid value for attribute 'max-cpu'",
    ),
    "scope": (
        {"backing": KSM + "<ksm scope='world'/>"},
        "Invalid value for attribute 'scope'",
    ),
    "scope-default": (
        {"backing": KSM + "<ksm scope='default'/>"},
        "Invalid value for attribute 'scope'",
    ),
    "target-scan-time": (
        {"backing": KSM + "<ksm target-scan-time='-1'/>"},
        "Invalid value for attribute 'target-scan-time'",
    ),
    "free-policy": (
        {"backing": KSM + "<ksm free-policy='never'/>"},
        "Invalid value for attribute 'free-policy'",
    ),
    "dirty-tracking": (
        {"backing": KSM + "<ksm dirty-tracking='guess'/>"},
        "Invalid value for attribute 'dirty-tracking'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(host: Daemon, tmp_path: Path, what: str) -> None:
    fields, message = REFUSED[what]
    guest = Guest("ksm", tmp_path / "serial", **fields)  # type: ignore[arg-type]
    assert message in host.refused("define", write(tmp_path / "a.xml", guest))


@pytest.mark.parametrize(
    "element",
    [
        "<ksm scope='world'/>",
        "<ksm scope='group' group='a/b'/>",
        "<ksm scope='group' group='.a'/>",
        f"<ksm scope='group' group='{'a' * 65}'/>",
        "<ksm max-cpu='1601'/>",
        "<ksm threads='17'/>",
        "<ksm speed='1'/>",
        "<ksm>1</ksm>",
        "<ksm/><ksm/>",
    ],
)
def test_the_schema_refuses(host: Daemon, tmp_path: Path, element: str) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM + element)
    text = host.refused("define", "--validate", write(tmp_path / "a.xml", guest))
    assert "XML document failed to validate against schema" in text


def test_a_dimm_of_huge_pages_is_refused(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM, memory_mib=256)
    guest.extra, guest.cpu = SLOTS, CELL.format("")
    guest.devices = DIMM.format("", 2048)
    text = host.refused("create", write(tmp_path / "a.xml", guest))
    assert "memory source 'ksm'" in text or "hugetlbfs" in text


@pytest.mark.skipif(
    ksmsys.why_not_controllable() is not None,
    reason=str(ksmsys.why_not_controllable()),
)
def test_two_guests_merge(host: Daemon, tmp_path: Path) -> None:
    guests = [
        Guest(f"ksm{i}", tmp_path / f"serial{i}", backing=KSM, seed=i) for i in (1, 2)
    ]
    for guest in guests:
        host.virsh("define", write(tmp_path / "a.xml", guest))
        host.virsh("start", guest.name)
    for guest in guests:
        guest.wait_turns(1)
    lv_host.check_merging(host, guests)


def test_domstats(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM)
    host.virsh("create", write(tmp_path / "a.xml", guest))
    guest.wait_turns(1)
    (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
    stats = host.domstats("ksm", "--memory")
    assert stats["memory.ksm.backend.count"] == "1"
    assert stats["memory.ksm.backend.0.id"] == "pc.ram"
    assert stats["memory.ksm.backend.0.scope"] == "host"
    assert stats["memory.ksm.backend.0.state"] == backend["state"]
    kinds = [reason["kind"] for reason in backend["reasons"]]
    assert stats.get("memory.ksm.backend.0.reasons", "") == ",".join(kinds)
    assert stats["memory.ksm.backend.0.size"] == str(128 << 20)
    assert stats["memory.ksm.size"] == str(128 << 20)
    assert int(stats["memory.ksm.resident"]) > guest.common_mib << 20
    assert "memory.ksm.pages_merged" in stats
    # and with all the other statistics, and for the domain at rest
    assert "memory.ksm.size" in host.domstats("ksm")
    host.virsh("destroy", "ksm")


def test_the_tunables_reach_qemu(host: Daemon, tmp_path: Path) -> None:
    ksm = "<ksm scope='vm' max-cpu='140' threads='2' target-scan-time='60'"
    ksm += " free-policy='lazy'/>"
    guest = Guest("ksm", tmp_path / "serial", backing=KSM + ksm)
    host.virsh("create", write(tmp_path / "a.xml", guest))
    guest.wait_turns(1)
    for name, value in {
        "scope": "vm",
        "max-cpu": 140,
        "threads": 2,
        "target-scan-time": 60,
        "free-policy": "lazy",
    }.items():
        path = "/objects/pc.ram"
        assert host.qmp("ksm", "qom-get", path=path, property=name) == value
    stats = host.domstats("ksm", "--memory")
    assert stats["memory.ksm.backend.0.scope"] == "vm"


def test_figures_of_the_engine_are_not_added_up(host: Daemon, tmp_path: Path) -> None:
    """Both backends tell what the one engine of the process has done."""
    backing = KSM + "<ksm scope='vm'/>"
    guest = Guest("ksm", tmp_path / "serial", backing=backing, memory_mib=256)
    guest.extra = SLOTS
    guest.cpu = CELL.format("")
    guest.devices = DIMM.format("", 4)
    host.virsh("create", write(tmp_path / "a.xml", guest))
    guest.wait_turns(2)
    stats = host.domstats("ksm", "--memory")
    assert stats["memory.ksm.backend.count"] == "2"
    assert stats["memory.ksm.size"] == str(256 << 20)
    for name in ("pages_scanned", "scan_time"):
        each = [int(stats[f"memory.ksm.backend.{i}.{name}"]) for i in range(2)]
        total = int(stats[f"memory.ksm.{name}"])
        assert 0 < max(each) == total, (name, each, total)


def test_plain_domains_have_no_ksm_stats(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("plain", tmp_path / "serial")
    host.virsh("create", "--paused", write(tmp_path / "a.xml", guest))
    stats = host.domstats("plain")
    assert "balloon.current" in stats
    assert not [name for name in stats if "ksm" in name]


def test_save_restore_and_managed_save(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM)
    host.virsh("define", write(tmp_path / "a.xml", guest))
    host.virsh("start", "ksm")
    guest.wait_turns(1)
    host.virsh("save", "ksm", tmp_path / "state")
    # a guest saved with merged memory may go on without, and back
    plain = tmp_path / "plain.xml"
    plain.write_text(
        host.virsh("save-image-dumpxml", tmp_path / "state").replace(
            "'ksm'/>", "'anonymous'/>"
        )
    )
    assert "anonymous" in plain.read_text()
    host.virsh("restore", "--xml", plain, tmp_path / "state")
    guest.wait_turns(1)
    assert host.qmp("ksm", "query-ksm-stats")["backends"] == []
    host.virsh("destroy", "ksm")

    host.virsh("start", "ksm")
    guest.wait_turns(1)
    host.virsh("managedsave", "ksm")
    host.virsh("start", "ksm")
    guest.wait_turns(1)
    (backend,) = host.qmp("ksm", "query-ksm-stats")["backends"]
    assert backend["resident"] > guest.common_mib << 20


def test_migration_between_ksm_and_anonymous(
    host: Daemon, hosts: list[Daemon], tmp_path: Path
) -> None:
    there = hosts[1]
    guest = Guest("ksm", tmp_path / "serial", backing=KSM)
    host.virsh("create", write(tmp_path / "a.xml", guest))
    guest.wait_turns(1)
    for source, target, kind, backends in (
        (host, there, "anonymous", 0),
        (there, host, "ksm", 1),
        (host, there, "ksm", 1),
    ):
        xml = tmp_path / "target.xml"
        text = source.virsh("dumpxml", "--migratable", "ksm")
        xml.write_text(re.sub(r"(?<=<source type=')\w+(?='/>)", kind, text, count=1))
        assert f"<source type='{kind}'/>" in xml.read_text()
        source.virsh(
            *("migrate", "--live", "ksm", target.uri, "--xml", xml),
            *("--migrateuri", "tcp://127.0.0.1"),
        )
        guest.wait_turns(2)
        assert len(target.qmp("ksm", "query-ksm-stats")["backends"]) == backends
        assert "ksm" not in source.virsh("list", "--name").split()


def test_migration_to_a_file_is_still_refused(
    host: Daemon, hosts: list[Daemon], tmp_path: Path
) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM)
    host.virsh("create", "--paused", write(tmp_path / "a.xml", guest))
    xml = tmp_path / "target.xml"
    text = host.virsh("dumpxml", "--migratable", "ksm")
    xml.write_text(text.replace(KSM, "<source type='memfd'/>"))
    text = host.refused(
        *("migrate", "ksm", hosts[1].uri, "--xml", xml),
        *("--migrateuri", "tcp://127.0.0.1"),
    )
    assert "Target memoryBacking source 'memfd' doesn't match" in text


def test_numa_cells_and_dimms(host: Daemon, tmp_path: Path) -> None:
    guest = Guest("ksm", tmp_path / "serial", backing=KSM, memory_mib=256)
    guest.extra = SLOTS
    guest.cpu = CELL.format("")
    guest.devices = DIMM.format("", 4)
    host.virsh("create", write(tmp_path / "a.xml", guest))
    guest.wait_turns(1)
    before = guest.turns()[-1][1]
    backends = host.qmp("ksm", "query-ksm-stats")["backends"]
    assert {b["id"] for b in backends} == {"ram-node0", "memdimm0"}
    assert all(b["mergeable"] for b in backends)

    dimm = tmp_path / "dimm.xml"
    dimm.write_text(DIMM.format("", 4))
    host.virsh("attach-device", "ksm", dimm, "--live")
    backends = host.qmp("ksm", "query-ksm-stats")["backends"]
    assert {b["id"] for b in backends} == {"ram-node0", "memdimm0", "memdimm1"}
    assert all(b["mergeable"] for b in backends)
    lv_host.wait_for(
        "hotplugged memory in the guest",
        60,
        lambda: guest.turns()[-1][1] >= before + 100,
    )
    stats = host.domstats("ksm", "--memory")
    assert stats["memory.ksm.backend.count"] == "3"
    assert stats["memory.ksm.size"] == str(384 << 20)

    dimm.write_text(DIMM.format("", 2048))
    text = host.refused("attach-device", "ksm", dimm, "--live")
    assert "memory source 'ksm'" in text or "hugetlbfs" in text
    dimm.write_text(DIMM.format(" access='shared'", 4))
    text = host.refused("attach-device", "ksm", dimm, "--live")
    assert "a memory device with shared memory is not allowed" in text
