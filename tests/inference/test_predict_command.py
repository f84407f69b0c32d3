"""`expt predict` as it is typed: what it refuses, and what it leaves in files."""

import csv
import json
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import expt
from expt.command import predict
from expt.errors import ConfigError, ExptError
from expt.features import Answers, Anything
from expt.inference import writing
from expt.inference.plan import Plan
from expt.inference.predict import Predictor
from tests.conftest import Configured
from tests.facade import Capture, common, run
from tests.inference.conftest import CLASSES, Made, Make
from tests.inference.test_load import FEW


def told(*words: object) -> str:
    """What the command is refused with."""
    with pytest.raises(ConfigError) as refused:
        predict.main([*map(str, words)])
    return str(refused.value)


@pytest.fixture
def pictures(photos: Made, tmp_path: Path) -> Path:
    """Six, and a damaged one among them."""
    shutil.copytree(photos.data / "test", tmp_path / "pictures")
    whole = (tmp_path / "pictures" / "cat" / "1.png").read_bytes()
    (tmp_path / "pictures" / "cat" / "1b.png").write_bytes(whole[:200])
    (tmp_path / "pictures" / "notes.txt").write_text("not looked at")
    return tmp_path / "pictures"


def test_what_can_not_be_is_told_before_anything_is_computed(
    photos: Made, patients: Made, segmented: Made, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.heic").write_bytes(b"")
    (tmp_path / "x.csv").write_text("age,sex\n1,2\n")
    (tmp_path / "x.npy").write_bytes(b"no array")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    for name in ("z.npz", "header.npy"):
        with (tmp_path / name).open("wb") as file:
            np.save(file, np.ones((1, 3)))
    text = (tmp_path / "header.npy").read_bytes().replace(b"}", b"(")
    (tmp_path / "header.npy").write_bytes(text)
    np.save(tmp_path / "one.npy", np.zeros((1, 3, 12, 16), np.uint8))
    a_file = photos.data / "test" / "cat" / "0.png"
    link, damaged_run = tmp_path / "link.png", tmp_path / "damaged"
    link.symlink_to("gone")
    damaged_run.mkdir()
    (damaged_run / "result.json").write_text('{"status": ')
    cases: Sequence[tuple[Sequence[object], str]] = [
        ([photos.folder, "gone.png"], r"^gone\.png: there is no such file"),
        ([photos.folder, tmp_path / "empty"], r"empty: no image lies in it.*\.jpg"),
        ([photos.folder, tmp_path / "x.heic"], r"x\.heic: the run was trained on images"),
        ([photos.folder, tmp_path / "x.csv"], r"x\.csv: the run was trained on images"),
        ([photos.folder, tmp_path / "x.npy"], r"x\.npy cannot be read"),
        ([photos.folder, tmp_path / "z.npz"], r"z\.npz cannot be read .*; fix or replace it"),
        ([photos.folder, tmp_path / "header.npy"], r"header\.npy cannot be read .*; fix or rep"),
        ([photos.folder, tmp_path / "two.npz"], r"two\.npz: holds the arrays a, b; call one x or"),
        ([photos.folder, a_file, tmp_path / "one.npy"], "pictures and arrays"),
        ([photos.folder], "name files or folders, or --split test"),
        ([photos.folder, a_file, "--split", "test"], "name files or folders, or --split test"),
        (
            [photos.folder, "--split", "tset"],
            "--split tset: the run's dataset has train, val, test",
        ),
        ([patients.folder, a_file], "the run was trained on rows; give .csv"),
        ([patients.folder, tmp_path / "x.csv"], r"has no column bmi.* it has age, sex\."),
        ([patients.folder, patients.data, "--top", 2], "--top 2: works for classification only"),
        ([photos.folder, a_file, "--top", 3], "--top 3: the run has 2 classes"),
        ([photos.folder, a_file, "--device", "gpu"], "--device gpu: .*use --device cpu"),
        ([photos.folder, a_file, "--device", "cuda:77"], "--device cuda:77: .*use --device cpu"),
        ([photos.folder, a_file, "--batch-size", 0], "--batch-size 0: must be 1 or more"),
        ([photos.folder, a_file, "--which", "first"], "invalid choice: 'first'"),
        ([photos.folder, a_file, "--output", "a.txt"], r"--output a\.txt: name a file: \.csv"),
        (
            [photos.folder, a_file, "--output", tmp_path / "no" / "a.csv"],
            "--output .*no is not a folder",
        ),
        ([segmented.folder, a_file], "masks are not text"),
        ([segmented.folder, a_file, "--output", "a.csv"], r"a folder \(of PNGs\) or an \.npz"),
        ([tmp_path / "nowhere", a_file], "nowhere: there is no such folder"),
        ([tmp_path / "empty", a_file], "empty: is not a folder of a run"),
        ([photos.folder.parent, a_file], r"holds \d+ runs; name one"),
        ([damaged_run, a_file], r"result\.json: is damaged"),
        ([photos.folder, "model.path=moved"], "model.path=moved: .* no settings"),
        ([photos.folder, link], "link.png: is a link to gone"),
        ([photos.folder, "/dev/null"], "/dev/null: "),
    ]
    for words, expected in cases:
        found = told(*words)
        assert re.search(expected, found), found
        assert "\n" not in found


def test_a_csv_is_safe_whole_and_never_written_over(
    photos: Made, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.csv"
    words = [str(photos.folder), str(pictures), "--output", str(output), "--batch-size", "2"]
    with pytest.raises(ExptError, match="1 of 7 images could not be read") as error:
        predict.main(words)
    assert error.value.exit_code == 1
    shown = capsys.readouterr()
    assert re.fullmatch(
        rf"predicted    6 images in .* images/s\nwritten      {output}\n", shown.out
    )
    assert (
        shown.err == f"warning: {pictures}: left out what is no image: 1 (.txt 1), "
        "12.5% of the files, such as notes.txt\n"
        f"warning: {pictures}/cat/1b.png cannot be read as an image (image file is truncated);"
        " replace or remove it\n"
    )
    expected = expt.predict(photos.folder, pictures, batch_size=2)
    whole = expt.predict(photos.folder, photos.data / "test", batch_size=2)
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["path"] for row in rows] == [each["path"] for each in expected]
    below = (Path(each["path"]).relative_to(photos.data / "test") for each in whole)
    assert [row["path"] for row in rows] == [str(pictures / path) for path in below]
    assert {row["class"] for row in rows} <= {"'=sum(A1)", "cat"}
    for row, record, undamaged in zip(rows, expected, whole, strict=True):
        found = [float(row[f"p_{name}"]) for name in CLASSES]
        assert found == [*record["probabilities"].values()]
        # Not to the bit: the damaged one leaves its neighbour alone in a batch, which is multiplied
        # by another kernel.
        assert found == pytest.approx([*undamaged["probabilities"].values()], abs=1e-6)
    before = output.read_bytes()
    assert "is there already; use --force" in told(*words)
    assert output.read_bytes() == before
    with pytest.raises(ExptError, match="1 of 7"):
        predict.main([*words, "--force", "--top", "1"])
    assert output.read_text().splitlines()[0] == "path,class,probability"
    assert {path.name for path in tmp_path.iterdir()} == {"pictures", "out.csv"}


def test_lines_arrays_and_the_terminal_say_the_same(
    photos: Made, tmp_path: Path, capsys: Capture
) -> None:
    words = [str(photos.folder), "--split", "test", "--batch-size", "4"]
    expected = [*expt.predict(photos.folder, split="test", batch_size=4)]
    predict.main([*words, "--output", str(tmp_path / "o.jsonl")])
    assert [
        json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()
    ] == expected
    predict.main([*words, "--output", str(tmp_path / "o.npz")])
    with np.load(tmp_path / "o.npz") as file:
        assert file["path"].tolist() == [record["path"] for record in expected]
        assert [CLASSES[number] for number in file["class"]] == [
            record["class"] for record in expected
        ]
        assert [CLASSES[number] for number in file["target"]] == [
            record["target"] for record in expected
        ]
        chances = [[*record["probabilities"].values()] for record in expected]
        assert np.array_equal(file["probabilities"], np.array(chances, np.float32))
        assert file["class_names"].tolist() == [*CLASSES]
        assert file["probabilities"].dtype == np.float32
    capsys.readouterr()
    predict.main(words)
    first, *_ = capsys.readouterr().out.splitlines()
    best = expected[0]
    assert first.startswith(f"{best['path']}  {best['class']} {best['probability']:.4f}, ")
    assert first.endswith(f"  target {best['target']}")
    predict.main([*words, "--output", "-"])
    printed = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["path"] for row in printed] == [record["path"] for record in expected]


@pytest.mark.slow
def test_masks_are_pngs_of_their_pictures_size(segmented: Made, tmp_path: Path) -> None:
    shutil.copytree(segmented.data / "train" / "images", tmp_path / "in" / "deep")
    shutil.copy(segmented.data / "val" / "images" / "a.png", tmp_path / "in" / "c.png")
    words, output = (
        [str(segmented.folder), str(tmp_path / "in"), "--batch-size", "2"],
        tmp_path / "out",
    )
    predict.main([*words, "--output", str(output)])
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*.png")) == [
        "c.png",
        "deep/a.png",
        "deep/b.png",
    ]
    loaded = expt.load(segmented.folder)
    for path in (tmp_path / "in").rglob("*.png"):
        with torch.no_grad():
            mask = loaded(loaded.preprocess(path)).argmax(1)[0].numpy().astype(np.uint8)
        expected = np.asarray(Image.fromarray(mask).resize((30, 10), Image.Resampling.NEAREST))
        with Image.open(output / path.relative_to(tmp_path / "in")) as png:
            assert (png.mode, png.size) == ("P", (30, 10))
            assert np.array_equal(np.asarray(png), expected)
    (output / "mine.txt").write_text("stays")
    assert "is there already; use --force" in told(*words, "--output", output)
    predict.main([*words, "--output", str(output), "--force"])
    assert (output / "mine.txt").exists()
    (output / "c.png").unlink()
    (output / "c.png").mkdir()
    (output / "deep" / "a.png").write_text("old")
    assert "c.png: is a folder" in told(*words, "--output", output, "--force")
    assert (output / "deep" / "a.png").read_text() == "old", "none is replaced"
    predict.main([*words, "--output", str(tmp_path / "out.npz")])
    with np.load(tmp_path / "out.npz") as file:
        assert (file["masks"].shape, file["masks"].dtype) == ((3, 16, 8), np.uint8)
    part = [str(segmented.folder), str(segmented.data / "test"), "--output", str(tmp_path / "part")]
    predict.main(part)  # images/ and masks/ lie there: the pictures alone are meant
    assert [path.name for path in (tmp_path / "part").iterdir()] == ["a.png"]
    predict.main([str(segmented.folder), "--split", "test", "--output", str(tmp_path / "split")])
    assert [path.name for path in (tmp_path / "split").iterdir()] == ["a.png"]
    assert "would take its place" in told(*words, "--output", tmp_path / "in", "--force")
    (link := tmp_path / "link").symlink_to(tmp_path / "in")
    assert "would take its place" in told(*words, "--output", link, "--force")
    shutil.copy(next((tmp_path / "in").rglob("*.png")), tmp_path / "in" / "top.png")
    (nested := tmp_path / "in" / "nested").mkdir()
    shutil.copy(tmp_path / "in" / "top.png", nested)
    assert "of another picture" in told(*words, "--output", nested, "--force")
    shutil.rmtree(nested)
    (tmp_path / "in" / "top.png").unlink()
    (tmp_path / "elsewhere").mkdir()
    (other := tmp_path / "other").symlink_to(tmp_path / "elsewhere")
    predict.main([*words, "--output", str(other)])
    assert len([*(tmp_path / "elsewhere").rglob("*.png")]) == 3
    assert other.is_symlink()
    (tmp_path / "in" / "c.bmp").write_bytes((tmp_path / "in" / "c.png").read_bytes())
    assert "would have one mask c.png" in told(*words, "--output", tmp_path / "more")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_broken_off_leaves_nothing(photos: Made, tmp_path: Path) -> None:
    predictor = Predictor(Plan([(photos.folder, "best")], split="test"))
    (answers,) = predictor
    done: list[Path] = []
    for name in ("o.csv", "o.jsonl", "o.npz"):
        with (  # noqa: PT012
            pytest.raises(KeyboardInterrupt),
            writing.to_file(tmp_path / name, force=False) as write,
        ):
            write(answers, predictor.form)
            raise KeyboardInterrupt
        assert [*tmp_path.iterdir()] == done
        with (  # noqa: PT012
            pytest.raises(ConfigError, match="is there by now"),
            writing.to_file(tmp_path / name, force=False) as write,
        ):
            write(answers, predictor.form)
            (tmp_path / name).write_text("another's")
        assert (tmp_path / name).read_text() == "another's"
        done = [*tmp_path.iterdir()]
    mask = Answers(
        [{"path": str(tmp_path / "a.jpg")}],
        {"masks": np.array([[[0, 9], [5, 2]]], np.uint8)},
        sizes=[(4, 6)],
    )
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        writing.to_masks(tmp_path / "masks", [], str(tmp_path), force=False) as write,
    ):
        write(mask, predictor.form)
        (waiting,) = tmp_path.glob(".masks.*/a.png")
        assert np.asarray(Image.open(waiting)).tolist() == 2 * [[0, 0, 0, 9, 9, 9]] + 2 * [
            [5, 5, 5, 2, 2, 2]
        ]
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {"o.csv", "o.jsonl", "o.npz"}


def test_where_nothing_can_be_read_nothing_is_written(
    photos: Made, pictures: Path, tmp_path: Path
) -> None:
    damaged = pictures / "cat" / "1b.png"
    given = [photos.folder, pictures / "cat" / "1.png"]
    assert "is one of the files that are read" in told(
        *given, "--output", pictures / "cat" / "1.png", "--force"
    )
    words = [photos.folder, damaged, damaged, "--output", tmp_path / "o.csv"]
    assert told(*words) == "none of 2 images could be read; nothing is written"
    assert not (tmp_path / "o.csv").exists()


def test_the_command_from_another_folder(photos: Made, pictures: Path) -> None:
    done = run("predict", str(photos.folder), "cat", "--top", "1", "--device", "cpu", cwd=pictures)
    assert done.returncode == 1
    expected = ["cat/0.png", "cat/1.png", "cat/2.png"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == expected
    warning, error = done.stderr.splitlines()
    assert warning.startswith("warning: cat/1b.png cannot be read as an image")
    assert error == "error: 1 of 4 images could not be read, and are left out"


def test_a_link_that_leads_back_adds_no_file(photos: Made, tmp_path: Path) -> None:
    (tmp_path / "in" / "below").mkdir(parents=True)
    shutil.copy(photos.data / "test" / "cat" / "0.png", tmp_path / "in" / "below" / "a.png")
    (tmp_path / "in" / "below" / "back").symlink_to("..")
    assert Plan([(photos.folder, "best")], [tmp_path / "in"]).inputs.files == [
        str(tmp_path / "in" / "below" / "a.png")
    ]


NAMES_OF_ANSWERS = ("top", "probabilities", "labels", "class", "target", "values", "path", "file")


@pytest.mark.parametrize("kind", common(["regression", "classification", "multilabel"], "class"))
def test_columns_may_be_called_as_any_prediction_is(
    kind: str, make: Make, configured: Configured, tmp_path: Path, capsys: Capture
) -> None:
    """Targets of a regression and labels, and columns that only say where a row is from."""
    texts, targets = [*NAMES_OF_ANSWERS, "p_a", "class_2", "row"], ["y"]
    if kind != "classification":
        texts, targets = ["id", "p_top", "target_top"], [*NAMES_OF_ANSWERS, "target_row", "row"]
    rows: list[dict[str, Any]] = [
        {"x": row, **{x: f"{x}{row}" for x in texts}, **dict.fromkeys(targets, row % 2)}
        for row in range(24)
    ]
    data = tmp_path / "t.csv"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "y": "ab"[row["x"] % 2]} if "y" in row else row for row in rows)
    words = f"dataset=table dataset.path={data} dataset.targets=[{','.join(targets)}]"
    words = words.replace("[y]", "y") + f" dataset.features=[x] task={kind}"
    made = make(
        kind, configured(*FEW[:2], *words.split(), "model.hidden=[3]", "batch_size=8"), data
    )
    for chosen in ([str(data)], ["--split", "test"])[: 1 + (kind == "regression")]:
        given, is_file = [str(made.folder), *chosen], "--split" not in chosen
        files = [data] if is_file else []
        found = expt.predict(made.folder, files, split=None if is_file else "test")
        for name in ("o.csv", "o.jsonl", "o.npz"):
            predict.main([*given, "--output", str(tmp_path / name), "--force"])
        lines = (tmp_path / "o.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == found
        with (tmp_path / "o.csv").open() as file:
            header, *cells = csv.reader(file)
        assert len({*header}) == len(header) == len(found.to_pandas().columns)
        assert len(cells) == len(found)
        with np.load(tmp_path / "o.npz") as arrays:
            assert len(arrays["row"]) == len(found)
            several = {name: arrays[name] for name in arrays.files}
        capsys.readouterr()
        predict.main(given)
        assert len(capsys.readouterr().out.splitlines()) == len(found)
        if is_file:
            for x in texts:
                place = header.index(f"table.{x}" if f"table.{x}" in header else x)
                assert [line[place] for line in cells] == [f"{x}{row}" for row in range(24)]
                kept = several[f"table.{x}" if f"table.{x}" in several else x]
                assert kept.tolist() == [f"{x}{row}" for row in range(24)]
        if kind == "regression":
            by_name = dict(zip(several["target_names"], several["values"].T, strict=True))
            for name, values in by_name.items():
                key = f"{name} predicted" if name in ("path", "target", "row") else name
                assert [record[key] for record in found] == values.tolist()
                assert [float(line[header.index(key)]) for line in cells] == values.tolist()


def test_a_task_of_ones_own_may_call_its_outputs_as_others_do(tmp_path: Path) -> None:
    names = [*NAMES_OF_ANSWERS, "allow_pickle", "index"]
    form = Anything()
    predicted = {name: torch.arange(4.0).reshape(2, 2) + at for at, name in enumerate(names)}
    about: list[dict[str, str | int]] = [{"index": 3, "top": "a"}, {"index": 4, "top": "b"}]
    answers = form.named_apart(Answers(about, *form.decoded(predicted, None)))
    printed = list[str]()
    writing.to_terminal(printed.append)(answers, form)
    assert len(printed) == 2
    for name in ("o.csv", "o.jsonl", "o.npz"):
        with writing.to_file(tmp_path / name, force=False) as write:
            write(answers, form)
    first = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])
    assert (first["index"], first["table.top"], first["top"]) == (3, "a", [0.0, 1.0])
    (row, _) = csv.DictReader((tmp_path / "o.csv").read_text().splitlines())
    assert (row["table.top"], row["labels"]) == ("a", "[2.0, 3.0]")
    with np.load(tmp_path / "o.npz") as arrays:
        assert {*arrays.files} == {*first}


def test_tables_with_other_columns_have_all_of_them(patients: Made, tmp_path: Path) -> None:
    header, *lines = patients.data.read_text().splitlines()[:5]
    for name, some in (("jan", lines[:2]), ("feb", lines[2:])):
        more = "no,path" if name == "feb" else "seen"
        rows = [f"{line}{f',{name}' * len(more.split(','))}" for line in some]
        (tmp_path / f"{name}.csv").write_text("\n".join([f"{header},{more}", *rows]))
    words = [str(patients.folder), *(str(tmp_path / f"{x}.csv") for x in ("jan", "feb"))]
    for output in ("o.csv", "o.npz"):
        predict.main([*words, "--output", str(tmp_path / output)])
    found = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    with np.load(tmp_path / "o.npz") as arrays:
        for name, expected in (
            ("seen", ["jan"] * 2 + [""] * 2),
            ("no", [""] * 2 + ["feb"] * 2),
            ("table.path", [""] * 2 + ["feb"] * 2),
        ):
            assert [row[name] for row in found] == arrays[name].tolist() == expected
    (tmp_path / "t.csv").write_text("no,value\nfeb,0\n")
    (tmp_path / "feb.csv").write_text("\n".join([f"{header},no", f"{lines[2]},feb"]))
    (tmp_path / "jan.csv").write_text("\n".join([header, lines[0]]))
    predict.main(
        [*words, "--template", str(tmp_path / "t.csv"), "--output", str(tmp_path / "filled.csv")]
    )
    assert (tmp_path / "filled.csv").read_text() == f"no,value\nfeb,{found[2]['progression']}\n"


@pytest.mark.parametrize("name", ["o.csv", "o.npz"])
def test_values_that_the_first_samples_lack_are_refused(name: str, tmp_path: Path) -> None:
    form, few = Anything(), {"a": np.ones(2)}
    about = [{"index": place} for place in range(2)]
    for first, second in (({}, few), (few, {**few, "b": np.ones(2)})):
        with (  # noqa: PT012
            pytest.raises(ConfigError, match=r"no such value; use a \.jsonl"),
            writing.to_file(tmp_path / name, force=False) as write,
        ):
            write(Answers(about, first), form)
            write(Answers(about, second), form)
    with writing.to_file(tmp_path / "o.jsonl", force=False) as write:
        write(Answers(about, {}), form)
        write(Answers(about, few), form)
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]


def test_masks_that_cannot_be_written_are_one_line(segmented: Made, tmp_path: Path) -> None:
    words = [segmented.folder, segmented.data / "test", "--output", tmp_path / "masks"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert told(*words) == f"--output {tmp_path}/masks: File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]
