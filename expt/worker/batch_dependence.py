"""Checks of whether results depend on how samples are batched, which pages promise they don't.

They compare the outputs of a few samples of the first batch with those of each half.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data import forked
from expt.data.loading import Batch, leaves, mapped
from expt.errors import ConfigError, warn
from expt.training import batch_norm, collectives, random_state
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.strategy import in_parts
from expt.worker.custom_code import SAMPLES

NEAR, ABOUT = 1e-3, 0.1
"""The share of the largest number by which others may differ; ABOUT in 16 bits."""
_MANY = 1024
"""Random numbers whose mean is taken."""


class BatchDependence:
    """The checks of a run: after the first step of this process, and in its first evaluation."""

    def __init__(self, config: RunConfig, learner: Learner, worker: Worker) -> None:
        self._config, self._learner, self._worker = config, learner, worker
        self._own = {one for one in ("model", "task") if isinstance(getattr(config, one), Target)}
        number, may_copy = config.gradient_accumulation, not config.is_sharded
        may_gather = bool(self._own) and worker.world_size > 1 and may_copy
        self._checks_steps = (may_copy and number != 1) or (may_gather and not config.drop_last)
        self._checks_evaluation = may_copy and "model" in self._own
        # A compiled model would not be compiled within such a mode.
        self._watches = may_gather and not learner.compiled
        self._first = _Exchanges(1)

    def of_steps(self, batches: Iterator[Batch], samples: int | None) -> Iterator[Batch]:
        """Return the batches of an epoch of `samples`, if their number is known; a collective.

        Warns where micro-batches change the curve, and raises ConfigError where workers would
        gather unequal shares of the last batch.
        """
        if self._checks_steps:
            self._checks_steps = False
            left = 0 if self._config.drop_last else (samples or 0) % self._config.batch_size
            batches = self._looked_at(batches, functools.partial(self._look_at_step, left))
        if self._watches and not self._config.drop_last:
            batches = self._shared_out(batches)
        return batches

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches, and warn where a sample's outputs depend on others of its batch.

        Raises ConfigError where workers would gather unequal shares, or one of them has no batch.
        """
        if self._checks_evaluation:
            self._checks_evaluation = False
            batches = self._looked_at(batches, self._look_at_evaluation)
        return self._shared_out_in_evaluation(batches) if self._watches else batches

    def _shared_out(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an epoch; watches the gathering of those in unequal shares."""
        shares = _Shares("all_?gather", "drop_last=false", "use drop_last=true")
        for batch in batches:
            is_uneven = batch.global_size % self._worker.world_size > 0
            with shares if is_uneven else contextlib.nullcontext():
                yield batch

    def _shared_out_in_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fix = "let loss and measure use a worker's own samples, or use world_size=1"
        shares = _Shares("all_?(gather|reduce)|broadcast", "an evaluation", fix)
        for batch in batches:
            with shares:
                yield batch
        shares.end()

    def _looked_at(
        self, batches: Iterator[Batch], look: Callable[[Batch], None]
    ) -> Iterator[Batch]:
        """Yield the batches; `look` gets a few samples of the first one, once that is used."""
        first = next(batches, None)
        if first is None:
            return
        lengths = {*map(len, leaves((first.inputs, first.targets)))}
        few = None if first.weightless or len(lengths) > 1 else _cut(first, SAMPLES)
        compiled, self._first = self._learner.compiled, _Exchanges(first.size)
        with contextlib.nullcontext() if compiled else self._first:
            yield first
        if few is not None:
            eager = torch.compiler.set_stance("force_eager") if compiled else None
            with random_state.kept(self._worker.device), eager or contextlib.nullcontext():
                look(few)
        yield from batches

    @property
    def _may_gather(self) -> bool:
        """True if workers may have exchanged samples in the first step."""
        return self._learner.compiled or self._first.may_gather

    def _look_at_step(self, left: int, few: Batch) -> None:
        number, size = self._config.gradient_accumulation, self._worker.world_size
        is_uneven = left % size > 0
        may_gather = self._own and (is_uneven or number != 1) and self._may_gather
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

    None where that can't be seen: samples that can't be cut, noise, and on a GPU hooks and a model
    that can't be copied.
    """
    halves = in_parts(batch, -(-batch.size // 2))
    if len(halves) != 2:
        return None
    near = ABOUT if learner.precision.dtype else NEAR

    def is_near(one: Tensor, other: Tensor) -> bool:
        one, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in (one, other))  # of masks
        return bool((one - other).abs().max() <= near * one.abs().max())

    try:
        whole, again, parts = (
            _numbers(learner, each, seed, trains=trains)
            for seed, each in enumerate(([batch], [batch], halves))
        )
        return None if not all(map(is_near, whole, again)) else not all(map(is_near, whole, parts))
    except Exception:  # many classes, such as of outputs of other lengths
        return None


def _numbers(
    learner: Learner, batches: list[Batch], seed: int, *, trains: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs, one after another, and the sum of losses; all else stays as it was."""
    held = learner.module, learner.task, batches
    device = next((one.device for one in leaves(batches[0])), torch.device("cpu"))
    if device.type == "cpu" and forked.can_fork():
        found = forked.in_fork(functools.partial(_computed, learner, *held, seed, trains=trains))
        if found is None:
            raise RuntimeError("training will raise it")
        return found
    if any(vars(one)["_forward_hooks"] for one in learner.module.modules()):
        raise RuntimeError("a copy shares its hooks, which may count their calls")
    return _computed(learner, *copy.deepcopy(held), seed, trains=trains)


def _computed(
    learner: Learner, module: nn.Module, task: Any, batches: list[Batch], seed: int, *, trains: bool
) -> tuple[Tensor, Tensor]:
    batch_norm.part_from_workers(module.train(trains))
    random_state.seed(seed)
    found, total = list[Tensor](), torch.zeros((), dtype=torch.float64)
    noiseless = _WithoutNoise()  # type: ignore[no-untyped-call]
    with torch.no_grad(), collectives.alone(), learner.precision.autocast(), noiseless:
        for batch in batches:
            batch = batch._replace(global_size=batch.size)
            outputs = task.forward(module, batch)
            loss = task.training_loss if trains else task.loss
            total += float(loss(outputs, batch)[0])
            found += [
                each.detach().double().flatten(1).cpu()
                for each in leaves(outputs)
                if each.dim() and len(each) == batch.size
            ]
    return (torch.cat([each.flatten() for each in found]) if found else torch.zeros(1)), total


class _WithoutNoise(TorchDispatchMode):
    """Gives random numbers of torch their mean, whatever the shape; a dropout keeps all.

    Those that depend on values, such as of `multinomial`, and a random order stay random.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            return func(args[0], args[1], False)
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, Tensor):
            name = func.name().partition(".")[0]
            shapes = [one for one in args if isinstance(one, list)]
            tensors = [one for one in args if isinstance(one, Tensor)]
            fills = len(tensors) == 1 and name.endswith(("_", "_like"))
            if fills or (shapes and not tensors):
                found.fill_(_mean(func, args, kwargs or {}, found.device))
        return found


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> float:
    """Return the mean of numbers that `func` draws, which is always the same."""
    many = [
        one.new_empty(_MANY)
        if isinstance(one, Tensor)
        else [_MANY]
        if isinstance(one, list)
        else one
        for one in args
    ]
    if kwargs.get("generator") is not None:
        kwargs = {**kwargs, "generator": torch.Generator(device).manual_seed(0)}
    with random_state.kept(device):
        random_state.seed(0)
        return float(func(*many, **kwargs).double().mean())


def _gathers(learner: Learner, batch: Batch, worker: Worker) -> bool:
    """Return whether workers gather as many values as each has samples; a collective.

    Not where they have exchanged counts before, as to pad unequal shares. Samples may come in
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
    return first < len(more) and not any(one.are_counts for one in more[:first])


def _exchanged(learner: Learner, batch: Batch, number: int) -> list[_Exchanged]:
    """Return the tensors that this worker gave away in a step's forward pass."""
    few = _cut(batch, number)
    exchanges, (module, task) = _Exchanges(number), copy.deepcopy((learner.module, learner.task))
    with torch.no_grad(), learner.precision.autocast(), exchanges:
        task.training_loss(task.forward(module.train(), few), few)
    return exchanges.seen


class _Exchanged(NamedTuple):
    size: int
    are_counts: bool


class _Exchanges(TorchDispatchMode):
    """Notes the tensors that collectives of torch.distributed get."""

    def __init__(self, size: int) -> None:
        """`size` is the number of a worker's samples."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[_Exchanged] = []
        self.may_gather, self._size = False, size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.name():
            tensors = [*leaves(args)]
            size = sum(one.numel() for one in tensors)
            # Such as the sizes of the shares, to pad them.
            counts = all(one.numel() == 1 or not one.is_floating_point() for one in tensors)
            self.seen.append(_Exchanged(size, counts))
            self.may_gather |= "reduce" not in func.name() or size % self._size == 0
        return func(*args, **(kwargs or {}))


class _Shares(TorchDispatchMode):
    """Refuses collectives, those with such names, where workers give tensors of unequal shapes."""

    def __init__(self, names: str, where: str, fix: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._where, self._fix = re.compile(names), where, fix

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.name() and self._names.search(func.name()):
            given = [found for found in map(_shapes, args) if found]
            outputs = given[0] if len(given) > 1 else None  # workers may expect unequal ones
            if (group := collectives.group_of(args)) is not None:
                self._compare(given[-1], outputs, group)
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        """Take part where others still gather."""
        self._compare([], None, None)

    def _compare(self, given: list[Any], outputs: list[Any] | None, group: Any) -> None:
        all_given = collectives.gather_across_workers(given, group)
        if any(one != given for one in all_given) and outputs != [*itertools.chain(*all_given)]:
            shares = " and ".join(str(one)[1:-1] or "none" for one in all_given[:2])
            raise ConfigError(
                f"{self._where}: workers have unequal shares of a batch, and the model or the task"
                f" exchanges tensors of them ({shares}); {self._fix}"
            )


def _shapes(tree: Any) -> list[list[int]]:
    return [[*one.shape] for one in leaves(tree)]
