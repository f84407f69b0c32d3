"""A custom torch Dataset: a class that `_target_` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, DottedName, Key
from expt.data import kinds
from expt.features import Anything, Classes, Feature, Mask

if TYPE_CHECKING:
    import numpy as np

    from expt.data.source import Source


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Custom(kinds.DatasetConfig):
    """A class that is built for each part, with `train`, `val` or `test` added to `kwargs`.

    With `num_classes` its samples are (inputs, label), else whatever the task takes.
    """

    name: Literal["_target_"] = "_target_"
    target: DottedName
    num_classes: Annotated[int, Field(ge=2)] | None = None
    num_workers: kinds.Readers = "auto"
    val_fraction: kinds.HeldOut = 0.1
    val_split: kinds.ValSplit = "random"
    group: kinds.Group = None
    train_limit: kinds.TrainLimit = None
    mean: kinds.Mean = None
    std: kinds.Std = None
    train: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": True})
    val: Annotated[
        dict[str, Any] | None,
        Key(only_if={"dataset.val": IS_SET}, example="'+dataset.val={split: val}'"),
    ] = None
    test: dict[str, Any] | None = dataclasses.field(default_factory=lambda: {"train": False})
    kwargs: dict[str, Any]

    OFFERS = (Feature,)

    @property
    def label(self) -> str:
        return f"dataset._target_={self.target}"

    @property
    def given(self) -> dict[str, dict[str, Any]]:
        """The arguments of each part that there is."""
        parts = {"train": self.train, "val": self.val or None, "test": self.test}
        return {part: given for part, given in parts.items() if given is not None}

    def problems(self, task: Any) -> list[str]:
        number, takes = self.num_classes, task.takes
        if takes is Classes and number is None:
            needs = "task=classification needs it, e.g. dataset.num_classes=10"
            return [f"dataset.num_classes: {needs}"]
        if takes not in (Classes, Anything) and number is not None:
            also = f", or use task.num_classes={number}" if takes is Mask else ""
            fault = f"is of task=classification, not of task={task.name}"
            return [f"dataset.num_classes={number}: {fault}; leave it out of the dataset{also}"]
        if takes is Mask and task.num_classes is None:
            fix = "give it, e.g. task.num_classes=21"
            return [f"task.num_classes: a custom dataset has none; {fix}"]
        return []

    def may_validate(self) -> bool:
        return bool(self.val) or super().may_validate()

    def opening(self) -> Literal["at once", "slowly", "in turn"]:
        return "in turn"

    def evaluated_at_once(self, trained: int) -> int | None:
        return trained

    def title(self, chosen: str | None, typed: Mapping[str, Any]) -> str:
        words = (f"{key}={value}" for key, value in typed.items())
        return " ".join([chosen or self.target.rpartition(".")[2], *words])

    def note(self, used: Literal["to train", "to evaluate", "for pictures"]) -> str:
        notes = {
            "to train": "may have changed the run's samples; that is not done to these",
            "to evaluate": "gives samples that are normalised as in training; let images be in"
            " [0, 1]",
            "for pictures": "does not prepare pictures of a prediction: each is scaled to the size"
            " of training, counted in [0, 1] and normalised; --split has its samples",
        }
        return f"{self.target}: {notes[used]}"

    def check_pixels(self, path: str, images: np.ndarray) -> None:
        """Accept images as the class counts them."""

    def open(self, how: kinds.Opening) -> Source:
        from expt.data.custom import source

        return source(self, how.num_workers, how.task)
