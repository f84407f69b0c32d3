"""`expt sweep`: a sweep that is under way does as it is told from another terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command import sweep as command
from expt.command.sweep_points import Grid
from expt.errors import ConfigError
from expt.runs import added, orders
from expt.runs.folder_lock import is_held
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PAUSED, RUNNING, read_result
from tests.conftest import ended, run, start

COLD_S = 180
"""How long a job may take to begin, which imports all anew."""
LONG = ("epochs=60", "dataset.train_limit=320", "world_size=1")


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def losses(folder: Path) -> list[float]:
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [point["value"] for point in points if point["tag"] == "loss/val"]


def _is_there(sweep: Path, name: str) -> bool:
    """Whether the command has come to this point of its grid."""
    try:
        return orders.give(sweep, "pause", (name,)) == ["none of these runs or waits"]
    except ConfigError:
        return False


def test_runs_pause_and_go_on_to_the_same_numbers_others_are_dropped_and_added(
    tmp_path: Path,
) -> None:
    sweep = tmp_path / "sweep"
    process = start(
        "-m", "optimizer.lr=0.1,0.02,0.03", *LONG, f"hydra.sweep.dir={sweep}", cwd=tmp_path
    )
    first, last = RunPaths(sweep / "lr=0.1"), RunPaths(sweep / "lr=0.03")
    until(lambda: first.metrics.exists())
    assert orders.give(sweep, "pause", ())[0].startswith("paused ")
    until(lambda: read_result(first).get("status") == PAUSED)
    until(lambda: _is_there(sweep, "lr=0.03"))
    done = run("sweep", "drop", str(sweep), "lr=0.02", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "dropped 1 run: lr=0.02\n")
    added = run(
        "sweep", "add", str(sweep), "optimizer.lr=0.1,0.5", "seed=1", "epochs=1", cwd=tmp_path
    )
    assert added.stdout == "added 2 runs: epochs=1,lr=0.1,seed=1, epochs=1,lr=0.5,seed=1\n", (
        added.stderr
    )
    with pytest.raises(ConfigError, match=r"^nix: no run of .*sweep has that name$"):
        orders.give(sweep, "drop", ("nix",))
    with pytest.raises(ConfigError, match="batch_size=0"):
        orders.give(sweep, "add", ("batch_size=0",))
    with pytest.raises(ConfigError, match=r"^fork=no/lr=1: there is no folder no/lr=1;"):
        orders.give(sweep, "add", ("fork=no/lr=1",))
    assert not last.result.exists() or read_result(last)["status"] != RUNNING
    assert orders.give(sweep, "resume", ()) == [
        "resumed 4 runs: lr=0.1, lr=0.03, epochs=1,lr=0.1,seed=1, epochs=1,lr=0.5,seed=1"
    ]
    told = ended(process)
    assert told.returncode == 0, told.stderr
    assert "dropped 1 run: lr=0.02\n" in told.stdout
    assert "] interrupted lr=0.02  dropped by a person\n" in told.stdout, "though it had not begun"
    names = {path.parent.name for path in sweep.glob("*/result.json")}
    assert {"lr=0.1", "lr=0.03", "epochs=1,lr=0.1,seed=1", "epochs=1,lr=0.5,seed=1"} <= names
    assert read_result(first)["attempts"] == 2
    plain = run("optimizer.lr=0.1", *LONG, f"hydra.run.dir={tmp_path}/plain", cwd=tmp_path)
    assert plain.returncode == 0
    assert losses(first.folder) == losses(tmp_path / "plain")
    assert len(losses(first.folder)) == 60
    assert not (sweep / orders.FOLDER).exists()


def test_what_a_word_takes_from_another_key_is_that_of_the_run_that_is_added(
    tmp_path: Path,
) -> None:
    sweep, decay = tmp_path / "sweep", "optimizer.weight_decay=${optimizer.lr}"
    process = start(
        "-m", decay, "optimizer.lr=0.01,0.02", *LONG, f"hydra.sweep.dir={sweep}", cwd=tmp_path
    )
    until(RunPaths(sweep / "lr=0.01").metrics.exists)
    assert orders.give(sweep, "add", ("optimizer.lr=0.07", "epochs=1")) == [
        "added 1 run: epochs=1,lr=0.07"
    ]
    assert ended(process).returncode == 0
    added = read_result(RunPaths(sweep / "epochs=1,lr=0.07"))["config"]["optimizer"]
    assert (added["lr"], added["weight_decay"]) == (0.07, 0.07)


@pytest.mark.slow
def test_a_sweep_of_cluster_jobs_takes_orders(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs expt[slurm]")
    sweep, words = tmp_path / "sweep", ("hydra/launcher=submitit_local", "optimizer.lr=0.1", *LONG)
    process = start("-m", *words, f"hydra.sweep.dir={sweep}", cwd=tmp_path)
    first = RunPaths(sweep / "epochs=60,lr=0.1,train_limit=320,world_size=1")
    until(first.metrics.exists, COLD_S)
    assert orders.give(sweep, "pause", ()) == [f"paused 1 run: {first.folder.name}"]
    until(lambda: read_result(first).get("status") == PAUSED, COLD_S)
    with pytest.raises(ConfigError, match="gpus: the cluster gives each run its own; pause some"):
        orders.give(sweep, "gpus", ("0",))
    (added,) = orders.give(sweep, "add", ("optimizer.lr=0.02",))
    name = added.removeprefix("added 1 run: ")
    assert orders.give(sweep, "drop", (name,)) == [f"dropped 1 run: {name}"], (
        "all is paused, and it waits"
    )
    assert orders.give(sweep, "resume", ()) == [f"resumed 1 run: {first.folder.name}"]
    until(lambda: read_result(first).get("status") == COMPLETED, COLD_S)
    told = ended(process)
    assert told.returncode == 0, told.stderr
    assert f"] interrupted {name}  dropped by a person\n" in told.stdout
    assert not (sweep / name).exists()
    assert read_result(first)["attempts"] == 2
    plain = run("optimizer.lr=0.1", *LONG, f"hydra.run.dir={tmp_path}/plain", cwd=tmp_path)
    assert plain.returncode == 0
    assert losses(first.folder) == losses(tmp_path / "plain")


def test_a_search_of_several_goals_takes_further_points_and_no_other_settings_of_its_own(
    tmp_path: Path,
) -> None:
    sweep = tmp_path / "sweep"
    search = (
        "search=random",
        "search.runs=1",
        "objective=[loss/val,accuracy/val]",
        "optimizer.lr=interval(0.01,0.02)",
    )
    process = start("-m", *search, *LONG, f"hydra.sweep.dir={sweep}", cwd=tmp_path)
    until(lambda: any(sweep.glob("*/metrics.jsonl")))
    orders.give(sweep, "pause", ())
    with pytest.raises(ConfigError, match=r"^search\.runs=9: is the search's; end it by Ctrl-C, "):
        orders.give(sweep, "add", ("search.runs=9",))
    with pytest.raises(
        ConfigError, match=r"^optimzer\.lr=3: there is no key .* Did you mean 'optimizer\.lr'\?$"
    ):
        orders.give(sweep, "add", ("optimzer.lr=3",))
    with pytest.raises(
        ConfigError, match=r"^optimizer\.lr: is searched in an interval; give the run a value"
    ):
        orders.give(sweep, "add", ("epochs=1",))
    assert orders.give(sweep, "add", ("optimizer.lr=0.5", "epochs=1")) == [
        "added 1 run: epochs=1,lr=0.5"
    ]
    orders.give(sweep, "add", ("optimizer.lr=0.5,0.6", "epochs=59"))
    assert [point.keys for point in added.read(sweep)] == [["optimizer.lr", "epochs"]] * 3
    orders.give(sweep, "drop", ("epochs=59",))
    (kept,) = added.read(sweep)
    assert {"objective=loss/val", "optimizer.lr=0.5", "epochs=1"} <= {*kept.words}, (
        "and none that was dropped"
    )
    orders.give(sweep, "drop", ("epochs=60",))
    orders.give(sweep, "resume", ())
    told = ended(process)
    assert told.returncode == 0, told.stderr
    assert read_result(RunPaths(sweep / "epochs=1,lr=0.5"))["objective"]["name"] == "loss/val"


def test_an_order_that_comes_while_the_sweep_starts_is_carried_out_and_one_to_a_killed_command_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / orders.FOLDER
    folder.mkdir()
    (folder / "1-1.json").write_text('{"word": "drop", "about": ["lr=0.1"]}')

    class Opened(Grid):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            assert is_held(RunPaths(tmp_path)), "from now on orders are given"
            folder.mkdir(exist_ok=True)
            (folder / "2-2.json").write_text('{"word": "add", "about": ["optimizer.lr=0.2"]}')
            super().__init__(*arguments, **more)

    monkeypatch.setattr(command, "Grid", Opened)
    small = ("epochs=1", "dataset.train_limit=64", "world_size=1", f"hydra.sweep.dir='{tmp_path}'")
    expt.sweep("optimizer.lr=0.1,0.3", *small, quiet=True)
    status = {
        path.parent.name: read_result(RunPaths(path.parent))["status"]
        for path in tmp_path.glob("*/result.json")
    }
    assert status == dict.fromkeys(("lr=0.1", "lr=0.2", "lr=0.3"), COMPLETED)


def _orders_at_the_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *given: tuple[str, str]
) -> list[tuple[str, ...]]:
    """Give these as soon as the sweep can be given any, when it has composed one point; fills in
    their answers.
    """
    answers = list[tuple[str, ...]]()

    class Opened(Grid):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            (folder / orders.FOLDER).mkdir(exist_ok=True)
            for number, (word, about) in enumerate(given):
                content = {"word": word, "about": about.split()}
                (folder / orders.FOLDER / f"{number}-1.json").write_text(json.dumps(content))
            super().__init__(*arguments, **more)

    def answer(order: orders.Order, *lines: str, refused: bool = False) -> None:
        answers.append(lines)
        order.file.unlink()

    monkeypatch.setattr(command, "Grid", Opened)
    monkeypatch.setattr(orders.Order, "answer", answer)
    return answers


SMALL = ("epochs=1", "dataset.train_limit=64", "world_size=1")


@pytest.mark.parametrize("batch", ["null", "2"])
def test_orders_are_about_points_that_are_still_to_come_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    said = _orders_at_the_beginning(
        tmp_path,
        monkeypatch,
        ("drop", "seed>0 lr=0.2"),
        ("pause", "lr=0.1,seed=1"),
        ("add", "seed=0,1"),
        ("resume", "lr=0.1"),
        ("drop", "seed=2"),
        ("drop", "model=convnet"),
        ("drop", "hidden=[8]"),
        ("add", "seed=1 optimizer.lr=0.2"),
        ("drop", "lr=0.1 seed=1"),
    )
    grid = (
        "optimizer.lr=0.1,0.2",
        "seed=0,1",
        f"+hydra.sweeper.max_batch_size={batch}",
        f"hydra.sweep.dir='{tmp_path}'",
    )
    expt.sweep(*grid, *SMALL, quiet=True)
    assert said == [
        ("dropped 1 point still to come",),
        ("paused 1 point still to come",),
        ("added 1 run: lr=0.2,seed=1; 3 are there already",),
        ("resumed 1 point still to come",),
        (f"seed=2: no run of {tmp_path} is that",),
        (f"model=convnet: no run of {tmp_path} is that",),
        (f"hidden=[8]: no run of {tmp_path} is that",),
        ("nothing is new; 1 is there already",),
        ("dropped 1 point still to come",),
    ]
    status = {
        path.parent.name: read_result(RunPaths(path.parent))["status"]
        for path in tmp_path.glob("*/result.json")
    }
    assert status == dict.fromkeys(("lr=0.1,seed=0", "lr=0.2,seed=0", "lr=0.2,seed=1"), COMPLETED)


def test_an_order_about_a_setting_that_hangs_on_another_is_carried_out_as_the_runs_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _orders_at_the_beginning(
        tmp_path,
        monkeypatch,
        ("drop", "log_every=2"),
        ("drop", "log_every!=3 epochs=3"),
        ("drop", "epochs=9"),
    )
    words = ("epochs=1,2,3", "log_every=${epochs}", *SMALL[1:])
    expt.sweep(*words, f"hydra.sweep.dir='{tmp_path}'", quiet=True)
    assert said == [
        ("dropped those still to come that are that",),
        ("dropped those still to come that are that",),
        (f"epochs=9: no run of {tmp_path} is that",),
    ]
    assert {path.parent.name for path in tmp_path.glob("*/result.json")} == {"epochs=1", "epochs=3"}


def test_to_add_what_was_dropped_takes_the_drop_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _orders_at_the_beginning(
        tmp_path,
        monkeypatch,
        ("pause", "seed=*"),
        ("drop", "seed=0"),
        ("drop", "seed>0"),
        ("add", "seed=3,0"),
        ("add", "seed=3"),
        ("resume", ""),
    )
    expt.sweep("seed=0,1,2,3", f"hydra.sweep.dir='{tmp_path}'", *SMALL, quiet=True)
    assert said[1:5] == [
        ("dropped 1 run: seed=0",),
        ("dropped 3 points still to come",),
        ("added 2 runs: seed=0, seed=3",),
        ("nothing is new; 1 is there already",),
    ]
    assert {path.parent.name for path in tmp_path.glob("*/result.json")} == {"seed=0", "seed=3"}
    assert "added" not in read_result(RunPaths(tmp_path / "seed=3")), "it is the grid's"


def test_an_order_to_nobody_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    assert not is_held(RunPaths(tmp_path / "sweep"))
    for words, text in (
        (
            ("pause", "sweep"),
            "sweep: no sweep is under way there; type its command again, which resumes it",
        ),
        (("pause", "nowhere"), "nowhere: there is no such folder; name that of a sweep"),
        (
            ("pause",),
            "the following arguments are required: FOLDER; see python -m expt sweep --help",
        ),
        (("stop", "sweep"), "stop: is no order; use one of add, drop, pause, resume, gpus"),
        (("drop", "sweep"), "drop: say what, see python -m expt sweep --help"),
    ):
        done = run("sweep", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"error: {text}\n")
    assert not any((tmp_path / "sweep").iterdir())
