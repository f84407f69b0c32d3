"""Pictures in any folders, whose classes, labels or numbers are in a list."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from expt.data.build import Data, load
from expt.data.loading import LoaderOptions
from expt.data.picture_tables import _as_labels
from expt.errors import ConfigError, DataError
from expt.features import Labels
from expt.late import pa
from tests import facade
from tests.facade import Capture, Patch, dataset, part

KINDS = ("red", "green", "blue")
NUMBERS = "dataset.target=size task=regression"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve pictures, of which the list names all, and a thirteenth that is not there."""
    lines = ["id,colour,size,tags"]
    for number in range(12):
        folder = tmp_path / "in" / "images" / f"of_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((6, 6, 3), number * 9, np.uint8)
        Image.fromarray(pixels).save(folder / f"p{number:02}.png")
        tags = ["a b", "a b|c", ""][number % 3]
        lines.append(f"p{number:02},{KINDS[number % 3]},{number * 10},{tags}")
    (tmp_path / "in" / "train.csv").write_text("\n".join([*lines, "gone,red,1,c"]))
    return tmp_path / "in"


def of(root: Path | str, words: str, **changes: Any) -> Any:
    image = f"dataset=image_folder dataset.root={root} dataset.image_size=[6,6] dataset.mean=null"
    return dataset(f"{image} dataset.std=null dataset.val_fraction=0 {words}", **changes)


def built(root: Path | str, words: str, **changes: Any) -> Data:
    chosen = of(root, words, **changes)
    task = part("task", f"dataset=image_folder dataset.root={root} {words}")
    assert not chosen.problems(task)
    chosen.fingerprint()
    chosen.prepare(task)
    return facade.built(chosen, task, batch_size=12)


def read(data: Data) -> dict[int, Any]:
    """The target of each picture, by its number."""
    found: dict[int, Any] = {}
    for batch in data.train.evaluation():
        numbers = (batch.inputs[:, 0, 0, 0] * 255 / 9).round().int().tolist()
        found.update(zip(numbers, batch.targets.tolist(), strict=True))
    return found


LIST = "dataset.labels=train.csv"


def test_a_list_gives_classes_numbers_and_labels(root: Path, capsys: Capture) -> None:
    data = built(root, f"{LIST} dataset.target=colour")
    names = data.info.features.targets.names
    assert names == ("blue", "green", "red")
    assert {x: names[y] for x, y in read(data).items()} == {x: KINDS[x % 3] for x in range(12)}
    assert "without a picture" in capsys.readouterr().err
    for _ in range(2):  # the second time from the cache
        data = built(root, f"{LIST} {NUMBERS}", standardise_targets=True)
        (mean, deviation), wanted = data.info.features.targets.scales["size"], np.arange(12) * 10.0
        assert np.allclose((mean, deviation), (wanted.mean(), wanted.std()))
        found = {x: y[0] * deviation + mean for x, y in read(data).items()}
        assert found == pytest.approx(dict(enumerate(wanted)), abs=1e-4)
    data = built(root, f"{LIST} dataset.target=tags task=multilabel")
    assert data.info.features.targets == Labels(names=("a b", "c"))
    assert read(data) == {x: [[1, 0], [1, 1], [0, 0]][x % 3] for x in range(12)}


@pytest.mark.parametrize(
    "name", ["p00.png", "of_0/p00", "./images/of_0/p00.png", "in/images/of_0/p00", "of_0\\p00.png"]
)
@pytest.mark.parametrize("header", ["{},kind,{}", ",{},kind,{}"])
def test_pictures_are_found_by_any_path(root: Path, name: str, header: str) -> None:
    rows = [name, *(name.replace("of_0", f"of_{x % 2}").replace("p00", f"p{x:02}")
                    for x in range(1, 12))]  # fmt: skip
    index = "{}," if header.startswith(",") else ""
    lines = [header.format("file", "note")]
    lines += [f"{index.format(x)}{row},{KINDS[x % 3]},p{x % 3}" for x, row in enumerate(rows)]
    (root / "my.csv").write_text("\n".join(lines))
    data = built(root, "dataset.labels=my.csv dataset.target=kind")
    assert read(data) == {x: [2, 1, 0][x % 3] for x in range(12)}


@pytest.mark.parametrize(("task", "name"), [("classification", "red"), ("multilabel", "green")])
def test_classes_that_differ_only_in_case_are_reported(
    task: str, name: str, root: Path, capsys: Capture
) -> None:
    lines = [f"p{x:02},{(name, name.title(), 'blue')[x % 3]}" for x in range(12)]
    (root / "my.csv").write_text("\n".join(["id,kind", *lines]))
    words = f"dataset=image_folder dataset.root=x dataset.labels=my.csv task={task}"
    of(root, f"dataset.labels=my.csv task={task}").prepare(part("task", words))
    assert f"'{name.title()}', '{name}'" in capsys.readouterr().err


def test_all_other_columns_are_numbers_to_predict(root: Path) -> None:
    lines = [f"p{x:02},{x},{x / 2}" for x in range(12)]
    (root / "wide.csv").write_text("\n".join(["id,a,b", *lines]))
    data = built(root, "dataset.labels=wide.csv task=regression")
    assert data.info.features.targets.names == ("a", "b")
    assert read(data) == {x: [x, x / 2] for x in range(12)}


def test_columns_of_0_and_1_are_labels_and_a_run_names_those_of_another_list(root: Path) -> None:
    lines = [f"p{x:02},{x % 2},{int(x < 3)}" for x in range(12)]
    (root / "wide.csv").write_text("\n".join(["id,odd,few", *lines]))
    data = built(root, "dataset.labels=wide.csv task=multilabel")
    assert data.info.features.targets.names == ("odd", "few")
    assert read(data) == {x: [x % 2, x < 3] for x in range(12)}
    (root / "b.csv").write_text("id,tags\np01,c\np00,\n")
    trained = built(root, f"{LIST} dataset.target=tags task=multilabel").info.features
    options = LoaderOptions(batch_size=4, device=torch.device("cpu"))
    task = part("task", f"dataset=image_folder dataset.root=x {LIST} task=multilabel")

    def measured(words: str) -> Any:
        other = of(root, f"dataset.labels=b.csv task=multilabel {words}")
        (batch,) = load(other, task, "all", trained, options, own=False).evaluation()
        return batch.targets.tolist()

    assert measured("") == [[0, 0], [0, 1]]
    other = of(root, "dataset.labels=b.csv", val_fraction=0.5)
    (root / "b.csv").write_text("id,colour\np01,red\np02,red\n")
    other.prepare(part("task", "dataset=digits"), learns=False)  # one class is enough to measure
    with pytest.raises(DataError, match="all rows are of one class, red"):
        other.prepare(part("task", "dataset=digits"))
    (root / "b.csv").write_text("id,tags\np01,c|new\n")
    with pytest.raises(DataError, match="label new"):
        measured("dataset.target=tags")


def test_parts_folds_and_groups_are_those_of_folders(root: Path, tmp_path: Path) -> None:
    (root / "images" / "of_0").rename(root / "train")
    (root / "images" / "of_1").rename(root / "test")
    words = f"{LIST} dataset.target=colour"
    assert built(root, words).info.sizes == {"train_size": 6, "val_size": 0, "test_size": 6}
    assert [*of(root, words, splits=("test",)).parts()] == ["test"]
    assert built(root, words, folds=3, fold=0).info.val_size == 2
    lines = [f"p{x:02}.png,g{x // 6}" for x in range(12)]
    (tmp_path / "groups.csv").write_text("\n".join(["file_name,group", *lines]))
    data = built(root, words, group=str(tmp_path / "groups.csv"), val_fraction=0.4)
    assert {*read(data)} in ({0, 2, 4}, {6, 8, 10})


@pytest.mark.parametrize("way", [".", "./", "../in", "./../in/"])
def test_the_folder_may_be_named_in_any_way(root: Path, way: str, monkeypatch: Patch) -> None:
    (root / "images" / "of_0").rename(root / "train")
    (root / "images" / "of_1").rename(root / "test")
    monkeypatch.chdir(root)
    words = f"{LIST} dataset.target=colour"
    assert built(way, words).info.sizes["test_size"] == 6
    for split in ("train", "test"):
        for number, file in enumerate(sorted((root / split).glob("*.png"))):
            (folder := root / split / f"c{number % 2}").mkdir(exist_ok=True)
            file.rename(folder / file.name)
    lines = [f"p{x:02},{x // 2 % 2}" for x in range(12)]
    (root / "train.csv").write_text("\n".join(["id,y", *lines]))
    of(way, "").prepare(part("task", "dataset=digits"))  # it agrees with the folders


@pytest.mark.parametrize("suffix", [".png", ""])
def test_a_number_of_the_row_names_no_picture(root: Path, suffix: str) -> None:
    for file in sorted(root.glob("images/*/p*.png")):
        file.rename(file.with_name(f"{int(file.stem[1:])}.png"))
    lines = [f"{row},{11 - row}{suffix},{KINDS[(11 - row) % 3]}" for row in range(12)]
    (root / "train.csv").write_text("\n".join(["id,file,colour", *lines]))
    words = f"{LIST} dataset.target=colour"
    if not suffix:
        with pytest.raises(DataError, match="columns id and file both name pictures"):
            built(root, words)
        return
    assert read(built(root, words)) == {x: [2, 1, 0][x % 3] for x in range(12)}


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_targets_of_another_list_are_those_of_the_run(root: Path, task: str) -> None:
    lines = [f"p{x:02},{x % 2},{int(x < 3)}" for x in range(12)]
    for name, header in (("a", "id,odd,few"), ("b", "id,odd,new")):
        (root / f"{name}.csv").write_text("\n".join([header, *lines]))
    standardised = task == "regression"
    chosen = part("task", f"dataset=image_folder dataset.root=x {LIST} task={task}")

    def targets(own: str, file: str, other: str) -> Any:
        words = f"task={task} dataset.labels"
        trained = built(
            root, f"{words}=a.csv dataset.target={own}", standardise_targets=standardised
        )
        options = LoaderOptions(batch_size=12, device=torch.device("cpu"))
        data = of(root, f"{words}={file}.csv dataset.target={other}")
        features = trained.info.features
        (batch,) = load(data, chosen, "all", features, options, own=False).evaluation()
        found = features.targets.in_units(batch.targets) if standardised else batch.targets
        numbers = (batch.inputs[:, 0, 0, 0] * 255 / 9).round().int().tolist()
        return dict(zip(numbers, found.round().int().tolist(), strict=True))

    assert targets("[odd,few]", "a", "[few,odd]") == {x: [x % 2, x < 3] for x in range(12)}
    assert targets("odd", "b", "new") == {x: [x < 3] for x in range(12)}
    with pytest.raises(ConfigError, match="there is no few, which the run was trained with"):
        targets("[odd,few]", "b", "[odd,new]")


def test_the_content_of_the_list_counts(root: Path) -> None:
    before = of(root, f"{LIST} dataset.target=colour").fingerprint()
    text = (root / "train.csv").read_text()
    (root / "train.csv").write_text(text.replace("p00,red", "p00,blue"))
    assert of(root, f"{LIST} dataset.target=colour").fingerprint() != before


def test_classes_that_are_names_of_pictures_name_none(root: Path) -> None:
    for number in range(12):
        file = root / "images" / f"of_{number % 2}" / f"p{number:02}.png"
        file.rename(file.with_name(f"{number}.png"))
    lines = [f"{x % 3},{x},a" for x in [*range(12), 99]]
    (root / "train.csv").write_text("\n".join(["kind,id,tags", *lines]))
    assert read(built(root, f"{LIST} dataset.target=kind")) == {x: x % 3 for x in range(12)}


@pytest.mark.parametrize(
    ("words", "lines", "error", "message"),
    [
        (LIST, "", ConfigError, "has colour, size, tags next to id"),
        (f"{LIST} dataset.target=colr", "", ConfigError, "dataset.target=colr: .*colour"),
        ("dataset.labels=none.csv", "", ConfigError, "labels=none.csv: there is no such file"),
        ("dataset.labels=b.csv", "id,y\nx1,1\n", DataError, "no column names pictures"),
        ("dataset.labels=b.csv", "id,y\np01,1\np01.png,1\n", DataError, "rows 1 and 2"),
        ("dataset.labels=b.csv", "id,y\np01,u\np02,\n", DataError, "column y, row 2: is empty"),
        (f"dataset.labels=b.csv {NUMBERS}", "id,size\nx,1\np01,1\np02,u\n", DataError, "row 3"),
        ("dataset.labels=b.csv", "p00.png,1\np01.png,1\n", DataError, "names of columns above"),
        ("dataset.labels=b.csv", "id\np01\np02\n", ConfigError, "nothing next to id"),
        ("dataset.labels=b.csv task=multilabel", "id,y\np01,\"['u']\"\n", DataError, "is a list"),
    ],
)
def test_lists_that_do_not_do_are_refused(
    root: Path, words: str, lines: str, error: type[Exception], message: str
) -> None:
    (root / "b.csv").write_text(lines)
    with pytest.raises(error, match=message):
        built(root, words)


def test_a_folder_without_pictures_is_named(root: Path) -> None:
    (root / "empty").mkdir()
    for name, problem in (("imags", "there is no such folder.*images"), ("empty", "no pictures")):
        with pytest.raises(DataError, match=f"^dataset.root={root}/{name}: .*{problem}"):
            built(root / name, f"dataset.labels={root}/train.csv")


def test_a_name_of_two_pictures_is_refused(root: Path) -> None:
    (root / "other").mkdir()
    Image.new("RGB", (6, 6)).save(root / "other" / "p00.jpg")
    with pytest.raises(DataError, match=r"images/of_0/p00\.png and other/p00\.jpg"):
        built(root, f"{LIST} dataset.target=colour")


def test_a_list_next_to_pictures_is_proposed(root: Path, capsys: Capture) -> None:
    task = part("task", "dataset=digits")
    words = rf"dataset\.labels={root}/train\.csv dataset\.target=colour"
    (root / "new").mkdir()
    Image.new("RGB", (6, 6)).save(root / "new" / "q.png")
    with pytest.raises(DataError, match=words):  # all that it names lie next to that folder
        of(root, "").prepare(task)
    (root / "new" / "q.png").unlink()
    (root / "new").rmdir()
    with pytest.raises(DataError, match=words):  # no classes
        of(root, "").prepare(task)
    (root / "flat").mkdir()
    for file in (root / "images").glob("*/*.png"):
        shutil.copy(file, root / "flat")
    with pytest.raises(DataError, match=words):
        of(root / "flat", "").prepare(task)
    (root / "train.csv").rename(root / "images" / "train.csv")
    of(root / "images", "").prepare(task)
    assert "dataset.labels=" in capsys.readouterr().err
    lines = [f"of_{x % 2}/p{x:02}.png,{x % 2},{x}" for x in range(12)]
    (root / "images" / "train.csv").write_text("\n".join(["id,label,x", *lines]))
    of(root / "images", "", val_fraction=0.5).prepare(task)  # it agrees with the folders
    for number in range(12):  # of both classes, and a table of something else
        for kind in range(2):
            Image.new("RGB", (6, 6)).save(root / "images" / f"of_{kind}" / f"{number}.png")
    (root / "images" / "train.csv").write_text("epoch,loss\n1,0.5\n2,0.4\n")
    of(root / "images", "", val_fraction=0.5).prepare(task)
    assert "dataset.labels=" not in capsys.readouterr().err


@pytest.mark.parametrize("words", ["task=regression", "task=multilabel", "dataset.target=x"])
def test_folders_alone_give_classes_only(root: Path, words: str) -> None:
    task = part("task", f"dataset=image_folder dataset.root={root} {LIST} {words}")
    (problem,) = of(root, f"{LIST} {words}", labels=None).problems(task)
    assert "dataset.labels" in problem


def test_a_known_label_may_have_blanks() -> None:
    cells = pa.table({"tags": ["traffic light", "car", "car  bus", ""]})
    table = _as_labels(Path("list.csv"), cells, ["traffic light", "car", "bus"])
    assert table.column("traffic light").to_pylist() == [1.0, 0.0, 0.0, 0.0]
    assert table.column("car").to_pylist() == [0.0, 1.0, 1.0, 0.0]
    assert table.column("bus").to_pylist() == [0.0, 0.0, 1.0, 0.0]
