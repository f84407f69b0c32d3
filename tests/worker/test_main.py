"""Where a worker computes: on the GPUs that were asked for, or not at all."""

import dataclasses
import importlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from expt import gpus
from expt.config.parse import parse
from expt.errors import ConfigError, DeviceLost
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.training import devices, random_state
from expt.training.precision import Autocast, Precision, precision_kept, set_precision
from expt.worker import main
from expt.worker.build import in_turn, lock_of
from tests.composing import composed
from tests.conftest import Configured
from tests.facade import Patch, RunFolder, as_typed, python, request_of, run
from tests.models.test_named import fetched
from tests.worker.conftest import ALONE as ONE
from tests.worker.test_build import WORDS

ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def _alone(monkeypatch: Patch) -> None:
    monkeypatch.delenv(gpus.SIMULATED_GPUS, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_alone")
def test_who_asked_for_a_gpu_does_not_train_on_the_cpu(tmp_path: Path, monkeypatch: Patch) -> None:
    """As under a driver that is too old for this torch."""
    config = parse(composed("gpus=1"), Machine(gpus=("0",), cpus=2))
    worker = main.worker_of_environment(config)
    assert worker.device == torch.device("cuda", 0)

    def no_driver() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    def without_cuda() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(DeviceLost, match=r"The NVIDIA driver .* too old \(found version 11040\)$"):
        main.run_as(worker, request_of(config, tmp_path))
    monkeypatch.setattr(torch.cuda, "init", without_cuda)
    with pytest.raises(ConfigError, match=r"^Torch not compiled with CUDA enabled; "):
        main.run_as(worker, request_of(config, tmp_path))
    monkeypatch.setenv(gpus.SIMULATED_GPUS, "1")
    assert main.worker_of_environment(config).device == torch.device("cpu")


def test_a_gpu_that_cuda_does_not_show_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8, 8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(gpus, "_gpus", lambda: [(f"GPU-{index}", "") for index in range(8)])
    with devices.in_use([0]), pytest.raises(DeviceLost) as lost, devices.in_use([0, 1]):
        pass
    assert [*lost.value.gpus] == ["6"]
    assert "GPU 6" in str(lost.value)


@pytest.mark.usefixtures("_alone")
def test_dp_has_all_gpus_that_were_named() -> None:
    """With debug=true they are those of the whole machine."""
    config = parse(
        composed("gpus=[1,3]", "strategy=dp", "debug=true"), Machine(gpus=tuple("0123"), cpus=2)
    )
    assert main.worker_of_environment(config).gpus == (1, 3)


def test_a_forked_process_may_use_cuda_where_its_parent_has_not(tmp_path: Path) -> None:
    """As each worker is one of the forkserver's."""
    done = python(
        "import expt.worker.main, torch; print(torch.cuda._is_in_bad_fork())", cwd=tmp_path
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("precision", "tf32"), [("highest", False), ("high", True), ("medium", True)]
)
def test_convolutions_compute_as_products_do(precision: str, tf32: bool) -> None:
    def now() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = now()
    with precision_kept():
        set_precision(precision)
        assert now() == (precision, tf32)
    assert now() == before


def test_nccl_gives_up_after_the_watchdog_and_gloo_before(configured: Configured) -> None:
    gloo = configured("gpus=0", "world_size=2", "timeout_s=60")
    nccl = parse(composed("gpus=2", "timeout_s=60"), Machine(gpus=("0", "1"), cpus=2))
    assert (nccl.backend, main._patience_s(gloo), main._patience_s(nccl)) == ("nccl", 65, 60)


class Product(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_a_replica_computes_in_the_type_of_the_run() -> None:
    """Use the run's type in threads too, where torch opens autocast without one."""
    module = Product()
    precision, found = Precision("fp16", torch.device("cpu")), list[torch.dtype]()
    within = Autocast(module, precision.autocast)
    copied = within._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def as_torch_does(subject: nn.Module) -> None:
        with torch.amp.autocast("cpu", enabled=True):
            found.append(subject(torch.ones(2, 2)).dtype)

    for subject in (copied, module):
        thread = threading.Thread(target=as_torch_does, args=(subject,))
        thread.start()
        thread.join()
    assert found == [torch.float16, torch.bfloat16]


@pytest.mark.slow
def test_resume_without_weights(tmp_path: Path, monkeypatch: Patch, configured: Configured) -> None:
    """They would be fetched once more, on a machine that may not have them, and be overwritten."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    models: Any = importlib.import_module("torchvision.models")
    torch.save(models.get_model("squeezenet1_1").state_dict(), file := fetched(tmp_path))
    images = as_typed(
        "dataset=synthetic dataset.train_size=32 dataset.test_size=8 dataset.image_size=[32,32]"
    )
    model = (
        *as_typed("model=torchvision model.arch=squeezenet1_1 model.pretrained=true"),
        *as_typed("batch_size=8"),
    )
    threads = f"threads={torch.get_num_threads()}"
    words = (*images, *model, "patches.malloc=false", threads)
    config, paths = configured(*words, "max_steps=2"), RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    assert main.run_as(ONE, request_of(config, paths.folder)) == "completed"
    file.unlink()
    longer = configured(*words, "max_steps=3")
    assert main.run_as(ONE, request_of(longer, paths.folder), paths.last) == "completed"
    assert RunFolder(paths.folder).result["steps"] == 3
    with pytest.raises(
        ConfigError,
        match=r"^model\.pretrained=true: the weights of squeezenet1_1 can't be fetched \(",
    ):
        main.run_as(ONE, request_of(longer, tmp_path / "other"))


def test_cublas_is_deterministic_unless_a_person_has_set_its_workspace(monkeypatch: Patch) -> None:
    name, cpu = "CUBLAS_WORKSPACE_CONFIG", torch.device("cpu")
    monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.delenv(name)
    random_state.set_determinism(False, cpu)
    assert os.environ[name] == ":4096:8"
    monkeypatch.setenv(name, ":16:8")
    random_state.set_determinism(False, cpu)
    assert os.environ[name] == ":16:8"


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
        with in_turn(config, ONE):
            entered.set()

    lock = lock_of(config.dataset.label)
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
    with in_turn(config, dataclasses.replace(ONE, beat=beats.set)):
        assert beats.wait(10)
    beats.clear()
    assert not [one for one in threading.enumerate() if one.name == "construction"]


def test_unwritable_cache(tmp_path: Path, monkeypatch: Patch, configured: Configured) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "file"))
    with in_turn(configured(*WORDS), ONE):
        pass
