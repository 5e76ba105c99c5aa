# SPDX-License-Identifier: GPL-2.0-or-later
"""What is read from the command lines of QEMUs."""

from __future__ import annotations

import pytest

from top.commandline import CommandLine, parse, properties

PREFIX = "qemu-system-x86_64 -display none "


def of(text: str) -> CommandLine:
    return parse((PREFIX + text).split())


@pytest.mark.parametrize(
    ("text", "sockets"),
    [
        ("-qmp unix:/run/a,server=on,wait=off", ["/run/a"]),
        ("-qmp unix:/run/a,server,nowait", ["/run/a"]),
        ("--qmp unix:/run/a,server", ["/run/a"]),
        ("-qmp-pretty unix:path=/run/a,server=on", ["/run/a"]),
        ("-qmp unix:/run/a,,b,server=on", ["/run/a,b"]),
        ("-qmp unix:a,server=on,abstract=on", ["\0a"]),
        # QEMU connects; or it is not QMP, or not a unix socket
        ("-qmp unix:/run/a", []),
        ("-qmp unix:/run/a,server=off", []),
        ("-qmp tcp:localhost:4444,server=on", []),
        ("-qmp stdio", []),
        ("-monitor unix:/run/a,server=on", []),
        (
            "-chardev socket,id=m,path=/run/a,server=on,wait=off "
            "-mon chardev=m,mode=control",
            ["/run/a"],
        ),
        ("-chardev socket,id=m,path=/a,server=on -mon m,mode=control", ["/a"]),
        ("-mon m,mode=control -chardev socket,path=/a,server=on,id=m", ["/a"]),
        ("-chardev socket,id=m,path=/a,server=on -qmp chardev:m", ["/a"]),
        ("-chardev socket,id=m,path=/a,server=on -mon m,mode=readline", []),
        ("-chardev socket,id=m,path=/a,server=on -mon chardev=m", []),
        ("-chardev socket,id=m,path=/a,server=on -serial chardev:m", []),
        (
            "-qmp unix:/a,server -chardev socket,id=m,path=/b,server "
            "-mon m,mode=control",
            ["/b", "/a"],
        ),
    ],
)
def test_sockets(text: str, sockets: list[str]) -> None:
    assert sorted(of(text).sockets) == sorted(sockets)


def test_libvirt() -> None:
    line = of(
        "-name guest=deb13,debug-threads=on -uuid 11-22 "
        "-chardev socket,id=charmonitor,fd=22,server=on,wait=off "
        "-mon chardev=charmonitor,id=monitor,mode=control"
    )
    assert (line.name, line.uuid, line.sockets, line.given) == (
        "deb13",
        "11-22",
        [],
        True,
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("-name a", "a"),
        ("-name a,debug-threads=on", "a"),
        ("-name process=x,guest=a,,b", "a,b"),
        ("-name process=x", None),
        ("", None),
        # the last word is an option without its value
        ("-m 64 -name", None),
    ],
)
def test_name(text: str, name: str | None) -> None:
    assert of(text).name in (name, name or "")


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        (
            "memory-backend-ksm,id=r,size=1G,scope=group,group=a",
            ["/run/ksm-pool/a.sock"],
        ),
        ("memory-backend-ksm,id=r,group=a,group-socket=/tmp/x", ["/tmp/x"]),
        ('{"qom-type":"memory-backend-ksm","group":"a"}', ["/run/ksm-pool/a.sock"]),
        ("memory-backend-ksm,id=r,group-socket=/tmp/x", ["/tmp/x"]),
        ("memory-backend-ksm,id=r,size=1G", []),
        ("memory-backend-ram,id=r,group=a", []),
        ("{broken", []),
        ("[1]", []),
        ("{}", []),
    ],
)
def test_pools(text: str, pools: list[str]) -> None:
    assert of(f"-object {text} -object {text}").pools == pools


def test_no_words() -> None:
    """A process can have none."""
    assert parse([]) == CommandLine()


def test_probe() -> None:
    """libvirt asks a QEMU what it can do: no guest."""
    assert of("-machine none,accel=kvm:tcg").probe
    assert of("-M none").probe
    assert not of("-machine q35,accel=kvm").probe


def test_properties() -> None:
    assert properties("a,b=c=d,e", "first") == {"first": "a", "b": "c=d", "e": "on"}
    assert properties("x=1,y=2,,3,,", "first") == {"x": "1", "y": "2,3,"}
