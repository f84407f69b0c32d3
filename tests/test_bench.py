"""scripts/bench: that it measures at all; BENCHMARKS.md holds what it found."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from expt.gpus import MPS_DAEMON
from scripts.benchmarks import gpu
from scripts.benchmarks.links import Cluster, Link, all_reduce_s, step_s
from scripts.benchmarks.memory import Peak
from scripts.benchmarks.systems import Output
from tests.conftest import FASHION_MNIST
from tests.facade import Patch, as_typed, environment

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.mark.slow
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason=f"no {FASHION_MNIST}")
def test_a_training_is_compared_with_the_hand_written_loop(tmp_path: Path) -> None:
    words = [
        *as_typed("--only=epoch --models=mlp --images=640 --rounds=1 --epochs=2 --peers=plain")
    ]
    command = [sys.executable, str(BENCH), *words, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["torch"]
    (row,) = found["results"]  # a batch of 1024 is more than the images
    assert row["case"] == "mlp, batch 64"
    assert all(seconds > 0 for name in ("expt", "plain") for seconds in row["rounds"][name])
    assert row["ratio"]["plain"] == pytest.approx(row["median"]["expt"] / row["median"]["plain"])
    assert "mlp, batch 64" in done.stdout


@pytest.mark.slow
def test_the_scaling_model_is_held_against_workers_of_this_machine() -> None:
    command = [sys.executable, str(BENCH.with_name("scaling")), "--models=mlp", "--batch=2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number = r"\d+\.\d\d"
    found = re.findall(
        rf"mlp, ([24]) workers here.*: predicted ({number}) ms \(({number}) of them computation\), "
        rf"measured ({number}) ms, off by ([+-]\d+\.\d)%",
        done.stdout,
    )
    assert [workers for workers, *_ in found] == ["2", "4"], done.stdout
    for _, *numbers in found:
        predicted, computation, measured, off = map(float, numbers)
        assert 0 < computation < predicted
        assert off == pytest.approx(100 * (predicted / measured - 1), abs=2)
    assert "mlp: 3.16 MB of gradients" in done.stdout
    assert len(re.findall(r" GPUs .* of linear", done.stdout)) == 8


@pytest.mark.slow
def test_a_sweeps_driver_is_measured_by_itself(tmp_path: Path) -> None:
    words = [
        *as_typed("--only=grid --points=4,3 --rounds=1 --peers=plain --json"),
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH), *words], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    found = {row["case"]: row["median"]["expt"] for row in rows if row["unit"] != "s CPU"}
    assert len([case for case in found if "for a further run" in case]) == 2
    assert 0.3 < found["from the command to the first of 3 runs"] < 60
    assert found["the command again, all of 4 runs complete"] > 0.3
    assert found["to the first screen of the report on 4 runs"] > 0.1
    assert 30 < found["peak memory of the driver, 4 runs"] < 2000
    assert 3 <= found["open in the driver at most, 4 runs"] < 100


def test_more_gpus_take_longer_for_a_step_and_free_links_do_not() -> None:
    slow, free = Link(1e-5, 12.5e9), Link(0.0, 1e30)
    seconds = [
        step_s(0.005, 45e6, workers, Cluster(8, Link(3e-6, 200e9), slow), bucket_bytes=25 * 2**20)
        for workers in (1, 8, 64, 1024)
    ]
    assert seconds[0] == 0.005
    assert seconds == sorted(seconds)
    assert step_s(
        0.005, 45e6, 1024, Cluster(8, free, free), bucket_bytes=25 * 2**20
    ) == pytest.approx(0.005)
    # A ring of 8 moves 2 x 7/8 of the bytes through each link.
    assert all_reduce_s(8e9, 8, Link(0.0, 1e9)) == pytest.approx(14.0)


DAEMON = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >> "$CUDA_MPS_PIPE_DIRECTORY/../told"
[ "$1" = -d ] || cat >> "$CUDA_MPS_PIPE_DIRECTORY/../told"
"""


def test_runs_on_one_card_with_and_without_mps(monkeypatch: Patch, tmp_path: Path) -> None:
    """By a daemon of their own; the commands that would train are but noted."""
    ran = list[tuple[str, str | None]]()

    def start(command: list[str], **extra: str) -> Output:
        ran.append((command[-1], extra.get("CUDA_MPS_PIPE_DIRECTORY")))
        return Output("", 1.0 + len(ran), Peak())

    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench = Namespace(data=lambda _: tmp_path, images_for=lambda _: 9, rounds=1, say=lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    (plain,) = gpu.packed(bench)  # type: ignore[arg-type]
    assert plain.values == {"expt": [2.0], "in a row": [3.0]}
    (daemon := tmp_path / MPS_DAEMON).write_text(DAEMON)
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    _, shared = gpu.packed(bench)  # type: ignore[arg-type]
    assert shared.case == "8 mlp runs with runs_per_gpu=8, by MPS"
    assert shared.values == {"expt": [6.0], "in a row": [5.0]}
    pipes = [pipe for _, pipe in ran]
    assert pipes[:4] == [None] * 4
    assert pipes[4] is not None
    assert not Path(pipes[4]).exists()
    assert (tmp_path / "told").read_text() == "0 -d\n0 \nquit\n"
