"""Metrics that are not sums (AUROC, ...): torchmetrics', over a split of all workers."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from expt.config import secrets, user_class
from expt.config.constraints import Target
from expt.data.loading import Batch, mapped
from expt.errors import ConfigError, described, is_out_of_memory, listed, require, warn
from expt.features import Anything, Feature
from expt.runs import tags
from expt.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric

States = list[dict[str, Any]]
"""A worker's states of a metric's parts, by name."""


class ExtraMetrics:
    """Metrics by name that only evaluations measure; empty between two of them.

    They get standardised targets and their predictions in the targets' own units.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], targets: Feature | None = None, *, warns: bool = False
    ) -> None:
        self._targets, self._warns = targets or Anything(), warns
        # Sums of squares far from 0 would lose their digits
        dtype = torch.float64 if self._targets.scales else None
        self.names = tuple(metrics)
        self._metrics = {name: _Shared(metric, dtype) for name, metric in metrics.items()}
        self._has_warned = False
        self._are_nan: set[str] = set()
        """The metrics that were nan once: it warns once."""
        self._empty()

    def _empty(self) -> None:
        for metric in self._metrics.values():
            metric.metric.reset()
        self._measured: list[str] = []
        """The metrics that have seen a batch."""
        self._given: tuple[Any, Any] = (None, None)
        """The last predictions and targets, for messages."""

    @torch.no_grad()
    def update(self, task: Task, outputs: Any, batch: Batch) -> None:
        """Count a batch. Raises ConfigError for a metric that does not take it."""
        due = [name for name in self._metrics if batch.progress.measures(name)]
        if batch.weightless or not due:
            return
        self._measured, self._given = due, self._in_units(*task.predictions(outputs, batch))
        for name in due:
            metric = self._metrics[name].metric
            with _explained(name, metric, self._given):
                metric.update(*self._given)

    def _in_units(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        if not (width := self._targets.unit_width):
            return predictions, targets
        both = predictions, targets
        if all(isinstance(one, Tensor) and one[:1].numel() == width for one in both):
            return self._targets.in_units(predictions), self._targets.in_units(targets)
        if self._warns and not self._has_warned:
            warn(
                f"{', '.join(self._metrics)}: measured on standardised targets, because"
                f" they and the predictions are not {width} a sample: targets"
                f" {described(targets)}, predictions {described(predictions)}"
            )
        self._has_warned = True
        return both

    @torch.no_grad()
    def try_out(self, task: Task, outputs: Any, batch: Batch) -> None:
        """Raise ConfigError where they don't take such a batch, or don't give one number each.

        They are empty afterwards.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so few samples
            self.update(task, outputs, batch)
            for name in self._measured:
                metric, value = self._metrics[name].metric, None
                few = contextlib.suppress(ValueError, RuntimeError)  # too few samples, maybe
                with _explained(name, metric, self._given), few:
                    value = metric.compute()
                if value is not None:
                    _number(name, value)
        self._empty()

    @torch.no_grad()
    def compute(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the values of metrics that were measured, over all workers' batches, and reset.

        A collective: `gather`, which every worker calls as often, returns all workers' values by
        rank. Raises ConfigError for a metric that is not one number.
        """
        if not self._metrics:
            return {}
        mine = {name: self._metrics[name].states() for name in self._measured}
        # At once, and not by torchmetrics' own gathering: a worker without a batch may take no part
        # in it, and it pads.
        seen = [theirs for theirs in gather(mapped(Tensor.cpu, mine)) if theirs]
        # torchmetrics warns of a metric that has seen nothing
        values = {name: self._value(name, [theirs[name] for theirs in seen]) for name in mine}
        if seen:  # the same on all workers that have any
            values = next(theirs for theirs in gather(values) if theirs)
        self._warn_of_nan(values)
        self._empty()
        return values

    def _value(self, name: str, everyones: Sequence[States]) -> float:
        shared = self._metrics[name]
        with _explained(name, shared.metric, self._given):
            value = shared.compute(everyones)
        return _number(name, value)

    def _warn_of_nan(self, values: Mapping[str, float]) -> None:
        bad = (name for name, value in values.items() if not math.isfinite(value))
        fresh = [name for name in bad if name not in self._are_nan]
        self._are_nan.update(fresh)
        if not (fresh and self._warns):
            return
        predictions, targets = map(_range, self._given)
        for name in fresh:
            kind = type(self._metrics[name].metric).__name__
            warn(
                f"task.metrics.{name}: {kind} is {values[name]} for predictions ({predictions}) and"
                f" targets ({targets}); choose a metric that is defined for them"
            )


class _Shared:
    """A metric of torchmetrics that computes over the states of all workers.

    torchmetrics asks two functions of a metric whether to gather its states, and for all workers'
    values of each; they answer with values that were gathered before.
    """

    def __init__(self, metric: Metric, dtype: torch.dtype | None) -> None:
        self.metric = metric
        found = (one for one in metric.modules() if hasattr(one, "metric_state"))
        self._parts = [cast("Metric", one) for one in found]
        """The metric, and those that it is made of."""
        self._everyones: dict[int, list[Tensor]] = {}
        """All workers' values of a state, by the identity of this worker's tensor."""
        for part in self._parts:
            part.distributed_available_fn = lambda: bool(self._everyones)
            part.dist_sync_fn = lambda state, group=None: self._everyones.get(id(state), [state])
            if dtype is not None:
                part.set_dtype(dtype)

    def states(self) -> States:
        """Return the states of its parts: tensors, or lists with an entry per batch or sample."""
        return [dict(part.metric_state) for part in self._parts]

    def compute(self, everyones: Sequence[States]) -> Any:
        """Return the value as if it had seen all workers' batches, one worker after another."""
        if len(everyones) > 1:
            for part, theirs in zip(self._parts, zip(*everyones, strict=True), strict=True):
                self._merge(part, theirs)
        try:
            return self.metric.compute()
        finally:
            self._everyones.clear()

    def _merge(self, part: Metric, everyones: Sequence[dict[str, Any]]) -> None:
        for name, own in part.metric_state.items():
            values = mapped(lambda one: one.to(part.device), [states[name] for states in everyones])
            if isinstance(own, Tensor):
                self._everyones[id(own)] = values  # to be reduced by torchmetrics
            else:
                setattr(part, name, [entry for value in values for entry in value])


def _range(values: Any) -> str:
    """Return the range of a batch's numbers."""
    if not isinstance(values, Tensor) or not values.numel():
        return described(values)
    low, high = values.double().aminmax()
    return f"in the last batch {low:.4g} to {high:.4g}"


def build(
    configured: Mapping[str, Target], device: torch.device, targets: Feature, *, warns: bool
) -> ExtraMetrics:
    """Return metrics by name of such `targets`.

    Raises ConfigError without torchmetrics, or for another class.
    """
    if not configured:
        return ExtraMetrics({})
    names = ", ".join(f"task.metrics.{name}" for name in configured)
    require(names, "torchmetrics", extra="torchmetrics")
    from torchmetrics import Metric

    metrics: dict[str, Metric] = {}
    for name, config in configured.items():
        with _explained(name):
            if name in tags.OF_EXPT:
                raise ConfigError("is a tag that expt writes; choose another name")
            metrics[name] = user_class.build(config.target, Metric, **config.kwargs).to(device)  # type: ignore[type-abstract]
            if not metrics[name].sync_on_compute:
                raise ConfigError(
                    "sync_on_compute=false: would leave other workers' samples out; leave it out"
                )
    return ExtraMetrics(metrics, targets, warns=warns)


def _number(name: str, value: Any) -> float:
    """Return a metric's number; of several with names the one of its own name."""
    found = value.get(name) if isinstance(value, Mapping) else value
    if isinstance(found, Real) or (isinstance(found, Tensor) and found.numel() == 1):
        return float(found)
    fix = "choose an average, e.g. average=macro"
    if isinstance(value, Mapping):
        fix = f"name it after one of these: {listed(map(str, value))}"
    raise ConfigError(f"task.metrics.{name}: gives {described(value)}, not one number; {fix}")


@contextlib.contextmanager
def _explained(
    name: str, metric: Metric | None = None, given: tuple[Any, Any] = (None, None)
) -> Iterator[None]:
    """Name the metric and its inputs in errors of torchmetrics."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, IndexError, ModuleNotFoundError) as error:
        if is_out_of_memory(error):
            raise
        said, kind = secrets.said(error), type(metric).__name__
        if metric is not None:
            predictions, targets = map(described, given)
            said = f"{kind} of predictions {predictions} and targets {targets}: {said}"
        raise ConfigError(f"task.metrics.{name}: {said}") from error
    except ConfigError as error:
        raise ConfigError([f"task.metrics.{name}: {one}" for one in error.problems]) from error
