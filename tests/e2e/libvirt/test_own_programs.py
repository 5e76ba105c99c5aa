# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt's own test programs, with our lines and our cases in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lv_host
import pytest
from lv_guest import QEMU, TOP
from lxml import etree

BUILD = TOP / "build" / os.environ.get("LIBVIRT_BUILD", "libvirt")
SOURCE = BUILD.with_name(f"{BUILD.name}-src")


def run(program: str, **variables: str) -> str:
    done = subprocess.run(
        [BUILD / "tests" / program],
        cwd=BUILD / "tests",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
        env={**os.environ, "LC_ALL": "C", **variables},
    )
    assert done.returncode == 0, f"{program}:\n{done.stdout[-3000:]}"
    return done.stdout


def cases(output: str) -> set[str]:
    """Names of the cases with "ksm" that a verbose run says are OK."""
    return {
        line.split("...")[0].split(")", 1)[1].strip()
        for line in output.splitlines()
        if "ksm" in line and line.rstrip().endswith("OK")
    }


#: libvirt 11.3 has the first two in one program
PROGRAMS = ["qemuxml2argvtest", "qemuxml2xmltest"]
if (BUILD / "tests" / "qemuxmlconftest").exists():
    PROGRAMS = ["qemuxmlconftest"]
PROGRAMS += [
    "virschematest",  # was domainschematest before 9.0
    "qemucapabilitiestest",
    "qemucaps2xmltest",
    "domaincapstest",
    "qemuhotplugtest",
    "qemumemlocktest",
    "genericxml2xmltest",
]

#: How many cases of ours there are, in 9.0.
OURS = {"qemuxml2argvtest": 14, "qemuxml2xmltest": 4, "virschematest": 14}


@pytest.mark.parametrize("program", PROGRAMS)
def test_passes(program: str) -> None:
    found = cases(run(program, VIR_TEST_VERBOSE="1"))
    if "qemuxml2argvtest" in PROGRAMS:
        assert len(found) >= OURS.get(program, 0), sorted(found)


@pytest.fixture
def our_replies() -> Iterator[Path]:
    """What our QEMU answers when libvirt probes it, as its test wants it.

    Here for one test only: the newest QEMU in that directory is what all the
    other test programs take for the latest.
    """
    data = SOURCE / "tests" / "qemucapabilitiesdata"
    # libvirt 9.0 has a dot there, 11.3 an underscore
    (mark, *_) = {path.name[-15] for path in data.glob("*x86_64.replies")}
    replies = data / f"caps_10.0.0{mark}x86_64.replies"
    if replies.exists():
        pytest.skip("this libvirt has replies of QEMU 10.0 itself")
    probe = [BUILD / "tests" / "qemucapsprobe", QEMU]
    try:
        replies.write_bytes(
            subprocess.run(probe, capture_output=True, check=True, timeout=120).stdout
        )
        yield replies
    finally:
        replies.unlink(missing_ok=True)
        replies.with_suffix(".xml").unlink(missing_ok=True)


def test_the_capability_is_found_in_our_qemu(our_replies: Path) -> None:
    xml = our_replies.with_suffix(".xml")
    subprocess.run(
        [BUILD / "tests" / "qemucapabilitiestest"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, "VIR_TEST_REGENERATE_OUTPUT": "1"},
    )
    flags = etree.parse(str(xml)).xpath("/qemuCaps/flag/@name")
    assert "memory-backend-ksm" in flags
    assert "memory-backend-ksm.group-fd" in flags
    assert "memory-backend-memfd" in flags
    run("qemucapabilitiestest")


def test_the_anchors_of_the_other_release() -> None:
    """libvirt 11.3 can be grafted, and the graft be taken out again."""
    lv_host.ensure_packages()
    build = [TOP / "scripts" / "build-libvirt", "--release", "trixie", "--graft-only"]
    subprocess.run(build, check=True, stdin=subprocess.DEVNULL, timeout=600)
    graft = [TOP / "scripts" / "graft", "--table", TOP / "libvirt" / "graft.toml"]
    tree = TOP / "build" / "libvirt-trixie-src"
    done = subprocess.run(
        [*graft, "--check", tree], capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip().endswith(": grafted")
