"""A hanging rank, a loss that is not finite, too little memory: the run ends and says why."""

import signal
from pathlib import Path

import pytest

from expt.data.indexing import permutation, split
from expt.worker.fault import VARIABLE
from tests import on_cards
from tests.conftest import Trained
from tests.facade import RunFolder, own_model, run, start
from tests.faults.conftest import Failing
from tests.faults.running import wait_until

FOLDER = "hydra.run.dir=here"


def _log(tmp_path: Path, rank: int) -> str:
    return (tmp_path / "here" / "logs" / "0" / str(rank) / "stderr.log").read_text()


@pytest.mark.parametrize("way", ["shared memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_hanging_rank_is_named_with_stack(way: str, tmp_path: Path, failing: Failing) -> None:
    error = failing("1:30:hang", "timeout_s=1", f"ddp.shared_memory={way == 'shared memory'}")
    assert error.exit_code == 1
    # with NCCL both are stuck, and who has begun fewer collectives is named
    what = ": finished no step" if on_cards.ON else " did not arrive"
    assert f"rank 1 of 2{what} within 1 s (timeout_s)" in str(error)
    assert "in strike" in str(error)
    assert f"log: {tmp_path / 'here'}/logs/0/1/stderr.log" in str(error)
    assert "in strike" in _log(tmp_path, 1)
    assert ("TimedOut" if on_cards.ON else "Traceback") in _log(tmp_path, 0)
    assert RunFolder(tmp_path / "here").result["status"] == "failed"


def test_a_worker_that_hangs_alone_ends(tmp_path: Path, failing: Failing) -> None:
    error = failing("0:30:hang", "timeout_s=1", "world_size=1")
    assert "rank 0 of 1: finished no step within 1 s (timeout_s); it was here" in str(error)
    assert "time.sleep(" in str(error)
    assert "in strike" in _log(tmp_path, 0)


def test_a_dataset_that_blocks_is_told_before_there_was_a_step(tmp_path: Path) -> None:
    (tmp_path / "blocking.py").write_text(
        "import time, torch\n"
        "class Images(torch.utils.data.Dataset):\n"
        "    def __init__(self, *, train):\n"
        "        time.sleep(600)\n"
        "    def __len__(self):\n"
        "        return 1\n"
        "    def __getitem__(self, index):\n"
        "        return torch.zeros(1, 8, 8), 0\n"
    )
    (tmp_path / "my_conf" / "dataset").mkdir(parents=True)
    (tmp_path / "my_conf" / "dataset" / "mine.yaml").write_text(
        "_target_: blocking.Images\nnum_classes: 2\n"
    )
    words = ("--config-dir", "my_conf", "dataset=mine", "timeout_s=1", "world_size=1", FOLDER)
    process = start(*words, cwd=tmp_path)
    log = tmp_path / "here" / "logs" / "0" / "0" / "stderr.log"
    wait_until(lambda: log.exists() and "time.sleep(600)" in log.read_text(), process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "blocking.Images" in told


def test_non_finite_loss_stops_all_ranks_with_details(tmp_path: Path, failing: Failing) -> None:
    # On rank 1 at step 30, the 10th of epoch 2; a checkpoint is due before the next log point.
    error = failing("1:30:nan", "log_every=20", "checkpoint.every_steps=8", "max_restarts=3")
    assert error.exit_code == 1
    assert "the loss was nan at step 30 (epoch 2) on rank 1" in str(error)
    listed = str(error).partition("training data: ")[2].splitlines()[0]
    images = ", ".join(map(str, _indices(epoch=2, number=9, rank=1)))
    assert listed == f"{', '.join(images.split(', ')[:3])} and 29 more"
    assert f"samples of step 30, rank 1: {images}\n" in _log(tmp_path, 1)
    left = RunFolder(tmp_path / "here")
    assert left.state()["position"]["step"] == 24
    assert (left.result["status"], left.result["attempts"]) == ("failed", 1)
    assert "step 30" in left.result["error"]
    assert "at step 30 (epoch 2) on rank 1" in _log(tmp_path, 0)
    assert "NaN" not in (left.folder / "metrics.jsonl").read_text()


def _indices(*, epoch: int, number: int, rank: int) -> list[int]:
    """Which of the digits a rank of two gets in a batch of 64."""
    train, _ = split(1437, 0.1, None)
    order = train[permutation(len(train), 0, epoch)]
    return [int(index) for index in order[number * 64 + rank * 32 : number * 64 + (rank + 1) * 32]]


def test_a_step_may_be_skipped_on_all_ranks(tmp_path: Path, trained: Trained) -> None:
    settings = ("epochs=2", "on_nan=skip", "optimizer.momentum=0.9", "log_every=10")
    metrics = trained(*settings, f"+hydra.job.env_set.{VARIABLE}='1:30:nan'").result["metrics"]
    assert metrics["skipped_steps"] == 1
    assert metrics["accuracy/test"] > 0.9
    assert 0 < metrics["loss/train"] < 1


def test_a_gpu_without_room_names_the_batch_size(failing: Failing) -> None:
    error = failing("1:5:oom")
    assert "rank 1 of 2: CUDA out of memory. Tried to allocate 2.00 GiB" in str(error)
    assert "batch_size=64 is 32 samples on each of 2 workers" in str(error)


def test_a_machine_without_room_is_told_in_plain_words(tmp_path: Path) -> None:
    own = own_model(tmp_path, "torch.empty(1 << 50 if self.steps == 30 else 1)")
    done = run(*own, "world_size=1", FOLDER, cwd=tmp_path)
    assert done.returncode == 1
    assert "out of memory: 4503599.6 GB more were asked for" in done.stderr
    assert "gradient_accumulation=2 (or auto), or batch_size=32" in done.stderr
    assert "Traceback" not in done.stderr
    assert "torch.empty(1 << 50 if" in _log(tmp_path, 0)
