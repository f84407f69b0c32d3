"""What takes long is reported while it does."""

import contextlib
import os
import queue
import re
from pathlib import Path

import pytest

from expt import progress
from expt.command import export, predict, report
from tests.conftest import Trained
from tests.data.test_build import write_folder
from tests.facade import Patch, as_typed, run

SLOW = """
import time
from pathlib import Path

import torch

waited = set()


def reports():
    lines = [line for log in Path("run").rglob("stdout.log") for line in log.open()]
    return sum(line.endswith((" s so far\\n", " s left\\n")) for line in lines)


def wait_for_report(part):
    before, deadline = reports(), time.monotonic() + 120
    while part not in waited and reports() == before:
        assert time.monotonic() < deadline, part
        time.sleep(0.05)
    waited.add(part)


class Data(torch.utils.data.Dataset):
    def __init__(self, train):
        wait_for_report("data")

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index % 2)), index % 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        wait_for_report("model")
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, rows):
        later = "first step" in waited  # one of the steps after it
        wait_for_report(("a step" if later else "first step") if self.training else "evaluation")
        return self.layer(rows.flatten(1))
"""


def test_the_innermost_is_reported_and_how_far_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    said = queue.Queue[str]()

    def until(begin: str) -> str:
        while not (line := said.get(timeout=60)).startswith(begin):
            pass
        return line

    with progress.reported(pytest.fail), progress.reported(said.put), progress.phase("reading"):
        until("reading: ")
        with progress.phase("evaluating val", 1_000) as here:
            here.done = 250
            assert until("evaluating val: 250 of 1,000").endswith(" s left")
        until("reading: ")
    with contextlib.suppress(ZeroDivisionError), progress.reported(said.put):
        progress.phase("a step").__enter__()
        raise ZeroDivisionError
    assert not progress._under_way, "the next run of this process does not report it"


class Begun(list[progress.Phase]):
    """The phases that are under way, and the names of all that have begun."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def append(self, phase: progress.Phase) -> None:
        self.names.append(phase.name)
        super().append(phase)


def test_long_work_is_a_phase(tmp_path: Path, trained: Trained, monkeypatch: Patch) -> None:
    """Those of workers are seen in the next test."""
    monkeypatch.setattr(progress, "_under_way", begun := Begun())
    pictures = write_folder(tmp_path / "pictures")
    words = as_typed("dataset=image_folder dataset.image_size=[8,8] epochs=1 batch_size=4")
    folder = str(trained(*words, f"dataset.root={pictures}", "dataset.val_fraction=0.25").folder)
    parts = ["looking at the dataset's files", "reading the dataset's files", "looking at pictures"]
    assert [*dict.fromkeys(begun.names)] == parts
    begun.names.clear()
    assert report.main([folder]) == 0
    assert predict.main([folder, str(pictures), "--output", str(tmp_path / "classes.csv")]) == 0
    assert export.main([folder, "--format", "torch_export"]) == 0
    assert {"reading the runs", "predicting", "exporting"} <= {*begun.names}


@pytest.mark.slow
def test_no_part_of_a_run_is_silent(tmp_path: Path) -> None:
    tmp_path.joinpath("slow.py").write_text(SLOW)
    for group, name in (("model", "Model"), ("dataset", "Data")):
        file = tmp_path / f"conf/{group}/slow.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"_target_: slow.{name}\n")
    words = "model=slow dataset=slow +dataset.num_classes=2 dataset.val_fraction=0.5 batch_size=8"
    done = run(*as_typed(f"{words} epochs=1 world_size=1 hydra.run.dir=run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reported = re.findall(r"^\[rank 0\] (.*?): .* s (?:so far|left)$", done.stdout, re.M)
    parts = ["reading the data", "building the model", "the first step", "a step", "evaluating val"]
    assert [*dict.fromkeys(reported)] == parts


def test_a_new_process_has_said_nothing_yet(monkeypatch: Patch) -> None:
    """Else one that is forked late would report at once, after no time at all."""
    monkeypatch.setattr(progress, "_said_at", -1e9)
    assert progress.is_quiet()
    if (pid := os.fork()) == 0:
        os._exit(progress.is_quiet())
    assert os.waitpid(pid, 0)[1] == 0
