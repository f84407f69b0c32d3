"""A fork continues another run's checkpoint: exactly if nothing is changed."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed, begun, common, same
from tests.worker.conftest import TrainAlone, Trained
from tests.worker.sharded import Observer

SHORT = (
    *as_typed("dataset.train_limit=320 log_every=2 optimizer.lr=0.2 batch_size=32"),
    *as_typed("checkpoint.keep=9"),
)
Forking = Callable[..., Trained]


@pytest.fixture
def run(
    train_alone: TrainAlone, configured: Configured, tmp_path: Path, monkeypatch: Patch
) -> Forking:
    """Carries a run out in tmp_path/NAME as its driver would."""
    monkeypatch.chdir(tmp_path)

    def carry_out(*words: str, name: str) -> Trained:
        source = begun(configured(*words), tmp_path / name)
        return train_alone(*words, name=name, source=source, observe=lambda *_: Observer())

    return carry_out


def _last(run: Trained, name: str = "last") -> dict[str, Any]:
    return run.state(name)


UNCHANGED: dict[str, tuple[tuple[str, ...], str]] = {
    "adam, with all that draws and averages": (
        ("optimizer=adam", "model.dropout=0.3", "ema=0.9", "gradient_accumulation=2", "mixup=0.2",
         "dataset.augment.crop_padding=1"), "@20"),
    "cosine, by the epoch": (("scheduler=cosine", "model.dropout=0.3"), "@epoch:2"),
    "one cycle": (("scheduler=one_cycle", "scheduler.rise_fraction=0.6"), "@20"),
    "a plateau that has lowered it": (
        ("scheduler=plateau", "scheduler.patience=0", "scheduler.min_delta=0.5", "optimizer=adamw"),
        "@30"),
    "groups, layer by layer": (
        ("optimizer=adamw", "optimizer.layer_decay=0.8", "optimizer.decay_biases_and_norms=false"),
        "@10"),
    "an own schedule": (
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.7}",
            "lr_scaling=linear",
         "base_batch_size=64"), "@20"),
    "within an epoch": (("checkpoint.every_steps=7", "model.dropout=0.2", "scheduler=step"), "@14"),
}  # fmt: skip


@pytest.mark.parametrize("name", common(UNCHANGED, "adam", "plateau", "within"))
def test_a_fork_with_nothing_changed_comes_to_the_same_bits(name: str, run: Forking) -> None:
    words, which = (*SHORT, *UNCHANGED[name][0], "epochs=4"), UNCHANGED[name][1]
    parent = run(*words, name="parent")
    fork = run(*words, f"fork=parent{which}", name="fork")
    states = [_last(each) for each in (parent, fork)]
    assert states[0]["position"]["step"] == 40
    assert fork.result["forked_from"]["changed"] == {}
    for state in states:
        state["scheduler"].pop("_step_count", 0)  # torch's, for a warning
        state["position"] = {
            key: state["position"][key] for key in ("epoch", "step", "step_in_epoch")
        }
    for key in states[0].keys() & {"model", "ema", "optimizer", "scheduler", "position", "workers"}:
        assert same(*(each[key] for each in states)), key
    curves = [
        [point for point in each.points if '"best/' not in point and '/test"' not in point]
        for each in (parent, fork)
    ]  # what it is best at is its own, from the fork on
    assert curves[0] == curves[1], "the parent's until the fork, and its own"


PLAIN = (
    *SHORT,
    *as_typed("model=mlp model.hidden=[8] optimizer.momentum=0 epochs=4 checkpoint.every_steps=1"),
)


def _weights(run: Trained, name: str = "last") -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in _last(run, name)["model"].values()])


def test_the_first_step_uses_the_changed_learning_rate_and_momentum(run: Forking) -> None:
    parent = run(
        *PLAIN, "scheduler=cosine", "checkpoint.every_steps=1", "max_steps=22", name="parent"
    )
    at = _weights(parent, "last-2")
    moved = {}
    for lr in ("0.2", "0.02"):
        fork = run(
            *PLAIN, "scheduler=cosine", "max_steps=21", "fork=parent@20", f"optimizer.lr={lr}",
            "optimizer.weight_decay=0.01", name=lr
        )  # fmt: skip
        moved[lr] = _weights(fork) - at
        assert fork.result["forked_from"]["changed"]["optimizer.weight_decay"] == [0.0, 0.01]
    torch.testing.assert_close(moved["0.2"], 10 * moved["0.02"], rtol=1e-4, atol=1e-6)
    assert moved["0.02"].abs().max() > 0


REFUSED: dict[str, tuple[str, str]] = {
    "a step without a checkpoint": ("fork=parent@41", "fork=parent@41: "),
    "no checkpoint's name": ("fork=parent@lst", "fork=parent@lst: "),
    "no run": ("fork=parant@20", "Did you mean 'parent'"),
    "its end": ("fork=parent", r"epochs=3: .* give epochs=4 or more \(fork=parent epochs=4\)"),
    "another model": ("fork=parent@20 model.hidden=[9]", r"model.hidden=\[9\]: .* must keep"),
    "other data": (
        "fork=parent@20 dataset.folds=5 dataset.fold=0",
        "dataset.folds=5: .* must keep",
    ),
    "another start": ("fork=parent@20 init=kaiming", "init=kaiming: .* must keep"),
    "weights": ("fork=parent@20 weights=parent", "weights=parent: "),
    "a seed within an epoch": ("fork=parent@15 seed=1", "seed=1: .* cannot change within an epoch"),
    "steps of another length": ("fork=parent@20 batch_size=16 max_steps=99", "max_steps=99: "),
}


def test_what_cannot_be_is_refused_in_a_line(
    run: Forking, configured: Configured, tmp_path: Path, capsys: Capture
) -> None:
    words = (
        *SHORT,
        *as_typed("model.hidden=[8] epochs=3 checkpoint.every_steps=15 objective=loss/val"),
    )
    run(*words, "optimizer.lr=0.01", name="parent")
    (tmp_path / "parent/checkpoints/best.safetensors").unlink()
    for what, (more, told) in REFUSED.items():
        with pytest.raises(ConfigError, match=told):
            begun(configured(*words, *more.split()), tmp_path / "fork")
        assert not (tmp_path / "fork").exists(), what


def test_another_batch_goes_on_by_epochs_and_is_resumed(
    run: Forking, configured: Configured, tmp_path: Path, train_alone: TrainAlone
) -> None:
    words = (*SHORT, "model.hidden=[8]", "scheduler=cosine", "epochs=4")
    run(*words, name="parent")
    more = (
        *words,
        *as_typed("fork=parent@20 batch_size=64 seed=3 ema=0.9 amp=bf16 checkpoint.keep=9"),
    )
    fork = run(*more, name="fork")
    assert (fork.result["steps"], fork.result["total_steps"], len(fork.result["epoch_s"])) == (
        30,
        30,
        2,
    )
    rates = {
        json.loads(line)["step"]: json.loads(line)["value"]
        for line in fork.points
        if '"tag": "lr"' in line
    }
    assert rates[24] == pytest.approx(0.2 * 0.5 * (1 + math.cos(math.pi * 13 / 20))), "in step 14"
    for path in (fork.folder / "checkpoints").glob("*.safetensors*"):
        if not path.name.startswith("last-1."):
            path.unlink()
    whole = _last(fork, "last-1")["position"]
    assert (whole["step"], whole["epoch"], whole["began_at"]) == (25, 3, 20)
    before = fork.points
    source = begun(configured(*more), tmp_path / "fork", may_have_run=True)
    assert source == tmp_path / "fork/checkpoints/last-1.safetensors"
    resumed = train_alone(*more, name="fork", source=source, observe=lambda *_: Observer())
    assert resumed.points == before, "as if it had not been stopped"
    assert resumed.result["forked_from"]["step"] == 20
    assert resumed.result["identity"] == fork.result["identity"]


def test_killed_fork_is_still_a_fork(run: Forking, configured: Configured, tmp_path: Path) -> None:
    words = (*SHORT, "model.hidden=[8]", "epochs=2")
    run(*words, name="parent")
    more = (*words, "fork=parent@10", "optimizer.lr=0.3")
    source = begun(configured(*more), tmp_path / "fork")
    assert source == tmp_path / "fork/checkpoints/fork.safetensors"
    source.with_name(".last.safetensors.tmp").touch()
    (tmp_path / "parent/checkpoints").rename(tmp_path / "away")
    assert begun(configured(*more, "resume=auto"), tmp_path / "fork", may_have_run=True) == source
    record = read_result(RunPaths(tmp_path / "fork"))
    assert record["forked_from"]["changed"] == {"optimizer.lr": [0.2, 0.3]}


def test_another_optimizer_begins_anew_and_rank_0_says_so(run: Forking, capsys: Capture) -> None:
    words = (*SHORT, "model.hidden=[8]", "epochs=4")
    run(*words, name="parent")
    run(*words, "optimizer=adam", "fork=parent@20", name="fork")
    assert "fork=parent@20: was trained by " in capsys.readouterr().err
