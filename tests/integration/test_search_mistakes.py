"""Mistakes beside a search's space: one line before it begins, and the next command works."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command.grammar import about_run
from expt.errors import ConfigError
from expt.runs.attempt import record_refusal
from expt.runs.paths import RunPaths
from tests.facade import Patch, as_typed, run

SHORT = as_typed(
    "dataset.train_limit=64 batch_size=32 world_size=1 threads=1 tensorboard.images=false"
)
SEARCH = ("search=random", *SHORT, "epochs=2", "optimizer.lr=tag(log,interval(1e-3,1))")
ONE_BY_ONE: Any = {"hydra": {"launcher": {"max_concurrent": 1}}, "quiet": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `a`, and a search `f` whose two points are done."""
    place = tmp_path_factory.mktemp("place")
    expt.run(*SHORT, "epochs=1", "checkpoint.keep=3", folder=place / "a", quiet=True)
    search(place / "f", 2)
    return place


@pytest.fixture(autouse=True)
def _there(place: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Each test in a folder of its own, with both."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "f"):
        shutil.copytree(place / name, name)


def search(folder: Path | str, runs: int, *words: str) -> Any:
    return expt.sweep(*SEARCH, f"search.runs={runs}", *words, folder=folder, **ONE_BY_ONE)


def rates(folder: str) -> list[float]:
    """Those of the runs there that have completed, in their order."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("*/result.json")]
    completed = [each for each in found if each["status"] == "completed"]
    completed.sort(key=lambda each: each["search"]["number"])
    return [each["overrides"]["optimizer.lr"] for each in completed]


def files(folder: str) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_search_that_no_trial_can_begin_with_is_refused_and_nothing_is_made() -> None:
    """In a new folder, and in one whose runs are of other settings."""
    before = files("f")
    for words in ("weights=nosuch", "dataset=image_folder dataset.root=nosuch"):
        for where in ("f", "new"):
            with pytest.raises(ConfigError, match=f"^{words.split()[-1]}"):
                search(where, 2, *words.split())
    for more in ("hydra.launcher.dry_run=true", "preflight=true"):
        typed = ("-m", *SEARCH, "search.runs=2", "weights=nosuch", more, "hydra.sweep.dir=f")
        asked = run(*typed, cwd=Path.cwd())
        assert (asked.returncode, len(asked.stderr.splitlines())) == (2, 1), asked.stderr
    assert files("f") == before
    assert not Path("new").exists()


@pytest.mark.parametrize("words", ["+recipe=x,y", "epochs=2,3"])
def test_runs_of_other_lengths_are_refused_at_rungs_before_they_begin(words: str) -> None:
    for name, epochs in (("x", 2), ("y", 3)):
        file = Path("conf/recipe", f"{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\nepochs: {epochs}\n")
    more = ("search=tpe", "search.rungs=asha", "search.runs=2", "hydra.sweep.dir=new")
    typed = run("-m", *SHORT, words, *more, cwd=Path.cwd())
    assert (typed.returncode, typed.stdout) == (2, "")
    assert "search.rungs=asha: " in typed.stderr
    assert not Path("new").exists()


def test_what_keeps_only_some_trials_from_beginning_is_reported_in_their_turn() -> None:
    words = (*SEARCH[:-1], "search.runs=2", "fork=a@2", "model.hidden=[64],[256]")
    found = expt.sweep(*words, folder="new", **ONE_BY_ONE)
    assert [run.record["config"]["model"]["hidden"] for run in found.completed] == [[256]]
    assert len(found.failed) == 1


def test_a_trial_that_was_refused_is_tried_once_more() -> None:
    refused = RunPaths(Path("f", "refused"))
    words = [*SEARCH[1:-1], "threads=1", "optimizer.lr=0.5"]
    about: Any = {**about_run(refused.folder.name, words), "search": {"number": 2}}
    record_refusal(refused, about, None, ConfigError("its data was not there"))
    search("f", 3)
    assert rates("f")[2] == 0.5
