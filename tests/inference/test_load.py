"""expt.load: the model of a run, to the bits that the run's own worker computed."""

import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import expt
from expt.data.kinds.custom import Custom
from expt.errors import CheckpointError, ConfigError
from expt.features import Anything, Columns, Features, Numbers
from expt.inference.tables import inputs_of
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from expt.worker.run import Run
from tests.facade import Capture, Patch, as_typed, dataset, own_model, python
from tests.worker.conftest import ALONE, TrainAlone, Trained
from tests.worker.conftest import train_alone as train_alone  # the fixture

DEVICE = ALONE.device
FEW = (*as_typed("epochs=1 max_steps=2 batch_size=16 tensorboard.images=false"),)
SMALL = ("dataset=synthetic", "dataset.train_size=64", "dataset.test_size=20")
IMAGES = (*SMALL, "dataset.image_size=[16,16]", "dataset.channels=3")

SHIPPED = {
    "extra state": ("dataset=digits", "~model", "+model._target_=tests.worker.stateful.Extra"),
    "mlp": ("dataset=digits", "model.dropout=0.3"),
    "convnet": (*SMALL, "channels_last=true"),
    "a moving average": ("dataset=digits", "ema=0.5"),
    "a table": ("experiment=diabetes", "dataset.standardise_targets=true"),
    "mixed precision": ("dataset=digits", "amp=bf16"),
    "torchvision": (*IMAGES, "model=torchvision", "model.arch=mobilenet_v3_small"),
    "timm": (*IMAGES, "model=timm", "model.arch=test_resnet"),
    "transformer": ("experiment=char_lm", "model.layers=1", "model.width=16", "model.heads=2",
        "dataset.context=16"),
    "unet": ("task=segmentation", "model=unet", "model.widths=[2,2]", "dataset=segmentation_folder",
             "dataset.num_classes=2", "dataset.image_size=[16,8]", "dataset.num_workers=0"),
}  # fmt: skip


RARE = {"timm", "torchvision", "mlp"}
BOOK = "to be or not to be, that is the question. " * 60


def masks_in(folder: Path) -> Path:
    """Pictures and their masks, two to train on and one of each other part."""
    for part in ("train/a", "train/b", "val/a", "test/a"):
        for kind, shape in (("images", (10, 30, 3)), ("masks", (10, 30))):
            path = (folder / part).parent / kind / f"{part[-1]}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(len(part)).integers(0, 2, shape, np.uint8)
            Image.fromarray(pixels * (255 if kind == "images" else 1)).save(path)
    return folder


@pytest.fixture
def train(train_alone: TrainAlone) -> TrainAlone:
    """As train_alone, with a record like a command's."""

    def begin(run: Run) -> None:
        update_result(run.paths, status="running")

    def train(*overrides: str, name: str = "run") -> Trained:
        return train_alone(*overrides, name=name, before=begin)

    return train


def words(name: str) -> tuple[str, ...]:
    model = (f"model={name}",) if name in ("mlp", "convnet") else ()
    return (*FEW, *model, *SHIPPED[name])


def files_for(name: str, folder: Path) -> tuple[str, ...]:
    """Its data, where that lies in files, and the words that say where."""
    if name == "transformer":
        (folder / "book.txt").write_text(BOOK)
        return (f"dataset.root={folder / 'book.txt'}",)
    return (f"dataset.root={masks_in(folder)}", "batch_size=2") if name == "unet" else ()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in SHIPPED],
)
def test_it_gives_what_the_worker_computed(
    name: str, train_alone: TrainAlone, tmp_path: Path
) -> None:
    """In its evaluations, to the bit."""
    if name == "timm":
        pytest.importorskip("timm")
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], outputs: Tensor) -> None:
        if not module.training:
            seen.append((given[0].clone(), outputs.clone()))

    def begin(run: Run) -> None:
        update_result(run.paths, status="running")
        run.learner.evaluated.register_forward_hook(note)

    trained = train_alone(*words(name), *files_for(name, tmp_path), before=begin)
    before = torch.random.get_rng_state()
    loaded = expt.load(trained.folder, "last", amp="recorded", device=DEVICE)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(layer.training for layer in loaded.modules())
    assert len(seen) >= 2
    with torch.no_grad():
        for inputs, outputs in seen:
            assert torch.equal(loaded(inputs), outputs)
    assert loaded.features == trained.run.data.info.features
    assert loaded.config["epochs"] == 1


def test_it_computes_in_float32_if_nothing_else_is_said(train: TrainAlone, capfd: Capture) -> None:
    trained = train(*words("mixed precision"))
    capfd.readouterr()  # of training
    loaded = expt.load(trained.folder, device=DEVICE)
    images = torch.rand(5, 1, 8, 8, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(loaded(images), trained.run.learner.module.eval()(images))
        assert loaded(images).dtype == torch.float32
        half = expt.load(trained.folder, amp=True, device=DEVICE)
        assert half(images).dtype == torch.bfloat16
    assert capfd.readouterr().err == ""
    update_result(trained.run.paths, status="failed")
    expt.load(trained.folder)
    assert capfd.readouterr().err.startswith(f"warning: {trained.folder}: the run failed; ")


def test_a_text_goes_in_as_its_bytes(train: TrainAlone, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK)
    small = ("model.layers=1", "model.width=16", "model.heads=2", "dataset.context=16")
    trained = train("experiment=char_lm", f"dataset.root={tmp_path / 'book.txt'}", *small, *FEW[:3])
    loaded = expt.load(trained.folder, "last", device=DEVICE)
    inputs = loaded.preprocess("to be")
    assert inputs.tolist() == [list(b"to be")]
    several = [inputs[0], b"to be", ["to be"], ["to be", "to"]]
    assert [loaded.preprocess(each).shape for each in several] == [(1, 5)] * 3 + [(2, 5)]
    assert loaded.preprocess(b"\xff").tolist() == [[255]]
    with torch.no_grad():
        assert torch.equal(loaded(inputs), trained.run.learner.module.eval()(inputs))


def test_pictures_rows_and_arrays_become_what_the_loaders_gave(
    train: TrainAlone, tmp_path: Path
) -> None:
    for part, number in (("train", 4), ("test", 3)):
        for name in "ab":
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = np.random.default_rng(index).integers(
                    0, 256, (20 + index, 30, 3), np.uint8
                )
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{index}.png")
    photos = (
        *as_typed(f"dataset=image_folder dataset.root={tmp_path / 'photos'}"),
        "dataset.image_size=[16,12]",
    )
    trained = train(*FEW, *photos, "batch_size=2", "model=mlp", "dataset.cache=false")
    loaded = expt.load(trained.folder, "last", device=DEVICE)
    test = trained.run.data.test
    assert test is not None
    expected = torch.cat([batch.inputs for batch in test.evaluation()])
    files = sorted((tmp_path / "photos" / "test").glob("*/*.png"))
    assert torch.equal(loaded.preprocess(files), expected)
    assert torch.equal(loaded.preprocess([Image.open(file) for file in files]), expected)
    assert torch.equal(loaded.preprocess(io.BytesIO(files[0].read_bytes())), expected[:1])
    black = torch.zeros(3, 16, 12)
    assert torch.equal(loaded.preprocess(black), loaded.preprocess(black[None].byte()))
    assert not black.any(), "what is given stays as it is"
    assert loaded.class_names == ("a", "b")
    with pytest.raises(ConfigError, match=r"shape \[1, 1, 8, 8\]: give \[3, height, width\]"):
        loaded.preprocess(torch.zeros(1, 1, 8, 8))


def test_pictures_of_a_segmentation_folder_are_stretched_as_they_were(
    train: TrainAlone, tmp_path: Path
) -> None:
    trained = train(*words("unet"), *files_for("unet", tmp_path))
    assert trained.run.data.val is not None
    expected = next(trained.run.data.val.evaluation()).inputs
    picture = tmp_path / "val" / "images" / "a.png"
    loaded = expt.load(trained.folder, device=DEVICE)
    assert torch.equal(loaded.preprocess(picture), expected)


def test_samples_of_ones_own_without_classes_are_only_moved() -> None:
    own = Custom(target="mine.Data", kwargs={})
    preprocess = inputs_of(own, Features(Anything(), Anything()), torch.device("cpu"))
    for samples in (torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), torch.ones(3, 5)):
        assert torch.equal(preprocess(samples), samples)


@pytest.mark.parametrize("num_classes", [None, 3])
def test_a_sample_of_ones_own_becomes_a_batch_by_its_recorded_shape(
    num_classes: int | None,
) -> None:
    own = Custom(target="mine.Data", kwargs={}, num_classes=num_classes)
    data = Features(Anything.like(torch.zeros(3), are_inputs=True), Anything())
    preprocess, rows = inputs_of(own, data, torch.device("cpu")), torch.arange(6.0).view(2, 3)
    for given in (rows, rows.numpy(), [*rows], [rows[:1], rows[1]]):
        assert torch.equal(preprocess(given), rows)
    assert torch.equal(preprocess(rows[0]), rows[:1])
    with pytest.raises(ConfigError, match=r"\[3\]"):
        preprocess(torch.ones(1, 2, 3))


def test_rows_are_lists_arrays_or_tensors() -> None:
    columns = Columns(names=("a", "b"), width=2, scales={"a": (1.0, 2.0)})
    preprocess = inputs_of(
        dataset("dataset=diabetes task=regression"), Features(columns, Numbers())
    )
    row = torch.tensor([48, 21.6])
    for given in ([48, 21.6], [np.float64(48), "21.6"], row, [row], row.double().numpy()):
        assert preprocess(given).flatten().tolist() == pytest.approx([23.5, 21.6])
    assert preprocess([[1, True], [2, 3]]).shape == (2, 2)
    assert preprocess([None, 1]).tolist() == [[0, 1]]  # its mean, which b has not
    for wrong in ([1], [1, None], ["x", 1], 3.0, torch.ones(3)):
        with pytest.raises(ConfigError):
            preprocess(wrong)
    for ragged in ([[1, 2], [1]], [[1, 2], []], [[1], [1, 2], [1, 2, 3]]):
        with pytest.raises(ConfigError, match="rows of different lengths: give a, b"):
            preprocess(ragged)


def of_other_source(folder: Path) -> None:
    """Have the record say that another process trained the run, with other classes."""
    config: Any = expt.load(folder, "last").config
    content: Any = {"data": None, "code": "of then"}
    update_result(RunPaths(folder), config=config, content=content, imported={})


def test_a_class_of_ones_own_in_a_process_that_has_never_trained(
    train: TrainAlone, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    trained = train(*FEW, *own_model(tmp_path))
    program = (
        "import expt, torch, sys; print(expt.load(sys.argv[1], 'last')(torch.ones(1, 1, 8,"
        " 8)).tolist())"
    )
    done = python(program, os.path.relpath(trained.folder, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        outputs = trained.run.learner.module.cpu().eval()(torch.ones(1, 1, 8, 8))
    assert (done.stdout.strip(), done.stderr) == (str(outputs.tolist()), "")
    of_other_source(trained.folder)
    capsys.readouterr()  # of training
    expt.load(trained.folder, "last")
    assert len([*expt.predict(trained.folder, split="test", which="last")]) == 360
    told = [line.partition(" code ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["warning: mine.Net: source"] * 2


def test_what_is_not_there_is_told(train: TrainAlone, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder of a run that has begun to train"):
        expt.load(tmp_path)
    trained = train(*FEW, "checkpoint.every_epochs=null")
    (trained.paths.best).unlink()
    with pytest.raises(ConfigError, match=r"@best: .* has no checkpoint best; it has step"):
        expt.load(trained.folder)
    assert expt.load(f"{trained.folder}@last").config == expt.load(trained.folder, "last").config
    with pytest.raises(ConfigError, match="@first names no checkpoint; use @STEP"):
        expt.load(f"{trained.folder}@first")
    with pytest.raises(ConfigError, match="@last: which=best is another checkpoint"):
        expt.load(f"{trained.folder}@last", "best")
    with pytest.raises(ConfigError, match="which=first: use best, last, a step"):
        expt.load(trained.folder, "first")
    last = trained.paths.last
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"@last: .*truncated.*; there is no other"):
        expt.load(trained.folder, "last")


def test_runs_as_a_list_and_as_a_table(train: TrainAlone, tmp_path: Path) -> None:
    folders = [train(*FEW, f"seed={seed}", name=f"run{seed}").folder for seed in (0, 1)]
    found = expt.list_runs(tmp_path)
    assert {run.folder for run in found} == {*folders}
    pandas = pytest.importorskip("pandas")
    table = found.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == 2
    assert {"status", "loss/train"} <= {*table.columns}


def test_a_run_that_measured_nothing_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    (failed,) = expt.list_runs(tmp_path)
    assert "expt.Result failed" in repr(failed)
    assert (failed.metrics, failed.objective) == ({}, math.inf)
    with pytest.raises(ConfigError, match="is not a folder of a run"):
        expt.load(tmp_path / "result.json")


def test_a_run_that_saves_meanwhile_is_loaded_as_it_is_then(
    train: TrainAlone, monkeypatch: Patch
) -> None:
    trained = train(*FEW)
    best, checked = trained.paths.best, checkpoint_file.check
    first = best.stat().st_ino

    def check(path: Path) -> None:
        if best.stat().st_ino != first:
            return checked(path)
        best.with_name("new").write_bytes(best.read_bytes())
        best.with_name("new").replace(best)
        raise CheckpointError("a part of the one before is missing")

    monkeypatch.setattr(checkpoint_file, "check", check)
    assert expt.load(trained.folder).config["epochs"] == 1
    state = checkpoint.load(best)
    state["model"] = {name: values[:3] for name, values in state["model"].items()}
    checkpoint.save(best, state)
    with pytest.raises(ConfigError) as refused:
        expt.load(trained.folder)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("model: is not the one that the checkpoint was saved of (")
    assert "bias [3], the model's [" in line
    assert line.endswith("or begin a new run with weights=RUN, which takes what fits")


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of three numbers, whose sum they are to predict."""

    def __init__(self, train: bool) -> None:
        self.rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(int(train)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.rows[index].sum()[None]


class OfColumns(nn.Sequential):
    """A model without any Flatten, whose sizes are known once it has seen rows."""

    def __init__(self) -> None:
        super().__init__(nn.LazyBatchNorm1d(), nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 1))


@pytest.mark.parametrize("kind", [pytest.param("table", marks=pytest.mark.slow), "texts", "custom"])
def test_a_model_of_rows_gets_them_as_in_training(
    kind: str, train: TrainAlone, tmp_path: Path
) -> None:
    data, rows = as_typed("task=regression dataset=diabetes"), torch.ones(5, 10)
    given: Any = rows
    if kind == "texts":
        (tmp_path / "t.csv").write_text("a,b,y\n" + "3,x,1\n4,,2\n6,z,4\n" * 40)
        path = f"dataset.path={tmp_path / 't.csv'}"
        data = (*as_typed("task=regression dataset=table dataset.targets=y"), path)
        given, rows = [[3, "x"], [4, None]], torch.ones(2, 4)
    if kind == "custom":
        data = (*as_typed("task=regression ~dataset"), f"+dataset._target_={__name__}.Rows")
        given = rows = Rows(train=False).rows
    train(*FEW, *data, "~model", f"+model._target_={__name__}.OfColumns")
    model = expt.load(tmp_path / "run")
    inputs = model.preprocess(given)
    assert inputs.shape == rows.shape
    assert model(inputs).shape == (len(rows), 1)
    drawn = model.features.inputs.unscaled.drawn(2, torch.Generator())
    assert drawn is not None
    assert drawn.shape[1:] == inputs.shape[1:]
