"""What a run's numbers hang on: not on how many workers there are, where batch norm is told so."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.facade import as_typed
from tests.worker.conftest import TrainTogether
from tests.worker.conftest import train_together as train_together  # the fixture

WORDS = as_typed(
    "model=convnet model.widths=[8,8] model.kernels=[3,3] model.strides=[1,2] "
    "model.paddings=[same,same] model.hidden=null model.dropout=0 dataset.train_limit=320 "
    "epochs=1 log_every=1 threads=1"
)

Numbers = dict[str, list[tuple[int, float]]]


@pytest.fixture
def numbers(train_together: TrainTogether) -> Callable[..., Numbers]:
    @functools.cache
    def of(size: int, *words: str) -> Numbers:
        done = train_together(
            size, *WORDS, *words, name="-".join(words).replace("=", "") + str(size)
        )
        return {tag: done.curve(tag) for tag in ("running/loss", "loss/val", "loss/test")}

    return of


def assert_same(one: Numbers, other: Numbers) -> None:
    for tag, curve in one.items():
        assert len(curve) == {"running/loss": 5, "loss/val": 1, "loss/test": 1}[tag]
        assert [step for step, _ in other[tag]] == [step for step, _ in curve]
        assert [value for _, value in other[tag]] == pytest.approx(
            [value for _, value in curve], abs=2e-4
        ), tag


def test_over_all_workers_any_number_of_them_is_one(numbers: Callable[..., Numbers]) -> None:
    alone = numbers(1, "batch_norm=sync")
    assert_same(alone, numbers(4, "batch_norm=sync"))
    assert_same(alone, numbers(2, "batch_norm=sync", "ddp.shared_memory=false"))
    with pytest.raises(AssertionError):  # else this tests nothing
        assert_same(alone, numbers(2, "batch_norm=per_worker"))


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (4, "batch_norm=groups batch_norm_group=16"),
        (2, "batch_norm=groups batch_norm_group=8 gradient_accumulation=2"),
        (2, "batch_norm=sync gradient_accumulation=2"),
    ],
)
def test_grouped_and_accumulated(numbers: Callable[..., Numbers], workers: int, words: str) -> None:
    assert_same(numbers(1, *as_typed(words)), numbers(workers, *as_typed(words)))
