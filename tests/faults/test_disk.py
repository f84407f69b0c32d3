"""A full disk or a save that is cut short: the checkpoint before stays and can be resumed."""

import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expt.launch import forkserver, processes
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, run, start
from tests.faults.running import LONG, ranks, training, wait_until

DISK_MB = 16


def _rotated(folder: Path) -> bool:
    """Whether a run has saved twice, so that it has all the files that it will have."""
    return (folder / "checkpoints" / "last-1.safetensors").exists()


def _goes_on(folder: Path, trained: Trained) -> None:
    """The run in `folder` goes on from its checkpoint to an end, and shows nothing twice."""
    checkpoint_file.check(folder / "checkpoints" / "last.safetensors")
    assert not [path for path in folder.rglob(".*") if ".tmp" in path.name]
    stopped = RunFolder(folder)
    epochs = checkpoint.load(folder / "checkpoints" / "last.safetensors")["position"]["epoch"]
    trained("resume=auto", f"epochs={epochs + 1}", name=str(folder))
    assert stopped.result["status"] == "completed"
    drawn = (
        EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars("running/loss")
    )
    for steps in (
        [step for step, _ in stopped.curve("running/loss")],
        [point.step for point in drawn],
    ):
        assert steps == sorted(set(steps))


def test_failed_save_leaves_the_checkpoint_before(tmp_path: Path, trained: Trained) -> None:
    process, children = training(tmp_path, "log_every=20")
    folder = tmp_path / "here"
    wait_until(lambda: _rotated(folder), process)
    most = (folder / "checkpoints" / "last.safetensors").stat().st_size // 2
    resource.prlimit(
        ranks(children)[0], resource.RLIMIT_FSIZE, (most, most)
    )  # as a quota does; needs no root
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "rank 0 of 2: " in err
    assert "last.safetensors: the checkpoint could not be written; files may not be so" in err
    assert RunFolder(folder).result["status"] == "failed"
    _goes_on(folder, trained)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"only root may mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            return ballast
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoints",
    [True, False],
    ids=["checkpoints too", "TensorBoard and metrics alone"],
)
def test_full_disk_ends_the_run(checkpoints: bool, disk: Path, trained: Trained) -> None:
    words = () if checkpoints else ("checkpoint.every_epochs=null",)
    process = start(*LONG[:2], "hydra.run.dir=run", *words, cwd=disk)
    wait_until(lambda: _rotated(disk / "run"), process)
    ballast = _fill(disk)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "no space is left on the disk of " in err
    if (
        "result.json: could not be written" not in err
    ):  # the checkpoint that was cut short left room for it
        assert RunFolder(disk / "run").result["status"] == "failed"
    ballast.unlink()
    _goes_on(disk / "run", trained)


IN_PARTS = as_typed(
    "strategy=fsdp world_size=2 checkpoint.sharded=true model.hidden=[700,700] optimizer=adamw"
)
"""6.5 MB of weights and states: of three checkpoints the last finds no room."""


@pytest.mark.slow
def test_parts_that_find_no_room_leave_the_checkpoint_before(disk: Path) -> None:
    words = (*IN_PARTS, "dataset.train_limit=320", "log_every=1", "epochs=4")
    failed = run(*words, "hydra.run.dir=run", cwd=disk)
    assert failed.returncode == 1, failed.stderr
    paths = RunPaths(disk / "run")
    assert "Traceback" not in failed.stderr
    assert "the checkpoint could not be written" in failed.stderr
    assert "is the disk full?" in failed.stderr
    assert failed.stderr.count("error:") == 1
    checkpoint_file.check(paths.last)
    state = checkpoint_file.read(paths.last)
    assert state["position"]["epoch"] == 2
    assert [each.name for each in paths.parts] == ["step-10.parts", "step-5.parts"], "no half file"
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    for more in (("hydra.run.dir=run", "resume=auto"), ("hydra.run.dir=whole",)):
        done = run(*words, *more, cwd=disk)
        assert done.returncode == 0, done.stderr
    assert RunFolder(disk / "run").points == RunFolder(disk / "whole").points, "to the same bits"


def _save_for_ever(path: Path) -> None:
    for step in range(1_000_000):
        checkpoint.save(
            path, {"step": step, "weights": torch.full((200_000,), float(step))}, keep=1
        )


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for number in range(3):
        nowhere, save = Path(os.devnull), "tests.faults.test_disk:_save_for_ever"
        process = processes.start(forkserver.Work(save, (path,), {}, nowhere, nowhere))
        before = path.stat().st_mtime_ns if path.exists() else 0
        wait_until(lambda before=before: path.exists() and path.stat().st_mtime_ns > before)  # type: ignore[misc]
        time.sleep(random.Random(number).uniform(0, 0.02))  # a moment within one of the saves
        processes.kill([process])
        process.close()
        state = checkpoint.load(path)
        assert (state["weights"] == state["step"]).all()
        assert [found.name for found in checkpoint_file.candidates(path)] in (
            ["last.safetensors"],
            ["last.safetensors", "last-1.safetensors"],
        )
