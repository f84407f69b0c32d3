"""One run's workers: start them, poll them, stop them, and say what went wrong. The driver's side."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, Std, start_processes

from expt import provenance, record, resume, signals, worker
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.paths import RunPaths
from expt.schema import RunConfig

LOOPBACK = "127.0.0.1"
GRACE_S = 0.3
"""After a worker's end, how long its peers get to end by themselves, so that their exit codes can be compared."""

# They report each stopped process; what a person needs is in the one error at the end.
for _name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class RunLogs(LogsSpecs):
    """torch elastic's log files, at the places that RunPaths names."""

    def __init__(self, paths: RunPaths, attempt: int) -> None:
        super().__init__(str(paths.logs(attempt)), redirects=Std.ALL)
        self._paths, self._attempt = paths, attempt

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create each rank's folder and name its files."""
        paths, attempt = self._paths, self._attempt
        for rank, env in envs.items():
            paths.stdout(attempt, rank).parent.mkdir(parents=True)
            env["TORCHELASTIC_ERROR_FILE"] = str(paths.error(attempt, rank))
        return LogsDest(
            stdouts={rank: str(paths.stdout(attempt, rank)) for rank in envs},
            stderrs={rank: str(paths.stderr(attempt, rank)) for rank in envs},
            error_files={rank: str(paths.error(attempt, rank)) for rank in envs},
        )

    @property
    def root_log_dir(self) -> str:
        """The attempt's folder."""
        return str(self._root_log_dir)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is to be started: what, where, and for whom."""

    config: RunConfig
    paths: RunPaths
    devices: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; none is the CPU."""
    started: float
    """When the command was typed, or the run's turn came [seconds since the epoch]."""
    attempt: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """More for result.json: the run's name, identity and overrides."""


@dataclass
class Workers:
    """The live workers of one run."""

    paths: RunPaths
    attempt: int
    context: PContext
    processes: list[BaseProcess]
    store: TCPStore | None = field(repr=False)

    def poll(self) -> bool:
        """Whether all have completed. Raises the failure, with everything stopped, once one has failed."""
        # A worker waits for the context before it exits: one that is gone before has failed, whatever its code.
        if any(process.exitcode is not None for process in self.processes):
            wait_for_all([process.sentinel for process in self.processes], GRACE_S)
            codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
            self.stop(signal.SIGKILL)
            raise self._failure(codes)
        done = self.context.wait(0)
        if done is not None and done.is_failed():  # since the line above; the context has stopped the others
            raise self._failure({rank: failure.exitcode for rank, failure in done.failures.items()})
        status = record.read_result(self.paths).get("status") if done is not None else record.COMPLETED
        if status == record.INTERRUPTED:
            raise Interrupted("interrupted, and saved")
        if status != record.COMPLETED:
            raise RunFailed(f"the workers ended without a result; see {self.paths.logs(self.attempt)}")
        return done is not None

    def ask_to_stop(self) -> None:
        """Let all of them finish the step, save, and end."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.pid and process.exitcode is None:
                    os.kill(process.pid, signals.ASK_WORKER)

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: int = 5) -> None:
        """End all of them: by `how`, and by SIGKILL after `timeout_s`."""
        self.context.close(how, timeout_s)

    def _failure(self, codes: Mapping[int, int | None]) -> ExptError:
        """The first failure in words, with its traceback if it left one, and where its log is; exit codes by rank."""
        rank = self._first_failed(codes)
        who, log = f"rank {rank} of {len(self.processes)}", f"log: {self.paths.stderr(self.attempt, rank)}"
        raised = self._raised(rank)
        if raised is not None and raised.exit_code == ConfigError.exit_code:
            return ConfigError(raised.text)
        if raised is not None and raised.expected:
            return RunFailed(f"{who}: {raised.text}\n{log}")
        if raised is not None:
            return RunFailed(f"{who} raised\n\n{raised.traceback.rstrip()}\n\n{log}")
        code = codes[rank]
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return RunFailed(f"{who} was killed by {signal.Signals(-code).name}{hint}\n{log}")
        return RunFailed(f"{who} exited with code {code} before it had completed\n{log}")

    def _first_failed(self, codes: Mapping[int, int | None]) -> int:
        """A rank that vanished comes first, for the errors of the others may follow from that; then the earliest."""
        ended = [rank for rank, code in codes.items() if code is not None]
        raised = {rank: found.time_ns for rank in ended if (found := self._raised(rank))}
        vanished = [rank for rank in ended if rank not in raised]
        return vanished[0] if vanished else min(raised, key=lambda rank: raised[rank])

    def _raised(self, rank: int) -> record.Raised | None:
        return record.read_error(self.paths.error(self.attempt, rank))


def start(launch: Launch, env: Mapping[str, str]) -> Workers:
    """Start the run's workers with `env` added to their environment, and return at once."""
    config, paths, size = launch.config, launch.paths, launch.config.world_size
    store, port = _held_store() if size > 1 else (None, None)
    source = begin_record(launch, port)
    envs = {rank: {**env, **_environment(rank, size, port, launch)} for rank in range(size)}
    with _signals_held(), _without_main():
        context = start_processes(
            name="expt",
            entrypoint=worker.main,
            args=dict.fromkeys(range(size), (config, paths, launch.started, source)),
            envs=envs,
            logs_specs=RunLogs(paths, launch.attempt),
            start_method="forkserver",
        )
    by_pid = {process.pid: process for process in multiprocessing.active_children()}
    processes = [by_pid[pid] for _, pid in sorted(context.pids().items())]
    return Workers(paths, launch.attempt, context, processes, store)


def begin_record(launch: Launch, port: int | None = None) -> Path | None:
    """Write the first result.json of a run or of its next attempt; returns the checkpoint that it goes on from.

    Raises ConfigError if its folder holds another run, or the checkpoint is another's.
    """
    config = launch.config
    again = launch.attempt > 0 or config.resume == "auto"
    source = resume.find(config, launch.paths, again=again)
    fields = {
        "started": launch.started,
        "world_size": config.world_size,
        "local_world_size": config.world_size,
        "node": socket.gethostname(),
        "hosts": [{"name": socket.gethostname(), "ranks": list(range(config.world_size))}],
        "backend": config.backend if config.world_size > 1 else None,
        "devices": list(launch.devices),
        "master_port": port,
        "attempts": launch.attempt + 1,
        **launch.about,
        **provenance.describe(),
    }
    if again and source is None:
        launch.paths.clear_for_next_attempt()
    try:
        record.create_result(launch.paths, again=again, **fields)
    except FileExistsError:
        raise ConfigError(f"hydra.run.dir={launch.paths.folder}: holds a run already; choose another folder") from None
    if source is not None:
        record.update_result(launch.paths, **resume.adopt(source, launch.paths))
    return source


def end_record(paths: RunPaths, error: BaseException) -> None:
    """Say in result.json that the run has failed, or was interrupted."""
    interrupted = isinstance(error, KeyboardInterrupt | Interrupted)
    status = record.INTERRUPTED if interrupted else record.FAILED
    record.update_result(paths, status=status, error=str(error) or "interrupted by a person")


def wait_for_all(sentinels: Sequence[int], timeout_s: float) -> None:
    """Return when every process is gone or the time is up."""
    left, end = set(sentinels), time.monotonic() + timeout_s
    while left and (remaining := end - time.monotonic()) > 0:
        left -= {ready for ready in wait(left, remaining) if isinstance(ready, int)}


def _held_store() -> tuple[TCPStore, int]:
    """A store on a port that is ours from the start, and that nobody outside this machine can reach."""
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    # Given an address alone, TCPStore would listen on all of them.
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _environment(rank: int, size: int, port: int | None, launch: Launch) -> dict[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "CUDA_VISIBLE_DEVICES": ",".join(launch.devices),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # lets cuBLAS be deterministic
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
    }
    if port is not None:
        loopback_interface = "lo0" if sys.platform == "darwin" else "lo"
        env |= {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": loopback_interface,
        }
    return env


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Keep the driver's own signal handlers: elastic installs others, and never puts the old ones back."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running a person's script again in each worker: nothing there is needed."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
