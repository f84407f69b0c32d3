"""The published settings of conf/experiment: what each asks for, and that it trains."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.config import conf_dir
from expt.config.keys import flat
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.machine import Machine
from tests import on_cards
from tests.composing import composed
from tests.conftest import Trained
from tests.facade import run

EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
# What the sources say, on a machine with two GPUs.
SOURCES: dict[str, dict[str, Any]] = {
    "keras_convnet": {
        "model.name": "convnet", "model.widths": (12, 24, 32), "model.kernels": (3, 6, 6),
        "model.batch_norm": True, "model.dropout": 0.5, "dataset.name": "mnist",
        "optimizer.name": "adam", "optimizer.lr": 1e-3, "world_size": 2, "batch_size": 128,
        "epochs": 2,
    },
    "d2l_resnet18": {
        "model.name": "resnet18", "model.stem": "auto", "dataset.name": "fashion_mnist",
        "init.name": "normal", "init.std": 0.01, "optimizer.name": "sgd", "optimizer.lr": 0.1,
        "optimizer.momentum": 0.0, "lr_scaling": "linear", "base_batch_size": 256, "world_size": 2,
        "batch_size": 512, "epochs": 10,
    },
    "paddle_mnist": {
        "model.name": "paddle_convnet", "model.widths": (20, 20), "model.pool": 2,
        "model.hidden": None, "dataset.name": "mnist", "optimizer.name": "adam",
        "optimizer.lr": 0.01, "epochs": 5, "print_every": 200,
    },
    "ddp_mlp": {
        "model.name": "mlp", "model.hidden": (256,), "dataset.name": "mnist",
        "dataset.mean": (0.1307,), "dataset.std": (0.3081,), "gpus": 0, "backend": "gloo",
        "world_size": 2, "batch_size": 64, "optimizer.name": "sgd", "optimizer.lr": 1e-3,
        "optimizer.momentum": 0.0, "epochs": 10,
    },
    "char_lm": {
        "model.name": "transformer", "model.layers": 2, "model.width": 128,
        "task.name": "language_model", "dataset.name": "text", "dataset.context": 64,
        "max_steps": 400, "world_size": 2,
    },
    "gpt2_124m": {
        "model.layers": 12, "model.heads": 12, "model.width": 768, "model.norm": "layer",
        "dataset.context": 1024, "batch_size": 512, "optimizer.betas": (0.9, 0.95),
        "optimizer.decay_biases_and_norms": False, "amp": "bf16", "compile": "blocks",
        "gradient_clip": 1.0,
    },
    "gan": {
        "model.target": "expt.models.gan.GAN", "task.target": "expt.tasks.gan.Adversarial",
        "optimizer.name": "adam", "optimizer.betas": (0.5, 0.999), "epochs": 60, "world_size": 2,
    },
    "diabetes": {"dataset.name": "diabetes", "task.name": "regression", "model.hidden": (32,),
        "epochs": 30},
    "amp_sweep": {"amp": True, "log_every": 10, "dataset.name": "mnist"},
}  # fmt: skip


NEEDED = {
    "char_lm": ("dataset.root=book.txt",),
    "gpt2_124m": ("dataset.root=book.txt", "dataset.tokens=gpt2.json"),
}
"""What an experiment cannot know."""


def config_of(*overrides: str, gpus: int = 2) -> RunConfig:
    """What the command line would give on a machine with so many GPUs."""
    return parse(composed(*overrides), Machine(gpus=tuple(map(str, range(gpus))), cpus=8))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_is_what_its_source_says(name: str) -> None:
    config = config_of(f"experiment={name}", *NEEDED.get(name, ()))
    settings = flat(dataclasses.asdict(config))
    assert {key: settings[key] for key in SOURCES[name]} == SOURCES[name]
    assert config_of(f"experiment={name}", *NEEDED.get(name, ()), gpus=0).num_gpus == 0, "no GPU"


def test_what_is_typed_wins_over_an_experiment() -> None:
    config = config_of("experiment=paddle_mnist", "gpus=[4,5]", "batch_size=64", "epochs=1", gpus=8)
    assert (config.gpus, config.batch_size, config.epochs) == ((4, 5), 64, 1)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_another_choice_leaves_no_key_of_the_experiments_behind(experiment: str) -> None:
    others = {"init": "default", "optimizer": "adamw", "scheduler": "one_cycle"}
    if experiment not in ("char_lm", "gpt2_124m", "gan"):  # each needs a model of its own
        others["model"] = "mlp"
    words = (f"{group}={name}" for group, name in others.items())
    made = config_of(f"experiment={experiment}", *NEEDED.get(experiment, ()), *words)
    assert {group: getattr(made, group).name for group in others} == others


def test_the_command_of_the_grid_needs_no_option(tmp_path: Path) -> None:
    lone = run("hydra.launcher.dry_run=true", cwd=tmp_path)
    assert (lone.returncode, lone.stderr.partition(": ")[0]) == (2, "error")
    done = run("experiment=amp_sweep", "batch_size=64", "hydra.launcher.dry_run=true", cwd=tmp_path)
    assert (done.returncode, done.stdout.count(f"2 {on_cards.UNIT}  start")) == (0, 2 * 3), (
        done.stderr
    )
    assert not any(tmp_path.rglob("result.json"))
    with pytest.raises(ConfigError, match=r"use expt\.sweep"):
        expt.run("experiment=amp_sweep", f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    assert not (tmp_path / "sweep").exists()


RARE = {*EXPERIMENTS} - {"char_lm", "gan"}
OF_A_BOX = {"gpt2_124m"}  # `expt plan` says what it takes
FEW = {
    "d2l_resnet18": ("batch_size=16", "max_steps=1"),
    "amp_sweep": ("model=convnet", "batch_size=16"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in RARE else name
        for name in EXPERIMENTS
        if name not in OF_A_BOX
    ],
)
def test_each_experiment_trains_on_its_data(
    name: str, few_images: dict[str, str], trained: Trained, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 150)
    root = {**few_images, "text": str(tmp_path / "book.txt")}.get(
        SOURCES[name].get("dataset.name", "")
    )
    words = (
        f"experiment={name}",
        *([f"dataset.root='{root}'"] if root else []),
        "max_steps=4",
        *FEW.get(name, ()),
    )
    if name == "amp_sweep":
        results = expt.sweep(*words, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
        assert len(results) == 3
        return
    done = trained(*words)
    assert done.result["status"] == "completed"
    assert 0 < done.result["metrics"]["loss/test"] < 10
    if name == "gan":
        with pytest.raises(ConfigError, match="a model of several phases"):
            expt.predict(done.folder, split="test")
