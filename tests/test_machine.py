"""What this machine offers, as CUDA_VISIBLE_DEVICES and the affinity of this process leave it."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from expt import gpus, machine
from expt.command import doctor
from expt.config.auto import fill_auto
from expt.worker import build
from tests.facade import Capture, Patch
from tests.ranks import worker_of

ALL = ("0", "1", "2", "3")


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: Patch) -> Iterator[None]:
    for name in ("CUDA_VISIBLE_DEVICES", gpus.SIMULATED_GPUS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "_gpus", lambda: [(f"GPU-{number}", "") for number in ALL])
    _ask_anew()
    yield
    _ask_anew()


def _ask_anew() -> None:
    for cached in (gpus._torch_is_for, gpus._gpus_of_torch, gpus.note_unused):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("visible", "expected", "misnamed"),
    [
        ("", (), False),
        ("-1", (), False),
        ("2", ("2",), False),
        ("3,1", ("3", "1"), False),
        ("0,", ("0",), False),
        (" 0 , 2 ", ("0", "2"), False),
        ("3,2,1,0,9", ("3", "2", "1", "0"), False),
        ("0,-1,1", ("0",), False),
        ("GPU-3,GPU-1", ("GPU-3", "GPU-1"), False),
        ("MIG-4f1a,MIG-4f1b", ("MIG-4f1a", "MIG-4f1b"), False),
        ("9", (), True),
        ("0,9,1", ("0",), True),
        ("0,0,1", ("0",), True),
        ("1,,2", ("1",), True),
        (",0", (), True),
        ("0 1", ("0",), True),
        ("1;2", ("1",), True),
        ("0x1,2", ("0", "2"), True),
        ("01,+2,3gpu", ("1", "2", "3"), True),
        ("+", (), True),
        ("\u0967", (), True),  # a digit, of another script
        ("NoDevFiles", (), True),
        ("GPU-3,MIG-4f1a", ("GPU-3",), True),
        ("MIG-4f1a,MIG-4f1a", ("MIG-4f1a",), True),
        ("GPU-deadbeef,0", (), True),
        ("GPU-", (), True),
        ("1,GPU-1", ("1",), True),
        ("GPU-1,1", ("GPU-1",), True),
    ],
)
def test_cuda_visible_devices(
    monkeypatch: Patch, visible: str, expected: tuple[str, ...], misnamed: bool
) -> None:
    assert gpus.visible().gpus == ALL
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.detect()
    assert (found.gpus, found.misnamed) == (expected, misnamed)
    is_hidden = f"CUDA_VISIBLE_DEVICES={visible} shows" in found.hidden
    assert is_hidden == (len(expected) < len(ALL))


def test_without_nvml_a_uuid_is_taken_as_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpus, "_gpus", lambda: [("0000:c1:00", ""), ("0000:c2:00", "")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-8932f937")
    assert gpus.visible().gpus == ("GPU-8932f937",)


def test_a_name_does_not_make_a_gpu_where_there_is_none(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpus, "_gpus", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,0")
    assert gpus.visible().gpus == ()


def test_the_driver_is_asked_for_its_gpus(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    assert len(gpus._gpus()) >= 0


def test_simulated_gpus_are_told_apart(monkeypatch: Patch) -> None:
    assert not machine.detect().simulated
    monkeypatch.setenv(gpus.SIMULATED_GPUS, "2")
    found = machine.detect()
    assert (found.gpus, found.simulated) == (("0", "1"), True)


def test_the_affinity_of_this_process_limits_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= machine.usable_cpus() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.usable_cpus() == machine.detect().cpus == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, False), ({"RANK": "0"}, False), ({"RANK": "0", "WORLD_SIZE": "2"}, True)],
    ids=["none", "rank alone", "both"],
)
def test_foreign_worker(monkeypatch: Patch, variables: dict[str, str], expected: bool) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.is_external_worker() is expected


@pytest.mark.parametrize("mask", [0o022, 0o000, 0o077])
def test_the_umask_is_read_and_stays(mask: int) -> None:
    before = os.umask(mask)
    try:
        assert (machine.umask(), os.umask(mask)) == (mask, mask)
    finally:
        os.umask(before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_reading_the_umask_does_not_set_it(monkeypatch: Patch) -> None:
    """Another thread may be creating a file at that moment."""
    monkeypatch.setattr(os, "umask", lambda new: pytest.fail("the umask was set"))
    machine.umask()


def test_the_umask_is_as_before_after_the_last_of_several_threads() -> None:
    before = os.umask(0)
    try:
        first, second = machine.not_world_writable(), machine.not_world_writable()
        for context in (first, second):
            context.__enter__()
        first.__exit__(None, None, None)
        assert machine.umask() == 0o002
        second.__exit__(None, None, None)
        assert machine.umask() == 0
    finally:
        os.umask(before)


def test_workers_of_another_launcher_are_counted(monkeypatch: Patch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    found = machine.detect()
    assert (found.workers, found.local_workers) == (8, 4)
    monkeypatch.delenv("RANK")
    assert (machine.detect().workers, machine.detect().local_workers) == (None, None)


def test_a_quota_counts_like_cores(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for quota, expected in (
        ("max 100000", 16),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 16),
    ):
        monkeypatch.setattr(Path, "read_text", lambda _, quota=quota: quota)
        assert machine.usable_cpus() == expected


TASK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("more", "own_cpus", "own_gpus"),
    [
        ({"SLURM_CPUS_ON_NODE": "16"}, True, False),
        ({"SLURM_CPUS_ON_NODE": "8"}, False, False),  # bound to none
        ({"SLURM_CPUS_ON_NODE": "16", "TORCHELASTIC_RUN_ID": "a"}, False, False),  # shared
        ({"CUDA_VISIBLE_DEVICES": "3"}, False, True),  # --gpus-per-task=1, --gpu-bind=single:1, ...
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, False, True),
        ({"SLURM_GPUS_PER_TASK": "1"}, False, False),  # --gpu-bind=none
        ({"CUDA_VISIBLE_DEVICES": ""}, False, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "a"}, False, False),
    ],
)
def test_what_slurm_has_bound_to_a_task(
    monkeypatch: Patch, more: dict[str, str], own_cpus: bool, own_gpus: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, value in {**TASK, **more}.items():
        monkeypatch.setenv(name, value)
    found = machine.detect()
    assert (found.own_cpus, found.own_gpus) == (own_cpus, own_gpus)


def test_a_gpu_has_one_uuid_whatever_it_is_called(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpus, "_gpus", lambda: [("GPU-11aa", "A"), ("GPU-22bb", "B")])
    called = ("1", "GPU-22", "GPU-22bb", "MIG-5", "7")
    assert [gpus.gpu_uuid(name) for name in called] == ["GPU-22bb"] * 3 + ["MIG-5", "7"]
    assert gpus.gpu_names() == ["A", "B"]


def test_a_gpu_that_has_dropped_out_is_still_counted(monkeypatch: Patch) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.undo()
    monkeypatch.setattr(gpus, "_nvml", contextlib.nullcontext)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: f"GPU-{index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda index: f"name {index}")
    assert gpus._gpus() == [("0", "unknown"), ("GPU-1", "name 1")]


def test_energy_is_of_the_gpus_that_compute(monkeypatch: Patch) -> None:
    def handle(uuid: bytes | str) -> str:
        if uuid not in joules:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return str(uuid)

    joules = {"GPU-11aa": 1.0, "GPU-22bb": 2.0}
    monkeypatch.setattr(gpus, "_gpus", lambda: [(uuid, "") for uuid in joules])
    monkeypatch.setattr(gpus, "_nvml", contextlib.nullcontext)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", [*joules].__getitem__)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda uuid: 1000 * joules[uuid]
    )
    assert gpus.energy_j(["0"]) == 1.0
    assert gpus.energy_j(["GPU-11", "GPU-22bb"]) == 3.0, "abbreviated, as CUDA takes it"
    monkeypatch.setenv(gpus.SIMULATED_GPUS, "2")
    assert gpus.energy_j(["0"]) is None


@pytest.mark.parametrize(
    ("version", "driver", "asks"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", True, True),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", False, False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.4'", True, True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", True, False),
    ],
    ids=["CUDA", "CUDA without a driver", "ROCm", "a CPU's torch"],
)
def test_torch_is_asked_for_gpus_only_where_it_may_have_some(
    monkeypatch: Patch, tmp_path: Path, version: str, driver: bool, asks: bool
) -> None:
    asked = list[dict[str, str]]()

    def run(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
        asked.append(env)
        return SimpleNamespace(stdout="0000:c1:00 AMD Instinct MI300X\n")

    monkeypatch.undo()
    _without_nvml(monkeypatch, tmp_path, version)
    absent = partial(os.stat, tmp_path / "absent")
    drivers = dict.fromkeys(gpus._DRIVERS, tmp_path.stat if driver else absent)
    monkeypatch.setattr(gpus, "_DRIVERS", drivers)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus.visible().gpus == ("0",) * asks
    assert gpus.gpu_uuid("0") == ("0000:c1:00" if asks else "0")
    assert gpus.energy_j(["0"]) is None
    assert len(asked) == asks  # once
    assert not {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & {*chain(*asked)}


def test_intel_torch_uses_the_cpu(monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.undo()
    _without_nvml(monkeypatch, tmp_path, "hip: Optional[str] = None\nxpu: Optional[str] = '20250'")
    for number in (0, "auto", "auto"):
        assert fill_auto({"gpus": number}, machine.detect())["gpus"] == 0
    assert capsys.readouterr().err.count("Intel") == 1


def _without_nvml(monkeypatch: Patch, folder: Path, version: str) -> None:
    def no_nvml() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    (folder / "version.py").write_text(version)
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(pynvml, "nvmlInit", no_nvml)


def test_the_daemon_of_mps(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not gpus.mps_runs()
    program = tmp_path / gpus.MPS_DAEMON
    program.symlink_to(shutil.which("cat") or "/bin/cat")
    daemon = subprocess.Popen(
        [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    try:
        daemon.stdin.write(b"it runs\n")
        daemon.stdout.readline()
        file = tmp_path / f"{gpus.MPS_DAEMON}.pid"
        file.write_text(f"{daemon.pid}\n")
        assert gpus.mps_runs()
        assert doctor._mps().outcome == "pass"
        file.write_text(str(os.getpid()))
        assert not gpus.mps_runs(), "the number is another program's by now"
        file.write_text(f"{daemon.pid}\n")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "other"))
        assert not gpus.mps_runs(), "it is for programs of another environment"
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    finally:
        daemon.kill()
        daemon.communicate()
    assert not gpus.mps_runs(), "it was killed, and has left its file"
    found = doctor._mps()
    assert found.outcome == "note"
    assert found.fix == "to let them run at the same time: nvidia-cuda-mps-control -d"


@pytest.mark.parametrize(
    ("cpuinfo", "slow", "fp16"),
    [
        ("flags : fpu avx2 sha_ni", True, False),  # Zen 3
        ("flags : avx512f avx512_bf16", False, False),
        ("flags : amx_bf16 amx_fp16 avx512_fp16", False, True),
        ("Features : fp asimd bf16", False, False),  # ARM
        ("Features : fp asimd", True, False),
        ("", False, False),  # nothing is known
    ],
)
def test_cpu_with_short_floats(cpuinfo: str, slow: bool, fp16: bool, monkeypatch: Patch) -> None:
    text = f"processor : 0\n{cpuinfo}\n\nprocessor : 1\nflags : bf16\n"
    monkeypatch.setattr(Path, "read_text", lambda _, encoding=None: text)
    assert machine.slow_in_bfloat16() == slow
    assert machine.detect().cpu_fp16 == fp16


@pytest.mark.parametrize("amp", [True, False, "bf16"])
def test_slow_bfloat16_is_reported_once(amp: Any, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(machine, "_cpu_flags", lambda: ["avx2"])
    config: Any = SimpleNamespace(
        amp=amp, gradient_clip=None, gradient_clip_value=None, on_nan="stop", optimizer=None,
        patches=SimpleNamespace(backward=False),
    )  # fmt: skip
    for rank in range(2):
        build._precision(config, worker_of(rank, 2))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition("=")[0] for line in said] == [" amp"] * bool(amp)
