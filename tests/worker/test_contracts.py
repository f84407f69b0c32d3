"""Sums that a custom task promises, tried after the first step; nothing is left changed by it."""

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import expt
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.training.precision import Precision
from expt.worker.batch_checks import check_sums
from tests.facade import Capture
from tests.worker.stateful import Warm

CPU = torch.device("cpu")
Of = Callable[[Tensor, Batch], Any]


class Task(expt.Task):
    """Gives what it is given functions for."""

    def __init__(self, loss: Of, measure: Of = lambda *_: {}) -> None:
        self._loss, self._measure = loss, measure

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        return self._loss(outputs, batch)

    def measure(self, outputs: Tensor, batch: Batch) -> Any:
        return self._measure(outputs, batch)


class Locked(Task):
    """Can't be copied."""

    def __init__(self, loss: Of) -> None:
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
    found = check_sums(learner, batch, CPU, warns=True)  # type: ignore[arg-type]
    learner.has_zeros = found
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
    with pytest.raises(ConfigError, match=r"Task.loss .*global_size"):
        check(Task(lambda outputs, batch: (each(outputs, batch).sum(), batch.global_size)))
    with pytest.raises(ConfigError, match=r"Task.loss .*global_size"):
        check(Task(lambda outputs, batch: (total(outputs, batch)[0] / batch.global_size, 1)))


def test_what_cannot_be_copied_is_said(capsys: Capture) -> None:
    check(Locked(mean))
    assert "copy" in capsys.readouterr().err


def test_a_model_that_keeps_what_it_has_computed_is_checked() -> None:
    module = nn.Linear(6, 4)
    module.last = [module.weight * 2]
    with pytest.raises(ConfigError, match="gives a mean"):
        check(Task(mean), module=module)


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
