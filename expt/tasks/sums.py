"""Loss and metrics as sums over samples: added on the device, reduced over all workers once, divided once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.data.tree import mapped
from expt.errors import ConfigError, Diverged
from expt.tasks.task import Sum, Task

MAX_RECENT = 1024
"""Batches whose losses are kept until the next log point."""
MAX_KEPT, MAX_KEPT_OUTPUTS = 64, 2**20
"""Batches, and their numbers, that are kept to be counted together: a step of a small model feels each kernel."""


@dataclass(frozen=True)
class Averages:
    """What a log point shows."""

    values: Mapping[str, float]
    """The loss, then the task's metrics, by name."""
    samples: int
    """Of all workers."""
    has_weight: bool = True
    """False where nothing of the samples counts, as of a mask that is all to be ignored; the loss is nan then."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.values["loss"]


class _Kept(NamedTuple):
    loss_sum: Tensor
    weight: Tensor | float
    samples: Tensor | float
    outputs: Any
    targets: Any
    terms: Mapping[str, Sum]


class Sums:
    """Running sums of a task's loss and metrics, and of the samples, on `device`; nothing here waits for the device."""

    def __init__(self, task: Task, device: torch.device, *, finite_only: bool = False, at_once: bool = False) -> None:
        """With `at_once` a batch's outputs are used up before the next, which may overwrite them (CUDA graphs do).

        With `finite_only` a step that was left out counts for nothing: `end_step` is to be called then.
        """
        self._task, self._finite_only = task, finite_only
        self._columns: dict[str, slice] = {}
        """Of the row: the samples, then the values of each sum, and its weight behind them. The loss comes first."""
        end = 1
        for name, size in {"loss": 1, **task.sums}.items():
            self._columns[name] = slice(end, end + size)
            end += size + 1
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self._values = torch.zeros(end, dtype=torch.float64, device=device)
        self.logged = self._values.clone()
        """The sums at the last log point."""
        self._at_once = at_once or finite_only or not task.measures_jointly
        self._kept: list[_Kept] = []
        self._of_step: list[_Kept] = []
        """What counts only if the step does."""
        self._kept_outputs = 0
        self._recent: deque[Tensor] = deque(maxlen=MAX_RECENT)

    @property
    def values(self) -> Tensor:
        """The row of all sums so far [N]."""
        self._count()
        return self._values

    def add(self, loss: Sum, outputs: Any, batch: Batch, begins_step: bool = True) -> None:
        """Count a batch, or a further part of it: its loss, as the task gives it, and the model's outputs.

        Nothing where it has no weight.
        """
        loss_sum, weight = loss[0].detach(), loss[1]
        of_step = torch.zeros_like(loss_sum) if batch.weightless else loss_sum
        self._recent.append(of_step if begins_step else self._recent.pop() + of_step)
        if batch.weightless:
            return
        outputs = mapped(Tensor.detach, outputs)
        if self._at_once:
            with torch.no_grad():
                terms = self._checked(self._task.measure(outputs, batch))
            kept = self._of_step if self._finite_only else self._kept
            kept.append(_Kept(loss_sum, weight, batch.size, None, None, terms))
        else:
            self._kept.append(_Kept(loss_sum, weight, batch.size, outputs, batch.targets, {}))
            self._kept_outputs += outputs.numel()
        if len(self._kept) == MAX_KEPT or self._kept_outputs >= MAX_KEPT_OUTPUTS:
            self._count()

    def end_step(self, left_out: Tensor | None = None) -> None:
        """All parts of a step are there; with the flag `left_out`, alike on all workers, none of them counts."""
        if not self._of_step:
            return
        self._kept += [_if_counted(part, left_out) for part in self._of_step]
        self._of_step.clear()
        if len(self._kept) >= MAX_KEPT:
            self._count()

    def _checked(self, terms: Mapping[str, Sum]) -> Mapping[str, Sum]:
        expected, task = self._task.sums, type(self._task).__name__
        if not isinstance(terms, Mapping):
            raise ConfigError(f"{task}.measure gives a {type(terms).__name__}; return a dict of name: (sum, weight)")
        if terms.keys() != expected.keys():
            named = ", ".join(expected) or "none"
            raise ConfigError(
                f"{task}.measure gives {', '.join(terms) or 'nothing'}, and task.metrics names {named}; let them be "
                "the same"
            )
        for name, term in terms.items():
            if not isinstance(term, tuple | list) or len(term) != 2:
                raise ConfigError(f"{task}.measure: {name} is a {type(term).__name__}; give its sum and its weight")
            total, weight = term
            if not isinstance(total, Tensor) or total.numel() != expected[name]:
                what = f"has the shape {list(total.shape)}" if isinstance(total, Tensor) else f"is {total!r}"
                raise ConfigError(f"{task}.measure: {name} {what}; give its sum, a tensor []")
            if isinstance(weight, Tensor) and weight.numel() != 1:
                raise ConfigError(f"{task}.measure: the weight of {name} has the shape {list(weight.shape)}; sum it")
        return terms

    @torch.no_grad()
    def _count(self) -> None:
        """Add up what was kept."""
        if not self._kept:
            return
        kept, loss = self._kept, self._columns["loss"]
        self._add_in_order(loss.start, [each.loss_sum for each in kept])
        self._add_weights(0, [each.samples for each in kept])
        self._add_weights(loss.stop, [each.weight for each in kept], refused_below_0=True)
        if kept[0].outputs is not None:
            targets = torch.cat([each.targets for each in kept])
            outputs = torch.cat([each.outputs for each in kept])
            self._add_terms([self._checked(self._task.measure(outputs, Batch(None, targets, len(targets))))])
        else:
            self._add_terms([each.terms for each in kept])
        self._forget()

    def _add_in_order(self, column: int, sums: list[Tensor]) -> None:
        """One by one, by a few kernels: the order is in a sum's last digits."""
        if len(sums) == 1:
            self._values[column] += sums[0]
            return
        before = self._values[column : column + 1]
        before.copy_(torch.cat((before, torch.stack(sums).to(before.dtype))).cumsum(0)[-1:])

    def _add_terms(self, terms: Sequence[Mapping[str, Sum]]) -> None:
        for name in self._task.sums:
            columns = self._columns[name]
            several = torch.stack([each[name][0].reshape(-1) for each in terms])
            self._values[columns] += several.sum(0, dtype=torch.float64)
            self._add_weights(columns.stop, [each[name][1] for each in terms])

    def _add_weights(self, column: int, weights: Sequence[Tensor | float], *, refused_below_0: bool = False) -> None:
        """With `refused_below_0` one that is makes the sum -inf: it would hide among others."""
        numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
        tensors = [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]
        if refused_below_0 and any(number < 0 for number in numbers):
            numbers = [-math.inf]
        if numbers:
            self._values[column] += math.fsum(numbers)
        if tensors:
            together = torch.stack(tensors)
            self._values[column] += together.sum(dtype=torch.float64)
            if refused_below_0:
                self._values[column] -= torch.where((together < 0).any(), math.inf, 0.0)

    def _forget(self) -> None:
        self._kept.clear()
        self._of_step.clear()
        self._kept_outputs = 0

    def averages(self, values: Tensor) -> Averages:
        """The means, and what the task derives from them, of a row of sums. Waits for the device.

        Raises Diverged if nothing was counted.
        """
        found = self.averages_if_any(values)
        if found is None:
            raise Diverged("no sample was counted: in every step the loss, or a gradient, was nan or infinite")
        return found

    def averages_if_any(self, values: Tensor) -> Averages | None:
        """The same; None if nothing was counted."""
        row = values.tolist()
        if not row[0]:
            return None
        means: dict[str, Any] = {}
        for name, columns in self._columns.items():
            weight = row[columns.stop]
            found = [value / weight if weight else math.nan for value in row[columns]]
            means[name] = found[0] if len(found) == 1 else found
        weight = row[self._columns["loss"].stop]
        self._refuse_weight(weight, samples=row[0], loss=row[self._columns["loss"].start])
        known = {**means, **self._derived(means)}
        return Averages({name: known[name] for name in ("loss", *self._task.metrics)}, int(row[0]), bool(weight))

    def _refuse_weight(self, weight: float, *, samples: float, loss: float) -> None:
        """Raise ConfigError where gradients were divided by another, or by what nothing can be divided by."""
        task = type(self._task).__name__
        if weight < 0:
            raise ConfigError(f"{task}.loss: gives a weight below 0; let none be")
        if math.isfinite(loss) and not math.isfinite(weight):  # else it is the loss that is told of
            raise ConfigError(f"{task}.loss: its weights add up to {weight:g}; let each be a finite number")
        if self._task.weight_is_samples and weight != samples:
            raise ConfigError(
                f"{task}.loss: its weights add up to {weight:g} for {samples:g} samples, and weight_is_samples says "
                "that they are the samples; leave that out"
            )

    def refuse_weightless(self, averages: Averages, epoch: int) -> None:
        """Raise ConfigError where nothing in all of an epoch had a weight: there were no gradients."""
        if not averages.has_weight:
            raise ConfigError(
                f"{type(self._task).__name__}.loss: its weights add up to 0 in epoch {epoch}, so that nothing was "
                "learned; give samples a weight, or targets that are not all to be ignored"
            )

    def _derived(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        found = self._task.derive(means)
        given = {**means, **found} if isinstance(found, Mapping) else {}
        if missing := [name for name in self._task.metrics if name not in given]:
            task = type(self._task).__name__
            raise ConfigError(
                f"{task}: task.metrics names {', '.join(missing)}, which neither measure nor derive gives; add it there"
            )
        return given

    def mark_logged(self) -> None:
        """Begin the next stretch between log points."""
        self.logged.copy_(self.values)
        self._recent.clear()

    def first_not_finite(self) -> tuple[int, float] | None:
        """How many batches ago since the last log point a loss was first nan or infinite, and which. Waits."""
        losses = [loss.item() for loss in self._recent]
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        return (len(losses) - 1 - bad[0], losses[bad[0]]) if bad else None

    def reset(self) -> None:
        """Start again from zero."""
        self._values.zero_()
        self.logged.zero_()
        self._forget()
        self._recent.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """What was counted so far, and of it what was logged. Waits for the device."""
        return {"sums": self.values.tolist(), "logged": self.logged.tolist()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from what `state_dict` found."""
        self._forget()
        size = len(self._values)
        self._values.copy_(_row(state["sums"], size))
        self.logged.copy_(_row(state["logged"], size))


def loss_is_finite(saved: Sequence[float]) -> bool:
    """Whether the loss is finite in sums that were saved."""
    return all(map(math.isfinite, saved[:3]))


def _row(saved: Sequence[float], size: int) -> Tensor:
    """The `size` sums that were saved; before there were tasks they were loss, correct predictions and samples.

    Three are also those of a task without metrics.
    """
    if len(saved) == 3 and size == 5:
        loss_sum, correct, count = saved
        saved = [count, loss_sum, count, correct, count]
    return torch.tensor(saved, dtype=torch.float64)


@torch.no_grad()
def _if_counted(part: _Kept, left_out: Tensor | None) -> _Kept:
    """The same, or zeros where the step was left out, or the loss is not finite."""
    counts = part.loss_sum.isfinite()
    if left_out is not None:
        counts = counts & ~left_out

    def kept(value: Tensor | float) -> Tensor:
        return torch.where(counts, torch.as_tensor(value, dtype=torch.float64, device=counts.device), 0.0)

    terms = {name: (kept(total), kept(by)) for name, (total, by) in part.terms.items()}
    return _Kept(kept(part.loss_sum), kept(part.weight), kept(part.samples), None, None, terms)
