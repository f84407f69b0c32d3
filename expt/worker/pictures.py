"""What draws pictures of a run's data, and of what an evaluation gets wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expt.config.schema import RunConfig
from expt.dashboards.pictures import RunPictures


def build_pictures(
    config: RunConfig, shapes: Mapping[str, Any], class_names: Sequence[str], *, are_images: bool
) -> RunPictures | None:
    """Of images that are classified; what another task makes of such images are no scores of
    classes.
    """
    if not are_images or config.task.TARGETS != "class":
        return None
    channels, dataset = shapes["channels"], config.dataset
    return RunPictures(
        class_names, mean=dataset.mean or [0.0] * channels, std=dataset.std or [1.0] * channels
    )
