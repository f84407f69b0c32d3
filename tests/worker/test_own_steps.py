"""Steps of any kind: a task sees where the run is, measures rarely, and needs no dataset."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from expt.data.indexing import mix
from expt.errors import ConfigError
from tests.conftest import Trained, Typed
from tests.facade import Capture, Patch, RunFolder, as_typed, run
from tests.worker import own_tasks
from tests.worker.conftest import TrainAlone, TrainTogether, assert_same, stopped_and_resumed

OWN = "tests.worker.own_tasks"
TELLING = (
    "~task",
    f"+task={{_target_: {OWN}.Telling, metrics: {{step: max, epoch: max, length: max}}}}",
    *as_typed("objective=loss/val log_every=1 epochs=3 dataset.train_limit=128 batch_size=32"),
)
EACH = [*range(1, 13)]


def dear(metric: str, *more: str) -> tuple[str, ...]:
    task = f"+task={{_target_: {OWN}.Dear, metrics: {{cheap: max, dear: {metric}}}}}"
    few = as_typed("epochs=5 dataset.train_limit=64 batch_size=32 objective=loss/val")
    return "~task", task, *few, *more


STEPS = (
    *("dataset=steps", "~task", "~model", f"+task._target_={OWN}.Drawn"),
    *(f"+model._target_={OWN}.Line", "optimizer.lr=0.1", "batch_size=8", "log_every=1"),
)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_a_task_sees_where_the_run_is(
    size: int, accumulation: int, train_together: TrainTogether
) -> None:
    words = (*TELLING, f"gradient_accumulation={accumulation}")
    done = train_together(size, *words, name="run")
    assert [value for _, value in done.curve("running/step")] == [at - 1 for at in EACH]
    assert {value for _, value in done.curve("running/length")} == {12}
    assert [value for _, value in done.curve("running/epoch")] == [-(-at // 4) for at in EACH]
    assert [value for _, value in done.curve("step/val")] == [4, 8, 12]
    best = min((loss, step) for step, loss in done.curve("loss/val"))[1]
    assert [value for _, value in done.curve("step/test")] == [12], "where training has ended"
    assert done.state("best")["position"]["step"] == best


@pytest.mark.slow
def test_it_does_so_right_after_a_resume_and_a_fork(train_alone: TrainAlone) -> None:
    whole = train_alone(*TELLING, name="whole")
    resumed = stopped_and_resumed(train_alone, *TELLING, step=6)
    assert_same(whole, resumed)
    longer = train_alone(*TELLING, "epochs=4", name="stopped", source=whole.run.paths.last)
    assert dict(longer.curve("running/step"))[13] == 12
    assert dict(longer.curve("running/length"))[13] == 16


@pytest.mark.parametrize("way", ["Telling", "Dear"])
def test_a_task_that_plans_to_the_end_keeps_it(
    way: str, typed: Typed, trained: Trained, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Losses until there would have been others in a longer run."""
    monkeypatch.chdir(tmp_path)
    own = TELLING if way == "Telling" else dear("max")
    words = (*own, "epochs=2", "world_size=1")
    done = trained(*words, "max_steps=3", name="run")
    longer = typed(*words, "max_steps=4", f"resume={done.folder}", "hydra.run.dir=longer")
    refused = way == "Telling"
    assert (longer.returncode, "max_steps=4" in longer.stderr) == (2 * refused, refused)
    again = typed(*words, "max_steps=3", f"resume={done.folder}", "hydra.run.dir=again")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("metric", "measured"),
    [
        ("{better: max, train: false}", {2: 1, 4: 1, 6: 1, 8: 1, 10: 1}),
        ("{better: max, every: 2}", {4: 1, 8: 1}),
        ("{better: max, every: 4}", {8: 1}),
    ],
)
def test_a_dear_metric_is_measured_in_some_evaluations_only(
    metric: str, measured: dict[int, int], train_alone: TrainAlone
) -> None:
    own_tasks.seen.clear()
    done = train_alone(*dear(metric, "log_every=1"), name="run")
    curve = dict(done.curve("dear/val"))
    assert curve.keys() == measured.keys()
    assert all(dict(done.curve("cheap/val"))[step] == value for step, value in curve.items())
    assert not done.curve("dear/train")
    assert not done.curve("running/dear")
    assert {step for evaluates, step in own_tasks.seen if not evaluates} == set()
    assert {*done.result["metrics"]} >= {"dear/test", "cheap/train"}, "the test measures all"
    assert ("dear/val" in done.result["metrics"]) == (10 in measured)


def test_one_of_torchmetrics_is_measured_as_rarely(train_alone: TrainAlone) -> None:
    pytest.importorskip("torchmetrics")
    cls = "torchmetrics.classification.MulticlassAccuracy"
    metric = f"{{_target_: {cls}, num_classes: 10, average: micro, better: max, every: 3}}"
    words = f"+task.metrics={{dear: {metric}}}", *dear("max")[2:], "objective=dear/val"
    done = train_alone(*words, name="run")
    measured = dict(done.curve("dear/val"))
    assert measured.keys() == {6}
    assert done.result["best"]["step"] == 6
    assert measured[6] == pytest.approx(dict(done.curve("accuracy/val"))[6])


def test_the_best_is_of_evaluations_that_measured_the_objective(train_alone: TrainAlone) -> None:
    words = dear("{better: max, every: 2}", "objective=dear/val")
    words += ("early_stop={metric: dear/val, patience: 1}", "epochs=9", "optimizer.lr=1.0e-9")
    whole = train_alone(*words, name="whole")
    assert (whole.result["best"]["step"], whole.result["steps"]) == (4, 8)
    assert_same(whole, stopped_and_resumed(train_alone, *words, step=5))


def test_an_objective_that_is_never_measured_is_refused(train_alone: TrainAlone) -> None:
    with pytest.raises(ConfigError, match=r"task\.metrics\.dear\.every=6"):
        train_alone(*dear("{better: max, every: 6}", "objective=dear/val"))
    with pytest.raises(ConfigError, match="objective=dear/train"):
        train_alone(*dear("{better: max, train: false}", "objective=dear/train"))


def test_a_metric_beyond_the_end_is_reported(train_alone: TrainAlone, capfd: Capture) -> None:
    train_alone(*dear("{better: max, every: 6}"))
    assert "task.metrics.dear.every=6" in capfd.readouterr().err


WITHOUT = as_typed("eval_split=null epochs=3 dataset.train_limit=64 batch_size=32 optimizer.lr=0.1")


def test_without_an_evaluation_the_last_is_the_best(train_alone: TrainAlone) -> None:
    done = train_alone(*WITHOUT, "checkpoint.keep=3", name="run")
    assert not done.curve("loss/val")
    assert (done.result["best"]["step"], done.result["objective"]["name"]) == (6, "accuracy/train")
    assert done.state("best")["position"]["step"] == 6
    assert done.result["objective"]["value"] == done.result["metrics"]["accuracy/train"]
    assert "loss/test" in done.result["metrics"], "there is a test set"
    assert_same(done, stopped_and_resumed(train_alone, *WITHOUT, "checkpoint.keep=3", step=3))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("objective=accuracy/val", "objective"),
        ("early_stop={metric: loss/val, patience: 2}", "early_stop.metric"),
        ("eval_every_steps=2", "eval_every_steps"),
    ],
)
def test_what_would_look_at_an_evaluation_is_refused(
    word: str, key: str, train_alone: TrainAlone
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        train_alone(*WITHOUT, word)


def test_training_may_end_it_or_lower_its_rate(train_alone: TrainAlone) -> None:
    stop = "early_stop={metric: loss/train, threshold: 100.0}"
    done = train_alone(*WITHOUT, stop, "scheduler=plateau", name="run")
    assert (done.result["steps"], done.result["ended_by"]) == (2, "early_stop.threshold")
    assert getattr(done.run.learner.scheduler, "metric", None) == "loss/train"


def test_steps_without_a_dataset_are_those_of_a_loop(train_together: TrainTogether) -> None:
    words = (*STEPS, "epoch_steps=4", "epochs=2", "optimizer.momentum=0")
    one, two = (train_together(size, *words, name=f"of {size}") for size in (1, 2))
    torch.manual_seed(0)
    line = own_tasks.Line()
    weight, bias = line.weight.detach(), line.bias.detach()
    losses: list[float] = []
    for step in range(8):
        seeds = [mix(0, 0, place) for place in range(8 * step, 8 * step + 8)]
        drawn = [torch.rand(1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        numbers = torch.cat(drawn)
        error: Tensor = numbers * weight[0, 0] + bias[0] - numbers.sin()
        losses.append(error.square().mean().item())
        weight -= 0.1 * 2 * (error * numbers).mean()
        bias -= 0.1 * 2 * error.mean()
    for done in (one, two):
        found = [value for _, value in done.curve("running/loss")]
        assert found == pytest.approx(losses, rel=1e-5)
        assert done.result["best"]["step"] == 8
        assert not done.curve("loss/val")


def test_they_resume_to_the_bit(train_alone: TrainAlone, capfd: Capture) -> None:
    words = (*STEPS, "epoch_steps=4", "epochs=3", "dataset.val=5", "dataset.test=3")
    whole = train_alone(*words, name="whole")
    assert whole.run.data.info.sizes == {"train_size": 32, "val_size": 5, "test_size": 3}
    assert_same(whole, stopped_and_resumed(train_alone, *words, step=6))
    assert "depend" not in capfd.readouterr().err, "outputs are compared one by one"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("dataset=steps", "task=classification"),
        ("dataset=steps dataset.val_fraction=0.1", "dataset.val_fraction"),
        ("dataset=steps ~task +task._target_=own.A", "epoch_steps"),
    ],
)
def test_what_steps_lack_is_refused(words: str, key: str, typed: Typed, tmp_path: Path) -> None:
    done = typed(*as_typed(words), f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 2
    assert key in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_without_evaluation_says_so(tmp_path: Path) -> None:
    done = run(*WITHOUT, "world_size=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint" in done.stdout
    assert RunFolder(tmp_path / "run").result["best"]["step"] == 6
