"""Folders of a checkpoint's parts: taken along whole or not at all, removed when nothing names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from expt.errors import CheckpointError
from expt.runs import checkpoint_file, parts_folder


def described(folder: Path) -> dict[str, Any]:
    (folder / "step-3.parts").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (folder / "step-3.parts" / name).write_text(name)
    return parts_folder.described(folder / "step-3.parts")


def test_parts_are_taken_along_whole_or_not_at_all(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    own = described(source)
    (target / ".step-3.parts").mkdir(parents=True)  # of one that was killed
    (target / ".step-3.parts" / "__0_0.distcp").touch()
    lost = source / "step-3.parts" / ".metadata"
    lost.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=rf"{lost}: is missing, which holds a part of a checkpoint"):
        parts_folder.bring(own, source, target)
    assert not [*target.iterdir()]
    (tmp_path / "away").rename(lost)
    for _ in range(2):  # the second finds them there
        parts_folder.bring(own, source, target)
    assert [path.name for path in target.iterdir()] == ["step-3.parts"]
    assert parts_folder.described(target / "step-3.parts") == own


def test_nothing_is_removed_that_a_damaged_checkpoint_may_name(tmp_path: Path) -> None:
    torch.save({parts_folder.PARTS: described(tmp_path)}, tmp_path / "last.pt")
    for name in ("step-1.parts", ".step-2.parts"):
        (tmp_path / name).mkdir()
    (tmp_path / "last-1.pt").write_bytes(b"damaged")
    checkpoint_file.remove_unnamed(tmp_path)
    assert len([*tmp_path.glob("*step-*.parts")]) == 3
    (tmp_path / "last-1.pt").unlink()
    checkpoint_file.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("*step-*.parts")] == ["step-3.parts"]
