"""Tables: what is read, what is refused, and by which rows it is standardised."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import Dataset

from expt.data import rows as table_rows
from expt.data import table_files, table_source
from expt.data.build import Data
from expt.data.indexing import split
from expt.data.kinds import Opening, table
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch, LoaderOptions, Shard
from expt.data.rows import Chosen, Rows
from expt.data.table_files import SUFFIXES
from expt.errors import ConfigError, DataError
from expt.features import Columns, Features, Numbers
from expt.inference.tables import inputs_of
from expt.tasks.classification import Config as Classification
from expt.tasks.multilabel import Config as Multilabel
from expt.tasks.regression import Config as Regression
from expt.tasks.sums import Sums
from expt.tasks.task import Facts
from tests import facade
from tests.conftest import Configured
from tests.facade import Capture, Patch, dataset

CLASS = Classification()
NUMBER = Regression(name="regression", loss="mse")
LABEL = Multilabel(name="multilabel", threshold=0.5)
CSV = "a,b,kind,y\n1,2,cat,0.5\n3,4.5,dog,1\n-1,1e3,cat,2\n"
CPU = torch.device("cpu")


def of(path: Path, targets: Any = "y", features: Any = ("a", "b"), **options: Any) -> Any:
    none = {"val_fraction": 0.0, "test_fraction": 0.0, "standardise": False}
    chosen = {"path": str(path), "targets": targets, "features": features, **none, **options}
    return dataset("task=regression dataset=table dataset.path=x dataset.targets=y", **chosen)


def written(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def built(dataset: Any, task: Any = NUMBER, **options: Any) -> Data:
    return facade.built(dataset, task, **{"batch_size": 1, "drop_last": True, **options})


def samples(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All of a split, in order."""
    inputs, targets = zip(*((x.inputs, x.targets) for x in loader.evaluation()), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def test_columns_become_features_targets_and_classes(tmp_path: Path) -> None:
    path = written(tmp_path, f"{CSV} , , ,\n\n,,,\n \n")  # blank last lines are no rows
    inputs, targets = samples(built(of(path)).train)
    expected = ([[1, 2], [3, 4.5], [-1, 1000]], [[0.5], [1], [2]])
    assert (inputs.tolist(), targets.tolist()) == expected
    data = built(of(path, "kind", None), CLASS)
    inputs, targets = samples(data.train)
    assert inputs.tolist() == [[1, 2, 0.5], [3, 4.5, 1], [-1, 1000, 2]]
    assert (targets.tolist(), data.info.features.targets.names) == ([0, 1, 0], ("cat", "dog"))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert data.info.features.shapes == {"channels": 1, "image_size": (1, 3), "num_classes": 2}
    assert not data.info.features.inputs.is_image


@pytest.mark.parametrize("sign", ";\t|")
def test_the_sign_between_cells_is_found(tmp_path: Path, sign: str) -> None:
    plain = CSV.replace(",", sign)
    for text in (plain, plain.replace("a", '"a"', 1), f'{plain}"5"{sign}6{sign}"u, v"{sign}3\n'):
        rows = of(written(tmp_path, f"{text}{sign * 3}\n"), "kind", None).load(CLASS)
        assert rows.features[:][:3].tolist() == [[1, 2, 0.5], [3, 4.5, 1], [-1, 1000, 2]]
    assert rows.class_names == ("cat", "dog", "u, v")
    odd = written(tmp_path, f"x{sign}z,y\n1,2\n")  # as it always was
    assert of(odd, "y", None).load(NUMBER).feature_names == (f"x{sign}z",)


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["10", "-1", "9.0", "10"], {"-1": "-1", "9.0": "9", "10": "10"}),
        (["20", "10.0", "7", "7.0"], {"7": "7", "7.0": "7", "10.0": "10", "20": "20"}),
        (["9007199254740993", "9007199254740992"] * 2, "9007199254740992 9007199254740993"),
        (["01", "1", "001", "1"], "001 01 1"),
        (["10", "1_0", "5"], "10 1_0 5"),
        (["20", "1e1"], "1e1 20"),
        (["+1", "-1"], "-1 +1"),
        (["u", "10", "1e1"], "10 1e1 u"),
    ],
)
def test_classes_are_as_they_are_spelled_unless_all_are_integers(
    tmp_path: Path, cells: list[str], names: Any
) -> None:
    spelled = names if isinstance(names, dict) else {each: each for each in names.split()}
    text = "".join(f"0,{cell}\n" for cell in cells * 2)
    found = of(written(tmp_path, f"a,y\n{text}"), features=None).load(CLASS)
    assert [*found.class_names] == [*dict.fromkeys(spelled.values())]
    assert [found.class_names[each] for each in found.targets] == [spelled[x] for x in cells * 2]


NUMBERED = "".join(f"{row},{row % 7},{'uv'[row > 20]}\n" for row in range(40))


@pytest.mark.parametrize(
    "text",
    [
        f",b,y\n{NUMBERED}",
        f"Unnamed: 0,b,y\n{NUMBERED}",
        f"id,b,y\n{NUMBERED}",
        f"id,b,y\n{''.join(NUMBERED.splitlines(True)[::-1])}",
        f"id,b,y\n{''.join(sorted(NUMBERED.splitlines(True)))}",
        "b,y,\n" + "".join(f"{row % 7},{'uv'[row > 20]},\n" for row in range(40)),
    ],
    ids="index index_read_again id falling shuffled trailing_comma".split(),
)
def test_what_numbers_the_rows_is_no_feature_unless_it_is_named(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    rows = of(path, features=None).load(CLASS)
    assert (rows.feature_names, [*rows.left_out]) == (
        ("b",),
        [(text.partition(",")[0] or "Unnamed: 0") if text[0] != "b" else "Unnamed: 2"],
    )
    told = built(of(path, features=None), CLASS).info.record
    assert told["inputs"]["left_out"] == rows.left_out
    if text[0] != "b":
        named = of(path, features=(*rows.left_out, "b")).load(CLASS)
        assert (named.features.shape[1], named.left_out) == (2, {})


@pytest.mark.parametrize("line", [0, 2, 30])
@pytest.mark.parametrize("cells", ["\u00e4", "\u00e4;1", "\u00e4;1;2"])
def test_a_file_of_another_encoding_is_named_with_its_fix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: int, cells: str
) -> None:
    """In the header or a row, of too few or too many cells, too."""
    lines = ["a;y", *["1;2"] * 40]
    lines[line] = cells
    path = tmp_path / "t.csv"
    path.write_bytes("\n".join(lines).encode("cp1252"))
    with pytest.raises(DataError, match=f"not UTF-8 at byte .*, in line {line + 1}; .*iconv -f wi"):
        of(path, features=None).load(CLASS)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([f"h{x}" for x in range(40)], ""),
        (["h0", *(f"h{x}" for x in range(39))], "holds 39 different texts"),
        ([f"{x % 12 + 1}/{x % 9 + 1}/{2000 + x}" for x in range(40)], "holds dates"),
    ],
    ids="ids one_twice dates".split(),
)
def test_texts_that_name_the_rows_are_no_feature(
    tmp_path: Path, ids: list[str], problem: str
) -> None:
    lines = "".join(f"{ids[row]},{row % 7},{'uv'[row > 20]}\n" for row in range(40))
    path = written(tmp_path, f"id,b,y\n{lines}")
    table = of(path, features=None, max_categories=9)
    if problem:
        with pytest.raises(DataError, match=problem):
            table.load(CLASS)
        return
    rows = table.load(CLASS)
    assert (rows.feature_names, [*rows.left_out]) == (("b",), ["id"])
    with pytest.raises(DataError, match="40 different texts"):
        of(path, features=("id", "b"), max_categories=9).load(CLASS)


@pytest.mark.parametrize("number", [19, 20, 10_002])
def test_texts_name_the_rows_of_a_table_of_any_size(tmp_path: Path, number: int) -> None:
    lines = "".join(f"h{row},{row % 7},{'uv'[row % 2]}\n" for row in range(number))
    rows = of(written(tmp_path, f"id,b,y\n{lines}"), features=None).load(CLASS)
    assert [*rows.left_out] == ["id"] * (number > 19)


def test_texts_that_come_again_after_very_many_name_no_row(tmp_path: Path) -> None:
    lines = "".join(f"h{row % 10_002},{row % 7},{'uv'[row % 2]}\n" for row in range(20_004))
    with pytest.raises(DataError, match="column id holds 10000 or more different texts"):
        of(written(tmp_path, f"id,b,y\n{lines}"), features=None).load(CLASS)


def test_numbers_that_rise_otherwise_are_features_with_a_warning(
    tmp_path: Path, capsys: Capture
) -> None:
    """Times, or years: an ID of chosen rows can't be told from them. Named ones are meant."""
    path = written(tmp_path, f"time,b,y\n{''.join(NUMBERED.splitlines(True)[::2])}")
    rows = of(path, features=None).load(CLASS)
    assert (rows.feature_names, rows.left_out) == (("time", "b"), {})
    of(path, features=("time", "b")).prepare(CLASS)
    assert not capsys.readouterr().err
    of(path, features=None).prepare(CLASS)
    assert "dataset.features=[b]" in capsys.readouterr().err
    ids = np.random.default_rng(0).permutation(100) * 2
    for scale, warns in ((1, True), (50, False)):  # of few numbers some would be alike by chance
        lines = [f"{each * scale},{each % 7},{'uv'[each % 4 // 2]}" for each in ids]
        path = written(tmp_path, "\n".join(["id,b,y", *lines]))
        of(path, features=None).prepare(CLASS)
        assert ("column id" in capsys.readouterr().err) == warns


def test_texts_that_differ_only_in_case_are_reported(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, "a,b,y\n" + "1,Ulm,yes\n1,ulm ,Yes\n2,Bonn,no\n" * 9)
    of(path).prepare(CLASS)
    said = capsys.readouterr().err
    assert "'Yes', 'yes'" in said
    assert "column b: categories differ only in case or spaces: 'Ulm', 'ulm'" in said


def test_the_columns_of_a_run_are_those_of_its_evaluation(tmp_path: Path) -> None:
    """Whatever else the other table has, or would have been left out of it."""
    told = built(of(written(tmp_path, f"a,b,y\n{NUMBERED[80:]}"), features=("b", "a")), CLASS)
    other = "".join(f"x y,{row},{row + 1},{'uv'[row % 2]}\n" for row in range(30))
    dataset = of(written(tmp_path, f"name,a,b,y\n{other}"), features=None)
    dataset.prepare(CLASS, learns=False)
    known = told.info.features
    source = dataset.open(Opening(CLASS, CPU, 0, known))
    assert source.features.inputs.names == ("b", "a")
    assert source.features.shapes["image_size"] == (1, 2)
    # now a target, too
    assert of(dataset.path, "a", None).load(NUMBER, known).feature_names == ("b", "a")


def test_a_class_that_train_has_none_of_is_reported(tmp_path: Path, capsys: Capture) -> None:
    for place in (39, 31):
        rows = [f"{row * 3 % 7},{'uv'[row % 2] if row != place else 'odd'}" for row in range(40)]
        path = written(tmp_path, "a,y\n" + "\n".join(rows))
        # Drawn in proportion, a class of one row is trained on.
        data = built(of(path, features=None, test_fraction=0.2, val_split="last"), CLASS)
        assert data.info.features.targets.names == ("odd", "u", "v")
        assert ("class odd," in capsys.readouterr().err) == (place == 39)


def test_a_class_that_most_rows_have_is_recorded(tmp_path: Path) -> None:
    """Of those that are trained on: a model that always predicts it is right that often."""
    rows = [f"{row * 3 % 7},{'u' if row > 31 or row % 9 else 'v'}" for row in range(40)]
    path = written(tmp_path, "a,y\n" + "\n".join(rows))
    share = sum(row.endswith("u") for row in rows[:32]) / 32
    info = built(of(path, features=None, test_fraction=0.2, val_split="last"), CLASS).info
    assert info.record["majority"] == ("u", share)
    even = written(tmp_path, "a,y\n" + "\n".join(f"{row},{'uv'[row % 2]}" for row in (3, 0) * 9))
    assert "majority" not in built(of(even, features=None), CLASS).info.record


def test_true_and_false_are_numbers(tmp_path: Path) -> None:
    rows = of(written(tmp_path, "a,b,y\nTrue,1,0\nfalse,2,1\n")).load(NUMBER)
    assert rows.features[:].tolist() == [[1, 1], [0, 2]]
    (tmp_path / "new.csv").write_text("a,b\nTRUE,1\nmaybe,2\nfalse,3\n1,4\n")
    known = Features(Columns(names=("a", "b"), width=2), Numbers())
    new = inputs_of(of(tmp_path / "new.csv"), known)
    new.open([tmp_path / "new.csv"])
    (found,) = new.pieces(4)
    assert found.samples.tolist() == [[1, 1], [0, 3], [1, 4]], "also beside what is none"
    (skipped,) = found.skipped
    assert skipped.endswith("row 2: column a holds 'maybe', which is not a number")


def test_rows_in_the_order_of_time_hold_out_the_last(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,y\n" + "".join(f"{row},0,{row}\n" for row in range(20)))
    chosen: dict[str, Any] = {"val_split": "last", "val_fraction": 0.25, "test_fraction": 0.2}
    data = built(of(path, standardise=True, shuffle=False, **chosen))
    assert data.val
    assert data.test
    rows = [batch.targets.item() for batch in data.train.epoch(1)]
    assert rows == [*range(12)]
    assert samples(data.val)[1].flatten().tolist() == [12, 13, 14, 15]
    assert samples(data.test)[1].flatten().tolist() == [16, 17, 18, 19]
    assert data.info.features.inputs.scales["a"][0] == 5.5, "by the rows that are trained on"
    assert of(path, **chosen).origin(NUMBER, "test")(0)["row"] == 17


def test_arrays_by_name_may_have_several_columns(tmp_path: Path) -> None:
    y, names = np.array([[1, 0], [0, 0], [1, 1]]), np.array(["p", "q", "p"])
    large = np.array([2**60 + 1, 2**60, 2**60 + 1])  # which float64 does not hold
    path = tmp_path / "t.npz"
    gaps = np.array([[1, 2], [math.nan, 2], [3, 4]])
    np.savez(path, x=np.arange(6.0).reshape(3, 2), y=y, names=names, large=large, gaps=gaps)
    rows = of(path, features=("x",)).load(LABEL)
    assert (rows.feature_names, rows.target_names) == (("x[0]", "x[1]"), ("y[0]", "y[1]"))
    assert rows.features[:].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows.targets[:].tolist() == [[1, 0], [0, 0], [1, 1]]
    assert of(path, "names", ("x",)).load(CLASS).class_names == ("p", "q")
    assert of(path, "large", ("x",)).load(CLASS).class_names == (str(2**60), str(2**60 + 1))
    with pytest.raises(DataError, match="column gaps, row 2: has no value"):
        of(path, features=("gaps",)).load(LABEL)
    known = Features(Columns(names=("x[1]", "x[0]"), width=2), Numbers())
    expected = [[0, 1], [2, 3], [4, 5]]
    assert of(path, features=None).load(LABEL, known).features[:].tolist() == expected


def test_a_parquet_file(tmp_path: Path) -> None:
    path, columns = tmp_path / "t.parquet", {"a": [1, 2], "b": [0.5, None], "y": ["u", "v"]}
    parquet.write_table(pyarrow.table({**columns, "list": [[1, 2], [3]]}), path)
    rows = of(path).load(CLASS)
    assert (rows.features[:][0].tolist(), rows.features[1][0]) == ([1, 0.5], 2)
    assert (rows.targets.tolist(), rows.class_names) == ([0, 1], ("u", "v"))
    assert np.isnan(rows.features[1][1])
    for column, says in (("b", "row 2: has no value; give it a"), ("list", "row 1 and 1 more: ")):
        with pytest.raises(DataError, match=f"column {column}, {says}"):
            of(path, column, ("a",)).load(NUMBER)


def test_what_pandas_writes_into_a_parquet(tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    labels = ["u", None, "v"] * 10
    frame = pandas.DataFrame({"a": [0.5, 1.5, 0.5] * 10, "y": pandas.Categorical(labels)})
    frame.to_parquet(path := tmp_path / "t.parquet")
    for each in (frame, frame.astype({"y": "object"})):
        each.to_parquet(path)
        with pytest.raises(DataError, match="column y, row 2: is empty"):
            of(path, features=None).load(CLASS)
    for index in ("patient", None):
        known = frame.dropna().sample(frac=1, random_state=0).rename_axis(index)
        known.to_parquet(path)
        rows = of(path, features=None).load(CLASS)
        assert (rows.feature_names, rows.class_names) == (("a",), ("u", "v"))
        assert [*rows.left_out] == [index or "__index_level_0__"]


ALL = {"features": None}
BAD: list[tuple[Any, str, str, dict[str, Any]]] = [
    (
        NUMBER,
        "a,b,y\n" + "".join(f"1,n{row},2\n" for row in range(10_002)),
        "column b holds 10001 or more",
        {"max_categories": 10_000},
    ),
    (NUMBER, "a,b,y\n1,2,3\n", "dataset.categories=c: .* has no such", {"categories": ("c",)}),
    (NUMBER, "a,y\nx,1\n2,1\nz,1\n", "column a, row 1 and 1 more: 'x'", {"features": ("a",)}),
    (NUMBER, "a,b,y\n1e39,2,3\n", "column a, row 1: '1e.?39' is not a number", {}),
    (NUMBER, "aa,b,y\n1,2,3\n", "dataset.features=a: .* has no such column", {}),
    (NUMBER, "a,y\n1,2\n", "dataset.targets and dataset.f.*=y: is", {"features": ("a", "y")}),
    (NUMBER, "y\n1\n", "has only targets; give it other", ALL),
    (CLASS, "a,y\n" + "".join(f"1,{x}\n" for x in range(30)), "y: has 30 classes in 30 rows", ALL),
    (NUMBER, "a,b,y\n1,2,0\n1,2\n", "row 2 has 2 cells for 3 columns.*is a point$", {}),
    (NUMBER, "a;b;y\n1,5;2;0\n1;2\n", "row 2 has 2 cells for 3 columns.*needs quotes$", {}),
    (NUMBER, "a,a,y\n1,2,0\n", "two columns are called 'a'; rename one", {}),
    (NUMBER, "a;b;y\n1,500;2;3\n", "column a, row 1: .*decimal sign", {}),
    (NUMBER, "a;b;y\n1;2;3\n1;2;3;4\n", "row 2 has 4 cells", {}),
    (NUMBER, "a,b,y\nx,1,1\n2,2,2\n", r"leave it out: 'dataset.features=\[b\]'", ALL),
    (
        NUMBER,
        "n,s,b,k,y\n" + "".join(f"{row},1%,{row % 3},{row or 'v'},1\n" for row in range(30)),
        r"(?s)column s, row 1 and 29 more: .*: 'dataset.features=\[b\]'.*column k, row 1:",
        ALL,
    ),
    (NUMBER, 'a,b,y\n"1,500",2,3\n', "column a, row 1: .*decimal sign", {}),
    (NUMBER, "a,b,y\n1,5,2,3\n", "row 1 has 4 cells .*decimal sign", {}),
    (NUMBER, "a,b,y\n1_000,2,3\n", "column a, row 1: '1_000' is no", {}),
    (NUMBER, "a,b,y\n0x10,2,3\n2,2,3\n", "column a, row 1: '0x10' is not a number", {}),
    (CLASS, 'a,b,y\n1,2,u\n1,2,"v\n1,2,u\n', "row 2: a quote is not closed", {}),
    (CLASS, 'a,b,y\n1,2" x,u\n1,2" y,v\n1,2,"v\n1,3,u\n', "row 3: a quote is not closed", {}),
    (
        NUMBER,
        "a,y\n" + "".join(f"{row},{row % 3}\n" for row in range(30)),
        r"and a \(counts the rows\).* 'dataset.features=\[a\]'",
        ALL,
    ),
    (NUMBER, "a,b,y\n", "has no rows; give it some", {}),
    (NUMBER, "", "is empty; its first line names the columns", {}),
]


@pytest.mark.parametrize(("task", "text", "says", "options"), BAD, ids=[each[2] for each in BAD])
def test_bad_tables_are_told_by_file_column_and_row(
    tmp_path: Path, task: Any, text: str, says: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        of(written(tmp_path, text), **options).load(task)
    assert caught.value.exit_code == 2


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", a=np.arange(4000.0))
    damaged = bytearray((tmp_path / "whole.npz").read_bytes())
    damaged[200:300] = bytes(100)
    with zipfile.ZipFile(tmp_path / "no_array.zip", "w") as archive:
        archive.writestr("a.npy", "no array")
    for name, content, says in (
        ("t.npz", b"PK no", r"t.npz cannot be read as a .npz \("),
        ("t.npz", damaged, r"t.npz cannot be read as a .npz \(.*\); fix or replace it"),
        ("t.npz", (tmp_path / "no_array.zip").read_bytes(), r"the array a is \[\]"),
        ("t.csv", b"a,y\n\xff\xfe,1\n", r"t.csv: is not UTF-8 at byte 4, in line 2"),
        ("t.txt", b"a,y\n", rf"dataset.path=.*t.txt: is no {', '.join(SUFFIXES)}; convert it"),
        ("none.csv", None, r"dataset.path=.*none.csv: there is no such file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            of(tmp_path / name, features=None).load(NUMBER)
    np.savez(tmp_path / "u.npz", a=np.zeros(3), b=np.zeros(3), y=np.zeros(4))
    with pytest.raises(DataError, match="its arrays differ in their rows"):
        of(tmp_path / "u.npz").load(NUMBER)


def test_another_content_is_another_dataset(tmp_path: Path, monkeypatch: Patch) -> None:
    first = of(written(tmp_path, CSV)).fingerprint()
    (tmp_path / "elsewhere").mkdir()
    assert of(written(tmp_path / "elsewhere", CSV)).fingerprint() == first
    assert of(written(tmp_path, CSV.replace("4.5", "4.6"))).fingerprint() != first
    with pytest.raises(DataError, match="there is no such file"):
        of(tmp_path / "gone.csv").fingerprint()


def test_columns_may_be_called_by_numbers(tmp_path: Path, configured: Configured) -> None:
    path = written(tmp_path, "0,1,4\n1,2,3\n4,5,6\n")
    words = ("dataset=table", "task=regression", "dataset.targets=4", "dataset.features=[0,1]")
    dataset = configured(*words, f"dataset.path={path}").dataset
    assert (dataset.targets, dataset.features) == ("4", ("0", "1"))
    assert dataset.load(NUMBER).targets[:].tolist() == [[3], [6]]
    assert configured(*words, "dataset.path=2024").dataset.path == "2024"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blocks_end_with_a_row_whatever_it_holds(
    tmp_path: Path, monkeypatch: Patch, ending: str
) -> None:
    """Quoted lines, true and false after numbers, empty lines; read a few bytes at a time."""
    monkeypatch.setattr(table_files, "_BYTES", 32)
    kinds, cells = ["u", '"v, w"', '"x\ny"', ' "z"'], ["1", "2.5", "true", "+3", '"4"', " 5 "]
    rows = [f"{cells[n // 60]},{kinds[n // 90]}{ending * (n % 7 == 0)}" for n in range(360)]
    path = tmp_path / "t.csv"
    path.write_bytes(ending.join(["a,y", *rows, ",", " , ", ""]).encode())
    found = of(path, features=("a",)).load(CLASS)
    assert found.features[:][:, 0].tolist() == np.repeat([1, 2.5, 1, 3, 4, 5], 60).tolist()
    spelled = [found.class_names[each] for each in found.targets]
    assert spelled == np.repeat(["u", "v, w", "x\ny", "z"], 90).tolist()


def test_a_large_table_is_read_once(tmp_path: Path, monkeypatch: Patch) -> None:
    path, read = written(tmp_path, CSV), list[Path]()

    def opened(path: Path) -> table_files.Table:
        read.append(path)
        return table_files.open_table(path)

    monkeypatch.setattr(table_rows, "open_table", opened)
    for text, number in ((CSV, 1), (CSV, 1), (CSV.replace("4.5", "4.6"), 2)):
        path.write_text(text)
        table_rows._load.cache_clear()
        rows = of(path, "kind", None).load(CLASS)
        assert rows.features[:][1].tolist() == [3, 4.6 if "4.6" in text else 4.5, 1]
        assert len(read) == number


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    path = written(tmp_path, CSV)

    def opened(path: Path) -> table_files.Table:
        found = table_files.open_table(path)
        path.write_text(CSV.replace("4.5", "4.6"))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(table_rows, "open_table", opened)
        with pytest.raises(DataError, match="has changed while it was read"):
            of(path).load(NUMBER)
    assert of(path).load(NUMBER).features[:][1].tolist() == [3, 4.6]


def diabetes(**options: Any) -> Any:
    fractions = {"val_fraction": 0.2, "test_fraction": 0.25}
    return dataset("dataset=diabetes task=regression", **{**fractions, **options})


def test_only_the_rows_that_are_trained_on_say_how_it_is_standardised() -> None:
    raw = np.loadtxt(table.DIABETES, delimiter=",", skiprows=1)
    assert raw.shape == (442, 11)
    rest, test = split(442, 0.25, None)
    train, val = split(len(rest), 0.2, 100, torch.zeros(len(rest)))
    data = built(diabetes(standardise_targets=True, train_limit=100))
    mean, std = raw[rest[train]].mean(0), raw[rest[train]].std(0)
    for loader, rows in ((data.train, rest[train]), (data.val, rest[val]), (data.test, test)):
        expected = (raw[rows] - mean) / std
        inputs, targets = samples(loader)
        np.testing.assert_allclose(inputs, expected[:, :10], atol=1e-5)
        np.testing.assert_allclose(targets, expected[:, 10:], atol=1e-5)
    told = {name: one for each in data.info.features for name, one in each.scales.items()}
    assert list(told) == "age sex bmi bp s1 s2 s3 s4 s5 s6 progression".split()
    np.testing.assert_allclose(list(told.values()), np.stack([mean, std], 1))
    assert not built(diabetes(standardise=False)).info.features.inputs.scales


def test_a_column_of_one_value_is_shifted_alone(tmp_path: Path) -> None:
    data = built(of(written(tmp_path, "a,b,y\n0.1,1,1\n0.1,3,2\n0.1,5,3\n"), standardise=True))
    assert samples(data.train)[0][:, 0].tolist() == pytest.approx([0, 0, 0])


def test_the_test_set_is_one_for_all_seeds_and_folds() -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"val_fraction": 0.5}, {"folds": 3, "fold": 1})
    every = [diabetes(standardise=False, **more) for more in cases]
    several = [built(each, seed=seed) for seed, each in enumerate(every)]
    found = [samples(data.test)[0] for data in several]
    assert len(found[0]) == 110
    assert all(torch.equal(found[0], other) for other in found)
    assert built(diabetes(test_fraction=0.0)).test is None


def drawn(size: Any, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def measured(task: Any, outputs: torch.Tensor, targets: torch.Tensor, origin: Any = 0.0) -> Any:
    """Its metrics, counted over batches of unequal sizes."""
    made = task.build(Facts(targets=Numbers(origin=origin)))
    sums = Sums(made, CPU)
    for out, target in zip(outputs.split(7), targets.split(7), strict=True):
        batch = Batch(None, target, len(target))
        sums.add(made.loss(out, batch), out, batch)
    return sums.averages(sums.values).values


def origin_of(data: Data) -> Any:
    targets = data.info.features.targets
    assert isinstance(targets, Numbers)
    return targets.origin


class Years(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows whose targets lie far from 0, and noise that nothing else may depend on."""

    def __init__(self, train: bool) -> None:
        self.targets = 2_000_000 + drawn(200, int(train))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(3), self.targets[index]


def test_r2_keeps_its_digits_where_targets_lie_far_from_0(tmp_path: Path) -> None:
    """The mean of what is trained on, or of a few samples, is subtracted; near 0 nothing is."""
    rows, path = Years(True), tmp_path / "t.npz"
    y = rows.targets.numpy()
    np.savez(path, x=np.ones((200, 1)), y=y, near=y - 2_000_000)
    own = Custom(target=f"{__name__}.Years", kwargs={})
    far, near = of(path, features=("x",)), of(path, "near", ("x",))
    origins = [origin_of(built(each)) for each in (far, own, near)]
    assert origins == pytest.approx([2_000_000, 2_000_000, 0], abs=2)
    scaled = of(path, features=("x",), standardise_targets=True)
    assert origin_of(built(scaled)) == 0
    assert origins[1] == origin_of(built(own, shard=Shard(1, 2)))
    outputs = rows.targets + drawn(200, 5)
    error, apart = (outputs - rows.targets).double(), rows.targets.double()
    expected = float(1 - error.square().sum() / (apart - apart.mean()).square().sum())
    for origin in origins[:2]:
        found = measured(NUMBER, outputs, rows.targets, origin)["r2"]
        assert found == pytest.approx(expected, abs=1e-9)
    assert abs(measured(NUMBER, outputs, rows.targets)["r2"] - expected) > 1e-5, "without it"


def test_r2_of_several_targets_takes_each_from_its_own_mean(tmp_path: Path) -> None:
    """Whoever says each target's mean knows nothing of it: 0, and not the 1.0 of all pooled."""
    targets = torch.tensor([[0.0, 2e6]]) + drawn((71, 2), 1)
    np.savez(path := tmp_path / "t.npz", x=np.ones((71, 1)), y=targets.numpy())
    origin = origin_of(built(of(path, features=("x",))))
    assert origin == pytest.approx((0, 2e6), abs=2)
    constant = targets.double().mean(0).float().expand(71, 2)
    assert measured(NUMBER, constant, targets, origin)["r2"] == pytest.approx(0, abs=0.01)
    targets[:, 0] = 0.7  # of whose variance rounding leaves something
    assert math.isnan(measured(NUMBER, constant, targets, origin)["r2"])


def test_to_look_at_targets_draws_no_random_number() -> None:
    torch.manual_seed(0)
    expected = [torch.rand(3) for _ in range(2)][1]  # the first sample tells the shapes
    torch.manual_seed(0)
    built(Custom(target=f"{__name__}.Years", kwargs={}))
    assert torch.equal(torch.rand(3), expected)


def test_rows_get_the_columns_of_the_run_by_their_names() -> None:
    numbers = Chosen(np.array([[1.0, 2.0, 3.0]])), Chosen(np.array([[4.0, 5.0]]))
    there = Rows(*numbers, ("a", "b", "c"), ("x", "y"), ())
    columns = Columns(names=("c", "a"), width=2, scales={"c": (1, 2)})
    run = Features(columns, Numbers(names=("y", "x"), shape=(2,)))
    opening = Opening(None, torch.device("cpu"), trained_on=run)
    train = table_source.of_rows(None, there, {"train": np.arange(1)}, opening).train
    (batch,) = train.whole(LoaderOptions(batch_size=1, device=opening.device)).evaluation()
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[1.0, 1.0]], [[5.0, 4.0]])
