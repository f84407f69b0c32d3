"""Custom code: what it carries from step to step is saved or reported; its sums are tried first."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import expt
from expt.config.identity import shown
from expt.config.schema import RunConfig
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from expt.runs.result import read_result, update_result
from expt.training.own_state import load_own_state, own_state, unchanged
from expt.training.precision import Precision
from expt.worker import build, fault
from expt.worker.copies import Copies
from expt.worker.custom_code import FirstSteps
from expt.worker.run import Run
from expt.worker.sum_check import check_sums
from tests.conftest import Configured
from tests.every_task import CASES, config_of
from tests.facade import NO_PICTURES, Capture, RunFolder, request_of, usual
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, assert_same, stopped_and_resumed
from tests.worker.sharded import Observer
from tests.worker.stateful import Half, Saved, Warm
from tests.worker.test_evaluation import metrics

OWN, HOOKS = "tests.worker.stateful", ("_forward_hooks", "_forward_pre_hooks")


def of(name: str) -> tuple[str, ...]:
    if name in ("Warm", "Saved", "Hidden", "Centred", "Evaluated"):
        return "~task", f"+task._target_={OWN}.{name}", "objective=loss/val"
    if name.startswith("Slow"):
        return "~optimizer", f"+optimizer._target_={OWN}.{name}", "+optimizer.lr=0.1"
    if name == "Rising":
        schedule = f"+scheduler={{_target_: {OWN}.{name}, interval: step}}"
        return "~scheduler", schedule
    return "~model", f"+model._target_={OWN}.{name}"


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("Warm", {"task.steps", "task.seen"}),
        ("Saved", set()),
        ("Hidden", {"task.count", f"{OWN}.called", f"{OWN}.Hidden.kept"}),
        ("Counting", {"model.calls", "model.total"}),
        ("Extra", set()),
        ("Remembering", set()),
        ("Listed", set()),
        ("Outside", {f"{OWN}.calls", f"{OWN}.remember", f"{OWN}.Outside.calls_of_all"}),
        ("OnLayer", {"model.scales", *(f"model.layer.{each}" for each in ("count", *HOOKS))}),
        ("Unfreezing", set()),
        ("Slow", {"optimizer.slow"}),
        ("SlowSaved", set()),
        ("Rising", {"scheduler.calls", "scheduler.lr_lambdas"}),
    ],
)
def test_what_no_checkpoint_holds_is_reported_once(
    name: str, lost: set[str], train_alone: TrainAlone, capfd: Capture
) -> None:
    train_alone("max_steps=4", "checkpoint.every_steps=3", *of(name))
    lines = [line for line in capfd.readouterr().err.splitlines() if "no checkpoint" in line]
    told: Any = lines[0].removeprefix("warning: ").partition(":")[0].split(", ") if lines else ()
    assert (len(lines), {*told}) == (len(lost) > 0, lost)


def test_a_state_is_tried_on_a_copy(train_alone: TrainAlone) -> None:
    run = train_alone("max_steps=4", "checkpoint.every_steps=4", *of("SlowCleared")).run
    assert run.learner.optimizer.state


def test_state_of_epoch_ends_is_reported(train_alone: TrainAlone, capfd: Capture) -> None:
    callbacks = f"callbacks=[{{_target_: {OWN}.Epochs}},{{_target_: {OWN}.EpochsSaved}}]"
    train_alone("epochs=2", "checkpoint.every_steps=2", *of("Evaluated"), callbacks)
    lines = [line for line in capfd.readouterr().err.splitlines() if "no checkpoint" in line]
    told = [line.removeprefix("warning: ").partition(": ")[0] for line in lines]
    assert told == ["task.evaluated, callbacks.0.count", "task.began"]


def test_state_that_begins_in_a_later_step_is_reported(
    train_alone: TrainAlone, capfd: Capture
) -> None:
    train_alone("epochs=2", *of("Later"))
    assert "warning: model.late: changes while training" in capfd.readouterr().err


def test_state_of_any_worker_is_reported(train_together: TrainTogether, capfd: Capture) -> None:
    train_together(2, *usual(of("OnSecond")), "epochs=1", name="two")
    assert "warning: model.calls: changes while training" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "made"),
    [("Late", "late.weight"), ("Bank", "bank"), ("Replaced", "head.weight"), ("InAList", "more")],
)
def test_untrained_tensors_are_refused(name: str, made: str, configured: Configured) -> None:
    config = configured("max_steps=2", *of(name))
    learner = build.build_learner(config, build.build_data(config, ALONE), ALONE)
    steps = FirstSteps(config, learner, ALONE)
    learner.module(torch.zeros(2, 1, 8, 8, device=ALONE.device)).sum().backward()
    with pytest.raises(ConfigError, match=f"^model.*{made}.*: "):
        steps.step()


def test_what_has_been_unfrozen_is_trained_by_a_resumed_run(train_alone: TrainAlone) -> None:
    words = "max_steps=5", *of("Unfreezing")
    straight, resumed = train_alone(*words), stopped_and_resumed(train_alone, *words, step=3)
    assert_same(straight, resumed)
    bias = resumed.run.learner.module.get_parameter("layer.bias")
    assert bias.ne(bias[0]).any()


def test_what_is_unfrozen_late_is_refused_on_several_workers(configured: Configured) -> None:
    config = configured("max_steps=2", *of("Unfreezing"))
    learner = build.build_learner(config, build.build_data(config, ALONE), ALONE)
    steps = FirstSteps(config, learner, ALONE)
    learner.strategy.world_size = 2
    steps.refuse_late()
    learner.module.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"^model: layer\.bias: requires_grad .*world_size=1"):
        steps.refuse_late()


def test_a_parameter_of_a_task_is_reported(train_alone: TrainAlone, capfd: Capture) -> None:
    train_alone("max_steps=2", *of("Centred"))
    assert "task.centre: gets gradients, but no optimizer trains it" in capfd.readouterr().err


def two_on_four_workers(kind: type[Saved]) -> tuple[list[Saved], list[dict[str, Any]]]:
    """Load the states of two workers, of which one has a state, on four; return both."""
    tasks = [kind(), kind()]
    tasks[1].steps = 5
    saved = [own_state(task) for task in tasks]
    found = [kind() for _ in range(4)]
    for rank, task in enumerate(found):
        load_own_state(task, saved, ALONE.device, rank)
    assert [task.steps for task in found] == [0, 5, 0, 5]
    return tasks, saved


def test_another_number_of_workers_and_another_task_take_it() -> None:
    tasks, saved = two_on_four_workers(Saved)
    other = Half()
    load_own_state(other, saved, ALONE.device, 1)
    assert other.steps == 0
    assert own_state(Warm()) == {}
    tasks[0].seen = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Saved\.state_dict"):
        own_state(tasks[0])


class Begins(Saved):
    """Has a state once its first loss is computed."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps} if self.steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state.get("steps", 0)


def test_each_worker_has_its_own_state_or_none() -> None:
    two_on_four_workers(Begins)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_that_an_evaluation_begins_ends_with_it(steps: int) -> None:
    task = Begins()
    task.steps = steps
    with unchanged(task, ALONE.device):
        task.steps += 1
    assert task.steps == steps


@pytest.mark.slow
def test_numbers_that_are_no_sums(
    train_alone: TrainAlone, train_together: TrainTogether, configured: Configured
) -> None:
    """Those since each log point, and of the epoch; a plain loop's, on two workers and resumed."""
    metrics = "+task.metrics={widest: max, lowest: min, steps: max, hits: max}"
    words: tuple[str, ...] = (
        "~task", f"+task._target_={OWN}.Peaked", metrics, "epochs=2", "objective=loss/val",
    )  # fmt: skip
    words += ("model=mlp", "model.dropout=0", "log_every=2", "batch_size=256", NO_PICTURES)
    two = train_together(2, *words, "checkpoint.every_steps=7", "checkpoint.keep=9", name="two")
    modules: list[Any] = []
    one = train_alone(*words, before=lambda run: modules.append(copy.deepcopy(run.learner)))
    seen: list[list[tuple[float, float]]] = []
    learner, train = modules[0], build.build_data(configured(*usual(words)), ALONE).train
    for epoch in (1, 2):
        seen.append([])
        for batch in train.epoch(epoch):
            outputs = learner.module(batch.inputs)
            seen[-1].append((outputs.max().item(), outputs.min().item()))
            functional.cross_entropy(outputs, batch.targets).backward()
            learner.optimizer.step()
            learner.optimizer.zero_grad()
            learner.scheduler.step()
    steps = [pair for epoch in seen for pair in epoch]
    pairs = [steps[at : at + 2] for at in range(0, len(steps), 2)]
    expected: dict[str, list[float]] = {
        "running/widest": [max(largest for largest, _ in pair) for pair in pairs],
        "widest/train": [max(largest for largest, _ in epoch) for epoch in seen],
        "lowest/train": [min(smallest for _, smallest in epoch) for epoch in seen],
        "steps/train": [len(seen[0]), len(steps)],
        "running/steps": [*range(2, len(steps) + 1, 2)],
    }
    resumed = stopped_and_resumed(train_alone, *words, step=7)
    for run in (one, two, resumed):
        for tag, numbers in expected.items():
            assert [value for _, value in run.curve(tag)] == pytest.approx(numbers, abs=1e-4), tag
    assert resumed.points == one.points
    states = checkpoint_file.candidates(two.paths.last)
    source = next(at for at in states if checkpoint_file.read(at)["position"]["step"] == 7)
    found = train_alone(*words, name="both", source=source)
    widest = found.curve("widest/train")[-1][1]
    assert widest == pytest.approx(expected["widest/train"][-1], abs=1e-4)


CPU = torch.device("cpu")
Gives = Callable[[Tensor, Batch], Any]


class Task(expt.Task):
    """Gives what it is given functions for."""

    def __init__(self, loss: Gives, measure: Gives = lambda *_: {}) -> None:
        self._loss, self._measure = loss, measure

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        return self._loss(outputs, batch)

    def measure(self, outputs: Tensor, batch: Batch) -> Any:
        return self._measure(outputs, batch)


class Locked(Task):
    """Can't be copied."""

    def __init__(self, loss: Gives) -> None:
        super().__init__(loss)
        self.lock = threading.Lock()


class InPlace(Task):
    """Changes all that it is given."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch.inputs.pop("x").div_(255)) + batch.targets.add_(1).sum()
        model.bias.zero_()
        return outputs


class Training(Task):
    """Trains by its function, and measures a sum."""

    def training_loss(self, outputs: Tensor, batch: Batch) -> Any:
        return self._loss(outputs, batch)

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        return outputs.sum(), len(outputs)


def each(outputs: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(outputs, batch.targets, reduction="none")


def noise(outputs: Tensor, batch: Batch) -> Tensor:
    return each(outputs, batch) * (0.5 + torch.rand(len(outputs)))


def total(outputs: Tensor, batch: Batch) -> Any:
    return each(outputs, batch).sum(), len(outputs)


def mean(outputs: Tensor, batch: Batch) -> Any:
    return each(outputs, batch).mean(), len(outputs)


def weighted(outputs: Tensor, batch: Batch) -> Any:
    weights = 0.1 + (batch.targets > 1)
    return (each(outputs, batch) * weights).sum(), weights.sum()


def weighted_mean(outputs: Tensor, batch: Batch) -> Any:
    loss, weight = weighted(outputs, batch)
    return loss / weight, weight


def hits_of_many(outputs: Tensor, batch: Batch) -> Any:
    # nothing is right at first, as of many classes
    hits = (outputs.argmax(1) == batch.targets).float().mean()
    return hits * (hits == 1), len(outputs)


def among(outputs: Tensor, batch: Batch) -> Any:
    places = torch.arange(len(outputs))
    return functional.cross_entropy(outputs @ outputs.T, places, reduction="sum"), len(outputs)


def hits(outputs: Tensor, batch: Batch) -> Any:
    return (outputs.argmax(1) == batch.targets).sum(), len(outputs)


class Phases(expt.PhasedTask):
    """Its second phase gives a mean."""

    phases = {"first": "weight", "second": "bias"}

    def phase(self, name: str, model: Any, batch: Batch, outputs: Any) -> Any:
        return (total if name == "first" else mean)(model(batch.inputs), batch)


def check(
    task: expt.Task,
    size: int = 20,
    module: nn.Module | None = None,
    seed: int = 0,
    batch: Batch | None = None,
) -> SimpleNamespace:
    torch.manual_seed(seed)
    module = module or nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    learner = SimpleNamespace(
        module=module, task=task, compiled=False, precision=Precision(False, CPU)
    )
    batch = batch or Batch(torch.randn(size, 6), torch.arange(size) % 4, size)
    copies = Copies(learner, CPU)  # type: ignore[arg-type]
    learner.has_zeros = check_sums(copies, batch, warns=True)
    return learner


MEANS: Mapping[str, expt.Task] = {
    "Task.loss": Task(mean),
    "Task.loss ": Task(weighted_mean),
    "Task.loss  ": Task(lambda outputs, batch: (noise(outputs, batch).mean(), len(outputs))),
    "Task.measure: hits": Task(total, lambda *found: {"hits": mean(*found)}),
    "Task.measure: zero": Task(total, lambda *found: {"zero": hits_of_many(*found)}),
    "Training.training_loss": Training(mean),
    "Phases.phase: second": Phases(),
}


@pytest.mark.parametrize("method", MEANS)
def test_a_mean_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=method.strip() + " gives a mean"):
        check(MEANS[method])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_of_few_samples_is_checked_too(size: int) -> None:
    assert not check(Task(total), size).has_zeros
    with pytest.raises(ConfigError, match=r"Task.loss gives a mean"):
        check(Task(mean), size)


def test_a_batch_that_cannot_be_cut_trains() -> None:
    def loss(outputs: Tensor, batch: Batch) -> Any:
        return outputs.mean() + batch.targets.mean(), len(outputs)

    check(Task(loss), batch=Batch(torch.randn(4, 6), torch.randn(6), 4))


@pytest.mark.parametrize(
    ("task", "warns"),
    [
        (Task(total, lambda *found: {"hits": weighted(*found)}), False),
        (Task(lambda outputs, batch: (noise(outputs, batch).sum(), len(outputs))), False),
        (Warm(), False),
        (Training(among), False),
        (Task(among), True),
        (Task(lambda outputs, batch: (each(outputs, batch).mean(), 1)), True),
        (Task(lambda outputs, batch: 1 / 0), False),
    ],
)
def test_other_sums_train(task: expt.Task, warns: bool, capsys: Capture) -> None:
    check(task)
    assert ("warning: " in capsys.readouterr().err) == warns


def test_a_weight_of_all_workers_is_refused() -> None:
    check(Task(lambda outputs, batch: (1e-12 * each(outputs, batch).sum(), len(outputs))))
    with pytest.raises(ConfigError, match=r"Task.loss .*global_size"):
        check(Task(lambda outputs, batch: (each(outputs, batch).sum(), batch.global_size)))
    with pytest.raises(ConfigError, match=r"Task.loss .*global_size"):
        check(Task(lambda outputs, batch: (total(outputs, batch)[0] / batch.global_size, 1)))


def test_what_cannot_be_copied_is_said(capsys: Capture) -> None:
    check(Locked(mean))
    assert "copy" in capsys.readouterr().err


def test_a_model_that_keeps_what_it_has_computed_is_checked() -> None:
    module = nn.Linear(6, 4)
    vars(module)["last"] = [module.weight * 2]
    with pytest.raises(ConfigError, match="gives a mean"):
        check(Task(mean), module=module)


def test_a_task_that_takes_no_single_sample_trains(capsys: Capture) -> None:
    """Halves of the batch are of two samples, and of every second sample of one."""

    def of_several(outputs: Tensor, batch: Batch) -> Any:
        return mean(outputs, batch) if len(outputs) > 1 else 1 / 0

    check(Task(of_several), batch=Batch(torch.randn(4, 6), torch.arange(4), 4))
    assert "is not the sum of its parts" in capsys.readouterr().err


def test_a_count_that_is_a_mean_of_halves_by_chance_trains() -> None:
    """Two distinct targets in the batch and in each half, one in each pair of every second."""

    def distinct(outputs: Tensor, batch: Batch) -> Any:
        return batch.targets.unique().numel() + 0 * outputs.sum(), len(outputs)

    targets = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    task = Task(total, lambda *found: {"hits": distinct(*found)})
    check(task, batch=Batch(torch.randn(8, 6), targets, 8))


def test_outputs_that_depend_on_the_batch_are_not_taken_for_means() -> None:
    for seed in range(20):
        normalised = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
        check(Task(total, lambda *found: {"hits": hits(*found)}), module=normalised, seed=seed)


def test_a_sum_of_zero_is_not_compared_yet() -> None:
    assert check(Task(lambda outputs, batch: (0 * each(outputs, batch).mean(), 1))).has_zeros
    assert not check(Task(total)).has_zeros


def test_nothing_is_left_changed() -> None:
    task = Warm()
    learner = check(task)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    torch.randn(20, 6)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert task.steps == 0
    assert learner.module.training
    for name, value in module.state_dict().items():
        assert torch.equal(learner.module.state_dict()[name], value)


@pytest.mark.parametrize("size", [1, 8, 20])
def test_changes_in_place_are_of_copies(size: int) -> None:
    inputs, module = torch.randn(size, 6), nn.Linear(6, 4)
    batch = Batch({"x": inputs}, torch.arange(size) % 4, size)
    before = inputs.clone(), batch.targets.clone(), module.bias.clone()
    check(InPlace(total), module=module, batch=batch)
    assert batch.inputs["x"] is inputs
    after = inputs, batch.targets, module.bias
    assert all(map(torch.equal, after, before))


SAVED, KILLED_IN, LOGGED = 2, 9, 4
"""The step is within the second epoch of five, and what is saved before it between log points."""


def begun(folder: Path, config: RunConfig) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(request_of(config, folder), ALONE)


def break_off(folder: Path, config: RunConfig) -> None:
    """Train until an exception in the middle of a step, which leaves what was saved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault.VARIABLE, f"0:{KILLED_IN}:raise")
        run = begun(folder, config)
    with pytest.raises(Exception, match="a fault on purpose"):
        run.train(None, lambda *_: Observer())
    run.checkpoints.wait()
    run.record.end("interrupted", {})  # closes its files, as the worker's end would


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of three samples, not of each class
@pytest.mark.parametrize("name", CASES)
def test_broken_off_runs_resume_exactly(name: str, configured: Configured, tmp_path: Path) -> None:
    config = config_of(name, configured)
    often: dict[str, Any] = {"epochs": 2, "log_every": LOGGED, "gradient_accumulation": 3}
    saves = dataclasses.replace(config.checkpoint, every_steps=SAVED)
    config = dataclasses.replace(config, drop_last=False, checkpoint=saves, **often)
    folders = whole, again = tmp_path / "whole", tmp_path / "broken off"
    whole.mkdir()
    update_result(RunPaths(whole), status="running", config=shown(config), identity="x")
    begun(whole, config).train(None, lambda *_: Observer())
    break_off(again, config)
    assert checkpoint.load(RunPaths(again).last)["position"]["step"] == 8
    begun(again, config).train(RunPaths(again).last, lambda *_: Observer())
    states = [checkpoint.load(RunPaths(folder).last) for folder in folders]
    for key, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][key]), key
    assert states[0]["workers"][0]["sums"] == states[1]["workers"][0]["sums"]
    assert RunFolder(whole).values == pytest.approx(RunFolder(again).values, abs=0, nan_ok=True)
    recorded = read_result(RunPaths(whole))["metrics"]
    for split, which in (("val", "last"), ("test", "best")):
        ours = {tag: value for tag, value in recorded.items() if tag.endswith(f"/{split}")}
        expected = {tag: value for tag, value in ours.items() if tag[:4] != "best"}
        measured = metrics(whole, f"split={split}", f"which={which}")
        assert measured == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
