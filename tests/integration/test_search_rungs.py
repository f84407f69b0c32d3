"""Searches with rungs as they are typed: pruned runs resume in later commands and after kills."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.runs import checkpoint
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, ended, run, same, start

SHORT = as_typed(
    "dataset.train_limit=320 batch_size=32 optimizer.momentum=0.9 model.dropout=0.3 ema=0.9"
)
ALONE = ("world_size=1", "threads=1", "tensorboard.images=false", "hydra.launcher.max_concurrent=1")
SHARDED = ("strategy=fsdp", "checkpoint.sharded=true", "world_size=2")
LR = "optimizer.lr=tag(log,interval(1e-3,3))"


def weights(folder: Path) -> dict[str, Any]:
    state = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    return {key: state[key] for key in ("model", "ema", "optimizer", "scheduler")}


def assert_same(promoted: RunFolder, whole: RunFolder) -> None:
    assert promoted.points == whole.points
    assert same(weights(promoted.folder), weights(whole.folder))


@pytest.mark.parametrize(
    "strategy", [(), pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["ddp", "fsdp in parts"]
)
def test_pruned_run_resumes(strategy: tuple[str, ...], tmp_path: Path, trained: Trained) -> None:
    folder = tmp_path / "search"
    search = "search=random search.rungs=asha search.reduction=2 search.keep_checkpoints=true"
    size = "epochs=2 threads=1 tensorboard.images=false"
    words = (*as_typed(f"{search} {size}"), LR, *SHORT, *(strategy or ("world_size=1",)))
    first = expt.sweep(*words, "search.runs=1", folder=folder)
    assert [run.status for run in first] == ["pruned"]
    (waits,) = first.pruned
    assert (waits.record["until_epoch"], len(waits.history)) == (1, 1)
    later = expt.sweep(*words, "search.runs=2", folder=folder)
    assert {run.status for run in later} == {"completed", "pruned"}
    (done,) = later.completed
    assert done.record["attempts"] == 2
    assert later.best.folder == done.folder
    arguments = [word for word in done.record["arguments"] if not word.startswith("hydra.")]
    assert_same(RunFolder(done.folder), trained(*arguments, name="whole"))


@pytest.mark.slow
def test_longer_run_resumes_its_shorter_self_past_a_rung(tmp_path: Path) -> None:
    """Prune it at once, without a step, with the checkpoint of the shorter run."""
    words = ("search=random", "search.runs=1", LR, *SHORT, *ALONE)
    (short,) = expt.sweep(*words, "epochs=1", folder=tmp_path / "search")
    (waits,) = expt.sweep(
        *words, "search.rungs=asha", "epochs=4", "resume=auto", folder=tmp_path / "search"
    )
    assert (short.status, waits.status, len(waits.history)) == ("completed", "pruned", 1)
    typed = run("resume=auto", f"hydra.run.dir='{waits.folder}'", cwd=tmp_path)
    assert (typed.returncode, typed.stderr) == (0, "")
    epochs = [line.split()[1] for line in typed.stdout.splitlines() if line.startswith("epoch ")]
    assert epochs == ["2/4", "3/4", "4/4"]


SPACE = ("optimizer.lr=tag(log,interval(1e-4,1))", "optimizer.weight_decay=interval(0,0.5)")
SEARCH_KILLED_ALONE = ("world_size=1", "threads=1", "hydra.launcher.max_concurrent=1")
SEARCHES = {
    "random": "search=random search.runs=4 epochs=1",
    "tpe": "search=tpe search.runs=4 epochs=1",
    "gp": "search=gp search.runs=4 epochs=1",
    "cmaes": "search=cmaes search.runs=5 search.population=2 epochs=1",
    "qmc": "search=qmc search.runs=4 epochs=1",
    "nsga2": (
        "search=nsga2 search.runs=5 search.population=2 objective=[loss/val,loss/train] epochs=1"
    ),
    "asha": "search=tpe search.rungs=asha search.runs=5 search.reduction=2 epochs=4",
    "median": "search=random search.rungs=median search.runs=5 epochs=3",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_killed_search_comes_to_the_same_end(name: str, tmp_path: Path) -> None:
    more = ("experiment=diabetes", "model.hidden=[]")
    words = ("-m", *as_typed(SEARCHES[name]), *SPACE, *SEARCH_KILLED_ALONE, *more)
    whole = run(*words, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    moments = random.Random(name)
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start(*words, "hydra.sweep.dir=hurt", cwd=tmp_path)
        most = max(2, _written(tmp_path / "whole") // 3)
        until = _written(tmp_path / "hurt") + moments.randrange(1, most)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            if _written(tmp_path / "hurt") >= until:
                break
            time.sleep(0.002)  # the workers need the core
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        assert ended(process).returncode in (-signal.SIGKILL, 130, 0)
    last = run(*words, "hydra.sweep.dir=hurt", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert _ends(tmp_path / "hurt") == _ends(tmp_path / "whole")
    assert _best(last.stdout) == _best(whole.stdout)


def _written(folder: Path) -> int:
    """Values that the runs have logged so far."""
    found = 0
    for path in folder.glob("*/metrics.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # a run that begins anew has removed it since
            found += path.read_bytes().count(b"\n")
    return found


def _ends(folder: Path) -> dict[int, Any]:
    """Return each run's place, name, numbers and checkpoints in a search, without times."""
    found = {}
    for path in folder.glob("*/result.json"):
        record = json.loads(path.read_text())
        measured = record["metrics"].items()
        numbers = {tag: value for tag, value in measured if tag.startswith(("loss/", "mae/"))}
        kept = sorted(file.name for file in path.parent.glob("checkpoints/*.safetensors"))
        ended = (path.parent.name, record["status"], record["objective"], numbers, kept)
        assert record["search"]["number"] not in found
        found[record["search"]["number"]] = ended
    return found


def _best(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("best  ")]
