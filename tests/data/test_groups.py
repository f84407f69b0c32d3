"""Groups are held out whole, classes in proportion, in folds too; copies in parts are reported."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from expt.data.build import Data
from expt.data.indexing import split, split_fold
from expt.data.picture_tables import groups_of
from expt.errors import ConfigError, DataError
from expt.tasks.classification import Config
from expt.tasks.regression import Config as Regression
from expt.tasks.segmentation import Config as Segmentation
from tests.facade import Capture, built, dataset

IMAGES = "dataset=image_folder dataset.image_size=[4,4]"
OWN = "dataset={_target_:tests.data.test_groups.Visits,num_classes:2,test:null,train:{}}"


class Visits(Dataset[Any]):
    """Ten visits of each of six patients."""

    def __init__(self) -> None:
        self.targets = [number // 10 % 2 for number in range(60)]
        self.patients = [f"p{number // 10}" for number in range(60)]
        self.few, self.one, self.wide = [0], np.array(3), np.zeros((60, 2))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), float(index // 10) / 8), self.targets[index]


@pytest.mark.parametrize(("size", "rare", "fraction"), [(400, 24, 0.15), (50, 3, 0.3), (9, 1, 0.1)])
def test_classes_are_held_out_in_proportion(size: int, rare: int, fraction: float) -> None:
    classes = torch.zeros(size, dtype=torch.int64)
    classes[size // 2 : size // 2 + rare] = 7
    train, val = split(size, fraction, None, classes)
    assert len(val) == round(size * fraction)
    assert abs(int((classes[val] == 7).sum()) - rare * fraction) <= 0.5
    assert torch.cat([train, val]).sort().values.equal(torch.arange(size))


@pytest.mark.parametrize("number", [12, 60, 300])
def test_groups_stay_whole_and_classes_in_proportion(number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    groups = torch.randint(number, (1200,), generator=draw) * 5
    classes = (torch.rand(number * 5, generator=draw) < 0.25)[groups].long()  # one of each group
    train, val = split(1200, 0.2, None, classes, groups=groups)
    assert not {*groups[train].tolist()} & {*groups[val].tolist()}
    assert torch.cat([train, val]).sort().values.equal(torch.arange(1200))
    largest = int(groups.bincount().max())
    for each in (0, 1):
        wanted = 0.2 * float((classes == each).sum())
        assert abs(int((classes[val] == each).sum()) - wanted) <= largest / 2 + 1
    parts = [split_fold(classes, 4, fold, None, groups=groups)[1] for fold in range(4)]
    assert torch.cat(parts).sort().values.equal(torch.arange(1200))
    assert len({(int(each), at) for at, part in enumerate(parts) for each in groups[part]}) == len(
        groups.unique()
    )
    counts = torch.stack([classes[part].bincount(minlength=2) for part in parts])
    assert (counts.max(0).values - counts.min(0).values).max() <= largest


def test_even_two_groups_are_one_in_each_part() -> None:
    groups = torch.tensor([0] * 5 + [1] * 5)
    for fraction in (0.1, 0.9):
        assert [len(part) for part in split(10, fraction, None, groups=groups)] == [5, 5]


def table(folder: Path, *, twice: bool = False, **options: Any) -> Any:
    draw, lines = np.random.default_rng(0), ["patient,a,b,y"]
    for patient in range(40):
        row = draw.normal(size=2)
        y = "ill" if patient % 4 == 0 else "well"
        for _ in range(5):
            a, b = (row if twice else row + draw.normal(size=2) / 100).round(4)
            lines.append(f"p{patient},{a},{b},{y}")
    (path := folder / "t.csv").write_text("\n".join(lines))
    words = f"task=classification dataset=table dataset.path={path} dataset.targets=y"
    return dataset(words, **options)


def inputs_of(loader: Any) -> set[tuple[float, ...]]:
    rows = torch.cat([batch.inputs.flatten(1) for batch in loader.evaluation()])
    return {tuple(row) for row in rows.tolist()}


def of_table(one: Any) -> Data:
    return built(one, Config(), batch_size=8)


def test_rows_of_a_group_are_in_one_part_and_the_group_is_no_feature(tmp_path: Path) -> None:
    one = table(tmp_path, twice=True, group="patient")
    data = of_table(one)
    assert data.info.features.inputs.names == ("a", "b")
    assert data.val is not None
    assert data.test is not None
    parts = [inputs_of(loader) for loader in (data.train, data.val, data.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (145, 15, 40)
    origin = one.origin(Config(), "test")
    held = {origin(index)["row"] for index in range(40)}
    assert len({(int(row) - 1) // 5 for row in held}) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "pat"}, "dataset.group=pat: .* did you mean|Did you mean 'patient'"),
        ({"group": "patient", "features": ("patient", "a")}, "dataset.group=patient: is named"),
        ({"group": "y"}, "dataset.group=y: is named twice"),
        ({"group": "patient", "folds": 41, "fold": 0, "test_fraction": 0.0}, "folds=41: .* 40 g"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of_table(table(tmp_path, **options))


@pytest.mark.parametrize("cells", ["p,1,2,u\n,2,3,v\n", "p,1,2,u\np,2,3,v\n"])
def test_a_row_without_a_group_and_a_single_group_are_refused(tmp_path: Path, cells: str) -> None:
    (tmp_path / "t.csv").write_text(f"who,a,b,y\n{cells * 4}")
    words = f"task=classification dataset=table dataset.path={tmp_path}/t.csv dataset.targets=y"
    with pytest.raises(DataError, match=r"column who.*(row 2: has no group|of p;)"):
        of_table(dataset(words, group="who"))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_that_come_twice_are_reported_once(tmp_path: Path, capsys: Capture, task: str) -> None:
    made = table(tmp_path, twice=True)
    if task == "regression":
        built(dataset(f"task=regression dataset=table dataset.path={made.path} dataset.targets=a"),
              Regression(name="regression", loss="mse"), batch_size=8)  # fmt: skip
    else:
        of_table(made)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "trained on, too" in each]
    assert "of 40 samples of test (" in line
    assert "row" in line
    assert "dataset.group" in line
    of_table(table(tmp_path))
    assert "trained on, too" not in capsys.readouterr().err


def test_rows_of_few_values_may_be_equal_by_chance(tmp_path: Path, capsys: Capture) -> None:
    draw = np.random.default_rng(0)
    lines = [",".join(map(str, row)) for row in draw.integers(0, 3, (300, 4)).tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,y", *lines]))
    of_table(dataset(f"dataset=table dataset.path={tmp_path}/t.csv dataset.targets=y"))
    assert "trained on, too" not in capsys.readouterr().err


def test_equal_rows_of_columns_that_depend_on_one_another_are_no_copies(
    tmp_path: Path, capsys: Capture
) -> None:
    draw = np.random.default_rng(0)
    degrees = draw.integers(-10, 40, 400).tolist()
    rows = [
        f"{c},{1.8 * c + 32:.1f},{c + 273.15:.2f},{'ill' if c > 20 else 'well'}" for c in degrees
    ]
    # A single feature in steps, alone or with others that follow from it.
    steps = draw.normal(size=(400, 1)).round(2).repeat(2, axis=1) * [1, 2]
    few = [f"{a:.2f},{b:.2f},{a * a:.4f},{'ill' if a > 0 else 'well'}" for a, b in steps]
    off = [f"{a:.4f},{b:.4f},0,{'ill' if a > 0 else 'well'}" for a, b in draw.normal(size=(200, 2))]
    for body in (rows, few, [*off, *["0,0,0,well"] * 200]):
        (tmp_path / "t.csv").write_text("\n".join(["a,b,c,y", *body]))
        of_table(dataset(f"dataset=table dataset.path={tmp_path}/t.csv dataset.targets=y"))
        assert "trained on, too" not in capsys.readouterr().err


def pictures(root: Path, *, parts: tuple[str, ...] = ("train",)) -> Path:
    draw = np.random.default_rng(0)
    for part in parts:
        for kind in ("cat", "dog"):
            (folder := root / part / kind).mkdir(parents=True)
            for number in range(20):
                pixels = draw.integers(0, 255, (4, 4, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{kind}{number}.png")
    return root


@pytest.mark.parametrize(
    "way",
    ["train/{0}/{0}{1}.png", "{0}/{0}{1}.png", "./{0}{1}.png", "{0}\\{0}{1}.png", "{0}{1}"],
)
def test_pictures_of_a_group_are_in_one_part(tmp_path: Path, way: str) -> None:
    root, groups = pictures(tmp_path / "r"), tmp_path / "groups.csv"
    pairs = [(kind, number) for kind in ("cat", "dog") for number in range(20)]
    lines = [f"{way.format(*pair)},{pair[0]}{pair[1] // 5}" for pair in pairs]
    groups.write_text("\n".join(["picture,patient", *lines]))
    how = {"group": str(groups), "folds": 4}
    data = [built(dataset(f"{IMAGES} dataset.root={root}", **how, fold=at), batch_size=4)
            for at in range(4)]  # fmt: skip
    assert [each.info.val_size for each in data] == [10] * 4
    for each in data:
        assert each.val is not None
        assert torch.cat([batch.targets for batch in each.val.evaluation()]).sum() == 5
    one = dataset(f"{IMAGES} dataset.root={root}", group=str(groups))
    before = one.fingerprint()
    groups.write_text(groups.read_text().replace("cat3", "cat2"))
    assert one.fingerprint() != before
    groups.write_text("\n".join(["picture,patient", *lines[2:]]))
    with pytest.raises(DataError, match="has no line for 2 of 40 training pictures, such as train"):
        one.prepare()
    with pytest.raises(ConfigError, match="no such file"):
        dataset(f"{IMAGES} dataset.root={root}", group=str(tmp_path / "none.csv")).prepare()


def test_the_column_of_groups_is_called_group_or_the_only_other(tmp_path: Path) -> None:
    root, groups = pictures(tmp_path / "r"), tmp_path / "groups.csv"
    one = dataset(f"{IMAGES} dataset.root={root}", group=str(groups))
    rows = [f"{number // 5},1,cat{number}\n{number // 5},1,dog{number}" for number in range(20)]
    groups.write_text("\n".join(["group,seen,picture", *rows]))
    one.prepare()
    groups.write_text("\n".join(["patient,seen,picture", *rows]))
    with pytest.raises(ConfigError, match="no column group next to picture, but patient, seen"):
        one.prepare()
    groups.write_text("\n".join(["group,seen,picture", *rows, "7,1,train/cat/cat0.png"]))
    with pytest.raises(DataError, match=r"gives train/cat/cat0\.png two groups"):
        one.prepare()
    files = {"train": [str(path) for path in sorted(root.rglob("*.png"))]}
    groups.write_text("\n".join(["group,seen,picture", *rows]))
    before = groups_of(str(groups), str(root), files, learns=True)[0]["train"]
    groups.write_text("\n".join(["group,seen,picture", "3,1,gone.png", *rows]))
    found = groups_of(str(groups), str(root), files, learns=True)[0]["train"]
    assert found == [[1, 2, 3, 0][number] for number in before], "as in the lines"
    (root / "train" / "new").mkdir()
    shutil.copy(root / "train/cat/cat0.png", root / "train/new/cat0.png")
    groups.write_text("\n".join(["group,seen,picture", *rows]))
    with pytest.raises(DataError, match=r"cat0 may be train/cat/cat0\.png and train/new"):
        one.prepare()


def test_a_part_whose_pictures_are_not_all_named_is_reported(
    tmp_path: Path, capsys: Capture
) -> None:
    root = pictures(tmp_path, parts=("train", "val"))
    for named, says in ((1, "has no line for 1 of 40 val pictures, such as val/cat/"), (40, "")):
        paths = [path.relative_to(root) for path in sorted(root.rglob("*.png"))]
        paths = [path for path in paths if path.parts[0] == "train"] + [
            path for path in paths if path.parts[0] == "val"
        ][named:]
        lines = [f"{path},{path.stem}" for path in paths]
        swapped = [",".join(reversed(line.rsplit(",", 1))) for line in ["file_name,group", *lines]]
        (tmp_path / "groups.csv").write_text("\n".join(swapped))
        one = dataset(f"{IMAGES} dataset.root={root}", group=str(tmp_path / "groups.csv"))
        built(one, batch_size=4)
        said = capsys.readouterr().err
        assert says in said
        assert ("has no line" in said) == bool(says)  # a part without any is as it was made


def test_targets_that_are_standardised_lose_no_report_on_groups(
    tmp_path: Path, capsys: Capture
) -> None:
    root = pictures(tmp_path, parts=("train", "val"))
    paths = [path.relative_to(root) for path in sorted(root.rglob("*.png"))]
    ages = [f"{path},{number}" for number, path in enumerate(paths)]
    (tmp_path / "ages.csv").write_text("\n".join(["file,age", *ages]))
    groups = [f"{path},{path.stem}" for path in paths[:-1]]
    (tmp_path / "groups.csv").write_text("\n".join(["file,group", *groups]))
    words = f"task=regression {IMAGES} dataset.root={root} dataset.labels={root}/ages.csv"
    one = dataset(words, group=str(tmp_path / "groups.csv"), standardise_targets=True)
    built(one, Regression(name="regression", loss="mse"), batch_size=4)
    assert "has no line for 1 of 40 val pictures" in capsys.readouterr().err


def test_pictures_and_groups_in_two_parts_are_reported(tmp_path: Path, capsys: Capture) -> None:
    root = pictures(tmp_path, parts=("train", "test"))
    for number in range(8):
        shutil.copy(root / f"train/cat/cat{number}.png", root / f"test/dog/x{number}.png")
    lines = [f"{path.relative_to(root)},{path.stem}" for path in root.rglob("*.png")]
    (root / "groups.csv").write_text("\n".join(["file_name,group", *lines]))
    one = dataset(f"{IMAGES} dataset.root={root}", group=str(root / "groups.csv"), val_fraction=0.0)
    one.fingerprint()
    one.prepare()
    built(one, batch_size=4)
    told = [line for line in capsys.readouterr().err.splitlines() if " too, such as " in line]
    assert ["8 of 48 samples of test (16.7%) are" in told[0], "x0.png" in told[0]] == [True, True]
    assert "40 of 48 samples of test (83.3%) have their dataset.group" in told[1]
    assert len(told) == 2


def test_a_custom_dataset_has_its_groups_in_an_attribute() -> None:
    data = built(dataset(OWN, group="patients", val_fraction=0.3), batch_size=4)
    assert data.val is not None
    assert len(inputs_of(data.val) | inputs_of(data.train)) == 6
    assert len(inputs_of(data.val)) == 2
    for name, message in (
        ("nobody", "train has none"),
        ("few", "has 1 for 60 samples"),
        ("one", "has a ndarray"),
        ("wide", "has a list for sample 0"),
    ):
        with pytest.raises(ConfigError, match=f"dataset.group={name}: .*{message}"):
            built(dataset(OWN, group=name), batch_size=4)


@pytest.mark.parametrize("kind", ["rows", "pictures", "masks"])
def test_a_hugging_face_dataset_has_its_groups_in_a_column(
    tmp_path: Path, capsys: Capture, kind: str
) -> None:
    library = pytest.importorskip("datasets")
    root = pictures(tmp_path / "r")
    files = [{"bytes": file.read_bytes(), "path": None} for file in sorted(root.rglob("*.png"))]
    mask = io.BytesIO()
    Image.fromarray(np.eye(4, dtype=np.uint8)).save(mask, "png")
    columns = {
        "image": files, "a": np.arange(40) / 40, "label": [place % 2 for place in range(40)],
        "mask": [{"bytes": mask.getvalue(), "path": None}] * 40,
        "who": [f"p{place // 8}" for place in range(40)],
    }  # fmt: skip
    whole = library.Dataset.from_dict(columns)
    for name in ("image", "mask"):
        whole = whole.cast_column(name, library.Image())
    parts = {"train": whole, "test": whole.select(range(6, 10))}
    library.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    words = f"dataset=huggingface dataset.path={tmp_path}/d"
    kinds: dict[str, Any] = {"rows": {"input": ("a",)}, "masks": {"target": "mask"}}
    more = kinds.get(kind, {})
    task = (
        Segmentation(name="segmentation", ignore_index=255, num_classes=2)
        if kind == "masks"
        else Config()
    )
    data = built(dataset(words, group="who", folds=5, fold=1, **more), task, batch_size=4)
    assert (data.info.train_size, data.info.val_size) == (32, 8)
    told = [line for line in capsys.readouterr().err.splitlines() if " too, such as " in line]
    assert len(told) == 2, told
    copies, groups = told
    assert "of 4 samples of test (" in copies
    assert "have their dataset.group in train" in groups
    with pytest.raises(ConfigError, match=r"dataset.group=wo: train has no such column"):
        built(dataset(words, group="wo", **more), task)
    parts["test"] = parts["test"].remove_columns("who")  # nothing is held out of it
    library.DatasetDict(parts).save_to_disk(str(tmp_path / "e"))
    words = words.replace("/d", "/e")
    again = built(dataset(words, group="who", folds=5, fold=1, **more), task, batch_size=4)
    assert (again.info.val_size, again.info.test_size) == (8, 4)
    told = [line for line in capsys.readouterr().err.splitlines() if " too, such as " in line]
    assert len(told) == 1, told
    with pytest.raises(ConfigError, match=r"dataset.group=wo: train has no such column"):
        built(dataset(words, group="wo", **more), task)


@pytest.mark.parametrize(("size", "folds"), [(442, 5), (7, 7), (10, 3)])
def test_each_sample_validates_once_and_each_fold_has_its_share_of_every_class(
    size: int, folds: int
) -> None:
    classes = torch.arange(size) % 3 * 7  # sorted neither by index nor without gaps
    parts = [split_fold(classes, folds, fold, None) for fold in range(folds)]
    everything = list(range(size))
    assert torch.cat([val for _, val in parts]).sort().values.tolist() == everything
    for train, val in parts:
        assert torch.cat([train, val]).sort().values.tolist() == everything
        assert val.equal(val.sort().values)
        assert train.equal(train.sort().values)
    for counts in (
        torch.stack([(classes[val] == each).sum() for _, val in parts]) for each in (0, 7, 14)
    ):
        assert counts.max() - counts.min() <= 1
    assert {len(val) for _, val in parts} <= {size // folds, -(-size // folds)}
    assert len(split_fold(classes, folds, 0, 5)[0]) == 5, "a limit holds in a fold too"


def test_more_folds_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="folds=1438: there are 1437 training samples"):
        built(dataset("dataset=digits", folds=1438, fold=0), batch_size=64)
