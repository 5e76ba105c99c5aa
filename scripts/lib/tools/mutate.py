# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/mutate: would a test notice?

Makes one small change at a time to a copy of libksm (a condition negated, a
statement dropped, a constant off by one), builds it and runs the tests, the
likeliest to notice first, until one fails.  A change that none notices is
either equivalent (nothing observable depends on it: mutate-equivalent.toml
lists it, with the reason) or a gap in the tests.

Comments, strings, assertions, error texts and all outside functions stay.  A
mutant's identity is its file's name, function, text of the line and operator,
so that results outlive moves and other edits.

build/mutate/results.json keeps results by identity and by the content of
sources and tests: an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from host.exits import Failure
from host.paths import TOP

LIBKSM = TOP / "subprojects/libksm"
WORK = TOP / "build/mutate"
EQUIVALENT = Path(__file__).with_name("mutate-equivalent.toml")

#: Statements that say something, and do nothing else.
TALK = re.compile(
    r"^(g_assert\w*|g_warning|g_set_error\w*|g_propagate_error|G_STATIC_ASSERT"
    r"|KSM_TSAN_\w+)\b"
)
#: How a line begins that declares something.
DECLARES = re.compile(
    r"^(static|const|unsigned|struct|enum|union|int|char|bool|void|float|double|long"
    r"|size_t|ssize_t|off_t|u?int\d+_t|uintptr_t|sigset_t|g_auto\w*|G[A-Z]\w+|FILE"
    r"|[A-Z]\w+\s+\**\w+\s*(=|;|\[|,))\b"
)


@dataclass(frozen=True)
class Test:
    name: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    #: Sources it was written for: there it is run first.
    files: tuple[str, ...] = ()
    #: Built with the address sanitizer: what leaks, or is used when it is gone.
    asan: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} asan" if self.asan else self.name


#: In the order in which they are tried: fast ones, and those that kill.
TESTS: tuple[Test, ...] = (
    Test("budget", files=("pace.c", "rhythm.c", "promise.c")),
    Test("index", files=("index.c",)),
    Test("vmas", files=("vmas.c",)),
    Test("urgent", files=("urgent.c",)),
    Test("crew", files=("crew.c",)),
    Test("turn", files=("turn.c",)),
    Test("ahead", files=("ahead.c", "pool.c")),
    Test("helped", files=("crew.c", "visit.c", "stage.c", "pace.c")),
    Test("memcg", files=("memcg.c", "cgroup.c")),
    Test("host", files=("engine.c", "prim.c")),
    Test("support", files=("prim.c", "engine.c")),
    Test("pool", files=("pool.c", "vacant.c")),
    Test("region", files=("region.c", "admit.c", "attr.c")),
    Test("merge", files=("merge.c", "plan.c", "cost.c", "region.c")),
    Test("parts", files=("parts.c",)),
    Test("free", files=("free.c", "pressure.c")),
    Test("engine", files=("engine.c", "fork.c", "discard.c", "stats.c", "directory.c")),
    Test("discard", files=("discard.c",)),
    Test(
        "scan",
        files=(
            "scan.c",
            "visit.c",
            "classify.c",
            "alike.c",
            "broken.c",
            "quiet.c",
            "dirty.c",
        ),
    ),
    Test("loose", files=("loose.c", "sample.c", "dirty.c")),
    Test("restore", files=("restore.c", "block.c", "kin.c")),
    Test("rejoin", files=("rejoin.c", "mapping.c", "block.c")),
    Test("gather", files=("gather.c", "rejoin.c")),
    Test("compact", files=("compact.c",)),
    Test("fault", env=(("KSM_FAULT_STEP", "23"),)),
    Test("move"),
    Test("fuzz", args=("--first", "--seed", "1", "--seeds", "150")),
    Test("stage", files=("stage.c", "stage-back.c")),
    Test("prop", args=("--seed", "1", "--seconds", "15")),
    Test("pool", asan=True),
    Test("region", asan=True),
    Test("merge", asan=True),
    Test("free", asan=True),
    Test("engine", asan=True),
    Test("system"),
)


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    line: int
    text: str  # of the line, spaces made one
    operator: str
    start: int  # in the file
    end: int
    new: str
    nth: int = 0  # among those that are alike so far

    @property
    def key(self) -> str:
        parts = (self.file, self.function, self.text, self.operator, str(self.nth))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@dataclass
class Outcome:
    verdict: str  # killed, survived, does-not-compile
    by: str = ""
    seconds: float = 0.0


# Reading C, as far as one needs to.


def masked(text: str) -> str:
    """The text with comments, strings, characters and directives blanked out."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    pattern = (
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
        r"|^[ \t]*#(?:\\\n|[^\n])*"
    )
    return re.sub(pattern, blank, text, flags=re.DOTALL | re.MULTILINE)


def closing(code: str, at: int) -> int:
    """The place of the bracket that closes the one at @at."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth = 0
    for i in range(at, len(code)):
        if code[i] == code[at]:
            depth += 1
        elif code[i] == pairs[code[at]]:
            depth -= 1
            if depth == 0:
                return i
    raise ValueError("a bracket is not closed")


@dataclass(frozen=True)
class Function:
    name: str
    returns: str
    start: int  # of the body, at its bracket
    end: int


def functions(code: str) -> Iterator[Function]:
    head = re.compile(
        r"^(?P<returns>(?:[A-Za-z_]\w*[ \t]+)+\**)(?P<name>\w+)(?P<open>\()",
        re.MULTILINE,
    )
    for match in head.finditer(code):
        close = closing(code, match.start("open"))
        body = re.compile(r"\s*\n\{").match(code, close + 1)
        if body:
            start = body.end() - 1
            returns = match["returns"].replace("static", "").replace("inline", "")
            yield Function(match["name"], returns.strip(), start, closing(code, start))


@dataclass
class Source:
    name: str
    text: str
    code: str = field(init=False)

    def __post_init__(self) -> None:
        self.code = masked(self.text)

    def line_of(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def line_text(self, at: int) -> str:
        start = self.text.rfind("\n", 0, at) + 1
        end = self.text.find("\n", at)
        return " ".join(self.text[start:end].split())


def statements(code: str, function: Function) -> Iterator[tuple[int, int]]:
    """Simple statements of a function: from the first letter to the ';'."""
    at = function.start + 1
    for match in re.finditer(r"[;{}]", code[function.start + 1 : function.end]):
        end = function.start + 1 + match.start()
        piece = code[at:end]
        if match[0] == ";" and piece.count("(") == piece.count(")"):
            labels = re.match(r"(\s*(case [^:?]+|default):)+", piece)
            skip = labels.end() if labels else 0
            lead = len(piece[skip:]) - len(piece[skip:].lstrip())
            if piece[skip:].strip():
                yield at + skip + lead, end + 1
            at = end + 1
        elif match[0] != ";":
            at = end + 1


Change = tuple[str, int, int, str]  # operator, start, end, new text

SWAPS = (
    ("relation", r"(?<![<>=\-])<=", "<"),
    ("relation", r"(?<![<>=\-])>=", ">"),
    ("relation", r" (<) ", "<="),
    ("relation", r" (>) ", ">="),
    ("equality", r"==", "!="),
    ("equality", r"!=", "=="),
    ("logic", r"&&", "||"),
    ("logic", r"\|\|", "&&"),
    ("arithmetic", r" (\+) ", "-"),
    ("arithmetic", r" (-) ", "+"),
    ("arithmetic", r"\+=", "-="),
    ("arithmetic", r"-=", "+="),
    ("arithmetic", r"\+\+", "--"),
    ("arithmetic", r"--", "++"),
    ("arithmetic", r" (\*) ", "/"),
    ("arithmetic", r" (/) ", "*"),
    ("bits", r"\|=", "&="),
    ("bits", r"&= ~", "|= "),
    ("bits", r" (\|) ", "&"),
    ("bits", r" (&) ", "|"),
    ("bits", r"<<", ">>"),
    ("bits", r">>", "<<"),
    ("min-max", r"\b(MIN)\(", "MAX"),
    ("min-max", r"\b(MAX)\(", "MIN"),
    ("constant", r"\b(true)\b", "false"),
    ("constant", r"\b(false)\b", "true"),
    ("jump", r"\b(break);", ""),
    ("jump", r"\b(continue);", ""),
)


def changes_swap(code: str, function: Function) -> Iterator[Change]:
    body = code[function.start : function.end]
    for operator, pattern, new in SWAPS:
        for match in re.finditer(pattern, body):
            group = 1 if match.re.groups else 0
            old = match[group]
            # a pointer's star is not a product
            if old in "*&" and not re.search(
                r"[\w)\]]\s*$", body[: match.start(group)]
            ):
                continue
            start = function.start + match.start(group)
            yield (
                f"{operator} {old} to {new or 'nothing'}",
                start,
                start + len(old),
                new,
            )


def changes_constant(code: str, function: Function) -> Iterator[Change]:
    body = code[function.start : function.end]
    for match in re.finditer(r"(?<![\w.])(0x[0-9a-fA-F]+|\d+)([uUlL]*)(?![\w.])", body):
        value = int(match[1], 0)
        new = value - 1 if value == 1 else value + 1
        start = function.start + match.start()
        yield (
            f"constant {match[1]} to {new}",
            start,
            start + len(match[0]),
            f"{new}{match[2]}",
        )


def changes_condition(code: str, function: Function) -> Iterator[Change]:
    body = code[function.start : function.end]
    for match in re.finditer(r"\b(if|while) (\()", body):
        start = function.start + match.start(2)
        end = closing(code, start)
        yield f"negate {match[1]}", start, end + 1, f"(!{{}}{')'}"


def changes_statement(code: str, function: Function) -> Iterator[Change]:
    """Drops statements; returns at once; returns something else."""
    for start, end in statements(code, function):
        text = code[start:end]
        if text.startswith("return "):
            if function.returns == "bool":
                yield "negate return", start + 7, end - 1, "!({})"
            elif re.fullmatch(r"return \w+;", text) is None:
                continue
        elif (
            not DECLARES.match(text)
            and not TALK.match(text)
            and not re.match(
                r"(return|break|continue|goto|else|do|for|if|while)\b", text
            )
        ):
            yield "drop statement", start, end, ";"
    values = {"void": "", "bool": " false", "int": " 0", "unsigned": " 0"}
    if function.returns in values:
        at = function.start + 1
        yield "return at once", at, at, f" return{values[function.returns]};"
    if function.returns == "bool":
        yield "return true at once", at, at, " return true;"


def talk_spans(code: str, function: Function) -> list[tuple[int, int]]:
    return [
        (start, end)
        for start, end in statements(code, function)
        if TALK.match(code[start:end])
    ]


def mutants_of(source: Source) -> Iterator[Mutant]:
    seen: Counter[tuple[str, str, str]] = Counter()
    for function in functions(source.code):
        found: list[Change] = []
        for make in (
            changes_swap,
            changes_constant,
            changes_condition,
            changes_statement,
        ):
            found += make(source.code, function)
        talk = talk_spans(source.code, function)
        for operator, start, end, new in sorted(found):
            if any(a <= start < b for a, b in talk):
                continue
            old = source.text[start:end]
            text = source.line_text(
                function.start - 2 if operator.endswith("at once") else start
            )
            alike = (function.name, text, operator)
            yield Mutant(
                source.name,
                function.name,
                source.line_of(start),
                text,
                operator,
                start,
                end,
                new.replace("{}", old),
                seen[alike],
            )
            seen[alike] += 1


def source(root: Path, name: str) -> Path:
    """The file of that name, in whichever directory it is."""
    (path,) = (root / "src").glob(f"**/{name}")
    return path


def all_mutants(root: Path) -> list[Mutant]:
    found: list[Mutant] = []
    for path in sorted((root / "src").glob("**/*.c"), key=lambda path: path.name):
        found += mutants_of(Source(path.name, path.read_text()))
    return found


def chosen(mutants: list[Mutant], only: list[str]) -> list[Mutant]:
    """Those of FILE, FILE:LINE, or of that identity."""

    def fits(mutant: Mutant) -> bool:
        return any(
            want in (mutant.file, f"{mutant.file}:{mutant.line}", mutant.key)
            for want in only
        )

    return [mutant for mutant in mutants if not only or fits(mutant)]


def sampled(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """One of a line: lines with many operators shall not count for more."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    lines = sorted(by_line)
    lines = chance.sample(lines, min(size, len(lines)))
    return [chance.choice(by_line[line]) for line in lines]


def equivalents() -> dict[tuple[str, str, str, str, int], str]:
    if not EQUIVALENT.exists():
        return {}
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {
        (e["file"], e["function"], e["line"], e["operator"], e.get("nth", 0)): e[
            "reason"
        ]
        for e in entries
    }


# Building and running.


class Job:
    """A private copy of the tree with a build directory of its own."""

    def __init__(self, number: int) -> None:
        self.dir = WORK / f"job-{number}"
        self.tree = self.dir / "libksm"
        self.builds = {False: self.dir / "build", True: self.dir / "build-asan"}
        self.log = self.dir / "log"

    def prepare(self) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        # with new times: objects of the last mutant must not seem newer
        shutil.copytree(LIBKSM, self.tree, copy_function=shutil.copy)
        for asan, build in self.builds.items():
            if (build / "build.ninja").exists():
                continue
            shutil.rmtree(build, ignore_errors=True)
            sanitize = ["-Db_sanitize=address", "-Db_lundef=false"] if asan else []
            self.must(
                "meson",
                "setup",
                "--buildtype=plain",
                "-Doptimization=1",
                *sanitize,
                build,
            )
        for test in TESTS:
            if not self.make(test):
                raise Failure(f"test-{test.label} does not build: {self.log}")

    def must(self, *command: str | Path) -> None:
        with self.log.open("ab") as log:
            code = subprocess.run(
                command,
                cwd=self.tree,
                stdout=log,
                stderr=log,
                env=environment(),
                check=False,
            ).returncode
        if code:
            raise Failure(f"{command[0]} failed: {self.log}")

    def make(self, test: Test) -> bool:
        with self.log.open("wb") as log:
            return (
                subprocess.run(
                    ["ninja", "-C", self.builds[test.asan], f"tests/test-{test.name}"],
                    stdout=log,
                    stderr=log,
                    env=environment(),
                    check=False,
                ).returncode
                == 0
            )

    def run(self, test: Test, limit: float) -> str:
        """'' if it passed, else how it failed."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [self.builds[test.asan] / f"tests/test-{test.name}", *test.args],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.dir,
                env=environment() | dict(test.env),
                start_new_session=True,
                preexec_fn=confine_asan if test.asan else confine,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # with all that it has left behind: the session is ours
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        if code is None:
            return "timeout"
        return "" if code in (0, 77) else f"exit {code}"

    def write(self, name: str, text: str) -> None:
        path = source(self.tree, name)
        if path.read_text() != text:
            path.write_text(text)


def environment() -> dict[str, str]:
    # each mutant is compiled once only
    return os.environ | {"CCACHE_DISABLE": "1", "G_SLICE": "always-malloc"}


def confine_asan() -> None:
    """A mutant may do anything: it shall not take the machine with it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("1000")


def confine() -> None:
    # the sanitizer's shadow alone is more
    resource.setrlimit(resource.RLIMIT_DATA, (64 << 30, 64 << 30))
    confine_asan()


def order(mutant: Mutant, usable: dict[str, float]) -> list[Test]:
    own = [test for test in TESTS if mutant.file in test.files]
    rest = [test for test in TESTS if test not in own]
    return [test for test in own + rest if test.label in usable]


def judge(job: Job, mutant: Mutant, usable: dict[str, float]) -> Outcome:
    original = source(LIBKSM, mutant.file).read_text()
    start = time.monotonic()
    try:
        job.write(
            mutant.file,
            original[: mutant.start] + mutant.new + original[mutant.end :],
        )
        for test in order(mutant, usable):
            if not job.make(test):
                return Outcome("does-not-compile", "", time.monotonic() - start)
            how = job.run(test, usable[test.label] * 5 + 20)
            if how:
                return Outcome(
                    "killed", f"{test.label} ({how})", time.monotonic() - start
                )
        return Outcome("survived", "", time.monotonic() - start)
    finally:
        job.write(mutant.file, original)


def baseline(job: Job) -> dict[str, float]:
    """Seconds that each test takes unchanged; those that fail are left out."""
    usable = {}
    for test in TESTS:
        start = time.monotonic()
        how = job.run(test, 300)
        if how:
            print(f"mutate: test-{test.label} fails unchanged ({how}): left out")
        else:
            usable[test.label] = time.monotonic() - start
    return usable


def digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


class Results:
    """What a result depends on: the sources, and the tests with this file."""

    def __init__(self, keep: str) -> None:
        """@keep: "nothing"; of the "same" tests; or what other ones "killed", too."""
        self.path = WORK / "results.json"
        self.lock = threading.Lock()
        self.sources = digest(list(LIBKSM.glob("src/**/*.[ch]")))
        self.tests = digest([*LIBKSM.glob("tests/*.[ch]"), Path(__file__)])
        self.known: dict[str, Outcome] = {}
        if keep == "nothing" or not self.path.exists():
            return
        kept = json.loads(self.path.read_text())
        same = kept.get("tests") == self.tests
        for key, value in kept["outcomes"].items():
            outcome = Outcome(**value)
            settled = keep == "killed" and outcome.verdict != "survived"
            if kept.get("sources") == self.sources and (same or settled):
                self.known[key] = outcome

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        with self.lock:
            self.known[mutant.key] = outcome
            text = json.dumps(
                {
                    "sources": self.sources,
                    "tests": self.tests,
                    "outcomes": {k: asdict(v) for k, v in self.known.items()},
                }
            )
            self.path.with_suffix(".new").write_text(text)
            self.path.with_suffix(".new").rename(self.path)


def line(mutant: Mutant) -> str:
    return (
        f"{mutant.key}  {mutant.file}:{mutant.line} {mutant.function}(): "
        f"{mutant.operator}: {mutant.text}"
    )


def run_all(mutants: list[Mutant], results: Results, jobs: int) -> None:
    todo = [mutant for mutant in mutants if mutant.key not in results.known]
    if not todo:
        return
    pool = [Job(i) for i in range(min(jobs, len(todo)))]
    for job in pool:
        job.dir.mkdir(parents=True, exist_ok=True)
        job.prepare()
    usable = baseline(pool[0])
    print(f"mutate: {len(todo)} mutants, {len(pool)} jobs", flush=True)
    free = list(pool)
    lock = threading.Lock()

    def one(mutant: Mutant) -> None:
        with lock:
            job = free.pop()
        try:
            outcome = judge(job, mutant, usable)
        finally:
            with lock:
                free.append(job)
        results.add(mutant, outcome)
        with lock:
            print(
                f"{outcome.verdict:9} {outcome.seconds:5.0f} s  {outcome.by:20} "
                f"{line(mutant)}",
                flush=True,
            )

    with ThreadPoolExecutor(len(pool)) as threads:
        list(threads.map(one, todo))


def report(mutants: list[Mutant], results: Results, json_path: str | None) -> int:
    listed = equivalents()
    verdicts: Counter[str] = Counter()
    survivors, killed_listed = [], []
    rows = []
    for mutant in mutants:
        outcome = results.known[mutant.key]
        key = (
            mutant.file,
            mutant.function,
            mutant.text,
            mutant.operator,
            mutant.nth,
        )
        verdict = outcome.verdict
        if verdict == "survived" and key in listed:
            verdict = "equivalent"
        elif verdict == "survived":
            survivors.append(mutant)
        elif verdict == "killed" and key in listed:
            killed_listed.append(mutant)
        verdicts[verdict] += 1
        rows.append(
            {
                k: v
                for k, v in asdict(mutant).items()
                if k in ("file", "function", "line", "text", "operator", "nth", "new")
            }
            | {"key": mutant.key, "verdict": verdict, "by": outcome.by}
        )
    compiled = sum(verdicts.values()) - verdicts["does-not-compile"]
    raw = 100 * verdicts["killed"] / max(compiled, 1)
    score = 100 * verdicts["killed"] / max(compiled - verdicts["equivalent"], 1)
    print("\nsurvivors that are not known to be equivalent:")
    for mutant in sorted(survivors, key=lambda m: (m.file, m.line)):
        print(f"  {line(mutant)}")
        print(f"      now: {mutant.new.strip() or 'nothing'}; nth = {mutant.nth}")
    for mutant in killed_listed:
        print(f"listed as equivalent, and killed: {line(mutant)}")
    print(
        f"{verdicts['killed']} killed, {verdicts['survived']} survived, "
        f"{verdicts['equivalent']} equivalent, {verdicts['does-not-compile']} do not "
        f"compile: score {score:.1f} % (raw {raw:.1f} %)"
    )
    if json_path:
        text = {"score": score, "raw": raw, "counts": verdicts, "mutants": rows}
        Path(json_path).write_text(json.dumps(text, indent=1) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Changes libksm one small thing at a time, and tells which "
        "changes no test notices.",
        epilog="score: killed / (those that compile - those listed as equivalent in "
        "scripts/lib/tools/mutate-equivalent.toml); raw: without that list.",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N lines at random")
    parser.add_argument("--seed", type=int, default=1, help="of that choice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J")
    parser.add_argument("--list", action="store_true", help="list them, run nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FILE[:LINE]|ID",
        help="only mutants of this file, line or identity; may be repeated",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument(
        "--fresh", action="store_true", help="forget results of earlier runs"
    )
    keep.add_argument(
        "--more-tests",
        action="store_true",
        help="the tests have only grown since: what they killed stays killed, what "
        "survived is judged again",
    )
    parser.add_argument(
        "--fuzz-args", default="", metavar="ARGS", help="more arguments for test-fuzz"
    )
    args = parser.parse_args()
    mutants = chosen(all_mutants(LIBKSM), args.only)
    if args.sample is not None:
        mutants = sampled(mutants, args.sample, args.seed)
    if args.list:
        for mutant in mutants:
            print(line(mutant))
        print(f"{len(mutants)} mutants")
        return 0
    global TESTS
    more = tuple(args.fuzz_args.split())
    TESTS = tuple(
        replace(t, args=t.args + more) if t.name == "fuzz" else t for t in TESTS
    )
    WORK.mkdir(parents=True, exist_ok=True)
    results = Results(
        "nothing" if args.fresh else "killed" if args.more_tests else "same"
    )
    run_all(mutants, results, max(args.jobs, 1))
    return report(mutants, results, args.json)
