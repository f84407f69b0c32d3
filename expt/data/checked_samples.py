"""Samples that are looked at as they are read: a GPU says nothing of a wrong target."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from expt.config import secrets
from expt.config.user_code import own_frame
from expt.errors import MISTAKES, DataError, ExptError, RunFailed

Check = Callable[[Any], Any]
"""Gives a sample as it is to be used. Raises DataError that says what is wrong with it."""


class CheckedSamples(Dataset[Any]):
    """A Dataset whose samples are checked. Raises, when it is read, by its index: DataError for one
    that is wrong, and
    what `in_words` makes of what the dataset raises.
    """

    def __init__(self, dataset: Dataset[Any], check: Check) -> None:
        self._dataset, self._check = dataset, check

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> Any:
        return checked(self._check, index, read(self._dataset, index))


def checked(check: Check, index: int, sample: Any) -> Any:
    """What `check` makes of the sample. Raises DataError that names its index."""
    try:
        return check(sample)
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from None


def read(dataset: Dataset[Any], index: int) -> Any:
    """The sample. Raises what `in_words` makes of an error."""
    try:
        return dataset[index]
    except Exception as error:
        raise in_words(error, f"sample {index}: {type(dataset).__name__}.__getitem__") from error


def in_words(error: Exception, whose: str) -> Exception:
    """What a person's dataset raised, in one line, with its place there.

    DataError for a mistake, which another try would raise again; RunFailed for what the disk or the
    network may have a part in. What is told already, and what the memory did not suffice for, stays
    as it is."""
    if isinstance(error, ExptError | MemoryError | torch.OutOfMemoryError):
        return error
    frame, told = own_frame(error), secrets.said(error)
    where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
    kind = DataError if type(error).__name__ in MISTAKES else RunFailed
    return kind(f"{whose} raised {told}{where}")
