"""Loss and metrics as sums over samples: checked, added on the device, reduced over all workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from expt.data.loading import Batch, mapped, to_device
from expt.errors import ConfigError, Diverged, described
from expt.tasks.task import PhasedTask, Sum, Task

LOSS = "loss"
SAMPLES, LOSS_SUM, LOSS_WEIGHT = 0, 1, 2
"""The first columns of a row of sums."""
COUNTS = 0
"""The place in the row of a batch of whether it counts; the columns of a row of sums follow."""
MAX_RECENT = 1024
"""Batches whose losses are kept until the next log point."""
MAX_KEPT = 64
"""Batches whose sums are added up together: on a GPU the launch of a kernel costs the most."""


class Sums:
    """Running sums of a task's loss, metrics and samples, on `device`; nothing waits for a GPU."""

    def __init__(
        self,
        task: Task,
        device: torch.device,
        *,
        finite_only: bool = False,
        repeats_steps: bool = False,
        learns: bool = True,
        left_out: Collection[str] = (),
    ) -> None:
        """Begin at zero.

        With `finite_only` a step that was left out counts for nothing; with `repeats_steps` one may
        begin again, and counts once. Either needs calls of `end_step`. With `learns` the losses are
        those of training. The metrics `left_out` are not measured.
        """
        self._task, self._finite_only, self._learns = task, finite_only, learns
        self._left_out = left_out
        self._waits_for_end = finite_only or repeats_steps
        self._terms = task.sums
        self._columns = _columns_of(task)
        weights = [columns.stop for columns in self._columns.values()]
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self._values = torch.zeros(max(weights) + 1, dtype=torch.float64, device=device)
        self._not_finite = self._values.clone()
        """Columns that were nan or infinite before the last log point: differences would be nan."""
        self._are_weights = torch.zeros_like(self._values, dtype=torch.bool)
        self._are_weights[weights] = True
        self._logged = self._values.clone()
        """The values at the last log point."""
        self._peaks = Peaks(task.reductions, device)
        self._kept: list[list[Any]] = []
        """Rows of batches; of numbers on a CPU, where small tensors fragment memory."""
        self._of_step: list[list[Any]] = []
        """Rows that count only if the step does."""
        self._recent: deque[Any] = deque(maxlen=MAX_RECENT)

    @property
    def values(self) -> Tensor:
        """The row of all sums so far, followed by the peaks [N]."""
        self._count()
        return torch.cat((self._values + self._not_finite, self._peaks.values))

    @property
    def since_logged(self) -> Tensor:
        """The row of those since the last log point [N]."""
        self._count()
        return torch.cat((self._values - self._logged, self._peaks.since_logged))

    @torch.no_grad()
    def add(self, loss: Sum, outputs: Any, batch: Batch, begins_step: bool = True) -> None:
        """Count a batch, or a further micro-batch, by the task's loss and the model's outputs.

        Without weight only its place among the recent losses counts.
        """
        if begins_step and self._of_step:  # memory did not suffice
            self._of_step.clear()
            self._recent.pop()
        row: list[Any] = [True, batch.size, loss[0].detach(), loss[1]]
        if not batch.weightless:
            terms = terms_of(self._task, mapped(Tensor.detach, outputs), batch, self._terms)
            for name, size in self._terms.items():
                row += [0.0] * (size + 1) if name in self._left_out else terms[name]
            row += self._peaks.row_of(terms)
        row = self._known(row)
        if self._learns:
            of_step = 0.0 if batch.weightless else row[1 + LOSS_SUM]
            self._recent.append(of_step if begins_step else self._recent.pop() + of_step)
        if batch.weightless:
            return
        if self._finite_only:
            row[COUNTS] = _is_finite(row[1 + LOSS_SUM])
        self._of_step.append(row)
        if not self._waits_for_end:
            self.end_step()

    def end_step(self, left_out: Tensor | None = None) -> None:
        """End a step; with the flag `left_out`, equal on all workers, none of it counts."""
        if left_out is not None:
            for row in self._of_step:
                row[:1] = self._known([row[COUNTS] & ~left_out])
        self._kept += self._of_step
        self._of_step.clear()
        if len(self._kept) >= MAX_KEPT:
            self._count()

    def _known(self, values: list[Any]) -> list[Any]:
        """Return tensors as numbers, or lists of them, where that waits for nothing."""
        if self._values.device.type != "cpu":
            return values
        return [
            (each.item() if each.numel() == 1 else each.tolist())
            if isinstance(each, Tensor)
            else each
            for each in values
        ]

    @torch.no_grad()
    def _count(self) -> None:
        """Add up the kept batches one after another: their bits don't depend on when that is."""
        if not self._kept:
            return
        rows = torch.cat([self._column(each) for each in zip(*self._kept, strict=True)], 1)
        counts, rows, peaks = rows.tensor_split((1, 1 + len(self._values)), dim=1)
        rows = rows.masked_fill(self._are_weights & (rows < 0), -math.inf)
        if self._finite_only:
            rows = torch.where(counts > 0, rows, 0.0)
            peaks = torch.where(counts > 0, peaks, -math.inf)
        self._peaks.add(peaks)
        self._values.copy_(torch.cat((self._values[None], rows)).cumsum(0)[-1])
        self._kept.clear()

    def _column(self, several: Sequence[Any]) -> Tensor:
        """Return one row for each, float64 [n, values]."""
        exact, device = torch.float64, self._values.device
        if not any(isinstance(each, Tensor) for each in several):
            return to_device(torch.tensor(several, dtype=exact), device).reshape(len(several), -1)
        rows = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=exact) for x in several]
        return torch.stack([to_device(row, device).reshape(-1) for row in rows]).to(exact)

    def averages(self, values: Tensor) -> Averages:
        """Return the means of a row of sums, and the metrics that the task derives from them.

        Waits for the device. Raises Diverged if nothing was counted.
        """
        found = self.averages_if_any(values)
        if found is None:
            raise Diverged(
                "no sample was counted: in every step the loss, or a gradient, was nan or infinite"
            )
        return found

    def averages_if_any(self, values: Tensor) -> Averages | None:
        """Return `averages`, or None if nothing was counted.

        Raises ConfigError for weights by which gradients and metrics were not divided, or by which
        nothing can be.
        """
        row, task, means = values.tolist(), self._task, dict[str, Any]()
        samples, of_loss = row[SAMPLES], "training_loss" if self._learns else "loss"
        if not samples:
            return None
        for name, each in self._columns.items():
            sums, weight = row[each], row[each.stop]
            if not 0 <= weight < math.inf and (weight < 0 or all(map(math.isfinite, sums))):
                raise refusal(
                    task,
                    of_loss if name == LOSS else "measure",
                    f": the weights of {name} add up to {weight:g}, or one is below 0; let each be"
                    " a finite number that is not",
                )
            found = [value / weight if weight else math.nan for value in sums]
            means[name] = found[0] if len(found) == 1 else found
        peaks = row[len(row) - len(task.reductions) :]
        for (name, how), value in zip(task.reductions.items(), peaks, strict=True):
            means[name] = -value if how == "min" else value
        weight = row[LOSS_WEIGHT]
        if task.weight_is_samples and weight != samples and math.isfinite(weight):
            raise refusal(
                task,
                of_loss,
                f": its weights add up to {weight:g} for {samples:g} samples, and"
                " weight_is_samples says that they are the samples; leave that out",
            )
        known = {**means, **(task.derive(means) or {})}
        if missing := [name for name in task.metrics if name not in known]:
            raise ConfigError(
                f"{type(task).__name__}: task.metrics names {', '.join(missing)}, which neither"
                " measure nor derive gives; add it there"
            )
        shown = [name for name in (LOSS, *task.metrics) if name not in self._left_out]
        numbers = {name: float(known[name]) for name in shown}
        return Averages(numbers, int(samples), has_weight=bool(weight))

    def mark_logged(self) -> None:
        """Begin the next stretch between log points, without the last one's nan and infinity."""
        self._count()
        finite = self._values.nan_to_num(0.0, 0.0, 0.0)
        self._not_finite += self._values - finite
        self._values.copy_(finite)
        self._logged.copy_(finite)
        self._peaks.mark_logged()
        self._recent.clear()

    def first_not_finite(self) -> tuple[int, float] | None:
        """Return the first loss since the last log point that is not finite.

        It is how many batches ago that was, and the loss. Waits for the device.
        """
        losses = [float(loss) for loss in self._recent]
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        return (len(losses) - 1 - bad[0], losses[bad[0]]) if bad else None

    def reset(self) -> None:
        """Start again from zero."""
        for row in (self._values, self._not_finite, self._logged):
            row.zero_()
        self._peaks.rows.fill_(-math.inf)
        self._kept.clear()
        self._of_step.clear()
        self._recent.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums, those that are finite, and those at the last log point.

        Waits for the device.
        """
        sums = self.values[: len(self._values)]  # counts the kept batches, too
        peaks = {"peaks": self._peaks.rows.flatten().tolist()} if self._task.reductions else {}
        return {
            "sums": sums.tolist(),
            "finite": self._values.tolist(),
            "logged": self._logged.tolist(),
            **peaks,
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Load a state that `state_dict` returned."""
        self.reset()
        sums, finite, logged = (
            torch.tensor(state[key], dtype=torch.float64) for key in ("sums", "finite", "logged")
        )
        self._values.copy_(finite)
        self._not_finite.copy_(torch.where(sums.isfinite(), 0.0, sums))
        self._logged.copy_(logged)
        if peaks := state.get("peaks"):
            rows = torch.tensor(peaks, dtype=torch.float64)
            self._peaks.rows.copy_(rows.view_as(self._peaks.rows))


class Peaks:
    """The running `reductions` of a task: its last and largest numbers, and its smallest, negated.

    Of several workers' numbers the largest counts, so that one that has counted nothing has -inf.
    """

    def __init__(self, reductions: Mapping[str, str], device: torch.device) -> None:
        self._signs = {name: -1 if how == "min" else 1 for name, how in reductions.items()}
        lasts = [how == "last" for how in reductions.values()]
        self._is_last = torch.tensor(lasts, dtype=torch.bool, device=device)
        self.rows = torch.full((2, len(lasts)), -math.inf, dtype=torch.float64, device=device)
        """Those before the last log point, and since."""

    @property
    def values(self) -> Tensor:
        """Those so far [N]."""
        return self._after(*self.rows)

    @property
    def since_logged(self) -> Tensor:
        """Those since the last log point [N]."""
        return self.rows[1]

    def row_of(self, terms: Mapping[str, Any]) -> list[Any]:
        """Return a batch's row."""
        return [
            sign * terms[name] if name in terms else -math.inf for name, sign in self._signs.items()
        ]

    def add(self, rows: Tensor) -> None:
        """Count the rows of several batches [n, N]."""
        if len(self._is_last):
            for row in rows:
                self.rows[1] = self._after(self.rows[1], row)

    def mark_logged(self) -> None:
        """Begin the next stretch between log points."""
        self.rows[0] = self.values
        self.rows[1] = -math.inf

    def _after(self, before: Tensor, row: Tensor) -> Tensor:
        counts = self._is_last & (row != -math.inf)
        return torch.where(counts, row, torch.where(self._is_last, before, before.maximum(row)))


def _is_finite(value: Tensor | float) -> Tensor | bool:
    return value.isfinite() if isinstance(value, Tensor) else math.isfinite(value)


def loss_is_finite(saved: Sequence[float]) -> bool:
    """Return whether the loss is finite in sums that were saved."""
    return all(map(math.isfinite, saved[: LOSS_WEIGHT + 1]))


@dataclass(frozen=True)
class Averages:
    """The numbers that a log point shows."""

    values: Mapping[str, float]
    """The loss, then the task's metrics, by name."""
    samples: int
    """The samples of all workers."""
    has_weight: bool = True
    """False where nothing counts, such as in a mask that is all ignored; the loss is nan then."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.values[LOSS]


def _columns_of(task: Task) -> dict[str, slice]:
    """Return the columns of each sum in a row; its weight is in the next column.

    The samples come first, then the loss.
    """
    columns, end = dict[str, slice](), LOSS_SUM
    for name, size in {LOSS: 1, **task.sums}.items():
        columns[name] = slice(end, end + size)
        end += size + 1
    return columns


def refuse_weightless(averages: Averages, task: Task, epoch: int) -> None:
    """Raise ConfigError where nothing in all of an epoch had a weight: there were no gradients."""
    if not averages.has_weight:
        raise refusal(
            task,
            "training_loss",
            f": its weights add up to 0 in epoch {epoch}, so that nothing was learned; give samples"
            " a weight, or targets that are not all to be ignored",
        )


def terms_of(task: Task, outputs: Any, batch: Batch, expected: Mapping[str, int]) -> Any:
    """Return the sums of `task.measure`, each with the `expected` number of values.

    Raises ConfigError where these are not the real sums and weights that it says.
    """
    terms = task.measure(outputs, batch)
    if not isinstance(terms, Mapping):
        raise refusal(
            task, "measure", f" gives {described(terms)}; return a dict of name: (sum, weight)"
        )
    names = [name for name in (*expected, *task.reductions) if batch.progress.measures(name)]
    if terms.keys() - {*batch.progress.left_out} != {*names}:
        given, named = ", ".join(terms) or "nothing", ", ".join(names) or "none"
        further = [f"{name}: max" for name in terms if name not in names]
        same = f"such as metrics: {{{further[0]}}} in its YAML, " if further else ""
        raise refusal(
            task,
            "measure",
            f" gives {given}, and task.metrics names {named}; let them be the same, {same}name in"
            ' `sums` what `derive` needs, e.g. {"hits": 1}, with the number of values of each, or'
            " have one measured in evaluations only: {better: max, train: false}",
        )
    for name, term in terms.items():
        if name in task.reductions and not isinstance(term, Real) and _problem((term, 1), 1):
            raise refusal(task, "measure", f": {name} is {described(term)}; give one real number")
        if name in expected and (problem := _problem(term, expected[name])):
            raise refusal(task, "measure", f": {name} {problem}")
    return terms


def check_loss(loss: Any, task: Task, *, learns: bool = True) -> None:
    """Raise ConfigError unless it is a real sum and weight, with a gradient if it `learns`."""
    problem = _problem(loss, None)
    if not problem and learns and not loss[0].requires_grad:
        problem = (
            "gives a number without a gradient; compute it from the model's outputs, without"
            " detach, item or argmax"
        )
    if problem:
        raise refusal(task, "training_loss" if learns else "loss", f" {problem}")


def refusal(task: Task, method: str, problem: str) -> ConfigError:
    """Return the error of a task whose `method` has a problem."""
    return ConfigError(f"{method_of(task, method)}{problem}")


def _problem(term: object, size: int | None) -> str:
    """Return the problem of a sum of `size` values, or of a tensor [] if `size` is None."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        return f"is {described(term)}; give its sum and its weight"
    total, weight = term
    fits = isinstance(total, Tensor) and not total.is_complex()
    fits = fits and not (total.dim() if size is None else total.numel() != size)
    if not fits and not (size == 1 and isinstance(total, Real)):
        many = "one real number" if size in (None, 1) else f"{size} real numbers"
        return f"is {described(total)}; give its sum, a tensor of {many}"
    if isinstance(weight, Tensor):
        fits, shown = weight.numel() == 1 and not weight.is_complex(), described(weight)
    else:
        fits, shown = isinstance(weight, Real) and not weight < 0, repr(weight)
    fix = "give a real number that is not below 0, such as len(outputs)"
    return "" if fits else f"has the weight {shown}; {fix}"


def method_of(task: Task, name: str) -> str:
    """Return the method that gives the `loss`, `training_loss` or `measure`, for an error."""
    kind = type(task)
    if isinstance(task, PhasedTask):
        is_phases = name == "training_loss" or getattr(kind, name) is getattr(PhasedTask, name)
        name = "phase" if is_phases else name
    elif name == "training_loss" and kind.training_loss is Task.training_loss:
        name = "loss"
    return f"{kind.__name__}.{name}"
