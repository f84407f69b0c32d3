"""`expt export`: a file that computes what the model computes, or none."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expt
from expt.command import export as command
from expt.data.written import PARTS
from expt.errors import ConfigError, RunFailed
from expt.inference import export as exporter
from expt.inference.load import located, read, rebuilt
from tests.facade import Capture, Patch, own_model
from tests.inference.test_load import FEW, IMAGES, of_other_source
from tests.inference.test_load import train as train  # the fixture
from tests.worker.conftest import TrainAlone
from tests.worker.conftest import train_alone as train_alone  # the fixture


def left_in(folder: Path) -> set[str]:
    """What is there beside what a run leaves."""
    return {path.name for path in folder.iterdir()} - {
        "checkpoints",
        "metrics.jsonl",
        "result.json",
    }


@pytest.mark.slow
def test_onnx_computes_what_the_model_does_for_any_batch(
    train: TrainAlone, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    settings = ("model.hidden=[8]", "ema=0.9", "channels_last=true")
    folder = train(*FEW, *settings).folder
    file = tmp_path / "digits.onnx"
    words = [str(folder), "--format", "onnx", "--which", "last", "--output", str(file)]
    assert command.main([*words, "--preprocess"]) == 0
    printed = capsys.readouterr().out
    assert "takes        float32 [batch, 1, 8, 8], and gives float32 [batch, 10]" in printed
    assert "checked      64 samples of test, in batches of 1, 3, 64" in printed
    session, model = onnxruntime.InferenceSession(str(file)), expt.load(folder, "last")
    pixels = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(model.preprocess(pixels)).numpy()
    assert np.abs(session.run(None, {"input": pixels.numpy()})[0] - expected).max() < 1e-4
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["expt.class_names"]) == list("0123456789")
    assert json.loads(about["expt.preprocess"]) is True
    assert "expt.mean" not in about
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        command.main(words)
    monkeypatch.setattr(
        exporter, "_call_of", lambda *_: lambda tensors: [torch.zeros(len(tensors[0]), 10)]
    )
    with pytest.raises(RunFailed, match="is not written: its outputs differ"):
        command.main([*words, "--force"])
    assert file.read_bytes() == before
    assert left_in(folder) == {path.name for path in folder.glob("events*")}
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"needs onnxscript; pip install 'expt\[onnx\]'"):
        command.main([str(folder), "--format", "onnx", "--which", "last"])


def test_torch_export_of_a_table_with_its_scales(
    train: TrainAlone, tmp_path: Path, capsys: Capture
) -> None:
    folder = train(*FEW, "experiment=diabetes", "dataset.standardise_targets=true").folder
    file, about = tmp_path / "diabetes.pt2", {exporter.METADATA: ""}
    words = [str(folder), "--format", "torch_export", "--which", "last", "--output", str(file)]
    assert command.main([*words, "--preprocess"]) == 0
    printed = capsys.readouterr().out
    assert "takes        float32 [batch, 10], and gives float64 [batch, 1]" in printed
    assert "out          numbers" in printed
    module = torch.export.load(str(file), extra_files=about).module()
    told = json.loads(about[exporter.METADATA])
    assert (told["preprocess"], "standardised" in told) == ("true", False)
    assert json.loads(told["feature_names"])[:2] == ["age", "sex"]
    assert json.loads(told["target_names"]) == ["progression"]
    rows = torch.tensor(
        [
            [59.0, 2, 32.1, 101, 157, 93.2, 38, 4, 4.8598, 87],
            [48, 1, 21.6, 87, 183, 103.2, 70, 3, 3.9, 69],
        ]
    )
    model = expt.load(folder, "last")
    mean, deviation = model.features.targets.scales["progression"]
    with torch.no_grad():
        said = model(model.preprocess(rows)).double() * deviation + mean
    torch.testing.assert_close(module(rows), said, rtol=1e-5, atol=0)
    assert said.min() > 50, "in no deviations"
    assert command.main([*words, "--batch-size", "1", "--force"]) == 0
    torch.export.load(str(file), extra_files=about)
    scales = json.loads(json.loads(about[exporter.METADATA])["standardised"])
    assert [*scales["features"]][9] == "s6"
    assert scales["targets"]["progression"] == pytest.approx([152, 77], abs=10)
    drawn = model.features.inputs.drawn(900, torch.Generator().manual_seed(0))
    assert drawn is not None
    assert drawn.shape == (900, 10)
    assert drawn.mean(0)[[0, 3]].tolist() == pytest.approx([48.5, 94.6], abs=4), (
        "ages, and pressures of blood"
    )


@pytest.mark.slow
def test_random_samples_where_the_data_is_gone(
    train: TrainAlone, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 60)
    small = ("model.layers=1", "model.width=16", "model.heads=2", "dataset.context=16")
    folder = train(
        "experiment=char_lm", f"dataset.root={tmp_path / 'book.txt'}", *small, *FEW[:3]
    ).folder
    (tmp_path / "book.txt").unlink()
    assert command.main([str(folder), "--format", "torch_export", "--which", "last"]) == 0
    printed = capsys.readouterr().out
    assert "takes        int64 [batch, tokens], and gives float32 [batch, tokens, 256]" in printed
    assert "checked      64 samples at random" in printed
    module = torch.export.load(str(folder / "model.pt2")).module()
    record, file = located(folder, "last")
    model = rebuilt(record, read(file), torch.device("cpu"), plain=True)
    with torch.no_grad():
        torch.testing.assert_close(module(torch.ones(1, 5).long()), model(torch.ones(1, 5).long()))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint best; there is no other"):
        command.main([str(folder), "--format", "torch_export"])


UNEXPORTABLE = "if float(images.sum()) > 0: return 2 * super().forward(images)"


def test_a_model_that_cannot_be_exported_is_told(
    train: TrainAlone, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Of other source than the run's, too."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = train(*FEW, *own_model(tmp_path, UNEXPORTABLE, "unexportable")).folder
    of_other_source(folder)
    with pytest.raises(RunFailed, match=r"the model cannot be exported \(\w+: ") as raised:
        command.main([str(folder), "--format", "torch_export", "--which", "last"])
    assert "\n" not in str(raised.value)
    assert "warning: unexportable.Net: source code has changed" in capsys.readouterr().err
    assert "model.pt2" not in left_in(folder)


ASKS = """import torch, expt
class Asks(expt.Task):
    def forward(self, model, batch):
        if model.training:
            return model(batch.inputs)
        return {call}
    def loss(self, outputs, batch):
        loss = torch.nn.functional.cross_entropy(outputs, batch.targets, reduction="sum")
        return loss, len(outputs)
"""


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("model(batch.inputs)", ""),
        ("getattr(model, 'module', model)[1](batch.inputs.flatten(1))", "calls a method"),
        (
            "model(input=batch.inputs)",
            "input",
        ),
    ],
)
def test_a_task_that_reads_its_model_is_exported_if_it_calls_it(
    call: str, problem: str, train: TrainAlone, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"asks_{len(call)}"
    (tmp_path / f"{name}.py").write_text(ASKS.replace("{call}", call))
    folder = train(*FEW, "~task", f"+task={{_target_: {name}.Asks}}", "model.hidden=[]").folder
    words = [str(folder), "--format", "torch_export", "--which", "last"]
    if problem:
        with pytest.raises(ConfigError, match=problem):
            command.main(words)
    else:
        assert command.main(words) == 0
    assert (folder / "model.pt2").exists() == (not problem)


@pytest.mark.parametrize(
    ("got", "difference"), [([1.0, 500.0], 0.5), ([math.nan, 500.5], math.nan), ([500.5], math.inf)]
)
def test_outputs_that_are_none_are_not_taken_for_equal(got: list[float], difference: float) -> None:
    outputs = torch.tensor(got)
    part = (torch.tensor([1.0, 500.5]),)
    allowed, largest = exporter.compared(torch.nn.Identity(), lambda _: [outputs], [part], 1e-4)
    assert allowed == pytest.approx(1e-4 if difference == math.inf else 5.005e-4)
    assert largest == pytest.approx(difference, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "torchvision"])
@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_larger_models(model: str, format: Any, train: TrainAlone, tmp_path: Path) -> None:
    arch = ("model.arch=mobilenet_v3_small",) if model == "torchvision" else ()
    folder = train(*FEW, *IMAGES, f"model={model}", *arch).folder
    for preprocess in (False, True):
        exporter.export(
            folder, tmp_path / "model.pt2", format, which="last", preprocess=preprocess, force=True
        )


@pytest.mark.slow
@pytest.mark.parametrize(("start", "is_coarse"), [(1.7e9, True), (1e6, False)])
def test_numbers_that_float32_cannot_hold_are_named(
    train: TrainAlone, tmp_path: Path, capsys: Capture, start: float, is_coarse: bool
) -> None:
    lines = ["seen,year,y", *(f"{start + x * 7},{2024 + x % 2},{x}" for x in range(60))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = f"dataset=table dataset.path={tmp_path}/t.csv dataset.targets=y task=regression"
    more = "dataset.features=[seen,year] dataset.standardise_targets=true model=mlp epochs=1"
    folder = train(*words.split(), *more.split(), "batch_size=8").folder
    file = str(tmp_path / "model.pt2")
    given = [str(folder), "--format", "torch_export", "--which", "last", "--output", file]
    assert command.main([*given, "--preprocess"]) == 0
    assert ("the numbers of seen are" in capsys.readouterr().err) is is_coarse


@pytest.mark.parametrize("format", ["torch_export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_encoding_of_a_real_table_is_in_the_file(
    train: TrainAlone, tmp_path: Path, format: Any
) -> None:
    """Texts, gaps, dates, flags and logarithms."""
    draw, lines = np.random.default_rng(0), ["size,city,built,new,price"]
    for x in range(60):
        size, city = round(draw.uniform(10, 99), 2), ["Rome", "Oslo", ""][x % 3]
        cells = [size if x % 5 else "", city, f"2024-02-{x % 28 + 1:02}", ["yes", "no"][x % 2]]
        lines.append(",".join(map(str, [*cells, size * 100])))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = f"dataset=table dataset.path={tmp_path}/t.csv dataset.targets=price task=regression"
    more = "model=mlp epochs=1 batch_size=8 dataset.target_transform=log"
    folder = train(*words.split(), *more.split(), "dataset.standardise_targets=true").folder
    file = tmp_path / f"model.{format}"
    exporter.export(folder, file, format, which="last", preprocess=True)
    model = expt.load(folder, "last")
    names = model.features.inputs.names
    rows: list[list[Any]] = [["40.5", "Oslo", "2024-02-29", "no"], [None, "Bonn", None, "yes"]]
    rows += [["7", None, "2024-03-01", None], ["40.5", None, "2024-02-29", "no"]]
    day = float(np.datetime64("2024-02-29").astype(int))
    values = np.array(
        [
            [40.5, 0, 2024, 2, 3, day, 0],
            [math.nan, -1, *[math.nan] * 4, 1],
            [7, math.nan, 2024, 3, 4, day + 1, math.nan],
            [40.5, 2, 2024, 2, 3, day, 0],  # the place of None
        ],
        np.float32,
    )
    if format == "onnx":
        onnxruntime: Any = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(file))
        found = session.run(None, {"input": values})[0]
        about = session.get_modelmeta().custom_metadata_map
        encoded = json.loads(about["expt.encoded"])
    else:
        extra = {exporter.METADATA: ""}
        found = torch.export.load(str(file), extra_files=extra).module()(torch.from_numpy(values))
        encoded = json.loads(json.loads(extra[exporter.METADATA])["encoded"])
    assert encoded["city"]["categories"] == ["Oslo", "Rome", None]
    assert names == ("size", "city", *(f"built.{x}" for x in PARTS), "new")
    with torch.no_grad():
        wanted = model.features.targets.in_units(model(model.preprocess(rows)))
    np.testing.assert_allclose(torch.as_tensor(found).detach(), wanted, rtol=1e-4)
