"""Evaluations within epochs: training does not notice them, and what they decide is resumed."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import expt
from expt.runs.named_checkpoint import whole
from expt.runs.paths import RunPaths
from expt.worker.run import Run
from tests.conftest import Configured
from tests.conftest import Trained as TrainInWorkers
from tests.facade import Patch, as_typed, same
from tests.integration.test_resume import assert_equal, kill_at
from tests.worker.conftest import TrainAlone, TrainTogether
from tests.worker.test_continue import SHORT, _assert_same, _longer
from tests.worker.test_run import TOGGLED

FEW = ("dataset.train_limit=320", "batch_size=32", "log_every=3")


def _draws(run: Run) -> None:
    """Let each evaluation draw random numbers, as a custom model or metric may."""

    def draw(module: nn.Module, *_: object) -> None:
        if not module.training:
            torch.rand(1)

    run.learner.module.register_forward_hook(draw)


@pytest.mark.parametrize(
    "words",
    [as_typed("model=convnet model.dropout=0.3 ema=0.9 epochs=2"), (*TOGGLED, "epochs=2")],
    ids=["batch norm, dropout and an average", "an optimizer that trains at other weights"],
)
def test_evaluation_leaves_training_alone(words: tuple[str, ...], train_alone: TrainAlone) -> None:
    often, never = (
        train_alone(*FEW, *words, f"eval_every_steps={steps}", name=f"{steps}", before=_draws)
        for steps in (4, 99)
    )
    assert [step for step, _ in often.curve("loss/val")] == [4, 8, 12, 16, 20]
    assert [step for step, _ in never.curve("loss/val")] == [20]
    for tag in ("loss/train", "accuracy/train", "lr"):
        assert often.curve(tag) == never.curve(tag)
    assert {*never.curve("running/loss")} < {*often.curve("running/loss")}
    states = [done.state() for done in (often, never)]
    for key in ("model", "optimizer", "workers"):
        assert same(*(state[key] for state in states)), key
    assert often.curve("loss/val")[-1] == never.curve("loss/val")[-1]


def test_any_number_of_workers_evaluates_the_same(train_together: TrainTogether) -> None:
    words = (*FEW, *as_typed("epochs=2 eval_every_steps=3 scheduler=plateau"))
    words = (*words, *as_typed("scheduler.patience=0 scheduler.min_delta=0.4 scheduler.cooldown=1"))
    one, two = (train_together(size, *words, name=f"{size}") for size in (1, 2))
    for tag in ("accuracy/val", "loss/val", "lr", "loss/train"):
        steps, values = zip(*one.curve(tag), strict=True)
        assert tuple(step for step, _ in two.curve(tag)) == steps
        assert [value for _, value in two.curve(tag)] == pytest.approx(values, abs=1e-3), tag
    rates = [0.05] * 5 + [0.005] * 2 + [0.0005]
    assert [lr for _, lr in one.curve("lr")] == pytest.approx(rates), "it counts evaluations"


def _ticking(run: Run) -> None:
    """Let each step take ten seconds, by the clock of training."""
    seconds, note = [0.0], run._note_step

    def tick() -> None:
        seconds[0] += 10
        note()

    run.history._clock = lambda: seconds[0]
    run._note_step = tick  # type: ignore[method-assign]


def test_minutes_decide(train_alone: TrainAlone, configured: Configured, tmp_path: Path) -> None:
    """The end comes within an epoch, or with one, where no evaluation is due."""
    words = (*SHORT, *as_typed("epochs=9 eval_every_minutes=0.45 model.dropout=0.2"))
    at_once = train_alone(*words, "max_steps=26", name="at_once", before=_ticking)
    for minutes, steps in (("1.95", [3, 6, 9, 12]), ("1.6", [3, 6, 9, 10])):
        end, paths = f"max_minutes={minutes}", RunPaths(tmp_path / minutes)
        short = train_alone(*words, end, name=minutes, before=_ticking)
        assert [step for step, _ in short.curve("loss/val")] == steps
        assert (short.status, short.result["steps"]) == ("completed", steps[-1])
        assert short.result["ended_by"] == "max_minutes"
        assert len(short.curve("loss/test")) == 1
        points, epoch_s = short.points, short.result["epoch_s"]
        again = _longer(train_alone, configured, paths, *words, end)
        assert (again.status, again.points) == ("completed", points), "nothing is left to train"
        assert again.result["epoch_s"] == epoch_s
        longer = _longer(train_alone, configured, paths, *words, "max_steps=26")
        states = [run.state() for run in (longer, at_once)]
        for key in ("model", "optimizer", "workers", "position"):
            assert same(*(state[key] for state in states)), key
        assert longer.curve("loss/train") == at_once.curve("loss/train")


def test_no_step_left(train_alone: TrainAlone, configured: Configured, tmp_path: Path) -> None:
    words = (*SHORT, *as_typed("epochs=2 eval_every_steps=2 log_every=99"))
    enough = "early_stop={metric: loss/val, threshold: 9}"
    rates = train_alone(*words, enough, name="run").curve("lr")
    again = _longer(
        train_alone, configured, RunPaths(tmp_path / "run"), *words, enough.replace("9", "8")
    )
    assert rates == again.curve("lr")
    assert rates[0][1] > 0


def test_the_best_evaluations_keep_their_checkpoints(train_alone: TrainAlone) -> None:
    words = (*FEW, *as_typed("epochs=2 eval_every_steps=2 checkpoint.keep_best=3"))
    done = train_alone(*words, "objective=loss/val", "optimizer.lr=0.6")
    losses = dict(done.curve("loss/val"))
    best, *others = sorted(losses, key=lambda step: losses[step])[:3]
    assert done.result["best"]["step"] == best
    names = {path.name for path in done.run.paths.checkpoints.glob("best*.safetensors")}
    assert names == {"best.safetensors", *(f"best-{step}.safetensors" for step in others)}
    for step in (best, *others):
        found = whole("weights", "RUN", done.folder, f"{step}").state
        assert (found["position"]["step"], found["evaluated"]["value"]) == (step, losses[step])


KILLED = (
    *as_typed("epochs=3 dataset.train_limit=640 model.dropout=0.3 log_every=1 threads=1"),
    *as_typed("eval_every_steps=7 scheduler=plateau scheduler.patience=0 optimizer.lr=0.3"),
    *as_typed("checkpoint.every_steps=6 checkpoint.every_epochs=null checkpoint.keep_best=2"),
    "early_stop={metric: loss/val, patience: 5, min_delta: 0.2}",
)


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_after_an_evaluation_goes_on_to_the_same_bits(
    workers: int, tmp_path: Path, trained: TrainInWorkers, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*KILLED, f"world_size={workers}")
    kill_at(tmp_path / "killed", words, 14, EXPT_FAULT="0:15:hang")
    resumed, whole_run = trained("resume=auto", name="killed"), trained(*words, name="whole")
    assert resumed.result["resumed_from"]["step"] % 10
    assert_equal(resumed, whole_run)
    _assert_same(resumed, whole_run)
    assert resumed.result["best"]["step"] % 10, "it is within an epoch"
    measured = expt.evaluate(resumed.folder, split="val", world_size=1)
    best = resumed.result["best"]
    assert measured["accuracy/val"] == best["value"]
    (record,) = resumed.folder.glob("evaluations/*/result.json")
    assert json.loads(record.read_text())["evaluation_of"]["step"] == best["step"]
