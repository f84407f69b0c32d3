"""The splits of a Hugging Face dataset as one table, once its files and columns are checked."""

from __future__ import annotations

import errno
import functools
import glob
import importlib
import itertools
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from expt.data.cache import cache_dir, digest
from expt.data.columns import texts_of
from expt.data.folders import PARTS, chosen_parts, left_out, of_suffix
from expt.data.pictures import picture_suffixes
from expt.data.rows import Read, Wanted, read_rows, refuse_twice
from expt.data.table_files import MISSING, Damaged, Table, Uses, open_table, with_classes
from expt.errors import ConfigError, DataError, OutOfMemory, first_line, listed
from expt.features import Classes, Mask, Numbers
from expt.late import np, pa, torch

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.kinds.huggingface import HuggingFace

_TABLES = (".csv", ".jsonl", ".parquet", ".tar", ".tsv", ".zip")
_SAVED = ("dataset_dict.json", "state.json")
"""Files of save_to_disk."""


class SplitTable(Table):
    """The chosen splits of a dataset one after the other, once their columns are checked."""

    key_of_targets = "dataset.target"

    def __init__(self, dataset: HuggingFace, task: Any, learns: bool) -> None:
        self._learns = learns
        self.splits, self.notes = _chosen_splits(dataset, task, learns)
        self.parts = {part: len(split) for part, split in self.splits.items()}
        features = next(iter(self.splits.values())).features
        super().__init__(Path(dataset.path), features)
        self.classes = _class_names(features)

    def read(self, columns: Wanted, file: IO[bytes]) -> Read:
        """Read rows as `rows.read_rows`. Raise DataError for a class that is not trained on."""
        about, classes = read_rows(self, columns, file)
        if not len(classes) or self.classes.get(columns.targets[0]) or "train" not in self.splits:
            return about, classes
        is_new = ~np.isin(classes, classes[: self.parts["train"]])
        if is_new.any():
            row = int(is_new.argmax())
            has = f"{self.row(row)} has {about['class_names'][classes[row]]}, which is not a class"
            fix = "remove such rows, or leave their part out by dataset.splits"
            at = f"dataset.target={columns.targets[0]}"
            raise DataError(f"{at}: {has} of train ({is_new.sum()} such rows); {fix}")
        return about, classes

    def groups(self, column: str) -> dict[str, Tensor]:
        """Return each part's groups; none of a table to measure that lacks their column."""
        if not (self._learns or column in self.names):
            return {}
        # Read as the classes of no features, which is all that groups are.
        columns = Wanted((column,), (), Classes, limit=1 if self._learns else None)
        with tempfile.TemporaryFile() as file:
            numbers = torch.from_numpy(read_rows(self, columns, file)[1])
        return dict(zip(self.parts, numbers.split([*self.parts.values()]), strict=True))

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Any]:
        for split in self.splits.values():
            chosen, own = split.select_columns([*names]), _class_names(split.features)
            for table in chosen.with_format("arrow").iter(max(1, 2**21 // len(names))):
                for batch in table.combine_chunks().to_batches():
                    yield with_classes(batch.select([*names]), uses, own)


def _class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the names of the classes of each column that declares some."""
    return {name: each.names for name, each in features.items() if getattr(each, "names", None)}


def _chosen_splits(
    dataset: HuggingFace, task: Any, learns: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the chosen ones of train, val and test, checked, and notes on rows and files in none.

    Raise ConfigError or DataError for columns that do not fit, or where no split is left.
    """
    found, files = _load(dataset)
    named = {name.lower(): _plain(split) for name, split in found.items() if len(split)}
    there = {part: next((x for x in names if x in named), None) for part, names in PARTS.items()}
    parts = {part: named[name] for part, name in there.items() if name}
    splits = chosen_parts(dataset.path, parts, dataset.splits) if parts else {}
    if not splits or (learns and "train" not in splits):
        has = f"has no rows to {'train on' if learns else 'measure'}"
        raise DataError(f"dataset.path={dataset.path}: {has}; its splits are {', '.join(found)}")
    for part, split in splits.items():
        if dataset.group and part != "train" and dataset.group not in split.features:
            own = [f"{part}\0{row}" for row in range(len(split))]  # nothing is held out of it
            splits[part] = split.add_column(dataset.group, own)
    splits = _checked_splits(splits, dataset, task, learns)
    if dataset.splits is not None:
        return splits, []
    notes = _unused_splits(named, {*there.values()}), _unused_files(dataset, splits, files)
    return splits, [*filter(None, notes)]


def _plain(split: Any) -> Any:
    """Return a split without a format, whose columns are called as those of any table."""
    names = {name: name.strip() for name in split.column_names if name != name.strip()}
    plain = split.with_format(None)  # one would hide columns, and give other types
    return plain.rename_columns(names) if names else plain


def _unused_splits(named: Mapping[str, Any], used: Collection[str | None]) -> str:
    """Return a note on the splits that are not `used`; "" if all are."""
    sizes = {name: len(split) for name, split in named.items() if name not in used}
    if not sizes:
        return ""
    lost, total = sum(sizes.values()), sum(map(len, named.values()))
    rows = f"{lost} of {total} rows ({lost / total:.1%}), those of the split {listed(sizes)}"
    return f"leaves out {rows}; to use them, call it train, val or test"


def _unused_files(dataset: HuggingFace, splits: Mapping[str, Any], files: Sequence[str]) -> str:
    """Return a note on the files that no split has a row of; "" where each has one."""
    if not files:
        return ""
    used, pictures = {*files}, of_suffix(files, picture_suffixes())
    if pictures and not dataset.has_rows:  # each row names its own
        used.difference_update(pictures)
        (column,) = dataset.inputs
        for split in splits.values():
            cells = split.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
            used.update(filter(None, cells.field("path").to_pylist()))
    folder = os.path.realpath(dataset.path)
    names = of_suffix(dataset.names(), (*picture_suffixes(), *_TABLES))
    rest = left_out(names, (os.path.relpath(file, folder) for file in used))
    return f"leaves out files that no part has a row of: {rest}" if rest else ""


def _checked_splits(
    splits: Mapping[str, Any], dataset: HuggingFace, task: Any, learns: bool
) -> dict[str, Any]:
    """Return splits whose pictures are images. Raise for columns that do not fit."""
    columns, found = dataset.columns_of(task, learns=learns), {**splits}
    refuse_twice(columns)
    pictures = {"input": not dataset.has_rows, "target": task.takes is Mask}
    for key, names in columns.items():
        for column, part in itertools.product(names, splits):
            at = f"dataset.{key}={column}: "
            found[part] = _checked(found[part], part, column, at, pictures.get(key, False))
            if key == "target" and part != "train" and not pictures.get(key):
                _refuse_unlabelled(found, part, column, task)
    return found


def _checked(split: Any, part: str, column: str, at: str, wants_images: bool) -> Any:
    """Return a split whose `column` holds images if it is to. Raise where it holds others."""
    if column not in split.features:
        fixes = [f"{at}{part} has no such column; its columns are {', '.join(split.features)}"]
        if part != "train":
            fixes.append(f"or leave {part} out by dataset.splits")
        if wants_images:
            fixes.append("a list of columns makes rows: 'dataset.input=[a,b]'")
        raise ConfigError("; ".join(fixes))
    feature = split.features[column]
    kind, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if kind == "Image" and not wants_images:
        fix = f"a column of images is named alone: dataset.input={column}"
        raise DataError(f"{at}holds images, and is to hold numbers; {fix}")
    if kind == "Image" or not wants_images:
        return split
    if dtype.endswith("binary") or (isinstance(feature, dict) and "bytes" in feature):
        return split.cast_column(column, _library().Image())
    fix = f"save the dataset after dataset.cast_column({column!r}, datasets.Image())"
    fault = f"holds {dtype or kind}, and is to hold images"
    raise DataError(f"{at}{fault}; if these are, or their paths, {fix}")


def _refuse_unlabelled(splits: Mapping[str, Any], part: str, column: str, task: Any) -> None:
    """Raise DataError where no row of a part has a label, as in the test of a competition."""
    cells = splits[part].select_columns([column]).with_format("arrow")
    none = MISSING if task.takes is Numbers else MISSING | {"-1"}
    (first,) = texts_of(cells[:1][column].combine_chunks())
    if first in none and none.issuperset(texts_of(cells[:][column].combine_chunks())):
        rest = ",".join(each for each in splits if each != part)
        fault = f"no row of {part} has a label, each is {first or 'empty'}"
        fix = f"leave it out by 'dataset.splits=[{rest}]'"
        raise DataError(f"dataset.target={column}: {fault}; {fix}")


@functools.cache
def _library() -> Any:
    """Import the package datasets, which then neither fetches anything nor shows its progress."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import
    # Else tqdm makes a lock for several processes, which Python reports when a run has failed.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    library: Any = importlib.import_module("datasets")
    library.disable_progress_bars()
    return library


def _load(dataset: HuggingFace) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the splits, and the files that they were read of if these were searched for."""
    library, folder = _library(), os.path.realpath(dataset.path)
    try:
        if any(os.path.exists(os.path.join(folder, name)) for name in _SAVED):
            found = library.load_from_disk(folder)
            return found if isinstance(found, Mapping) else {"train": found}, ()
        return _load_files(dataset, folder)
    except ConfigError:
        raise
    except Exception as error:  # Arrow, Pillow and the library raise many kinds
        cause: Any = error.__cause__ or error  # where it reads, its own text says only that
        if isinstance(cause, MemoryError):
            full = f"dataset.path={dataset.path}: is read into more memory than there is"
            raise OutOfMemory(full) from error
        fault = f"cannot be read as a dataset ({_why(cause, folder)})"
        raise DataError(f"dataset.path={dataset.path}: {fault}") from error


def _why(cause: Any, folder: str) -> str:
    """Return why a folder can't be read, and a fix if one is known."""
    why = first_line(cause)
    if hasattr(cause, "details"):
        why = f"its files differ: {cause.details().strip('.')}; dataset.splits leaves parts out"
    if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        why += f", where it is copied to: {cache_dir()}; EXPT_CACHE names another folder"
    if "::" in folder:
        why += "; it takes :: for several addresses: rename the folder"
    return why


def _load_files(dataset: HuggingFace, folder: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the splits of a folder of files, by their names, and the files of all splits."""
    pattern = glob.escape(folder)
    # The name of a folder is taken for a pattern, but not where README.md is looked for.
    place = {"data_dir": os.path.relpath(pattern, folder)} if pattern != folder else {}
    # The library itself takes a file for unchanged by its time.
    copies = cache_dir() / "huggingface" / digest((dataset.content(), repr(dataset.splits)))
    builder = _library().load_dataset_builder(folder, cache_dir=str(copies), **place)
    files = builder.config.data_files
    names = [name for part in dataset.splits or () for name in PARTS[part]]
    chosen = {split for split in files if str(split).lower() in names}
    if chosen and len(chosen) == len(dataset.splits or ()):
        for split in {*files} - chosen:  # it may lack a column, as the test of a competition
            del files[split]
    used = [str(file) for file in itertools.chain(*files.values())]
    if dataset.has_rows and _are_plain(builder, used):
        return {str(split): _of_texts(dataset, files[split]) for split in files}, used
    builder.download_and_prepare(verification_mode="no_checks" if chosen else None)
    return builder.as_dataset(), used


def _are_plain(builder: Any, files: Sequence[str]) -> bool:
    """Return whether files are texts, and README.md has no options for reading them."""
    is_text = all(file.lower().endswith((".csv", ".tsv")) for file in files)
    if not is_text or builder.info.features is not None:
        return False
    given, usual = builder.config, type(builder.config)()
    return bool({**given.pd_read_csv_kwargs, "sep": ""} == {**usual.pd_read_csv_kwargs, "sep": ""})


def _of_texts(dataset: HuggingFace, files: Iterable[object]) -> Any:
    """Return texts as a table has them: for pandas 007 is 7, and a row may have few cells."""
    tables = [open_table(Path(str(file))) for file in files]
    for table, name in itertools.product(tables, dataset.inputs):
        if name not in table.names and (fix := table.header_below(name)):
            raise ConfigError(f"dataset.input={name}: {table.path} has no such column.{fix}")
    names = [x for x in tables[0].names if all(x in table.names for table in tables)]
    schema = pa.schema([(name, pa.string()) for name in names])
    found = (pa.Table.from_batches(table.batches(names), schema) for table in tables)
    return _library().Dataset(pa.concat_tables(found))
