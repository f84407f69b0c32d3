"""Segmentation: what is counted, equal to torchmetrics over the whole set, and curves equal to a
plain loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from expt.data.loading import Batch
from expt.errors import ConfigError, Diverged
from expt.models.vision import UNet
from expt.tasks.segmentation import Segmentation
from expt.tasks.sums import Sums
from tests.conftest import Trained
from tests.facade import as_typed
from tests.late import Late

classification: Any = Late("torchmetrics.classification")
segmentation: Any = Late("torchmetrics.functional.segmentation")

CPU = torch.device("cpu")
IGNORED, SIZE = 255, 8
COLOURS = torch.tensor(
    [[30, 30, 30], [220, 40, 40], [40, 220, 40], [40, 40, 220]], dtype=torch.uint8
)


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


def write_pictures(root: Path, counts: dict[str, int]) -> None:
    """Images of noise whose colour tells the class; the share of ignored pixels grows from image to
    image."""
    generator = torch.Generator().manual_seed(0)
    for part, count in counts.items():
        for kind in ("images", "masks"):
            (root / part / kind).mkdir(parents=True)
        for index in range(count):
            mask = torch.randint(len(COLOURS), (SIZE, SIZE), generator=generator)
            noise = torch.randint(-25, 25, (SIZE, SIZE, 3), generator=generator)
            image = (COLOURS[mask] + noise).clamp(0, 255).byte()
            mask[torch.rand(mask.shape, generator=generator) < index / count] = IGNORED
            Image.fromarray(image.numpy()).save(root / part / "images" / f"{index:03}.png")
            Image.fromarray(mask.byte().numpy()).save(root / part / "masks" / f"{index:03}.png")


def folder_words(root: Path) -> tuple[str, ...]:
    return (
        *(
            *as_typed(f"task=segmentation dataset=segmentation_folder dataset.root={root}"),
            "dataset.num_classes=4",
        ),
        *("dataset.image_size=[8,8]", "dataset.num_workers=0", "model=unet", "model.widths=[4,6]"),
    )


def read_pictures(folder: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, H, W] in [0, 1], and masks, in the order of their names."""
    read = [
        np.stack([np.array(Image.open(path)) for path in sorted((folder / kind).iterdir())])
        for kind in ("images", "masks")
    ]
    return (
        torch.from_numpy(read[0]).permute(0, 3, 1, 2).float() / 255,
        torch.from_numpy(read[1]).long(),
    )


def test_curves_of_a_folder_are_a_plain_loops(tmp_path: Path, trained: Trained) -> None:
    """Images have unequal numbers of pixels that count."""
    root = tmp_path / "pictures"
    write_pictures(root, {"train": 30, "val": 7})
    # One batch of all: its order, drawn by expt, is not a matter then.
    words = (
        *folder_words(root),
        *(
            *as_typed("model.batch_norm=false dataset.mean=null dataset.std=null"),
            *as_typed("optimizer=plain_sgd optimizer.lr=0.5"),
        ),
        *("batch_size=30", "epochs=4", "log_every=1", "tensorboard.norms=false"),
    )
    done = trained(*words, "world_size=2", "gradient_accumulation=3")
    (images, masks), (val_images, val_masks) = (
        read_pictures(root / "train"),
        read_pictures(root / "val"),
    )
    torch.manual_seed(0)
    model: nn.Module = UNet(
        channels=3, image_size=(SIZE, SIZE), num_classes=4, widths=(4, 6), batch_norm=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, val_losses = [], []
    for _ in range(4):
        loss = functional.cross_entropy(model(images), masks, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            val_losses.append(
                functional.cross_entropy(model(val_images), val_masks, ignore_index=IGNORED).item()
            )
    with torch.no_grad():
        iou = classification.MulticlassJaccardIndex(4, ignore_index=IGNORED)(
            model(val_images), val_masks
        ).item()
    assert losses[0] - losses[-1] > 0.01
    curves = [
        [value for _, value in done.curve(tag)]
        for tag in ("loss/train", "loss/val", "mean_iou/val")
    ]
    assert curves[0] == pytest.approx(losses, abs=1e-4)
    assert curves[1] == pytest.approx(val_losses, abs=1e-4)
    assert curves[2][-1] == pytest.approx(iou, abs=1e-4)
    assert done.result["objective"]["name"] == "mean_iou/val"
