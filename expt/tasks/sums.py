"""Loss and metrics as sums over samples: added on the device, reduced over all workers once, divided once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.data.tree import mapped
from expt.errors import ConfigError, Diverged
from expt.tasks.task import Sum, Task
from expt.tasks.terms import terms_of

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


_NO_TERMS: Mapping[str, Sum] = {}


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
        if self._at_once:
            with torch.no_grad():
                terms = terms_of(self._task, mapped(Tensor.detach, outputs), batch)
            kept = self._of_step if self._finite_only else self._kept
            kept.append(_Kept(loss_sum, weight, batch.size, None, None, terms))
        else:  # the outputs are one tensor
            self._kept.append(_Kept(loss_sum, weight, len(outputs), outputs.detach(), batch.targets, _NO_TERMS))
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

    @torch.no_grad()
    def _count(self) -> None:
        """Add up what was kept: whatever the stretches in which that is done, to the same bits."""
        if not self._kept:
            return
        kept, loss = self._kept, self._columns["loss"]
        terms = self._terms(kept)
        self._add(slice(loss.start, loss.stop), [each.loss_sum for each in kept])
        self._add(slice(0, 1), [each.samples for each in kept])
        self._add_loss_weights(loss.stop, [each.weight for each in kept])
        for name in self._task.sums:
            columns = self._columns[name]
            self._add(columns, [each[name][0] for each in terms])
            self._add(slice(columns.stop, columns.stop + 1), [each[name][1] for each in terms])
        self._forget()

    def _terms(self, kept: Sequence[_Kept]) -> Sequence[Mapping[str, Sum]]:
        """Of all batches at once where these are counts, which are exact; of each batch where they are rounded."""
        if kept[0].outputs is None:
            return [each.terms for each in kept]
        together = self._measured(kept)
        if all(_is_count(part) for term in together.values() for part in term):
            return [together]
        self._at_once = True  # from now on
        return [together] if len(kept) == 1 else [self._measured([each]) for each in kept]

    def _measured(self, kept: Sequence[_Kept]) -> Mapping[str, Sum]:
        targets = torch.cat([each.targets for each in kept])
        return terms_of(self._task, torch.cat([each.outputs for each in kept]), Batch(None, targets, len(targets)))

    def _add(self, columns: slice, several: Sequence[Tensor | float]) -> None:
        """Counts together; what is rounded one by one, by a few kernels: the order is in a sum's last digits."""
        values, numbers = self._values[columns], [each for each in several if not isinstance(each, Tensor)]
        counts = {*map(type, several)} == {int} or all(map(_is_count, several))  # a small model feels a closer look
        if counts and len(numbers) == len(several):
            values += math.fsum(numbers)
            return
        rows = self._rows(several, numbers)
        if counts or len(rows) == 1:
            values += rows.sum(0, dtype=values.dtype)
        else:
            values.copy_(torch.cat((values[None], rows.to(values.dtype))).cumsum(0)[-1])

    def _rows(self, several: Sequence[Tensor | float], numbers: Sequence[float]) -> Tensor:
        """One for each, in which `numbers` are those that are no tensors."""
        if not numbers and len({each.dim() for each in several}) == 1:  # type: ignore[union-attr]
            return torch.stack(several).reshape(len(several), -1)  # type: ignore[arg-type]
        rest = iter(torch.tensor(numbers, dtype=self._values.dtype, device=self._values.device))
        return torch.stack([(each if isinstance(each, Tensor) else next(rest)).reshape(-1) for each in several])

    def _add_loss_weights(self, column: int, weights: Sequence[Tensor | float]) -> None:
        """One that is below 0 makes the sum -inf: it would hide among others."""
        self._add(slice(column, column + 1), weights)
        if any(not isinstance(weight, Tensor) and weight < 0 for weight in weights):
            self._values[column] = -math.inf
        if tensors := [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]:
            self._values[column] -= torch.where((torch.stack(tensors) < 0).any(), math.inf, 0.0)

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
        found, task = self._task.derive(means), type(self._task).__name__
        given = {**means, **found} if isinstance(found, Mapping) else {}
        if missing := [name for name in self._task.metrics if name not in given]:
            raise ConfigError(
                f"{task}: task.metrics names {', '.join(missing)}, which neither measure nor derive gives; add it there"
            )
        if wrong := [name for name in self._task.metrics if not isinstance(given[name], Real)]:
            raise ConfigError(f"{task}: {wrong[0]} is {given[wrong[0]]!r}; give a real number, as by float()")
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


def _is_count(number: Tensor | float) -> bool:
    """Whether sums of such are exact, in any order."""
    return not number.is_floating_point() if isinstance(number, Tensor) else float(number).is_integer()


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
