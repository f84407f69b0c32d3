"""A Hugging Face dataset in a folder: of save_to_disk, parquet, csv, or an imagefolder.

Nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import importlib.util
import io
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Count, Key, Name, Size
from expt.data import kinds
from expt.data.cache import Checksums, cache_dir, digest, of_files
from expt.data.columns import texts_of
from expt.data.image_files import (
    MODES,
    PARTS,
    chosen_parts,
    left_out,
    names_below,
    of_suffix,
    open_picture,
    picture_suffixes,
    report_left_out,
)
from expt.data.kinds.table import names_of, notes_of, problems_of_columns, wanted
from expt.data.rows import Read, Wanted, kept, read_rows, refuse_twice, rows_of
from expt.data.table_files import MISSING, Table, open_table
from expt.errors import ConfigError, DataError, first_line, listed
from expt.features import Anything, Classes, Labels, Mask, Numbers
from expt.late import np, pa, torch

if TYPE_CHECKING:
    from expt.data.overlap import Digests
    from expt.data.source import Source

_READ = (".arrow", ".csv", ".json", ".jsonl", ".md", ".parquet", ".tar", ".tsv", ".yaml", ".zip")
"""The suffixes of files that the library reads, apart from pictures, and of descriptions."""
_TABLES = (".csv", ".jsonl", ".parquet", ".tar", ".tsv", ".zip")
_SAVED = ("dataset_dict.json", "state.json")
"""Files of save_to_disk."""
_NEEDS = "dataset=huggingface: needs the package datasets; pip install 'expt[datasets]'"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFace(kinds.Images):
    """Images by the name of their column; or rows of numbers, by a list of columns."""

    name: Literal["huggingface"]
    path: kinds.Place
    input: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    target: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    categories: Annotated[tuple[Name, ...], Key(only_if={"dataset.categories": IS_SET})] = ()
    max_categories: Annotated[Count, Key(result="none")] = 100
    standardise: kinds.Standardise = True
    standardise_targets: kinds.Standardise = False
    group: kinds.Group = None
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    draft: bool = True
    num_workers: kinds.Readers
    splits: Annotated[kinds.SplitNames, Key(evaluate=True, only_if={"dataset.splits": IS_SET})] = (
        None
    )

    OFFERS = (Classes, Labels, Numbers, Mask)

    @property
    def has_rows(self) -> bool:
        """True if its samples are rows of numbers."""
        return not isinstance(self.input, str)

    def problems(self, task: Any) -> list[str]:
        problems = problems_of_columns("target", self.target, self.standardise_targets, task)
        if self.has_rows and (self.image_size or self.transforms):
            problems.append(
                "dataset.image_size and transforms: are of images, and dataset.input names columns"
                " of numbers; leave them out"
            )
        if self.standardise_targets and not self.has_rows and task.takes is not Numbers:
            problems.append(
                "dataset.standardise_targets=true: is of numbers to predict; use task=regression,"
                f" or name columns of numbers, e.g. 'dataset.input=[{self.input}]'"
            )
        has_masks = task.takes is Mask and not self.has_rows
        return [*problems, *(kinds.problems_of_masks(self, task) if has_masks else [])]

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

    def may_validate(self) -> bool:
        return True

    def opening(self) -> Literal["at once", "slowly", "in turn"]:
        return "slowly"

    def look(self, source: Source) -> None:
        from expt.data.images import look_at_all

        look_at_all(self, source.pictures)

    def open(self, how: kinds.Opening) -> Source:
        """Return its parts, by the names of its splits: images, or rows.

        Raise ConfigError for a column that it has not, DataError for one that holds something else,
        and for a folder that is not a dataset.
        """
        from expt.data.images import of_masks, of_numbers, of_sets, pictures_of
        from expt.data.memory import of_rows

        task, trained_on, learns = how.task, how.trained_on, how.trained_on is None
        chosen = wanted(self, self.target, [*self.input] * self.has_rows, task, trained_on)
        if self.has_rows:
            words = digest(
                (str(Path(self.path).resolve()), repr(chosen), str(learns), repr(self.splits))
            )
            name = f"rows-{words}.{self.fingerprint()}"
            rows = kept(name, lambda file: _read(self, _Splits(self, task, learns), chosen, file))
            return of_rows(self, rows, rows.places(), how, [*notes_of(rows, are_chosen=True)])
        table, chosen = _Splits(self, task, learns), chosen._replace(group=None)
        if task.takes is Mask:
            masks = {part: _Rows(split, self, None) for part, split in table.splits.items()}
            found = of_masks(masks, self, how)
            return dataclasses.replace(found, **_more(self, table, masks, learns))
        if task.takes is Anything and isinstance(self.target, str):  # a custom task
            chosen = chosen._replace(takes=Classes)
        with tempfile.TemporaryFile() as file:
            rows = rows_of(*_read(self, table, chosen, file), file)
        targets = {part: torch.from_numpy(rows.targets[at]) for part, at in rows.places().items()}
        pairs = {part: _Rows(split, self, targets[part]) for part, split in table.splits.items()}
        pictures, more = pictures_of(pairs, self), _more(self, table, pairs, learns)
        if rows.class_names:
            more["classes"] = targets.get("train")
            classes = Classes(names=rows.class_names, are_names=True, column=rows.target_names[0])
            return of_sets(pictures, classes, how.num_workers, **more)
        return of_numbers(
            pictures,
            task.takes,
            targets.get("train", next(iter(targets.values()))).float(),
            rows.target_names,
            how.num_workers,
            scales=None if trained_on is None else trained_on.targets.scales,
            standardises=self.standardise_targets,
            **more,
        )


def _more(
    dataset: HuggingFace, table: _Splits, pictures: Mapping[str, _Rows], learns: bool
) -> dict[str, Any]:
    """Return the `groups`, the `digests` and the `notes` of a source of pictures."""
    found: dict[str, Any] = {"digests": lambda part: pictures[part].digests(dataset)}
    if (name := dataset.group) is not None and (learns or name in table.names):
        # Read as the classes of no features, which is all that groups are.
        chosen = Wanted((name,), (), Classes, limit=1 if learns else None)
        with tempfile.TemporaryFile() as file:
            numbers = torch.from_numpy(read_rows(table, chosen, file)[1])
        groups = numbers.split([*table.parts.values()])
        found["groups"] = dict(zip(table.parts, groups, strict=True))
    return {**found, "notes": table.notes}


class _Splits(Table):
    """The chosen splits of a dataset one after the other, once their columns are checked."""

    key_of_targets = "dataset.target"

    def __init__(self, dataset: HuggingFace, task: Any, learns: bool) -> None:
        self.splits, self.notes = _splits(dataset, task, learns)
        self.parts = {part: len(split) for part, split in self.splits.items()}
        features = next(iter(self.splits.values())).features
        super().__init__(Path(dataset.path), features)
        named = {name: getattr(each, "names", None) for name, each in features.items()}
        self.classes = {name: names for name, names in named.items() if names}

    def _batches(self, names: Sequence[str], damaged: dict[int, str]) -> Iterator[Any]:
        for split in self.splits.values():
            chosen = split.select_columns([*names]).with_format("arrow")
            own = {name: getattr(each, "names", None) for name, each in split.features.items()}
            for table in chosen.iter(max(1, 2**21 // len(names))):
                for batch in table.combine_chunks().to_batches():
                    yield self._named(batch.select([*names]), own)


def _read(dataset: HuggingFace, table: _Splits, chosen: Wanted, file: IO[bytes]) -> Read:
    """Read rows as `rows.read_rows`. Raise DataError for a class that is not trained on."""
    about, classes = read_rows(table, chosen, file)
    if len(classes) and not table.classes.get(chosen.targets[0]) and "train" in table.splits:
        train = classes[: table.parts["train"]]
        if (new := ~np.isin(classes, train)).any():
            row, what = int(new.argmax()), f"({new.sum()} such rows)"
            raise DataError(
                f"dataset.target={chosen.targets[0]}: {table.row(row)} has"
                f" {about['class_names'][classes[row]]}, which is not a class of train {what};"
                " remove such rows, or leave their part out by dataset.splits"
            )
    return about, classes


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

    def digests(self, dataset: HuggingFace) -> Digests:
        """Return the digests of the pictures, of large ones by some of their bytes."""
        from expt.data.overlap import Digests, of_bytes, of_files

        pictures = self._split.select_columns([self._image]).with_format("arrow")
        found = list[Any]()
        with Checksums.below(Path(dataset.path)) as sums:
            for batch in pictures.iter(1000):
                cells = batch.column(0).combine_chunks()
                contents = cells.field("bytes")
                if contents.null_count:
                    found.append(of_files(cells.field("path").to_pylist(), sums).values)
                else:
                    found.append([of_bytes(each.as_buffer()) for each in contents])
        return Digests(np.concatenate([np.array(each, np.uint64) for each in found]))

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


def _splits(dataset: HuggingFace, task: Any, learns: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the chosen ones of train, val and test, and notes on rows and files in none."""
    found, files = _loaded(dataset)
    # A format that it was saved with would hide columns, and give other types.
    named = {name.lower(): _plain(split) for name, split in found.items() if len(split)}
    there = {part: next(filter(None, map(named.get, names)), None) for part, names in PARTS.items()}
    every = {part: split for part, split in there.items() if split is not None}
    splits = chosen_parts(dataset.path, every, dataset.splits) if every else {}
    if not splits or (learns and "train" not in splits):
        what = "train on" if learns else "measure"
        raise DataError(
            f"dataset.path={dataset.path}: has no rows to {what}; its splits are {', '.join(found)}"
        )
    notes = [*_lost(dataset, named, every, files)]
    for part, split in splits.items():
        if dataset.group and part != "train" and dataset.group not in split.features:
            own = [f"{part}\0{row}" for row in range(len(split))]  # nothing is held out of it
            splits[part] = split.add_column(dataset.group, own)
    chosen = {"input": names_of(dataset.input), "target": names_of(dataset.target)}
    grouped = {"group": names_of(dataset.group)} if dataset.group and learns else {}
    refuse_twice({**chosen, **grouped})
    for key, names in {**chosen, **grouped}.items():
        wants_images = not dataset.has_rows if key == "input" else task.takes is Mask
        wants_images &= key != "group"
        for column in names:
            for part, split in splits.items():
                splits[part] = _checked(
                    split, part, column, f"dataset.{key}={column}: ", wants_images
                )
                if key == "target" and part != "train" and not wants_images:
                    _refuse_unlabelled(splits, part, column, task)
    return splits, notes


def _plain(split: Any) -> Any:
    """Return a split without a format, whose columns are called as those of any table."""
    names = {name: name.strip() for name in split.column_names if name != name.strip()}
    plain = split.with_format(None)
    return plain.rename_columns(names) if names else plain


def _lost(
    dataset: HuggingFace, named: Mapping[str, Any], every: Mapping[str, Any], files: Sequence[str]
) -> Iterator[str]:
    """Yield a line on splits of other names than those of `every`, and one on files in no split."""
    if dataset.splits is not None:
        return
    rest = {
        name: len(x) for name, x in named.items() if all(x is not one for one in every.values())
    }
    if rest:
        lost, total = sum(rest.values()), sum(map(len, named.values()))
        yield (
            f"leaves out {lost} of {total} rows ({lost / total:.1%}), those of the split"
            f" {listed(rest)}; to use them, call it train, val or test"
        )
    names = of_suffix(dataset._names(), (*picture_suffixes(), *_TABLES))
    used, column = {*files}, names_of(dataset.input)[0]
    for split in every.values() if files and not dataset.has_rows else ():
        if type(split.features.get(column)).__name__ == "Image":
            used.difference_update(of_suffix(used, picture_suffixes()))
    for split in every.values() if len(used) < len(files) else ():
        cells = split.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
        used.update(filter(None, cells.field("path").to_pylist()))
    folder = os.path.realpath(dataset.path)
    if rest_of := left_out(names, (os.path.relpath(file, folder) for file in used)) * bool(files):
        yield f"leaves out files that no part has a row of: {rest_of}"


def _checked(split: Any, part: str, column: str, at: str, wants_images: bool) -> Any:
    """Return a split whose `column` holds images if it is to. Raise where it holds others."""
    if column not in split.features:
        has = f"no such column; its columns are {', '.join(split.features)}"
        fix = f"; or leave {part} out by dataset.splits" * (part != "train")
        fix += "; a list of columns makes rows: 'dataset.input=[a,b]'" * wants_images
        raise ConfigError(f"{at}{part} has {has}{fix}")
    feature = split.features[column]
    kind, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if kind == "Image" or not wants_images:
        if kind != "Image" or wants_images:
            return split
        raise DataError(
            f"{at}holds images, and is to hold numbers; a column of images is named"
            f" alone: dataset.input={column}"
        )
    image = importlib.import_module("datasets").Image()
    if dtype.endswith("binary") or (isinstance(feature, dict) and "bytes" in feature):
        return split.cast_column(column, image)
    raise DataError(
        f"{at}holds {dtype or kind}, and is to hold images; if these are, or their paths, save the"
        f" dataset after dataset.cast_column({column!r}, datasets.Image())"
    )


def _refuse_unlabelled(splits: Mapping[str, Any], part: str, column: str, task: Any) -> None:
    """Raise DataError where no row of a part has a label, as in the test of a competition."""
    cells = splits[part].select_columns([column]).with_format("arrow")
    none = {*MISSING, *["-1"] * (task.takes is not Numbers)}
    (first,) = texts_of(cells[:1][column].combine_chunks())
    if first in none and none.issuperset(texts_of(cells[:][column].combine_chunks())):
        rest = ",".join(each for each in splits if each != part)
        raise DataError(
            f"dataset.target={column}: no row of {part} has a label, each is {first or 'empty'};"
            f" leave it out by 'dataset.splits=[{rest}]'"
        )


def _loaded(dataset: HuggingFace) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the splits, and the files that they were read of if these were searched for."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import
    # Else tqdm makes a lock for several processes, which Python reports when a run has failed.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    library: Any = importlib.import_module("datasets")
    library.disable_progress_bars()
    folder = os.path.realpath(dataset.path)
    try:
        if any(os.path.exists(os.path.join(folder, name)) for name in _SAVED):
            found = library.load_from_disk(folder)
            return found if isinstance(found, Mapping) else {"train": found}, ()
        files, place = _files(dataset, library, folder)
        if files and dataset.has_rows and all(map(_is_text, itertools.chain(*files.values()))):
            texts = {str(split): _of_texts(dataset, each) for split, each in files.items()}
            return texts, [*itertools.chain(*files.values())]
        if files:
            place["data_files"] = {x: [*map(glob.escape, each)] for x, each in files.items()}
        # The library itself takes a file for unchanged by its time.
        kept = cache_dir() / "huggingface" / dataset.fingerprint()
        builder = library.load_dataset_builder(folder, cache_dir=str(kept), **place)
        builder.download_and_prepare()
        used = itertools.chain(*builder.config.data_files.values())
        return builder.as_dataset(), [*map(str, used)]
    except ConfigError:
        raise
    except Exception as error:  # Arrow, Pillow and the library raise many kinds
        why = first_line(error)
        if "::" in folder:
            why += "; it takes :: for several addresses: rename the folder"
        raise DataError(
            f"dataset.path={dataset.path}: cannot be read as a dataset ({why})"
        ) from error


def _files(
    dataset: HuggingFace, library: Any, folder: str
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the files of the chosen splits, if they need be known, and options to find all."""
    names, pattern = dataset._names(), glob.escape(folder)
    # The library takes the name of a folder for a pattern, but not where it looks for README.md.
    place = {"data_dir": os.path.relpath(pattern, folder)} if pattern != folder else {}
    if "README.md" in names or not (dataset.splits or all(map(_is_text, names))):
        return {}, place
    data_files = library.data_files
    patterns = data_files.get_data_patterns(pattern)
    found = data_files.DataFilesDict.from_patterns(patterns, base_path=pattern)
    wanted = {name for part in dataset.splits or PARTS for name in PARTS[part]}
    files = {x: each for x, each in found.items() if str(x).lower() in wanted}
    return files if len(files) >= len(dataset.splits or ()) else {}, place


def _is_text(name: str) -> bool:
    return name.lower().endswith((".csv", ".tsv"))


def _of_texts(dataset: HuggingFace, files: Sequence[str]) -> Any:
    """Return texts as a table has them: for pandas 007 is 7, and a row may have few cells."""
    tables = [open_table(Path(file)) for file in files]
    for table, name in itertools.product(tables, names_of(dataset.input)):
        if name not in table.names and (fix := table.header_below(name)):
            raise ConfigError(f"dataset.input={name}: {table.path} has no such column.{fix}")
    names = [x for x in tables[0].names if all(x in table.names for table in tables)]
    schema = pa.schema([(name, pa.string()) for name in names])
    found = (pa.Table.from_batches(table.batches(names), schema) for table in tables)
    return importlib.import_module("datasets").Dataset(pa.concat_tables(found))
