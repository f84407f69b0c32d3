"""The same table from each source: files, folders of parts, rows of a Hugging Face dataset."""

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from expt.data.columns import Column
from expt.data.kinds import Opening
from expt.errors import ConfigError, DataError
from expt.late import Late
from tests.data.test_table import CLASS, CPU, LABEL, NUMBER, built, samples
from tests.facade import Capture, dataset

hf: Any = Late("datasets")
UNITS = ("s", "ms", "us", "ns")
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


def as_hub_csv(table: pa.Table, path: Path) -> Path:
    """With another separator and a README, in a folder whose name is a pattern."""
    place = path / "set[1] {2}*"
    place.mkdir()
    (place / "README.md").write_text("# People\n")
    csv.write_csv(table, place / "train.csv", csv.WriteOptions(delimiter=";"))
    return place


SOURCES = [as_csv, as_csvs, as_parquet, as_hive, as_saved, as_hub, as_hub_csv]
HUB = [as_saved, as_hub, as_hub_csv]
Source = Callable[[pa.Table, Path], Path]


def of(source: Source, table: pa.Table, path: Path, target: str, features: Any, **more: Any) -> Any:
    place = source(table, path)
    options = {"path": str(place), "val_fraction": 0.2, **more}
    if source in HUB:
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


def kinds() -> pa.Table:
    """Columns of one content, whose types write it in several ways."""
    r, n = np.random.default_rng(5), 60
    x, place = r.normal(size=n), r.integers(0, 3, n)
    days = [datetime.datetime(2024, 1, 1 + number) for number in place.tolist()]
    table = {
        "single": pa.array(x, pa.float32()),
        "double": pa.array(x * 1e7),
        "exact": pa.array([decimal.Decimal(f"{each:.3f}") for each in x], pa.decimal128(9, 3)),
        "count": pa.array([None if row % 7 == 3 else row % 4 for row in range(n)], pa.int64()),
        "flag": pa.array(x > 0),
        "day": pa.array(days, pa.timestamp("us")),
        "noon": pa.array([day.replace(hour=12) for day in days], pa.timestamp("ms")),
        "zoned": pa.array([day.replace(hour=9) for day in days], pa.timestamp("us", "Asia/Tokyo")),
        "code": pa.array([f"00{number}" for number in place]),
    }
    return pa.table(table)


@pytest.mark.parametrize("source", [as_csv, as_csvs, as_saved, as_hub, as_hub_csv])
@pytest.mark.parametrize("target", ["flag", "day", "noon", "zoned", "code", "single", "double"])
def test_numbers_and_classes_are_alike_in_each_type(
    source: Source, target: str, tmp_path: Path
) -> None:
    features = tuple(x for x in ("single", "double", "exact", "count", "flag") if x != target)
    task = NUMBER if target in ("single", "double") else CLASS
    words: Any = (kinds(), tmp_path / "a", task, target, features)
    texts = tuple(x for x in ("count", "flag") if x in features)
    mine = seen(source, *words, categories=texts)
    theirs = seen(as_parquet, kinds(), tmp_path / "b", *words[2:], categories=texts)
    assert mine[1] == theirs[1]
    assert all(map(torch.equal, mine[0], theirs[0]))
    if target == "flag":
        assert mine[1].targets.names == ("False", "True")
    if target in ("day", "noon"):
        clock = " 12:00:00" * (target == "noon")
        assert mine[1].targets.names == tuple(f"2024-01-0{day}{clock}" for day in (1, 2, 3))
    if target == "zoned":
        assert mine[1].targets.names[0] == "2024-01-01 18:00:00+09:00"


HOUR = datetime.timedelta(hours=1)
SPELLED: dict[str, list[Any]] = {
    "2024-01-31 10:00:00+00:00": [
        *["2024-01-31T10:00:00Z", "2024-01-31 10:00:00.000Z", "2024-01-31 10:00:00+0000"],
        *["2024-01-31 10:00:00 +00", "2024-01-31T10:00:00.000000+00:00"],
        *(pa.scalar(datetime.datetime(2024, 1, 31, 10), pa.timestamp(x, "UTC")) for x in UNITS),
    ],
    "2024-01-31 10:00:00.25": [
        *["2024-01-31T10:00:00.250", "2024-01-31 10:00:00.250000000"],
        pa.scalar(datetime.datetime(2024, 1, 31, 10, microsecond=250_000), pa.timestamp("us")),
    ],
    "2024-01-31": ["2024-01-31T00:00:00.0", datetime.date(2024, 1, 31)],
    "2024-01-31 00:00:00+02:00": ["2024-01-31T00:00:00+0200", "2024-01-31 00:00:00+02"],
    "10:00:00": ["10:00:00.000000", datetime.time(10)],
    "1 days 10:00:00": [
        *["1 days 10:00:00.000", *(pa.scalar(34 * HOUR, pa.duration(x)) for x in UNITS)],
    ],
    "-1 days +14:00:00.5": [
        "-1 days +14:00:00.500000", pa.scalar(HOUR / 7200 - 10 * HOUR, pa.duration("ms"))
    ],
}  # fmt: skip


@pytest.mark.parametrize("wanted", SPELLED)
def test_a_time_is_the_same_whichever_program_wrote_it(wanted: str) -> None:
    for cell in [wanted, *SPELLED[wanted]]:
        column = Column("t", are_texts=True)
        column.read(
            pa.array([cell.as_py()], cell.type) if hasattr(cell, "as_py") else pa.array([cell])
        )
        assert column.categories == [wanted], cell


@pytest.mark.parametrize(
    "text",
    ["10:00", "2024-01-31T10:00", "2024-01-31 10:00:00 PM", "v1.2.30", "1 days", "T10:00:00Z"],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    column = Column("t", are_texts=True)
    column.read(pa.array([text, "true", "x"]))
    assert column.categories == sorted([text, "true", "x"])


def test_durations_are_refused_by_any_door(tmp_path: Path) -> None:
    spans = pa.array([HOUR * each for each in (1, 2, 3)], pa.duration("us"))
    for number, cells in enumerate((spans, pa.array(["0 days 01:00:00", None, "1 days 02:00:00"]))):
        (path := tmp_path / str(number)).mkdir()
        chosen = of(as_parquet, pa.table({"y": [0, 1, 0], "a": cells}), path, "y", ("a",))
        with pytest.raises(DataError, match=r"column a holds durations.*the seconds"):
            chosen.open(Opening(NUMBER, CPU, 0))


BAD: dict[str, tuple[Any, list[Any]]] = {
    r"column a, row 3.*: 'x y' .* use dataset.categories": (NUMBER, ["1", "2", "x y"]),
    "column a holds dates": (NUMBER, ["01/02/2024", None, "02/01/2024"]),
    r"a holds 3 .* set dataset.max_categories=3, or .*dataset.text": (NUMBER, ["u", "v", "w"]),
    "column a has no values": (NUMBER, [None, "NA", ""]),
    "column y, row 2.*: 2.5 is not a class": (CLASS, [1.0, 2.5, 1.0]),
    "column y, row 3.*: is empty, or NA": (CLASS, ["u", "v", "null"]),
    "column y: all rows are of one class, u": (CLASS, ["u", "u", "u"]),
    "column y, row 2.*: 2 is not a label": (LABEL, [0, 2, 1]),
    "column y, row 2.*: has no value": (NUMBER, [0, None, 1]),
}


@pytest.mark.parametrize("source", [as_csv, as_parquet, as_saved, as_hub_csv])
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


def test_files_that_are_no_part_of_a_table_are_counted(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "table"
    for name in ("1.csv", "2.csv", "key=1/3.csv"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("a,y\n1,u\n2,v\n")
    (folder / "_delta_log").mkdir()
    for name in ("_SUCCESS", ".1.csv.crc", "_delta_log/0.json"):  # about it
        (folder / name).touch()
    words = f"dataset=table dataset.path={folder} dataset.targets=y dataset.features=[a]"
    dataset(words).prepare(CLASS)
    assert "left out what" not in capsys.readouterr().err
    for name in ("4.csv.gz", "5.xlsx", "key=1/6.xlsx"):
        (folder / name).touch()
    dataset(words).prepare(CLASS)
    assert "part of the table: 3 (.xlsx 2, .gz 1)" in capsys.readouterr().err


def test_a_column_of_some_folders_is_named(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a.csv", "k=1/p.csv"):
        (tmp_path / "u" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "u" / name).write_text("a,y\n1,u\n2,v\n")
    dataset(f"dataset=table dataset.path={tmp_path / 'u'} dataset.targets=y").prepare(CLASS)
    assert "k=1/p.csv has the column k, which is left out" in capsys.readouterr().err


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


LABELS = {"size": ["low", "high", "none"], "grade": ["2", "10", "1"]}


def declared(rows: int = 60, seed: int = 0, *, first: int | None = 0) -> Any:
    """Integers that declare their classes; a size may be the `first`, which can be no class."""
    r = np.random.default_rng(seed)
    columns = {name: r.integers(0, 3, rows).tolist() for name in LABELS}
    columns["size"][1] = first
    features: Any = {name: hf.ClassLabel(names=names) for name, names in LABELS.items()}
    features |= {"a": hf.Value("float64"), "y": hf.ClassLabel(names=["u", "v"])}
    labels = [place % 2 for place in range(rows)]
    columns |= {"a": r.normal(size=rows).tolist(), "y": labels}
    return hf.Dataset.from_dict(columns, features=hf.Features(features))


def formatted(kind: str, **more: Any) -> Callable[[Any, Path], Path]:
    def write(found: Any, path: Path) -> Path:
        found.set_format(kind, **more)
        found.save_to_disk(path / "set")
        return path / "set"

    return write


def exported(found: Any, path: Path) -> Path:
    """Open it as a table."""
    found.to_parquet(str(path / "t.parquet"))
    return path / "t.parquet"


def in_parts(found: Any, path: Path) -> Path:
    for number, rows in ((2, range(20)), (10, range(20, len(found)))):
        found.select(rows).to_parquet(str(path / f"part-{number}.parquet"))
    return path


@pytest.mark.parametrize(
    "write",
    [
        formatted("torch"),
        formatted("numpy", columns=["a"]),
        formatted("pandas"),
        exported,
        in_parts,
    ],
    ids=["torch", "numpy_some", "pandas", "parquet", "parts"],
)
def test_declared_classes_among_inputs_are_categories(
    write: Callable[[Any, Path], Path], tmp_path: Path
) -> None:
    """Their numbers are no quantities, even if their names look like some; -1 is a gap."""
    place, inputs = write(declared(first=-1), tmp_path), ("a", *LABELS)
    options: dict[str, Any] = {"path": str(place), "val_fraction": 0.0, "standardise": True}
    words = "dataset=huggingface dataset.path=x task=regression"
    options |= {"input": inputs, "target": "y"}
    if write in (exported, in_parts):
        words = "task=regression dataset=table dataset.path=x dataset.targets=y"
        options |= {"features": inputs, "targets": "y", "test_fraction": 0.0}
        options = {key: each for key, each in options.items() if key not in ("input", "target")}
    data = built(dataset(words, **options), CLASS, drop_last=False)
    columns: Any = data.info.features.inputs
    assert columns.encoded["size"] == {"categories": ["high", "low", "none", None]}
    assert columns.encoded["grade"] == {"categories": ["1", "10", "2"]}
    assert data.info.features.targets.names == ("u", "v")
    plain = declared(first=-1)
    grades = samples(data.train)[0][:, -3:]
    names = [LABELS["grade"][each] for each in plain["grade"]]
    assert [["1", "10", "2"][row.argmax()] for row in grades] == names


@pytest.mark.parametrize("cell", [-1, None])
def test_a_part_without_labels_is_left_out_by_its_name(cell: Any, tmp_path: Path) -> None:
    test = declared(9, 1)
    unlabelled = test.remove_columns("y").add_column("y", [cell] * 9, feature=test.features["y"])
    hf.DatasetDict({"train": declared(), "test": unlabelled}).save_to_disk(tmp_path)
    words = f"dataset=huggingface dataset.path={tmp_path}"
    options: dict[str, Any] = {"input": ("a",), "target": "y"}
    with pytest.raises(DataError, match=r"no row of test has a label.*'dataset.splits=\[train\]'"):
        built(dataset(words, **options), CLASS)
    data = built(dataset(words, splits=("train",), **options), CLASS)
    assert (data.test, data.info.train_size) == (None, 54)
    with pytest.raises(DataError, match="has no val, only train, test"):
        built(dataset(words, splits=("train", "val"), **options), CLASS)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_part_without_the_column_is_left_out_too(suffix: str, tmp_path: Path) -> None:
    (place := tmp_path / "set").mkdir()
    (place / "README.md").write_text("---\nlicense: mit\n---\n")
    train = hf.Dataset.from_dict({"a": [1, 2] * 9, "y": ["u", "v"] * 9})
    for part, rows in (("train", train), ("test", hf.Dataset.from_dict({"a": [1], "id": [0]}))):
        write = {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[suffix]
        write(str(place / f"{part}.{suffix}"))
    words = f"dataset=huggingface dataset.path={place}"
    options: dict[str, Any] = {"input": ("a",), "target": "y"}
    with pytest.raises(ConfigError, match=r"(test has no such column|'id').*dataset.splits"):
        built(dataset(words, **options), CLASS)
    assert built(dataset(words, splits=("train",), **options), CLASS).test is None


def test_what_readme_says_of_texts_is_heeded(tmp_path: Path) -> None:
    """Texts are read as a table's, unless README.md has lines skipped."""
    (place := tmp_path / "set").mkdir()
    (place / "train.csv").write_text("Title\na,y\n" + "1,u\n2,v\n" * 9)
    chosen = dataset(f"dataset=huggingface dataset.path={place}", input=("a",), target="y")
    for text in ("", "# Plain\n"):
        (place / "README.md").write_text(text)
        with pytest.raises(ConfigError, match=r"Line 2 has it: remove line 1"):
            built(chosen, CLASS)
    config = "configs: [{config_name: default, skiprows: 1, data_files: train.csv}]"
    (place / "README.md").write_text(f"---\n{config}\n---\n")
    built(chosen, CLASS)
    (place / "train.csv").unlink()
    (place / "README.md").unlink()
    (place / "train.jsonl").write_text('{"a": 1, "y": 0}\n{"a": \n')
    with pytest.raises(DataError, match=r"cannot be read as a dataset \(JSON parse error"):
        built(chosen, CLASS)


def test_cells_of_arrows_further_types_are_those_that_they_hold(tmp_path: Path) -> None:
    def extended(kind: Any, cells: Any) -> Any:
        return pa.ExtensionArray.from_storage(kind, cells)

    ids = [bytes([row % 3]) * 16 for row in range(18)]
    table = {
        "id": extended(pa.uuid(), pa.array(ids, pa.binary(16))),
        "json": extended(pa.json_(pa.string()), pa.array(['"u"', '"v"'] * 9)),
        "box": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(72.0).reshape(18, 2, 2)),
        "y": [0, 1] * 9,
    }
    parquet.write_table(pa.table(table), path := tmp_path / "t.parquet")
    words = f"dataset=table dataset.path={path} dataset.targets=y dataset.group=id"
    rows = dataset(words, features=("json", "box")).load(CLASS)
    assert [*rows.texts["json"]] == ["u", "v"]
    assert rows.features[17].tolist() == [1.0, 68.0, 69.0, 70.0, 71.0]
    assert len({*rows.groups.tolist()}) == 3


def test_what_no_part_has_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of splits, files, and columns of a folder's later files."""
    table = pa.table({" a ": [1, 2, 3] * 6, "y": ["u", "v"] * 9})

    def says(place: Path, **more: Any) -> str:
        options = {"path": str(place), "input": ("a",), "target": "y", **more}
        built(dataset("dataset=huggingface dataset.path=x", **options), CLASS)
        return capsys.readouterr().err

    names = ("train", "dev", "validation", "unsupervised")
    hf.DatasetDict({name: hf.Dataset(table) for name in names}).save_to_disk(tmp_path / "saved")
    found = says(tmp_path / "saved")
    assert "leaves out 36 of 72 rows (50.0%), those of the split dev, unsupervised;" in found
    assert "leaves out" not in says(tmp_path / "saved", splits=("train", "val"))
    for suffix, write in ((".csv", csv.write_csv), (".parquet", parquet.write_table)):
        (place := tmp_path / suffix[1:]).mkdir()
        write(table, place / f"train{suffix}")
        assert "leaves out" not in says(place)
        write(table, place / f"more{suffix}")
        assert f"1 ({suffix} 1), 50.0% of the files, such as more{suffix}" in says(place)
    write(table.append_column("z", table["y"]), tmp_path / "csv" / "train.parquet")
    (tmp_path / "csv" / "train.parquet").rename(tmp_path / "parquet" / "z.parquet")
    words = f"dataset=table dataset.path={tmp_path}/parquet dataset.targets=y"
    dataset(words).prepare(CLASS)
    assert "z.parquet has the column z, which is left out: more.parq" in capsys.readouterr().err
