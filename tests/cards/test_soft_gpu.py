"""Soft GPUs themselves: each of their checks can fail, and their numbers are the CPU's."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Cards, Trained, python, run


def test_commands_and_runs_have_cards(cards: Cards, trained: Trained, tmp_path: Path) -> None:
    cards()
    done = run("gpus=2", "epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = trained("gpus=1", "epochs=1").result
    assert (result["status"], result["devices"]) == ("completed", ["0"])

    shown = python("import torch; print(torch.cuda.device_count())", cwd=tmp_path)
    assert shown.stdout == "4\n"
