"""One run, from the command to the event file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import on_cards
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, ended, environment, own_model, run, start, start_cold

EPOCH_TAGS = {"loss/train", "accuracy/train", "loss/val", "accuracy/val", "best/accuracy/val"}
EPOCH_TAGS |= {
    "lr", "speed/samples_per_s", "speed/epoch_s", "speed/data_wait_s", "memory/worker_mib",
}  # fmt: skip
EPOCH_TAGS |= {f"ranks/{name}" for name in ("step_ms_min", "step_ms_median", "step_ms_max")}
EPOCH_TAGS |= {"running/loss", "running/accuracy", "speed/running_samples_per_s"}
EPOCH_TAGS |= {"ranks/unequal_weights"}
EPOCH_TAGS |= {"memory/gpu_mib" if on_cards.ON else "ranks/all_reduce_share"}
EVENT_TAGS = {f"norm_{kind}/{layer}" for kind in ("gradients", "weights") for layer in "13"}
EVENT_TAGS |= {"(objective)/accuracy/val"}
"""In the event file alone."""
END_TAGS = {"loss/test", "accuracy/test"}


def test_digits_train_on_all_cards_or_two_workers_out_of_the_box(tmp_path: Path) -> None:
    done = ended(start_cold(cwd=tmp_path))  # a warm one has as many GPUs as a CPU has workers
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "completed"
    cards = [*on_cards.MACHINE.gpus]
    assert (result["world_size"], result["backend"]) == (len(cards) or 2, on_cards.BACKEND)
    assert result["devices"] == cards
    accuracy = result["metrics"]["accuracy/val"]
    assert result["best"]["value"] == result["objective"]["value"] >= accuracy >= 0.95
    assert result["first_step_s"] > 0
    assert len(result["epoch_s"]) == 10
    kept = {path.name for path in (folder / "checkpoints").glob("*.safetensors")}
    assert kept == {"last.safetensors", "last-1.safetensors", "best.safetensors"}
    assert f"tensorboard --logdir {folder.parent.relative_to(tmp_path)}\n" in done.stdout
    assert (folder / ".hydra" / "config.yaml").exists()


def test_one_event_file_holds_every_tag_at_the_right_steps(trained: Trained) -> None:
    few = ("epochs=3", "log_every=8", "dataset.train_limit=640")
    done = trained(*few, name="an expérience, № 7")
    assert len(list(done.folder.rglob("events.out.tfevents.*"))) == 1
    events = EventAccumulator(str(done.folder)).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == EPOCH_TAGS | END_TAGS | EVENT_TAGS
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in tags}
    for tag in ("loss/val", "speed/epoch_s", "loss/train", "accuracy/train"):
        assert steps[tag] == [10, 20, 30]
    for tag in ("running/loss", "running/accuracy", "speed/running_samples_per_s"):
        assert steps[tag] == [8, 16, 24]
    assert steps["lr"] == [8, 10, 16, 20, 24, 30]
    assert steps["accuracy/test"] == [30]
    for tag in tags - EVENT_TAGS:
        points = [(each.step, pytest.approx(each.value, rel=1e-6)) for each in events.Scalars(tag)]
        assert list[object](done.curve(tag)) == points
        assert done.result["metrics"][tag] == points[-1][1], tag


@pytest.mark.slow
def test_script_needs_no_main_guard_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, expt\n"
        "result = expt.run('max_steps=2')\n"
        "assert not {name for name in sys.modules if name.partition('.')[0] == 'torch'}\n"
        "print('folder:', result.folder)\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("folder:")) == (0, 1), done.stderr


def test_two_runs_of_the_same_second_get_two_folders_and_two_ports(tmp_path: Path) -> None:
    # Both folders are claimed under one name, as if the clock had not moved.
    same = "hydra.run.dir=${unused_folder:outputs/same}"
    both = [start("max_steps=2", same, cwd=tmp_path) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    results = [
        json.loads(path.read_text()) for path in (tmp_path / "outputs").glob("same*/result.json")
    ]
    assert [result["status"] for result in results] == ["completed"] * 2
    assert len({result["master_port"] for result in results}) == 2


def test_debug_trains_in_this_process(tmp_path: Path) -> None:
    own = own_model(tmp_path, "print('pid', os.getpid())", "here")
    process = start("debug=true", "epochs=1", *own, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"pid {process.pid}" in out
    assert "\nepoch 1/1  step 20/20  loss " in out


UNUSED = """
import torch
class Net(torch.nn.Module):
    def __init__(self, *, channels, image_size, num_classes, calls):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(64, num_classes), torch.nn.Linear(64, num_classes)
        self.calls = calls
    def forward(self, images):
        self.calls -= 1
        rest = self.idle(images.flatten(1)) if self.calls >= 0 else 0
        return self.used(images.flatten(1)) + rest
"""


SLOW_PARTS = pytest.param(5, 2, marks=pytest.mark.slow)


@pytest.mark.parametrize(("calls", "parts"), [(0, 1), (4, 1), SLOW_PARTS])
def test_parameters_without_gradient_are_named(calls: int, parts: int, tmp_path: Path) -> None:
    """Name them in the step itself, which DistributedDataParallel does a step late, or never."""
    (tmp_path / "idle.py").write_text(UNUSED)
    own = ("+model._target_=idle.Net", f"+model.calls={calls}", "~model.hidden", "~model.dropout")
    done = run(*own, "max_steps=5", f"gradient_accumulation={parts}", cwd=tmp_path)
    assert done.returncode == 2
    assert "idle.weight, idle.bias" in done.stderr
    assert "ddp.find_unused_parameters=true" in done.stderr
    assert "Traceback" not in done.stderr
    if not calls:
        whole = run(*own, "max_steps=5", "ddp.find_unused_parameters=true", cwd=tmp_path)
        assert whole.returncode == 0, whole.stderr


def by_torchrun(*words: str, cwd: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two workers in the surroundings that torchrun gives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    workers = [
        start(*words, cwd=cwd, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", **common)
        for rank in "01"
    ]
    return [ended(worker) for worker in workers]


def test_torchruns_workers_share_one_run_folder(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, *, channels, image_size, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 12))\n"
    )
    own = ("+model._target_=wide.Net", "~model.hidden", "~model.dropout")
    workers = by_torchrun("max_steps=2", *own, cwd=tmp_path)
    assert [done.returncode for done in workers] == [0, 0], workers
    out, err = (
        "".join(texts) for texts in zip(*((w.stdout, w.stderr) for w in workers), strict=True)
    )
    (folder,) = (tmp_path / "outputs").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["world_size"]) == ("completed", 2)
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1
    assert out.count("run folder") == 1
    told = "model._target_=wide.Net: gives 12 outputs for each sample"
    assert err.count(f"warning: [rank 0] {told}") == 1, "in the terminal"
    assert (folder / "logs/0/0/stderr.log").read_text().count(told) == 1, "not again in the log"


@pytest.mark.cpu("the GPUs are simulated")
def test_data_parallel_in_one_process(tmp_path: Path) -> None:
    done = run("strategy=dp", "gpus=2", "epochs=1", cwd=tmp_path, EXPT_SIMULATED_GPUS="2")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "outputs").glob("*/*/result.json")
    result = json.loads(path.read_text())
    assert (result["world_size"], result["devices"]) == (1, ["0", "1"])


OF_A_SET = """
import torch
class Cities(torch.utils.data.Dataset):
    def __init__(self, train):
        names = {f"city {number}" for number in range(64)}
        self.numbers = {name: number for number, name in enumerate(names)}
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.eye(64)[index], self.numbers[f"city {index}"]
"""


@pytest.mark.slow
def test_the_order_of_a_set_is_that_of_the_command_before(tmp_path: Path) -> None:
    """Python's hash of a text is another one in each process, unless it is told not to."""
    (tmp_path / "cities.py").write_text(OF_A_SET)
    words = "~dataset +dataset._target_=cities.Cities +dataset.num_classes=64 model=mlp epochs=1"
    words += " batch_size=16"
    for name in ("one", "two"):
        begun = start_cold(*as_typed(words), f"hydra.run.dir={name}", cwd=tmp_path)
        _, errors = begun.communicate()
        assert begun.returncode == 0, errors
    assert RunFolder(tmp_path / "one").points == RunFolder(tmp_path / "two").points
