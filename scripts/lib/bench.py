# SPDX-License-Identifier: GPL-2.0-or-later
"""Benches of libksm, each beside what it is held against (scripts/bench).

A bench is a function from a `Session` to its metrics.  The measuring is done
by C workers (tests/bench/), one process per run; here runs are combined,
rights on the machine are used (KSM's knobs by KsmKnobs, memory cgroups), and
results are shown: a table, JSON, plots.  Runs that are compared take turns,
and medians are given.  Every ratio is > 1 where libksm is better.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import ksmsys

TOP = Path(__file__).resolve().parents[2]
BUILD = TOP / "build" / "bench"
EXIT_LACKING = 3

Metrics = dict[str, float]


class BenchError(RuntimeError):
    """A bench could not be run; the text says why."""


class MemoryCgroup:
    """A memory cgroup below this process's own, version 1 or 2."""

    def __init__(self) -> None:
        self.version, base = self._base()
        self.path = base / f"qemu-ksm-bench-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise BenchError(f"no memory cgroup can be made: {error}") from error
        if not self._limit_file().exists():
            self.path.rmdir()
            raise BenchError(
                f"{base} does not hand the memory controller to its children"
            )

    @staticmethod
    def _base() -> tuple[int, Path]:
        own: dict[str, str] = {}
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                own[controller] = path.lstrip("/")
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, options = line.split()[:4]
            if kind == "cgroup" and "memory" in options.split(","):
                return 1, Path(mount) / own.get("memory", "")
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, _ = line.split()[:4]
            if kind == "cgroup2":
                base = Path(mount) / own.get("", "")
                # a group with processes cannot have children with limits,
                # the root excepted
                for group in (base, base.parent, Path(mount)):
                    with contextlib.suppress(OSError):
                        control = group / "cgroup.subtree_control"
                        control.write_text("+memory")
                        return 2, group
        raise BenchError("no memory controller of cgroups can be used here")

    def _limit_file(self) -> Path:
        v1, v2 = "memory.limit_in_bytes", "memory.max"
        return self.path / (v1 if self.version == 1 else v2)

    def limit(self, size: int) -> None:
        self._limit_file().write_text(str(size))

    def join(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def reclaim(self, size: int) -> None:
        """Has the kernel reclaim what it can, up to `size` bytes."""
        if self.version == 1:
            (self.path / "memory.force_empty").write_text("0")
            return
        # EAGAIN: less than that could be reclaimed
        with contextlib.suppress(BlockingIOError):
            (self.path / "memory.reclaim").write_text(str(size))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


class Session:
    """What a bench works with: sizes, workers, the machine's knobs."""

    def __init__(self, quick: bool, images: list[Path], progress: Progress) -> None:
        self.quick = quick
        self.images = images
        self.progress = progress
        self.task = progress.add_task("", total=None)
        self.notes: list[str] = []
        self.foreign_mib = 0
        self._knobs: ksmsys.KsmKnobs | None = None
        self._cgroup: MemoryCgroup | None = None
        self._ksmd = ksmsys.ksmd_pid()

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def note(self, text: str) -> None:
        head = text[:8]
        self.notes = [note for note in self.notes if note[:8] != head] + [text]

    @contextlib.contextmanager
    def ksmd(self, smart_scan: int = 1) -> Iterator[bool]:
        """ksmd at full speed, as in 2009, for the workers' "ksmd start"."""
        try:
            with ksmsys.KsmKnobs() as knobs:
                knobs.unmerge_all()
                knobs.set(pages_to_scan=99999, sleep_millisecs=0)
                for name, value in (
                    ("smart_scan", smart_scan),
                    ("use_zero_pages", 0),
                    ("advisor_mode", "none"),
                ):
                    if ksmsys.read(name) is not None:
                        knobs.set(**{name: value})
                self._wait_alone()
                self._knobs = knobs
                try:
                    yield True
                finally:
                    self._knobs = None
                    self._note_foreign()
                    knobs.unmerge_all()
        except ksmsys.KsmUnavailable as error:
            self.note(f"without ksmd's side: {error}")
            yield False

    def _wait_alone(self) -> None:
        """ksmd scans every process that is willing: wait for those to end."""
        end = time.monotonic() + (0 if self.quick else 120)
        while (others := mergeable_processes()) and time.monotonic() < end:
            self.say(f"waiting for {len(others)} other mergeable processes to end")
            time.sleep(1)

    def _note_foreign(self) -> None:
        scanned = sum(mergeable_processes().values())
        if scanned >> 8:
            self.foreign_mib = max(self.foreign_mib, scanned >> 8)
            self.note(
                f"up to {self.foreign_mib} MiB of other processes were scanned by "
                "ksmd meanwhile: its figures are worse than they should be, except "
                "where they are per page scanned"
            )

    @contextlib.contextmanager
    def cgroup(self, limit: int) -> Iterator[MemoryCgroup]:
        self._cgroup = MemoryCgroup()
        try:
            if limit:
                self._cgroup.limit(limit)
            yield self._cgroup
        finally:
            self._cgroup.close()
            self._cgroup = None

    def worker(self, name: str, **args: object) -> Metrics:
        """Runs a worker; returns what it measured."""
        return self.worker_words(name, *(f"{k}={v}" for k, v in args.items()))

    def worker_words(self, name: str, *words: str) -> Metrics:
        command = [str(BUILD / "tests" / "bench" / f"bench-{name}"), *words]
        shown = " ".join([name, *words])
        self.say(shown)
        metrics: Metrics = {}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdin and process.stdout
            try:
                for line in process.stdout:
                    verb, _, rest = line.strip().partition(" ")
                    if verb == "metric":
                        key, value = rest.split()
                        metrics[key] = float(value)
                    elif verb == "progress":
                        self.say(f"{shown}: {rest}")
                    elif verb == "ask":
                        reply = self._answer(rest, process.pid)
                        with contextlib.suppress(BrokenPipeError):
                            process.stdin.write(f"ok {reply}\n")
                            process.stdin.flush()
            except BaseException:
                process.kill()
                raise
            code = process.wait()
            errors.seek(0)
            if code:
                raise BenchError(f"{shown}: {errors.read().strip()} (exit {code})")
        return metrics

    def _answer(self, what: str, pid: int) -> int:
        """Does what a worker asks for; the number it gets back."""
        if what.startswith("ksmd"):
            assert self._knobs, "a worker uses ksmd outside of Session.ksmd()"
            if what == "ksmd start":
                cpu = ksmsys.ksmd_cpu_s(self._ksmd)
                self._knobs.set(run=1)
                return int(cpu * 1e9)
            if what == "ksmd stop":
                self._knobs.set(run=0)
            return int(ksmsys.ksmd_cpu_s(self._ksmd) * 1e9)
        assert self._cgroup, "a worker uses a cgroup outside of Session.cgroup()"
        if what == "cgroup join":
            self._cgroup.join(pid)
        elif what == "cgroup reclaim":
            self._cgroup.reclaim(16 << 30)
        return 0


def mergeable_processes() -> dict[int, int]:
    """Pages ksmd keeps track of, by process that may be merged; none of ours
    (a worker is one only between "ksmd start" and its end)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/ksm_stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            if "ksm_mergeable: yes" in text:
                number = text.split("ksm_rmap_items", 1)[1].split()[0]
                found[int(path.parent.name)] = int(number)
    return found


def medians(runs: list[Metrics]) -> Metrics:
    """The median of each metric over the runs that have it."""
    names = {name: None for run in runs for name in run}
    return {n: median(run[n] for run in runs if n in run) for n in names}


def divide(metrics: Metrics, name: str, a: float | None, b: float | None) -> None:
    """Adds a ratio, if both sides were measured."""
    if a is not None and b:
        metrics[name] = a / b


def ksmpages(s: Session) -> Metrics:
    """KSM 2009: copies merge, a third joins; reading before and after."""
    mib, repeats = (64, 1) if s.quick else (256, 5)
    out: Metrics = {}
    for case in ("worst", "best"):
        ours: list[Metrics] = []
        theirs: list[Metrics] = []
        for _ in range(repeats):
            with s.ksmd() as there:
                if there:
                    theirs.append(
                        s.worker("ksmpages", engine="ksmd", case=case, mib=mib)
                    )
            ours.append(s.worker("ksmpages", engine="ksm", case=case, mib=mib))
        a, b = medians(ours), medians(theirs)
        out[f"{case}_mbps"] = a["mbps"]
        out[f"{case}_cpu_mbps"] = a["cpu_mbps"]
        if b:
            out[f"{case}_ksmd_mbps"] = b["mbps"]
            out[f"{case}_ksmd_cpu_mbps"] = b["cpu_mbps"]
            divide(out, f"{case}_ratio", a["mbps"], b["mbps"])
            divide(out, f"{case}_cpu_ratio", a["cpu_mbps"], b["cpu_mbps"])
        if case == "worst":
            out["third_mbps"] = a["third_mbps"]
            if b:
                out["third_ksmd_mbps"] = b["third_mbps"]
                divide(out, "third_ratio", a["third_mbps"], b["third_mbps"])
                divide(out, "third_cpu_ratio", a["third_cpu_mbps"], b["third_cpu_mbps"])
            out["metadata_bytes_per_page"] = a["metadata_bytes_per_page"]
            divide(
                out,
                "read_loop_worst_ratio",
                a["read_before_us"],
                a["read_after_us"],
            )
        else:
            divide(out, "read_loop_ratio", a["read_before_us"], a["read_after_us"])
            if b:
                divide(
                    out,
                    "read_loop_ksmd_ratio",
                    b["read_before_us"],
                    b["read_after_us"],
                )
    return out


def rescan(s: Session) -> Metrics:
    """The dirty log instead of the checksum: a pass over still memory."""
    mib = 128 if s.quick else 1024
    per_gib = 1024 / mib
    log = s.worker("rescan", engine="ksm", dirty="log", mib=mib, passes=64)
    pagemap = s.worker("rescan", engine="ksm", dirty="pagemap", mib=mib, passes=16)
    out = {
        "us_per_gib": log["cpu_us_per_pass"] * per_gib,
        "pagemap_us_per_gib": pagemap["cpu_us_per_pass"] * per_gib,
        "pages_hashed_again": log["pages_hashed"] + pagemap["pages_hashed"],
    }
    # every page looked at, as a dirty log looks at every page; and ksmd as it
    # is by default, skipping what has not changed for long
    for smart, suffix, passes in ((0, "", 3), (1, "_smart", 9 if s.quick else 18)):
        with s.ksmd(smart) as there:
            if not there:
                break
            ksmd = s.worker("rescan", engine="ksmd", mib=mib, passes=passes)
        # by the page, because ksmd may scan others' pages too
        ksmd_us = ksmd["cpu_us_per_page"] * mib * 256
        out[f"ksmd{suffix}_us_per_gib"] = ksmd_us * per_gib
        divide(out, f"ratio{suffix}", ksmd_us, log["cpu_us_per_pass"])
        divide(out, f"pagemap_ratio{suffix}", ksmd_us, pagemap["cpu_us_per_pass"])
    return out


def smart_scan(s: Session) -> Metrics:
    """Smart scan 2023: pages that never match are looked at less often."""
    size = {"mib": 64 if s.quick else 256, "rounds": 8 if s.quick else 16}
    out: Metrics = {}
    for smart in (0, 1):
        suffix = "on" if smart else "off"
        ours = s.worker("smart-scan", engine="ksm", smart=smart, **size)
        for name in ("pages_scanned", "pages_sharing", "cpu_ms"):
            out[f"{name}_{suffix}"] = ours[name]
        with s.ksmd(smart) as there:
            if there:
                theirs = s.worker("smart-scan", engine="ksmd", **size)
                for name in ("pages_scanned", "pages_sharing", "cpu_ms"):
                    out[f"ksmd_{name}_{suffix}"] = theirs[name]
    for who in ("", "ksmd_"):
        if f"{who}pages_scanned_off" in out:
            on, off = out[f"{who}pages_scanned_on"], out[f"{who}pages_scanned_off"]
            out[f"{who}saving_percent"] = 100 * (1 - on / off)
    return out


FORK_PAGES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def fork(s: Session) -> Metrics:
    """Shared page tables 2002: a process by the pages it maps."""
    n = 100 if s.quick else 1000
    out: Metrics = {}
    for pages in FORK_PAGES[-3:] if s.quick else FORK_PAGES:
        # the big ones need fewer processes for the same time
        count = max(20, min(n, n * 2048 // pages))
        for kind in ("small", "huge", "merged"):
            run = s.worker("fork", kind=kind, pages=pages, processes=count)
            out[f"us_{kind}_{pages}"] = run["us"]
            if kind == "merged":
                out[f"merged_pages_{pages}"] = run["merged"]
    # below the noise of a fork, nothing is told apart
    floor = 1.0
    divide(
        out, "ratio_32768", out["us_small_32768"], max(out["us_merged_32768"], floor)
    )
    divide(
        out,
        "ratio_huge_32768",
        out["us_huge_32768"],
        max(out["us_merged_32768"], floor),
    )
    return out


STALL_NAMES = (
    "stall_p50_ns",
    "stall_p99_ns",
    "stall_max_ns",
    "stall_off_p99_ns",
    "stall_off_max_ns",
    "write_throughput_ratio",
    "isolation_p50_ns",
    "isolation_p99_ns",
    "isolation_max_ns",
    "saved_share",
    "seconds",
)


def stall(s: Session) -> Metrics:
    """Guest impact: threads write while their memory is merged.

    `stall`: how long a write takes; `isolation`: how long pages are away, which
    only who touches one of them in that time notices.
    """
    mib, repeats = (128, 1) if s.quick else (512, 3)
    out: Metrics = {}
    for huge in (0, 1):
        for threads in (1, 2, 4):
            suffix = f"{'huge' if huge else 'small'}_{threads}"
            load = {"huge": huge, "threads": threads, "mib": mib}
            runs = [s.worker("stall", **load) for _ in range(repeats)]
            mid = medians(runs)
            for name in STALL_NAMES:
                out[f"{name}_{suffix}"] = mid[name]
            # a maximum is the worst of all runs
            for name in ("stall_max_ns", "isolation_max_ns"):
                out[f"{name}_{suffix}"] = max(run[name] for run in runs)
    for name in ("stall_p50_ns", "stall_p99_ns", "stall_max_ns"):
        out[name] = max(v for k, v in out.items() if k.startswith(name + "_"))
    name = "write_throughput_ratio"
    out[name] = min(v for k, v in out.items() if k.startswith(name + "_"))
    return out


def ram_images(s: Session) -> list[Path]:
    """Those named, or two that are made now and kept for this session."""
    if not s.images and importlib.util.find_spec("bench_guests"):
        s.say("making RAM images of two guests")
        directory = TOP / "build" / "bench" / "images"
        directory.mkdir(parents=True, exist_ok=True)
        s.images = importlib.import_module("bench_guests").make_images(directory)
    return s.images


def unit(s: Session) -> Metrics:
    """CPU per page saved, chunk by chunk (libksm) and run by run, threads busy.

    `guest`: the RAM of a guest; `runs`: 24 equal pages in every 32.  `ratio` is
    of all CPU, `merge_ratio` of what is spent after equal pages are known.
    """
    out: Metrics = {}
    loads = {"runs": [f"mib={128 if s.quick else 512}"]}
    if paths := ram_images(s):
        loads = {"guest": [f"image={paths[0]}"]} | loads
    for load, words in loads.items():
        for huge in (1, 0):
            for threads in (1, 2) if s.quick else (1, 2, 4):
                row = f"{load}_{'huge' if huge else 'small'}_{threads}"
                unit_row(s, out, row, [*words, f"huge={huge}", f"threads={threads}"])
    return out


def unit_row(s: Session, out: Metrics, row: str, words: list[str]) -> None:
    """The two ways in turns, medians of five."""
    runs: dict[str, list[Metrics]] = {"engine": [], "runwise": []}
    for _ in range(1 if s.quick else 5):
        for mode, results in runs.items():
            results.append(s.worker_words("unit", f"mode={mode}", *words))
    ours, theirs = (medians(results) for results in runs.values())
    for name, value in ours.items():
        out[f"{name}_{row}"] = value
        out[f"runwise_{name}_{row}"] = theirs[name]
    for name in ("", "merge_"):
        key = f"{name}us_per_saved_page"
        divide(out, f"{name}ratio_{row}", theirs[key], ours[key])


def images(s: Session) -> Metrics:
    """RAM of real guests: what is saved of what is equal."""
    words = [f"image={path}" for path in ram_images(s)]
    out: Metrics = {}
    for huge in (0, 1):
        suffix = "_huge" if huge else ""
        run = s.worker_words("images", f"huge={huge}", *words)
        out |= {f"{name}{suffix}": value for name, value in run.items()}
    return out


BALLOON_POLICIES = ("plain", "eager", "lazy", "auto")


def balloon(s: Session) -> Metrics:
    """MADV_FREE 2014: memory taken and given back, lazily and eagerly."""
    counts = (1, 8) if s.quick else (1, 4, 8)
    out: Metrics = {}
    for pressure in (False, True):
        for processes in counts:
            try:
                out |= balloon_rows(s, processes, counts, pressure)
                if processes in (1, 8) and not pressure:
                    out |= balloon_rows(s, processes, (processes,), False, "uniform")
            except BenchError as error:
                if not pressure or "cgroup" not in str(error):
                    raise
                s.note(f"balloon without pressure only: {error}")
                return out
    balloon_summary(out)
    with s.cgroup(0):
        run = s.worker(
            "balloon",
            mode="reclaim",
            policy="lazy",
            cgroup=1,
            mib=64 if s.quick else 256,
        )
    out |= run
    return out


def balloon_rows(
    s: Session,
    processes: int,
    counts: tuple[int, ...],
    pressure: bool,
    reuse: str = "recent",
) -> Metrics:
    """The rows of so many processes: what each policy does, and ratios to eager."""
    out: Metrics = {}
    for threads in counts:
        row = f"{processes}_{threads}"
        row += "_pressure" if pressure else ""
        row += "_uniform" if reuse == "uniform" else ""
        runs = balloon_row(s, processes, threads, pressure, reuse)
        rates = {policy: run["blocks_per_s"] for policy, run in runs.items()}
        cpu = {policy: run["cpu_us_per_block"] for policy, run in runs.items()}
        for policy, rate in rates.items():
            out[f"{policy}_blocks_per_s_{row}"] = rate
        for policy in ("lazy", "auto"):
            divide(out, f"{policy}_ratio_{row}", rates[policy], rates["eager"])
            divide(out, f"{policy}_plain_ratio_{row}", rates[policy], rates["plain"])
            divide(out, f"{policy}_cpu_ratio_{row}", cpu["eager"], cpu[policy])
    return out


def balloon_summary(out: Metrics) -> None:
    """The best rows without pressure, the worst with it."""
    for name in ("lazy", "auto"):
        for kind in ("", "_plain", "_cpu"):
            start = f"{name}{kind}_ratio_"
            ratios = {k: v for k, v in out.items() if k.startswith(start)}
            tight = [ratios.pop(k) for k in list(ratios) if k.endswith("_pressure")]
            out[f"{name}{kind}_ratio"] = max(ratios.values())
            out[f"{name}{kind}_pressure_ratio"] = min(tight)


def balloon_row(
    s: Session, processes: int, threads: int, pressure: bool, reuse: str
) -> dict[str, Metrics]:
    """What each policy does, the policies taking turns."""
    # per thread: enough in all for a limit to bite
    mib = max(32, 256 // (processes * threads))
    runs: dict[str, list[Metrics]] = {policy: [] for policy in BALLOON_POLICIES}
    # what auto must not lose to eager is less than single runs differ
    close = ("eager", "auto") if pressure else ()
    for turn in range(1 if s.quick else 7 if close else 3):
        for policy, list_ in runs.items():
            if turn >= 3 and policy not in close:
                continue
            args = {
                "policy": policy,
                "processes": processes,
                "threads": threads,
                "reuse": reuse,
                "mib": mib,
                # under pressure what happens at its beginning counts for less
                "ms": (1000 if s.quick else 2000) if pressure else 1000,
            }
            if not pressure:
                run = s.worker("balloon", **args)
            else:
                # half of what is touched, and room for the processes
                limit = (processes * threads * mib // 2 + processes * 8 + 8) << 20
                with s.cgroup(limit):
                    run = s.worker("balloon", cgroup=1, **args)
            list_.append(run)
    return {policy: medians(list_) for policy, list_ in runs.items()}


BENCHES: dict[str, Callable[[Session], Metrics]] = {
    "ksmpages": ksmpages,
    "rescan": rescan,
    "smart-scan": smart_scan,
    "fork": fork,
    "stall": stall,
    "unit": unit,
    "images": images,
    "balloon": balloon,
}

# benches with guests live beside what starts guests: a file bench_guests.py
# with BENCHES of the same kind
if importlib.util.find_spec("bench_guests"):
    BENCHES |= importlib.import_module("bench_guests").BENCHES
    BENCHES |= importlib.import_module("bench_dirty").BENCHES


def host() -> dict[str, str | int | float]:
    """The machine, without a name."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    commit = subprocess.run(
        ["git", "-C", str(TOP), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count() or 0,
        "memory_mib": pages * size >> 20,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "thp": thp.read_text().strip() if thp.exists() else "none",
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
    }


def build() -> None:
    """Builds libksm and the workers."""
    log = TOP / "build" / "bench.log"
    log.parent.mkdir(exist_ok=True)
    commands = [["ninja", "-C", str(BUILD)]]
    if not (BUILD / "build.ninja").exists():
        setup = ["meson", "setup", str(BUILD), str(TOP), "--buildtype=release"]
        commands.insert(0, setup)
    with log.open("w") as out:
        for command in commands:
            if subprocess.run(command, stdout=out, stderr=out).returncode:
                sys.stderr.write(log.read_text()[-4000:])
                raise BenchError(f"the build failed (whole log: {log})")


def shown(value: float) -> str:
    """A number as a person reads it."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(name: str, metrics: Metrics) -> Table:
    doc = (BENCHES[name].__doc__ or "").splitlines()[0]
    out = Table(f"{name}: {doc}", "")
    out.columns[1].justify = "right"
    for metric, value in metrics.items():
        out.add_row(metric, shown(value), style="bold" if "ratio" in metric else None)
    return out


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Small and few runs: a look, not a figure.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures here, plots beside it."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="A guest's RAM, for the bench images."),
    ] = None,
    rst: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Measure nothing: show this JSON file as rST."),
    ] = None,
    update: Annotated[
        Path | None, typer.Option(exists=True, help="Put that into this page.")
    ] = None,
) -> None:
    """Measures libksm beside the kernel's ksmd.

    NAMEs are those of docs/devel/ksm-bench.rst: ksmpages, rescan, smart-scan,
    fork, stall, unit, images, balloon, guests, dirty, idle; without one, all are run.  Root is needed for ksmd's side and for memory pressure.
    """
    if rst:
        import bench_rst

        return bench_rst.main(rst, update)
    console = Console()
    for name in names or ():
        if name not in BENCHES:
            console.print(
                f"no bench is called '{name}'; there are: {', '.join(BENCHES)}"
            )
            raise typer.Exit(2)
    if not names:
        names = list(BENCHES)
    try:
        build()
        results: dict[str, Metrics] = {}
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as progress:
            session = Session(quick, image or [], progress)
            data = {"host": host() | {"quick": quick}, "benches": results}
            for name in names:
                results[name] = BENCHES[name](session)
                console.print(table(name, results[name]))
                if json_file:
                    json_file.write_text(json.dumps(data, indent=2) + "\n")
    except (BenchError, ksmsys.KsmUnavailable) as error:
        console.print(f"bench: {error}", style="bold red")
        raise typer.Exit(EXIT_LACKING if "no engine" in str(error) else 1) from None
    for note in session.notes:
        console.print(f"note: {note}")
    if json_file:
        # slow to load, and not needed for a table
        import bench_plots

        for path in bench_plots.draw(results, json_file):
            console.print(f"plot: {path}")


if __name__ == "__main__":
    typer.run(main)
