"""Loss and metrics as sums over samples: added on the device, reduced over all workers once;
`averages` divides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.data.tree import mapped
from expt.errors import Diverged
from expt.tasks.averages import LOSS, Averages, averages_of, columns_of
from expt.tasks.task import Sum, Task
from expt.tasks.terms import terms_of

MAX_RECENT = 1024
"""Batches whose losses are kept until the next log point."""
MAX_KEPT, MAX_KEPT_OUTPUTS = 64, 2**20
"""Batches, and their numbers, that are kept to be counted together: a step of a small model feels
each kernel.
"""


class _Kept(NamedTuple):
    loss: Sum
    samples: Tensor | float
    outputs: Any
    targets: Any
    terms: Mapping[str, Sum]


_NO_TERMS: Mapping[str, Sum] = {}


class Sums:
    """Running sums of a task's loss and metrics, and of the samples, on `device`; nothing here
    waits for the device.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        *,
        finite_only: bool = False,
        at_once: bool = False,
        learns: bool = True,
    ) -> None:
        """With `at_once` a batch's outputs are used up before the next, which may overwrite them
        (CUDA graphs do).

        With `finite_only` a step that was left out counts for nothing: `end_step` is to be called
        then. What `learns` adds training losses."""
        self._task, self._finite_only, self._learns = task, finite_only, learns
        self._columns = columns_of(task)
        size = 1 + max(columns.stop for columns in self._columns.values())
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self._values = torch.zeros(size, dtype=torch.float64, device=device)
        self._not_finite = self._values.clone()
        """What was nan or infinite before the last log point: a difference to it would be nan."""
        self._logged = self._values.clone()
        """The values at the last log point."""
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
        return self._values + self._not_finite

    @property
    def since_logged(self) -> Tensor:
        """The row of the sums since the last log point [N]."""
        self._count()
        return self._values - self._logged

    def add(self, loss: Sum, outputs: Any, batch: Batch, begins_step: bool = True) -> None:
        """Count a batch, or a further part of it: its loss, as the task gives it, and the model's
        outputs.

        Nothing where it has no weight.
        """
        loss = loss[0].detach(), loss[1]
        of_step = torch.zeros_like(loss[0]) if batch.weightless else loss[0]
        self._recent.append(of_step if begins_step else self._recent.pop() + of_step)
        if batch.weightless:
            return
        if self._at_once:
            with torch.no_grad():
                terms = terms_of(self._task, mapped(Tensor.detach, outputs), batch)
            kept = self._of_step if self._finite_only else self._kept
            kept.append(_Kept(loss, batch.size, None, None, terms))
        else:  # the outputs are one tensor
            self._kept.append(_Kept(loss, len(outputs), outputs.detach(), batch.targets, _NO_TERMS))
            self._kept_outputs += outputs.numel()
        if len(self._kept) == MAX_KEPT or self._kept_outputs >= MAX_KEPT_OUTPUTS:
            self._count()

    def end_step(self, left_out: Tensor | None = None) -> None:
        """All parts of a step are there; with the flag `left_out`, alike on all workers, none of
        them counts.
        """
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
        terms = self._terms(self._kept)
        self._add(slice(0, 1), [each.samples for each in self._kept])
        for name, columns in self._columns.items():
            several = (
                [each.loss for each in self._kept]
                if name == LOSS
                else [each[name] for each in terms]
            )
            self._add(columns, [total for total, _ in several])
            self._add(
                slice(columns.stop, columns.stop + 1),
                [weight for _, weight in several],
                are_weights=True,
            )
        self._forget()

    def _terms(self, kept: Sequence[_Kept]) -> Sequence[Mapping[str, Sum]]:
        """Of all batches at once where these are counts, which are exact; of each batch where they
        are rounded.
        """
        if kept[0].outputs is None:
            return [each.terms for each in kept]
        together = self._measured(kept)
        if all(_is_count(part) for term in together.values() for part in term):
            return [together]
        self._at_once = True  # from now on
        return [together] if len(kept) == 1 else [self._measured([each]) for each in kept]

    def _measured(self, kept: Sequence[_Kept]) -> Mapping[str, Sum]:
        targets = torch.cat([each.targets for each in kept])
        return terms_of(
            self._task,
            torch.cat([each.outputs for each in kept]),
            Batch(None, targets, len(targets)),
        )

    def _add(
        self, columns: slice, several: Sequence[Tensor | float], *, are_weights: bool = False
    ) -> None:
        """Counts together; what is rounded one by one, by a few kernels: the order is in a sum's
        last digits.
        """
        values, numbers = (
            self._values[columns],
            [each for each in several if not isinstance(each, Tensor)],
        )
        counts = {*map(type, several)} == {int} or all(
            map(_is_count, several)
        )  # a small model feels a closer look
        if counts and len(numbers) == len(several):
            values += math.fsum(numbers)
            return
        rows = self._rows(several, numbers)
        if are_weights:  # one below 0 would hide among others
            rows = rows.to(values.dtype)
            rows = rows.masked_fill(rows < 0, -math.inf)
        if counts or len(rows) == 1:
            values += rows.sum(0, dtype=values.dtype)
        else:
            values.copy_(torch.cat((values[None], rows.to(values.dtype))).cumsum(0)[-1])

    def _rows(self, several: Sequence[Tensor | float], numbers: Sequence[float]) -> Tensor:
        """One for each, in which `numbers` are those that are no tensors."""
        if numbers:
            rest = iter(torch.tensor(numbers, dtype=self._values.dtype, device=self._values.device))
        rows = [each if isinstance(each, Tensor) else next(rest) for each in several]
        if len({row.dim() for row in rows}) > 1:
            rows = [row.reshape(-1) for row in rows]
        return torch.stack(rows).reshape(len(rows), -1)

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
            raise Diverged(
                "no sample was counted: in every step the loss, or a gradient, was nan or infinite"
            )
        return found

    def averages_if_any(self, values: Tensor) -> Averages | None:
        """The same; None if nothing was counted."""
        return averages_of(values.tolist(), self._task, learns=self._learns)

    def mark_logged(self) -> None:
        """Begin the next stretch between log points: one that is not finite leaves no trace in it."""
        self._count()
        finite = self._values.nan_to_num(0.0, 0.0, 0.0)
        self._not_finite += self._values - finite
        self._values.copy_(finite)
        self._logged.copy_(finite)
        self._recent.clear()

    def first_not_finite(self) -> tuple[int, float] | None:
        """How many batches ago since the last log point a loss was first nan or infinite, and
        which. Waits.
        """
        losses = [loss.item() for loss in self._recent]
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        return (len(losses) - 1 - bad[0], losses[bad[0]]) if bad else None

    def reset(self) -> None:
        """Start again from zero."""
        for row in (self._values, self._not_finite, self._logged):
            row.zero_()
        self._forget()
        self._recent.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """What was counted so far, of it what is finite to log points, and what was logged.

        Waits for the device.
        """
        sums = self.values  # counts what was kept
        return {
            "sums": sums.tolist(),
            "finite": self._values.tolist(),
            "logged": self._logged.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from what `state_dict` found; an older version's has no `finite`."""
        self._forget()
        size = len(self._values)
        sums = _row(state["sums"], size)
        self._values.copy_(_row(state.get("finite", state["sums"]), size))
        self._not_finite.copy_(torch.where(sums.isfinite(), 0.0, sums))
        self._logged.copy_(_row(state["logged"], size))


def loss_is_finite(saved: Sequence[float]) -> bool:
    """Whether the loss is finite in sums that were saved."""
    return all(map(math.isfinite, saved[:3]))


def _is_count(number: Tensor | float) -> bool:
    """Whether sums of such are exact, in any order."""
    return (
        not number.is_floating_point() if isinstance(number, Tensor) else float(number).is_integer()
    )


def _row(saved: Sequence[float], size: int) -> Tensor:
    """The `size` sums that were saved; before there were tasks they were loss, correct predictions
    and samples.

    Three are also those of a task without metrics.
    """
    if len(saved) == 3 and size == 5:
        loss_sum, correct, count = saved
        saved = [count, loss_sum, count, correct, count]
    return torch.tensor(saved, dtype=torch.float64)


@torch.no_grad()
def _if_counted(part: _Kept, left_out: Tensor | None) -> _Kept:
    """The same, or zeros where the step was left out, or the loss is not finite."""
    counts = part.loss[0].isfinite()
    if left_out is not None:
        counts = counts & ~left_out

    def kept(value: Tensor | float) -> Tensor:
        return torch.where(
            counts, torch.as_tensor(value, dtype=torch.float64, device=counts.device), 0.0
        )

    def both(term: Sum) -> Sum:
        return kept(term[0]), kept(term[1])

    terms = {name: both(term) for name, term in part.terms.items()}
    return _Kept(both(part.loss), kept(part.samples), None, None, terms)
