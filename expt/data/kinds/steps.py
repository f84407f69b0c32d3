"""Steps without a dataset: a sample is a seed, and the task or the model does the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.data import kinds
from expt.features import Anything, Features

if TYPE_CHECKING:
    from expt.data.source import Source

Number = Annotated[int, Field(ge=0), Key(evaluate=True, varies="split")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Steps(kinds.DatasetConfig):
    """Seeds without end to train on, and some that validate and test."""

    name: Literal["steps"]
    val: Number = 0
    test: Number = 0
    val_fraction: kinds.HeldOut = 0.0
    train_limit: kinds.TrainLimit = None
    mean: kinds.Mean = None
    std: kinds.Std = None

    OFFERS = ()

    def parts(self) -> Collection[str]:
        sizes = {"train": 1, "val": self.val, "test": self.test}
        return [part for part, size in sizes.items() if size]

    def may_validate(self) -> bool:
        return self.val > 0

    def open(self, how: kinds.Opening) -> Source:
        import torch

        from expt.data.indexing import mix
        from expt.data.loader import loading
        from expt.data.seeding import Seeds
        from expt.data.source import NOTHING, Part, Source

        def part(number: int, size: int) -> Part | None:
            seeds: Any = [mix(0, number, place) for place in range(size)]
            return Part(size, loading(seeds)) if size else None

        one = torch.zeros((), dtype=torch.int64)
        endless = Part(None, lambda chosen, given: loading(Seeds(given.seed))(chosen, given))
        return Source(
            features=Features(Anything.like(one, are_inputs=True), Anything()),
            example=(one, None),
            train=endless if how.trained_on is None else NOTHING,
            val=part(1, self.val),
            test=part(2, self.test),
            is_stream=how.trained_on is None,
        )
