"""A rank that hangs, a loss that is not finite, memory that does not suffice: the run ends, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run

FOLDER = "hydra.run.dir=here"


def _model(tmp_path: Path, forward: str, *, rank: int, step: int = 30) -> tuple[str, ...]:
    """A model whose forward pass does `forward` (an expression of `images`) on one rank at one of its steps."""
    (tmp_path / "faulty.py").write_text(
        "import os, time, torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, *, channels, image_size, num_classes):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
        "        self.steps = 0\n"
        "    def stuck(self, images):\n"
        f"        return {forward}\n"
        "    def forward(self, images):\n"
        "        self.steps += self.training\n"
        f"        if self.training and self.steps == {step} and os.environ['RANK'] == '{rank}':\n"
        "            images = self.stuck(images)\n"
        "        return super().forward(images)\n"
    )
    return ("+model._target_=faulty.Net", "~model.hidden", "~model.dropout", "threads=1", FOLDER)


def _log(tmp_path: Path, rank: int) -> str:
    return (tmp_path / "here" / "logs" / "0" / str(rank) / "stderr.log").read_text()


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_a_rank_that_hangs_is_named_with_its_stack(way: str, tmp_path: Path) -> None:
    model = _model(tmp_path, "time.sleep(1000)", rank=1)
    done = run(*model, "timeout_s=2", f"ddp.shared_memory={way == 'shared memory'}", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 of 2 did not arrive within 2 s (timeout_s)" in done.stderr
    assert "in stuck" in done.stderr
    assert f"log: {tmp_path / 'here'}/logs/0/1/stderr.log" in done.stderr
    assert "in stuck" in _log(tmp_path, 1)
    assert "Traceback" in _log(tmp_path, 0)
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "failed"


def test_a_worker_that_hangs_alone_ends(tmp_path: Path) -> None:
    done = run(*_model(tmp_path, "time.sleep(1000)", rank=0), "timeout_s=1", "world_size=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 0 of 1: finished no step within 1 s (timeout_s); it was here" in done.stderr
    assert "time.sleep(1000)" in done.stderr
    assert "in stuck" in _log(tmp_path, 0)
