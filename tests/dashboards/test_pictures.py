"""What is drawn for the IMAGES tab, read back as pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from expt.dashboards.pictures import WIDTH, caption, confusion_matrix, image_grid

NAMES = (
    "T-shirt/top",
    "Trouser",
    "a name that is far too long for its place in a picture of any size at all",
)


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def test_a_grid_holds_every_image_unblurred() -> None:
    images = np.zeros((10, 8, 8, 1), np.uint8)
    images[:, :4] = np.arange(10, dtype=np.uint8)[:, None, None, None] * 20 + 40
    drawn = pixels(image_grid(images, ["a"] * 10))
    assert drawn.shape[1] == WIDTH
    tile = 80  # the largest multiple of 8 of which four fit a card
    for index in range(10):
        left, top = index % 4 * 87 + 2, index // 4 * (tile + 13 + 8)
        own = drawn[top : top + tile, left : left + tile]
        assert (own[: tile // 2] == 40 + 20 * index).all()
        assert (own[tile // 2 :] == 0).all()


def test_colours_stay_and_large_images_shrink() -> None:
    images = np.zeros((1, 300, 200, 3), np.uint8)
    images[..., 1] = 200
    drawn = pixels(image_grid(images, ["a\nb"]))
    assert drawn.shape == (84 + 2 * 13 + 8, WIDTH, 3)
    assert tuple(drawn[40, 40]) == (0, 200, 0)
    assert tuple(drawn[40, 5]) == (255, 255, 255), "still higher than wide"


def test_a_cell_is_the_darker_the_more_of_its_true_class_it_holds() -> None:
    counts = np.array([[100, 0, 0], [25, 75, 0], [0, 0, 0]])
    picture = confusion_matrix(counts, NAMES)
    drawn = pixels(picture).astype(int).sum(2)
    margin = picture.height - 2 - 13 - 3 * 44
    corners = [
        [drawn[margin + 44 * row + 3, margin + 44 * column + 3] for column in range(3)]
        for row in range(3)
    ]
    assert corners[0][0] < corners[1][1] < corners[1][0] < corners[0][1] == 3 * 255
    assert corners[2] == [3 * 255] * 3, "a class without samples"
    assert (drawn[: margin - 1, : margin - 1] == 3 * 255).all()
    assert (drawn[margin:-16, :margin] < 400).any(), "the names are written"


@pytest.mark.parametrize("classes", [2, 10, 21, 100, 101, 400])
def test_any_number_of_classes_fits(classes: int) -> None:
    picture = confusion_matrix(
        np.eye(classes, dtype=np.int64), [f"class {number}" for number in range(classes)]
    )
    assert picture.width == WIDTH if classes <= 10 else WIDTH < picture.width <= 1300
    picture.save(file := io.BytesIO(), "PNG")
    assert len(file.getvalue()) < 200_000


def test_a_mixed_image_is_told_with_its_shares() -> None:
    names = ("cat", "dog", "bird")
    assert caption(names, torch.tensor(2)) == "bird"
    assert caption(names, torch.tensor([0.25, 0.0, 0.75])) == "bird 75%\ncat 25%"
    assert caption(names, torch.tensor([0.0, 1.0, 0.0])) == "dog 100%"
