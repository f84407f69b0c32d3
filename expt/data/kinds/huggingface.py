"""A Hugging Face dataset in a folder: what save_to_disk wrote, parquet, csv, or an imagefolder.

Nothing is fetched.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Size
from expt.data import columns
from expt.data.cache import cache_dir
from expt.data.checksums import of_files
from expt.data.image_files import MODES, files_below
from expt.data.kind import Images, Place, Readers, Standardise, problems_of_masks
from expt.data.kinds.table import Rows, names_of, problems_of_columns, refuse_twice
from expt.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from expt.data.images import Pictures
    from expt.data.source import Source

_PARTS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
_GREY = ("1", "L")
_NEEDS = "dataset=huggingface: needs the package datasets; pip install 'expt[datasets]'"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(Images):
    """Images by the name of their column; or rows of numbers, by a list of columns."""

    name: Literal["huggingface"]
    path: Place
    input: str | Annotated[tuple[str, ...], Field(min_length=1)]
    target: str | Annotated[tuple[str, ...], Field(min_length=1)]
    standardise: Standardise = True
    standardise_targets: Standardise = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Readers

    TASKS = ("classification", "multilabel", "regression", "segmentation")
    names_classes = True
    may_have_val = True

    @property
    def has_rows(self) -> bool:
        """See DatasetConfig."""
        return not isinstance(self.input, str)

    def has_masks(self, segments: bool) -> bool:
        """See DatasetConfig."""
        return segments and not self.has_rows

    @classmethod
    def noun(cls, settings: Mapping[str, Any]) -> str:
        """See DatasetConfig."""
        return "image" if isinstance(settings.get("input"), str) else "row"

    def problems(self, task: Any) -> list[str]:
        """See DatasetConfig."""
        problems = problems_of_columns("target", self.target, self.standardise_targets, task)
        if self.has_rows and (self.image_size or self.transforms):
            problems.append(
                "dataset.image_size and transforms: are of images, and dataset.input names columns"
                " of numbers; leave them out"
            )
        if self.standardise_targets and not self.has_rows and task.TARGETS != "numbers":
            problems.append(
                "dataset.standardise_targets=true: is of numbers to predict; use task=regression,"
                f" or name columns of numbers, as in 'dataset.input=[{self.input}]'"
            )
        masks = problems_of_masks(self, task) if self.has_masks(task.TARGETS == "mask") else []
        return [*dict.fromkeys(problems), *masks]

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """Raise ConfigError without the library, DataError without the folder or for none."""
        found = importlib.util.find_spec("datasets")
        if found is None or found.origin is None:  # a folder of that name
            raise ConfigError(_NEEDS)
        if not self._files():
            raise DataError(
                f"dataset.path={self.path}: holds no dataset; nothing is fetched from the Hub:"
                " download one there, as in hf download NAME --repo-type dataset --local-dir FOLDER"
            )

    def fingerprint(self) -> str:
        """See DatasetConfig."""
        self.prepare()
        return of_files(Path(self.path), self._files())

    def _files(self) -> list[str]:
        """Return its files below the folder, sorted; without hidden ones, such as a download's."""
        names = (os.path.relpath(path, self.path) for path in files_below(self.path))
        return sorted(name for name in names if "." not in {part[0] for part in Path(name).parts})

    def open(
        self,
        task: Any,
        device: torch.device,
        num_workers: int,
        trained_on: Mapping[str, Any] | None = None,
    ) -> Source:
        """Return its parts, by the names of its splits: images, or rows.

        Raise ConfigError for a column that it has not, DataError for one that holds something else,
        and for a folder that is no dataset.
        """
        import torch

        from expt.data.images import of_pictures
        from expt.data.rows import of_rows

        splits = _splits(self)
        if not isinstance(self.input, str):
            rows, parts = _table(self, self.input, splits, task)
            return of_rows(self, rows, parts, device, trained_on)
        if task.TARGETS == "mask":
            return _masks(self, self.input, splits, task, num_workers)
        if task.TARGETS in ("numbers", "labels"):
            scales = None if trained_on is None else trained_on.get("standardised", {})
            return _numbered(self, self.input, splits, task, num_workers, scales)
        names, numbers = _classes(self, splits)
        sets = _pictures(self, self.input, splits, numbers)
        classes = torch.tensor(numbers["train"])
        return of_pictures(sets, tuple(map(str, names)), classes, num_workers)


def _pictures(
    dataset: HuggingFace,
    column: str,
    splits: Mapping[str, Any],
    targets: Mapping[str, Any],
    target: Any = int,
) -> dict[str, Pictures]:
    from expt.data.images import Pictures

    rows: dict[str, Any] = {
        part: _Rows(split, column, targets[part]) for part, split in splits.items()
    }
    mode = "L" if rows["train"][0][0].mode in _GREY else "RGB"
    mode = MODES[dataset.channels] if dataset.channels else mode
    return {part: Pictures(each, mode, dataset.image_size, target) for part, each in rows.items()}


def _numbered(
    dataset: HuggingFace,
    column: str,
    splits: Mapping[str, Any],
    task: Any,
    num_workers: int,
    scales: Any,
) -> Source:
    """Return images with numbers to predict, or labels."""
    import torch

    from expt.data.images import of_numbers

    targets, names = dict[str, torch.Tensor](), tuple[str, ...]()
    _refuse_pictures(splits["train"], {"target": names_of(dataset.target)})
    for part, split in splits.items():
        path = Path(dataset.path) / part
        cells = {name: _column(split, name) for name in names_of(dataset.target)}
        values, names = columns.numbers_of(path, cells, names_of(dataset.target))
        if task.TARGETS == "labels":
            columns.check_labels(path, names, values)
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
    task: Any,
    num_workers: int,
) -> Source:
    from expt.data.masks import MaskPictures, of_mask_pictures, values_of

    values = values_of(dataset, task)
    (target,) = names_of(dataset.target)
    if type(splits["train"].features[target]).__name__ != "Image":
        told = _told(splits["train"].features[target])
        raise DataError(
            f"dataset.target={target}: holds {told}, not masks; name a column of images"
        )
    sets = {}
    for part, split in splits.items():
        pairs: Any = _Pairs(split, column, target)
        sets[part] = MaskPictures(
            pairs, values, channels=dataset.channels or 3, size=dataset.image_size
        )
    return of_mask_pictures(sets, values.num_classes, num_workers)


def _classes(
    dataset: HuggingFace, splits: Mapping[str, Any]
) -> tuple[list[Any], dict[str, list[int]]]:
    """Return the names of the classes, and by part the class of each row."""
    (target,) = names_of(dataset.target)
    classes = {part: _column(split, target) for part, split in splits.items()}
    names = _class_names(splits["train"], target, classes["train"])
    named = {part: _by_name(splits[part], names, classes[part], target) for part in splits}
    return names, {part: _numbers(values, names, target, part) for part, values in named.items()}


def _table(
    dataset: HuggingFace, features: Sequence[str], splits: Mapping[str, Any], task: Any
) -> tuple[Rows, dict[str, np.ndarray]]:
    """Return the rows of all parts one after the other, and where those of each are."""
    import numpy as np

    _refuse_pictures(splits["train"], {"input": features, "target": names_of(dataset.target)})
    found, lengths = dict[str, list[np.ndarray]](), [len(split) for split in splits.values()]
    for part, split in splits.items():
        path = Path(dataset.path) / part
        cells = {name: _column(split, name) for name in (*features, *names_of(dataset.target))}
        values, feature_names = columns.numbers_of(path, cells, features)
        found.setdefault("features", []).append(values)
        if task.TARGETS != "class":
            answers, target_names = columns.numbers_of(path, cells, names_of(dataset.target))
            found.setdefault("targets", []).append(answers)
            if task.TARGETS == "labels":
                columns.check_labels(path, target_names, answers)
    names: Sequence[str] = ()
    if task.TARGETS == "class":
        known, numbers = _classes(dataset, splits)
        found["targets"] = [np.array(each, np.int64) for each in numbers.values()]
        target_names, names = names_of(dataset.target), [str(name) for name in known]
    whole = {key: np.concatenate(values) for key, values in found.items()}
    ends = np.cumsum(lengths)
    parts = {
        part: np.arange(end - size, end)
        for part, end, size in zip(splits, ends, lengths, strict=True)
    }
    return (
        Rows(whole["features"], whole["targets"], feature_names, target_names, tuple(names)),
        parts,
    )


def _refuse_pictures(split: Any, chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise DataError for a column of pictures: their pixels would be taken for numbers."""
    for key, names in chosen.items():
        for name in names:
            if type(split.features[name]).__name__ == "Image":
                raise DataError(
                    f"dataset.{key}={name}: holds images, not numbers; name a column of numbers"
                )


class _Rows:
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


class _Pairs:
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
    """Return those of train, val and test that there are."""
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
    refuse_twice({"input": names_of(dataset.input), "target": names_of(dataset.target)})
    chosen = [
        (key, name) for key in ("input", "target") for name in names_of(getattr(dataset, key))
    ]
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
        raise ConfigError(_NEEDS) from error
    library.disable_progress_bars()
    folder = Path(dataset.path)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            return library.load_from_disk(str(folder))
        return library.load_dataset(str(folder), cache_dir=str(cache_dir() / "huggingface"))
    except Exception as error:  # what Arrow, Pillow and the library raise is of many kinds
        told = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"dataset.path={dataset.path}: cannot be read as a dataset ({told})"
        ) from error


def _column(split: Any, name: str) -> list[Any]:
    """Return the cell of each row."""
    return list(split.select_columns([name])[name])


def _class_names(split: Any, target: str, values: Sequence[Any]) -> list[Any]:
    """Return a ClassLabel's names, else the texts or integers that there are, in order."""
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
    """Return targets by their names, if a split's ClassLabel counts them otherwise than train's."""
    own = getattr(split.features[target], "names", None)
    if own is None or list(own) == list(names):
        return values
    return [
        own[value] if isinstance(value, int) and 0 <= value < len(own) else value
        for value in values
    ]


def _numbers(values: Sequence[Any], names: Sequence[Any], target: str, part: str) -> list[int]:
    """Return the class of each row by its number."""
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
