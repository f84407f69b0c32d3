"""Mixup and cutmix: drawn for each batch alone, with a partner in the global batch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from expt.data.augment import Augmentation, Mixing, box_of
from expt.data.loading import LoaderOptions, Shard
from tests.data.loaders import makers
from tests.late import Late

v2: Any = Late("torchvision.transforms.v2")

CPU = torch.device("cpu")
SIZE, CLASSES = 45, 7
IMAGES = torch.randint(
    256, (SIZE, 2, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(SIZE) % CLASSES
EIGHT = LoaderOptions(batch_size=8, device=CPU, shuffle=True, seed=4)
BOTH = Mixing(CLASSES, mixup=0.4, cutmix=1.0)


in_memory, streamed, rows = makers(IMAGES, LABELS, EIGHT)
make_loader = pytest.mark.parametrize("make", [in_memory, streamed])


@make_loader
@pytest.mark.parametrize(
    "mixing", [Mixing(CLASSES, mixup=0.4), Mixing(CLASSES, cutmix=1.0), BOTH], ids=str
)
def test_a_batch_is_what_torchvision_makes_of_it(make: Any, mixing: Mixing) -> None:
    kinds = set()
    plain = list(make(augment=Augmentation(flip=True)).epoch(2))
    for number, (batch, whole) in enumerate(
        zip(make(augment=Augmentation(flip=True), mixing=mixing).epoch(2), plain, strict=True)
    ):
        share, box = mixing.drawn(4, 2, number, (6, 5))
        params = {
            "labels": whole.targets,
            "batch_size": len(whole.targets),
            "lam": share,
            "lam_adjusted": share,
        }
        kind: Any = v2.MixUp(num_classes=CLASSES)
        if box is not None:
            kind, params["box"] = (
                v2.CutMix(num_classes=CLASSES),
                (box.left, box.top, box.right, box.bottom),
            )
        assert torch.equal(batch.inputs, kind.transform(whole.inputs, params))
        assert torch.equal(batch.targets, kind.transform(whole.targets, params))
        kinds.add(type(kind).__name__)
    assert kinds == {name for name in ("MixUp", "CutMix") if getattr(mixing, name.lower())}


def test_a_box_is_torchvision_s() -> None:
    cut: Any = v2.CutMix(num_classes=2)
    for seed in range(50):
        torch.manual_seed(seed)
        share = float(cut._dist.sample(()))
        x, y = int(torch.randint(9, (1,))), int(torch.randint(12, (1,)))
        torch.manual_seed(seed)
        params = cut.make_params([torch.zeros(1, 3, 12, 9)])
        top, bottom, left, right = box_of(share, y, x, (12, 9))
        assert params["box"] == (left, top, right, bottom)


def test_a_share_is_drawn_for_each_batch_alone_and_spread_as_beta() -> None:
    drawn = [
        Mixing(2, mixup=0.5).drawn(0, epoch, number, (4, 4))[0]
        for epoch in range(20)
        for number in range(100)
    ]
    assert len(set(drawn)) > 1990
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(0.5, abs=0.03)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in drawn) / len(drawn))
    assert deviation == pytest.approx(math.sqrt(1 / 8), abs=0.01), "of Beta(1/2, 1/2)"
    boxes = [BOTH.drawn(0, 1, number, (6, 5))[1] for number in range(400)]
    assert sum(box is None for box in boxes) == pytest.approx(200, abs=40)


@make_loader
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_workers_together_see_what_one_sees(make: Any, world_size: int) -> None:
    """The last batch has 5 samples: of 8 workers three have none."""
    options = {"mixing": BOTH, "augment": Augmentation(crop_padding=1, flip=True, cutout=2)}
    ranks = [make(shard=Shard(rank, world_size), **options).epoch(1) for rank in range(world_size)]
    for whole, *parts in zip(make(**options).epoch(1), *ranks, strict=True):
        shares = [part for part in parts if not part.weightless]
        for field in ("inputs", "targets"):
            assert torch.equal(
                torch.cat([getattr(part, field) for part in shares]), getattr(whole, field)
            )
        assert {part.global_size for part in parts} == {whole.global_size} == {whole.size}


def test_rows_of_a_table_are_mixed_too() -> None:
    mixing = Mixing(CLASSES, mixup=1.0)
    for number, (batch, whole) in enumerate(
        zip(rows(mixing=mixing).epoch(1), rows().epoch(1), strict=True)
    ):
        share = mixing.drawn(4, 1, number, ())[0]
        expected: Tensor = share * whole.inputs + (1 - share) * whole.inputs.roll(1, 0)
        torch.testing.assert_close(batch.inputs, expected)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_layout_of_images_is_kept(channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    options = {"augment": Augmentation(crop_padding=2, flip=True, cutout=3), "mixing": BOTH}
    for batch in in_memory(channels_last=channels_last, **options).epoch(1):
        assert batch.inputs.is_contiguous(memory_format=layout)
