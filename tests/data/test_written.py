"""Numbers and dates as people write them, and targets whose logarithms are trained on."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import expt
from expt.data.build import load
from expt.data.columns import Column
from expt.data.loading import Batch, LoaderOptions
from expt.data.written import ways_of
from expt.errors import ConfigError, DataError
from expt.features import Columns
from expt.inference.tables import inputs_of
from expt.late import Late
from expt.tasks.task import Facts
from tests.conftest import Trained
from tests.data.test_table import LABEL, NUMBER, built, of, samples, written
from tests.data.test_table_sources import SOURCES, Source, seen
from tests.facade import Capture

pandas: Any = Late("pandas")
metrics: Any = Late("sklearn.metrics")
POINT, COMMA = "1,234.5", "1.234,5"


@pytest.mark.parametrize(
    ("cells", "way", "numbers"),
    [
        ("1.234,56 7", COMMA, [1234.56, 7]),
        ("1,5 2", COMMA, [1.5, 2]),
        ("1,234 1,5 2.500", COMMA, [1.234, 1.5, 2500]),
        ("0,123 -4,5e3", COMMA, [0.123, -4500]),
        ("1,234.56 7", POINT, [1234.56, 7]),
        ("1,234 1.5", POINT, [1234, 1.5]),
        ("1,234,567 1,234", POINT, [1234567, 1234]),
        ("12,34,567.5 5", POINT, [1234567.5, 5]),
        ("1'234.50 -2", POINT, [1234.5, -2]),
        (",5 -,25 1.000,", COMMA, [0.5, -0.25, 1000]),
        ("1,234. 5. .5", POINT, [1234, 5, 0.5]),
        ("1\u00a0234,5 1\u202f000", COMMA, [1234.5, 1000]),
    ],
)
def test_numbers_of_a_column_are_written_in_one_way(
    cells: str, way: str, numbers: list[float]
) -> None:
    column = Column("a")
    assert column.read(pa.array([None, *cells.split(" ")])).tolist()[1:] == [[x] for x in numbers]
    assert (column.way, column.texts, column.has_gaps) == (way, {}, True)


@pytest.mark.parametrize(
    "cells",
    [
        ["1,234"],  # either
        ["1,234", "12"],
        ["1,234", "2.345"],
        ["1,5", "1.5"],  # both
        ["1.234,5", "1,234.5"],
        ["1,2", "3,4,5"],  # lists
        ["007,5", "1,5"],  # codes
        ["1.234.567"],
        ["192.168.100.200"],
        ["123 456"],
        ["1,5", "x"],
        ["12,345,67", "1"],
        ["1,5%", "2,5"],
        ["10:30"],
        ["01/02/2024"],  # either
        ["13/02/2024", "2024-01-31"],
        ["2024-02-30"],
        ["2024-01-31 24:00"],
        ["2024-01-31 10:60:00"],
        ["31.12.24"],
        ["2024-01"],
        ["1.2.3"],
        [""],
    ],
)
def test_others_stay_texts(cells: list[str]) -> None:
    assert len(ways_of(cells)) != 1
    column = Column("a")
    column.read(pa.array(cells))
    assert column.way == ""


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y-%m-%dT%H:%M"])
def test_dates_become_the_numbers_of_pandas(form: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    days = pandas.to_datetime("1987-03-01") + pandas.to_timedelta(draw.uniform(0, 2e4, 40), "D")
    texts = days.strftime(form)
    text = "\n".join(["day,y", *(f"{text},{x}" for x, text in enumerate(texts)), ",1"])
    data = built(of(written(tmp_path, text), features=None))
    day = pandas.to_datetime(texts, format=form).to_series()
    since = (day - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    wanted = np.array([day.dt.year, day.dt.month, day.dt.day_of_week, since]).T
    rows, inputs = samples(data.train)[0], data.info.features.inputs
    assert isinstance(inputs, Columns)
    assert inputs.names == ("day.year", "day.month", "day.weekday", "day.days")
    assert [line.split()[0] for line in inputs.in_words()] == ["columns", "day"]
    np.testing.assert_allclose(rows[:40, ::2], wanted, rtol=1e-7)  # by each a mark of gaps
    np.testing.assert_allclose(rows[40, ::2], np.median(wanted, axis=0), rtol=1e-7)
    given = inputs_of(of(tmp_path / "t.csv"), data.info.features)
    assert torch.equal(given([[text] for text in [*texts, None]]).flatten(1), rows)


def test_local_numbers_and_dates_are_the_same_from_each_source(tmp_path: Path) -> None:
    first, found = datetime.datetime(2024, 1, 31, 10), dict[str, Any]()
    table = pa.table({
        "price": [f"{x}.{x:03},{x}" if x % 7 else None for x in range(1, 61)],
        "day": pa.array([first + datetime.timedelta(hours=31 * x) for x in range(60)]),
        "y": [f"{x},5" for x in range(60)],
    })  # fmt: skip
    for source in SOURCES:
        found[source.__name__] = seen(
            source, table, tmp_path / source.__name__, NUMBER, "y", ("price", "day")
        )
    (rows, targets), features = found["as_csv"]
    assert features.inputs.encoded["price"]["way"] == COMMA
    assert features.inputs.encoded["y"] == {"way": COMMA}
    for (others, their_targets), theirs in found.values():
        assert theirs == features
        assert torch.equal(others, rows)
        assert torch.equal(their_targets, targets)


@pytest.mark.parametrize("source", SOURCES[:3])
def test_a_cell_that_is_written_otherwise_is_named(source: Source, tmp_path: Path) -> None:
    for number, cells in enumerate((["1,5"] * 10_001 + ["1.5"], ["2024-01-31"] * 10_001 + ["31"])):
        table = pa.table({"a": cells, "y": [*range(10_002)]})
        with pytest.raises(DataError, match=r"column a, row (10002|9977 of part-10\.csv): '"):
            seen(source, table, tmp_path / str(number), NUMBER, "y", ("a",))


def test_dates_are_no_targets(tmp_path: Path) -> None:
    path = written(tmp_path, "a,y\n1,2024-01-31\n2,2024-02-01\n")
    with pytest.raises(DataError, match="column y holds dates"):
        built(of(path, features=None))


def german(folder: Path) -> Path:
    draw, lines = np.random.default_rng(1), ["id;size;built;price"]
    for x in range(60):
        size, day = draw.uniform(40, 2000), datetime.date(1990, 1, 1 + x % 28)
        price = f"{size * 1900:,.2f}".translate(str.maketrans(",.", ".,"))
        lines.append(f"h{x};{size:.1f}".replace(".", ",") + f";{day:%d.%m.%Y};{price}")
    return written(folder, "\n".join(lines))


def test_a_run_reads_other_files_as_its_own(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    words = f"task=regression dataset=table dataset.path={german(tmp_path)} dataset.targets=price"
    words += " dataset.features=[size,built] dataset.standardise_targets=true"
    folder = trained(
        *words.split(), "dataset.target_transform=log", "model=mlp", "epochs=2", "batch_size=8"
    ).folder
    record = json.loads((folder / "result.json").read_text())["data"]
    assert record["inputs"]["encoded"]["size"] == {"way": COMMA}
    assert record["targets"]["transform"] == "log"
    model = expt.load(folder)
    (tmp_path / "new.csv").write_text("size;built;id\n1,500;03.04.1990;a\n;03.04.1990;b\n2,5;x;c\n")
    found = expt.predict(folder, tmp_path / "new.csv")
    assert [one["id"] for one in found] == ["a", "b"]
    assert "column size" in capsys.readouterr().err
    (skipped,) = found.skipped
    assert "'x', which is not written as day.month.year" in skipped
    rows = model.preprocess([["1,500", "03.04.1990"], [None, "03.04.1990"]])
    assert rows[1, 0] == 0
    with torch.no_grad():
        outputs = model(rows).flatten()
    scale = record["targets"]["scales"]["price"]
    wanted = np.exp(outputs.numpy().astype(float) * scale[1] + scale[0])
    np.testing.assert_allclose([one["price"] for one in found], wanted, rtol=1e-5)
    (tmp_path / "more.csv").write_text(
        "size;built;price\n1,500;03.04.1990;2.000,5\n;04.04.1990;1.000,25\n"
    )
    measured = expt.evaluate(folder, f"dataset.path={tmp_path / 'more.csv'}")
    more = model.preprocess([["1,500", "03.04.1990"], [None, "04.04.1990"]])
    with torch.no_grad():
        predicted = np.exp(model(more).flatten().numpy().astype(float) * scale[1] + scale[0])
    errors = np.abs(predicted - [2000.5, 1000.25])
    assert measured["mae/all"] == pytest.approx(errors.mean(), rel=1e-5)
    days = pandas.to_datetime(["1990-04-03", "1990-04-04"])
    typed = pandas.DataFrame({"size": [1.5, None], "built": days})
    assert torch.equal(model.preprocess(typed), more)
    assert torch.equal(model.preprocess(typed.to_numpy(object).tolist()), more)
    thousandth = (model.preprocess([[x, "03.04.1990"]]) for x in (1.234, "1,234"))
    assert torch.equal(*thousandth)
    typed.to_parquet(tmp_path / "more.parquet")
    again = expt.predict(folder, tmp_path / "more.parquet")
    np.testing.assert_allclose([one["price"] for one in again], predicted, rtol=1e-5)
    with pytest.raises(ConfigError, match="column size: "):
        model.preprocess([[1.5, "03.04.1990"], ["1,5", "03.04.1990"]])


@pytest.mark.parametrize("names", ["sale;sale.year;sale.days", "x;x[0];x.days.year"])
def test_a_name_alone_makes_no_part_of_a_date(tmp_path: Path, names: str) -> None:
    lines = [f"{x / 8:.3f};{x},5;{'ab'[x % 2]};{x}" for x in range(1, 41)]
    path = written(tmp_path, "\n".join([f"{names};y", *lines]))
    data = built(of(path, features=None))
    features, rows = data.info.features, samples(data.train)[0]
    given = inputs_of(of(path), features)
    given.open([path])
    (piece,) = given.pieces(100)
    assert torch.equal(given(piece.samples).flatten(1), rows)
    options = LoaderOptions(batch_size=64, device=torch.device("cpu"))
    measured = load(of(path, features=None), NUMBER, "all", features, options, own=False)
    assert torch.equal(samples(measured)[0], rows)


def test_a_column_that_is_called_as_a_part_of_another_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "day,day.year,y\n2024-01-31,1,2\n2024-02-01,2,3\n")
    with pytest.raises(DataError, match=r"two columns become day\.year"):
        built(of(path, features=None))


@pytest.mark.parametrize(
    ("cells", "is_refused"),
    [
        ("250.000 1.500 950", True),
        ("-250.000 ", True),
        ("250.000 0.500", False),
        ("1.5 2.25", False),
        ("1 2", False),
    ],
)
def test_numbers_next_to_local_ones_are_not_mistaken(
    cells: str, is_refused: bool, tmp_path: Path
) -> None:
    lines = [f"{each};{x},5;{x}" for x, each in enumerate(cells.split(" "), 1)]
    path = written(tmp_path, "\n".join(["a;b;y", *lines]))
    if not is_refused:
        expected = [float(each) for each in cells.split()]
        assert samples(built(of(path)).train)[0][:, 0].tolist() == expected
        return
    with pytest.raises(DataError, match=r"column a: -?250\.000 may also be -?250000, for"):
        built(of(path))
    named: Any = built(of(path, features=None, categories=("a",))).info.features.inputs
    assert "categories" in named.encoded["a"]


@pytest.mark.parametrize(
    ("cell", "fix"), [("250.000", "write 250000 or 250,000"), ("1.518.075", "write 1518075")]
)
def test_a_number_next_to_local_ones_is_written_out(cell: str, fix: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"a;y\n1,5;{cell}\n2,5;7\n")
    with pytest.raises(DataError, match=f"column y: {cell} .*; {fix}$"):
        built(of(path, features=("a",)))


@pytest.mark.parametrize("how", ["log", "log1p"])
@pytest.mark.parametrize("standardised", [True, False])
def test_logarithms_are_trained_on_and_numbers_measured(
    how: str, standardised: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(2)
    y = np.exp(draw.normal(5, 2, (40, 2)))
    text = "\n".join(["a,y,z", *(f"{x},{row[0]},{row[1]}" for x, row in enumerate(y))])
    options: Any = {"target_transform": how, "standardise_targets": standardised}
    data = built(of(written(tmp_path, text), ("y", "z"), ("a",), **options), batch_size=8)
    targets, logs = samples(data.train)[1].double(), getattr(np, how)(y)
    wanted = (logs - logs.mean(0)) / logs.std(0) if standardised else logs
    np.testing.assert_allclose(targets, wanted, rtol=1e-5, atol=1e-5)
    features = data.info.features.targets
    task = NUMBER.build(Facts(targets=features))
    outputs = targets + torch.from_numpy(draw.normal(0, 0.1, (40, 2)))
    sums = task.measure(outputs, Batch(targets, targets, 40))
    predicted = features.in_units(outputs).numpy()
    derived = task.derive({name: (x / n).tolist() for name, (x, n) in sums.items()})
    assert derived["r2"] == pytest.approx(metrics.r2_score(y, predicted), rel=1e-4)
    rmse = np.sqrt(((predicted - y) ** 2).mean(0)).mean()
    assert derived["rmse"] == pytest.approx(rmse, rel=1e-4)
    (shown,) = features.decoded(outputs, None)[0].values()
    np.testing.assert_allclose(shown, predicted, rtol=1e-5)


@pytest.mark.parametrize(("how", "cell"), [("log", "0"), ("log", "-2"), ("log1p", "-1")])
def test_targets_without_a_logarithm_are_named(how: str, cell: str, tmp_path: Path) -> None:
    chosen = of(written(tmp_path, f"a,y\n1,2\n2,{cell}\n"), features=None, target_transform=how)
    with pytest.raises(DataError, match=f"target_transform={how}: t.csv: column y, row 2: {cell}"):
        chosen.prepare(NUMBER)
    assert "target_transform" in chosen.problems(LABEL)[0]


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ([f"{x},5" for x in range(40)], "12.500 €"),
        ([f"{x},5" for x in range(40)], "12500.5"),
        ([f"2024-01-{x:02d}" for x in range(1, 29)], "unbekannt"),
        ([f"{x}.12.2024" for x in range(13, 32)], "k.A."),
    ],
)
def test_one_that_is_written_otherwise_is_named_by_its_row(
    usual: list[str], odd: str, tmp_path: Path
) -> None:
    lines = [f"{text};{number};{number % 3}" for number, text in enumerate([*usual, odd])]
    path = written(tmp_path, "\n".join(["when;a;y", *lines]))
    with pytest.raises(DataError, match=rf"column when, row {len(lines)}: '{re.escape(odd)}'"):
        of(path, features=None).load(NUMBER)
