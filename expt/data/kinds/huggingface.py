"""A Hugging Face dataset in a folder: of save_to_disk, parquet, csv, or an imagefolder.

Nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Count, Key, Name, Size
from expt.data import kinds
from expt.data.cache import digest
from expt.data.checksums import Checksums, of_files, sampled
from expt.data.folders import files_below, left_out, of_suffix, report_left_out
from expt.data.kinds.table import names_of, notes_of, problems_of_columns, wanted_columns
from expt.data.pictures import MODES, Picture, look_at, open_picture, picture_suffixes, report_found
from expt.data.rows import Wanted, cached_rows, rows_of, targets_as_trained, with_logs
from expt.errors import ConfigError, DataError
from expt.features import ROLES, Anything, Classes, Labels, Mask, Numbers, Tokens
from expt.late import np, torch
from expt.machine import usable_cpus

if TYPE_CHECKING:
    from expt.data.hub_splits import SplitTable
    from expt.data.overlap import Digests
    from expt.data.source import Source

_READ = (".arrow", ".csv", ".json", ".jsonl", ".md", ".parquet", ".tar", ".tsv", ".yaml", ".zip")
"""The suffixes of files that the library reads, apart from pictures, and of descriptions."""
_NEEDS = "dataset=huggingface: needs the package datasets; pip install 'expt[datasets]'"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(kinds.Images, kinds.OfTexts, kinds.OfPictures):
    """Images by the name of their column; rows of numbers, by a list of columns; or texts."""

    name: Literal["huggingface"]
    path: kinds.Place
    input: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    target: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    categories: Annotated[tuple[Name, ...], Key(only_if={"dataset.categories": IS_SET})] = ()
    max_categories: Annotated[Count, Key(result="none")] = 100
    standardise: kinds.Standardise = True
    standardise_targets: kinds.Standardise = False
    target_transform: kinds.TargetTransform = None
    group: kinds.Group = None
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    draft: bool = True
    num_workers: kinds.Readers
    splits: Annotated[kinds.SplitNames, Key(evaluate=True, only_if={"dataset.splits": IS_SET})] = (
        None
    )

    OFFERS = (Classes, Labels, Numbers, Mask, Tokens)

    @property
    def has_rows(self) -> bool:
        """True if its samples are rows of numbers or texts."""
        return not isinstance(self.input, str) or bool(self.texts[1])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that have the inputs."""
        return self.texts[1] or names_of(self.input)

    def columns_of(self, task: Any, *, learns: bool) -> dict[str, tuple[str, ...]]:
        """Return the columns of a run, by the keys that name them."""
        role, texts = self.texts
        found = dict[str, tuple[str, ...]]()
        for key, name in zip(ROLES.get(role, ()), texts, strict=False):
            found[key] = (name,)
        found = found or {"input": self.inputs}
        if not self.is_causal(task):
            found["target"] = names_of(self.target)
        if self.group and learns:
            found["group"] = (self.group,)
        return found

    def problems(self, task: Any) -> list[str]:
        standardises, transform = self.standardise_targets, self.target_transform
        found = self.problems_of_texts(task)
        found += problems_of_columns("target", self.target, standardises, task, transform)
        return [*found, *(self._of_rows() if self.has_rows else self._of_pictures(task))]

    def _of_rows(self) -> Iterator[str]:
        """Yield the problems of keys where samples are rows."""
        if self.image_size or self.transforms:
            fault = "are of images, and dataset.input names columns of numbers; leave them out"
            yield f"dataset.image_size and transforms: {fault}"

    def _of_pictures(self, task: Any) -> Iterator[str]:
        """Yield the problems of keys where samples are pictures."""
        if self.target_transform:
            yield f"dataset.target_transform={self.target_transform}: is for rows; use null"
        if self.standardise_targets and task.takes is not Numbers:
            fix = f"or name columns of numbers, e.g. 'dataset.input=[{self.input}]'"
            fault = f"is of numbers to predict; use task=regression, {fix}"
            yield f"dataset.standardise_targets=true: {fault}"
        if task.takes is Mask:
            yield from self.problems_of_masks(task)
            if self.transforms:
                yield "dataset.transforms: move images without their masks; leave them out"

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig; pictures are looked at once they are opened."""
        names = self.names()
        read = of_suffix(names, (*picture_suffixes(), *_READ))
        report_left_out(self.path, left_out(names, read), "picture or table")

    def names(self) -> list[str]:
        """Return the files. Raise ConfigError without the library, DataError for none."""
        found = importlib.util.find_spec("datasets")
        if found is None or found.origin is None:  # a folder of that name
            raise ConfigError(_NEEDS)
        names = sorted(os.path.relpath(file, self.path) for file in files_below(self.path))
        if not names:  # hidden ones are a download's
            fix = "download one there, e.g. hf download NAME --repo-type dataset --local-dir FOLDER"
            fault = f"holds no dataset; nothing is fetched from the Hub: {fix}"
            raise DataError(f"dataset.path={self.path}: {fault}")
        return names

    def fingerprint(self) -> str:
        return self.with_tokenizer(self.content())

    def content(self) -> str:
        """Return a digest of the files, without the tokenizer's."""
        return of_files(Path(self.path), self.names())

    def may_validate(self) -> bool:
        return True

    def opening(self) -> Literal["at once", "slowly", "in turn"]:
        return "slowly"

    def look(self, source: Source) -> None:
        """Look at the pictures of each part, of very many at some, once for a content."""
        parts = source.pictures
        if not parts:
            return
        names = ([f"{part} {index}" for index in range(len(each))] for part, each in parts.items())
        samples = [(name,) for of_part in names for name in sampled(of_part)]
        first = next(iter(parts.values()))
        size = first.size
        how = f"{self.input} {self.target} {first.channels} {getattr(first, 'values', None)}"

        def look_at_one(name: str) -> Picture:
            part, index = name.split()
            found: Picture = parts[part].look(int(index), f"{part}: sample {index}")
            return found

        with Checksums(f"pictures-{self.fingerprint()}") as sums:
            found = look_at(sums, how, samples, look_at_one, usable_cpus(), fitted=size, key=str)
        report_found(self.label, found, size)

    def open(self, how: kinds.Opening) -> Source:
        """Return its parts, by the names of its splits: images, or rows.

        Raise ConfigError for a column that it has not, DataError for one that holds something else,
        and for a folder that is not a dataset.
        """
        return self._open_rows(how) if self.has_rows else self._open_pictures(how)

    def _open_rows(self, how: kinds.Opening) -> Source:
        from expt.data.hub_splits import SplitTable
        from expt.data.table_source import of_rows

        columns, learns = self._wanted(how), how.trained_on is None
        place = str(Path(self.path).resolve())
        words = digest((place, repr(columns), str(learns), repr(self.splits)))
        opened, content = functools.partial(SplitTable, self, how.task, learns), self.content()
        rows = cached_rows(f"rows-{words}.{content}", lambda file: opened().read(columns, file))
        rows = with_logs(rows, self.target_transform, Path(self.path).name)
        if columns.texts:
            from expt.data import texts

            is_causal = self.is_causal(how.task)
            rows = rows._replace(read=texts.read(self, opened, content, is_causal=is_causal))
        return of_rows(self, rows, rows.places(), how, [*notes_of(rows, are_chosen=True)])

    def _open_pictures(self, how: kinds.Opening) -> Source:
        from expt.data.hub_splits import SplitTable
        from expt.data.images import of_masks

        table = SplitTable(self, how.task, learns=how.trained_on is None)
        has_masks, rows = how.task.takes is Mask, dict[str, _PictureRows]()
        for part, split in table.splits.items():
            (image,), (target, *_) = names_of(self.input), names_of(self.target)
            masks = _PictureColumn(split, target, is_mask=True) if has_masks else None
            rows[part] = _PictureRows(_PictureColumn(split, image), masks)
        return dataclasses.replace(
            of_masks(self, rows, how) if has_masks else self._with_targets(table, rows, how),
            groups=table.groups(self.group) if self.group else {},
            digests=lambda part: rows[part].pictures.digests(Path(self.path)),
            notes=table.notes,
        )

    def _with_targets(
        self, table: SplitTable, pictures: Mapping[str, _PictureRows], how: kinds.Opening
    ) -> Source:
        """Return pictures with classes, labels or numbers."""
        from expt.data.images import of_targets, pictures_of

        columns = self._wanted(how)._replace(group=None)
        if how.task.takes is Anything and isinstance(self.target, str):  # a custom task
            columns = columns._replace(takes=Classes)
        with tempfile.TemporaryFile() as file:
            rows = rows_of(*table.read(columns, file), file)
        if how.trained_on is not None:
            rows = targets_as_trained(how.trained_on.targets, rows, "dataset.target")
        targets = {part: torch.from_numpy(rows.targets[at]) for part, at in rows.places().items()}
        parts = pictures_of(self, pictures, targets)
        return of_targets(self, parts, rows.class_names, rows.target_names, how)

    def _wanted(self, how: kinds.Opening) -> Wanted:
        features = () if isinstance(self.input, str) else self.input
        return wanted_columns(self, self.target, features, how.task, how.trained_on)


@dataclasses.dataclass(frozen=True)
class _PictureRows:
    """Pairs of a picture and its mask, if there are masks, else of a picture and None."""

    pictures: _PictureColumn
    masks: _PictureColumn | None

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pictures[index], None if self.masks is None else self.masks[index]


class _PictureColumn:
    """The pictures in a column of a split, each as `open_picture` reads it: mostly not decoded."""

    def __init__(self, split: Any, name: str, *, is_mask: bool = False) -> None:
        self._name, self._feature, self._is_mask = name, split.features[name], is_mask
        raw = dataclasses.replace(self._feature, decode=False)
        self._cells = split.select_columns([name]).cast_column(name, raw)

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: int) -> Any:
        if (cell := self._cells[index][self._name]) is None:
            raise DataError(f"column {self._name}: row {index} has no image; remove it")
        path, content, mode = cell["path"], cell["bytes"], self._feature.mode
        is_in_archive = not (content or (path and os.path.isfile(path)))
        if is_in_archive or (mode and self._is_mask):
            return self._feature.decode_example(cell)
        source = io.BytesIO(content) if content else path
        if not mode:
            return source
        return open_picture(
            source, mode if mode in MODES.values() else None, f"column {self._name}"
        )

    def digests(self, folder: Path) -> Digests:
        """Return the digests of the pictures, of large ones by some of their bytes."""
        from expt.data.overlap import Digests, digest_of_bytes, digests_of_files

        found = list[Any]()
        with Checksums.below(folder) as sums:
            for batch in self._cells.with_format("arrow").iter(1000):
                cells = batch.column(0).combine_chunks()
                values = digests_of_files(cells.field("path").to_pylist(), sums).values
                for row, content in enumerate(cells.field("bytes")):
                    if content.is_valid:
                        values[row] = digest_of_bytes(content.as_buffer())
                found.append(values)
        return Digests(np.concatenate([np.array(each, np.uint64) for each in found]))
