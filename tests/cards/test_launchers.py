"""The GPUs of workers that expt has not started, and of a run under a debugger."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from expt.runs.paths import RunPaths
from expt.runs.result import Record, read_result
from tests.conftest import Cards
from tests.facade import ended, run, start

QUICK = ("max_steps=2", "tensorboard.images=false", "hydra.run.dir=r")


def tasks(
    cwd: Path, *words: str, visible: Sequence[str | None]
) -> list[subprocess.CompletedProcess[str]]:
    """Tasks of Slurm's on one node, and the cards that it shows each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    of_all |= {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "here",
    }
    of_all |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    of_each = [
        {"SLURM_PROCID": f"{at}", "SLURM_LOCALID": f"{at}", "SLURM_GPUS_PER_TASK": "1"}
        | ({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})
        for at, shown in enumerate(visible)
    ]
    started = [start(*QUICK, *words, cwd=cwd, **of_all, **own) for own in of_each]
    return [ended(each) for each in started]


def record(folder: Path) -> Record:
    return read_result(RunPaths(folder / "r"))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ((None, None), ["0", "1"]),  # --gpus-per-task=1 --gpu-bind=none
        # --gpus-per-task=1, or --gpu-bind=single:1
        pytest.param(("3", "1"), ["3", "1"], marks=pytest.mark.slow),
    ],
)
def test_each_task_of_slurm_has_a_card(
    cards: Cards, tmp_path: Path, visible: Sequence[str | None], gpus: list[str]
) -> None:
    cards()
    done = tasks(tmp_path, visible=visible)
    assert [each.returncode for each in done] == [0, 0], done
    found = record(tmp_path)
    assert (found["devices"], found["backend"]) == (gpus, "nccl")
    assert found["device_s"] > 0
    assert found["energy_j"] > 0
    assert f"2 workers on GPUs {', '.join(gpus)}" in done[0].stdout


def test_tasks_that_share_a_card_are_told_to_use_gloo(cards: Cards, tmp_path: Path) -> None:
    cards()
    refused = tasks(tmp_path, visible=("2", "2"))
    assert [each.returncode for each in refused] == [2, 2], refused
    assert "use backend=gloo" in refused[0].stderr
    assert not (tmp_path / "r").exists()
    done = tasks(tmp_path, "backend=gloo", visible=("2", "2"))
    assert [each.returncode for each in done] == [0, 0], done
    assert record(tmp_path)["devices"] == ["2"]


@pytest.mark.parametrize(
    ("visible", "gpus", "why"),
    [
        (("0", ""), "auto", "gpus: rank 1 of 2 can see none"),
        (("", "1"), "auto", "gpus: rank 0 of 2 can see none"),
        (("0,1", "2"), "2", f"rank 1 of 2 on {socket.gethostname()}: "),
    ],
)
def test_what_one_task_can_not_do_ends_all_of_them_in_a_line(
    cards: Cards, tmp_path: Path, visible: Sequence[str], gpus: str, why: str
) -> None:
    cards()
    refused = tasks(tmp_path, f"gpus={gpus}", visible=visible)
    assert [each.returncode for each in refused] == [2, 2], refused
    assert refused[0].stderr.startswith(f"error: {why}")
    assert ("gpus=" in refused[0].stderr, refused[1].stderr) == (True, "")
    assert not (tmp_path / "r").exists()


def test_dead_cards_of_tasks_are_named_with_their_node(cards: Cards, tmp_path: Path) -> None:
    cards(dead=(1, 3))
    done = tasks(tmp_path, visible=("1", "3"))
    assert [each.returncode for each in done] == [1, 1]
    for card, each in zip((1, 3), done, strict=True):
        assert f"GPU {card} (GPU-{card + 1:08d}-" in each.stderr
        assert f" of {socket.gethostname()}: " in each.stderr
    assert record(tmp_path)["error_kind"] == "DeviceLost"


def test_a_debugged_run_has_its_card_on_record(cards: Cards, tmp_path: Path) -> None:
    cards()
    done = run("gpus=[2]", "debug=true", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path)["devices"] == ["2"]
    assert "1 worker on GPU 2" in done.stdout


@pytest.mark.slow
def test_cards_unknown_to_nvml_are_used_without_energy(cards: Cards, tmp_path: Path) -> None:
    """As AMD's: torch's CUDA is there, and no NVML."""
    variables = cards(nvml=False, count=2, dead=(0,))
    done = run("gpus=1", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GPU 0 (0000:00:00): " in done.stderr
    found = record(tmp_path)
    assert (found["devices"], found["hardware"]["gpus"]) == (["1"], ["Soft GPU"] * 2)
    assert "energy_j" not in found
    assert "0000:01:00.lock" in os.listdir(variables["EXPT_LOCKS"])
