"""What is known of a checkpoint without torch: as much as with it, but for tensors, and no sooner
trusted."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.errors import CheckpointError
from expt.runs import checkpoint, checkpoint_file
from expt.runs.attempt import Attempt
from expt.runs.lineage import of_fork
from tests.requests import checkpoint_state, request
from tests.runs.test_checkpoint import RunsCode

TOLD: dict[str, Any] = {
    "config": {"lr": 0.1, "hidden": [1, 2], "root": None},
    "position": {"epoch": 1, "step": 2},
    "best": {"value": float("inf")},
    "in order": collections.OrderedDict(b=1, a=2),
    "bytes": b"\xff\x00",
    "set": {1, 2},
}


def whole(path: Path) -> Path:
    """A checkpoint of two tensors."""
    tensors = {"weight": torch.ones(2, 3).t(), "bias": torch.zeros(4, dtype=torch.bfloat16)}
    checkpoint.save(
        path, {**TOLD, "model": tensors, "workers": [torch.get_rng_state()], "dtype": torch.float32}
    )
    return path


def test_all_but_tensors_is_read(tmp_path: Path) -> None:
    found = checkpoint_file.read(whole(tmp_path / "last.pt"))
    assert {key: found[key] for key in TOLD} == TOLD
    assert {*found} == {*TOLD, "model", "workers", "dtype"}
    assert {*found["model"]} == {"weight", "bias"}


def test_no_code_is_run(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "last.pt"
    checkpoint.save(path, {"model": RunsCode(mark), "position": {}, "config": {}, "workers": []})
    with pytest.raises(
        pickle.UnpicklingError, match=r"holds builtins\.getattr|holds pathlib|holds _*builtin"
    ):
        checkpoint_file.read(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_file.check(path)
    assert not mark.exists()


def cut(path: Path, leave_out: str, shorter: str) -> None:
    """Write the file anew without an entry, and with another that ends too soon."""
    with zipfile.ZipFile(path) as file:
        entries = {
            name: file.read(name) for name in file.namelist() if not name.endswith(leave_out)
        }
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content[:3] if name.endswith(shorter) else content)


@pytest.mark.parametrize("lacks", ["nothing", "a tensor", "half a tensor", "its end"])
def test_what_lacks_a_part_is_not_whole(tmp_path: Path, lacks: str) -> None:
    path = whole(tmp_path / "last.pt")
    cut(
        path,
        "/data/1" if lacks == "a tensor" else "?",
        "/data/0" if lacks == "half a tensor" else "?",
    )
    if lacks == "its end":
        path.write_bytes(path.read_bytes()[:-100])
    if lacks == "nothing":
        checkpoint_file.check(path)
        return
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        checkpoint_file.check(path)


def test_no_flipped_byte_changes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    whole(path)
    content, expected = path.read_bytes(), repr(checkpoint.load(path))
    index = content.index(b"PK\x01\x02")
    for place in range(0, len(content), 11):
        one = tmp_path / f"{place}.pt"
        one.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        if not checkpoint_file.damage_of(one):
            try:
                assert repr(checkpoint.load(one)) == expected, place
            except RuntimeError:  # torch's
                assert place > index
    assert checkpoint_file.damage_of(tmp_path / "0.pt")
    checkpoint.save(path, {**TOLD, "model": {"empty": torch.empty(0)}, "workers": []})
    assert checkpoint_file.damage_of(path) is None


BEGINS = """\
import pickle, sys
from expt.runs.attempt import Attempt
from expt.runs.lineage import of_fork
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
    content = of_fork(dataclasses.replace(first.config, fork=fork), {})
    forked = request(tmp_path / "fork", epochs=9, fork=fork, content=content, typed_at=0.0)
    again = pickle.dumps([(1, dataclasses.replace(first, may_have_run=True)), (0, forked)])
    done = subprocess.run(
        [sys.executable, "-c", BEGINS], check=True, capture_output=True, input=again
    )
    assert done.stdout.decode().split() == [str(before), str(forked.paths.forked)]
    told = done.stderr.decode()
    assert f"{paths.last}: is truncated or damaged" in told
    assert told.count("warning: ") == 1
    assert checkpoint.load(forked.paths.forked)["position"]["step"] == 1


def described(folder: Path) -> dict[str, Any]:
    (folder / "step-3.parts").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (folder / "step-3.parts" / name).write_text(name)
    return checkpoint_file.described(folder / "step-3.parts")


def test_parts_are_taken_along_whole_or_not_at_all(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    own = described(source)
    (target / ".step-3.parts").mkdir(parents=True)  # of one that was killed
    (target / ".step-3.parts" / "__0_0.distcp").touch()
    lost = source / "step-3.parts" / ".metadata"
    lost.rename(tmp_path / "away")
    with pytest.raises(
        CheckpointError, match=rf"{lost}: is missing, which holds a part of a checkpoint"
    ):
        checkpoint_file.bring(own, source, target)
    assert not [*target.iterdir()]
    (tmp_path / "away").rename(lost)
    for _ in range(2):  # the second finds them there
        checkpoint_file.bring(own, source, target)
    assert [path.name for path in target.iterdir()] == ["step-3.parts"]
    assert checkpoint_file.described(target / "step-3.parts") == own


def test_a_checkpoint_that_is_set_aside_keeps_its_parts(tmp_path: Path) -> None:
    own = described(tmp_path)
    for name in ("last", "best"):
        torch.save({checkpoint_file.PARTS: own}, tmp_path / f"{name}.pt")
        checkpoint_file.set_aside(tmp_path / f"{name}.pt")
    (tmp_path / "best.pt.corrupt").write_bytes(b"no checkpoint")
    (tmp_path / "step-2.parts").mkdir()
    checkpoint_file.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("*.parts")] == ["step-3.parts"]
    (tmp_path / "last.pt.corrupt").unlink()
    checkpoint_file.remove_unnamed(tmp_path)
    assert not [*tmp_path.glob("*.parts")]


def test_what_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path, written = tmp_path / "best.pt", 0

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
    torch.save({checkpoint_file.PARTS: described(tmp_path)}, tmp_path / "last.pt")
    for name in ("step-1.parts", ".step-2.parts"):
        (tmp_path / name).mkdir()
    (tmp_path / "last-1.pt").write_bytes(b"damaged")
    checkpoint_file.remove_unnamed(tmp_path)
    assert len([*tmp_path.glob("*step-*.parts")]) == 3
    (tmp_path / "last-1.pt").unlink()
    checkpoint_file.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("*step-*.parts")] == ["step-3.parts"]
