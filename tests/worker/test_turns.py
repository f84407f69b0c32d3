"""A person's own dataset is constructed by one worker before the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from expt.worker.build import in_turn, lock_of
from tests.conftest import Configured
from tests.facade import Patch, as_typed, run
from tests.worker.conftest import ALONE
from tests.worker.test_own_outputs import WORDS

DOWNLOADS = """
import os, time, torch
from torch.utils.data import Dataset
class Downloaded(Dataset):
    def __init__(self, train):
        if not os.path.exists("ready"):
            os.mkdir("downloading")  # raises where another is at it
            time.sleep(1)
            os.rename("downloading", "ready")
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((1, 4, 4), index / 64), index % 2
"""


def test_a_dataset_that_downloads_does_not_race(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text(DOWNLOADS)
    (tmp_path / "conf/dataset").mkdir(parents=True)
    (tmp_path / "conf/dataset/mine.yaml").write_text(
        "_target_: own_data.Downloaded\nnum_classes: 2\nnum_workers: 0\n"
    )
    few = as_typed(
        "world_size=3 batch_size=12 max_steps=1 tensorboard.images=false -q drop_last=false"
    )
    done = run("dataset=mine", *few, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_dataset_lock_waits(tmp_path: Path, monkeypatch: Patch, configured: Configured) -> None:
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path))
    config, entered = configured(*WORDS), threading.Event()

    def construct() -> None:
        with in_turn(config, ALONE, lambda: None):
            entered.set()

    lock = lock_of(str(config.dataset.custom_class))
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        thread = threading.Thread(target=construct)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


@pytest.mark.parametrize("words", [WORDS, ["dataset=huggingface", "dataset.path=x"]])
def test_construction_is_no_hang(words: Sequence[str], configured: Configured) -> None:
    config, beats = configured(*words), threading.Event()
    with in_turn(config, ALONE, beats.set):
        assert beats.wait(10)
    beats.clear()
    assert not [one for one in threading.enumerate() if one.name == "construction"]


def test_unwritable_cache(tmp_path: Path, monkeypatch: Patch, configured: Configured) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "file"))
    with in_turn(configured(*WORDS), ALONE, lambda: None):
        pass
