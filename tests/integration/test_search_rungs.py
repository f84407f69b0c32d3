"""Searches with rungs as people type them: runs that pause, go on in a later command, and survive
kills.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.runs import checkpoint
from tests.conftest import RunFolder, Trained, run, start
from tests.integration.test_resume import _same

SHORT = (
    "dataset.train_limit=320",
    "batch_size=32",
    "optimizer.momentum=0.9",
    "model.dropout=0.3",
    "ema=0.9",
)
ALONE = ("world_size=1", "threads=1", "tensorboard.images=false", "hydra.launcher.max_concurrent=1")
SHARDED = ("strategy=fsdp", "checkpoint.sharded=true")
LR = "optimizer.lr=tag(log,interval(1e-3,3))"


def weights(folder: Path) -> dict[str, Any]:
    state = checkpoint.load(folder / "checkpoints" / "last.pt")
    return {key: state[key] for key in ("model", "ema", "optimizer", "scheduler")}


def assert_same(promoted: RunFolder, whole: RunFolder) -> None:
    assert promoted.points == whole.points
    assert _same(weights(promoted.folder), weights(whole.folder))


@pytest.mark.parametrize(
    "strategy", [(), pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["ddp", "fsdp in parts"]
)
def test_what_has_paused_goes_on_in_a_later_command_to_the_same_bits(
    strategy: tuple[str, ...], tmp_path: Path, trained: Trained
) -> None:
    folder = tmp_path / "search"
    search = (
        "search=random",
        "search.rungs=asha",
        "search.reduction=2",
        "search.keep_checkpoints=true",
        LR,
    )
    words = (
        *search,
        *SHORT,
        *strategy,
        "epochs=2",
        "world_size=2",
        "threads=1",
        "tensorboard.images=false",
    )
    first = expt.sweep(*words, "search.runs=1", folder=folder)
    assert [run.status for run in first] == ["paused"]
    (waits,) = first.paused
    assert (waits.record["until_epoch"], len(waits.history)) == (1, 1)
    later = expt.sweep(*words, "search.runs=2", folder=folder)
    assert {run.status for run in later} == {"completed", "paused"}
    (done,) = later.completed
    assert done.record["attempts"] == 2
    assert later.best.folder == done.folder
    arguments = [word for word in done.record["arguments"] if not word.startswith("hydra.")]
    assert_same(RunFolder(done.folder), trained(*arguments, name="whole"))


def test_of_more_epochs_a_run_goes_on_from_its_shorter_self_past_a_rung_that_this_had_passed(
    tmp_path: Path,
) -> None:
    """It pauses at once, without a step, and has a checkpoint all the same: that of the shorter
    one.
    """
    words = ("search=random", "search.runs=1", LR, *SHORT, *ALONE)
    (short,) = expt.sweep(*words, "epochs=1", folder=tmp_path / "search")
    (waits,) = expt.sweep(
        *words, "search.rungs=asha", "epochs=4", "resume=auto", folder=tmp_path / "search"
    )
    assert (short.status, waits.status, len(waits.history)) == ("completed", "paused", 1)
    typed = run("resume=auto", f"hydra.run.dir='{waits.folder}'", cwd=tmp_path)
    assert (typed.returncode, typed.stderr) == (0, "")
    assert [line.split()[1] for line in typed.stdout.splitlines() if line.startswith("epoch ")] == [
        "2/4",
        "3/4",
        "4/4",
    ]


def ends(folder: Path) -> dict[str, Any]:
    """All that a search has come to, but for times."""
    found = {}
    for path in sorted(folder.glob("*/result.json")):
        each = RunFolder(path.parent)
        kept = {name.name for name in path.parent.glob("checkpoints/*.pt")}
        found[path.parent.name] = (
            each.result["status"],
            each.points,
            each.result["objective"],
            kept,
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpe", "random"])
def test_a_search_that_is_killed_five_times_comes_to_the_same_end(
    name: str, tmp_path: Path, trained: Trained
) -> None:
    words = (
        "-m",
        f"search={name}",
        "search.rungs=asha",
        "search.runs=12",
        "epochs=9",
        *SHORT,
        *ALONE,
        LR,
    )
    whole = run(*words, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    moments = random.Random(name)
    killed = tmp_path / "killed"
    for _ in range(5):
        process = start(*words, "hydra.sweep.dir=killed", cwd=tmp_path)
        until = written(killed) + moments.randrange(1, written(tmp_path / "whole") // 7)
        end = time.monotonic() + 60
        while process.poll() is None and written(killed) < until and time.monotonic() < end:
            time.sleep(0.002)  # the workers need the core
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    last = run(*words, "hydra.sweep.dir=killed", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    found, expected = ends(killed), ends(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for run_name, mine in found.items():
        assert mine == expected[run_name], run_name
    statuses = [each[0] for each in found.values()]
    assert {"completed", "paused"} == {*statuses}
    assert table(last.stdout) == table(whole.stdout)
    promoted = next(
        path.parent
        for path in killed.glob("*/result.json")
        if found[path.parent.name][0] == "completed"
    )
    arguments = [
        word for word in RunFolder(promoted).result["arguments"] if not word.startswith("hydra.")
    ]
    assert_same(RunFolder(promoted), trained(*arguments, name="alone"))


def written(folder: Path) -> int:
    """Values that the runs have logged so far."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/metrics.jsonl"))


def table(stdout: str) -> list[list[str]]:
    """The leaderboard's rows, without the time."""
    lines = itertools.dropwhile(
        lambda line: not line.startswith("optimizer.lr"), stdout.splitlines()
    )
    rows = itertools.takewhile(lambda line: line[:1].isdigit(), itertools.islice(lines, 1, None))
    return [line.split()[:-2] for line in rows]
