"""What a run's model says of files and of parts of its dataset, against plain torch on the same
weights."""

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import expt
from expt.errors import ConfigError, DataError
from expt.features import Answers, Anything, Features, Numbers
from expt.inference.writing import to_file
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from tests import every_task
from tests.conftest import Configured
from tests.facade import Capture, as_typed
from tests.inference.conftest import CLASSES, MEAN, SHORT, STD, Made, Make, mlp
from tests.inference.test_load import BOOK, FEW


def image(path: Path) -> Tensor:
    """As the model takes it, by hand."""
    pixels = (np.asarray(Image.open(path)) / 255 - MEAN) / STD
    return torch.tensor(pixels.transpose(2, 0, 1).copy(), dtype=torch.float32).flatten()


def test_probabilities_are_those_of_plain_torch(photos: Made) -> None:
    files = sorted((photos.data / "test").glob("*/*.png"))
    expected = mlp(photos.weights, torch.stack([image(file) for file in files])).softmax(1)
    found = expt.predict(photos.folder, photos.data / "test", batch_size=4)
    assert [record["path"] for record in found] == [*map(str, files)]
    for record, chances in zip(found, expected.tolist(), strict=True):
        right = dict(zip(CLASSES, chances, strict=True))
        assert record["probabilities"] == pytest.approx(right, abs=1e-6)
        best = max(range(2), key=chances.__getitem__)
        assert record["class"] == CLASSES[best]
        assert record["probability"] == pytest.approx(chances[best], abs=1e-6)
    again = expt.predict(photos.folder, [files[5], photos.data / "test" / "cat", files[0]], top=1)
    assert [record["path"] for record in again] == [str(files[place]) for place in (5, 3, 4, 5, 0)]
    assert again[0]["top"] == [{"class": again[0]["class"], "probability": again[0]["probability"]}]
    assert not {"probabilities"} & again[0].keys()


def test_a_split_has_its_truth_and_gives_the_runs_own_accuracy(photos: Made) -> None:
    metrics = RunPaths(photos.folder)
    tested = json.loads(metrics.result.read_text())["metrics"]
    for size in (None, 1, 4):
        found = expt.predict(photos.folder, split="test", batch_size=size)
        right = [record["class"] == record["target"] for record in found]
        assert sum(right) / len(right) == tested["accuracy/test"]
        losses = [-math.log(record["probabilities"][record["target"]]) for record in found]
        assert np.mean(losses) == pytest.approx(tested["loss/test"], abs=1e-6)
        assert all(Path(record["path"]).parent.name == record["target"] for record in found)
    held_out = expt.predict(photos.folder, split="val")
    assert all("/train/" in record["path"] for record in held_out)
    table = pytest.importorskip("pandas").DataFrame
    assert isinstance(found.to_pandas(), table)
    assert {"path", "class", "target", "p_cat"} <= {*found.to_pandas().columns}


def test_arrays_of_images_in_any_of_the_usual_layouts(photos: Made, tmp_path: Path) -> None:
    files = sorted((photos.data / "test").glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    expected = [record["probability"] for record in expt.predict(photos.folder, files)]
    np.save(tmp_path / "last.npy", pixels)
    np.savez(tmp_path / "first.npz", images=pixels.transpose(0, 3, 1, 2), labels=np.arange(6))
    np.save(tmp_path / "floats.npy", pixels / 255)
    for name in ("last.npy", "first.npz", "floats.npy"):
        found = expt.predict(photos.folder, tmp_path / name, batch_size=4)
        assert [record["probability"] for record in found] == pytest.approx(expected, abs=1e-6)
        assert [record["index"] for record in found] == [*range(6)]
    np.save(tmp_path / "one.npy", pixels[0])
    assert expt.predict(photos.folder, tmp_path / "one.npy")[0]["probability"] == pytest.approx(
        expected[0], abs=1e-6
    )
    for name, wrong, told in (
        ("ints", pixels.astype(int), "holds int64; give uint8"),
        ("wide", pixels[:, :, :9], r"the model takes \[images, 3, 12, 16\]"),
        ("none", pixels[:0], r"is \[0, 12, 16, 3\] of uint8; give samples of numbers"),
        ("to_255", pixels.astype(np.float32), "holds floats from 0 to 255, expected 0 to 1"),
    ):
        np.save(tmp_path / f"{name}.npy", wrong)
        with pytest.raises(ConfigError, match=told):
            expt.predict(photos.folder, tmp_path / f"{name}.npy")


def patients_by_hand(made: Made) -> list[float]:
    """By the recorded means and deviations, and torch."""
    features = Features.read(json.loads(RunPaths(made.folder).result.read_text())["data"])
    scales = {**features.inputs.scales, **features.targets.scales}
    rows = list(csv.DictReader(made.data.read_text().splitlines()))
    names = [name for name in rows[0] if name != "progression"]
    scaled = [scales.get(name, (0.0, 1.0)) for name in names]
    inputs = [
        [(float(row[name]) - mean) / std for name, (mean, std) in zip(names, scaled, strict=True)]
        for row in rows
    ]
    outputs = mlp(made.weights, torch.tensor(inputs, dtype=torch.float64).float())[:, 0].tolist()
    mean, deviation = scales["progression"]
    return [output * deviation + mean for output in outputs]


def test_a_tables_values_are_in_the_targets_own_units(patients: Made, tmp_path: Path) -> None:
    expected = patients_by_hand(patients)
    found = expt.predict(patients.folder, patients.data, batch_size=100)
    assert [record["progression"] for record in found] == pytest.approx(expected, rel=1e-5)
    assert [record["row"] for record in found] == [*range(1, 443)]
    trained = expt.predict(patients.folder, split="train")
    assert [record["progression"] for record in trained] == [
        pytest.approx(expected[record["row"] - 1], rel=1e-5) for record in trained
    ]
    # more than an evaluation takes at a time
    assert len({record["row"] for record in trained}) == 319
    tested = expt.predict(patients.folder, split="test")
    assert [record["progression"] for record in tested] == [
        pytest.approx(expected[record["row"] - 1], rel=1e-5) for record in tested
    ]
    assert {record["target"]["progression"] for record in tested} <= set(range(25, 347))


@pytest.mark.slow
def test_a_table_that_has_changed_is_seen_by_the_scales_of_the_run(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    data = tmp_path / "changed.csv"
    header, *lines = (Path(expt.__file__).parent / "data" / "diabetes.csv").read_text().splitlines()
    data.write_text("\n".join([header, *lines]))
    words = as_typed(f"dataset=table dataset.path={data} dataset.targets=progression")
    words += as_typed("task=regression model.hidden=[7]")
    made = make("changed", configured(*SHORT, *words, "dataset.standardise_targets=true"), data)
    before = expt.predict(made.folder, split="test")
    tested = {record["row"] for record in before}
    changed = [line if row in tested else f"9{line}" for row, line in enumerate(lines, 1)]
    data.write_text("\n".join([header, *changed]))
    assert expt.predict(made.folder, split="test") == before


@pytest.mark.slow
def test_rows_of_a_hugging_face_dataset_are_rows(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    data = tmp_path / "set" / "train.csv"
    data.parent.mkdir()
    shutil.copy(Path(expt.__file__).parent / "data" / "diabetes.csv", data)
    source = f"task=regression dataset=huggingface dataset.path={data.parent}"
    words = as_typed(f"{source} dataset.input=[age,bmi,bp] dataset.target=progression")
    words += as_typed("dataset.standardise_targets=true model=mlp model.hidden=[7]")
    made = make("rows", configured(*SHORT, *words, "dataset.val_fraction=0.2"), data)
    held_out = expt.predict(made.folder, split="val")
    assert 100 < np.mean([record["progression"] for record in held_out]) < 200, (
        "in the targets' own units"
    )
    assert {record["target"]["progression"] for record in held_out} <= set(range(25, 347))
    found = expt.predict(made.folder, data)
    for record in held_out:
        assert record["progression"] == pytest.approx(
            found[record["index"]]["progression"], rel=1e-5
        )


def test_numbers_come_back_by_their_deviation_not_their_size() -> None:
    far = Numbers(names=("at", "x"), shape=(2,), scales={"at": (1.7e9, 40.0), "x": (0.0, 0.003)})
    arrays, _ = far.decoded(
        torch.tensor([[0.25, 1.0], [-1.5, 2.5]]), torch.tensor([[0.3, 0.0], [0.0, 1.0]])
    )
    assert arrays["values"].tolist() == [[1.7e9 + 10, 0.003], [1.7e9 - 60, 0.0075]]
    assert arrays["target"].tolist() == [[1.7e9 + 12, 0.0], [1.7e9, 0.003]]
    assert (
        far.answer({name: array.tolist() for name, array in arrays.items()}, 0)["at"] == 1.7e9 + 10
    )
    as_they_are, _ = Numbers(names=("x",)).decoded(torch.tensor([[0.1], [16777216.0]]), None)
    assert as_they_are["values"].tolist() == [[0.1], [16777216.0]]


def test_a_folder_of_folders_is_a_table_as_in_training(patients: Made, tmp_path: Path) -> None:
    header, *lines = (line.split(",") for line in patients.data.read_text().splitlines()[:7])
    place, expected = header.index("sex"), dict[str, float]()
    for number, line in enumerate(lines):
        folder = tmp_path / "parts" / f"sex={line.pop(place)}"
        folder.mkdir(parents=True, exist_ok=True)
        names = ["id", *header[:place], *header[place + 1 :]]
        (folder / f"{number}.csv").write_text("\n".join([",".join(names), ",".join(["0", *line])]))
        expected[str(folder / f"{number}.csv")] = patients_by_hand(patients)[number]
    found = expt.predict(patients.folder, tmp_path / "parts")
    other = tmp_path / "other" / "k=1"  # the model takes no k
    other.mkdir(parents=True)
    shutil.copy(patients.data, other / "a.csv")
    np.save(other / "b.npy", np.zeros((1, len(header) - 1)))
    assert len(list(expt.predict(patients.folder, other.parent))) == 443
    in_order = [expected[file] for file in sorted(expected)]
    assert [record["progression"] for record in found] == pytest.approx(in_order, rel=1e-5)


def test_a_folder_that_is_a_table_keeps_its_place_among_files(
    patients: Made, tmp_path: Path
) -> None:
    header, *lines = (line.split(",") for line in patients.data.read_text().splitlines()[:7])
    place, expected = header.index("sex"), patients_by_hand(patients)[:6]
    names, bad = [*header[:place], *header[place + 1 :]], ",".join("x" * 30)
    folder = tmp_path / "hive" / f"sex={lines[5][place]}"
    folder.mkdir(parents=True)
    rest = [*lines[5][:place], *lines[5][place + 1 :]]
    (folder / "a.csv").write_text("\n".join([",".join(names), ",".join(rest), bad]))
    (tmp_path / "a.csv").write_text("\n".join(map(",".join, [header, *lines[:5]])))
    paths = [tmp_path / "a.csv", tmp_path / "hive"]
    for given, order in ((paths, [*range(6)]), (paths[::-1], [5, *range(5)])):
        found = expt.predict(patients.folder, given)
        assert [answer["path"] for answer in found] == [str(paths[at == 5]) for at in order]
        wanted = [expected[at] for at in order]
        assert [answer["progression"] for answer in found] == pytest.approx(wanted, rel=1e-5)
        assert found.skipped == [f"{paths[1]}: row 2: has 30 cells for 10 columns"]


def test_columns_are_found_by_name_in_every_kind_of_table(
    patients: Made, tmp_path: Path, capsys: Capture
) -> None:
    header, *lines = (line.split(",") for line in patients.data.read_text().splitlines()[:7])
    expected = patients_by_hand(patients)[:6]
    rows = [["note", *header[-2::-1]], *(["007", *line[-2::-1]] for line in lines)]
    turned = [",".join(row) for row in rows]
    (tmp_path / "turned.csv").write_text("\n".join(turned))
    numbers = np.array(lines, float)
    np.savez(tmp_path / "columns.npz", **dict(zip(header, numbers.T, strict=True)))
    np.save(tmp_path / "features.npy", numbers[:, :-1])
    names = ["turned.csv", "columns.npz", "features.npy"]
    table = pyarrow.table(dict(zip(header, numbers.T, strict=True)))
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    for name in (*names, "t.parquet"):
        found = expt.predict(patients.folder, tmp_path / name, batch_size=4)
        said = [record["progression"] for record in found]
        assert said == pytest.approx(expected, rel=1e-5), name
        beside = ["007"] * 6 if name == "turned.csv" else [None] * 6
        assert [record.get("note") for record in found] == beside
        assert [record["row"] for record in found] == [1, 2, 3, 4, 5, 6], name
    turned[2], turned[4] = turned[2].replace(lines[1][2], ""), turned[4] + ",1"
    (tmp_path / "turned.csv").write_text("\n".join(turned))
    found = expt.predict(patients.folder, tmp_path / "turned.csv", batch_size=4)
    assert [record["row"] for record in found] == [1, 2, 3, 5, 6]
    rest = [line.partition("row ")[2] for line in found.skipped]
    assert rest == ["4: has 12 cells for 11 columns"]
    warned = capsys.readouterr().err
    assert warned.count("warning: ") == 2
    assert "column bmi: no training row has a gap (1 rows)" in warned
    mean = expt.load(patients.folder).features.inputs.scales["bmi"][0]
    (tmp_path / "turned.csv").write_text(
        "\n".join([turned[0], turned[2].replace(",,", f",{mean},")])
    )
    (filled,) = expt.predict(patients.folder, tmp_path / "turned.csv")
    assert found[1]["progression"] == pytest.approx(filled["progression"], rel=1e-6)
    (tmp_path / "turned.csv").write_text("\n".join(turned).replace("bmi", "BMI"))
    with pytest.raises(ConfigError, match=r"turned\.csv: has no column bmi.*Did you mean 'BMI'\?"):
        expt.predict(patients.folder, tmp_path / "turned.csv")


def test_the_numbers_of_lists_are_found_by_the_names_of_their_columns(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    """Not by how many there are: as many in other columns would be other features."""
    rows = np.random.default_rng(0).random((24, 5))
    data = {"x": rows[:, :2], "z": rows[:, 2:], "y": rows.sum(1)}
    np.savez(tmp_path / "data.npz", **data)
    words = "dataset=table task=regression model=mlp batch_size=8 dataset.targets=y epochs=1"
    config = configured(*as_typed(words), f"dataset.path={tmp_path / 'data.npz'}")
    made = make("lists", config, tmp_path)
    expected = [one["y"] for one in expt.predict(made.folder, tmp_path / "data.npz")]
    np.savez(tmp_path / "turned.npz", z=data["z"], x=data["x"])
    assert [one["y"] for one in expt.predict(made.folder, tmp_path / "turned.npz")] == expected
    np.savez(tmp_path / "swapped.npz", x=data["z"], z=data["x"])
    with pytest.raises(ConfigError, match=r"swapped\.npz: has no column z\[2\]"):
        expt.predict(made.folder, tmp_path / "swapped.npz")
    np.save(tmp_path / "short.npy", rows[:, :4])
    with pytest.raises(ConfigError, match="has 4 columns, and the model takes 5"):
        expt.predict(made.folder, tmp_path / "short.npy")


def test_a_missing_column_of_dates_is_named_as_in_the_table(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    rows = [f"{number},2024-01-{number % 28 + 1:02},{number * number}" for number in range(24)]
    (tmp_path / "t.csv").write_text("\n".join(["a,sold,y", *rows]))
    words = "dataset=table task=regression model=mlp batch_size=8 dataset.targets=y epochs=1"
    own = f"{words} dataset.features=[a,sold]"
    made = make("dates", configured(*as_typed(own), f"dataset.path={tmp_path / 't.csv'}"), tmp_path)
    (tmp_path / "new.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"new\.csv: has no column sold, which"):
        expt.predict(made.folder, tmp_path / "new.csv")


def test_it_is_as_precise_as_the_run_was_or_as_is_asked(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    made = make("half", configured(*SHORT, "amp=bf16"), tmp_path)
    images = np.random.default_rng(0).random((9, 1, 8, 8))
    np.save(tmp_path / "images.npy", images)
    for amp in ("recorded", False):
        loaded = expt.load(made.folder, amp=amp)
        with torch.no_grad():
            expected = loaded(loaded.preprocess(images)).float().softmax(1)
        found = expt.predict(made.folder, tmp_path / "images.npy", amp=amp)
        assert [[*record["probabilities"].values()] for record in found] == [
            pytest.approx(each, abs=1e-7) for each in expected.tolist()
        ]
    assert expt.predict(made.folder, tmp_path / "images.npy") != found


def test_labels_and_their_probabilities(make: Make, configured: Configured, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((40, 4)).round(3)
    labels = (values[:, :2] > 0.5).astype(int)
    rows = [",".join(map(str, [*row, *label])) for row, label in zip(values, labels, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d,red,green", *rows]))
    table = ("dataset=table", f"dataset.path={tmp_path / 't.csv'}", "dataset.targets=[red,green]")
    plain = as_typed("dataset.standardise=false task=multilabel task.threshold=0.4")
    plain += ("model.hidden=[3]",)
    made = make("labels", configured(*SHORT, *table, *plain), tmp_path)
    expected = mlp(made.weights, torch.tensor(values, dtype=torch.float32)).sigmoid().tolist()
    found = expt.predict(made.folder, tmp_path / "t.csv")
    for record, chances in zip(found, expected, strict=True):
        right = dict(zip(("red", "green"), chances, strict=True))
        assert record["probabilities"] == pytest.approx(right, abs=1e-6)
        assert record["labels"] == [
            name for name, chance in record["probabilities"].items() if chance >= 0.4
        ]


def test_how_likely_a_text_is(make: Make, configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK)
    small = ("model.layers=1", "model.width=16", "model.heads=2", "dataset.context=16")
    words = ("experiment=char_lm", f"dataset.root={tmp_path / 'book.txt'}", *small, *SHORT)
    made = make("text", configured(*words), tmp_path)
    lines = ["to be or not to be, that is the question.", "", "x", "äöü"]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    found = expt.predict(made.folder, tmp_path / "lines.txt", batch_size=2)
    assert [(record["line"], record["tokens"]) for record in found] == [(1, 40), (3, 0), (4, 5)]
    loaded, tokens = expt.load(made.folder), torch.tensor(list(lines[0].encode()))
    total = 0.0
    for start in range(0, 40, 16):
        window = tokens[start : start + 17]
        with torch.no_grad():
            total += functional.cross_entropy(
                loaded(window[None, :-1])[0], window[1:], reduction="sum"
            ).item()
    assert found[0]["loss"] == pytest.approx(total / 40, rel=1e-5)
    assert found[0]["perplexity"] == pytest.approx(math.exp(total / 40), rel=1e-5)
    assert math.isnan(found[1]["loss"])
    windows = expt.predict(made.folder, split="test")
    whole = sum(record["loss"] * record["tokens"] for record in windows) / sum(
        record["tokens"] for record in windows
    )
    tested = json.loads(RunPaths(made.folder).result.read_text())["metrics"]["loss/test"]
    assert whole == pytest.approx(tested, rel=1e-5)


def test_pictures_for_a_dataset_of_ones_own_are_taken_with_a_warning(
    make: Make, configured: Configured, tmp_path: Path, capsys: Capture
) -> None:
    config = every_task.config_of("classification", configured)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, metrics={}))
    made, pixels = make("pictures", config, tmp_path), np.arange(16, dtype=np.uint8).reshape(4, 4)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (found,) = expt.predict(made.folder, tmp_path / "a.png")
    expected = (
        mlp(made.weights, torch.from_numpy(pixels / 255).float().flatten()).softmax(0).tolist()
    )
    assert [*found["probabilities"].values()] == pytest.approx(expected, abs=1e-6)
    assert "does not prepare pictures of a prediction" in capsys.readouterr().err


def test_a_text_for_a_custom_dataset_needs_its_tokens(
    make: Make, configured: Configured, tmp_path: Path
) -> None:
    config = every_task.config_of("language_model", configured)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, metrics={}))
    made, text = make("lines", config, tmp_path), tmp_path / "lines.txt"
    text.write_text("to be or not to be")
    with pytest.raises(ConfigError, match="Lines: how it makes tokens of a text is not known"):
        expt.predict(made.folder, text)
    preprocess = expt.load(made.folder).preprocess
    with pytest.raises(ConfigError, match="give tokens"):
        preprocess("to be")
    assert preprocess(torch.tensor([[1, 2]])).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([[0.5], [1.0]]), [0.5, 1.0]),
        (torch.zeros(2, 3), None),
        ((torch.zeros(2), torch.zeros(2)), None),
        (None, None),
    ],
)
def test_what_an_own_task_predicts_lies_beside_targets_of_one_value(
    targets: Any, told: list[float] | None
) -> None:
    predicted = {"target": torch.tensor([7, 8]), "p": torch.tensor([[0.5, 0.25], [1.0, 0.0]])}
    form, about = Anything(), [{"index": 0}, {"index": 1}]
    found = [*form.answers(Answers(about, *form.decoded(predicted, targets)))]
    assert [record["target predicted"] for record in found] == [7, 8]
    assert [record["p"] for record in found] == [[0.5, 0.25], [1.0, 0.0]]
    assert [record["target"] for record in found if "target" in record] == (told or [])


@pytest.mark.slow
def test_a_task_and_samples_of_ones_own(make: Make, configured: Configured, tmp_path: Path) -> None:
    config = every_task.config_of("own", configured)
    made = make("own", dataclasses.replace(config, batch_size=4, world_size=1), tmp_path)
    sizes: list[int] = []
    hook = register_module_forward_hook(lambda _, inputs, outputs: sizes.append(len(outputs)))
    found = expt.predict(made.folder, split="test")
    hook.remove()
    assert max(sizes) == 4, "at most as many at a time as in training"
    samples = [each for each, _ in every_task.Weighted(train=False).samples]
    with torch.no_grad():
        rows = torch.stack([each["row"] for each in samples])
        expected = functional.linear(rows, *made.weights.values())[:, 0]
    assert [record["output"] for record in found] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [record["index"] for record in found] == [*range(every_task.TESTED_ON)]
    assert not any("target" in record for record in found), "they are pairs"
    config = every_task.config_of("multilabel", configured)
    # torchmetrics takes 4 s
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, metrics={}))
    images = make("labelled", config, tmp_path)
    labelled = np.stack([row.numpy() for row, _ in every_task.Labels(train=False).samples])
    np.save(tmp_path / "rows.npy", labelled)
    np.save(tmp_path / "wide.npy", labelled[:, :5])
    chances = mlp(images.weights, torch.from_numpy(labelled)).sigmoid()
    found = expt.predict(images.folder, tmp_path / "rows.npy")
    assert [[*record["probabilities"].values()] for record in found] == [
        pytest.approx(each, abs=1e-6) for each in chances.tolist()
    ]
    with pytest.raises(ConfigError, match=r"wide\.npy: samples are \[5\]"):
        expt.predict(images.folder, tmp_path / "wide.npy")


def test_changed_data_are_told(
    make: Make, configured: Configured, tmp_path: Path, capsys: Capture
) -> None:
    rows = [f"{number},{number % 7},{number % 2}" for number in range(30)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["a,b,y", *rows]))
    words = as_typed(f"dataset=table dataset.path={table} dataset.targets=y batch_size=8")
    words += ("model.hidden=[3]",)
    made = make("changed", configured(*FEW[:2], *words), tmp_path)
    update_result(RunPaths(made.folder), content={"data": "another", "code": None})
    assert len(expt.predict(made.folder, split="test")) == 6
    assert "the dataset's files are other than those of the run" in capsys.readouterr().err
    table.unlink()
    with pytest.raises(DataError, match="there is no such file"):
        expt.predict(made.folder, split="test")


def test_a_dict_for_each_sample_may_have_tensors_of_any_shape(tmp_path: Path) -> None:
    predicted = [
        {"boxes": torch.arange(4.0 * number).view(-1, 4), "score": torch.tensor(0.1 * number)}
        for number in (2, 0, 1)
    ]
    form = Anything()
    arrays, names = form.decoded(predicted, None)
    given = Answers([{"index": at} for at in range(3)], arrays, names)
    with to_file(tmp_path / "found.jsonl", force=False) as write:
        write(given, form)
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [len(line["boxes"]) for line in lines] == [2, 0, 1]
    assert lines[0]["boxes"] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert [line["score"] for line in lines] == pytest.approx([0.2, 0.0, 0.1])
    refused = pytest.raises(ConfigError, match=r"boxes: .*jsonl")
    with refused, to_file(tmp_path / "found.npz", force=False) as write:
        write(given, form)
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]
