"""The tags of measurements, and the charts that TensorBoard makes of them. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SPLITS = ("train", "val", "test")
LR = "lr"
"""Before `/groups.N`: that of an optimizer or schedule in `optimizer.groups`."""
RUNNING_LOSS = "running/loss"
"""The loss in training since the last log point; a whole epoch's is `metric("loss", "train")`."""
RUNNING_SAMPLES_PER_S = "speed/running_samples_per_s"
"""The speed since the last log point."""
SAMPLES_PER_S = "speed/samples_per_s"
"""The speed of a whole epoch's training."""
EPOCH_S = "speed/epoch_s"
DATA_WAIT_S = "speed/data_wait_s"
"""Seconds of the epoch that rank 0 waited for its next batch."""
SKIPPED_STEPS = "skipped_steps"
"""Steps left out so far, because a loss or gradient was not finite (`on_nan=skip`)."""

GRADIENT_NORM, WEIGHT_NORM = "norm_gradients", "norm_weights"
"""The first part of a norm's tag; the layer's name follows.

Late in the alphabet: HPARAMS shows the first five tags until others are chosen.
"""
TRAIN_IMAGES = "images/train"

BEST, RUNNING = "best/", "running/"
"""Before the objective: its best value so far; before the loss or a metric: since the last log."""
CONFUSION, MISTAKES = "confusion/", "mistakes/"
"""Before a split: the picture of its confusion matrix, and of its worst mistakes."""

OF_EXPT = {LR, SKIPPED_STEPS, GRADIENT_NORM, WEIGHT_NORM, "running", "speed", "images", "model"}
OF_EXPT |= {"best", "confusion", "mistakes", "memory", "ranks", "weights", "gradients"}
"""First parts of all tags but those of metrics, which begin with the metric's name."""

WORKER_MIB, GPU_MIB = "memory/worker_mib", "memory/gpu_mib"
COMPARABLE = (SAMPLES_PER_S, EPOCH_S, DATA_WAIT_S, SKIPPED_STEPS, WORKER_MIB, GPU_MIB)
"""Numbers of a run, other than its metrics, by which runs may be chosen."""
HIGHER_IS_BETTER = (SAMPLES_PER_S, RUNNING_SAMPLES_PER_S)
"""All other tags but those of metrics are the better the lower they are."""


def is_higher_better(tag: str, metrics: Mapping[str, str]) -> bool:
    """Return whether the highest `tag` is best; `metrics` are the task's, each `min` or `max`."""
    # Not the first part: best/accuracy/val.
    ways = [metrics[part] for part in tag.split("/") if part in metrics]
    return tag in HIGHER_IS_BETTER or ways[:1] == ["max"]


def metric(name: str, split: str) -> str:
    """Return the tag of the loss or a metric on `split`: train, val or test."""
    return f"{name}/{split}"


def layout(
    eval_split: str | None,
    world_size: int,
    metrics: Iterable[str] = ("loss", "accuracy"),
    *,
    is_sharded: bool = False,
) -> dict[str, dict[str, list[str]]]:
    """Return the CUSTOM SCALARS tab: categories of charts, and the pattern of each one's tags.

    A chart has one quantity only: TensorBoard draws all curves of a run in one colour.
    """
    waits = "with" if is_sharded else "without"
    of_ranks = {
        f"step time of the slowest rank, {waits} waiting for others [ms]": ["^ranks/step_ms_max$"],
        f"step time of the fastest rank, {waits} waiting for others [ms]": ["^ranks/step_ms_min$"],
        **({} if is_sharded else {"share of all-reduce": ["^ranks/all_reduce_share$"]}),
    }
    measured = [metric(name, split) for name in metrics for split in ("train", eval_split) if split]
    return {
        "Is it learning?": {
            **{tag: [f"^{tag}$"] for tag in measured},
            # With loss/train, so that it isn't empty in a short run.
            "loss since the last log point": [f"^{RUNNING_LOSS}$|^loss/train$"],
            "learning rate": ["^lr$"],
        },
        "Is the hardware busy?": {
            "images per second": [f"^{SAMPLES_PER_S}$|^{RUNNING_SAMPLES_PER_S}$"],
            "seconds per epoch": [f"^{EPOCH_S}$"],
            "seconds of an epoch that waited for data": [f"^{DATA_WAIT_S}$"],
            "memory of a worker [MiB]": [f"^{WORKER_MIB}$"],
            **(of_ranks if world_size > 1 else {}),
        },
    }
