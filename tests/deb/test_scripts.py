# SPDX-License-Identifier: GPL-2.0-or-later
"""What can be tried of the packages without building them: scripts that others run,
with other programs in the place of those that they call; lists that must agree.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from host.paths import TOP

DEBIAN = TOP / "debian"
WRAPPER = TOP / "scripts/qemu-ksm-emulator"


def run(*words: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Finds programs in path only."""
    return subprocess.run(
        words,
        env={"PATH": str(path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_wrapper_runs_nothing_but_qemu(tmp_path: Path) -> None:
    """AppArmor lets libvirt's guests execute little else."""
    program(tmp_path / "real/qemu", 'printf "%s\\n" "$@"')
    wrapper = tmp_path / "qemu"
    wrapper.symlink_to(WRAPPER)
    empty = tmp_path / "empty"
    empty.mkdir()
    for _ in ("absent", "dangling"):
        done = run(wrapper, path=empty)
        assert done.returncode == 3
        assert f"{wrapper}.real is not there" in done.stderr
        assert done.stderr.count("\n") == 1
        (tmp_path / "qemu.real").unlink(missing_ok=True)
        (tmp_path / "qemu.real").symlink_to(tmp_path / "nowhere")
    (tmp_path / "qemu.real").unlink()
    (tmp_path / "qemu.real").symlink_to("real/qemu")
    ram = '{"qom-type":"memory-backend-ram","id":"ram0"}'
    done = run(wrapper, "-object", ram, "a b", path=empty)
    assert done.stdout.splitlines() == [
        "-object",
        ram.replace("-ram", "-ksm", 1),
        "a b",
    ]
    assert not done.stderr


@dataclass
class Scripts:
    """Maintainer scripts of ksm-poold, in a host where systemd runs."""

    root: Path

    def __post_init__(self) -> None:
        (self.root / "run/systemd/system").mkdir(parents=True)
        for name in ("systemctl", "deb-systemd-invoke"):
            self.answer(name, f'echo "{name} $*" >>"{self.root}/calls"')
        self.answer("ksm-poold", "echo 6")
        for name in ("cat", "rm", "grep"):
            (self.root / "bin" / name).symlink_to(f"/bin/{name}")

    def answer(self, name: str, text: str) -> None:
        program(self.root / "bin" / name, text)

    def enable(self, *links: str) -> None:
        for name in links:
            link = self.root / "etc/systemd/system" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to("/nowhere")

    def call(self, kind: str, *words: str) -> str:
        text = (DEBIAN / f"ksm-poold.{kind}").read_text()
        text = re.sub(r"(?<![\w/])/(run|etc)/", rf"{self.root}/\1/", text)
        done = run("/bin/sh", "-c", text, kind, *words, path=self.root / "bin")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def calls(self) -> list[str]:
        """What was done by the scripts since the last time."""
        path = self.root / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        assert not (self.root / "run/ksm-poold.before").exists()
        return [line.removeprefix("deb-systemd-invoke ") for line in found
                if line != "systemctl daemon-reload"]  # fmt: skip


def test_what_was_enabled_is_started_again(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    scripts.call("preinst", "install")
    scripts.call("postinst", "configure", "")
    assert not scripts.calls()
    scripts.call("prerm", "remove")
    (stop,) = scripts.calls()
    assert stop.startswith("stop ksm-poold@*.socket ")
    scripts.enable(
        "sockets.target.wants/ksm-poold@a.socket", "multi-user.target.wants/ksm-hostd.service"
    )  # fmt: skip
    scripts.call("preinst", "install", "1")
    scripts.call("postinst", "configure", "1")
    assert scripts.calls() == ["start ksm-poold@a.socket", "start ksm-hostd.service"]


def test_what_is_stopped_stays_so_in_an_upgrade(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    scripts.enable("sockets.target.wants/ksm-poold@a.socket")
    scripts.call("preinst", "upgrade", "1")
    scripts.call("postinst", "configure", "1")
    assert scripts.calls() == [
        "reload ksm-poold@*.service",
        "try-restart ksm-hostd.service",
    ]


def test_hostd_that_has_stepped_back_is_left_alone(tmp_path: Path) -> None:
    """As its report.c prints it."""
    scripts = Scripts(tmp_path)
    for state in ("rests", "passive"):
        scripts.answer("ksm-hostd", f'printf "%-12s %s\\n" state {state} why passive')
        scripts.call("preinst", "upgrade", "1")
        said = scripts.call("postinst", "configure", "1")
        restarted = "try-restart ksm-hostd.service" in scripts.calls()
        assert restarted == (state != "passive") == (not said)


def test_daemons_are_not_reloaded_across_versions_of_the_image(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    for old in ("exit 2", "echo 5", "echo 6"):
        scripts.answer("ksm-poold", old)
        scripts.call("preinst", "upgrade", "1")
        scripts.answer("ksm-poold", "echo 6")
        said = scripts.call("postinst", "configure", "1")
        reloaded = "reload ksm-poold@*.service" in scripts.calls()
        assert reloaded == (old == "echo 6") == ("systemctl restart" not in said)
    # dpkg-reconfigure
    scripts.call("postinst", "configure", "1")
    assert "reload ksm-poold@*.service" in scripts.calls()


def test_symbols_are_those_of_the_map() -> None:
    symbols = (DEBIAN / "libksm1.symbols").read_text()
    versions = (TOP / "subprojects/libksm/libksm.map").read_text()
    listed = re.findall(r"^ (ksm_\w+)@LIBKSM_1 ", symbols, re.MULTILINE)
    assert listed == re.findall(r"^    (ksm_\w+);", versions, re.MULTILINE)


def test_needrestart_leaves_daemons_alone() -> None:
    """As its own configuration reads ours."""
    script = """
        eval do { local(@ARGV, $/) = shift; <> };
        die $@ if $@;
        my ($re) = keys %{$nrconf{override_rc}};
        die unless $nrconf{override_rc}{$re} eq "0";
        print grep { !/$re/ } @ARGV;
    """
    units = ("ksm-hostd.service", "ksm-poold@tenant-a.service")
    done = run("/usr/bin/perl", "-we", script, DEBIAN / "needrestart/ksm-poold.conf",
               *units, path=Path("/bin"))  # fmt: skip
    assert (done.stdout, done.stderr) == (units[0], "")
