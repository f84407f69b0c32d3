"""Augmentation and mixing of whole batches: as by hand, and alike on any number of workers."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from expt.data import indexing, kinds
from expt.data.augment import Augmentation, Mixing, box_of
from expt.data.loader import Loader
from expt.data.loading import Batch, LoaderOptions, Shard, TimedBatches
from expt.errors import ConfigError
from expt.late import Late
from tests.data.loaders import makers
from tests.facade import built, dataset

CPU = torch.device("cpu")
SIZE, HEIGHT, WIDTH = 51, 7, 5
IMAGES = torch.randint(
    1, 256, (SIZE, 2, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(SIZE)
ALL_THREE = Augmentation(crop_padding=2, flip=True, cutout=3)
MEAN, STD = (0.4, 0.6), (0.2, 0.3)


EIGHT = LoaderOptions(batch_size=8, device=CPU, shuffle=True, mean=MEAN, std=STD)


in_memory, streamed, _ = makers(IMAGES, LABELS, EIGHT)
make_loader = pytest.mark.parametrize("make", [in_memory, streamed])


def _mirrored(place: int, side: int) -> int:
    """As numpy counts there and back: 0 1 2 1 0 1 ..."""
    places: list[int] = [*range(side), *range(side - 2, 0, -1)]
    return places[place % len(places)]


def reference(image: Tensor, augment: Augmentation, numbers: list[int]) -> Tensor:
    """One image [C, H, W], pixel by pixel; `numbers` are below 2**15."""
    flip, top, left, cut_y, cut_x = numbers
    padding = augment.crop_padding
    top, left = (
        top * (2 * padding + 1) // 2**15 - padding,
        left * (2 * padding + 1) // 2**15 - padding,
    )
    first_row = cut_y * HEIGHT // 2**15 - augment.cutout // 2
    first_column = cut_x * WIDTH // 2**15 - augment.cutout // 2
    made = torch.empty(image.shape)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            column = left + (WIDTH - 1 - x if augment.flip and flip < 2**14 else x)
            row = top + y
            if augment.padding_mode == "reflect":
                row, column = _mirrored(row, HEIGHT), _mirrored(column, WIDTH)
            inside = 0 <= row < HEIGHT and 0 <= column < WIDTH
            pixel = image[:, row, column] / 255 if inside else torch.zeros(2)
            cut = 0 <= y - first_row < augment.cutout and 0 <= x - first_column < augment.cutout
            made[:, y, x] = 0 if cut else (pixel - torch.tensor(MEAN)) / torch.tensor(STD)
    return made


@make_loader
@pytest.mark.parametrize(
    "augment",
    [
        Augmentation(crop_padding=2),
        Augmentation(flip=True),
        Augmentation(cutout=4),
        ALL_THREE,
        Augmentation(crop_padding=4, padding_mode="reflect", flip=True),
    ],
    ids=str,
)
def test_each_image_is_augmented_as_by_hand(
    make: Callable[..., Loader], augment: Augmentation
) -> None:
    drawn = Augmentation.draw(SIZE, seed=5, epoch=2)
    position = 0
    for batch in make(seed=5, augment=augment, drop_last=True).epoch(2):
        for image, label in zip(batch.inputs, batch.targets, strict=True):
            expected = reference(IMAGES[label], augment, drawn[:, position].tolist())
            torch.testing.assert_close(image, expected, rtol=1e-5, atol=1e-5)
            position += 1
    assert position == SIZE // 8 * 8


def test_every_offset_comes_as_often_as_the_others() -> None:
    marked = torch.zeros(20_000, 1, 3, 3, dtype=torch.uint8)
    marked[:, :, 1, 1] = 255
    augment = Augmentation(crop_padding=1, flip=True)
    moved = augment.move(marked, Augmentation.draw(len(marked), seed=0, epoch=0))
    assert moved.dtype == torch.uint8
    torch.testing.assert_close(
        moved.float().div(255).mean(0), torch.full((1, 3, 3), 1 / 9), atol=0.01, rtol=0
    )
    places = augment.move(marked[:1].expand(9, -1, -1, -1), Augmentation.draw(9, seed=0, epoch=0))
    assert (
        len({tuple(image.flatten().tolist()) for image in places}) > 1
    )  # not one place for a batch
    flipped = Augmentation(flip=True).move(
        torch.tensor([0, 1]).expand(20_000, 1, 1, 2), Augmentation.draw(20_000, seed=0, epoch=0)
    )
    assert abs(flipped[..., 0].float().mean() - 0.5) < 0.02


def digits(**augment: Any) -> Any:
    return dataset("dataset=digits", mean=None, std=None, augment=kinds.Augment(**augment))


def test_the_configuration_chooses_what_is_done_in_training_alone() -> None:
    def batches(**augment: Any) -> list[Tensor]:
        data = built(digits(**augment), batch_size=64, drop_last=True)
        assert data.val is not None
        assert data.test is not None
        passes = (data.train.epoch(1), data.val.evaluation(), data.test.evaluation())
        return [torch.cat([batch.inputs for batch in each]) for each in passes]

    plain = batches()
    for augment in ({"crop_padding": 1}, {"flip": True}, {"cutout": 2}):
        train, val, test = batches(**augment)
        assert not torch.equal(train, plain[0])
        assert torch.equal(val, plain[1])
        assert torch.equal(test, plain[2])
    with pytest.raises(ConfigError, match=r"dataset.augment.crop_padding=9: must be below") as bad:
        batches(crop_padding=9, cutout=8)
    assert len(bad.value.problems) == 2


def test_the_time_that_a_step_waits_for_its_batch_is_counted() -> None:
    def slow() -> Iterator[Batch]:
        for _ in range(3):
            time.sleep(0.02)
            yield Batch(IMAGES, LABELS, SIZE)

    batches = TimedBatches(slow())
    for _ in batches:
        before = batches.waited_s
        time.sleep(0.05)  # a step
        assert batches.waited_s == before
    assert batches.waited_s >= 0.06


def test_what_augments_is_drawn_apart_from_the_order() -> None:
    for seed, epoch in ((0, 1), (3, 7)):
        of_the_order = torch.Generator().manual_seed(indexing.mix(seed, epoch))
        same_stream = torch.randint(1 << 15, (5, SIZE), dtype=torch.int16, generator=of_the_order)
        assert not torch.equal(Augmentation.draw(SIZE, seed, epoch), same_stream)
    drawn = [
        Augmentation.draw(SIZE, seed, epoch) for seed, epoch in ((0, 1), (1, 0), (0, 2), (1, 1))
    ]
    assert not any(torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])


@make_loader
@pytest.mark.parametrize("balanced", [None, LABELS % 3])
def test_alternating_flips_show_each_image_both_ways_in_two_epochs(
    make: Callable[..., Loader], balanced: Tensor | None
) -> None:
    """Whatever the number of workers, and the batch from which a run goes on."""

    def mirrored(epoch: int, rank: int = 0, world_size: int = 1, skip: int = 0) -> dict[int, bool]:
        options = {
            "augment": Augmentation(flip="alternate"),
            "shard": Shard(rank, world_size),
            "balanced": balanced,
        }
        found = {}
        for batch in make(**options, mean=None, std=None).epoch(epoch, skip):
            for image, label in zip(batch.inputs, batch.targets.tolist(), strict=True):
                plain = IMAGES[label] / 255
                assert torch.allclose(image, plain) != torch.allclose(image, plain.flip(2))
                found[label] = torch.allclose(image, plain.flip(2))
        return found

    first, second, third = (mirrored(epoch) for epoch in (1, 2, 3))
    both = first.keys() & second.keys()
    assert len(both) == SIZE if balanced is None else len(both) > SIZE / 2
    assert all(first[label] != second[label] for label in both)
    assert all(first[label] == third[label] for label in first.keys() & third.keys())
    assert 0.3 < sum(first.values()) / len(first) < 0.7
    assert {**mirrored(1, 0, 2), **mirrored(1, 1, 2)} == first
    rest = mirrored(1, skip=9)
    assert rest == {label: first[label] for label in rest}


v2: Any = Late("torchvision.transforms.v2")

CPU = torch.device("cpu")
MANY, CLASSES = 45, 7
MIXED = torch.randint(
    256, (MANY, 2, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
CLASSES_OF_MIXED = torch.arange(MANY) % CLASSES
BY_EIGHT = LoaderOptions(batch_size=8, device=CPU, shuffle=True, seed=4)
BOTH = Mixing(CLASSES, mixup=0.4, cutmix=1.0)


mixed_in_memory, mixed_stream, rows = makers(MIXED, CLASSES_OF_MIXED, BY_EIGHT)
of_both_kinds = pytest.mark.parametrize("make", [mixed_in_memory, mixed_stream])


@of_both_kinds
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
                (box[1].start, box[0].start, box[1].stop, box[0].stop),
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
        rows, columns = box_of(share, y, x, (12, 9))
        assert params["box"] == (columns.start, rows.start, columns.stop, rows.stop)


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
    for batch in mixed_in_memory(channels_last=channels_last, **options).epoch(1):
        assert batch.inputs.is_contiguous(memory_format=layout)
