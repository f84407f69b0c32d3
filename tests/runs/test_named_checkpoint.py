"""Checkpoints by name: `RUN`, `RUN@best`, `RUN@40`."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.config.identity import VERSION
from expt.errors import CheckpointError, ConfigError
from expt.runs import checkpoint, checkpoint_file
from expt.runs.continuing import take
from expt.runs.lineage import fork_content, fork_parent
from expt.runs.may_continue import Source
from expt.runs.named_checkpoint import (
    checkpoint_named,
    checkpoints,
    read,
    run_and_which,
    run_named,
    weights_named,
)
from expt.runs.paths import RunPaths
from expt.runs.result import create_result, update_result
from tests.conftest import Configured
from tests.facade import Patch

STATE: dict[str, Any] = {
    "version": VERSION,
    "model": {"weight": torch.ones(3)},
    "config": {},
    "workers": [],
    "steps_per_epoch": 10,
    "metrics_bytes": 0,
    "best": None,
    "bests": [],
    "evaluated": None,
}


def save(file: Path, step: int, **more: Any) -> None:
    position = {"epoch": -(-step // 10), "step": step, "step_in_epoch": step % 10 or 10}
    checkpoint.save(file, {**STATE, "position": position, **more})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose best checkpoint is of step 10, the one before the last of 15, the last of 30."""
    paths = RunPaths(tmp_path / "run")
    content: Any = {"data": None, "code": None}
    about: Any = {"identity": "a", "seedless_identity": "b", "config": {}, "arguments": []}
    create_result(paths, content=content, **about)
    save(paths.best, 10)
    save(checkpoint_file.numbered(paths.last, 1), 15)
    save(paths.last, 30)
    return paths


def damage(file: Path) -> None:
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1  # all but a tensor can still be read
    file.write_bytes(changed)


@pytest.mark.parametrize(
    ("which", "step"),
    [("last", 30), ("best", 10), ("15", 15), ("epoch:1", 10), ("epoch:3", 30), ("last-1", 15)],
)
def test_each_is_found(which: str, step: int, paths: RunPaths) -> None:
    assert checkpoint_named("fork", "given", paths.folder, which).step == step


@pytest.mark.parametrize("which", ["41", "epoch:2", "none"])
def test_what_is_not_there_is_refused_with_what_is(which: str, paths: RunPaths) -> None:
    listed = "step 10 (epoch 1, best), step 15 (within epoch 2, last-1), step 30 (epoch 3, last)"
    listed = re.escape(listed)
    with pytest.raises(ConfigError, match=f"^fork=given: .*{which}; it has {listed}: use "):
        checkpoint_named("fork", "given", paths.folder, which)


def test_a_damaged_one_is_refused_with_those_that_are_whole(paths: RunPaths) -> None:
    for hurt in (damage, lambda path: os.truncate(path, 9)):
        hurt(paths.last)
        with pytest.raises(
            ConfigError, match=r"last\.safetensors: .*(damaged|truncated).*; it has step 10"
        ):
            checkpoint_named("fork", "given", paths.folder, "last")
    with pytest.raises(ConfigError, match=r"it has step 10 .* step 15 [^:]*: use"):
        checkpoint_named("fork", "given", paths.folder, "41")
    checkpoint.save(paths.last, {"weight": 1.0})
    assert [each.step for each in checkpoints(paths.folder)] == [10, 15], "that is of no run"


def test_of_a_step_the_file_that_is_whole_is_taken_and_read_through_once(paths: RunPaths) -> None:
    save(paths.best, 30)
    damage(paths.last)
    for which in ("30", "best", "epoch:3"):
        assert checkpoint_named("fork", "given", paths.folder, which).file == paths.best
    written_at = paths.best.stat().st_mtime_ns
    damage(paths.best)
    os.utime(paths.best, ns=(written_at, written_at))
    assert checkpoint_named("fork", "given", paths.folder, "30").file == paths.best


@pytest.mark.parametrize("word", ["fork", "resume", "weights"])
def test_all_words_name_a_run_alike(word: str, paths: RunPaths, tmp_path: Path) -> None:
    run = paths.folder
    assert run_named(word, str(run)) == (run, "")
    for which in ("epoch:2", "best-20", "last-1"):
        assert run_named(word, f"{run}@{which}") == run_and_which(f"{run}@{which}") == (run, which)
    assert run_named(word, str(paths.last)) == (run, "last")
    odd = tmp_path / "a@5,b=1"
    odd.mkdir()
    assert run_named(word, str(odd)) == (odd, "")
    for given in (f"{run}@first", f"{tmp_path}/rnu", f"{paths.last}@best"):
        with pytest.raises(ConfigError, match=f"^{word}={given}: "):
            run_named(word, given)
    (tmp_path / "multirun.yaml").touch()
    with pytest.raises(ConfigError, match="is a sweep; name one of its runs"):
        run_named(word, f"{tmp_path}@5")


def test_a_file_of_the_current_folder_is_of_its_run(paths: RunPaths, monkeypatch: Patch) -> None:
    monkeypatch.chdir(paths.checkpoints)
    assert run_named("fork", paths.last.name) == (paths.folder, "last")
    assert weights_named(paths.last.name).run == paths.folder


def test_first_weights_may_be_any_checkpoint_or_file(paths: RunPaths, tmp_path: Path) -> None:
    run, older = paths.folder, checkpoint_file.numbered(paths.last, 1)
    assert weights_named(str(run)) == (paths.best, run)
    assert weights_named(f"{run}@last") == (paths.last, run)
    assert weights_named(f"{run}@15") == (older, run)
    assert weights_named(str(paths.last)) == (paths.last, run)
    (file := tmp_path / "of_another_program.pt").touch()
    assert weights_named(str(file)) == (file, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"^weights=.*/empty has no checkpoint last; there is no other$"
    ):
        weights_named(str(tmp_path / "empty"))


def test_a_fork_is_known_by_its_run_and_step(configured: Configured, paths: RunPaths) -> None:
    found = fork_content(configured(f"fork={paths.folder}@15"), {})
    assert found == {"fork": "a@15", "seedless_fork": "b@15"}
    config = configured("fork=gone")
    first: Any = {"content": found, "config": {"fork": "gone"}}
    assert fork_content(config, first) == found, "of another fork of the same run"
    update_result(paths, version=VERSION + 1)
    with pytest.raises(ConfigError, match="another version"):
        fork_parent(str(paths.folder))


def test_a_damaged_part_is_not_taken(paths: RunPaths, tmp_path: Path) -> None:
    """Whatever is taken of it goes again: once the other run's is whole, the fork can begin."""
    target = RunPaths(tmp_path / "fork")
    part = paths.checkpoints / "step-12.parts" / "__1_0.distcp"
    part.parent.mkdir(parents=True)
    part.write_text("whole")
    save(paths.last, 12, **{checkpoint_file.PARTS: checkpoint_file.parts_in(part.parent)})
    source = Source("fork", read(paths.last))
    part.write_text("other")
    with pytest.raises(CheckpointError, match="a part of it, is truncated or damaged"):
        take(source, target)
    assert not any(target.checkpoints.iterdir())
    part.unlink()
    part.write_text("whole")
    assert take(source, target) == target.forked
