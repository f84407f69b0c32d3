"""Random numbers of samples that are read: by the seed, the epoch and the sample alone."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from expt.data.indexing import mix
from expt.errors import ExptError

Read: TypeAlias = Callable[[Sequence[int]], list[Any]]
"""Returns the samples of these numbers. Its errors are for a person."""
_Made = TypeVar("_Made")
_States: TypeAlias = tuple[Any, Any, Tensor]


def _generators() -> _States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _are_equal(states: _States, others: _States) -> bool:
    return (
        torch.equal(states[2], others[2])
        and states[0] == others[0]
        and states[1][2:] == others[1][2:]
        and np.array_equal(states[1][1], others[1][1])
    )


def _put_back(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    before = _generators()
    try:
        yield
    finally:
        _put_back(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch, and put them back: this may be the training process itself."""
    with preserved_generators():
        seed_all(seed)
        yield


class Seeds(IterableDataset[int]):
    """A seed for each sample of a run without a dataset, by its place in the run, without end."""

    def __init__(self, seed: int) -> None:
        self._seed, self._place = seed, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self._place += 1
            yield mix(self._seed, 0, self._place - 1)

    def state_dict(self) -> dict[str, int]:
        """Return the place of the next."""
        return {"place": self._place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the place."""
        self._place = state["place"]


class Keys(NamedTuple):
    """The samples of one batch, and the seeds of their random numbers."""

    seed: int
    epoch: int
    samples: Sequence[int]
    times: list[int] | None = None
    """how often each came before in the epoch: a repeated sample is augmented differently"""

    def seeds(self) -> Iterator[int]:
        """Return a seed for each sample."""
        for index, often in zip(self.samples, self.times or itertools.repeat(0), strict=False):
            yield mix(self.seed, self.epoch, index, *([often] if often else []))


class Seeding:
    """Reads batches, whose random numbers depend on the seed, the epoch and the samples only.

    Seeding every sample takes longer than reading a cheap one. So the first batch is read with a
    seed for each sample, to see whether it draws. If none does, the next batches are read without
    seeds, as long as no generator moves: those that move one are read again, and from then on
    every sample gets its seed.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None

    def read(self, read: Read, keys: Keys, collate: Callable[[list[Any]], _Made]) -> _Made:
        """Return the samples of a batch, made one by `collate`."""
        is_own = get_worker_info() is not None  # a process has generators that nobody else uses
        if self._draws is False and not (is_own and len(keys.samples) == 1):  # quicker seeded
            before = _generators()
            try:
                found = collate(read(keys.samples))
            except ExptError:
                _put_back(before)
                raise
            if _are_equal(_generators(), before):
                return found
            _put_back(before)
            self._draws = True
        with contextlib.nullcontext() if is_own else preserved_generators():
            samples = list[Any]()
            for index, seed in zip(keys.samples, keys.seeds(), strict=True):
                samples += self._seeded(seed, read, [index])
            of_batch = mix(next(keys.seeds(), 0), len(samples))
            found = self._seeded(of_batch, collate, samples)
        self._draws = bool(self._draws)
        return found

    def _seeded(self, seed: int, make: Callable[[list[Any]], _Made], given: list[Any]) -> _Made:
        seed_all(seed)
        before = _generators() if self._draws is None else None
        found = make(given)
        if before is not None and not _are_equal(_generators(), before):
            self._draws = True
        return found
