"""Numbers to be predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.config.kinds import Better, TaskConfig
from expt.errors import DataError, described
from expt.features import Feature, Numbers, at_least_single
from expt.late import functional
from expt.tasks.task import Facts, Sum, Task

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.loading import Batch

Loss = Literal["mse", "mae", "huber"]

ROUNDING = 1e-13
"""The share of a sum of squares that rounding leaves when equal targets lose their mean's square.
"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(TaskConfig):
    """See conf/task/regression.yaml."""

    takes: ClassVar[type[Feature]] = Numbers
    METRICS: ClassVar[Mapping[str, Better]] = {"mae": "min", "rmse": "min", "r2": "max"}
    OBJECTIVE: ClassVar[str] = "loss"
    name: Annotated[Literal["regression"], Key(fork=False)]
    loss: Loss

    def build(self, facts: Facts) -> Task:
        """Return the task."""
        targets = facts.targets if isinstance(facts.targets, Numbers) else Numbers()
        if targets.transform:
            ones = [1.0] * len(targets.names)
            return Regression(self.loss, deviations=ones, targets=targets)
        deviations = [deviation for _, deviation in targets.scales.values()]
        return Regression(self.loss, targets.origin, deviations)


class Regression(Task):
    """Outputs and targets [B, ...] of one shape, each value counted once; see `aligned`.

    R^2 is 1 - (squared error) / (variance of the target), over the whole split; of targets [B, T]
    the mean over the T, as scikit-learn has it. The metrics of standardised targets are in the
    targets' own units, and the loss, which is minimised, in deviations.
    """

    metrics = Config.METRICS
    weight_is_samples = True

    def __init__(
        self,
        loss: Loss = "mse",
        origin: float | Sequence[float] = 0.0,
        deviations: Sequence[float] = (),
        targets: Feature | None = None,
    ) -> None:
        """Take the moments of the targets from `origin`, a number near which they lie, or one each.

        Where their mean is N times their deviation, those from 0 would lose 2 log10(N) digits of
        R^2. The `deviations` are those by which targets are standardised, one each, if they are.
        Where logarithms are trained on, the feature of the `targets` has their units.
        """
        losses: dict[str, Any] = {
            "mse": functional.mse_loss,
            "mae": functional.l1_loss,
            "huber": functional.huber_loss,
        }
        self._loss = losses[loss]
        origins = [origin] if isinstance(origin, int | float) else [*origin]
        origins *= max(1, len(deviations) // len(origins))
        self._moments = origins, [*deviations] or [1.0] * len(origins)
        self._constants: Tensor | None = None
        self._targets = targets

    @property
    def sums(self) -> Mapping[str, int]:
        """See Task."""
        moments = ("squared_error", "target", "squared_target")
        return {"mae": 1, **dict.fromkeys(moments, len(self._moments[0]))}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return the mean over a sample's values, summed over the samples."""
        predicted, targets = aligned(outputs, batch.targets)
        total = self._loss(predicted, targets, reduction="sum")
        return total / (targets[:1].numel() or 1), len(targets)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Return both errors, and the targets' moments from `origin`, in float64."""
        predicted, targets = (tensor.double() for tensor in aligned(outputs, batch.targets))
        if self._targets is not None:
            predicted, targets = map(self._targets.in_units, (predicted, targets))
        error, targets = self._rows(predicted - targets, targets)
        moments = {"squared_error": error.square(), "target": targets}
        moments["squared_target"] = targets.square()
        sums = {name: (values.sum(0), len(targets)) for name, values in moments.items()}
        return {"mae": (error.abs().sum(), targets.numel()), **sums}

    def _rows(self, error: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return both float64 [B, T] in units, the targets from their origins.

        Where there are not several targets, all values are in one column.
        """
        number = len(self._moments[0])
        if number > 1 and targets[:1].numel() != number:
            raise DataError(
                f"a batch's targets are {list(targets.shape)}, and the first sample's are {number}"
            )
        if self._constants is None:  # once: it waits for a GPU
            self._constants = targets.new_tensor(self._moments)
        origins, units = self._constants
        return error.reshape(-1, number) * units, (targets.reshape(-1, number) - origins) * units

    def predict(self, outputs: Tensor) -> Tensor:
        """Return them in float32 or float64."""
        return at_least_single(outputs)

    def mean_outputs(self, several: Sequence[Tensor]) -> Tensor:
        """See Task: the mean is of numbers, not of their logarithms."""
        if self._targets is None:
            return super().mean_outputs(several)  # type: ignore[no-any-return]
        mean = super().mean_outputs([*map(self._targets.in_units, several)])
        return self._targets.from_units(mean).to(several[0].dtype)

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return both in the targets' shape; [B] where there is one, as torchmetrics takes them."""
        predicted, targets = aligned(outputs, batch.targets)
        if targets[:1].numel() == 1:
            return predicted.flatten(), targets.flatten()
        return predicted, targets

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the targets' mean RMSE, and R^2, nan where all values of a target are equal."""
        found = (means[name] for name in ("squared_error", "target", "squared_target"))
        each = [(one,) if isinstance(one, float) else one for one in found]
        r2 = [_r2(*moments) for moments in zip(*each, strict=True)]
        return {"rmse": fmean(map(math.sqrt, each[0])), "r2": fmean(r2)}


def _r2(error: float, mean: float, square: float) -> float:
    variance = square - mean**2
    return 1 - error / variance if variance > ROUNDING * square else math.nan


def aligned(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float32, or in float64 as the outputs, and of the targets' shape.

    Dimensions of 1 may lack, and a sample's values lie in a row in one of them. Raises DataError
    for other shapes, which would be broadcast, or compare values of different places.
    """
    shape, wanted = getattr(outputs, "shape", None), getattr(targets, "shape", None)
    if not (shape and wanted and _are_alike(shape, wanted)):
        raise DataError(
            f"the model gives {described(outputs)}, and a batch's targets are {described(targets)};"
            " let both be [samples, ...], and the model's last layer have as many outputs"
            " (num_classes, which it is given)"
        )
    outputs = at_least_single(outputs.reshape(wanted))
    return outputs, targets.to(outputs.dtype)


def _are_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    if (one[0], math.prod(one)) != (other[0], math.prod(other)):
        return False
    rows = [[size for size in shape[1:] if size != 1] for shape in (one, other)]
    return rows[0] == rows[1] or min(map(len, rows)) <= 1
