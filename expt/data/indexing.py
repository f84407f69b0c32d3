"""Index arithmetic: which samples a worker takes, and in which order.

It depends on no device and no process.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expt.data.cache import cache_dir

MANY = 2**20  # samples
_SPLIT_SEED = 20_240_229  # of the validation split: one for all runs, so that their scores compare
_BALANCE_SEED = 20_261_122  # sets the numbers of a balanced order apart from those of a permutation
_LENGTH_SEED = 20_261_130  # sets the numbers of an order by lengths apart from these
_TRIED = 200_000
"""Groups that are gone through, in other orders, to come near to the shares of classes."""
_ORDERS = 20


class Piece(NamedTuple):
    """One worker's part of a batch: positions `start` to `stop` of the order."""

    start: int
    stop: int
    global_size: int
    """samples of the whole batch, over all workers"""
    weightless: bool
    """no sample was left for this worker: the piece is the batch's first sample, and must count for
    nothing
    """


def mix(*numbers: int) -> int:
    """Return a seed below 2**32 from several integers.

    It differs whenever exactly one of them does, by less than 2**32.
    """
    # torch's CPU generator uses the low 32 bits of its seed only, so they must hold everything.
    return zlib.crc32(
        struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers))
    )


def numbers(size: int) -> Tensor:
    """Return room for int64 [size]; of MANY in a mapped file, which the system can put aside."""
    if size >= MANY:
        with contextlib.suppress(OSError):
            cache_dir().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_dir()) as file:
                os.posix_fallocate(file.fileno(), 0, 8 * size)  # else a full disk kills the process
                place = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(place, shared=True, size=size, dtype=torch.int64)
    return torch.empty(size, dtype=torch.int64)


def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch, int64 [size]; the same for every rank and world size."""
    return _shuffled(size, mix(seed, epoch))


def _shuffled(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), out=numbers(size))


def balanced(classes: Tensor, seed: int, epoch: int) -> Tensor:
    """Return an order of as many samples as `classes` [size], int64, the same for every rank.

    Every class comes equally often, and so does every sample of a class, up to a difference of one
    that is drawn in each epoch.
    """
    drawn = torch.Generator().manual_seed(mix(_BALANCE_SEED, seed, epoch))
    members = [torch.nonzero(classes == each).flatten() for each in torch.unique(classes)]
    base, extra = divmod(len(classes), len(members))
    more = torch.randperm(len(members), generator=drawn) < extra
    chosen = []
    for indices, one_more in zip(members, more.tolist(), strict=True):
        rounds, rest = divmod(base + one_more, len(indices))
        some = indices[torch.randperm(len(indices), generator=drawn)[:rest]]
        chosen += [indices.repeat(rounds), some]
    return torch.cat(chosen)[torch.randperm(len(classes), generator=drawn)]


def by_length(order: Tensor, lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Return an order in which the samples of a batch have similar `lengths` [size].

    As by Hugging Face's LengthGroupedSampler, samples are sorted among those of up to 50 batches.
    The batches come in a drawn order, and their samples, too; a smaller one stays the last.
    """
    number = len(order) // batch_size
    drawn = torch.Generator().manual_seed(mix(_LENGTH_SEED, seed, epoch))
    whole, rest = order[: number * batch_size], order[number * batch_size :]
    some = whole.split(max(1, min(number // 4, 50)) * batch_size)
    found = [each[lengths[each].argsort(descending=True, stable=True)] for each in some]
    batches = torch.cat(found).view(number, batch_size)[torch.randperm(number, generator=drawn)]
    # Else each worker's share would be longer than the next one's.
    batches = batches[:, torch.randperm(batch_size, generator=drawn)]
    return torch.cat([batches.flatten(), rest])


def padding(order: Tensor, lengths: Tensor, batch_size: int) -> float:
    """Return the share of padding among the tokens of an order's batches."""
    found = lengths[order]
    total = sum(int(each.max()) * len(each) for each in found.split(batch_size))
    return 1 - int(found.sum()) / max(1, total)


def times_before(order: Tensor) -> Tensor:
    """Return how often each of an order's samples has come before in it, int64 [size]."""
    by_sample, places = order.argsort(stable=True), torch.arange(len(order))
    is_first = order[by_sample].diff(prepend=torch.tensor([-1])) != 0
    found = torch.empty_like(order)
    found[by_sample] = places - torch.where(is_first, places, 0).cummax(0).values
    return found


def split(
    size: int,
    val_fraction: float,
    limit: int | None,
    classes: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return indices for training and for validation, each int64 and ascending.

    Validation takes its fraction of all `size` samples (at least one if it is above 0, and never
    all of them); training `limit` of the others, the first. Where the samples' `classes` [size] are
    given, both are drawn, with a share of each class. The run's seed has no part in them. Samples
    of one of the `groups` [size] are held out together.
    """
    num_val = _num_val(size, val_fraction)
    val, trains = torch.empty(0, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
    if num_val and groups is not None:
        trains = ~_held_out(groups, classes, num_val, _SPLIT_SEED)
        val = torch.nonzero(~trains).flatten()
    elif num_val:
        drawn = _shuffled(size, _SPLIT_SEED)
        val = drawn[:num_val] if classes is None else drawn[_shares(classes[drawn], num_val)]
        val = val.sort().values
        trains[val] = False
    train = torch.nonzero(trains, out=numbers(size - len(val))[:, None]).flatten()
    return _limited(train, limit, classes), val


def split_last(size: int, val_fraction: float, limit: int | None) -> tuple[Tensor, Tensor]:
    """Return indices as `split` does: validation takes the last, training the last before these."""
    num_train = size - _num_val(size, val_fraction)
    first = 0 if limit is None else max(0, num_train - limit)
    return torch.arange(first, num_train), torch.arange(num_train, size)


def _num_val(size: int, fraction: float) -> int:
    return min(max(1, round(size * fraction)), size - 1) if fraction > 0 else 0


def split_fold(
    strata: Tensor,
    folds: int,
    fold: int,
    limit: int | None,
    classes: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return indices as `split` does, where `fold` of `folds` validates, equal for all runs.

    Each sample is in one fold. Without `groups` the folds' sizes differ by one sample at most, and
    so do their samples of each class in `strata` [size].
    """
    if groups is not None:
        validates = _folds(groups, strata, folds, _SPLIT_SEED) == fold
        train, val = (torch.nonzero(each).flatten() for each in (~validates, validates))
        return _limited(train, limit, classes), val
    drawn = _shuffled(len(strata), _SPLIT_SEED)
    by_class = drawn[torch.unique(strata[drawn], return_inverse=True)[1].argsort(stable=True)]
    val = by_class[fold::folds].sort().values
    train = by_class[torch.arange(len(strata)) % folds != fold].sort().values
    return _limited(train, limit, classes), val


def _limited(train: Tensor, limit: int | None, classes: Tensor | None) -> Tensor:
    if limit is None or classes is None:
        return train[:limit]
    drawn = _shuffled(len(train), _SPLIT_SEED)
    return train[drawn[_shares(classes[train[drawn]], limit)]].sort().values


def _shares(classes: Tensor, number: int) -> Tensor:
    """Return the places of a `number` of samples, a share of each class; more add to these."""
    found = torch.unique(classes, return_inverse=True, return_counts=True)[1:]
    members, counts = (each.numpy() for each in found)
    kind = np.uint16 if len(counts) < 1 << 16 else np.int64  # the first is sorted in a tenth
    by_class, ends = members.astype(kind).argsort(kind="stable"), counts.cumsum()
    place = np.empty(len(classes))  # of each sample in its class
    place[by_class] = np.arange(len(classes)) - (ends - counts)[members[by_class]]
    # The n-th of a class that has m comes when (n + 1/2) / m of all have: Sainte-Lague's way of
    # giving out seats.
    turns = (place + 0.5) / counts[members]
    if number >= len(turns):
        return torch.arange(len(turns))
    last = np.partition(turns, number - 1)[number - 1]
    first = np.flatnonzero(turns < last)
    ties = np.flatnonzero(turns == last)[: number - len(first)]
    return torch.from_numpy(np.concatenate([first, ties]))


class _Groups:
    """The samples of each class in each group, and the shares that they come near to."""

    def __init__(self, groups: Tensor, classes: Tensor | None, seed: int) -> None:
        named, self.members = torch.unique(groups, return_inverse=True)
        strata = torch.zeros_like(self.members)
        if classes is not None:
            strata = torch.unique(classes, return_inverse=True)[1]
        self.number, width = len(named), int(strata.max()) + 1
        pairs, counts = torch.unique(self.members * width + strata, return_counts=True)
        self.counts: list[list[tuple[int, int]]] = [[] for _ in range(self.number)]
        """The classes in each group, and the number of samples of each."""
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.counts[pair // width].append((pair % width, count))
        self.of_classes: list[float] = strata.bincount().double().tolist()
        self._generator = torch.Generator().manual_seed(seed)

    def drawn(self) -> list[int]:
        """Return the groups in a drawn order."""
        found: list[int] = torch.randperm(self.number, generator=self._generator).tolist()
        return found

    def gain(self, group: int, lacking: list[float]) -> float:
        """Return how much less a part is `lacking` of each class with a group."""
        pairs = self.counts[group]
        return sum(n * (2 * lacking[each] - n) / self.of_classes[each] for each, n in pairs)

    def add(self, group: int, lacking: list[float]) -> None:
        """Take a group into a part."""
        for each, count in self.counts[group]:
            lacking[each] -= count


def _held_out(groups: Tensor, classes: Tensor | None, number: int, seed: int) -> Tensor:
    """Return whether each sample is held out, bool [N]: about `number`, in whole groups, not all.

    There are two groups or more, and one at least is held out. Of groups in a drawn order each is
    taken that brings the numbers of each class nearer to its share; of several orders the best.
    """
    known = _Groups(groups, classes, seed)
    wanted = [number / len(groups) * count for count in known.of_classes]
    best, least = list[int](), float("inf")
    for _ in range(max(1, min(_ORDERS, _TRIED // known.number))):
        lacking, taken, order = [*wanted], list[int](), known.drawn()
        for group in order:
            if len(taken) < known.number - 1 and known.gain(group, lacking) > 0:
                known.add(group, lacking)
                taken.append(group)
        if not taken:
            taken = [max(order, key=lambda group: known.gain(group, wanted))]
            known.add(taken[0], lacking)
        away = sum(x * x / n for x, n in zip(lacking, known.of_classes, strict=True))
        if away < least - 1e-9:
            best, least = taken, away
    found = torch.zeros(known.number, dtype=torch.bool)
    found[best] = True
    return found[known.members]


def _folds(groups: Tensor, classes: Tensor, number: int, seed: int) -> Tensor:
    """Return the fold of each sample, int64 [N], of a `number` that is not above the groups'.

    The largest groups come first, each to the fold that lacks most of its classes.
    """
    known = _Groups(groups, classes, seed)
    lacking = [[count / number for count in known.of_classes] for _ in range(number)]
    found = torch.empty(known.number, dtype=torch.int64)
    sizes = [sum(count for _, count in each) for each in known.counts]
    for group in sorted(known.drawn(), key=lambda group: -sizes[group]):
        ways = [(known.gain(group, each), sum(each)) for each in lacking]
        found[group] = fold = ways.index(max(ways))
        known.add(group, lacking[fold])
    return found[known.members]


def num_batches(size: int, batch_size: int, drop_last: bool) -> int:
    """Global batches per epoch."""
    return size // batch_size if drop_last else -(-size // batch_size)


def local_slice(batch_len: int, rank: int, world_size: int) -> slice:
    """Return the rank's contiguous share of a batch; they differ by one, the larger first."""
    base, extra = divmod(batch_len, world_size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def train_pieces(
    size: int, batch_size: int, drop_last: bool, rank: int, world_size: int, skip: int = 0
) -> Iterator[Piece]:
    """Yield the rank's piece of each global batch of an epoch, after the first `skip` batches."""
    for batch in range(skip, num_batches(size, batch_size, drop_last)):
        first = batch * batch_size
        length = min(batch_size, size - first)
        mine = local_slice(length, rank, world_size)
        if mine.start < mine.stop:
            yield Piece(first + mine.start, first + mine.stop, length, False)
        else:
            yield Piece(first, first + 1, length, True)


def with_partners(
    pieces: Sequence[Piece], batch_size: int, skip: int
) -> tuple[Tensor, list[Piece]]:
    """Return positions int64 [N] that hold for each piece its first sample's partner, then its own.

    And where each piece is there. The pieces are a worker's, from batch number `skip` on.
    """
    positions = list[int]()
    wider = list[Piece]()
    for number, piece in enumerate(pieces, skip):
        first = number * batch_size
        before = piece.start - 1 if piece.start > first else first + piece.global_size - 1
        start = len(positions)
        positions += [before, *range(piece.start, piece.stop)]
        wider.append(piece._replace(start=start, stop=len(positions)))
    return torch.tensor(positions, dtype=torch.int64), wider


def eval_pieces(size: int, chunk: int, rank: int, world_size: int) -> Iterator[Piece]:
    """Yield the rank's share of an evaluation, in chunks; none where there are too few samples.

    Shares are unequal, so that each sample counts once.
    """
    mine = local_slice(size, rank, world_size)
    for start in range(mine.start, mine.stop, chunk):
        stop = min(start + chunk, mine.stop)
        yield Piece(start, stop, stop - start, False)
