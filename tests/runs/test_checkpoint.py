"""A checkpoint is written whole, or the one before stays, and holds no state that would be lost."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from expt.errors import ConfigError, RunFailed
from expt.runs import checkpoint, checkpoint_file
from expt.training import random_state
from tests.facade import Patch


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    "value",
    [
        collections.deque([1]),
        collections.defaultdict(int),
        Pair(1, 2),
        np.zeros(3),
        np.datetime64("2026-01-01"),
        Path("a"),
        lambda: None,
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_be_given_back_is_refused_by_its_place(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^scheduler\.plain\.1\.deep: "):
        checkpoint.refuse_unreadable({"plain": [1, {"deep": value}]}, "scheduler")


def test_training_may_change_what_is_being_written(tmp_path: Path) -> None:
    last, best, weight, seen = tmp_path / "last", tmp_path / "best", torch.ones(10**6), {1}
    writer = checkpoint.Writer(last, best, keep=0)
    for step in (1, 2):
        state = {"model": {"a": weight, "b": weight}, "seen": seen, "position": {"step": step}}
        writer.save(state, bests=[step] if step == 1 else [])
        weight += 1
        seen.add(step + 1)
    writer.wait()
    for file, step in ((best, 1), (last, 2)):
        found = checkpoint.load(file)
        assert found["seen"] == {*range(1, step + 1)}
        assert all(bool((each == step).all()) for each in found["model"].values())
        assert file.stat().st_size < 5e6, "what is tied is written once"


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_the_random_state_is_loaded_to_the_same_bits(tmp_path: Path) -> None:
    np.random.standard_normal()  # leaves the second of a pair in the cache
    saved = random_state.state_dict(torch.device("cpu"))
    expected = np.random.standard_normal(), *drawn()
    checkpoint.save(tmp_path / "rng", {"rng": [saved]})
    (loaded,) = checkpoint.load(tmp_path / "rng")["rng"]
    assert loaded["cuda"] == []
    random_state.load_state_dict(loaded, torch.device("cpu"))
    assert (np.random.standard_normal(), *drawn()) == expected


def test_a_seed_is_that_of_torch_and_numpy() -> None:
    random_state.seed(2**32 + 7)
    expected = drawn()
    random.seed(2**32 + 7)
    np.random.seed(7)
    torch.manual_seed(2**32 + 7)
    assert drawn() == expected


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last"
    checkpoint.save(path, {"step": 1})
    writer = checkpoint.Writer(path, tmp_path / "best", keep=0)
    writer.save({"model": torch.ones(1000), "bad": object()})
    with pytest.raises(ConfigError, match=r"^bad: a checkpoint can't hold a builtins\.object"):
        writer.wait()

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="could not be written; is the disk full"):
        checkpoint_file.write(path, full)
    assert checkpoint.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last"]


def test_a_killed_keep_as_does_not_stop_the_next(tmp_path: Path) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    checkpoint.save(last, {"step": 1})
    (tmp_path / ".best.tmp").touch()
    (tmp_path / ".last.tmp").touch()
    checkpoint.save(last, {"step": 2})
    checkpoint_file.keep_as(last, best)
    assert checkpoint.load(best) == {"step": 2}
    assert sorted(os.listdir(tmp_path)) == ["best", "last"]


def test_as_many_older_ones_are_kept_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(path, {"step": step}, keep=3)
    kept = checkpoint_file.candidates(path)
    assert [found.name for found in kept] == [
        "last.safetensors",
        "last-1.safetensors",
        "last-2.safetensors",
        "last-3.safetensors",
    ]
    assert [checkpoint.load(found)["step"] for found in kept] == [5, 4, 3, 2]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: Patch) -> None:
    path, done = tmp_path / "last.safetensors", list[str]()
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    checkpoint.save(path, {"step": 1})
    steps = ["fsync .last.safetensors.tmp", "replace last.safetensors", f"fsync {tmp_path.name}"]
    assert [step for step in done if step in steps] == steps
