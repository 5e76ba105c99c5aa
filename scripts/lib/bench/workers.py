# SPDX-License-Identifier: GPL-2.0-or-later
"""Benches by the C workers of tests/bench/, each beside a rival.

Rivals take turns; medians are given; every ratio is > 1 where libksm is
better.  Leaves to others: running workers, rights (harness.py).
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from bench.guests import make_images
from bench.harness import BUILD, Metrics, Session, divide, medians
from host.cgroup import NoCgroup
from host.warm import available


def ksmpages(s: Session) -> Metrics:
    """KSM 2009: copies merge, a third joins; reading before and after."""
    mib, repeats = (64, 1) if s.quick else (256, 5)
    out: Metrics = {}
    for case in ("worst", "best"):
        ours: list[Metrics] = []
        two: list[Metrics] = []
        theirs: list[Metrics] = []
        for _ in range(repeats):
            with s.ksmd() as there:
                if there:
                    theirs.append(
                        s.worker("ksmpages", engine="ksmd", case=case, mib=mib)
                    )
            ours.append(s.worker("ksmpages", engine="ksm", case=case, mib=mib))
            two.append(
                s.worker("ksmpages", engine="ksm", case=case, mib=mib, threads=2)
            )
        a, b = medians(ours), medians(theirs)
        two_threads(out, case, medians(two), b)
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


def two_threads(out: Metrics, case: str, ours: Metrics, ksmd: Metrics) -> None:
    """The same by two threads; and the third copy of the worst case."""
    for name, which in ((case, ""), ("third", "third_")):
        if f"{which}mbps" in ours:
            out[f"two_{name}_mbps"] = ours[f"{which}mbps"]
            if ksmd:
                rates = (f"{which}mbps", f"{which}cpu_mbps")
                for what, rate in zip(("ratio", "cpu_ratio"), rates, strict=True):
                    divide(out, f"two_{name}_{what}", ours[rate], ksmd[rate])


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
    if not s.images:
        s.say("making RAM images of two guests")
        s.images = make_images(BUILD / "images")
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


#: pages to a block, of guests in huge pages whose memory is in no order any more
AGED = (8, 16, 32)


def images(s: Session) -> Metrics:
    """RAM of real guests: what is saved of what is equal."""
    words = [f"image={path}" for path in ram_images(s)]
    out: Metrics = {}
    for huge in (0, 1):
        suffix = "_huge" if huge else ""
        run = s.worker_words("images", f"huge={huge}", *words)
        out |= {f"{name}{suffix}": value for name, value in run.items()}
        two = s.worker_words("images", f"huge={huge}", "threads=2", *words)
        out |= {f"two_{name}{suffix}": two[name] for name in ("seconds", "cpu_s")}
        divide(out, f"two_ratio{suffix}", run["seconds"], two["seconds"])
    for block in AGED:
        run = s.worker_words("images", "huge=1", f"block={block}", *words)
        out |= {f"{name}_aged_{block}": value for name, value in run.items()}
    return out


SHUFFLED = (1, 2, 4)
#: that a process may have: as Debian has it, and as Fedora and Ubuntu do
MAPPINGS = (("host", 65530), ("more", 1048576))


def shuffle(s: Session) -> Metrics:
    """Guests that have aged: their pages in no order any more."""
    words = [f"image={path}" for path in ram_images(s)]
    out: Metrics = {}
    for block in SHUFFLED[-1:] if s.quick else SHUFFLED:
        # as 2009 had it, without the smart scan, with which it saves less
        with s.ksmd(smart_scan=0) as there:
            if not there:
                return out
            ksmd = s.worker_words("shuffle", f"block={block}", *words)
        out |= {f"ksmd_{key}_{block}": value for key, value in ksmd.items()}
        for name, most in MAPPINGS:
            words_now = (f"block={block}", f"goal={int(ksmd['saved_pages'])}", *words)
            with s.driven() as socket, s.mappings(most):
                host = s.worker_words("shuffle", f"socket={socket}", *words_now)
            out |= {f"{name}_{key}_{block}": value for key, value in host.items()}
            ratio = f"{name}_saved_ratio_{block}"
            divide(out, ratio, host["saved_mib"], ksmd["saved_mib"])
            if "cpu_98" in host:
                ratio = f"{name}_cpu_ratio_{block}"
                divide(out, ratio, ksmd["cpu_98"], host["cpu_98"])
            else:
                s.note(f"shuffle, {block}, {name}: less than 98 % of ksmd's is saved")
    return out


SCALE_GIB = (1, 4, 16, 64, 256, 1024)
SCALE_FULL_GIB = (1, 4, 16)
SCALE_SOURCES = ("pagemap", "log")


def scale_one(s: Session, row: str, **size: object) -> Metrics:
    if s.quick:
        size |= {"settle": 32, "seconds": 40}
    return {f"{k}_{row}": v for k, v in s.worker("scale", **size).items()}


def scale(s: Session) -> Metrics:
    """Much memory, little or most of it populated: what it costs, by its size."""
    out: Metrics = {}
    for gib in (1, 1024) if s.quick else SCALE_GIB:
        for source in SCALE_SOURCES:
            out |= scale_one(s, f"{source}_{gib}", gib=gib, dirty=source)
    for gib in (1,) if s.quick else SCALE_FULL_GIB:
        if available() < (gib + 4) << 30:
            s.note(f"scale: {gib} GiB, most of it populated, need {gib + 4} GiB free")
            continue
        for source in SCALE_SOURCES:
            size = {"gib": gib, "parts": 32, "populated": gib * 896}
            out |= scale_one(s, f"{source}_{gib}_full", dirty=source, **size)
    largest = f"_{1024}"
    for name in ("add_ms", "remove_ms", "idle_percent", "metadata_mib", "noticed_s"):
        out[name] = max(
            v for k, v in out.items() if k.startswith(name) and k.endswith(largest)
        )
    waited = [v for k, v in out.items() if "_wait_us_" in k and k.endswith(largest)]
    out["wait_us"] = max(waited)
    return out


def churn_halves(out: Metrics, minutes: float) -> None:
    """What is saved while memory is written, by the first and the second half."""
    moments = sorted(k.removesuffix("_maps") for k in out if re.match(r"at\d+_maps", k))
    middle = len(moments) // 2
    cpu = 0.0
    for half, part in (("first", moments[:middle]), ("second", moments[middle:])):
        saved = [out[f"{moment}_saved_mib"] for moment in part]
        out[f"{half}_saved_mib"] = median(saved)
        out[f"{half}_least_mib"] = min(saved)
        out[f"{half}_maps"] = max(out[f"{moment}_maps"] for moment in part)
        until = out[f"{part[-1]}_cpu_s"]
        seconds = 60 * minutes * len(part) / len(moments)
        out[f"{half}_cpu_percent"] = 100 * (until - cpu) / seconds
        cpu = until


def churn(s: Session) -> Metrics:
    """Memory written, freed and merged for two hours, then by a new engine."""
    minutes = 2 if s.quick else 120
    sizes = {"mib": 64, "per_second": 250} if s.quick else {}
    out = s.worker("churn", minutes=minutes, **sizes)
    churn_halves(out, minutes)
    for name in ("saved_mib", "maps", "metadata_mib", "pss_mib"):
        out[f"{name}_old_by_new"] = out[f"old_{name}"] / out[f"new_{name}"]
    return out


def threads(s: Session) -> Metrics:
    """What two threads bring to an engine; to two, in one process, and in two."""
    mib, repeats = (64, 1) if s.quick else (512, 5)
    out: Metrics = {}
    for case in ("merge", "scan"):
        args = {"case": case, "mib": mib}
        names = ("one", "helped", "threads", "processes")
        rates: dict[str, list[Metrics]] = {name: [] for name in names}
        for _ in range(repeats):
            rates["one"].append(s.worker("threads", engines=1, **args))
            rates["helped"].append(s.worker("threads", engines=1, threads=2, **args))
            rates["threads"].append(s.worker("threads", engines=2, **args))
            with ThreadPoolExecutor(2) as pool:
                both = [
                    pool.submit(s.worker, "threads", engines=1, **args)
                    for _ in range(2)
                ]
            rates["processes"].append({"mbps": sum(f.result()["mbps"] for f in both)})
        for name, found in rates.items():
            out[f"{name}_{case}_mbps"] = medians(found)["mbps"]
        for name in names[1:]:
            divide(
                out,
                f"{name}_{case}_ratio",
                out[f"{name}_{case}_mbps"],
                out[f"one_{case}_mbps"],
            )
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
            except NoCgroup as error:
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


def group(s: Session) -> Metrics:
    """Processes with the same memory: members of a group beside ksmd."""
    out: Metrics = {}
    for processes in (2, 4) if s.quick else (1, 2, 4, 8, 16):
        # one process shares nothing with others
        for shared in (50,) if s.quick else (0, 50, 100) if processes > 1 else (0,):
            size = {"processes": processes, "shared": shared}
            size["mib"] = 32 if s.quick else 64
            runs: dict[str, list[Metrics]] = {"": [], "full_": [], "ksmd_": []}
            for i in range(1 if s.quick else 3):
                for who, max_cpu in (("", 10), ("full_", 100)):
                    # for its memory, once
                    args = size | {"rest": 0 if i or who else 6}
                    with s.group() as socket:
                        run = s.worker("group", socket=socket, max_cpu=max_cpu, **args)
                    runs[who].append(run)
                with s.ksmd(0) as there:
                    if there:
                        runs["ksmd_"].append(s.worker("group", **size))
            row = f"{processes}x{shared}"
            for who, list_ in runs.items():
                for name, value in medians(list_).items():
                    out[f"{who}{name}_{row}"] = value
            for who in ("", "full_"):
                theirs = out.get(f"ksmd_cpu_95_{row}")
                divide(
                    out, f"{who}cpu_ratio_{row}", theirs, out.get(f"{who}cpu_95_{row}")
                )
    return out | ({} if s.quick else group_memory(s))


def group_memory(s: Session) -> Metrics:
    """The daemon's, for processes as large as guests."""
    out: Metrics = {}
    for shared in (50, 100):
        with s.group() as socket:
            size = {"processes": 2, "shared": shared, "mib": 1024, "rest": 6}
            run = s.worker("group", socket=socket, max_cpu=100, **size)
        for name, value in run.items():
            if name.startswith("daemon_") and "cpu" not in name:
                out[f"{name}_2x{shared}x1024"] = value
    return out


def balloon_row(
    s: Session, processes: int, threads: int, pressure: bool, reuse: str
) -> dict[str, Metrics]:
    """What each policy does, the policies taking turns."""
    # per thread: enough in all for a limit to bite
    mib = max(32, 256 // (processes * threads))
    runs: dict[str, list[Metrics]] = {policy: [] for policy in BALLOON_POLICIES}
    # single runs differ by more than auto may lose to eager
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
                # longer under pressure: the beginning counts for less
                "ms": (1000 if s.quick else 2000) if pressure else 1000,
            }
            if not pressure:
                run = s.worker("balloon", **args)
            else:
                # half of the touched memory, and room for the processes
                limit = (processes * threads * mib // 2 + processes * 8 + 8) << 20
                with s.cgroup(limit):
                    run = s.worker("balloon", cgroup=1, **args)
            list_.append(run)
    return {policy: medians(list_) for policy, list_ in runs.items()}
