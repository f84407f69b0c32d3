"""A whitened layer, and what is averaged over views of an image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError
from expt.models.test_time import TestTime, with_views
from expt.models.whitening import convolution, whiten

KINDS: tuple[TestTime, ...] = ("flip", "flip_shift")


def pictures(number: int = 300) -> Tensor:
    """Smooth ones, in which neighbours are alike."""
    noise = torch.randn(number, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    return functional.avg_pool2d(noise, 3, stride=1) + 0.3


def whitened(images: Tensor, *, eps: float, parts: int = 7) -> nn.Conv2d:
    layer = nn.Conv2d(3, 24, 2)
    whiten(layer, images.chunk(parts), eps=eps)
    return layer


def test_what_it_gives_is_white() -> None:
    images = pictures()
    outputs = (
        functional.conv2d(images, whitened(images, eps=1e-9).weight).transpose(0, 1).flatten(1)
    )
    first, second = outputs.detach().split(12)
    torch.testing.assert_close(first @ first.T / first.shape[1], torch.eye(12), atol=1e-3, rtol=0)
    torch.testing.assert_close(second, -first)


def test_its_kernels_are_those_of_the_published_recipe() -> None:
    """Directions of the raw second moment, the strongest first, each over the root of its
    eigenvalue and eps.
    """
    images, eps = pictures(), 5e-2
    patches = functional.unfold(images, 2).transpose(1, 2).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    expected = (vectors.T.flip(0) / torch.sqrt(values.flip(0)[:, None] + eps)).float()
    kernels = whitened(images, eps=eps).weight.detach()[:12].flatten(1)
    signs = (kernels * expected).sum(1, keepdim=True).sign()
    torch.testing.assert_close(kernels, signs * expected, rtol=1e-4, atol=1e-5)
    assert (kernels.gather(1, kernels.abs().argmax(1, keepdim=True)) > 0).all(), (
        "of two signs the one that is settled"
    )


def test_the_batches_make_no_difference() -> None:
    one, other = (whitened(pictures(), eps=1e-3, parts=parts).weight for parts in (1, 300))
    assert torch.equal(one, other)


def test_a_layer_that_cannot_be_whitened() -> None:
    module = nn.Sequential(nn.Conv2d(3, 24, 2), nn.Conv2d(24, 10, 3), nn.Linear(3, 24))
    assert convolution(module, "0") is module[0]
    with pytest.raises(
        ConfigError, match=r"whitening\.layer=2: is the name of no convolution; the model has 0, 1"
    ):
        convolution(module, "2")
    with pytest.raises(
        ConfigError, match=r"layer=1: has 10 kernels of 216 numbers, and takes two for each number"
    ):
        convolution(module, "1")
    with pytest.raises(
        ConfigError, match="its layer takes 3 channels, and the images have 1; name the first"
    ):
        whiten(module[0], [torch.zeros(2, 1, 5, 5)], eps=1e-3)


class Places(nn.Module):
    """Tells the views of an image apart."""

    def forward(self, images: Tensor) -> Tensor:
        weights = torch.arange(images[0].numel(), dtype=images.dtype).sin()
        return (images.flatten(1) * weights).sum(1, keepdim=True) ** 2


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_averaged_over_views(kind: TestTime) -> None:
    images, module = pictures(4), Places()
    padded = functional.pad(images, (1,) * 4, mode="reflect")
    shifted = padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]
    both = [(module(view) + module(view.flip(-1))) / 2 for view in (images, *shifted)]
    expected = both[0] if kind == "flip" else both[0] / 2 + both[1] / 4 + both[2] / 4
    torch.testing.assert_close(with_views(module, kind)(images), expected)
    assert with_views(module, None) is module


def test_outputs_in_half_precision_are_averaged_in_float32() -> None:
    found = with_views(nn.Sequential(nn.Flatten(), nn.Linear(240, 2)).bfloat16(), "flip")(
        pictures(2).bfloat16()
    )
    assert found.dtype == torch.float32


def test_what_has_no_views_is_refused() -> None:
    with pytest.raises(ConfigError, match="test_time_augmentation=flip: is of images"):
        with_views(nn.Identity(), "flip")(torch.zeros(2, 3))

    class Two(nn.Module):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            return images, images

    with pytest.raises(
        ConfigError,
        match="averages outputs that are a tensor, and the model gives a tuple; use null",
    ):
        with_views(Two(), "flip")(pictures(1))
