"""A sharded run as people type it, and all that is done with a run besides."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import expt
from expt.runs import checkpoint_file
from expt.runs.paths import RunPaths
from tests.facade import Patch, RunFolder, as_typed, environment, run

MINE = """
import torch
from torch import nn
from torch.nn import functional

import expt


class Net(nn.Module):
    def __init__(self, image_size, num_classes, width):
        super().__init__()
        pixels = image_size[0] * image_size[1]
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.body(images))


class Squares(expt.Task):
    def forward(self, model, batch):
        return model(batch.inputs)

    def loss(self, outputs, batch):
        return (outputs - functional.one_hot(batch.targets, 10)).square().sum(), len(outputs)

    def measure(self, outputs, batch):
        return {"right": ((outputs.argmax(1) == batch.targets).sum(), len(outputs))}


class Weighs(expt.Callback):
    def on_evaluation_end(self, view):
        squares = (weights.square().sum() for weights in view.model.parameters())
        view.scalar("mine/norm", sum(squares).sqrt())
"""
SHARDED = ("strategy=fsdp", "world_size=2", "threads=1")
SHORT = as_typed("dataset.train_limit=320 log_every=5 optimizer=adamw optimizer.lr=0.003 epochs=2")
ALL = ("ema=0.9", "gradient_clip=1", "profile=true", "early_stop={metric: loss/val, patience: 5}")
KINDS = {
    "mlp, in parts": ("checkpoint.sharded=true", "mixup=0.2", "model.dropout=0.3"),
    "own classes, one file": (
        *("checkpoint.sharded=false", "model={_target_: mine.Net, width: 32}"),
        *("task={_target_: mine.Squares, metrics: {right: max}}", "objective=loss/val"),
        "callbacks=[{_target_: mine.Weighs}]",
    ),
}


def ok(*words: str, cwd: Path) -> str:
    done = run(*words, cwd=cwd)
    assert done.returncode == 0, (words, done.stderr)
    assert "error" not in done.stderr
    return done.stdout


def measured(folder: Path) -> dict[str, float]:
    (result,) = RunPaths(folder).evaluations.glob("*/result.json")
    found: dict[str, float] = json.loads(result.read_text())["metrics"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_a_sharded_run(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine.py").write_text(MINE)
    words = (*SHARDED, *SHORT, *ALL, *KINDS[kind])
    ok(*words, "hydra.run.dir=first", cwd=tmp_path)
    first, paths = RunFolder(Path("first")), RunPaths(Path("first"))
    assert paths.trace.is_file()
    assert bool(paths.parts) == ("parts" in kind)
    trained_by_ddp = tuple(
        word for word in words if not word.startswith(("strategy", "checkpoint."))
    )
    ok(*trained_by_ddp, "hydra.run.dir=ddp", cwd=tmp_path)
    for tag, value in RunFolder(Path("ddp")).result["metrics"].items():
        if not tag.startswith(("speed/", "memory/", "ranks/")):
            assert first.result["metrics"][tag] == pytest.approx(value, abs=1e-4), tag
    # its weights in use
    ok("evaluate", "first", cwd=tmp_path)
    for tag, value in measured(Path("first")).items():
        assert first.result["metrics"][tag] == pytest.approx(value, abs=1e-5), tag
    ok("predict", "first", "--split", "test", "--output", "found.csv", cwd=tmp_path)
    assert len(Path("found.csv").read_text().splitlines()) == 361
    ok("export", "first", "--format", "torch_export", cwd=tmp_path)
    assert isinstance(expt.load("first")(torch.zeros(2, 1, 8, 8)), torch.Tensor)
    # more training
    ok("rerun", "first", "again", cwd=tmp_path)
    assert RunFolder(Path("again")).points == first.points
    ok(*words, "epochs=3", "hydra.run.dir=longer", cwd=tmp_path)
    ok(*words, "epochs=3", "resume=auto", "hydra.run.dir=again", cwd=tmp_path)
    assert RunFolder(Path("again")).points == RunFolder(Path("longer")).points
    ok("fork=longer@10", "epochs=3", "checkpoint.keep=3", "hydra.run.dir=fork", cwd=tmp_path)
    assert RunFolder(Path("fork")).curve("loss/val") == RunFolder(Path("longer")).curve("loss/val")
    ok("fork=longer@10", "epochs=3", "strategy=ddp", "hydra.run.dir=whole", cwd=tmp_path)
    ok("resume=auto", "epochs=4", "strategy=ddp", "hydra.run.dir=fork", cwd=tmp_path)
    assert not RunPaths(Path("whole")).parts
    ok(*words, "weights=first", "epochs=1", "hydra.run.dir=further", cwd=tmp_path)
    assert RunFolder(Path("further")).curve("loss/val")[0][1] < first.curve("loss/val")[0][1]
    assert "first" in ok("report", ".", cwd=tmp_path)


WIDE = as_typed(
    "model.hidden=[4096,4096,4096] optimizer=adamw dataset.train_limit=8 batch_size=8 threads=1"
)
"""34 million parameters: 0.4 GB with AdamW's states."""
LIMIT_KIB = 1_200_000
"""Of memory of its own: some 0.8 GB for torch, 0.14 for the parameters, and not all of the states
beside them.
"""


@pytest.mark.slow
def test_sharded_checkpoint_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    words = (*WIDE, "hydra.run.dir=wide", "log_every=1")
    ok(*words, "strategy=fsdp", "world_size=2", "checkpoint.sharded=true", "epochs=1", cwd=tmp_path)
    before = RunFolder(tmp_path / "wide").points
    alone = as_typed("strategy=ddp world_size=1 checkpoint.sharded=auto resume=auto epochs=2")
    command = shlex.join([sys.executable, "-m", "expt", *words, *alone])
    limited = ["bash", "-c", f"ulimit -d {LIMIT_KIB}; exec {command}"]
    done = subprocess.run(limited, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "last.safetensors: is sharded, and its whole tensors need more than the 0." in error
    checkpoint_file.check(RunPaths(tmp_path / "wide").last)
    assert RunFolder(tmp_path / "wide").points == before, "put back"
    ok(*words, *alone, cwd=tmp_path)


@pytest.mark.slow
def test_run_that_sharding_would_change_is_refused(tmp_path: Path) -> None:
    listed = ("~model", "+model._target_=tests.worker.odd_models.Listed")
    done = run(*listed, *SHARDED, "dataset=digits", "hydra.run.dir=refused", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: strategy=fsdp: the gradient of ")
    assert line.endswith("use strategy=ddp")
    assert not RunPaths(tmp_path / "refused").last.exists()
