"""A Hugging Face dataset in a folder: what save_to_disk wrote, parquet, csv, or an imagefolder.

Nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Name, Size
from expt.data import columns
from expt.data.cache import cache_dir, of_files
from expt.data.image_files import (
    MODES,
    PARTS,
    left_out,
    names_below,
    of_suffix,
    open_picture,
    picture_suffixes,
    report_left_out,
)
from expt.data.kinds import Images, Place, Readers, Standardise, problems_of_masks
from expt.data.kinds.table import names_of, problems_of_columns
from expt.data.rows import Chosen, Rows, refuse_twice
from expt.data.table_files import MISSING
from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np
    import torch

    from expt.data.source import Source

_READ = (".arrow", ".csv", ".json", ".jsonl", ".md", ".parquet", ".tar", ".tsv", ".yaml", ".zip")
"""The suffixes of what the library reads apart from pictures, and of what describes it."""
_NEEDS = "dataset=huggingface: needs the package datasets; pip install 'expt[datasets]'"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(Images):
    """Images by the name of their column; or rows of numbers, by a list of columns."""

    name: Literal["huggingface"]
    path: Place
    input: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    target: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    standardise: Standardise = True
    standardise_targets: Standardise = False
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    draft: bool = True
    num_workers: Readers

    TASKS = ("classification", "multilabel", "regression", "segmentation")
    names_classes = True
    may_have_val = True
    looks_when_opened = True

    @property
    def has_rows(self) -> bool:
        return not isinstance(self.input, str)

    def has_masks(self, segments: bool) -> bool:
        return segments and not self.has_rows

    @classmethod
    def noun(cls, settings: Mapping[str, Any]) -> str:
        return "image" if isinstance(settings.get("input"), str) else "row"

    def problems(self, task: Any) -> list[str]:
        problems = problems_of_columns("target", self.target, self.standardise_targets, task)
        if self.has_rows and (self.image_size or self.transforms):
            problems.append(
                "dataset.image_size and transforms: are of images, and dataset.input names columns"
                " of numbers; leave them out"
            )
        if self.standardise_targets and not self.has_rows and task.TARGETS != "numbers":
            problems.append(
                "dataset.standardise_targets=true: is of numbers to predict; use task=regression,"
                f" or name columns of numbers, e.g. 'dataset.input=[{self.input}]'"
            )
        masks = problems_of_masks(self, task) if self.has_masks(task.TARGETS == "mask") else []
        return [*problems, *masks]

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig; pictures are looked at once they are opened."""
        names = self._names()
        read = of_suffix(names, (*picture_suffixes(), *_READ))
        report_left_out(self.path, left_out(names, read), "picture or table")

    def _names(self) -> list[str]:
        """Return the files. Raise ConfigError without the library, DataError for none."""
        found = importlib.util.find_spec("datasets")
        if found is None or found.origin is None:  # a folder of that name
            raise ConfigError(_NEEDS)
        if not (names := names_below(self.path)):  # hidden ones are a download's
            raise DataError(
                f"dataset.path={self.path}: holds no dataset; nothing is fetched from the Hub:"
                " download one there, e.g. hf download NAME --repo-type dataset --local-dir FOLDER"
            )
        return names

    def fingerprint(self) -> str:
        return of_files(Path(self.path), self._names())

    def open(
        self,
        task: Any,
        device: torch.device,
        num_workers: int,
        trained_on: Mapping[str, Any] | None = None,
    ) -> Source:
        """Return its parts, by the names of its splits: images, or rows.

        Raise ConfigError for a column that it has not, DataError for one that holds something else,
        and for a folder that is not a dataset.
        """
        import torch

        from expt.data.images import of_numbers, of_pictures, pictures_of
        from expt.data.masks import of_masks
        from expt.data.memory import of_rows

        splits = _splits(self, task, learns=trained_on is None)
        if self.has_rows:
            rows, parts = _table(self, splits, task)
            return of_rows(self, rows, parts, device, trained_on)
        if task.TARGETS == "mask":
            masks = {part: _Rows(split, self, None) for part, split in splits.items()}
            return of_masks(masks, self, task, num_workers)
        found, target_names, class_names = _targets(self, splits, task)
        targets = {part: torch.from_numpy(each) for part, each in found.items()}
        pairs = {part: _Rows(split, self, targets[part]) for part, split in splits.items()}
        pictures = pictures_of(pairs, self)
        if class_names:
            return of_pictures(pictures, class_names, targets.get("train"), num_workers)
        return of_numbers(
            pictures,
            targets.get("train", next(iter(targets.values()))).float(),
            target_names,
            num_workers,
            scales=None if trained_on is None else trained_on.get("standardised", {}),
            standardises=self.standardise_targets,
        )


def _targets(
    dataset: HuggingFace, splits: Mapping[str, Any], task: Any
) -> tuple[dict[str, np.ndarray], tuple[str, ...], tuple[str, ...]]:
    """Return the targets of each part, and the names of the targets and of the classes."""
    names = target_names = names_of(dataset.target)
    is_class = not dataset.has_rows and len(names) == 1  # to a custom task
    if task.TARGETS == "class" or (task.TARGETS == "any" and is_class):
        class_names, classes = _classes(names[0], splits)
        return classes, names, class_names
    found: dict[str, np.ndarray] = {}
    for part, split in splits.items():
        found[part], target_names = _numbers(Path(dataset.path) / part, split, names)
        if task.TARGETS == "labels":
            columns.check_labels(Path(dataset.path) / part, target_names, found[part])
    return found, target_names, ()


def _classes(
    target: str, splits: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Return the names of the classes, and by part the class of each row, by its name."""
    import numpy as np

    named = {part: getattr(split.features[target], "names", None) for part, split in splits.items()}
    cells = dict[str, list[Any]]()
    for part, split in splits.items():
        # A split may count the classes in another order, or have only their numbers.
        known = dict(enumerate(named[part] or named.get("train") or ()))
        found = _column(split, target)
        cells[part] = [known.get(cell, cell) if type(cell) is int else cell for cell in found]
    first = "train" if "train" in cells else next(iter(cells))
    train = cells.get("train") or [*itertools.chain.from_iterable(cells.values())]
    unnamed = () if named[first] else train  # what is not one of the names is found below
    odd = [cell for cell in unnamed if type(cell) not in (int, str) or cell in MISSING]
    if odd or len({*map(type, unnamed)}) > 1:
        what = repr(odd[0]) if odd else "both kinds"
        raise DataError(
            f"dataset.target={target}: holds {what}; a class is an integer or a text: give such"
            " rows one, or remove them"
        )
    classes = list(named[first] or sorted({*train}))
    numbers = {name: number for number, name in enumerate(classes)}
    wrong = {
        part: [row for row, cell in enumerate(each) if cell not in numbers]
        for part, each in cells.items()
    }
    if problems := [
        f"dataset.target={target}: row {rows[0]} of {part} has {cells[part][rows[0]]!r}, which is"
        f" not a class of train ({len(rows)} such rows)"
        for part, rows in wrong.items()
        if rows
    ]:
        raise DataError(problems)
    places = {part: np.array([numbers[cell] for cell in each]) for part, each in cells.items()}
    return tuple(map(str, classes)), places


def _table(
    dataset: HuggingFace, splits: Mapping[str, Any], task: Any
) -> tuple[Rows, dict[str, np.ndarray]]:
    """Return the rows of all parts one after the other, and where those of each are."""
    import numpy as np

    names, features, places = [*dataset.input], list[np.ndarray](), dict[str, np.ndarray]()
    for part, split in splits.items():
        values, feature_names = _numbers(Path(dataset.path) / part, split, names)
        places[part] = np.arange(len(values)) + sum(map(len, features))
        features.append(values)
    targets, target_names, class_names = _targets(dataset, splits, task)
    answers = np.concatenate([*targets.values()])
    whole = Chosen(np.concatenate(features)), answers if class_names else Chosen(answers)
    return Rows(*whole, feature_names, target_names, class_names), places


def _numbers(path: Path, split: Any, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return columns as numbers, and their names. Raise DataError for what is none."""
    import numpy as np

    cells = dict[str, Any]()
    for name in names:
        column = _column(split, name)
        try:
            cells[name] = np.asarray(column)
        except ValueError:  # lists of unequal lengths
            cells[name] = np.fromiter(column, object, len(column))
    return columns.numbers_of(path, cells)


class _Rows:
    """(picture, target) of a split; without targets these are pictures, too.

    Pictures are given as their paths or bytes: `open_picture` reads all.
    """

    def __init__(self, split: Any, dataset: HuggingFace, targets: Any) -> None:
        self._image, self._mask = names_of(dataset.input)[0], names_of(dataset.target)[0]
        chosen = [self._image] if targets is not None else [self._image, self._mask]
        features = split.features
        self._features = {name: features[name] for name in chosen}
        self._targets, self._split = targets, split.select_columns(chosen)
        for name in chosen:
            feature = dataclasses.replace(features[name], decode=False)
            self._split = self._split.cast_column(name, feature)

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._split[index]
        for column, picture in row.items():
            if picture is None:
                raise DataError(f"column {column}: row {index} has no image; remove it")
        image = self._source(row, self._image)
        if self._targets is not None:
            return image, self._targets[index]
        return image, self._source(row, self._mask)

    def _source(self, row: Mapping[str, Any], column: str) -> Any:
        path, content, feature = row[column]["path"], row[column]["bytes"], self._features[column]
        in_archive, is_mask = not (content or os.path.isfile(path)), column != self._image
        if in_archive or (feature.mode and is_mask):
            return feature.decode_example({"path": path, "bytes": content})
        source = path if content is None else io.BytesIO(content)
        if not feature.mode:
            return source
        mode = feature.mode if feature.mode in MODES.values() else None
        return open_picture(source, mode, f"column {column}")


def _splits(dataset: HuggingFace, task: Any, *, learns: bool) -> dict[str, Any]:
    """Return those of train, val and test that there are, once their columns are checked."""
    found = _loaded(dataset)
    if not isinstance(found, Mapping):  # a single one, by save_to_disk
        found = {"train": found}
    there = {
        part: next((found[name] for name in names if name in found), ())
        for part, names in PARTS.items()
    }
    splits: dict[str, Any] = {part: split for part, split in there.items() if len(split)}
    if not splits or (learns and "train" not in splits):
        what = "train on" if learns else "measure"
        raise DataError(
            f"dataset.path={dataset.path}: has no rows to {what}; its splits are {', '.join(found)}"
        )
    features = next(iter(splits.values())).features
    chosen = {"input": names_of(dataset.input), "target": names_of(dataset.target)}
    refuse_twice(chosen)
    for key, names in chosen.items():
        wants_images = not dataset.has_rows if key == "input" else task.TARGETS == "mask"
        for column in names:
            if lacking := [part for part, split in splits.items() if column not in split.features]:
                raise ConfigError(
                    f"dataset.{key}={column}: {lacking[0]} has no such column; its columns are"
                    f" {', '.join(features)}"
                )
            kind = type(features[column]).__name__
            if (kind == "Image") != wants_images:
                raise DataError(
                    f"dataset.{key}={column}: holds {getattr(features[column], 'dtype', kind)}, and"
                    f" is to hold {'images' if wants_images else 'numbers'}"
                )
    return splits


def _loaded(dataset: HuggingFace) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import
    # Else tqdm makes a lock for several processes, which Python reports when a run has failed.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    library: Any = importlib.import_module("datasets")
    library.disable_progress_bars()
    folder = Path(dataset.path)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            return library.load_from_disk(str(folder))
        # The library itself takes a file for unchanged by its time.
        kept = cache_dir() / "huggingface" / dataset.fingerprint()
        return library.load_dataset(str(folder), cache_dir=str(kept))
    except Exception as error:  # what Arrow, Pillow and the library raise is of many kinds
        why = first_line(error)
        raise DataError(f"dataset.path={folder}: cannot be read as a dataset ({why})") from error


def _column(split: Any, name: str) -> list[Any]:
    return list(split.select_columns([name])[name])
