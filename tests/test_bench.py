"""scripts/bench: that it measures at all; BENCHMARKS.md holds what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FASHION_MNIST, environment

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason=f"no {FASHION_MNIST}")
def test_a_training_is_compared_with_the_hand_written_loop(tmp_path: Path) -> None:
    words = ["--only=epoch", "--models=mlp", "--images=640", "--rounds=1", "--epochs=2", "--peers=plain"]
    command = [sys.executable, str(BENCH), *words, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["torch"]
    (row,) = found["results"]  # a batch of 1024 is more than the images
    assert row["case"] == "mlp, batch 64"
    assert all(seconds > 0 for name in ("expt", "plain") for seconds in row["rounds"][name])
    assert row["ratio"]["plain"] == pytest.approx(row["median"]["expt"] / row["median"]["plain"])
    assert "mlp, batch 64" in done.stdout
