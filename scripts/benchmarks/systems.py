"""How each system is started for one training, and what it says of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.memory import Peak, Sampler

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("plain", "lightning", "accelerate")
TIMEOUT_S = 3600
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be trained; the same for every system."""

    model: str
    data: Path
    batch_size: int = 64
    epochs: int = 1
    max_steps: int = 0
    workers: int = 2
    gpus: int = 0
    amp: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training took."""

    epoch_s: list[float]
    first_step_s: float
    """since its process was started"""
    wall_s: float
    peak: Peak = field(default_factory=Peak)


class System:
    """A way to train: `expt`, or one of PEERS with the interpreter `python`."""

    def __init__(self, name: str, python: str, *, overrides: Sequence[str] = ()) -> None:
        self.name, self._python, self.overrides = name, python, overrides

    def train(self, training: Training, *, watch_memory: bool = False) -> Outcome:
        """Train once, from a new process to its end.

        Raises CalledProcessError with what it printed if it fails.
        """
        train = self._train_ours if self.name == "expt" else self._train_peer
        return train(training, watch_memory)

    def _train_ours(self, training: Training, watch_memory: bool) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            command = [*expt_command(training), f"hydra.run.dir={folder}/run", *self.overrides]
            output = start(command, watch_memory=watch_memory)
            result = json.loads((Path(folder) / "run" / "result.json").read_text())
        first_step_s = result["started"] + result["first_step_s"] - began
        return Outcome(
            epoch_s=result["epoch_s"],
            first_step_s=first_step_s,
            wall_s=output.wall_s,
            peak=output.peak,
        )

    def _train_peer(self, training: Training, watch_memory: bool) -> Outcome:
        variables = {
            "BASELINE_T0": str(time.time()),
            "MASTER_PORT": str(free_port()),
            # Without it, Accelerate started by torchrun trains one process where there is no GPU.
            "ACCELERATE_USE_CPU": str(training.gpus == 0).lower(),
        }
        output = start(
            self._peer_command(training),
            watch_memory=watch_memory,
            root_trains=self.name == "lightning",
            **variables,
        )
        result = json.loads(
            next(line for line in output.text.splitlines() if line.startswith('{"system"'))
        )
        if result["workers"] != training.workers:
            raise RuntimeError(
                f"{self.name}: trained with {result['workers']} workers, not {training.workers}"
            )
        return Outcome(
            epoch_s=result["epoch_s"],
            first_step_s=result["first_step_s"],
            wall_s=output.wall_s,
            peak=output.peak,
        )

    def _peer_command(self, training: Training) -> list[str]:
        module = ["-m", f"scripts.baselines.{self.name}_ddp"]
        arguments = {
            "model": training.model,
            "data": training.data,
            "batch-size": training.batch_size,
            "epochs": training.epochs,
            "max-steps": training.max_steps,
            "workers": training.workers,
            "threads": threads(training.workers),
            "amp": "bf16" if training.amp else "off",
        }
        words = [f"--{name}={value}" for name, value in arguments.items()]
        if self.name == "accelerate":  # its own launcher starts one process where there is no GPU
            launcher = [
                "torch.distributed.run",
                f"--nproc-per-node={training.workers}",
                "--master-addr=127.0.0.1",
            ]
            return [self._python, "-m", *launcher, f"--master-port={free_port()}", *module, *words]
        return [self._python, *module, *words]


@dataclass(frozen=True)
class Output:
    """What a process printed, took and needed."""

    text: str
    wall_s: float
    peak: Peak


def expt_command(training: Training) -> list[str]:
    """Expt's command for `training`, with the optimiser and the data of the peers; evaluates once
    an epoch.
    """
    words = {
        "model": training.model,
        "dataset": "fashion_mnist",
        "dataset.root": training.data,
        "dataset.download": "false",
        "dataset.val_fraction": 0.0,
        "eval_split": "test",
        "objective": "accuracy/test",
        "optimizer": "sgd",
        "optimizer.lr": 0.05,
        "optimizer.momentum": 0.0,
        "batch_size": training.batch_size,
        "drop_last": "false",
        "epochs": training.epochs,
        "max_steps": training.max_steps or "null",
        "gpus": training.gpus,
        "world_size": training.workers,
        "amp": str(training.amp).lower(),
    }
    return [sys.executable, "-m", "expt", *(f"{key}={value}" for key, value in words.items())]


def start(
    command: Sequence[str], *, watch_memory: bool = False, root_trains: bool = False, **extra: str
) -> Output:
    """Run a command to its end, in an environment free of other launchers' words."""
    began = time.time()
    process = subprocess.Popen(
        command, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    sampler = Sampler(process.pid, root_trains=root_trains)
    with sampler if watch_memory else contextlib.nullcontext():
        out, err = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, " ".join(command), out, err)
    return Output(out, time.time() - began, sampler.peak)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without other launchers' words, with the repository on Python's
    path.
    """
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **extra}


def threads(workers: int) -> int:
    """CPU threads of each worker: its share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def num_gpus() -> int:
    """GPUs of this machine, asked without importing torch."""
    command = shutil.which("nvidia-smi")
    if not command or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    listed = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def free_port() -> int:
    """A port of this machine that was free a moment ago, for the systems that want to be given
    one.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
