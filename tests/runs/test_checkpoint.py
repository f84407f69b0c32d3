"""A checkpoint is whole or the one before, and runs no code when it is loaded."""

from __future__ import annotations

import collections
import os
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from expt.errors import ConfigError
from expt.runs import checkpoint, checkpoint_file
from expt.worker import random_state


class Unwritable:
    """Fails in the middle of a save, as a full disk does."""

    def __reduce__(self) -> Any:
        raise OSError("No space left on device")


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def state(step: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "best": None,
    }


def test_numbers_of_numpy_are_loaded_as_python_s(tmp_path: Path) -> None:
    many = collections.Counter({np.int64(5): 2})
    numbers = {np.int64(3): [np.float64(0.1), (np.bool_(True), np.float32(0.5)), many]}
    checkpoint.refuse_unreadable(numbers, "scheduler")
    checkpoint.save(tmp_path / "last.pt", numbers)
    loaded = checkpoint.load(tmp_path / "last.pt")
    assert repr(loaded) == repr({3: [0.1, (True, 0.5), collections.Counter({5: 2})]})
    assert repr(checkpoint_file.read(tmp_path / "last.pt")) == repr(loaded)


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
        pickle.PickleError(),
        lambda: None,
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_be_given_back_is_refused_by_its_place(value: object) -> None:
    state = {"plain": [None, True, 1, 2.0, 1j, "a", b"a", torch.ones(1), torch.float32, {1}]}
    checkpoint.refuse_unreadable(state, "scheduler")
    with pytest.raises(ConfigError, match=r"^scheduler\.plain\.1\.deep: "):
        checkpoint.refuse_unreadable({"plain": [1, {"deep": value}]}, "scheduler")


def test_the_first_is_read_back_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[Path]()
    monkeypatch.setattr(checkpoint, "load", lambda path, **_: written.append(path))
    writer = checkpoint.Writer(tmp_path / "last.pt", tmp_path / "best.pt", keep=0)
    for step in (1, 2):
        writer.save({**state(step), "position": {"step": step}}, bests=[step])
    writer.wait()
    assert written == [tmp_path / "last.pt"]


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_the_random_state_is_loaded_to_the_same_bits(tmp_path: Path) -> None:
    np.random.standard_normal()  # leaves the second of a pair in the cache
    saved = random_state.state_dict(torch.device("cpu"))
    expected = np.random.standard_normal(), *drawn()
    checkpoint.save(tmp_path / "rng", {"rng": [saved]})
    (loaded,) = checkpoint.load(tmp_path / "rng")["rng"]
    assert loaded["cuda"] is None
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
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"step": 1})
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, {"weight": torch.ones(1000), "bad": Unwritable()})
    assert checkpoint.load(path) == {"step": 1}
    assert sorted(os.listdir(tmp_path)) == ["last.pt"]


def test_a_killed_keep_as_does_not_stop_the_next(tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    checkpoint.save(last, {"step": 1})
    (tmp_path / ".best.pt.tmp").touch()
    (tmp_path / ".last.pt.tmp").touch()
    checkpoint.save(last, {"step": 2})
    checkpoint_file.keep_as(last, best)
    assert checkpoint.load(best) == {"step": 2}
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


@pytest.mark.parametrize(
    "unsafe", ["0", "1"], ids=["default", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"]
)
def test_no_code_is_run_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsafe: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", unsafe)
    mark, path = tmp_path / "ran", tmp_path / "last.pt"
    checkpoint.save(path, {"model": RunsCode(mark)})
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint.load(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the file does what it threatens
    assert mark.exists()


def test_as_many_older_ones_are_kept_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(path, {"step": step}, keep=3)
    kept = checkpoint_file.candidates(path)
    assert [found.name for found in kept] == ["last.pt", "last-1.pt", "last-2.pt", "last-3.pt"]
    assert [checkpoint.load(found)["step"] for found in kept] == [5, 4, 3, 2]


def test_a_file_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "last.pt", list[str]()
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
    steps = ["fsync .last.pt.tmp", "replace last.pt", f"fsync {tmp_path.name}"]
    assert [step for step in done if step in steps] == steps
