"""A Hugging Face dataset in a folder: what save_to_disk wrote, parquet, csv, or an imagefolder.

Nothing is fetched.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from expt.config.datasets import HuggingFace, has_masks
from expt.data import table, table_cells
from expt.data.cache import cache_dir
from expt.data.huggingface_files import NEEDS
from expt.data.image_folder_files import MODES
from expt.data.masks import MaskPictures, MaskValues, of_mask_pictures, values_of
from expt.data.picture_numbers import of_numbers
from expt.data.pictures import Pictures, of_pictures
from expt.data.source import Source
from expt.data.table_source import of_rows
from expt.errors import ConfigError, DataError

_PARTS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
_GREY = ("1", "L")


def source(
    dataset: HuggingFace,
    task: Any,
    device: torch.device,
    num_workers: int,
    trained_on: Mapping[str, Any] | None = None,
) -> Source:
    """Its parts, by the names of its splits, and their images of classes, or rows as the configured
    `task` takes them.

    Rows are standardised as those that a record says `trained_on` of, where it is given.

    Raises ConfigError for a column that it has not, DataError for one that holds something else,
    and for a folder that is no dataset."""
    splits = _splits(dataset)
    if not isinstance(dataset.input, str):
        rows, parts = _table(dataset, dataset.input, splits, task)
        return of_rows(dataset, rows, parts, device, trained_on)
    if has_masks(dataset, task.TARGETS == "mask"):
        return _masks(dataset, dataset.input, splits, values_of(dataset, task), num_workers)
    if task.TARGETS in ("numbers", "labels"):
        scales = None if trained_on is None else trained_on.get("standardised", {})
        return _numbered(dataset, dataset.input, splits, task, num_workers, scales)
    names, numbers = _classes(dataset, splits)
    sets = _pictures(dataset, dataset.input, splits, numbers)
    return of_pictures(sets, tuple(map(str, names)), torch.tensor(numbers["train"]), num_workers)


def _pictures(
    dataset: HuggingFace,
    column: str,
    splits: Mapping[str, Any],
    targets: Mapping[str, Any],
    target: Any = int,
) -> dict[str, Pictures]:
    rows = {part: _Rows(split, column, targets[part]) for part, split in splits.items()}
    mode = (
        MODES[dataset.channels]
        if dataset.channels
        else "L"
        if rows["train"][0][0].mode in _GREY
        else "RGB"
    )
    return {part: Pictures(each, mode, dataset.image_size, target) for part, each in rows.items()}


def _numbered(
    dataset: HuggingFace,
    column: str,
    splits: Mapping[str, Any],
    task: Any,
    num_workers: int,
    scales: Any,
) -> Source:
    """Images with numbers to predict, or labels."""
    targets, names = dict[str, torch.Tensor](), tuple[str, ...]()
    _refuse_pictures(splits["train"], {"target": _names(dataset.target)})
    for part, split in splits.items():
        path, columns = (
            Path(dataset.path) / part,
            {name: _column(split, name) for name in _names(dataset.target)},
        )
        values, names = table_cells.numbers_of(path, columns, _names(dataset.target))
        if task.TARGETS == "labels":
            table_cells.check_labels(path, names, values)
        targets[part] = torch.from_numpy(values).float()
    return of_numbers(
        lambda scaled: _pictures(dataset, column, splits, targets, scaled),
        targets["train"],
        names,
        num_workers,
        scales=scales,
        standardises=dataset.standardise_targets,
    )


def _masks(
    dataset: HuggingFace,
    column: str,
    splits: Mapping[str, Any],
    values: MaskValues,
    num_workers: int,
) -> Source:
    (target,) = _names(dataset.target)
    if type(splits["train"].features[target]).__name__ != "Image":
        told = _told(splits["train"].features[target])
        raise DataError(
            f"dataset.target={target}: holds {told}, not masks; name a column of images"
        )
    sets = {}
    for part, split in splits.items():
        pairs = _Pairs(split, column, target)
        sets[part] = MaskPictures(
            pairs, values, channels=dataset.channels or 3, size=dataset.image_size
        )
    return of_mask_pictures(sets, values.num_classes, num_workers)


def _classes(
    dataset: HuggingFace, splits: Mapping[str, Any]
) -> tuple[list[Any], dict[str, list[int]]]:
    """The names of the classes, and by part the class of each row."""
    (target,) = _names(dataset.target)
    classes = {part: _column(split, target) for part, split in splits.items()}
    names = _class_names(splits["train"], target, classes["train"])
    named = {part: _by_name(splits[part], names, classes[part], target) for part in splits}
    return names, {part: _numbers(values, names, target, part) for part, values in named.items()}


def _table(
    dataset: HuggingFace, features: Sequence[str], splits: Mapping[str, Any], task: Any
) -> tuple[table.Rows, dict[str, np.ndarray]]:
    """The rows of all parts one after the other, and where those of each lie."""
    _refuse_pictures(splits["train"], {"input": features, "target": _names(dataset.target)})
    found, lengths = dict[str, list[np.ndarray]](), [len(split) for split in splits.values()]
    for part, split in splits.items():
        path, columns = (
            Path(dataset.path) / part,
            {name: _column(split, name) for name in (*features, *_names(dataset.target))},
        )
        values, feature_names = table_cells.numbers_of(path, columns, features)
        found.setdefault("features", []).append(values)
        if task.TARGETS != "class":
            answers, target_names = table_cells.numbers_of(path, columns, _names(dataset.target))
            found.setdefault("targets", []).append(answers)
            if task.TARGETS == "labels":
                table_cells.check_labels(path, target_names, answers)
    names: Sequence[str] = ()
    if task.TARGETS == "class":
        known, numbers = _classes(dataset, splits)
        found["targets"] = [np.array(each, np.int64) for each in numbers.values()]
        target_names, names = _names(dataset.target), [str(name) for name in known]
    whole = {key: np.concatenate(values) for key, values in found.items()}
    ends = np.cumsum(lengths)
    parts = {
        part: np.arange(end - size, end)
        for part, end, size in zip(splits, ends, lengths, strict=True)
    }
    return (
        table.Rows(whole["features"], whole["targets"], feature_names, target_names, tuple(names)),
        parts,
    )


def _refuse_twice(inputs: Sequence[str], targets: Sequence[str]) -> None:
    """Raise ConfigError for a column that is named twice, or to be predicted from itself."""
    for key, names in (("input", inputs), ("target", targets)):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"dataset.{key}: names {twice} twice; name it once")
    if both := next((name for name in inputs if name in targets), None):
        raise ConfigError(
            f"dataset.input={both}: is one of dataset.target, to be predicted; leave it out"
        )


def _refuse_pictures(split: Any, chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise DataError for a column of pictures: their pixels would be taken for numbers."""
    for key, names in chosen.items():
        for name in names:
            if type(split.features[name]).__name__ == "Image":
                raise DataError(
                    f"dataset.{key}={name}: holds images, not numbers; name a column of numbers"
                )


def _names(columns: str | Sequence[str]) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


class _Rows(Dataset[tuple[Any, Any]]):
    """(picture, target) of a split."""

    def __init__(self, split: Any, column: str, numbers: Sequence[Any]) -> None:
        self._split, self._column, self._numbers = split.select_columns([column]), column, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        picture = self._split[index][self._column]
        if picture is None:
            raise DataError(f"dataset.input={self._column}: row {index} has no image; remove it")
        return picture, self._numbers[index]


class _Pairs(Dataset[tuple[Any, Any]]):
    """(picture, mask) of a split."""

    def __init__(self, split: Any, image: str, mask: str) -> None:
        self._split, self._columns = (
            split.select_columns([image, mask]),
            {"input": image, "target": mask},
        )

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._split[index]
        for key, column in self._columns.items():
            if row[column] is None:
                raise DataError(f"dataset.{key}={column}: row {index} has no picture; remove it")
        return row[self._columns["input"]], row[self._columns["target"]]


def _splits(dataset: HuggingFace) -> dict[str, Any]:
    """Of train, val and test those that there are."""
    found = _loaded(dataset)
    if not isinstance(found, Mapping):  # a single one, by save_to_disk
        found = {"train": found}
    parts = {
        part: next((found[name] for name in names if name in found), None)
        for part, names in _PARTS.items()
    }
    splits = {part: split for part, split in parts.items() if split is not None and len(split)}
    if "train" not in splits:
        raise DataError(
            f"dataset.path={dataset.path}: has no rows to train on; its splits are"
            f" {', '.join(found)}"
        )
    features = splits["train"].features
    _refuse_twice(_names(dataset.input), _names(dataset.target))
    chosen = [(key, name) for key in ("input", "target") for name in _names(getattr(dataset, key))]
    for key, column in chosen:
        if wrong := [part for part, split in splits.items() if column not in split.features]:
            known = ", ".join(features)
            raise ConfigError(
                f"dataset.{key}={column}: {wrong[0]} has no such column; its columns are {known}"
            )
    if isinstance(dataset.input, str) and type(features[dataset.input]).__name__ != "Image":
        raise DataError(
            f"dataset.input={dataset.input}: holds {_told(features[dataset.input])}, not images; "
            f"for rows of numbers name a list of columns, as in 'dataset.input=[{dataset.input}]'"
        )
    return splits


def _loaded(dataset: HuggingFace) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import
    try:
        # Else tqdm makes a lock for several processes, of which Python says at the end of a failed
        # run that it is left.
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(NEEDS) from error
    library.disable_progress_bars()
    folder = Path(dataset.path)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            return library.load_from_disk(str(folder))
        return library.load_dataset(str(folder), cache_dir=str(cache_dir() / "huggingface"))
    except Exception as error:  # what Arrow, Pillow and the library raise is of many kinds
        told = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"dataset.path={dataset.path}: cannot be read as a dataset ({told}); mend the folder"
        ) from error


def _column(split: Any, name: str) -> list[Any]:
    """Its cell of each row."""
    return list(split.select_columns([name])[name])


def _class_names(split: Any, target: str, values: Sequence[Any]) -> list[Any]:
    """Of a ClassLabel its names, else the texts or integers that there are, in order."""
    feature = split.features[target]
    if type(feature).__name__ == "ClassLabel":
        return list(feature.names)
    if {type(value) for value in values} not in ({int}, {str}):
        wrong = next(
            (value for value in values if type(value) not in (int, str)), "texts and integers"
        )
        raise DataError(
            f"dataset.target={target}: holds {wrong!r}; a class is an integer or a text"
        )
    return sorted(set(values))


def _by_name(split: Any, names: Sequence[Any], values: list[Any], target: str) -> list[Any]:
    """The targets of a split whose ClassLabel counts the classes in another order than train's by
    their names.
    """
    own = getattr(split.features[target], "names", None)
    if own is None or list(own) == list(names):
        return values
    return [
        own[value] if isinstance(value, int) and 0 <= value < len(own) else value
        for value in values
    ]


def _numbers(values: Sequence[Any], names: Sequence[Any], target: str, part: str) -> list[int]:
    """The class of each row by its number."""
    known = {name: number for number, name in enumerate(names)}
    found = []
    for row, value in enumerate(values):
        number = known.get(
            value, value if isinstance(names[0], str) and isinstance(value, int) else None
        )
        if number is None or not 0 <= number < len(names):
            raise DataError(
                f"dataset.target={target}: row {row} of {part} has {value!r}, which is no class of"
                " train"
            )
        found.append(number)
    return found


def _told(feature: Any) -> str:
    return getattr(feature, "dtype", None) or type(feature).__name__
