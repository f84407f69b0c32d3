"""Each task's numbers are those of a plain loop over whole batches, and of torchmetrics over whole
sets.

On 1 to 4 workers, with 1 and 3 parts of gradient accumulation, with and without a smaller last
batch, of which half of four workers have no sample; and where samples count for nothing."""

from __future__ import annotations

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
from torch.utils.data import default_collate

from expt.data import indexing
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

CPU, SLOW = torch.device("cpu"), pytest.mark.slow
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
    """Losses and last weights, of whole batches; or, with `workers`, of the average of their
    averages."""
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


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of three samples, not of each class
@pytest.mark.parametrize("how", [HOW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"])
@pytest.mark.parametrize(
    "workers", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
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

    for rank in together(tmp_path, workers, each):
        for (name, parts, drop_last), found in zip(grid, rank, strict=True):
            which = f"{name}, {parts} parts, drop_last={drop_last}"
            losses, weights = plain_loop(name, drop_last)
            assert len(losses) == EPOCHS * (4 if drop_last else 5)
            assert [values["loss"] for values in found["steps"]] == pytest.approx(
                losses, abs=1e-4, nan_ok=True
            ), which
            for key, expected in weights.items():
                assert torch.allclose(torch.tensor(found["weights"][key]), expected, atol=1e-4), (
                    which,
                    key,
                )
            for split, values in measured_of(CASES[name], found["weights"]).items():
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
