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
def test_each_chart_has_its_curves(split: str) -> None:
    alone = {
        "loss": ["loss/train", f"loss/{split}"],
        "accuracy": ["accuracy/train", f"accuracy/{split}"],
        "loss since the last log point": ["running/loss", "loss/train"],
        "learning rate": ["lr"],
        "images per second": ["speed/running_samples_per_s", "speed/samples_per_s"],
        "seconds per epoch, and waiting for data": ["speed/epoch_s", "speed/data_wait_s"],
        "memory [MiB]": ["memory/worker_mib"],
    }
    assert charts(split, 1) == alone
    assert charts(split, 2) == {
        **alone,
        "step time of the ranks, without waiting for one another [ms]": ["ranks/step_ms_max"],
        "share of all-reduce": ["ranks/all_reduce_share"],
    }
    waiting = {"step time of the ranks, with waiting for one another [ms]": ["ranks/step_ms_max"]}
    assert charts(split, 2, is_sharded=True) == {**alone, **waiting}
