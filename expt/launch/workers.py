"""One run's workers: start them, poll them, stop them, and say what went wrong. The driver's side."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from expt import machine, signals
from expt.errors import ExptError, Interrupted, RunFailed
from expt.launch import processes as process
from expt.launch.failure import Aftermath
from expt.runs.attempt import Launch, begin_record
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, read_result
from expt.worker.meeting import Meeting

LOOPBACK = "127.0.0.1"
GRACE_S = 0.3
"""After a worker's end, how long its peers get to end by themselves, so that their exit codes can be compared."""
LATE_S = 1.0
"""After a worker has waited in vain, how long the others who wait get to notice."""


@dataclass
class Workers:
    """The live workers of one run."""

    paths: RunPaths
    attempt: int
    timeout_s: float
    processes: list[BaseProcess]

    def poll(self) -> bool:
        """Whether all have completed. Raises the failure, with everything stopped, once one has failed."""
        if any(code not in (None, process.FINISHED) for code in self._exit_codes()):
            process.wait_for_all(self.processes, GRACE_S)
            raise self._failure()
        if any(code is None for code in self._exit_codes()):
            return False
        status = read_result(self.paths).get("status")
        if status == INTERRUPTED:
            raise Interrupted("interrupted, and saved")
        if status != COMPLETED:
            raise RunFailed(f"the workers ended without a result; see {self.paths.logs(self.attempt)}")
        return True

    def ask_to_stop(self) -> None:
        """Let all of them finish the step, save, and end."""
        process.ask(self.processes, signals.ASK_WORKER)

    def stop(self, timeout_s: float = 5) -> None:
        """End all of them, now: what they write is whole at any moment."""
        process.end(self.processes, signal.SIGKILL, timeout_s)

    def _exit_codes(self) -> list[int | None]:
        return [worker.exitcode for worker in self.processes]

    def _failure(self) -> ExptError:
        """The first failure in words. Ends all of them."""
        after = Aftermath(self.paths, self.attempt, self._exit_codes())
        if after.timed_out():
            # Who waited gives up too, from lack of the one that has: who is left then is who was waited for.
            process.wait_for_all(self.processes, LATE_S)
            alive = {rank: worker.pid for rank, worker in enumerate(self.processes) if worker.exitcode is None}
            after.dump_stacks({rank: pid for rank, pid in alive.items() if pid})
        self.stop()
        return after.in_words(self.timeout_s)


def start(launch: Launch, env: Mapping[str, str]) -> Workers:
    """Start the run's workers with `env` added to their environment, and return at once."""
    config = launch.config
    umask = machine.umask()
    together = config.world_size > 1
    # The port is ours from here on, and out of reach for other machines.
    with _held_port() as listener:
        port = listener.getsockname()[1]
        source = begin_record(launch, port if together else None)
        workers = Workers(launch.paths, launch.attempt, config.timeout_s, [])
        try:
            for rank in range(config.world_size):
                meeting = Meeting(port, listener if rank == 0 else None) if together else None
                arguments = (config, launch.paths, launch.started, source, meeting, umask)
                variables = {**env, **_environment(rank, port, launch)}
                workers.processes.append(_start_worker(rank, arguments, launch, variables))
        except BaseException:
            workers.stop()
            raise
    return workers


def _held_port() -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, 0))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise RunFailed(f"no port is free on {LOOPBACK} ({why}); end other runs, or start fewer") from error


def _start_worker(rank: int, arguments: Sequence[Any], launch: Launch, env: Mapping[str, str]) -> BaseProcess:
    stdout, stderr = launch.paths.stdout(launch.attempt, rank), launch.paths.stderr(launch.attempt, rank)
    stdout.parent.mkdir(parents=True)
    return process.start("expt.worker.main:main", arguments, env=env, stdout=stdout, stderr=stderr)


def _environment(rank: int, port: int, launch: Launch) -> dict[str, str]:
    size = str(launch.config.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "CUDA_VISIBLE_DEVICES": ",".join(launch.devices),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # lets cuBLAS be deterministic
        "TORCHELASTIC_ERROR_FILE": str(launch.paths.error(launch.attempt, rank)),
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
    }
