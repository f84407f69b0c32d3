"""The record of features, and which data fits a model that was trained on others."""

import json
import math
from dataclasses import dataclass

import pytest
import torch

from expt.errors import ConfigError, DataError
from expt.features import (
    Anything,
    Classes,
    Columns,
    Feature,
    Features,
    Image,
    Labels,
    Mask,
    Numbers,
    Tokens,
)

EVERY = [
    Image(channels=3, image_size=(6, 5)),
    Columns(
        names=("a", "b"),
        width=4,
        scales={"a": (0.5, 2.0)},
        encoded={"b": {"categories": ("u", "v", None)}},
        left_out={"id": "counts the rows"},
    ),
    Tokens(vocab_size=256, context=9),
    Anything(),
    Anything.like(torch.tensor(2.5)),
    Anything.like(torch.zeros(3), are_inputs=True),
    Classes(names=("cat", "dog"), are_names=True, column="kind"),
    Labels(names=("a", "b")),
    Numbers(names=("x", "y"), shape=(2,), scales={"x": (1.0, 2.0)}, origin=(0.0, 2e6)),
    Mask(num_classes=3, ignore_index=0),
]


@pytest.mark.parametrize("feature", EVERY, ids=lambda feature: type(feature).__name__)
def test_a_feature_comes_back_from_its_record(feature: Feature) -> None:
    both = Features(feature, feature)
    again = Features.read(json.loads(json.dumps({**both.record, "train_size": 9})))
    assert again == both
    assert again.shapes == both.shapes
    assert feature.fit(again.inputs, "here") == (None, "")


def test_features_of_ones_own_come_back_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Box(Feature):
        sides: tuple[str, ...]

    box = Box(sides=("left", "top"))
    assert Feature.read(json.loads(json.dumps(box.record))) == box


@pytest.mark.parametrize("kind", [Feature, Classes, Image])
def test_a_name_of_expts_features_is_refused_for_ones_own(kind: type[Feature]) -> None:
    for name in ("Classes", "Image"):
        with pytest.raises(ConfigError, match=f"test_features.{name}: .*rename the class"):
            type(name, (kind,), {"__module__": __name__})
    assert type(Feature.read(EVERY[0].record)) is type(EVERY[0])


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"class_names": ["a"], "channels": 1, "image_size": [8, 8]},
        {"inputs": {"feature": "Sound"}, "targets": Labels(names=("a",)).record},
        {"inputs": Labels(names=("a",)).record, "targets": {"feature": "Mask", "classes": 3}},
    ],
)
def test_a_record_of_another_version_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="another version") as refused:
        Features.read(record)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (EVERY[0], Image(channels=1, image_size=(6, 5))),
        (EVERY[0], EVERY[2]),
        (Classes(names=("cat", "owl")), EVERY[6]),
        (Classes(names=("0", "1", "2")), EVERY[6]),
        (Numbers(shape=(3,)), EVERY[8]),
        (EVERY[9], Mask(num_classes=4)),
    ],
)
def test_what_does_not_fit_is_refused_by_the_datasets_name(here: Feature, there: Feature) -> None:
    with pytest.raises(ConfigError, match=r"^dataset=photos: has "):
        here.fit(there, "dataset=photos")


@pytest.mark.parametrize("transform", ["", "log1p"])
def test_a_zero_comes_back_from_standardised_numbers(transform: str) -> None:
    scales = {"cost": (4.870129, 1.8787), "price": (-1234.5678, 0.37)}
    feature = Numbers(names=("cost", "price"), shape=(2,), scales=scales, transform=transform)
    values = torch.tensor([[0.0, 0.0], [0.001, 7.0], [3.0, 0.0]])
    found = feature.in_units(feature.from_units(values).float())
    assert torch.equal(found == 0, values == 0)
    torch.testing.assert_close(found.float(), values, rtol=1e-3, atol=1e-3)
    for odd in (math.nan, math.inf):
        values[2, 0] = odd
        found = feature.in_units(feature.from_units(values).float())
        assert found[2, 0].tolist() == pytest.approx(odd, nan_ok=True)


@pytest.mark.parametrize("transform", ["", "log", "log1p"])
def test_numbers_of_all_magnitudes_are_written_as_they_were(transform: str) -> None:
    scales = {"revenue": (7.5, 3.25) if transform else (412345.678, 1623456.789)}
    feature = Numbers(names=("revenue",), shape=(1,), scales=scales, transform=transform)
    values = torch.tensor([[1.0], [7.0], [66.0], [1776.0], [29884.5], [605549.0], [math.nan]])
    arrays, _ = feature.decoded(feature.from_units(values).float(), None)
    assert arrays["values"][:-1, 0].tolist() == values[:-1, 0].tolist()
    assert math.isnan(arrays["values"][-1, 0])


def test_classes_are_found_by_their_names() -> None:
    places, note = Classes(names=("dog",)).fit(EVERY[6], "here")
    assert (places, "cat" in note) == ([1], True)
    assert Classes(names=("0", "1")).fit(EVERY[6], "here")[0] is None, "they have only numbers"
    assert Classes(names=("1", "0"), are_names=True).fit(Classes(names=("0", "1")), "x")[0] == [
        1,
        0,
    ]


def test_a_label_that_is_no_class_is_refused() -> None:
    names = Classes(names=("a", "b"))
    for label in (0, 1.0, torch.tensor(1), True):
        assert names.check((None, label))[1] in (0, 1)
    for wrong in (2, -1, 0.5, "a", torch.zeros(2)):
        with pytest.raises(DataError, match="expected 0 to 1"):
            names.check((None, wrong))


def test_random_rows_have_the_scale_of_each_column_by_name() -> None:
    columns = Columns(
        names=("plain", "kind", "far", "gappy"),
        width=6,
        scales={"far": (1e3, 1.0), "gappy": (-1e3, 1.0)},
        encoded={"kind": {"categories": ("u", "v")}, "gappy": {"median": 0.0, "gaps": 2}},
    )
    means = columns.drawn(200, torch.Generator().manual_seed(0)).mean(0)
    assert (means / 1e3).round().tolist() == [0, 0, 0, 1, -1, 0]
