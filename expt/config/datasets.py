"""What the group `dataset` may hold, by the member that is chosen; conf/dataset/ says what each key
means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, DottedName, Folder, Fraction, Positive, Size
from expt.config.torchvision_sets import MASK_SETS, SetName


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    crop_padding: Annotated[int, Field(ge=0)] = 0
    padding_mode: Literal["constant", "reflect"] = (
        "constant"  # a run recorded before there was a choice has none
    )
    flip: bool | Literal["alternate"] = False
    cutout: Annotated[int, Field(ge=0)] = 0

    @property
    def is_set(self) -> bool:
        """Whether anything is to be done."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(self))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Dataset:
    val_fraction: Fraction
    train_limit: Count | None
    mean: tuple[float, ...] | None
    std: tuple[Positive, ...] | None
    augment: Augment = dataclasses.field(default_factory=Augment)
    folds: Annotated[int, Field(ge=2)] | None = (
        None  # a run recorded before there was a choice has none
    )
    fold: Annotated[int, Field(ge=0)] | None = None
    sampling: Literal["balanced"] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Images(_Dataset):
    """Images, each of one class."""

    transforms: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Digits(Images):
    name: Literal["digits"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Downloaded(Images):
    """A dataset that torchvision knows where to fetch."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
    root: Folder | None
    download: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torchvision(Images):
    """A dataset by the name of its class in torchvision.datasets; expt.data.torchvision_kinds knows
    each.
    """

    name: Literal["torchvision"]
    set: SetName
    options: dict[str, Any] | None = None
    root: Folder | None
    download: bool
    standardise_targets: bool = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(Images):
    """Images, each of one class, by the name of their column; or rows of numbers, by a list of
    columns.
    """

    name: Literal["huggingface"]
    path: Folder
    input: str | Annotated[tuple[str, ...], Field(min_length=1)]
    target: str | Annotated[tuple[str, ...], Field(min_length=1)]
    standardise: bool = True
    standardise_targets: bool = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


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
    root: Folder
    cache: Literal["auto"] | bool = "auto"
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Text(_Dataset):
    name: Literal["text"]
    root: Folder
    tokens: Folder  # bytes, or a file of tokenizers
    context: Count
    test_fraction: Fraction
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Table(_Dataset):
    """Rows of numbers, of which some columns are to be predicted."""

    standardise: bool
    standardise_targets: bool
    test_fraction: Fraction
    mean: None = None  # of images
    std: None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table(_Table):
    name: Literal["table"]
    path: Folder
    targets: str | Annotated[tuple[str, ...], Field(min_length=1)]
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Diabetes(_Table):
    name: Literal["diabetes"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationFolder(_Dataset):
    name: Literal["segmentation_folder"]
    root: Folder
    num_classes: Annotated[int, Field(ge=2)]
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetDataset(_Dataset):
    """A person's own torch Dataset: built twice, with `train` and with `test` added to `kwargs`.

    With `num_classes` its samples are (image, label), else whatever the task takes.
    """

    name: Literal["_target_"] = "_target_"
    target: DottedName
    num_classes: Annotated[int, Field(ge=2)] | None = None
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    val_fraction: Fraction = 0.1
    train_limit: Count | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
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
