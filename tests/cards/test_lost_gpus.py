"""Dead, full and faulty GPUs, in the commands that meet them, and those of workers of launchers."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import expt
from expt.runs.paths import RunPaths
from expt.runs.result import Record, read_result
from tests.conftest import Cards
from tests.facade import ended, python, run, start

QUICK = ("max_steps=2", "tensorboard.images=false", "dataset.train_limit=256")
FAULTY = """
import ctypes, os, torch

class Faulty(torch.nn.Linear):
    def __init__(self, gpus):
        super().__init__(64, 10)
        self.gpus = gpus

    def forward(self, images):
        if os.environ["CUDA_VISIBLE_DEVICES"] in self.gpus:
            ctypes.CDLL(None).soft_gpu_fail()
        return super().forward(images.flatten(1))
"""


def uuid(card: int) -> str:
    return f"GPU-{card + 1:08d}-"


def record(folder: Path) -> Record:
    return read_result(RunPaths(folder))


@pytest.mark.slow
def test_dead_and_full_cards_fail_no_run_of_a_sweep(cards: Cards, tmp_path: Path) -> None:
    cards(dead=(3,), full=(2,))
    seeds = ",".join(map(str, range(12)))
    done = run("-m", f"seed={seeds}", "gpus=1", *QUICK, "hydra.sweep.dir=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [record(path.parent) for path in (tmp_path / "s").glob("*/result.json")]
    assert [(each["status"], each["attempts"]) for each in found] == [("completed", 1)] * 12
    assert {*map(str, (each["devices"] for each in found))} <= {"['0']", "['1']"}
    told = [line for line in done.stdout.splitlines() if line.startswith("moved")]
    assert sorted(card for line in told for card in range(4) if uuid(card) in line) == [2, 3]


@pytest.mark.parametrize("gpus", ["2", "[0]"])
def test_a_run_gets_healthy_cards_or_those_named(cards: Cards, tmp_path: Path, gpus: str) -> None:
    cards(dead=(1,))
    done = run(
        f"gpus={gpus}", *QUICK, "hydra.run.dir=r", cwd=tmp_path, CUDA_VISIBLE_DEVICES="1,2,3"
    )
    found = record(tmp_path / "r")
    if gpus == "2":
        assert (done.returncode, found["devices"]) == (0, ["2", "3"]), done.stderr
    else:
        assert (done.returncode, found["error_kind"]) == (1, "DeviceLost")
    assert f"GPU 1 ({uuid(1)}" in done.stderr


def test_where_all_cards_are_dead_each_is_named(cards: Cards, tmp_path: Path) -> None:
    cards(dead=(0, 1, 2, 3))
    done = run("gpus=1", *QUICK, cwd=tmp_path)
    assert done.returncode == 1
    error = done.stderr.partition("error: ")[2]
    assert all(uuid(card) in error for card in range(4))


@pytest.mark.parametrize("gpus", ["auto", "[1,2]"])
def test_a_sweep_says_each_fault_once_at_its_end(cards: Cards, tmp_path: Path, gpus: str) -> None:
    cards(dead=(1,))
    done = run("-m", "seed=0,1,2", f"gpus={gpus}", *QUICK, "hydra.sweep.dir=s", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count(uuid(1)) == 1
    assert done.stdout.count("use gpus=[0,2]") == 2, "as it ends, and in the summary"


@pytest.mark.parametrize("fault", [pytest.param("dead", marks=pytest.mark.slow), "full"])
def test_a_search_ends_where_no_card_can_be_used(cards: Cards, tmp_path: Path, fault: str) -> None:
    """A trial that others' memory has stopped is none of its settings' result."""
    cards(count=2, **{fault: (0, 1)})
    space = ("search=random", "search.runs=3", "optimizer.lr=tag(log,interval(1e-3,1))")
    words = ("-m", *space, "gpus=1", *QUICK, "hydra.sweep.dir=s", "hydra.launcher.max_concurrent=1")
    done = run(*words, cwd=tmp_path)
    found = [record(path.parent)["error_kind"] for path in (tmp_path / "s").glob("*/result.json")]
    assert (done.returncode, found) == (1, ["DeviceLost"]), done.stderr
    if fault == "full":
        cards(count=2)
        again = run(*words, cwd=tmp_path)
        found = [record(path.parent)["status"] for path in (tmp_path / "s").glob("*/result.json")]
        assert (again.returncode, found) == (0, ["completed"] * 3), again.stderr


def test_a_search_of_models_too_large_for_a_card_has_failed_when_typed_again(
    cards: Cards, tmp_path: Path
) -> None:
    cards(count=1, memory=60e6)
    large = ("model=resnet18", "batch_size=64", "tensorboard.images=false", "gpus=1")
    space = ("search=random", "search.runs=1", "optimizer.lr=tag(log,interval(1e-3,1))")
    for _ in range(2):
        done = run("-m", *space, *large, "hydra.sweep.dir=s", cwd=tmp_path)
        (path,) = (tmp_path / "s").glob("*/result.json")
        assert (done.returncode, record(path.parent)["error_kind"]) == (1, "OutOfMemory")
    assert record(path.parent)["attempts"] == 2, "both of the first command"


@pytest.mark.parametrize("way", ["resume=auto", "fork=r"])
def test_a_run_that_goes_on_leaves_a_dead_card(cards: Cards, tmp_path: Path, way: str) -> None:
    cards()
    words = ("gpus=1", *QUICK[1:], "epochs=2", "max_steps=6", "checkpoint.every_steps=2")
    began = run(*words, "hydra.run.dir=r", cwd=tmp_path, EXPT_FAULT="0:5:kill")
    assert began.returncode == 1
    cards(dead=(0,))
    folder = "r" if way == "resume=auto" else "fork"
    done = run(*words, f"hydra.run.dir={folder}", way, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / folder)["devices"] == ["1"]


READER = """
import torch

class Pictures(torch.utils.data.Dataset):
    targets = [0, 1] * 32

    def __init__(self, train, late):
        self.pictures = None if late else torch.rand(64, 1, 8, 8, device="cuda")

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.pictures is None:
            return torch.rand(1, 8, 8, device="cuda"), index % 2
        return self.pictures[index], index % 2
"""


@pytest.mark.parametrize("late", [True, False])
def test_a_reading_process_that_uses_cuda_is_not_the_cards_fault(
    cards: Cards, tmp_path: Path, late: bool
) -> None:
    cards()
    (tmp_path / "odd.py").write_text(READER)
    data = f"dataset={{_target_:odd.Pictures,num_classes:2,late:{late}}}"
    words = (data, "dataset.num_workers=1", "gpus=2", "batch_size=8", "hydra.run.dir=r")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "another GPU" not in done.stderr
    assert "dataset.num_workers=0" in done.stderr


@pytest.mark.parametrize(("gpus", "code"), [("x0", 0), ("x0123", 1)])
def test_two_bad_cards_is_own_fault(cards: Cards, tmp_path: Path, gpus: str, code: int) -> None:
    cards()
    (tmp_path / "odd.py").write_text(FAULTY)
    model = f"model={{_target_:odd.Faulty,gpus:{gpus}}}"
    done = run(model, "gpus=1", *QUICK, "hydra.run.dir=r", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("the run waits for another GPU") == 1
    if code:
        assert "torch.AcceleratorError: CUDA error" in done.stderr.rpartition("Traceback")[2]
    assert record(tmp_path / "r")["attempts"] == 1


def test_the_doctor_names_dead_and_full_cards(cards: Cards, tmp_path: Path) -> None:
    cards(dead=(3,), full=(2,))
    program = "from expt.command import doctor; [print(*vars(x).values()) for x in doctor._gpus()]"
    done = python(program, cwd=tmp_path)
    found = {line[5:10]: line for line in done.stdout.splitlines()}
    assert [found[f"GPU {card}"][:4] for card in range(4)] == ["pass", "pass", "note", "fail"]
    assert all(uuid(card) in found[f"GPU {card}"] for card in range(4))
    assert all(found[f"GPU {card}"].endswith("take others: gpus=[0,1]") for card in (2, 3))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, _forkserver: None) -> Path:
    """The folder of a run whose model is to predict on cards."""
    folder = tmp_path_factory.mktemp("on_cpu")
    return expt.run(*QUICK, "gpus=0", "world_size=1", f"hydra.run.dir={folder}").folder


@pytest.mark.parametrize(
    ("stage", "device", "code", "said"),
    [
        ({"dead": (0,)}, "auto", 0, "busy or unavailable; cuda:1 is used"),
        ({"full": (0,)}, "auto", 0, "cuda:1 is used"),
        ({"dead": (0,)}, "cuda:0", 1, "use --device cpu, cuda:0, cuda:1, cuda:2, cuda:3"),
        ({"dead": (0, 1), "full": (2, 3)}, "auto", 1, "--device cuda:3: "),
        ({}, "cuda:7", 2, "use --device cpu, cuda:0, cuda:1, cuda:2, cuda:3"),
    ],
)
def test_a_prediction_takes_a_gpu_that_can_be_used(
    on_cpu: Path,
    cards: Cards,
    tmp_path: Path,
    stage: dict[str, Any],
    device: str,
    code: int,
    said: str,
) -> None:
    cards(**stage)
    words = ("--split", "test", "--output", "p.csv", *["--device", device] * (device != "auto"))
    done = run("predict", str(on_cpu), *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fail_at", [1, 5, 20])
def test_prediction_on_a_bad_card_is_told(
    on_cpu: Path, cards: Cards, tmp_path: Path, fail_at: int
) -> None:
    cards(fail_at=fail_at)
    done = run("predict", str(on_cpu), "--split", "test", "--output", "p.csv", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "CUDA error: an illegal memory access" in done.stderr
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize(
    ("visible", "gpus", "code", "used"),
    [
        ("1,GPU-00000002", "auto", 0, ["1"]),
        ("+2", "1", 0, ["2"]),
        ("9", "auto", 0, []),
        ("0,0", "2", 2, None),
    ],
)
def test_the_variable_that_shows_too_few_cards_is_named(
    cards: Cards, tmp_path: Path, visible: str, gpus: str, code: int, used: list[str] | None
) -> None:
    cards()
    words = (f"gpus={gpus}", *QUICK, "hydra.run.dir=r")
    done = run(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == code, done.stderr
    assert (f"CUDA_VISIBLE_DEVICES={visible} shows" in done.stderr) is (visible != "+2")
    assert "Traceback" not in done.stderr
    if used is not None:
        assert record(tmp_path / "r")["devices"] == used


QUICKER = ("max_steps=2", "tensorboard.images=false", "hydra.run.dir=r")


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
    started = [start(*QUICKER, *words, cwd=cwd, **of_all, **own) for own in of_each]
    return [ended(each) for each in started]


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
    found = record(tmp_path / "r")
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
    assert record(tmp_path / "r")["devices"] == ["2"]


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
    assert record(tmp_path / "r")["error_kind"] == "DeviceLost"


def test_a_debugged_run_has_its_card_on_record(cards: Cards, tmp_path: Path) -> None:
    cards()
    done = run("gpus=[2]", "debug=true", *QUICKER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "r")["devices"] == ["2"]
    assert "1 worker on GPU 2" in done.stdout


NOTEBOOK = """
import expt, torch
expt.run("gpus=[1]", "debug=true", "max_steps=1", "tensorboard.images=false", quiet=True)
print(torch.cuda.current_device())
"""


def test_a_debugged_run_leaves_a_notebook_its_card(cards: Cards, tmp_path: Path) -> None:
    cards()
    done = python(NOTEBOOK, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.slow
def test_cards_unknown_to_nvml_are_used_without_energy(cards: Cards, tmp_path: Path) -> None:
    """As AMD's: torch's CUDA is there, and no NVML."""
    variables = cards(nvml=False, count=2, dead=(0,))
    done = run("gpus=1", *QUICKER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GPU 0 (0000:00:00): " in done.stderr
    found = record(tmp_path / "r")
    assert (found["devices"], found["hardware"]["gpus"]) == (["1"], ["Soft GPU"] * 2)
    assert "energy_j" not in found
    assert "0000:01:00.lock" in os.listdir(variables["EXPT_LOCKS"])
