# SPDX-License-Identifier: GPL-2.0-or-later
"""A minute, or --soak SECONDS, of everything that can happen to a guest.

The seed is printed first; `--seed N` makes the same sequence again.  The log,
each step with its time and what came of it, stays in build/storm when
something was wrong.  What is done is in storm_actions.py of
scripts/lib/guest, what is wrong in storm_watch.py there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from guest import storm_actions  # noqa: F401  (what can be done)
from guest.storm import SOURCES, Storm, default_seed
from host.paths import TOP

Record = Callable[[str, object], None]

#: What a check does, see --soak and --seed in conftest.py.
CHECK_S = 60.0
CHECK_SEED = 1


@pytest.mark.timeout(0)
def test_storm(
    image: Path,
    scope_vm: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
    record_property: Record,
) -> None:
    seed = pytestconfig.getoption("--seed")
    if seed is None:
        # a check says the same of the same tree; to find more is for a soak
        longer = pytestconfig.getoption("--soak") > CHECK_S
        seed = default_seed() if longer else CHECK_SEED
    logs = TOP / "build/storm"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{seed}.log"
    with capsys.disabled():
        print(f"\n  storm: --seed {seed}, log {log}", flush=True)
    sources = tuple(pytestconfig.getoption("--storm-sources").split(","))
    without = tuple(pytestconfig.getoption("--storm-without").split(","))
    assert set(sources) <= set(SOURCES), sources
    storm = Storm(seed, image, tmp_path, log, sources, without)
    storm.run(pytestconfig.getoption("--soak"), pytestconfig.getoption("--storm-steps"))
    record_property("done", dict(storm.done))
    record_property("polls", storm.watcher.polls)
    if not pytestconfig.getoption("--storm-keep"):
        log.unlink()
