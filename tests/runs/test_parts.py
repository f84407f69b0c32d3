"""Folders of a checkpoint's parts: taken along whole or not at all, removed when nothing names
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from expt.errors import CheckpointError
from expt.runs import checkpoint_file


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
    assert checkpoint_file.read_steady(path, lambda: replaced(2)) == "2"
    with pytest.raises(CheckpointError, match="a part is missing"):
        checkpoint_file.read_steady(path, lambda: replaced(100))
    assert 4 < written < 100, "it gives up"

    def damaged() -> None:
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
