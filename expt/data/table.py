"""Tables: rows of numbers, of which some columns are to be predicted. Free of torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from expt.config import datasets
from expt.data.table_cells import MEND, check_labels, check_learnable, classes_of, numbers_of
from expt.data.table_files import Column, columns_of
from expt.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np

TableConfig: TypeAlias = datasets.Table | datasets.Diabetes
Kind: TypeAlias = Literal["class", "label", "number"]

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
        raise DataError(
            f"dataset.path={path}: there is no such file; name a .csv, .npz or .parquet"
        )
    return path


def load(dataset: TableConfig, task: Any, *, learns: bool = True) -> Rows:
    """The table's rows, as the configured `task` takes their targets.

    Raises ConfigError for columns that are not there, DataError for a file or a cell that cannot be
    read, and where the task `learns` of them for classes of which nothing can be learned."""
    path = found(dataset)
    state = path.stat()
    targets: str | tuple[str, ...] = "progression"
    features = None
    if isinstance(dataset, datasets.Table):
        targets, features = dataset.targets, dataset.features
    names = (targets,) if isinstance(targets, str) else targets
    rows = _load(path, (state.st_size, state.st_mtime_ns), names, features, _kind(task))
    if learns and rows.class_names:
        check_learnable(path, names[0], rows.targets, rows.class_names)
    return rows


def _kind(task: Any) -> Kind:
    if task.TARGETS == "class":
        return "class"
    return "label" if task.TARGETS == "labels" else "number"


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(
    path: Path,
    _state: tuple[int, int],
    targets: tuple[str, ...],
    features: tuple[str, ...] | None,
    kind: Kind,
) -> Rows:
    columns = columns_of(path)
    given, features = features, _chosen(path, columns, targets, features)
    if not len(columns[features[0]]):
        raise DataError(f"{path}: has no rows; give it some")
    mend = (
        MEND if given else "name the columns of numbers, as in 'dataset.features=[a,b]', or mend it"
    )
    found, feature_names = numbers_of(path, columns, features, mend)
    if kind == "class":
        answers, class_names = classes_of(path, targets[0], columns[targets[0]])
        return Rows(found, answers, feature_names, targets, class_names)
    answers, target_names = numbers_of(path, columns, targets, _LABELS if kind == "label" else MEND)
    if kind == "label":
        check_labels(path, target_names, answers)
    return Rows(found, answers, feature_names, target_names, ())


def _chosen(
    path: Path,
    columns: Mapping[str, Column],
    targets: Sequence[str],
    features: Sequence[str] | None,
) -> tuple[str, ...]:
    """The columns of the features.

    Raises ConfigError for names that are not there, or there twice.
    """
    for key, names in (("targets", targets), ("features", features or ())):
        for name in names:
            if name not in columns:
                has = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
                raise ConfigError(
                    f"dataset.{key}={name}: {path} has no such column, it has"
                    f" {has}.{did_you_mean(name, list(columns))}"
                )
            if list(names).count(name) > 1:
                raise ConfigError(f"dataset.{key}: names {name} twice; name it once")
    if features is None:
        features = [name for name in columns if name not in targets]
    if both := [name for name in features if name in targets]:
        raise ConfigError(
            f"dataset.features={both[0]}: is one of dataset.targets, to be predicted; leave it out"
        )
    if not features:
        raise ConfigError(f"dataset.features: {path} has no column beside the targets; give it one")
    return tuple(features)


def standardised(
    dataset: TableConfig | datasets.HuggingFace, rows: Rows, training: np.ndarray
) -> tuple[Rows, dict[str, tuple[float, float]]]:
    """The rows, with the columns that are to be so at mean 0 and deviation 1 over the rows at
    `training`.

    And the mean and deviation that each had. A column of one value is only shifted.
    """
    found: dict[str, tuple[float, float]] = {}
    if dataset.standardise:
        features, scales = _at_unit_scale(rows.features, training)
        rows, found = (
            rows._replace(features=features),
            dict(zip(rows.feature_names, scales, strict=True)),
        )
    if dataset.standardise_targets and not rows.class_names:
        targets, scales = _at_unit_scale(rows.targets, training)
        rows, found = (
            rows._replace(targets=targets),
            {**found, **dict(zip(rows.target_names, scales, strict=True))},
        )
    return rows, found


def _at_unit_scale(
    values: np.ndarray, training: np.ndarray
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    import numpy as np

    chosen = values[training]
    mean, std = chosen.mean(0), chosen.std(0)
    # A column of one value has no deviation but that of rounding.
    std = np.where(std > 1e-12 * np.abs(chosen).max(0), std, 1.0)
    return (values - mean) / std, list(zip(mean.tolist(), std.tolist(), strict=True))


def in_order_of(
    trained_on: Mapping[str, Any], rows: Rows, dataset: TableConfig | datasets.HuggingFace
) -> Rows:
    """The rows with the columns of a run, in its order and by its names, as its record says of its
    data.

    A single target may have another name. Raises ConfigError where a column is missing.
    """
    number, scales = trained_on["image_size"][1], [*trained_on.get("standardised", {})]
    # A run of a version that recorded no names has those of what it standardised, features first.
    features = trained_on.get("feature_names") or (
        scales[:number] if len(scales) >= number else rows.feature_names
    )
    targets = trained_on.get("target_names") or rows.target_names
    if len(targets) == len(rows.target_names) == 1:
        rows = rows._replace(target_names=tuple(targets))
    file = getattr(dataset, "path", DIABETES)
    for key, wanted, there in (
        ("features", features, rows.feature_names),
        ("targets", targets, rows.target_names),
    ):
        if missing := [name for name in wanted if name not in there]:
            hint = did_you_mean(missing[0], there)
            raise ConfigError(
                f"dataset.{key}: {file} has no {missing[0]}, which the run was trained with.{hint}"
            )
    if len(features) != number or len(targets) != len(rows.target_names):
        raise ConfigError(
            f"dataset.path={file}: has other columns than the run's {number}; name them by features"
        )
    columns = [rows.feature_names.index(name) for name in features]
    rows = rows._replace(features=rows.features[:, columns], feature_names=tuple(features))
    if rows.class_names:
        return rows
    columns = [rows.target_names.index(name) for name in targets]
    return rows._replace(targets=rows.targets[:, columns], target_names=tuple(targets))


def scaled(standardised: Mapping[str, Sequence[float]], rows: Rows) -> Rows:
    """The rows by the mean and deviation that `standardised` has for a column's name, other columns
    as they are.
    """
    import numpy as np

    def at(names: Sequence[str], values: np.ndarray) -> np.ndarray:
        mean, std = np.array([standardised.get(name, (0.0, 1.0)) for name in names]).T
        found: np.ndarray = (values - mean) / std
        return found

    targets = rows.targets if rows.class_names else at(rows.target_names, rows.targets)
    return rows._replace(features=at(rows.feature_names, rows.features), targets=targets)
