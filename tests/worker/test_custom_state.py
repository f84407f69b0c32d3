"""What custom code carries from step to step: saved by each worker, or reported by its name."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.training.task_state import load_task_state, task_state
from expt.worker import build
from expt.worker.custom_code import FirstSteps
from tests.conftest import Configured
from tests.facade import NO_PICTURES, Capture, usual
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, assert_same, stopped_and_resumed
from tests.worker.stateful import Half, Saved, Warm
from tests.worker.test_run import values

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
    steps = FirstSteps(config, learner, warns=True)
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
    steps = FirstSteps(config, learner, warns=True)
    learner.strategy.world_size = 2
    steps.refuse_late()
    learner.module.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"^model: layer\.bias: requires_grad .*world_size=1"):
        steps.refuse_late()


def test_a_parameter_of_a_task_is_reported(train_alone: TrainAlone, capfd: Capture) -> None:
    train_alone("max_steps=2", *of("Centred"))
    assert "task.centre: gets gradients, but no optimizer trains it" in capfd.readouterr().err


def test_another_number_of_workers_and_another_task_take_it() -> None:
    tasks = [Saved(), Saved()]
    tasks[1].steps = 5
    saved = [task_state(task) for task in tasks]
    found = [Saved() for _ in range(4)]
    for rank, task in enumerate(found):
        load_task_state(task, saved, ALONE.device, rank)
    assert [task.steps for task in found] == [0, 5, 0, 5]
    other = Half()
    load_task_state(other, saved, ALONE.device, 1)
    assert other.steps == 0
    assert task_state(Warm()) == {}
    tasks[0].seen = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Saved\.state_dict"):
        task_state(tasks[0])


def test_numbers_that_are_no_sums(
    train_alone: TrainAlone, train_together: TrainTogether, configured: Configured
) -> None:
    """Those since each log point, and of the epoch; a plain loop's, on two workers and resumed."""
    metrics = "+task.metrics={widest: max, lowest: min, steps: max, hits: max}"
    words: tuple[str, ...] = (
        "~task", f"+task._target_={OWN}.Peaked", metrics, "epochs=2", "objective=loss/val",
    )  # fmt: skip
    words += ("model=mlp", "model.dropout=0", "log_every=2", "batch_size=256", NO_PICTURES)
    two = train_together(2, *words, name="two")
    first = train_together(2, *words, "max_steps=7", name="both")
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
    assert values(resumed) == values(one)
    source = RunPaths(first.folder).before_end
    found = train_alone(*words, name="both", source=source)
    widest = found.curve("widest/train")[-1][1]
    assert widest == pytest.approx(expected["widest/train"][-1], abs=1e-4)
