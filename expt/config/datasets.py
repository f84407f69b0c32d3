"""What the group `dataset` may hold, by the member that is chosen; conf/dataset/ says what each key
means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import (
    IS_SET,
    STRICT,
    Count,
    DottedName,
    Folder,
    Fraction,
    Key,
    Positive,
    Size,
)
from expt.config.torchvision_sets import MASK_SETS, SetName

HeldOut = Annotated[Fraction, Key(evaluate=True, varies="split")]
TrainLimit = Annotated[Count | None, Key(fork="epoch", evaluate=True, varies="split")]
Mean = Annotated[tuple[float, ...] | None, Key(evaluate=True)]
Std = Annotated[tuple[Positive, ...] | None, Key(evaluate=True)]
Standardise = Annotated[bool, Key(evaluate=True)]
Place = Annotated[Folder, Key(result="none")]
"""Where files lie, whose content counts."""
Readers = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], Key(result="none")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    crop_padding: Annotated[int, Field(ge=0)] = 0
    padding_mode: Annotated[
        Literal["constant", "reflect"], Key(only_if={"dataset.augment.crop_padding": IS_SET})
    ] = "constant"
    flip: bool | Literal["alternate"] = False
    cutout: Annotated[int, Field(ge=0)] = 0

    @property
    def is_set(self) -> bool:
        """Whether anything is to be done."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(self))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Dataset:
    val_fraction: HeldOut
    train_limit: TrainLimit
    mean: Mean
    std: Std
    augment: Annotated[Augment, Key(fork=True, evaluate=True)] = dataclasses.field(
        default_factory=Augment
    )
    folds: Annotated[Annotated[int, Field(ge=2)] | None, Key(evaluate=True, varies="split")] = None
    fold: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Key(evaluate=True, varies="repetition", cost=False, only_if={"dataset.folds": IS_SET}),
    ] = None
    sampling: Annotated[Literal["balanced"] | None, Key(fork="epoch", evaluate=True)] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Images(_Dataset):
    """Images, each of one class."""

    transforms: Annotated[
        tuple[dict[str, Any], ...] | None,
        Key(fork=True, evaluate=True, example="'dataset.transforms=[{_target_: mine.Noise}]'"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Digits(Images):
    name: Literal["digits"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Downloaded(Images):
    """A dataset that torchvision knows where to fetch."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
    root: Place | None
    download: Annotated[bool, Key(result="none")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torchvision(Images):
    """A dataset by the name of its class in torchvision.datasets; expt.data.torchvision_kinds knows
    each.
    """

    name: Literal["torchvision"]
    set: SetName
    options: dict[str, Any] | None = None
    root: Place | None
    download: Annotated[bool, Key(result="none")]
    standardise_targets: Standardise = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Readers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(Images):
    """Images, each of one class, by the name of their column; or rows of numbers, by a list of
    columns.
    """

    name: Literal["huggingface"]
    path: Place
    input: str | Annotated[tuple[str, ...], Field(min_length=1)]
    target: str | Annotated[tuple[str, ...], Field(min_length=1)]
    standardise: Standardise = True
    standardise_targets: Standardise = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Readers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Synthetic(Images):
    name: Literal["synthetic"]
    train_size: Count
    test_size: Count
    channels: Count
    image_size: Size
    num_classes: Annotated[int, Field(ge=2)]
    seed: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageFolder(Images):
    name: Literal["image_folder"]
    root: Place
    cache: Annotated[Literal["auto"] | bool, Key(result="none")] = "auto"
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Readers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Text(_Dataset):
    name: Literal["text"]
    root: Place
    tokens: Folder  # bytes, or a file of tokenizers
    context: Count
    test_fraction: HeldOut
    mean: Mean = None
    std: Std = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Table(_Dataset):
    """Rows of numbers, of which some columns are to be predicted."""

    standardise: Standardise
    standardise_targets: Standardise
    test_fraction: HeldOut
    mean: None = None  # of images
    std: None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table(_Table):
    name: Literal["table"]
    path: Place
    targets: str | Annotated[tuple[str, ...], Field(min_length=1)]
    features: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, Key(evaluate=True)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Diabetes(_Table):
    name: Literal["diabetes"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationFolder(_Dataset):
    name: Literal["segmentation_folder"]
    root: Place
    num_classes: Annotated[int, Field(ge=2)]
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Readers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetDataset(_Dataset):
    """A person's own torch Dataset: built twice, with `train` and with `test` added to `kwargs`.

    With `num_classes` its samples are (image, label), else whatever the task takes.
    """

    name: Literal["_target_"] = "_target_"
    target: DottedName
    num_classes: Annotated[int, Field(ge=2)] | None = None
    num_workers: Readers = "auto"
    val_fraction: HeldOut = 0.1
    train_limit: TrainLimit = None
    mean: Mean = None
    std: Std = None
    train: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": True})
    test: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": False})
    kwargs: dict[str, Any]


OWN_DATASET_KEYS = {field.name for field in dataclasses.fields(TargetDataset)} - {
    *("name", "target", "kwargs", "train", "test"),
}
"""What every dataset of a person's own has, named in its YAML or not."""

DATASETS: dict[str, Any] = {
    "digits": Digits,
    **dict.fromkeys(("mnist", "fashion_mnist", "cifar10", "cifar100"), Downloaded),
    "torchvision": Torchvision,
    "huggingface": HuggingFace,
    "synthetic": Synthetic,
    "image_folder": ImageFolder,
    "text": Text,
    "table": Table,
    "diabetes": Diabetes,
    "segmentation_folder": SegmentationFolder,
    "_target_": TargetDataset,
}


def has_rows(dataset: Any) -> bool:
    """Whether its samples are rows of numbers."""
    return isinstance(dataset, _Table) or (
        isinstance(dataset, HuggingFace) and not isinstance(dataset.input, str)
    )


def has_masks(dataset: Any, segments: bool) -> bool:
    """Whether its samples are images with a mask each; a few have classes too, for a task that
    `segments` nothing.
    """
    if isinstance(dataset, Torchvision):
        return dataset.set in MASK_SETS and (segments or dataset.set != "OxfordIIITPet")
    if isinstance(dataset, HuggingFace):
        return segments and not has_rows(dataset)
    return isinstance(dataset, SegmentationFolder)


def mask_classes(dataset: Any) -> int | None:
    """The number of classes in its masks, where it says so."""
    if isinstance(dataset, Torchvision):
        return MASK_SETS.get(dataset.set)
    return dataset.num_classes if isinstance(dataset, SegmentationFolder) else None


_NOUNS = {"text": "window", "table": "row", "diabetes": "row"}


def noun_of(record: Mapping[str, Any]) -> str:
    """What a sample is called of the dataset of a run, as its record has it."""
    dataset = (record.get("config") or {}).get("dataset") or {}
    if dataset.get("name") == "_target_":
        return "image" if dataset.get("num_classes") else "sample"
    if dataset.get("name") == "huggingface" and not isinstance(dataset.get("input"), str):
        return "row"
    return _NOUNS.get(str(dataset.get("name")), "image")
