"""Metrics that are not sums (AUROC, ...): torchmetrics', over a split of all workers."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from expt.config import secrets, user_class
from expt.config.constraints import Target
from expt.data.loading import Batch, mapped
from expt.errors import ConfigError, described, is_out_of_memory, listed, warn
from expt.features import Anything, Feature
from expt.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric


class ExtraMetrics:
    """Metrics by name that only evaluations measure; empty between two of them.

    They get standardised targets and their predictions in the targets' own units.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], targets: Feature | None = None, *, warns: bool = False
    ) -> None:
        self._metrics, self._warns = metrics, warns
        self._targets = targets or Anything()
        self._has_warned = False
        self._are_nan: set[str] = set()
        """The metrics that were nan once, which is said once."""
        self._batches = 0
        self._given: tuple[Any, Any] = (None, None)
        """The last predictions and targets."""
        self._everyones: dict[int, list[Tensor]] = {}
        """All workers' values of a state, by the identity of this worker's tensor."""
        for part in itertools.chain.from_iterable(map(_parts, metrics.values())):
            # Its `compute` calls this in place of a collective of its own.
            part.distributed_available_fn = lambda: bool(self._everyones)
            part.dist_sync_fn = lambda state, group=None: self._everyones.get(id(state), [state])
            if self._targets.scales:  # sums of squares far from 0 would lose their digits
                part.set_dtype(torch.float64)

    @property
    def names(self) -> Sequence[str]:
        """Their names."""
        return [*self._metrics]

    @torch.no_grad()
    def update(self, task: Task, outputs: Any, batch: Batch) -> None:
        """Count a batch. Raises ConfigError for a metric that does not take it."""
        if batch.weightless or not self._metrics:
            return
        predictions, targets = self._in_units(*task.predictions(outputs, batch))
        self._given, self._batches = (predictions, targets), self._batches + 1
        for name, metric in self._metrics.items():
            with _explained(name, metric, self._given):
                metric.update(predictions, targets)

    def _in_units(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        number = len(self._targets.scales)
        if not number:
            return predictions, targets
        both = predictions, targets
        if all(isinstance(one, Tensor) and one[:1].numel() == number for one in both):
            return self._targets.in_units(predictions), self._targets.in_units(targets)
        if self._warns and not self._has_warned:
            warn(
                f"{', '.join(self._metrics)}: measured on standardised targets, because"
                f" they and the predictions are not {number} a sample: targets"
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
            for name, metric in self._metrics.items():
                value = None
                few = contextlib.suppress(ValueError, RuntimeError)  # too few samples, maybe
                with _explained(name, metric, self._given), few:
                    value = metric.compute()
                if value is not None:
                    _number(name, value)
                metric.reset()
        self._batches = 0

    @torch.no_grad()
    def compute(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the values over all workers' batches, and reset.

        A collective: `gather`, which every worker calls twice, returns all workers' values by rank.
        Raises ConfigError for a metric that is not one number.
        """
        if not self._metrics:
            return {}
        mine: dict[str, Any] | None = None
        if self._batches:  # tensors, or lists with an entry per batch or sample
            mine = {
                name: [dict(part.metric_state) for part in _parts(metric)]
                for name, metric in self._metrics.items()
            }
        # At once, and not by torchmetrics' own gathering: a worker without a batch may take no part
        # in it, and it pads.
        seen = [theirs for theirs in gather(mapped(Tensor.cpu, mine)) if theirs is not None]
        values: dict[str, float] | None = None
        if mine is not None:  # torchmetrics warns of a metric that has seen nothing
            values = {
                name: self._value(name, [theirs[name] for theirs in seen]) for name in self._metrics
            }
        for metric in self._metrics.values():
            metric.reset()
        self._batches = 0
        # The same on all workers
        found: dict[str, float] = next(theirs for theirs in gather(values) if theirs is not None)
        self._warn_of_nan(found)
        return found

    def _warn_of_nan(self, found: Mapping[str, float]) -> None:
        fresh = [name for name, value in found.items() if not math.isfinite(value)]
        fresh = [name for name in fresh if name not in self._are_nan]
        self._are_nan.update(fresh)
        if not (fresh and self._warns):
            return
        predictions, targets = map(_range, self._given)
        for name in fresh:
            kind = type(self._metrics[name]).__name__
            warn(
                f"task.metrics.{name}: {kind} is {found[name]} for predictions ({predictions}) and"
                f" targets ({targets}); choose a metric that is defined for them"
            )

    def _value(self, name: str, everyones: Sequence[Sequence[Mapping[str, Any]]]) -> float:
        metric = self._metrics[name]
        try:
            with _explained(name, metric, self._given):
                if len(everyones) > 1:
                    each = zip(*everyones, strict=True)
                    for part, theirs in zip(_parts(metric), each, strict=True):
                        self._merge(part, theirs)
                value = metric.compute()
        finally:
            self._everyones.clear()
        return _number(name, value)

    def _merge(self, part: Metric, everyones: Sequence[Mapping[str, Any]]) -> None:
        """Have `part` compute as if it had seen all workers' batches, one worker after another."""
        for name, own in part.metric_state.items():
            states = mapped(
                lambda tensor: tensor.to(part.device), [theirs[name] for theirs in everyones]
            )
            if isinstance(own, Tensor):
                self._everyones[id(own)] = states  # to be reduced by torchmetrics
            else:
                setattr(part, name, [entry for state in states for entry in state])


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
    try:
        from torchmetrics import Metric
    except ImportError as error:
        names = ", ".join(f"task.metrics.{name}" for name in configured)
        raise ConfigError(
            f"{names}: needs torchmetrics; pip install 'expt[torchmetrics]'"
        ) from error
    metrics: dict[str, Metric] = {}
    for name, config in configured.items():
        with _explained(name):
            metrics[name] = user_class.build(config.target, Metric, **config.kwargs).to(device)  # type: ignore[type-abstract]
            if not metrics[name].sync_on_compute:
                raise ConfigError(
                    "sync_on_compute=false: would leave other workers' samples out; leave it out"
                )
    return ExtraMetrics(metrics, targets, warns=warns)


def _parts(metric: Metric) -> list[Metric]:
    """Return the metric, and those that it is made of."""
    return [
        cast("Metric", module) for module in metric.modules() if hasattr(module, "metric_state")
    ]


def _number(name: str, value: Any) -> float:
    """Return a metric's number; of several with names the one of its own name."""
    found = value.get(name) if isinstance(value, Mapping) else value
    if isinstance(found, Tensor) and found.numel() == 1:
        return float(found)
    fix = "choose an average, e.g. average=macro"
    if isinstance(value, Mapping):
        fix = f"name it after one of these: {listed(map(str, value))}"
    raise ConfigError(f"task.metrics.{name}: gives {described(value)}, not one number; {fix}")


def _fix(name: str, predictions: Any) -> str:
    """Return the fix for a metric of two classes that gets a score for each."""
    import torchmetrics.classification as classes

    several, shape = name.replace("Binary", "Multiclass"), list(getattr(predictions, "shape", ()))
    if several == name or len(shape) < 2 or not hasattr(classes, several):
        return ""
    target = f"{{_target_: torchmetrics.classification.{several}, num_classes: {shape[1]}}}"
    return f"; each class has a score: take {target}"


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
            said += _fix(kind, given[0])
        raise ConfigError(f"task.metrics.{name}: {said}") from error
    except ConfigError as error:
        raise ConfigError(
            [f"task.metrics.{name}: {problem}" for problem in error.problems]
        ) from error
