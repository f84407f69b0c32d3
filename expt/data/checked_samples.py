"""Samples that are looked at as they are read: a GPU says nothing of a wrong target."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

from torch.utils.data import Dataset

from expt.errors import DataError

Check = Callable[[Any], Any]
"""Gives a sample as it is to be used. Raises DataError that says what is wrong with it."""


class CheckedSamples(Dataset[Any]):
    """A Dataset whose samples are checked. Raises DataError, when it is read, for one that is wrong, by its index."""

    def __init__(self, dataset: Dataset[Any], check: Check) -> None:
        self._dataset, self._check = dataset, check

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> Any:
        return checked(self._check, index, self._dataset[index])


def checked(check: Check, index: int, sample: Any) -> Any:
    """What `check` makes of the sample. Raises DataError that names its index."""
    try:
        return check(sample)
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from None
