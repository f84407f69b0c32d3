"""A checkpoint is written whole, or the one before stays, and holds no state that would be lost."""

import collections
import dataclasses
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from expt.errors import CheckpointError, ConfigError, RunFailed
from expt.runs import checkpoint, checkpoint_file
from expt.runs.attempt import Attempt
from expt.runs.lineage import fork_content
from expt.runs.paths import set_aside
from expt.training import random_state
from tests.facade import Patch, checkpoint_state, request


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
        object.__new__(torch.optim.lr_scheduler.ConstantLR),  # made, it imports torch._dynamo
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
    state = {"position": {"step": 2}, "model": torch.ones(1000), "bad": object()}
    writer.save(state)
    with pytest.raises(ConfigError, match=r"^bad: a checkpoint can't hold a builtins\.object"):
        writer.wait()

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="could not be written; is the disk full"):
        checkpoint_file.write(path, full)
    assert checkpoint.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last"]
    (tmp_path / ".last.tmp").mkdir()  # what can't be removed, as on a disk that is read-only
    with pytest.raises(RunFailed, match="last: the checkpoint could not be written; "):
        checkpoint.save(path, {"step": 2})


def test_a_resumed_run_keeps_one_file_of_a_step(tmp_path: Path) -> None:
    """One that was killed in the evaluation at its end writes its last step once more."""
    path = tmp_path / "last.safetensors"
    for step in (1, 2, 3, 3):
        writer = checkpoint.Writer(path, tmp_path / "best.safetensors", keep=2)
        writer.save({"position": {"step": step}, "config": {}})
        writer.wait()
    files = [path, *(checkpoint_file.numbered(path, number) for number in (1, 2))]
    assert [checkpoint.load(file)["position"]["step"] for file in files] == [3, 2, 1]


def test_no_second_folder_is_made_for_a_run_that_was_renamed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint.save(tmp_path / "run" / "checkpoints" / "last", {"step": 1})
    assert os.listdir(tmp_path) == []


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
    expected = [f"{name}.safetensors" for name in ("last", "last-1", "last-2", "last-3")]
    assert [found.name for found in kept] == expected
    assert [checkpoint.load(found)["step"] for found in kept] == [5, 4, 3, 2]


def test_a_copy_by_another_name_is_a_persons(tmp_path: Path) -> None:
    last, best = tmp_path / "last.safetensors", tmp_path / "best.safetensors"
    copies = [tmp_path / f"{name}-mine.safetensors" for name in ("last", "best")]
    for path in (last, *copies, checkpoint_file.numbered(best, 3)):
        path.write_text("one")
    assert checkpoint_file.candidates(last) == [last]
    checkpoint_file.keep_among(last, 5, best, [5])
    assert {*tmp_path.iterdir()} == {last, best, *copies}


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


RUN: dict[str, Any] = {"position": {"step": 1}, "config": {}}


BEGINS = """\
import pickle, sys
from expt.runs.attempt import Attempt
from expt.runs.lineage import fork_content
from expt.runs.paths import set_aside
for number, asked in pickle.load(sys.stdin.buffer):
    print(Attempt(request=asked, number=number, devices=()).begin())
assert not {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "tensorboard"}
"""


def test_a_driver_finds_where_a_run_goes_on_and_takes_a_fork_without_torch(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the one before it counts, with a warning."""
    first = request(tmp_path / "run", epochs=9, typed_at=0.0)
    paths, before = first.paths, first.paths.last.with_stem("last-1")
    Attempt(request=first, devices=()).begin()
    for step in (1, 2, 3):
        position = {"epoch": step, "step": step, "step_in_epoch": 1}
        more: Any = {"position": position, "steps_per_epoch": 1, "model": {"w": torch.ones(9)}}
        checkpoint.save(paths.last, checkpoint_state(first.config, step, **more), keep=2)
    paths.last.write_bytes(paths.last.read_bytes()[:-9])
    fork = f"{paths.folder}@1"
    content = fork_content(dataclasses.replace(first.config, fork=fork), {})
    forked = request(tmp_path / "fork", epochs=9, fork=fork, content=content, typed_at=0.0)
    again = pickle.dumps([(1, dataclasses.replace(first, may_have_run=True)), (0, forked)])
    done = subprocess.run(
        [sys.executable, "-c", BEGINS], check=True, capture_output=True, input=again
    )
    assert done.stdout.decode().split() == [str(before), str(forked.paths.forked)]
    told = done.stderr.decode()
    assert f"{paths.last}: is truncated" in told
    assert told.count("warning: ") == 1
    assert checkpoint.load(forked.paths.forked)["position"]["step"] == 1


def test_checkpoints_of_an_earlier_version_are_refused_in_a_line(tmp_path: Path) -> None:
    paths = request(tmp_path).paths
    paths.checkpoints.mkdir()
    torch.save({"model": {}}, paths.last.with_suffix(".pt"))
    with pytest.raises(ConfigError, match=r"last\.pt: is of an earlier version of expt"):
        checkpoint_file.candidates(paths.last)


def described(folder: Path) -> dict[str, Any]:
    (folder / "step-3.parts").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (folder / "step-3.parts" / name).write_text(name)
    return checkpoint_file.parts_in(folder / "step-3.parts")


def test_parts_are_taken_along_whole_or_not_at_all(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    own = described(source)
    last = source / "last.safetensors"
    checkpoint.save(last, {**RUN, checkpoint_file.PARTS: own})
    (target / ".step-3.parts").mkdir(parents=True)  # of one that was killed
    (target / ".step-3.parts" / "__0_0.distcp").touch()
    lost = source / "step-3.parts" / ".metadata"
    lost.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=rf"{lost} is missing, which holds a part of it"):
        checkpoint_file.bring_parts(last, target)
    assert not (target / "step-3.parts").exists()
    (tmp_path / "away").rename(lost)
    for _ in range(2):  # the second finds them there
        checkpoint_file.bring_parts(last, target)
    assert [path.name for path in target.iterdir()] == ["step-3.parts"]
    assert checkpoint_file.parts_in(target / "step-3.parts") == own
    checkpoint.save(last, {**RUN, checkpoint_file.PARTS: {**own, "folder": ".."}})
    with pytest.raises(CheckpointError, match="names parts outside of its folder"):
        checkpoint_file.bring_parts(last, target)


def test_a_checkpoint_that_is_set_aside_keeps_its_parts(tmp_path: Path) -> None:
    own = described(tmp_path)
    for name in ("last", "best"):
        file = tmp_path / f"{name}.safetensors"
        checkpoint.save(file, {**RUN, checkpoint_file.PARTS: own})
        set_aside(file)
    (tmp_path / "best.safetensors.corrupt").write_bytes(b"no checkpoint")
    (tmp_path / "step-2.parts").mkdir()
    checkpoint_file.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("*.parts")] == ["step-3.parts"]
    (tmp_path / "last.safetensors.corrupt").unlink()
    checkpoint_file.remove_unnamed(tmp_path)
    assert not [*tmp_path.glob("*.parts")]


def test_what_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path, written = tmp_path / "best.safetensors", 0

    def replaced(until: int) -> str:
        nonlocal written
        written += 1
        if written <= until:
            (tmp_path / "other").write_text(str(written))
            (tmp_path / "other").replace(path)
            raise CheckpointError("a part is missing")
        return path.read_text()

    path.write_text("0")
    assert checkpoint_file.read_steady(path, lambda _: replaced(2)) == "2"
    with pytest.raises(CheckpointError, match="a part is missing"):
        checkpoint_file.read_steady(path, lambda _: replaced(100))
    assert 4 < written < 100, "it gives up"

    def damaged(_: Path) -> None:
        nonlocal written
        written = -1 if written > 0 else written - 1
        raise CheckpointError("is damaged")

    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint_file.read_steady(path, damaged)
    assert written == -1, "once"


def test_nothing_is_removed_that_a_damaged_checkpoint_may_name(tmp_path: Path) -> None:
    state = {**RUN, checkpoint_file.PARTS: described(tmp_path)}
    checkpoint.save(tmp_path / "last.safetensors", state)
    for name in ("step-1.parts", ".step-2.parts"):
        (tmp_path / name).mkdir()
    (tmp_path / "last-1.safetensors").write_bytes(b"damaged")
    checkpoint_file.remove_unnamed(tmp_path)
    assert len([*tmp_path.glob("*step-*.parts")]) == 3
    (tmp_path / "last-1.safetensors").unlink()
    checkpoint_file.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("*step-*.parts")] == ["step-3.parts"]
