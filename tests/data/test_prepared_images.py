"""Images that are prepared once are those that are prepared in each step, to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from expt.data.augment import Augmentation
from expt.data.loading import Batch, Shard
from expt.data.memory import InMemoryLoader
from expt.data.mixing import Mixing
from expt.data.prepared_images import PreparedImages
from expt.errors import ConfigError
from tests.data.test_augment import EIGHT, IMAGES, LABELS, in_memory

CASES = {
    "as they are": Augmentation(),
    "black around": Augmentation(crop_padding=2, flip=True, cutout=3),
    "mirrored around": Augmentation(crop_padding=3, padding_mode="reflect", flip="alternate"),
    "mirrored": Augmentation(flip=True),
}


def seen(**options: Any) -> list[Batch]:
    loader = in_memory(**options)
    return [*loader.epoch(2, skip=3), *loader.evaluation()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_each_batch_is_the_same_to_the_bit(name: str, layout: torch.memory_format) -> None:
    options = {
        "augment": CASES[name],
        "channels_last": layout == torch.channels_last,
        "shard": Shard(1, 2),
    }
    plain = seen(**options)
    for dtype in (torch.float32, torch.bfloat16):
        found = seen(**options, prepared=dtype)
        assert len(found) == len(plain) > 20
        for one, other in zip(found, plain, strict=True):
            assert one.inputs.dtype == dtype
            assert one.inputs.is_contiguous(memory_format=layout)
            assert torch.equal(one.inputs, other.inputs.to(dtype))
            assert torch.equal(one.targets, other.targets)


def test_pieces_of_other_images_are_pasted_as_they_are() -> None:
    options = {"augment": CASES["black around"], "mixing": Mixing(len(LABELS), cutmix=1.0)}
    for one, other in zip(seen(**options, prepared=torch.bfloat16), seen(**options), strict=True):
        assert torch.equal(one.inputs, other.inputs.bfloat16())


def test_some_of_the_images_in_another_order() -> None:
    chosen = torch.arange(150, 20, -3)
    plain, prepared = (
        InMemoryLoader(IMAGES, LABELS, chosen, dataclasses.replace(EIGHT, prepared=dtype))
        for dtype in (None, torch.float32)
    )
    for one, other in zip(prepared.epoch(1), plain.epoch(1), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_a_gpu_without_room_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (1000, 2000))
    options = dataclasses.replace(EIGHT, device=torch.device("cuda"))
    with pytest.raises(
        ConfigError, match=r"prepare_once=true: takes 0\.0 GB of the GPU's memory, of which 0\.0 GB"
    ):
        PreparedImages(IMAGES, options, torch.bfloat16)
