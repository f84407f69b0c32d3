"""A class for each pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.config.kinds import Better, TaskConfig
from expt.errors import ConfigError, described
from expt.features import Feature, Mask, at_least_single
from expt.late import functional, torch
from expt.tasks.task import Facts, Sum, Task, mean_of, mean_of_logits

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.loading import Batch


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(TaskConfig):
    """See conf/task/segmentation.yaml."""

    takes: ClassVar[type[Feature]] = Mask
    METRICS: ClassVar[Mapping[str, Better]] = {"mean_iou": "max", "accuracy": "max", "dice": "max"}
    OBJECTIVE: ClassVar[str] = "mean_iou"
    name: Annotated[Literal["segmentation"], Key(fork=False)]
    ignore_index: int
    num_classes: Annotated[int, Field(ge=2)] | None

    def build(self, facts: Facts) -> Task:
        """Return the task, for as many classes as the data has."""
        return Segmentation(facts.targets.shapes["num_classes"], self.ignore_index)


class Segmentation(Task):
    """Cross-entropy of logits [B, num_classes, H, W] and masks [B, H, W].

    Pixels of `ignore_index` count for nothing. `mean_iou` and `dice` are means over classes, of
    intersections and unions over the whole split. A class that is neither in a mask nor in a
    prediction is left out, as by scikit-learn's jaccard_score(average="macro").
    """

    metrics = Config.METRICS

    def __init__(self, num_classes: int, ignore_index: int = 255) -> None:
        self._num_classes, self._ignored = num_classes, ignore_index

    @property
    def sums(self) -> Mapping[str, int]:
        """Return those of intersections and unions, of each class."""
        return {"accuracy": 1, "intersections": self._num_classes, "unions": self._num_classes}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return it in float32 or float64, summed over pixels."""
        self._check(outputs, batch.targets)
        # Pixels as rows: of a picture's own loss torch has no deterministic kernel on a GPU.
        logits = at_least_single(outputs).movedim(1, -1).reshape(-1, self._num_classes)
        classes = batch.targets.reshape(-1).long()
        total = functional.cross_entropy(
            logits, classes, ignore_index=self._ignored, reduction="sum"
        )
        return total, (classes != self._ignored).sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Return pixels that are right, and those of each class."""
        masks, predicted = batch.targets.long(), outputs.argmax(1)
        counted = masks != self._ignored
        hits = self._pixels(masks, counted & (predicted == masks))
        unions = self._pixels(masks, counted) + self._pixels(predicted, counted) - hits
        right = hits.sum(), counted.sum()
        return {"accuracy": right, "intersections": (hits, 1), "unions": (unions, 1)}

    def _pixels(self, classes: Tensor, counted: Tensor) -> Tensor:
        """Return how many of the `counted` pixels are of each class, int64 [num_classes]."""
        flat = torch.where(counted, classes, self._num_classes).reshape(-1)
        if flat.device.type == "cpu":
            return torch.bincount(flat, minlength=self._num_classes + 1)[:-1]
        # bincount waits for a GPU
        counts = torch.zeros(self._num_classes + 1, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return means over the classes that occur; nan where none does."""
        each = zip(means["intersections"], means["unions"], strict=True)
        occurring = [(hits, union) for hits, union in each if union]
        return {
            "mean_iou": mean_of([hits / union for hits, union in occurring]),
            "dice": mean_of([2 * hits / (union + hits) for hits, union in occurring]),
        }

    def predict(self, outputs: Tensor) -> Tensor:
        """Return masks, int64 [B, H, W]: of each pixel the likeliest class."""
        return outputs.argmax(1)

    def mean_outputs(self, several: Sequence[Tensor]) -> Tensor:
        """See Task."""
        return mean_of_logits(several, 1)

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Any, Any]:
        """Return probabilities [B, num_classes, H, W] and masks."""
        return at_least_single(outputs).softmax(1), batch.targets.long()

    def _check(self, outputs: Any, masks: Any) -> None:
        batch, *size = masks.shape
        wanted = [batch, self._num_classes, *size]
        if len(size) != 2 or masks.is_floating_point():
            raise ConfigError(
                f"task=segmentation: a sample's target is {masks.dtype} {size}; let it be a mask of"
                " class numbers, int64 [height, width]"
            )
        if list(getattr(outputs, "shape", ())) != wanted:
            raise ConfigError(
                f"task=segmentation: the model gives {described(outputs)} where {wanted} is"
                " needed: samples, classes, height, width; use model=unet, or a custom model that"
                " keeps the images' size"
            )
