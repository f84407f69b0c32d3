"""Which curves are drawn into which chart, by the tags that runs log."""

from __future__ import annotations

import re

import pytest

from expt.runs import tags

LOGGED = [
    tags.RUNNING_LOSS,
    tags.running("accuracy"),
    tags.RUNNING_SAMPLES_PER_S,
    *(
        tags.metric(name, split)
        for name in ("loss", "accuracy")
        for split in ("train", "val", "test")
    ),
    tags.best("accuracy/val"),
    tags.LR,
    tags.SAMPLES_PER_S,
    tags.EPOCH_S,
    tags.DATA_WAIT_S,
    "memory/worker_mib",
    "ranks/step_ms_min",
    "ranks/step_ms_max",
    "ranks/all_reduce_share",
    "ranks/unequal_weights",
    f"{tags.GRADIENT_NORM}/0",
]


def charts(eval_split: str, world_size: int, *, is_sharded: bool = False) -> dict[str, list[str]]:
    """What TensorBoard finds for each chart: the tags that a pattern matches from their
    beginning.
    """
    return {
        title: [tag for tag in LOGGED if any(re.match(pattern, tag) for pattern in patterns)]
        for category in tags.layout(eval_split, world_size, is_sharded=is_sharded).values()
        for title, patterns in category.items()
    }


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_chart_has_one_quantity(split: str, is_sharded: bool) -> None:
    """TensorBoard draws two curves of a run in one colour."""
    alone, together = charts(split, 1), charts(split, 2, is_sharded=is_sharded)
    assert alone.items() <= together.items()
    for name in ("loss", "accuracy"):
        for part in ("train", split):
            assert alone[f"{name}/{part}"] == [f"{name}/{part}"]
    for title, found in together.items():
        assert len({re.sub(r"running[_/]|/train", "", tag) for tag in found}) == 1, title
    assert ("share of all-reduce" in together) == (not is_sharded)
