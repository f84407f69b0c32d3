"""Tables with texts and gaps: the matrix that a model gets is scikit-learn's, fitted on train."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import expt
from expt.data import table_files, table_source
from expt.data.build import Data
from expt.data.indexing import split
from expt.data.kinds import Opening
from expt.data.loading import LoaderOptions
from expt.errors import ConfigError, DataError
from expt.features import Columns, Features
from expt.late import Late
from tests.conftest import Trained
from tests.data.test_table import CLASS, CPU, NUMBER, built, of, samples, written
from tests.facade import Capture, Patch

pandas: Any = Late("pandas")
impute: Any = Late("sklearn.impute")
preprocessing: Any = Late("sklearn.preprocessing")
pipeline: Any = Late("sklearn.pipeline")
compose: Any = Late("sklearn.compose")

N = 300
NAMES = ["age", "hours", "city", "smoker", "plan", "zip", "x"]
TEXTS = ["city", "plan", "zip"]
DRAW = np.random.default_rng(4)
AGE, SMOKER = DRAW.integers(18, 90, N).astype(float), DRAW.choice(["yes", "No"], N)
HIGH = (AGE > 50) ^ (SMOKER == "yes")
REST, TEST = split(N, 0.25, None, torch.from_numpy(HIGH))
TRAIN, VAL = split(len(REST), 0.2, None, torch.from_numpy(HIGH)[REST])


def people() -> Any:
    """An odd table: gaps, spellings, a sign in a cell, a city of the test rows only, an ID."""
    r = np.random.default_rng(3)
    frame = pandas.DataFrame({"id": np.arange(N), "age": AGE})
    frame["hours"] = r.normal(40, 8, N).round(1)
    frame["city"] = r.choice(["Paris", "Rome", "Zürich", "Oslo; N"], N)
    frame["smoker"] = SMOKER
    frame["plan"] = r.choice(["Yes", "No", "No internet service"], N)
    frame["zip"] = r.choice([10115, 20095, 80331], N)
    frame["x"] = r.choice([True, False], N)
    frame["void"] = None
    frame["y"] = np.where(HIGH, "high", "low")
    for name, share in (("age", 0.1), ("city", 0.05)):
        frame.loc[r.random(N) < share, name] = None
    frame.loc[REST[TRAIN].numpy()[::5], "city"] = "Rome"
    frame.loc[TEST.numpy()[:3], "city"] = "Bern"
    frame.loc[TEST.numpy()[:7], "hours"] = None
    return frame


def save(frame: Any, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep=";", index=False)
    return path


def by_scikit_learn(frame: Any, rows: Any, *, scales: bool = False) -> Any:
    """All columns, fitted on the rows that are trained on."""
    of_texts = preprocessing.OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    scaled = preprocessing.StandardScaler() if scales else "passthrough"
    of_numbers = pipeline.make_union(
        pipeline.make_pipeline(impute.SimpleImputer(strategy="median"), scaled),
        impute.MissingIndicator(error_on_new=False),
    )
    each = [(name, of_texts if name in TEXTS else of_numbers, [name]) for name in NAMES]
    plain = frame.assign(smoker=frame["smoker"].map({"yes": 1, "No": 0}), x=frame["x"] * 1.0)
    plain = plain.assign(zip=plain["zip"].astype(str), city=plain["city"].fillna(math.nan))
    fitted = compose.ColumnTransformer(each).fit(plain.iloc[REST[TRAIN]])
    return fitted.transform(plain.iloc[rows])


def opened(path: Path, **options: Any) -> Any:
    more = {"test_fraction": 0.25, "val_fraction": 0.2, "categories": ("zip",), **options}
    return built(of(path, features=None, **more), CLASS)


@pytest.mark.parametrize(("name", "scales"), [("t.csv", True), ("t.parquet", False)])
def test_the_matrix_is_scikit_learns(
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    name: str,
    scales: bool,
) -> None:
    monkeypatch.setattr(table_files, "_BYTES", 4096)  # several blocks, in which kinds show late
    frame = people()
    data = opened(save(frame, tmp_path / name), standardise=scales)
    assert "column city: no training row has 'Bern'" in capsys.readouterr().err
    for loader, rows in ((data.train, REST[TRAIN]), (data.val, REST[VAL]), (data.test, TEST)):
        expected = by_scikit_learn(frame, rows, scales=scales).astype(np.float32)
        np.testing.assert_allclose(samples(loader)[0], expected, rtol=1e-6, atol=1e-6)
    inputs = encoded_in(data)
    assert (inputs.names, inputs.width) == (tuple(NAMES), len(expected[0]))
    assert inputs.scales.keys() == ({*NAMES} - {*TEXTS} if scales else set())
    assert json.loads(json.dumps(inputs.encoded)) == inputs.encoded


def encoded_in(data: Data) -> Columns:
    inputs = data.info.features.inputs
    assert isinstance(inputs, Columns)
    return inputs


def test_rows_that_are_held_out_tell_nothing(tmp_path: Path) -> None:
    frame = people()
    before = opened(save(frame, tmp_path / "t.csv"), standardise=True)
    held_out = torch.cat([TEST, REST[VAL]]).numpy()
    frame.loc[held_out, "age"], frame.loc[held_out, "city"] = 1e6, "Atlantis"
    after = opened(save(frame, tmp_path / "t.csv"), standardise=True)
    assert after.info.features == before.info.features
    assert torch.equal(samples(after.train)[0], samples(before.train)[0])


@pytest.mark.slow
def test_what_a_run_does_with_other_rows(trained: Trained, tmp_path: Path) -> None:
    """Two workers train; then its test, new rows in another order, an evaluation, Python."""
    frame, path = people(), tmp_path / "people.csv"
    words = f"task=classification dataset=table dataset.path={save(frame, path)} dataset.targets=y"
    words += " dataset.test_fraction=0.25 dataset.val_fraction=0.2 dataset.categories=[zip]"
    folder = trained(*words.split(), "epochs=1", "world_size=2").folder
    model = expt.load(folder)

    def outputs(matrix: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.model(torch.from_numpy(matrix).float()[:, None, None])
        return found

    def said(found: Any) -> list[float]:
        return [record["probabilities"]["high"] for record in found]

    other = frame.sample(60, random_state=0)
    other.iloc[:3, other.columns.get_loc("city")] = "Ulm"
    other.iloc[3:5, other.columns.get_loc("plan")] = None
    ids = ["", *(str(2**60 + number) for number in range(59))]
    other["id"] = pandas.array([None, *map(int, ids[1:])], dtype="Int64")
    whole = pandas.concat([frame, other], ignore_index=True)
    matrix = by_scikit_learn(whole, range(N, N + 60), scales=True)
    logits = outputs(matrix)
    for name in ("new.csv", "new.parquet"):
        turned = other[["zip", "plan", "id", "x", "hours", "city", "age", "smoker", "y"]]
        turned = turned.assign(row=other["id"])
        found = expt.predict(folder, save(turned, tmp_path / name), batch_size=16)
        np.testing.assert_allclose(said(found), logits.softmax(1)[:, 0], rtol=1e-4)
        for key in ("id", "table.row"):
            assert [record[key] for record in found] == ids
        assert {"zip", "y"}.isdisjoint(found[0])
    evaluated = expt.evaluate(folder, f"dataset.path={tmp_path / 'new.csv'}")
    labels = torch.tensor([model.class_names.index(name) for name in other["y"]])
    loss = float(functional.cross_entropy(logits, labels))
    assert evaluated["loss/all"] == pytest.approx(loss, rel=1e-5)
    tested = outputs(by_scikit_learn(frame, TEST, scales=True)).softmax(1)[:, 0]
    np.testing.assert_allclose(said(expt.predict(folder, split="test")), tested, rtol=1e-4)
    rows = [[None if cell != cell else cell for cell in row] for row in other[NAMES].to_numpy()]
    for several in (other, rows, [tuple(row) for row in rows]):
        given = model.preprocess(several).flatten(1)
        np.testing.assert_allclose(given, matrix, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="column smoker holds 'often'"):
        model.preprocess([*rows[0][:3], "often", *rows[0][4:]])


def test_rows_that_a_run_does_not_take(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,y\n1,u,1\n2,v,2\n3,u,3\n")
    known = Features(*(each.unscaled for each in built(of(path)).info.features))
    other = of(written(tmp_path, "a,b,y\nx,u,1\nz,v,2\n"), features=None)
    with pytest.raises(DataError, match="column a: has texts, and had none in training"):
        other.open(Opening(NUMBER, CPU, 0, known))
    source = of(written(tmp_path, "a,b,y\n1,u,1\n,v,2\n"), features=None).open(
        Opening(NUMBER, CPU, 0, known)
    )
    (note,) = source.notes
    assert "column a" in note
    assert "(1 rows)" in note
    options = LoaderOptions(batch_size=2, device=CPU)
    (batch,) = source.train.whole(options).evaluation()
    assert batch.inputs.tolist() == [[1, 1, 0], [2, 0, 1]]  # the mean of 1, 2, 3
    numbers = of(written(tmp_path, "a,b,y\n1,7,1\n1,,2\n"), features=None)
    source = numbers.open(Opening(NUMBER, CPU, 0, known))
    assert source.train.size == 2
    (note,) = source.notes
    assert "'7', a gap" in note
    rest, _ = split(N, 0.25, None)  # of numbers: there are no classes
    train = rest[split(len(rest), 0.2, None)[0]]
    empty = "a,b,y\n" + "".join(f"{'' if row in train else 1},{row},1\n" for row in range(N))
    with pytest.raises(DataError, match="column a: has no value in the 180 rows"):
        built(of(written(tmp_path, empty), test_fraction=0.25, val_fraction=0.2))


def test_yes_and_no_are_numbers_unless_there_is_more(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,y\nyes,Yes,1\nNO,no,2\ntrue,perhaps,3\n")
    data = built(of(path))
    assert samples(data.train)[0].tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]
    flags = {"a": {"flags": ["no", "true", "yes"]}}
    assert encoded_in(data).encoded == {**flags, "b": {"categories": ["Yes", "no", "perhaps"]}}
    labels = of(written(tmp_path, "a,y\n1,yes\n2,no\n"), features=("a",)).load(NUMBER)
    assert labels.targets[:].tolist() == [[1], [0]]


def test_a_table_without_texts_and_gaps_is_as_before(tmp_path: Path) -> None:
    rows = of(written(tmp_path, "a,b,y\n1,2,3\n3,4,5\n")).load(NUMBER)
    assert not table_source.encodings(rows, np.arange(2))
    assert not encoded_in(built(of(tmp_path / "t.csv"))).encoded


def test_the_columns_are_shown_in_few_lines() -> None:
    encoded: dict[str, Any] = {"age": {"median": 37.0, "gaps": 4}, "smoker": {"flags": ["no"]}}
    encoded |= {f"c{x}": {"categories": ["u", *"vwxy"[:x], None]} for x in range(4)}
    _, *shown = Columns(names=("x", *encoded), encoded=encoded, width=17).in_words()
    assert [line.split()[0] for line in shown] == ["x", *encoded]
    assert "4 gaps" in shown[1]
    encoded |= {f"d{x}": {"categories": [*"uvw"]} for x in range(50)}
    many = [*Columns(names=(*encoded,), encoded=encoded, width=17).in_words()]
    assert len(many) < 20
    assert max(map(len, many)) < 100
    assert not [*Columns(names=("x",), width=1).in_words()]
