"""Checks of whether results depend on how samples are batched, which pages promise they don't.

They compare the outputs of a few samples of the first batch with those of each half.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data.loading import Batch, leaves, mapped
from expt.errors import ConfigError, warn
from expt.training import batch_norm, collectives, random_state
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.strategy import in_parts
from expt.worker.custom_code import SAMPLES

NEAR, ABOUT = 1e-3, 0.1
"""The share of the largest number by which others may differ; ABOUT in 16 bits."""
DROPOUTS = tuple(
    one for name, one in vars(nn).items() if "Dropout" in name and isinstance(one, type)
)


class BatchDependence:
    """The checks of a run: after the first step of this process, and in its first evaluation."""

    def __init__(self, config: RunConfig, learner: Learner, worker: Worker) -> None:
        self._config, self._learner, self._worker = config, learner, worker
        self._own = {one for one in ("model", "task") if isinstance(getattr(config, one), Target)}
        number, may_copy = config.gradient_accumulation, not config.is_sharded
        may_gather = self._own and worker.world_size > 1 and not config.drop_last
        self._checks_steps = may_copy and bool(number != 1 or may_gather)
        self._checks_evaluation = may_copy and "model" in self._own

    def of_steps(self, batches: Iterator[Batch], samples: int | None) -> Iterator[Batch]:
        """Return the batches of an epoch of `samples`, if their number is known; a collective.

        Warns where micro-batches change the curve, and raises ConfigError where workers would
        gather unequal shares of the last batch.
        """
        if not self._checks_steps:
            return batches
        self._checks_steps = False
        left = 0 if self._config.drop_last else (samples or 0) % self._config.batch_size
        return self._looked_at(batches, functools.partial(self._look_at_step, left))

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches, and warn where a sample's outputs depend on others of its batch."""
        if not self._checks_evaluation:
            return batches
        self._checks_evaluation = False
        return self._looked_at(batches, self._look_at_evaluation)

    def _looked_at(
        self, batches: Iterator[Batch], look: Callable[[Batch], None]
    ) -> Iterator[Batch]:
        """Yield the batches; `look` gets a few samples of the first one, once that is used."""
        first = next(batches, None)
        if first is None:
            return
        lengths = {*map(len, leaves((first.inputs, first.targets)))}
        few = None if first.weightless or len(lengths) > 1 else _cut(first, SAMPLES)
        yield first
        if few is not None:
            compiled = self._learner.compiled
            eager = torch.compiler.set_stance("force_eager") if compiled else None
            with random_state.kept(self._worker.device), eager or contextlib.nullcontext():
                look(few)
        yield from batches

    def _look_at_step(self, left: int, few: Batch) -> None:
        number, size = self._config.gradient_accumulation, self._worker.world_size
        is_uneven = left % size > 0
        may_gather = self._own and (is_uneven or number != 1)
        gathers = bool(may_gather) and _gathers(self._learner, few, self._worker)
        if gathers and is_uneven:
            raise ConfigError(
                f"drop_last=false: an epoch's last batch has {left} samples, which are unequal"
                f" shares of {size} workers, and the model or the loss gathers them; use"
                " drop_last=true"
            )
        layers = self._learner.module.modules()
        norms = any(one.training for one in layers if batch_norm.is_one(one))
        # Of auto with norms the strategy reports it once it takes fewer.
        if self._worker.rank or number == 1 or (number == "auto" and norms):
            return
        depends = gathers or _depends(self._learner, few, trains=True)
        if norms if depends is None else depends:
            why = "batch norms get" if norms else "the model or the loss compares"
            share = -(-few.global_size // size)
            fewer = "fewer where memory lacks" if number == "auto" else f"{-(-share // number)}"
            warn(
                f"gradient_accumulation={number}: {why} the samples that a worker has at a time,"
                f" {fewer} and not {share}, so that the curve is not that of"
                " gradient_accumulation=1"
            )

    def _look_at_evaluation(self, few: Batch) -> None:
        if self._worker.rank == 0 and _depends(self._learner, few, trains=False):
            warn(
                "model: in an evaluation a sample's outputs depend on the others of its batch (as"
                " by a batch norm without running statistics, or a mean over dimension 0), so that"
                " metrics depend on eval_batch_size and world_size"
            )


def _cut(batch: Batch, number: int) -> Batch:
    """Return a copy of the first samples, which a step may change."""
    inputs, targets = mapped(lambda one: one[:number].clone(), (batch.inputs, batch.targets))
    return batch._replace(inputs=inputs, targets=targets)


def _depends(learner: Learner, batch: Batch, *, trains: bool) -> bool | None:
    """Return whether outputs of a few samples differ from those of the halves.

    None where that can't be seen: samples that can't be cut, noise, hooks, a model that can't be
    copied.
    """
    halves = in_parts(batch, -(-batch.size // 2))
    # A copy shares its hooks, which may count their calls.
    if len(halves) != 2 or any(vars(one)["_forward_hooks"] for one in learner.module.modules()):
        return None
    near = ABOUT if learner.precision.dtype else NEAR

    def is_near(one: Tensor, other: Tensor) -> bool:
        one, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in (one, other))  # of masks
        return bool((one - other).abs().max() <= near * one.abs().max())

    try:
        with torch.no_grad(), collectives.alone():
            whole, again = (_numbers(learner, [batch], seed, trains=trains) for seed in (0, 1))
            parts = _numbers(learner, halves, 2, trains=trains)
        return None if not all(map(is_near, whole, again)) else not all(map(is_near, whole, parts))
    except Exception:  # many classes, such as of outputs of other lengths
        return None


def _numbers(
    learner: Learner, batches: list[Batch], seed: int, *, trains: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs, one after another, and the sum of losses."""
    module, task = copy.deepcopy((learner.module, learner.task))
    batch_norm.part_from_workers(module.train(trains))
    for layer in module.modules():
        if isinstance(layer, DROPOUTS):
            layer.eval()
    random_state.seed(seed)
    found, total = list[Tensor](), torch.zeros((), dtype=torch.float64)
    for batch in copy.deepcopy(batches):
        batch = batch._replace(global_size=batch.size)
        with learner.precision.autocast():
            outputs = task.forward(module, batch)
            loss = task.training_loss if trains else task.loss
            total += float(loss(outputs, batch)[0])
        found += [
            each.detach().double().flatten(1)
            for each in leaves(outputs)
            if each.dim() and len(each) == batch.size
        ]
    return (torch.cat([each.flatten() for each in found]) if found else torch.zeros(1)), total


def _gathers(learner: Learner, batch: Batch, worker: Worker) -> bool:
    """Return whether workers gather as many values as each has samples; a collective.

    Not where they have exchanged integers before, as to pad unequal shares. Samples may come in
    pairs.
    """
    number = min(SAMPLES, batch.global_size // worker.world_size // 2 * 2)
    if worker.world_size == 1 or number < 4:
        return False
    try:
        more, fewer = (_exchanged(learner, batch, each) for each in (number, number - 2))
    except Exception:  # training will raise it
        return False
    pairs = enumerate(zip(more, fewer, strict=False))
    first = next((at for at, (one, other) in pairs if one.size != other.size), len(more))
    return first < len(more) and not any(one.is_integer for one in more[:first])


def _exchanged(learner: Learner, batch: Batch, number: int) -> list[_Exchanged]:
    """Return the tensors that this worker gave away in a step's forward pass."""
    few = _cut(batch, number)
    exchanges, (module, task) = _Exchanges(), copy.deepcopy((learner.module, learner.task))
    with torch.no_grad(), learner.precision.autocast(), exchanges:
        task.training_loss(task.forward(module.train(), few), few)
    return exchanges.seen


class _Exchanged(NamedTuple):
    size: int
    is_integer: bool


class _Exchanges(TorchDispatchMode):
    """Notes the tensors that collectives of torch.distributed get."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[_Exchanged] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.name():
            tensors = [*leaves(args)]
            size = sum(one.numel() for one in tensors)
            is_integer = not any(one.is_floating_point() for one in tensors)
            self.seen.append(_Exchanged(size, is_integer))
        return func(*args, **(kwargs or {}))
