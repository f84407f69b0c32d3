"""A run's weights evaluated: its own numbers on its data, its classes and scales elsewhere."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import expt
from expt.command import evaluation_settings
from expt.config.constraints import Target
from expt.config.identity import shown
from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.runs.named_checkpoint import trained_run
from expt.runs.paths import RunPaths
from expt.runs.result import read_result, update_result
from expt.tasks.custom import Config as TargetTask
from expt.training.learner import Position
from expt.worker import timing
from expt.worker.evaluation import measure_weights
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed, common, request_of
from tests.worker.conftest import ALONE, TrainAlone, Trained
from tests.worker.conftest import train_alone as train_alone  # the fixture

QUIET = as_typed("tensorboard.images=false tensorboard.norms=false tensorboard.health=false")
FEW = (*as_typed("epochs=2 batch_size=16 dataset.train_limit=160"), *QUIET)
TABLE = (*as_typed("model=mlp model.hidden=[4] epochs=1 batch_size=8 drop_last=false"), *QUIET)


@pytest.fixture
def train(train_alone: TrainAlone) -> TrainAlone:
    """As train_alone, with a record like a command's."""

    def begin(run: Run) -> None:
        content = content_of(run.config)
        update_result(
            run.paths, status="running", config=shown(run.config), content=content, identity="x"
        )

    def train(*overrides: str, name: str = "run") -> Trained:
        return train_alone(*overrides, name=name, before=begin)

    return train


def lived(config: RunConfig, folder: Path) -> Path:
    """The folder of a run of this configuration."""
    folder.mkdir(exist_ok=True)
    paths = RunPaths(folder)
    update_result(paths, status="running", config=shown(config), identity="x")
    Run(request_of(config, folder), ALONE).train()
    return folder


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    """The record of an evaluation by one worker, in this process."""
    asked = evaluation_settings.read(["world_size=1", "tensorboard.images=false", *words])
    record, _ = trained_run(folder, asked.which)
    measured = evaluation_settings.settings(folder, record, asked)
    paths = RunPaths(
        folder / "evaluations" / f"{measured.name}-{len([*folder.glob('evaluations/*')])}"
    )
    paths.folder.mkdir(parents=True)
    update_result(paths, status="running", config=shown(measured.config))
    asks = request_of(measured.config, paths.folder)
    assert measure_weights(measured.evaluation, asks, ALONE) == "completed"
    return dict(read_result(paths))


def metrics(folder: Path, *words: str) -> dict[str, float]:
    found: dict[str, float] = evaluated(folder, *words)["metrics"]
    return found


OWN = """
import os, torch, expt
from torch import nn
from torch.nn import functional

class Data(torch.utils.data.Dataset):
    def __init__(self, train, shift=0.0):
        seeded = torch.Generator().manual_seed(int(train))
        self.x = torch.randn(90 if train else 31, 5, generator=seeded) + shift
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        other = int(os.environ.get("ORDER", "0"))
        return {"row": self.x[index]}, self.x[index - other].sum()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 1), nn.BatchNorm1d(1)
    def forward(self, row):
        return self.norm(self.layer(row))[:, 0]

class Fit(expt.Task):
    def forward(self, model, batch):
        return model(batch.inputs["row"])
    def loss(self, outputs, batch):
        return (outputs - batch.targets).square().sum(), len(outputs)
    def measure(self, outputs, batch):
        return {"bias": ((outputs - batch.targets).sum(), len(outputs))}
"""
RUNS = {
    "batch norm, over the whole batch": (
        *FEW,
        *as_typed("model=convnet batch_norm=sync mixup=0.2 weights=null"),
    ),
    "a moving average, of a fold": (
        *FEW,
        *as_typed("ema=0.9 task.class_weights=balanced label_smoothing=0.1"),
        *as_typed("dataset.folds=5 dataset.fold=3 dataset.augment.crop_padding=2"),
    ),
    "in bf16, accumulated, balanced": (
        *FEW,
        *as_typed("amp=bf16 gradient_accumulation=2 dataset.sampling=balanced freeze=['bias']"),
    ),
    "standardised targets": (
        *as_typed("experiment=diabetes epochs=2 dataset.standardise_targets=true"),
        *QUIET,
    ),
}


@pytest.mark.parametrize("name", common(RUNS, "batch norm", "a moving", "standardised"))
def test_its_own_data_gives_its_own_numbers(name: str, train: TrainAlone) -> None:
    trained = train(*RUNS[name])
    folder, recorded = trained.folder, trained.result["metrics"]
    before = (folder / "result.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    last, best = metrics(folder, "split=val", "which=last"), metrics(folder)
    assert {*last} | {*best} == {
        tag for tag in recorded if tag.endswith(("/val", "/test")) and tag[:4] != "best"
    }
    assert {**last, **best} == {tag: recorded[tag] for tag in {**last, **best}}
    expected = ((folder / "result.json").read_bytes(), (folder / "metrics.jsonl").read_bytes())
    assert before == expected


def test_numbers_other_than_the_runs_have_the_cause_that_is_known(
    train: TrainAlone, capfd: Capture, monkeypatch: Patch
) -> None:
    trained = train(*FEW)
    record = json.loads((trained.folder / "result.json").read_text())
    metrics(trained.folder, "split=train")
    assert "the run measured" not in capfd.readouterr().err, "that is a mean over changing weights"
    record["metrics"]["loss/test"] += 1

    def cause(*words: str, **more: Any) -> str:
        (trained.folder / "result.json").write_text(json.dumps({**record, **more}))
        metrics(trained.folder, *words)
        return capfd.readouterr().err.partition("the run measured these weights; ")[2]

    assert "a set" in cause()
    assert "amp" in cause("amp=bf16")
    assert cause(distributions={"pytest": "0.1"}).startswith("pytest 0.1 then, ")
    monkeypatch.setattr("expt.config.own_code.has_other_source", lambda _: True)
    assert cause().startswith("the source of its classes has changed")


@pytest.mark.slow
def test_classes_of_ones_own_and_more_metrics(
    tmp_path: Path, configured: Configured, monkeypatch: Patch, capfd: Any
) -> None:
    (tmp_path / "own_evaluated.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    mine: dict[str, Any] = {
        "model": Target(target="own_evaluated.Net", kwargs={}),
        "task": TargetTask(target="own_evaluated.Fit", metrics={"bias": "min"}, kwargs={}),
        "dataset": Custom(target="own_evaluated.Data", num_workers=0, kwargs={}),
    }
    config = dataclasses.replace(
        configured("batch_size=9", "epochs=2", "objective=loss/val", *QUIET), **mine
    )
    folder = lived(config, tmp_path / "run")
    recorded = read_result(RunPaths(folder))["metrics"]
    assert metrics(folder, "split=val", "which=last")["bias/val"] == recorded["bias/val"]
    found = metrics(
        folder, "+task.metrics.mae={_target_: torchmetrics.MeanAbsoluteError, better: min}"
    )
    assert found["bias/test"] == recorded["bias/test"]
    model, rows = expt.load(folder), torch.randn(31, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert found["mae/test"] == pytest.approx(
            float((model(rows) - rows.sum(1)).abs().mean()), rel=1e-5
        )
    shifted = evaluated(folder, "dataset.shift=3.0")
    assert shifted["metrics"]["loss/test"] > recorded["loss/test"]
    assert shifted["evaluation_of"]["dataset"] == "Data shift=3.0"
    assert [path.name for path in folder.glob("evaluations/Data*")] == ["Data-shift=3.0-test-2"]
    assert [record["target"] for record in expt.predict(folder, split="test")] == pytest.approx(
        rows.sum(1).tolist()
    )
    assert "warning" not in capfd.readouterr().err
    monkeypatch.setenv("ORDER", "1")  # as that of a set in another process
    for words in ((), ("split=val", "which=last")):
        split = metrics(folder, *words).popitem()[0].rpartition("/")[2]
        assert f"/{split}: " in capfd.readouterr().err
    others: dict[str, Any] = {"content": {"data": None, "code": "other"}, "config": shown(config)}
    mae = "torchmetrics.MeanAbsoluteError"
    extra = {"name": "_target_", "target": mae, "kwargs": {}, "better": "min"}
    others["config"]["task"]["metrics"]["mae"] = extra
    asked = evaluation_settings.read(["world_size=1"])
    record: Any = {**read_result(RunPaths(folder)), **others}
    evaluation_settings.settings(folder, record, asked)
    names = "own_evaluated.Net, own_evaluated.Fit, own_evaluated.Data"
    assert f"{names}: source code has changed since the run" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"task\.metrics\.worst: _target_=torchmetrics\.Nope"):
        metrics(folder, "+task.metrics.worst={_target_: torchmetrics.Nope, better: min}")


def table(path: Path, columns: dict[str, Any]) -> str:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]))
    return f"dataset.path={path}"


@pytest.mark.slow
def test_another_table_is_read_as_in_training(train: TrainAlone, tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    a, b = drawn.normal(5, 2, 80), drawn.normal(-100, 30, 80)
    kind = np.array(["cat", "dog", "emu"])[(a + b / 15 + 1 > 0).astype(int) + (a > 6)]
    here = table(tmp_path / "here.csv", {"a": a, "b": b, "kind": kind})
    words = ("dataset=table", here, "dataset.targets=kind", *TABLE)
    folder = train(*words).folder
    few = kind != "dog"
    n = int(few.sum())
    moved = {"id": [f"row{i}" for i in range(n)], "b": b[few], "kind": kind[few], "a": a[few]}
    there = table(tmp_path / "there.csv", moved)
    found = evaluated(folder, there)
    model = expt.load(folder)
    labels = torch.tensor([model.class_names.index(name) for name in kind[few]])
    with torch.no_grad():
        logits = model(model.preprocess(np.stack([a, b], 1)[few]))
    assert found["metrics"]["loss/all"] == pytest.approx(
        float(functional.cross_entropy(logits, labels)), rel=1e-6
    )
    assert found["metrics"]["accuracy/all"] == float((logits.argmax(1) == labels).double().mean())
    with pytest.raises(ConfigError, match="rows of shape"):
        model.preprocess(np.zeros(3))
    assert (found["evaluation_of"]["samples"], found["evaluation_of"]["dataset"]) == (n, "there")
    assert metrics(folder, there, "dataset.features=[b,a]") == found["metrics"]
    assert found["evaluation_of"]["class_names"] == ["cat", "dog", "emu"]
    cats = kind == "cat"
    alone = {"a": a[cats], "b": b[cats], "kind": kind[cats]}
    for n in (int(cats.sum()), 1):  # nothing is learned of them
        found = evaluated(
            folder,
            table(tmp_path / f"{n}.csv", {name: column[:n] for name, column in alone.items()}),
        )
        assert found["evaluation_of"]["samples"] == n
    with pytest.raises(
        ConfigError, match="has the class yak, which the run does not know; it has cat, dog, emu"
    ):
        metrics(
            folder,
            table(tmp_path / "yaks.csv", {"a": a, "b": b, "kind": np.where(few, kind, "yak")}),
        )
    with pytest.raises(ConfigError, match=r"has no such column, it has b, kind"):
        metrics(folder, table(tmp_path / "less.csv", {"b": b, "kind": kind}))
    with pytest.raises(ConfigError, match=r"dataset\.targets=.* has no such column.* predict"):
        metrics(folder, table(tmp_path / "unknown.csv", {"a": a, "b": b}))
    with pytest.raises(
        ConfigError,
        match=r"dataset\.val_fraction=0\.5: the run held out its samples with val_fraction=0\.1",
    ):
        metrics(folder, "dataset.val_fraction=0.5")


@pytest.mark.slow
def test_boolean_classes_of_any_file(train: TrainAlone, tmp_path: Path, capfd: Any) -> None:
    """Also one of them only."""
    x = np.random.default_rng(2).normal(size=60)
    y = x > 0
    folder = train(
        "dataset=table", table(tmp_path / "y.csv", {"x": x, "y": y}), "dataset.targets=y", *TABLE
    ).folder
    np.savez(tmp_path / "y.npz", x=x, y=y)
    np.savez(tmp_path / "true.npz", x=x[y], y=y[y])
    whole, true = f"dataset.path={tmp_path / 'y.npz'}", f"dataset.path={tmp_path / 'true.npz'}"
    expected = metrics(folder, "split=all")
    assert metrics(folder, whole) == pytest.approx(expected)
    assert metrics(folder, true)
    assert read_result(RunPaths(folder))["data"]["targets"]["names"] == ["False", "True"]
    untested = (*TABLE, "dataset.test_fraction=0", "dataset.val_fraction=0.2")
    trained = train("dataset=table", whole, "dataset.targets=y", *untested, name="npz")
    assert trained.result["data"]["targets"]["names"] == ["False", "True"]
    capfd.readouterr()
    assert "loss/val" in metrics(trained.folder)
    assert "has no test set: val is measured" in capfd.readouterr().err


@pytest.mark.slow
def test_several_targets_are_known_by_their_names(train: TrainAlone, tmp_path: Path) -> None:
    drawn = np.random.default_rng(1)
    x = drawn.normal(3, 2, 60)
    columns = {"x": x, "near": x * 2, "far": x * 1000 + drawn.normal(size=60)}
    here = table(tmp_path / "here.csv", columns)
    scaled = as_typed("task=regression dataset=table dataset.standardise_targets=true")
    folder = train(*scaled, here, "dataset.targets=[near,far]", *TABLE).folder
    there = table(tmp_path / "there.csv", {name: columns[name] for name in ("far", "x", "near")})
    at_home = metrics(folder, "split=all")
    assert metrics(folder, there, "dataset.targets=[far,near]") == pytest.approx(at_home)
    with pytest.raises(ConfigError, match=r"dataset\.targets: there is no near, which the run"):
        metrics(folder, there, "dataset.targets=far")


def photos(root: Path, names: dict[str, int]) -> str:
    """Images of one grey each, which says their class."""
    for part in ("train", "test"):
        for name, grey in names.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(6):
                pixels = np.full((12 + index, 16, 3), grey + index, np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return f"dataset.root={root}"


def test_other_pictures_take_the_size_that_the_run_was_trained_on(
    train: TrainAlone, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    for where, size in (("one", 8), ("two", 12)):
        for place in itertools.product((where,), ("train", "test"), "ab", "1234"):
            file = tmp_path.joinpath(*place).with_suffix(".png")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((size, size), 200 * ("a" in place), np.uint8)).save(file)
    words = as_typed("dataset=huggingface dataset.input=image dataset.target=label model=mlp")
    few = as_typed("model.hidden=[4] batch_size=4 epochs=1 dataset.num_workers=0")
    folder = train(*words, f"dataset.path={tmp_path / 'one'}", *few, *QUIET).folder
    found = evaluated(folder, f"dataset.path={tmp_path / 'two'}")
    assert found["config"]["dataset"]["image_size"] == [8, 8]
    assert found["evaluation_of"]["samples"] == 8


def test_other_samples_need_no_groups(train: TrainAlone, tmp_path: Path) -> None:
    """The file of a folder's groups is gone; those of other pictures are not known at all."""
    trained_on = photos(tmp_path / "one", {"black": 0, "white": 240})
    groups = tmp_path / "groups.csv"
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.png")]
    groups.write_text(
        "\n".join(["file_name,group", *(f"{x},{x.parent}{x.stem[0]}" for x in files)])
    )
    few = as_typed("model=mlp model.hidden=[4] batch_size=2 epochs=1 dataset.num_workers=0")
    size = ("dataset.image_size=[8,8]", "dataset.val_fraction=0.3", f"dataset.group={groups}")
    folder = train("dataset=image_folder", trained_on, *size, *few, *QUIET).folder
    other = photos(tmp_path / "two", {"white": 240, "black": 0})
    before = metrics(folder, other)
    groups.rename(tmp_path / "away.csv")
    assert metrics(folder, other) == before
    assert metrics(folder, "dataset=image_folder", other, "dataset.num_workers=0") == before
    with pytest.raises(ConfigError, match=r"dataset.group=.*: there is no such file"):
        metrics(folder, "split=val")  # of the run's own pictures they say which are val
    with pytest.raises(ConfigError, match=r"dataset.group=none.csv: there is no such file"):
        metrics(folder, other, "dataset.group=none.csv")


def test_another_folder_of_images_is_known_by_its_names(train: TrainAlone, tmp_path: Path) -> None:
    trained_on = photos(tmp_path / "one", {"black": 0, "grey": 120, "white": 240})
    small = as_typed(
        "model=mlp model.hidden=[8] batch_size=4 epochs=8 optimizer.lr=0.1 dataset.num_workers=0"
    )
    size = ("dataset.image_size=[8,8]", "dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.2,0.3,0.4]")
    folder = train(
        "dataset=image_folder", trained_on, *size, "dataset.val_fraction=0.3", *small, *QUIET
    ).folder
    right = metrics(folder, "split=all")["accuracy/all"]
    assert right == 1
    # black is now the second of two, and images are 32 x 32 if nothing is said
    other = photos(tmp_path / "two", {"white": 240, "black": 0})
    found = evaluated(folder, "dataset=image_folder", other, "dataset.num_workers=0")
    assert found["metrics"]["accuracy/test"] == 1
    assert found["config"]["dataset"]["image_size"] == [8, 8]
    assert found["config"]["dataset"]["std"] == [0.2, 0.3, 0.4]
    turned = photos(tmp_path / "three", {"white": 0, "black": 240})
    assert metrics(folder, turned)["accuracy/test"] == 0
    rows = table(tmp_path / "rows.csv", {"x": [0.5, 1.5] * 4, "kind": ["black", "white"] * 4})
    refused = {
        f"dataset=table {rows} dataset.targets=kind": "and the model takes channels 3; use data",
        "dataset=digits": "dataset=digits: has channels 1, and the model takes channels 3; use",
        f"dataset=image_folder {other} dataset.image_size=[9,9]": "has image_size 9 x 9, and the",
        photos(tmp_path / "four", {"black": 0, "red": 9}): "has the class red, which the run",
        "dataset.mean=[0,0,0]": "samples are prepared as in training; leave it out",
        "dataset=diabetes": "task=classification: dataset=diabetes is for task=regression",
    }
    for words, message in refused.items():
        with pytest.raises(ConfigError) as raised:
            metrics(folder, *words.split())
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_classes_without_names_are_taken_by_their_number(train: TrainAlone, capfd: Any) -> None:
    data = as_typed("dataset=synthetic dataset.train_size=300 dataset.test_size=40")
    folder = train(*FEW, *data, "model.hidden=[4]").folder
    words = ("dataset=fashion_mnist", "dataset.root=/usr/share/datasets/fashion-mnist")
    if Path(words[1].partition("=")[2]).is_dir():
        assert evaluated(folder, *words)["evaluation_of"]["samples"] == 10_000
        assert "its classes have other names than the run's" in capfd.readouterr().err
    with pytest.raises(
        ConfigError, match="has 4 classes, and the run's model 10; use data of its classes"
    ):
        metrics(folder, "dataset=synthetic", "dataset.num_classes=4")


def test_a_text_and_its_window(train: TrainAlone, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 60)
    (tmp_path / "other.txt").write_text("to be or not to be, " * 30)
    small = as_typed(
        "model.layers=1 model.width=16 model.heads=2 dataset.context=16 epochs=1 max_steps=3"
        " batch_size=8 eval_split=val objective=auto"
    )
    book = f"dataset.root={tmp_path / 'book.txt'}"
    trained = train("experiment=char_lm", book, *small, *QUIET)
    recorded = trained.result["metrics"]
    assert metrics(trained.folder)["perplexity/test"] == recorded["perplexity/test"]
    other = evaluated(trained.folder, "dataset=text", f"dataset.root={tmp_path / 'other.txt'}")
    assert other["config"]["dataset"]["context"] == 16
    assert other["evaluation_of"]["split"] == "all"


def test_masks_and_what_in_them_counts_for_nothing(train: TrainAlone, tmp_path: Path) -> None:
    for part, number in (("train", 6), ("test", 3)):
        for kind, shape in (("images", (10, 12, 3)), ("masks", (10, 12))):
            (tmp_path / part / kind).mkdir(parents=True)
            for index in range(number):
                values = np.random.default_rng(index).integers(0, 3, shape, np.uint8)
                values = values * 80 if kind == "images" else np.where(values == 2, 255, values)
                Image.fromarray(values.astype(np.uint8)).save(
                    tmp_path / part / kind / f"{index}.png"
                )
    masks = ("dataset=segmentation_folder", f"dataset.root={tmp_path}", "dataset.num_classes=2")
    size = ("dataset.image_size=[8,8]", "dataset.num_workers=0", "dataset.val_fraction=0.3")
    small = ("task=segmentation", "model=unet", "model.widths=[2,2]", "batch_size=2", "epochs=1")
    trained = train(*masks, *size, *small, *QUIET)
    recorded = trained.result["metrics"]
    found = evaluated(trained.folder)
    assert {tag: recorded[tag] for tag in found["metrics"]} == found["metrics"]
    with pytest.raises(ConfigError, match="num_classes 3, and the model takes num_classes 2"):
        metrics(trained.folder, "dataset.num_classes=3")


REFUSED = {
    "optimizer.lr=0.1": "optimizer.lr=0.1: an evaluation takes dataset,",
    "epochs=3": "epochs=3: an evaluation takes dataset,",
    "model=mlp": "model=mlp: an evaluation takes dataset,",
    "splt=val": "and keeps all else of the run; leave it out. Did you mean 'split'?",
    "split=tst": "split=tst: not one of train, val, test, all",
    "which=first": "which=first: not one of best, last",
    "dataset=mnsit": "dataset=mnsit: not one of",
    "dataset=[digits,mnist]": "dataset=[digits,mnist]: takes the name of one choice",
    "dataset={root: new}": "dataset={root: new}: names no dataset",
    "split=test,val": "split=test,val: an evaluation takes one value; evaluate one after the other",
    "~dataset.mean": "~dataset.mean: an evaluation takes one value",
    "dataset.colour=red": "dataset.colour=red: there is no such key",
    "task.metrics.x=3": "task.metrics.x=3: ",
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, configured: Configured) -> Path:
    """The folder of a run without a test of its own."""
    config = configured(*FEW, "eval_split=test", "epochs=1", "max_steps=2")
    return lived(config, tmp_path_factory.mktemp("digits"))


@pytest.mark.parametrize("word", REFUSED)
def test_what_makes_no_sense_is_told_in_a_line(word: str, digits: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        metrics(digits, word)
    assert REFUSED[word] in str(raised.value)
    assert len(raised.value.problems) == 1


def write_test_alone(root: Path, number: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Write digits as colour pictures in root/test/CLASS; return them sorted by path."""
    with np.load(Path(expt.__file__).parent / "data" / "digits.npz") as file:
        images, labels = file["test_images"][:number], file["test_labels"][:number]
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = root / "test" / str(label) / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).convert("RGB").save(path)
    order = np.argsort(labels, kind="stable")
    return torch.from_numpy(images[order]).float() / 255, torch.from_numpy(labels[order]).long()


def test_folder_with_only_a_test_part(digits: Path, tmp_path: Path) -> None:
    """The run's pictures are grey, those of the folder have three channels."""
    images, labels = write_test_alone(tmp_path / "photos")
    root = f"dataset.root={tmp_path / 'photos'}"
    folder = ("dataset=image_folder", root, "dataset.num_workers=0")
    model = expt.load(digits)
    with torch.no_grad():
        loss = float(functional.cross_entropy(model(model.preprocess(images)), labels))
    for split in ("test", "all"):
        found = evaluated(digits, *folder, f"split={split}")
        assert found["evaluation_of"]["samples"] == 30
        assert found["metrics"][f"loss/{split}"] == pytest.approx(loss, abs=1e-6)
    flat = evaluated(digits, folder[0], f"{root}/test", folder[2])
    assert flat["metrics"] == found["metrics"], "all of a folder without a test set"
    for word in ("split=train", "split=val", "dataset.channels=3"):
        with pytest.raises(ConfigError, match=word.partition("=")[0].removeprefix("dataset.")):
            evaluated(digits, *folder, word)


def test_every_part_counts_once(digits: Path, capfd: Any) -> None:
    sizes = {
        split: evaluated(digits, f"split={split}")["evaluation_of"]["samples"]
        for split in ("train", "val", "test", "all")
    }
    assert sizes == {"train": 160, "val": 144, "test": 360, "all": 1797}
    found = evaluated(digits, "tensorboard.images=false")
    classes = found["evaluation_of"]["by_class"].values()
    assert sum(one["samples"] for one in classes) == 360
    right = sum(one["recall"] * one["samples"] for one in classes)
    assert right / 360 == pytest.approx(found["metrics"]["accuracy/test"])
    assert "split=all: the run was trained on these samples" in capfd.readouterr().err


def test_numbers_are_shown_in_tensorboard_beside_the_runs(digits: Path) -> None:
    number = len([*digits.glob("evaluations/*")])
    shown_there = evaluated(digits, "tensorboard.images=true")
    (folder,) = digits.glob(f"evaluations/*-{number}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    (point,) = events.Scalars("accuracy/test")
    assert (point.step, point.value) == (2, pytest.approx(shown_there["metrics"]["accuracy/test"]))
    assert {*events.Tags()["images"]} == {"confusion/test", "mistakes/test"}
    assert not [tag for tag in events.Tags()["tensors"] if "hparams" in tag]
    assert shown_there["evaluation_of"]["step"] == 2


def test_an_evaluation_is_timed_by_its_first_batches(monkeypatch: Patch) -> None:
    """Of three workers, each with thirty samples in batches of ten."""
    monkeypatch.setattr("time.perf_counter", iter([0.0, 2.0]).__next__)
    monkeypatch.setattr(timing, "evaluate", lambda learner, batches, device: list(batches))
    monkeypatch.setattr(timing, "STEPS", 2)
    batch = Batch(torch.zeros(10), None, 10)
    loader = SimpleNamespace(size=90, evaluation=lambda: [batch] * 3)
    run: Any = SimpleNamespace(
        data=SimpleNamespace(evaluated={"val": loader}.get),
        config=SimpleNamespace(eval_split="val"),
        position=Position(1, 1),
        worker=SimpleNamespace(world_size=3, device=None, beat=lambda: None),
        learner=None,
    )
    assert timing._time_evaluation(run) == pytest.approx(2.0 * 30 / 20)


@pytest.mark.parametrize(
    ("tag", "by", "warns"),
    [("loss/test", 1.03, True), ("loss/test", 1.005, False), ("accuracy/test", 1.001, False)],
)
def test_a_loss_is_compared_more_closely_than_a_share(
    train: TrainAlone, tag: str, by: float, warns: bool, capfd: Capture
) -> None:
    """A hundredth of a loss is more than rounding; one sample of an accuracy is not."""
    done = train(*FEW, "model=mlp")
    told = {**done.result["metrics"], tag: done.result["metrics"][tag] * by}
    update_result(done.paths, metrics=told, status="completed")
    capfd.readouterr()
    evaluated(done.folder)
    assert (f"{tag}: " in capfd.readouterr().err) == warns


def test_a_rare_metric_is_not_compared_with_another_epoch_s(
    train: TrainAlone, capfd: Capture
) -> None:
    metric = "{_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10}"
    own = f"+task.metrics={{rare: {metric[:-1]}, better: max, every: 3}}}}"
    worse = "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 2, gamma: 1000}"
    done = train(*FEW, "model=mlp", "epochs=3", own, worse)
    update_result(done.paths, metrics=done.result["metrics"], status="completed")
    assert done.result["best"]["epoch"] < 3
    capfd.readouterr()
    found = evaluated(done.folder, "split=val")["metrics"]["rare/val"]
    assert abs(found - done.result["metrics"]["rare/val"]) > 0.1
    assert "the run measured" not in capfd.readouterr().err
