"""Loss and metrics as sums over samples: added on the device, reduced over all workers once;
`averages` divides.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.loading import Batch, mapped
from expt.errors import Diverged
from expt.tasks.averages import LOSS, Averages, averages_of, columns_of
from expt.tasks.task import Sum, Task
from expt.tasks.terms import terms_of

MAX_RECENT = 1024
"""Batches whose losses are kept until the next log point."""
MAX_KEPT = 64
"""Batches whose sums are added up together: on a GPU each kernel costs more than what it adds."""


class _Kept(NamedTuple):
    """The sums of a batch."""

    row: list[Any]
    """In the order of the columns; on a CPU numbers, for a small tensor that stays would split the
    memory that a step frees and the next needs whole.
    """
    counts: Any = True
    """A bool, or one [] on a GPU."""


class Sums:
    """Running sums of a task's loss and metrics, and of the samples, on `device`; nothing here
    waits for a GPU.
    """

    def __init__(
        self, task: Task, device: torch.device, *, finite_only: bool = False, learns: bool = True
    ) -> None:
        """Begin at zero.

        With `finite_only` a step that was left out counts for nothing: `end_step` is to be called
        then. What `learns` adds training losses.
        """
        self._task, self._finite_only, self._learns = task, finite_only, learns
        self._columns = columns_of(task)
        size = 1 + max(columns.stop for columns in self._columns.values())
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self._values = torch.zeros(size, dtype=torch.float64, device=device)
        self._not_finite = self._values.clone()
        """What was nan or infinite before the last log point: a difference to it would be nan."""
        self._logged = self._values.clone()
        """The values at the last log point."""
        self._kept: list[_Kept] = []
        self._of_step: list[_Kept] = []
        """What counts only if the step does."""
        self._recent: deque[Any] = deque(maxlen=MAX_RECENT)

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

    @torch.no_grad()
    def add(self, loss: Sum, outputs: Any, batch: Batch, begins_step: bool = True) -> None:
        """Count a batch, or a further micro-batch: its loss, as the task gives it, and the model's
        outputs.

        Without weight only its place among the recent losses counts.
        """
        row = self._known([batch.size, loss[0].detach(), loss[1]])
        if self._learns:
            of_step = 0.0 if batch.weightless else row[1]
            self._recent.append(of_step if begins_step else self._recent.pop() + of_step)
        if batch.weightless:
            return
        terms = terms_of(self._task, mapped(Tensor.detach, outputs), batch)
        row += self._known([each for name in self._columns if name != LOSS for each in terms[name]])
        if self._finite_only:
            finite = row[1].isfinite() if isinstance(row[1], Tensor) else math.isfinite(row[1])
            self._of_step.append(_Kept(row, finite))
            return
        self._kept.append(_Kept(row))
        if len(self._kept) == MAX_KEPT:
            self._count()

    def end_step(self, left_out: Tensor | None = None) -> None:
        """End a step, all of which is there; with the flag `left_out`, alike on all workers, none
        of it counts.
        """
        for kept in self._of_step:
            counts = kept.counts if left_out is None else kept.counts & ~left_out
            self._kept.append(kept._replace(counts=self._known([counts])[0]))
        self._of_step.clear()
        if len(self._kept) >= MAX_KEPT:
            self._count()

    def _known(self, values: list[Any]) -> list[Any]:
        """Return tensors as numbers, or lists of them, where that waits for nothing."""
        if self._values.device.type != "cpu":
            return values
        return [
            each
            if not isinstance(each, Tensor)
            else each.item()
            if each.numel() == 1
            else each.tolist()
            for each in values
        ]

    @torch.no_grad()
    def _count(self) -> None:
        """Add up what was kept, one batch after another: in any stretches, to the same bits."""
        if not self._kept:
            return
        rows = torch.cat(
            [self._column(each) for each in zip(*(k.row for k in self._kept), strict=True)], 1
        )
        weights = [columns.stop for columns in self._columns.values()]
        rows[:, weights] = rows[:, weights].masked_fill(rows[:, weights] < 0, -math.inf)
        if self._finite_only:
            counts = self._column([kept.counts for kept in self._kept])
            rows = torch.where(counts > 0, rows, 0.0)
        self._values.copy_(torch.cat((self._values[None], rows)).cumsum(0)[-1])
        self._kept.clear()

    def _column(self, several: Sequence[Any]) -> Tensor:
        """Return one row for each, float64 [n, values]."""
        of = functools.partial(torch.tensor, dtype=torch.float64, device=self._values.device)
        if not any(isinstance(each, Tensor) for each in several):
            return of(several).reshape(len(several), -1)
        rows = [(each if isinstance(each, Tensor) else of(each)).reshape(-1) for each in several]
        return torch.stack(rows).to(torch.float64)

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
        losses = [float(loss) for loss in self._recent]
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        return (len(losses) - 1 - bad[0], losses[bad[0]]) if bad else None

    def reset(self) -> None:
        """Start again from zero."""
        for row in (self._values, self._not_finite, self._logged):
            row.zero_()
        self._kept.clear()
        self._of_step.clear()
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
        """Continue from what `state_dict` returned."""
        self.reset()
        sums, finite, logged = (
            torch.tensor(state[key], dtype=torch.float64) for key in ("sums", "finite", "logged")
        )
        self._values.copy_(finite)
        self._not_finite.copy_(torch.where(sums.isfinite(), 0.0, sums))
        self._logged.copy_(logged)


def loss_is_finite(saved: Sequence[float]) -> bool:
    """Whether the loss is finite in sums that were saved."""
    return all(map(math.isfinite, saved[:3]))
