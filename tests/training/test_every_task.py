"""Each task's numbers are those of a plain loop over whole batches, and of torchmetrics over whole
sets.

On 1 to 4 workers, with 1 and 3 parts of gradient accumulation, with and without a smaller last
batch, of which half of four workers have no sample; and where samples count for nothing."""

import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from expt.data import indexing
from expt.data.loading import Batch
from expt.errors import DataError
from expt.features import Mask
from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.tasks.task import Facts
from expt.training.collectives import Worker
from tests.conftest import Configured
from tests.every_task import (
    BATCH,
    CASES,
    EPOCHS,
    LR,
    SEED,
    SIZE,
    TESTED_ON,
    TRAINED_ON,
    Case,
    Rows,
    config_of,
)
from tests.ranks import together
from tests.training.plain import trained_on

SLOW = pytest.mark.slow
HOW, MORE = ((3, False),), ((1, False), (1, True), (3, True))
"""Parts of gradient accumulation, and drop_last."""
Found = Mapping[str, Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other in tensors as small as these
    yield
    torch.set_num_threads(before)


@functools.cache
def plain_loop(
    name: str, drop_last: bool, workers: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and last weights of whole batches, or of averages over `workers`."""
    case = CASES[name]
    torch.manual_seed(SEED)
    model, rows = case.model(), case.dataset(train=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    train, _ = indexing.split(SIZE, 3 / SIZE, None)
    losses = []
    for epoch in range(1, EPOCHS + 1):
        for batch in train[indexing.permutation(TRAINED_ON, SEED, epoch)].split(BATCH):
            if drop_last and len(batch) < BATCH:
                continue
            shares = [batch] if workers is None else batch.tensor_split(workers)
            loss = torch.stack(
                [loss_of(case, model, rows, share) for share in shares if len(share)]
            ).nanmean()
            losses.append(loss.item())
            if loss.isfinite():  # else nothing in the batch counts
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return losses, model.state_dict()


def loss_of(case: Case, model: nn.Module, rows: Rows, indices: Tensor) -> Tensor:
    return case.loss(*outputs_of(model, rows, indices.tolist()))


def outputs_of(model: nn.Module, rows: Rows, indices: list[int]) -> tuple[Any, Any]:
    samples = [rows[index] for index in indices]
    inputs, targets = getattr(rows, "collate", default_collate)(samples)
    return model(inputs["row"] if isinstance(inputs, dict) else inputs), targets


def measured_of(case: Case, weights: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What torch and torchmetrics say of a model with these weights, on the whole sets."""
    model = case.model()
    model.load_state_dict({name: torch.tensor(values) for name, values in weights.items()})
    sets = {"val": (case.dataset(train=True), indexing.split(SIZE, 3 / SIZE, None)[1].tolist())}
    sets["test"] = (case.dataset(train=False), list(range(TESTED_ON)))
    found = {}
    with torch.no_grad():
        for split, (rows, indices) in sets.items():
            outputs, targets = outputs_of(model, rows, indices)
            values = {"loss": case.loss(outputs, targets), **case.metrics(outputs, targets)}
            found[split] = {name: float(value) for name, value in values.items()}
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "own"])
def test_double_model_has_double_loss_and_gradient(name: str, configured: Configured) -> None:
    case = CASES[name]
    outputs, targets = outputs_of(case.model(), case.dataset(train=True), [*range(1, 6)])
    mine = (outputs.detach().double() + 1e-12).requires_grad_()
    targets = targets.double() + 1e-12 if targets.is_floating_point() else targets
    task = config_of(name, configured).task.build(Facts(targets=Mask(num_classes=outputs.shape[1])))
    for loss in (task.loss, task.training_loss):
        total, weight = loss(mine, Batch(None, targets, 5))
        expected = case.loss(mine, targets)
        torch.testing.assert_close(total / weight, expected, rtol=1e-14, atol=0)
        gradients = (torch.autograd.grad(one, mine)[0] for one in (total / weight, expected))
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    predicted = task.predict(mine)
    assert predicted.dtype == torch.float64 or not predicted.is_floating_point()


@pytest.mark.parametrize(
    ("name", "refused"), [(name, each) for name, case in CASES.items() for each in case.refused]
)
def test_other_targets_are_refused(
    name: str, refused: Sequence[float], configured: Configured
) -> None:
    targets = torch.tensor([refused])
    task, batch = config_of(name, configured).task.build(Facts()), Batch(None, targets, 1)
    sums = Sums(task, torch.device("cpu"))
    sums.add(task.loss(targets, batch), targets, batch)
    with pytest.raises(DataError, match=f"task={name} takes no others"):
        sums.averages(sums.values)


def test_weights_of_classes_and_shares_of_mixed_ones_are_too() -> None:
    outputs, weights = torch.randn(5, 3).double(), [0.3, 0.7, 1.1]
    for labels in (torch.arange(5) % 3, torch.rand(5, 3).softmax(1)):
        total, _ = Classification(class_weights=weights).training_loss(
            outputs, Batch(None, labels, 5)
        )
        exact = labels.double() if labels.is_floating_point() else labels
        by = torch.tensor(weights, dtype=torch.float64)
        expected = functional.cross_entropy(outputs, exact, by, reduction="sum")
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=0)


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of three samples, not of each class
@pytest.mark.parametrize("how", [HOW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"])
@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))]
)
def test_curves_are_a_plain_loops_and_metrics_torchmetrics(
    workers: int, how: Sequence[tuple[int, bool]], configured: Configured, tmp_path: Path
) -> None:
    importlib.import_module("torchmetrics")  # once, and not in each rank
    grid = [(name, *each) for name, each in itertools.product(CASES, how)]
    configs = {name: config_of(name, configured) for name in CASES}

    def each(worker: Worker) -> list[Found]:
        return [
            trained_on(
                worker,
                dataclasses.replace(
                    configs[name],
                    world_size=workers,
                    gradient_accumulation=parts,
                    drop_last=drop_last,
                ),
            )
            for name, parts, drop_last in grid
        ]

    for (name, parts, drop_last), *ranks in zip(
        grid, *together(tmp_path, workers, each), strict=True
    ):
        which = f"{name}, {parts} parts, drop_last={drop_last}"
        losses, weights = plain_loop(name, drop_last)
        assert len(losses) == EPOCHS * (4 if drop_last else 5)
        measured = measured_of(CASES[name], ranks[0]["weights"])
        for found in ranks:
            steps = [values["loss"] for values in found["steps"]]
            assert steps == pytest.approx(losses, abs=1e-4, nan_ok=True), which
            for key, expected in weights.items():
                same = torch.allclose(torch.tensor(found["weights"][key]), expected, atol=1e-4)
                assert same, (which, key)
            for split, values in measured.items():
                assert found[split] == pytest.approx(values, abs=1e-6, nan_ok=True), (which, split)


@pytest.mark.parametrize("name", ["segmentation", "language_model", "own"])
def test_an_average_of_the_workers_averages_would_be_another_curve(name: str) -> None:
    (exact, _), (averaged, _) = plain_loop(name, False), plain_loop(name, False, 4)
    assert (
        max(
            abs(one - other)
            for one, other in zip(exact, averaged, strict=True)
            if not math.isnan(one)
        )
        > 1e-2
    )
