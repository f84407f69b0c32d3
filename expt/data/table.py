"""Tables: rows of numbers, of which some columns are to be predicted. Free of torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from expt.config import datasets, tasks
from expt.data.table_files import Column, columns_of
from expt.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np

TableConfig: TypeAlias = datasets.Table | datasets.Diabetes
Kind: TypeAlias = Literal["class", "label", "number"]

_MEND = "give it a number, or remove the row"
_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
DIABETES = Path(__file__).with_name("diabetes.csv")


class Rows(NamedTuple):
    """A table as a task takes it."""

    features: np.ndarray
    """float64 [N, F]"""
    targets: np.ndarray
    """float64 [N, T]; classes int64 [N]"""
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    class_names: tuple[str, ...]
    """empty where the targets are no classes"""


def found(dataset: TableConfig) -> Path:
    """Its file. Raises DataError where there is none."""
    path = DIABETES if isinstance(dataset, datasets.Diabetes) else Path(dataset.path)
    if not path.is_file():
        raise DataError(f"dataset.path={path}: there is no such file; name a .csv, .npz or .parquet")
    return path


def load(dataset: TableConfig, task: Any) -> Rows:
    """The table's rows, as the configured `task` takes their targets.

    Raises ConfigError for columns that are not there, DataError for a file or a cell that cannot be read.
    """
    path = found(dataset)
    state = path.stat()
    targets: str | tuple[str, ...] = "progression"
    features = None
    if isinstance(dataset, datasets.Table):
        targets, features = dataset.targets, dataset.features
    names = (targets,) if isinstance(targets, str) else targets
    return _load(path, (state.st_size, state.st_mtime_ns), names, features, _kind(task))


def _kind(task: Any) -> Kind:
    if isinstance(task, tasks.Classification):
        return "class"
    return "label" if isinstance(task, tasks.Multilabel) else "number"


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(
    path: Path, _state: tuple[int, int], targets: tuple[str, ...], features: tuple[str, ...] | None, kind: Kind
) -> Rows:
    columns = columns_of(path)
    given, features = features, _chosen(path, columns, targets, features)
    if not len(columns[features[0]]):
        raise DataError(f"{path}: has no rows; give it some")
    mend = _MEND if given else "name the columns of numbers, as in 'dataset.features=[a,b]', or mend it"
    found, feature_names = numbers_of(path, columns, features, mend)
    if kind == "class":
        answers, class_names = _classes(path, targets[0], columns[targets[0]])
        return Rows(found, answers, feature_names, targets, class_names)
    answers, target_names = numbers_of(path, columns, targets, _LABELS if kind == "label" else _MEND)
    if kind == "label":
        check_labels(path, target_names, answers)
    return Rows(found, answers, feature_names, target_names, ())


def numbers_of(
    path: Path, columns: Mapping[str, Column], names: Sequence[str], mend: str = _MEND
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The columns `names` as float64 [N, K], and the names of these K. Raises DataError for what is no number."""
    import numpy as np

    found = [_numbers(path, name, columns[name], mend) for name in names]
    parts = tuple(each for name, values in zip(names, found, strict=True) for each in _parts(name, values))
    return np.concatenate(found, axis=1), parts


def _chosen(
    path: Path, columns: Mapping[str, Column], targets: Sequence[str], features: Sequence[str] | None
) -> tuple[str, ...]:
    """The columns of the features. Raises ConfigError for names that are not there, or there twice."""
    for key, names in (("targets", targets), ("features", features or ())):
        for name in names:
            if name not in columns:
                has = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
                raise ConfigError(
                    f"dataset.{key}={name}: {path} has no such column, it has {has}.{did_you_mean(name, list(columns))}"
                )
            if list(names).count(name) > 1:
                raise ConfigError(f"dataset.{key}: names {name} twice; name it once")
    if features is None:
        features = [name for name in columns if name not in targets]
    if both := [name for name in features if name in targets]:
        raise ConfigError(f"dataset.features={both[0]}: is one of dataset.targets, to be predicted; leave it out")
    if not features:
        raise ConfigError(f"dataset.features: {path} has no column beside the targets; give it one")
    return tuple(features)


def _parts(name: str, values: np.ndarray) -> list[str]:
    """The names of a column's numbers: an array of an .npz may hold several in each row."""
    return [name] if values.shape[1] == 1 else [f"{name}[{number}]" for number in range(values.shape[1])]


def _numbers(path: Path, name: str, column: Column, mend: str) -> np.ndarray:
    """A column as float64 [N, K]. Raises DataError for a cell that is no finite number of float32."""
    import numpy as np

    try:
        values = np.asarray(column, dtype=np.float64) if _may_be_numbers(column) else None
    except (TypeError, ValueError):
        values = None
    if values is None:
        row = next(row for row, cell in enumerate(column) if not _is_number(cell))
        raise _wrong(path, name, row, column[row], mend)
    values = values.reshape(len(values), -1)
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if wrong.any():
        row, part = np.argwhere(wrong)[0]
        cell = column[row] if values.shape[1] == 1 else values[row, part]
        raise _wrong(path, name, int(row), cell, _MEND)
    return values


def _may_be_numbers(column: Column) -> bool:
    """Whether numpy may be asked: it takes a date for a number too, and drops the imaginary part of one."""
    dtype = getattr(column, "dtype", None)
    return dtype is None or dtype.kind in "biufUSO"


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not hasattr(cell, "dtype") or cell.dtype.kind in "biufUSO"


def _wrong(path: Path, name: str, row: int, cell: Any, mend: str) -> DataError:
    text = str(cell).strip() if cell is not None else ""
    what = "is empty" if not text else f"is {text}" if _is_number(cell) else f"{text[:40]!r} is no number"
    return DataError(f"{path}: column {name}, row {row + 1}: {what}; {mend}")


def _classes(path: Path, name: str, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each row, int64 [N], and their names: texts in order of the alphabet, or integers."""
    import numpy as np

    cells = np.asarray(column)
    if cells.ndim == 2 and cells.shape[1] == 1:
        cells = cells[:, 0]
    if cells.ndim != 1:
        raise DataError(f"{path}: column {name} has {cells.shape[1]} numbers in each row; a class is one")
    if cells.dtype.kind in "OUS" and not all(map(_is_number, cells)):
        texts = ["" if cell is None else _text(cell).strip() for cell in cells]
        if "" in texts:
            raise _wrong(path, name, texts.index(""), "", "give it a class, or remove the row")
        names, classes = np.unique(texts, return_inverse=True)
    else:
        numbers = _numbers(path, name, column, _MEND)[:, 0]
        if (numbers != np.floor(numbers)).any():
            row = int(np.argmax(numbers != np.floor(numbers)))
            raise DataError(
                f"{path}: column {name}, row {row + 1}: {numbers[row]:g} is no class, which is an integer or a text; "
                "mend it, or use task=regression"
            )
        found, classes = np.unique(numbers, return_inverse=True)
        names = np.array([f"{number:.0f}" for number in found])
    if len(names) == 1:
        raise DataError(f"{path}: column {name}: all rows are of one class, {names[0]}; name another target")
    if len(names) > max(20, len(classes) / 2):
        told = f"has {len(names)} classes in {len(classes)} rows, too few of each to learn one"
        raise DataError(f"{path}: column {name}: {told}; use task=regression for numbers, or name another target")
    return classes.astype(np.int64), tuple(map(str, names))


def _text(cell: Any) -> str:
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)


def check_labels(path: Path, names: Sequence[str], values: np.ndarray) -> None:
    """Raise DataError for what is neither 0 nor 1."""
    import numpy as np

    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(
            f"{path}: column {names[column]}, row {row + 1}: {values[row, column]:g} is no label, which is 0 or 1; "
            "mend it, or use task=regression"
        )


def standardised(
    dataset: TableConfig | datasets.HuggingFace, rows: Rows, training: np.ndarray
) -> tuple[Rows, dict[str, tuple[float, float]]]:
    """The rows, with the columns that are to be so at mean 0 and deviation 1 over the rows at `training`.

    And the mean and deviation that each had. A column of one value is only shifted.
    """
    found: dict[str, tuple[float, float]] = {}
    if dataset.standardise:
        features, scales = _at_unit_scale(rows.features, training)
        rows, found = rows._replace(features=features), dict(zip(rows.feature_names, scales, strict=True))
    if dataset.standardise_targets and not rows.class_names:
        targets, scales = _at_unit_scale(rows.targets, training)
        rows, found = rows._replace(targets=targets), {**found, **dict(zip(rows.target_names, scales, strict=True))}
    return rows, found


def _at_unit_scale(values: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, list[tuple[float, float]]]:
    import numpy as np

    chosen = values[training]
    mean, std = chosen.mean(0), chosen.std(0)
    # A column of one value has no deviation but that of rounding.
    std = np.where(std > 1e-12 * np.abs(chosen).max(0), std, 1.0)
    return (values - mean) / std, list(zip(mean.tolist(), std.tolist(), strict=True))


def in_order_of(trained_on: Mapping[str, Any], rows: Rows, dataset: TableConfig | datasets.HuggingFace) -> Rows:
    """The rows with the columns of a run, in its order and by its names, as its record says of its data.

    A single target may have another name. Raises ConfigError where a column is missing.
    """
    number, scales = trained_on["image_size"][1], [*trained_on.get("standardised", {})]
    # A run of a version that recorded no names has those of what it standardised, features first.
    features = trained_on.get("feature_names") or (scales[:number] if len(scales) >= number else rows.feature_names)
    targets = trained_on.get("target_names") or rows.target_names
    if len(targets) == len(rows.target_names) == 1:
        rows = rows._replace(target_names=tuple(targets))
    file = getattr(dataset, "path", DIABETES)
    for key, wanted, there in (("features", features, rows.feature_names), ("targets", targets, rows.target_names)):
        if missing := [name for name in wanted if name not in there]:
            hint = did_you_mean(missing[0], there)
            raise ConfigError(f"dataset.{key}: {file} has no {missing[0]}, which the run was trained with.{hint}")
    if len(features) != number or len(targets) != len(rows.target_names):
        raise ConfigError(f"dataset.path={file}: has other columns than the run's {number}; name them by features")
    columns = [rows.feature_names.index(name) for name in features]
    rows = rows._replace(features=rows.features[:, columns], feature_names=tuple(features))
    if rows.class_names:
        return rows
    columns = [rows.target_names.index(name) for name in targets]
    return rows._replace(targets=rows.targets[:, columns], target_names=tuple(targets))


def scaled(standardised: Mapping[str, Sequence[float]], rows: Rows) -> Rows:
    """The rows by the mean and deviation that `standardised` has for a column's name, other columns as they are."""
    import numpy as np

    def at(names: Sequence[str], values: np.ndarray) -> np.ndarray:
        mean, std = np.array([standardised.get(name, (0.0, 1.0)) for name in names]).T
        found: np.ndarray = (values - mean) / std
        return found

    targets = rows.targets if rows.class_names else at(rows.target_names, rows.targets)
    return rows._replace(features=at(rows.feature_names, rows.features), targets=targets)
