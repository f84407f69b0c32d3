"""Index arithmetic: which worker takes which samples."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from expt.data import indexing
from tests.facade import Patch

WORLD_SIZES = (1, 2, 3, 4)
sizes = st.integers(1, 300)
batch_sizes = st.integers(1, 64)


@given(st.integers(0, 300), st.integers(1, 9))
def test_slices_are_contiguous_and_even(length: int, world_size: int) -> None:
    slices = [indexing.local_slice(length, rank, world_size) for rank in range(world_size)]
    assert [slices[0].start, slices[-1].stop] == [0, length]
    assert all(left.stop == right.start for left, right in pairwise(slices))
    counts = [part.stop - part.start for part in slices]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(sizes, batch_sizes, st.booleans(), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_workers_together_take_each_global_batch_in_order(
    size: int, batch_size: int, drop_last: bool, seed: int, epoch: int
) -> None:
    order = indexing.permutation(size, seed, epoch)
    batches = indexing.num_batches(size, batch_size, drop_last)
    for world_size in WORLD_SIZES:
        ranks = [
            list(indexing.train_pieces(size, batch_size, drop_last, rank, world_size))
            for rank in range(world_size)
        ]
        assert {len(pieces) for pieces in ranks} == {batches}
        for batch, pieces in enumerate(zip(*ranks, strict=True)):
            expected = order[batch * batch_size : (batch + 1) * batch_size]
            taken = [order[piece.start : piece.stop] for piece in pieces if not piece.weightless]
            assert torch.equal(torch.cat(taken), expected)
            assert {piece.global_size for piece in pieces} == {len(expected)}
            assert all(piece.stop - piece.start == 1 for piece in pieces if piece.weightless)


@example(2, 0.99, None)
@given(st.integers(2, 300), st.floats(0, 0.99), st.none() | st.integers(1, 300))
def test_a_split_is_disjoint_and_ordered(size: int, fraction: float, limit: int | None) -> None:
    train, val = indexing.split(size, fraction, limit)
    everyone, _ = indexing.split(size, fraction, None)
    assert torch.equal(torch.cat([everyone, val]).sort().values, torch.arange(size))
    assert torch.equal(train, everyone[:limit])
    assert torch.equal(train, train.sort().values)
    assert len(everyone) >= 1
    assert (len(val) > 0) == (fraction > 0)


@example(100, 3, [1, 50, 49])
@given(
    st.integers(1, 200), st.integers(0, 1000), st.lists(st.integers(1, 60), min_size=1, max_size=6)
)
def test_a_limit_takes_of_each_class_its_share(limit: int, shift: int, sizes: list[int]) -> None:
    """Whatever the classes' order; a larger limit adds to a smaller."""
    classes = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).roll(shift)
    train, val = indexing.split(len(classes), 0.0, limit, classes)
    assert len(val) == 0
    assert torch.equal(train, train.unique())
    assert len(train) == min(limit, len(classes))
    found = classes[train].bincount(minlength=len(sizes)).tolist()
    shares = [size * len(train) / len(classes) for size in sizes]
    assert all(
        abs(count - share) <= 0.5 + len(sizes) / 2
        for count, share in zip(found, shares, strict=True)
    )
    more, _ = indexing.split(len(classes), 0.0, limit + 7, classes)
    assert set(train.tolist()) <= set(more.tolist())


def test_the_split_is_the_same_for_every_run() -> None:
    before = torch.get_rng_state()
    _, val = indexing.split(1437, 0.1, None)
    assert len(val) == 144
    assert val[:5].tolist() == [8, 23, 25, 51, 52]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_permutation_depends_on_seed_and_epoch_alone() -> None:
    first = indexing.permutation(1000, 1, 2)
    torch.manual_seed(5)
    assert torch.equal(indexing.permutation(1000, 1, 2), first)
    assert torch.equal(first.sort().values, torch.arange(1000))
    others = [(seed, epoch) for seed in (0, 1, 2, 2**32 - 1) for epoch in range(50)]
    assert len({tuple(indexing.permutation(1000, *other).tolist()) for other in others}) == len(
        others
    )


def _memory_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def _refuse(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_many_numbers_are_not_in_this_process_s_memory_unless_the_disk_is_full(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "new"))
    size = 5 * indexing.MANY  # 40 MiB, more than glibc keeps when it is freed
    plain = torch.randperm(size, generator=torch.Generator().manual_seed(indexing.mix(1, 2)))
    parts = []
    for is_full in (False, True):
        before = _memory_mib()
        parts.append(indexing.split(size, 10 / size, None))
        order = indexing.permutation(size, 1, 2)
        assert (_memory_mib() - before > 60) == is_full
        assert torch.equal(order, plain)
        monkeypatch.setattr(os, "posix_fallocate", _refuse)
    assert all(map(torch.equal, *parts))
    assert torch.equal(torch.cat(parts[0]).sort().values, torch.arange(size))
    assert not any(tmp_path.glob("new/*"))
