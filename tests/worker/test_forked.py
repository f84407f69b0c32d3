"""What a fork leaves of the checkpoint that it began from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expt.config.identity import Content
from expt.errors import CheckpointError, ConfigError
from expt.runs import checkpoint, checkpoint_file, fork, parts_folder
from expt.runs.paths import RunPaths
from expt.runs.result import Made, create_result
from expt.training.collectives import Worker
from expt.worker import forked
from tests.conftest import Configured


def test_the_parts_of_the_other_run_go_with_its_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    for file, folder in ((paths.forked, "step-19.parts"), (paths.last, "step-38.parts")):
        (paths.checkpoints / folder).mkdir()
        torch.save({parts_folder.PARTS: {"folder": folder}}, file)
    one = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
    forked.release(paths, one)
    assert {path.name for path in paths.checkpoints.iterdir()} == {"last.pt", "step-38.parts"}


def test_a_damaged_part_is_told_with_the_run_that_has_it_and_is_not_kept(
    configured: Configured, tmp_path: Path
) -> None:
    """Whatever the fork has taken of it goes again: once the other run's is whole, the fork can
    begin.
    """
    source, target = RunPaths(tmp_path / "x2"), RunPaths(tmp_path / "f")
    part = source.checkpoints / "step-12.parts" / "__1_0.distcp"
    part.parent.mkdir(parents=True)
    part.write_text("whole")
    state = {
        "model": {},
        "position": {"epoch": 1, "step": 12, "step_in_epoch": 12},
        "config": {},
        "workers": [],
    }
    parts = parts_folder.described(part.parent)
    checkpoint.save(source.last, {**state, "metrics_bytes": 0, parts_folder.PARTS: parts})
    part.unlink()
    part.write_text("other")
    config = configured("fork=x2")
    with pytest.raises(CheckpointError) as told:
        fork.begin(source.last, config, target)
    assert str(told.value).startswith(
        f"fork=x2: {source.last}: {part}, a part of it, is truncated or damaged; "
    )
    assert not any(target.checkpoints.iterdir())
    part.unlink()
    part.write_text("whole")
    assert fork.begin(source.last, config, target) == target.forked


def test_a_damaged_checkpoint_is_told_as_such_with_what_to_type_instead(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    content: Made = {"data": None, "code": None}
    create_result(
        paths, identity="a", seedless_identity="a", content=content, config={}, arguments=[]
    )
    for file, epoch in (
        (paths.best, 1),
        (checkpoint_file.older(paths.last, 1), 2),
        (paths.last, 3),
    ):
        position = {"epoch": epoch, "step": 10 * epoch, "step_in_epoch": 10}
        state = {
            "model": {},
            "position": position,
            "config": {},
            "workers": [],
            "steps_per_epoch": 10,
        }
        checkpoint.save(file, state)
    paths.last.write_bytes(paths.last.read_bytes()[:-40])
    damage = f"{paths.last}: is truncated or damaged, its checksum is not that of last.pt.sha256"
    whole = f"whole: step 10 (epoch 1, best) and step 20 (epoch 2); use fork={paths.folder}@20"
    for given in (str(paths.folder), f"{paths.folder}@last"):
        with pytest.raises(ConfigError) as told:
            fork.identified(given)
        assert str(told.value) == f"fork={given}: {damage}; {whole}"
    with pytest.raises(
        ConfigError, match=r"has no checkpoint of step 30; it has step 10 .*; damaged: last\.pt$"
    ):
        fork.identified(f"{paths.folder}@30")


def test_of_a_step_the_file_that_is_whole_is_taken_and_a_sweep_reads_it_through_once(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    content: Made = {"data": None, "code": None}
    create_result(
        paths, identity="a", seedless_identity="b", content=content, config={}, arguments=[]
    )
    state = {
        "model": {},
        "position": {"epoch": 3, "step": 30, "step_in_epoch": 10},
        "config": {},
        "workers": [],
    }
    for file in (paths.best, paths.last):
        checkpoint.save(file, {**state, "steps_per_epoch": 10})
    changed = bytearray(paths.last.read_bytes())
    changed[-5] ^= 1  # of the comment's length: all of it can still be read
    paths.last.write_bytes(changed)
    checked = list[Path]()
    check = checkpoint_file.check

    def count(file: Path) -> None:
        checked.append(file)
        check(file)

    monkeypatch.setattr(checkpoint_file, "check", count)
    for which in ("30", "best", "epoch:3") * 2:
        assert fork.identified(f"{paths.folder}@{which}") == ("a@30", "b@30")
    assert checked.count(paths.best) == 1
    monkeypatch.setattr(fork, "_refuse", lambda *_: None)
    config = configured(f"fork={paths.folder}@30", "epochs=4")
    assert fork.find(config, Content(fork="a@30"), RunPaths(tmp_path / "fork")) == paths.best
    with pytest.raises(
        ConfigError,
        match=r"last\.pt: is truncated or damaged, .*; whole: step 30 \(epoch 3, best\); use ",
    ):
        fork.identified(str(paths.folder))
    paths.best.write_bytes(changed)
    with pytest.raises(
        ConfigError,
        match=r"@30: .*last\.pt: is truncated or damaged, .*; no other is whole: give another",
    ):
        fork.identified(f"{paths.folder}@30")
