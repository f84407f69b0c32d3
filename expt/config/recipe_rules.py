"""What cannot run of whitening, lookahead and test-time augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expt.config.datasets import Text, has_rows
from expt.config.tasks import Classification, Multilabel, Regression

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


def of_recipes(config: RunConfig) -> list[str]:
    """Combinations that cannot run, one line each, with the mend."""
    problems = []
    no_images = has_rows(config.dataset) or isinstance(config.dataset, Text)
    if config.whitening:
        where = f"whitening.layer={config.whitening.layer}"
        if no_images:
            problems.append(
                f"{where}: is of images, and dataset={config.dataset.name} has none; leave"
                " whitening out"
            )
        if config.is_sharded:
            problems.append(f"{where}: needs the layer whole; use strategy=ddp")
    if config.lookahead and config.is_sharded:
        problems.append(
            f"lookahead.every_steps={config.lookahead.every_steps}: needs the model whole; use"
            " strategy=ddp, or ema"
        )
    if kind := config.test_time_augmentation:
        where = f"test_time_augmentation={kind}"
        if not isinstance(config.task, Classification | Multilabel | Regression):
            problems.append(
                f"{where}: averages what task=classification, multilabel and regression give for an"
                f" image as a whole, and this is task={config.task.name}; use null"
            )
        elif no_images:
            problems.append(
                f"{where}: is of images, and dataset={config.dataset.name} has none; use null"
            )
    return problems
