"""The same table from each source: files, folders of parts, rows of a Hugging Face dataset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from expt.data.kinds import Opening
from expt.errors import ConfigError, DataError
from tests.data.test_table import CLASS, CPU, LABEL, NUMBER, built, samples
from tests.facade import dataset
from tests.late import Late

hf: Any = Late("datasets")
FEATURES = ("age", "city", "plan", "smoker", "key", "pair")


def people() -> pa.Table:
    """Numbers and texts with gaps, flags, a code of leading zeros, and large integers."""
    r, n = np.random.default_rng(3), 60
    age, ids = r.integers(18, 90, n).astype(float), 2**60 + r.integers(0, 3, n)
    table = {
        "age": [None if row % 9 == 4 else value for row, value in enumerate(age.tolist())],
        "city": [["Paris", "Rome", "Zürich", None][value] for value in r.integers(0, 4, n)],
        "plan": [["Yes", "No", "by post", "NA"][value] for value in r.integers(0, 4, n)],
        "smoker": (r.random(n) > 0.5).tolist(),
        "key": sorted(["007", "7", "x=y"][value] for value in r.integers(0, 3, n)),
        "pair": r.normal(size=n).tolist(),
        "id": ids.tolist(),
        "odd": (r.random(n) > 0.3).astype(int).tolist(),
    }
    return pa.table(table)


def as_csv(table: pa.Table, path: Path) -> Path:
    csv.write_csv(table, path / "t.csv")
    return path / "t.csv"


def as_csvs(table: pa.Table, path: Path) -> Path:
    """As Spark writes it; the tenth part comes after the second."""
    for number, start in ((2, 0), (10, 25)):
        csv.write_csv(table[start : 25 if number == 2 else None], path / f"part-{number}.csv")
    for name in ("_SUCCESS", ".part-2.csv.crc"):
        (path / name).touch()
    return path


def as_parquet(table: pa.Table, path: Path) -> Path:
    place = table.column_names.index("city") if "city" in table.column_names else 0
    coded = table.column(place).dictionary_encode()
    found = table.set_column(place, table.column_names[place], coded)
    parquet.write_table(found, path / "t.parquet", row_group_size=7)
    return path / "t.parquet"


def as_hive(table: pa.Table, path: Path) -> Path:
    """Folders by the key, where the table has one; types differ between the parts."""
    if "key" not in table.column_names:
        return as_parquet(table, path)
    parquet.write_to_dataset(table, path / "hive", partition_cols=["key"])
    return path / "hive"


def as_saved(table: pa.Table, path: Path) -> Path:
    """Saved with a format that leaves columns out, in an order that is only noted."""
    found = hf.Dataset(table.take(list(range(len(table)))[::-1])).select(range(len(table))[::-1])
    found.set_format("torch", columns=table.column_names[:1])
    found.save_to_disk(path / "set")
    return path / "set"


def as_hub(table: pa.Table, path: Path) -> Path:
    parquet.write_table(table, path / "train-00000-of-00001.parquet")
    return path


SOURCES = [as_csv, as_csvs, as_parquet, as_hive, as_saved, as_hub]
Source = Callable[[pa.Table, Path], Path]


def of(source: Source, table: pa.Table, path: Path, target: str, features: Any, **more: Any) -> Any:
    place = source(table, path)
    options = {"path": str(place), "val_fraction": 0.2, **more}
    if source in (as_saved, as_hub):
        options |= {"input": features, "target": target}
        return dataset("dataset=huggingface dataset.path=x task=regression", **options)
    options |= {"features": features, "targets": target, "test_fraction": 0.0}
    words = "task=regression dataset=table dataset.path=x dataset.targets=y"
    return dataset(words, standardise=True, **options)


def seen(source: Source, table: pa.Table, path: Path, task: Any, *rest: Any, **more: Any) -> Any:
    path.mkdir()
    found = built(of(source, table, path, *rest, **more), task, drop_last=False)
    info = found.info
    return samples(found.train), info.features


@pytest.mark.parametrize("source", SOURCES[1:])
def test_columns_and_numbers_are_those_of_the_csv(source: Source, tmp_path: Path) -> None:
    for number, (target, task) in enumerate({"id": CLASS, "pair": NUMBER, "odd": LABEL}.items()):
        features = tuple(name for name in FEATURES if name != target)
        words: Any = (task, target, features)
        mine = seen(source, people(), tmp_path / f"a{number}", *words, categories=("key",))
        theirs = seen(as_csv, people(), tmp_path / f"b{number}", *words, categories=("key",))
        assert mine[1] == theirs[1]
        assert mine[1].inputs.encoded["plan"] == {"categories": ["No", "Yes", "by post", None]}
        assert all(map(torch.equal, mine[0], theirs[0]))
    assert theirs[1].inputs.encoded["key"] == {"categories": ["007", "7", "x=y"]}


BAD: dict[str, tuple[Any, list[Any]]] = {
    r"column a, row 3.*: 'x y' .* use dataset.categories": (NUMBER, ["1", "2", "x y"]),
    "column a holds dates": (NUMBER, ["2024-01-31", None, "2024-02-01"]),
    r"a holds 3 .* set dataset.max_categories=3": (NUMBER, ["u", "v", "w"]),
    "column a has no values": (NUMBER, [None, "NA", ""]),
    "column y, row 2.*: 2.5 is not a class": (CLASS, [1.0, 2.5, 1.0]),
    "column y, row 3.*: is empty, or NA": (CLASS, ["u", "v", "null"]),
    "column y: all rows are of one class, u": (CLASS, ["u", "u", "u"]),
    "column y, row 2.*: 2 is not a label": (LABEL, [0, 2, 1]),
    "column y, row 2.*: has no value": (NUMBER, [0, None, 1]),
}


@pytest.mark.parametrize("source", [as_csv, as_parquet, as_saved])
@pytest.mark.parametrize("says", BAD)
def test_refusals_are_the_same(says: str, source: Source, tmp_path: Path) -> None:
    task, cells = BAD[says]
    columns = {"a": [1, 2, 3], "y": [0, 1, 0], "y" if "column y" in says else "a": cells}
    chosen = of(source, pa.table(columns), tmp_path, "y", ("a",), max_categories=2)
    with pytest.raises(ConfigError, match=says) as caught:
        chosen.open(Opening(task, CPU, 0))
    assert caught.value.exit_code == 2


def test_folders_that_are_no_tables(tmp_path: Path) -> None:
    def refused(says: str) -> None:
        with pytest.raises(DataError, match=says):
            dataset(f"dataset=table dataset.path={tmp_path} dataset.targets=y").prepare(CLASS)

    refused(r"holds no \.csv")
    (tmp_path / "1.csv").write_text("a,y\n1,u\n2,v\n")
    (tmp_path / "2.csv").write_text("a,z\n1,u\n")
    refused(r"2\.csv: has no column y, which other files have")
    (tmp_path / "2.csv").write_text("a,y\n1,\n")
    refused(r"column y, row 1 of 2\.csv: is empty")
    (tmp_path / "2.csv").write_text("a,y\n1,2,3\n")
    refused(r"2\.csv: row 1 has 3 cells for 2 columns")
    as_parquet(pa.table({"a": [1]}), tmp_path)
    refused(r"holds \.csv and \.parquet")


def test_a_class_that_is_declared_keeps_its_place_and_its_name(tmp_path: Path) -> None:
    names = ["None", "b", "a"]
    label = hf.ClassLabel(names=names), hf.ClassLabel(names=names[:2])
    features = {"a": hf.Value("int64"), "y": label[0], "on": label[1]}
    columns = {"a": [1, 2, 3], "y": [2, 0, 1], "on": [1, 0, 1]}
    hf.Dataset.from_dict(columns, features=hf.Features(features)).save_to_disk(tmp_path)
    words = f"dataset=huggingface dataset.path={tmp_path}"
    chosen = dataset(words, input=("a",), target="y", standardise=False, val_fraction=0.0)
    data = built(chosen, CLASS)
    assert data.info.features.targets.names == (*names,)
    assert samples(data.train)[1].tolist() == [2, 0, 1]
    chosen = dataset(f"{words} task=multilabel", input=("a",), target="on", val_fraction=0.0)
    assert samples(built(chosen, LABEL).train)[1].tolist() == [[1], [0], [1]]
