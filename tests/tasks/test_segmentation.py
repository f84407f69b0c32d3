"""Segmentation: what counts for nothing, what is refused, and which images a U-Net takes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.errors import ConfigError, Diverged
from expt.models.vision import UNet
from expt.tasks.segmentation import Segmentation
from expt.tasks.sums import Sums

CPU = torch.device("cpu")
IGNORED = 255


def counted(task: Segmentation, found: list[tuple[Tensor, Batch]]) -> dict[str, float]:
    sums = Sums(task, CPU)
    for logits, batch in found:
        sums.add(task.loss(logits, batch), logits, batch)
    return dict(sums.averages(sums.values).values)


def test_samples_of_which_nothing_counts_are_no_divergence() -> None:
    task = Segmentation(2, IGNORED)
    logits, masks = torch.randn(1, 2, 3, 3), torch.full((1, 3, 3), IGNORED)
    values = counted(task, [(logits, Batch(logits, masks, 1))])
    assert values["loss"] != values["loss"], "not 0, which would be the best"
    assert values["mean_iou"] != values["mean_iou"]
    with pytest.raises(Diverged):
        counted(task, [])


@pytest.mark.parametrize(
    ("outputs", "masks", "told"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, 4).long(), r"gives float32 \[2, 3\] where \[2, 3, 4"),
        (torch.zeros(2, 3, 2, 2), torch.zeros(2, 4, 4).long(), r"gives float32 \[2, 3, 2, 2\]"),
        ({"out": torch.zeros(2, 3, 4, 4)}, torch.zeros(2, 4, 4).long(), "gives a dict where"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), "target is torch.float32"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "let it be a mask of class numbers"),
    ],
)
def test_outputs_and_targets_of_another_shape_are_refused(
    outputs: Any, masks: Tensor, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Segmentation(3).loss(outputs, Batch(None, masks, 2))


@pytest.mark.parametrize("size", [(28, 28), (13, 9), (4, 7)])
def test_a_unet_takes_any_size(size: tuple[int, int]) -> None:
    model = UNet(channels=2, image_size=size, num_classes=5, widths=(4, 6, 8))
    logits = model(torch.randn(2, 2, *size))
    assert logits.shape == (2, 5, *size)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_unet_of_more_levels_than_an_image_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 levels need images of 4x4 or more, and these are 8x3"):
        UNet(channels=2, image_size=(8, 3), num_classes=5)
