"""Each sampler and each kind of rungs: a search that is killed and interrupted ends as one that
never was."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.facade import as_typed, ended, run, start

SPACE = ("optimizer.lr=tag(log,interval(1e-4,1))", "optimizer.weight_decay=interval(0,0.5)")
ALONE = ("world_size=1", "threads=1", "hydra.launcher.max_concurrent=1")
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
    words = (
        "-m",
        *as_typed(SEARCHES[name]),
        *SPACE,
        *ALONE,
        "experiment=diabetes",
        "model.hidden=[]",
    )
    whole = run(*words, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    moments = random.Random(name)
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start(*words, "hydra.sweep.dir=hurt", cwd=tmp_path)
        until = _written(tmp_path / "hurt") + moments.randrange(
            1, max(2, _written(tmp_path / "whole") // 3)
        )
        end = time.monotonic() + 60
        while (
            process.poll() is None
            and _written(tmp_path / "hurt") < until
            and time.monotonic() < end
        ):
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
    """All that a search has come to, but for times: of each run its place, its name, its numbers
    and checkpoints."""
    found = {}
    for path in folder.glob("*/result.json"):
        record = json.loads(path.read_text())
        numbers = {
            tag: value
            for tag, value in record["metrics"].items()
            if tag.startswith(("loss/", "mae/"))
        }
        kept = sorted(file.name for file in path.parent.glob("checkpoints/*.safetensors"))
        ended = (path.parent.name, record["status"], record["objective"], numbers, kept)
        assert record["search"]["number"] not in found
        found[record["search"]["number"]] = ended
    return found


def _best(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("best  ")]
