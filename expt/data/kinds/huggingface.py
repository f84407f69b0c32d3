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
from collections.abc import Mapping
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
        problems = self.problems_of_texts(task)
        problems += problems_of_columns("target", self.target, standardises, task, transform)
        if transform and not self.has_rows:
            problems.append(f"dataset.target_transform={transform}: is for rows; use null")
        if self.has_rows and (self.image_size or self.transforms):
            fault = "are of images, and dataset.input names columns of numbers; leave them out"
            problems.append(f"dataset.image_size and transforms: {fault}")
        if self.standardise_targets and not self.has_rows and task.takes is not Numbers:
            fix = f"or name columns of numbers, e.g. 'dataset.input=[{self.input}]'"
            fault = f"is of numbers to predict; use task=regression, {fix}"
            problems.append(f"dataset.standardise_targets=true: {fault}")
        if task.takes is Mask and not self.has_rows:
            problems += self.problems_of_masks(task)
            if self.transforms:
                fault = "move images without their masks; leave them out"
                problems.append(f"dataset.transforms: {fault}")
        return problems

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
        from expt.data.hub_splits import SplitTable

        features = () if isinstance(self.input, str) else self.input
        columns = wanted_columns(self, self.target, features, how.task, how.trained_on)
        if self.has_rows:
            return self._open_rows(columns, how)
        table = SplitTable(self, how.task, learns=how.trained_on is None)
        if how.task.takes is Mask:
            from expt.data.images import of_masks

            pairs = {part: _PictureRows(split, self, None) for part, split in table.splits.items()}
            return dataclasses.replace(of_masks(self, pairs, how), **self._facts(table, pairs))
        return self._open_pictures(table, columns._replace(group=None), how)

    def _open_rows(self, columns: Wanted, how: kinds.Opening) -> Source:
        from expt.data.hub_splits import SplitTable
        from expt.data.table_source import of_rows

        learns = how.trained_on is None
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

    def _open_pictures(self, table: SplitTable, columns: Wanted, how: kinds.Opening) -> Source:
        """Return pictures with classes, labels or numbers."""
        from expt.data.images import of_targets, pictures_of

        if how.task.takes is Anything and isinstance(self.target, str):  # a custom task
            columns = columns._replace(takes=Classes)
        with tempfile.TemporaryFile() as file:
            rows = rows_of(*table.read(columns, file), file)
        if how.trained_on is not None:
            rows = targets_as_trained(how.trained_on.targets, rows, "dataset.target")
        targets = {part: torch.from_numpy(rows.targets[at]) for part, at in rows.places().items()}
        pairs = {
            part: _PictureRows(split, self, targets[part].tolist())
            for part, split in table.splits.items()
        }
        sets = pictures_of(self, pairs)
        found = of_targets(self, sets, targets, rows.class_names, rows.target_names, how)
        return dataclasses.replace(found, **self._facts(table, pairs))

    def _facts(self, table: SplitTable, pictures: Mapping[str, _PictureRows]) -> dict[str, Any]:
        """Return the `groups`, the `digests` and the `notes` of a source of pictures."""
        return {
            "groups": table.groups(self.group) if self.group else {},
            "digests": lambda part: pictures[part].digests(),
            "notes": table.notes,
        }


class _PictureRows:
    """(picture, target) of a split; without targets these are pictures, too.

    Pictures are given as their paths or bytes: `open_picture` reads all.
    """

    def __init__(self, split: Any, dataset: HuggingFace, targets: Any) -> None:
        self._image, self._mask = names_of(dataset.input)[0], names_of(dataset.target)[0]
        chosen = [self._image] if targets is not None else [self._image, self._mask]
        features = split.features
        self._features = {name: features[name] for name in chosen}
        self._path, self._targets = Path(dataset.path), targets
        self._split = split.select_columns(chosen)
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

    def digests(self) -> Digests:
        """Return the digests of the pictures, of large ones by some of their bytes."""
        from expt.data.overlap import Digests, digest_of_bytes, digests_of_files

        pictures = self._split.select_columns([self._image]).with_format("arrow")
        found = list[Any]()
        with Checksums.below(self._path) as sums:
            for batch in pictures.iter(1000):
                cells = batch.column(0).combine_chunks()
                values = digests_of_files(cells.field("path").to_pylist(), sums).values
                for row, content in enumerate(cells.field("bytes")):
                    if content.is_valid:
                        values[row] = digest_of_bytes(content.as_buffer())
                found.append(values)
        return Digests(np.concatenate([np.array(each, np.uint64) for each in found]))

    def _source(self, row: Mapping[str, Any], column: str) -> Any:
        path, content = row[column]["path"], row[column]["bytes"]
        feature, is_mask = self._features[column], column != self._image
        in_archive = not (content or (path and os.path.isfile(path)))
        if in_archive or (feature.mode and is_mask):
            return feature.decode_example({"path": path, "bytes": content})
        source = io.BytesIO(content) if content else path
        if not feature.mode:
            return source
        mode = feature.mode if feature.mode in MODES.values() else None
        return open_picture(source, mode, f"column {column}")
