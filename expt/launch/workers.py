"""One run's workers: start them, poll them, stop them, and explain a failure.

The driver's side.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from expt import signals
from expt.errors import (
    RECORDED,
    ConfigError,
    DataError,
    Diverged,
    ExptError,
    Interrupted,
    Killed,
    RunFailed,
    TimedOut,
    WorkersLost,
)
from expt.launch import processes
from expt.launch.forkserver import FINISHED, Kept, Work
from expt.launch.processes import Process
from expt.runs.attempt import Attempt
from expt.runs.failure import LOG, RAISED, Raised, read_error
from expt.runs.paths import RunPaths
from expt.runs.request import Meeting
from expt.runs.result import COMPLETED, INTERRUPTED, PRUNED, read_result
from expt.worker import watchdog

LOOPBACK = "127.0.0.1"
GRACE_S = 0.3
"""The seconds that others get to end after a worker, so that their exit codes can be compared."""
LATE_S = 1.0
"""The seconds that others get to say why, after a worker has waited in vain or lost another."""
NO_SPACE_BYTES = 1_000_000
_UNEQUAL = (
    "workers exchanged tensors of unequal sizes: use drop_last=true if a loss gathers their shares"
    " of a batch, and gather in training_loss only (evaluations are uneven); or else call the same"
)
_NCCL_GAVE_UP = "Watchdog caught collective operation timeout"
_NCCL_ABORTED = (
    _NCCL_GAVE_UP,
    "we are taking the entire process down",
    "watchdog thread terminated with exception",
)
"""Texts that torch writes before it ends a process whose peers are gone or late."""


@dataclass
class Workers:
    """The live workers of one run, as processes of this machine."""

    paths: RunPaths
    attempt: int
    timeout_s: float
    processes: list[Process]
    saves: bool = True
    """True if they save before they end; an evaluation and a preflight have nothing to save."""
    _ended: set[int] = field(default_factory=set)
    """The ranks whose end `poll` has seen, as their sentinels stay ready."""

    @property
    def sentinels(self) -> list[int]:
        """The descriptors to wait for: one is ready when a worker ends, until `poll` sees that."""
        return [
            worker.sentinel for rank, worker in enumerate(self.processes) if rank not in self._ended
        ]

    def poll(self) -> bool:
        """Return whether all have ended, with the run completed or pruned.

        Raises the failure, with everything stopped, once one has failed.
        """
        codes = self._exit_codes()  # once: who fails between two looks would seem to have finished
        if any(code not in (None, FINISHED) for code in codes):
            processes.wait_for_all(self.processes, GRACE_S)
            raise self._failure()
        self._ended = {rank for rank, code in enumerate(codes) if code is not None}
        if len(self._ended) < len(codes):
            return False
        status = read_result(self.paths).get("status")
        if status == INTERRUPTED:
            raise Interrupted("interrupted, and saved")
        if status not in (COMPLETED, PRUNED):
            raise RunFailed(
                f"the workers ended without a result; see {self.paths.logs(self.attempt)}"
            )
        return True

    def ask_to_stop(self) -> None:
        """Let all workers finish the step, save, and end."""
        if self.saves:
            processes.ask(self.processes, signals.ASK_WORKER)
        else:
            self.stop()

    def stop(self) -> None:
        """End all workers now: their files are whole at any moment."""
        processes.kill(self.processes)

    def close(self) -> None:
        """Close the workers' sockets: two descriptors each."""
        for worker in self.processes:
            worker.close()

    def _exit_codes(self) -> list[int | None]:
        return [worker.exitcode for worker in self.processes]

    def _failure(self) -> ExptError:
        if processes.UNKNOWN in self._exit_codes():
            self.stop()
            return WorkersLost(f"{processes.FORKSERVER_KILLED}, and all workers with it")
        after = self._aftermath()
        if after.lost_others():
            processes.wait_for_all(self.processes, LATE_S)
            after = self._aftermath()
        if after.timed_out():
            # Who waited gives up too: who is left then is who was waited for.
            apart_s = 2 * self.timeout_s / watchdog.TICKS if after.was_stuck() else 0.0
            processes.wait_for_all(self.processes, LATE_S + apart_s)
            # As all are under NCCL: who has come the least far was waited for.
            if after.was_stuck():
                after = self._aftermath()
            alive = {rank: one for rank, one in enumerate(self.processes) if one.exitcode is None}
            after.dump_stacks({rank: worker.pid for rank, worker in alive.items()})
        self.stop()
        return after.in_words(self.timeout_s)

    def _aftermath(self) -> Aftermath:
        return Aftermath(self.paths, self.attempt, self._exit_codes())


def start(attempt: Attempt) -> Workers:
    """Start the workers of this attempt at a run, and return at once.

    Raises ConfigError where the folder or the checkpoint is another run's, RunFailed where they
    could not meet.
    """
    request, paths, number = attempt.request, attempt.paths, attempt.number
    size, saves = request.config.world_size, request.instead is None
    sent = replace(request, settings={}, hydra={})  # which workers would import YAML's parser for
    kept = [Kept(attempt.lock.descriptor)] if attempt.lock else []
    # The port is ours from here on, and out of reach for other machines.
    with bind_free_port(reached=size > 1) as listener:
        port = listener.getsockname()[1]
        source = attempt.begin(port if size > 1 else None)
        workers = Workers(paths, number, request.config.timeout_s, [], saves=saves)
        try:
            for rank in range(size):
                meeting = Meeting(port, None if rank else listener) if size > 1 else None
                logs = paths.stdout(number, rank).parent
                for folder in (*reversed(logs.parents[:2]), logs):  # not the run's, if it was moved
                    folder.mkdir(exist_ok=True)
                work = Work(
                    "expt.worker.main:main",
                    (sent, source, meeting),
                    {**request.env, **_environment(attempt, rank, port)},
                    paths.stdout(number, rank),
                    paths.stderr(number, rank),
                    kept,
                    title=f"expt rank {rank}/{size} {paths.folder}",
                    frees_at_end=bool(attempt.devices),
                )
                workers.processes.append(processes.start(work))
        except BaseException:
            workers.stop()
            workers.close()
            raise
    return workers


def bind_free_port(*, reached: bool = True) -> socket.socket:
    """Listen on a free port; raise RunFailed if it can't be `reached`, or none is left."""
    try:
        if reached:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((LOOPBACK, 9))  # no packet leaves
        return socket.create_server((LOOPBACK, 0))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise RunFailed(f"{LOOPBACK}: {why}; the workers meet there, on a free port") from error


def _environment(attempt: Attempt, rank: int, port: int) -> dict[str, str]:
    size = str(attempt.request.config.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # that of NVML and nvidia-smi, by which the devices are numbered
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(attempt.devices),
        "HIP_VISIBLE_DEVICES": ",".join(attempt.devices),  # AMD's
        "TORCHELASTIC_ERROR_FILE": str(attempt.paths.error(attempt.number, rank)),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
    }


class Aftermath:
    """The workers of one attempt after a failure; exit codes by rank, None for those alive."""

    def __init__(self, paths: RunPaths, attempt: int, codes: Sequence[int | None]) -> None:
        self._paths, self._attempt, self._size, self._codes = paths, attempt, len(codes), codes
        self._stacks: dict[int, str] = {}

    def timed_out(self) -> bool:
        """Return whether a worker waited in vain: workers that did not wait are late."""
        rank = self._first_failed()
        if raised := self._raised(rank):
            return raised.kind == TimedOut.__name__
        return _NCCL_GAVE_UP in self._log_of_abort(rank)

    def was_stuck(self) -> bool:
        """Return whether the first worker that failed ended itself for lack of progress."""
        raised = self._raised(self._first_failed())
        return raised is not None and raised.progress is not None

    def lost_others(self) -> bool:
        """Return whether a worker has lost others that have not ended yet: they know why."""
        raised = self._raised(self._first_failed())
        return raised is not None and raised.has_lost_others and None in self._codes

    def dump_stacks(self, late: Mapping[int, int]) -> None:
        """Have the `late` workers, rank to pid, write their stacks to their logs."""
        sizes = {}
        for rank, pid in late.items():
            with contextlib.suppress(OSError):
                sizes[rank] = self._stderr(rank).stat().st_size
                os.kill(pid, signals.DUMP_STACKS)
        for rank, size in sizes.items():
            self._stacks[rank] = watchdog.wait_for_dump(self._stderr(rank), size)

    def in_words(self, timeout_s: float) -> ExptError:
        """Return the first failure, with its traceback if it left one, and its log."""
        if self._stacks:
            return self._late(timeout_s)
        rank = self._first_failed()
        raised = self._raised(rank)
        return self._of_exception(rank, raised) if raised is not None else self._of_exit(rank)

    def _of_exception(self, rank: int, raised: Raised) -> ExptError:
        if raised.is_refusal:
            refusal = DataError if raised.kind == DataError.__name__ else ConfigError
            return refusal(raised.text)
        who, log = self._names(rank)
        every = [found for one in range(self._size) if (found := self._raised(one))]
        gpus = {gpu: fault for found in every for gpu, fault in found.gpus.items()}
        if not raised.expected:
            return RunFailed(f"{who}{RAISED}{raised.traceback.rstrip()}\n\n{log}", gpus=gpus)
        kind = RECORDED.get(raised.kind, RunFailed)
        text = raised.text if kind is Diverged else f"{who}: {raised.text}"  # all say the same
        return kind(f"{text}\n{log}", gpus=gpus)

    def _of_exit(self, rank: int) -> ExptError:
        code = self._codes[rank]
        who, log = self._names(rank)
        if moved := self._paths.moved():  # and the worker's log with it
            return RunFailed(moved)
        if code is None or code >= 0:
            return RunFailed(
                f"{who} exited with code {code} before it had completed{self._disk()}\n{log}"
            )
        hint, is_unequal = self._of_cpp(rank)
        config = read_result(self._paths).get("config", {})
        if is_unequal and (config.get("strategy"), config.get("drop_last")) == ("ddp", False):
            return ConfigError(f"drop_last=false: {who}{hint}\n{log}")
        if -code == signal.SIGKILL:
            hint = " (out of memory?)"
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return Killed(f"{who} was killed by {name}{hint}\n{log}")

    def _names(self, rank: int) -> tuple[str, str]:
        """Return a worker's rank and its log, in words."""
        return f"rank {rank} of {self._size}", f"{LOG}{self._stderr(rank)}"

    def _of_cpp(self, rank: int) -> tuple[str, bool]:
        """Return the text of gloo's exception that ended a worker, and if sizes were unequal."""
        if not (found := re.search(r"what\(\):\s*(.+)", self._log_of_abort(rank))):
            return "", False
        text = f": {found[1][:300]}"
        if "collective mismatch" not in found[1]:
            return text, False
        is_unequal = "size doesn't match" in found[1]
        hint = _UNEQUAL if is_unequal else "workers must call the same"
        hint += " layers in the same order with strategy=fsdp or hsdp, and collectives in own code"
        return f"{text}\n{hint}", is_unequal

    def _late(self, timeout_s: float) -> TimedOut:
        first, *_ = ranks = sorted(self._stacks)
        names = ", ".join(map(str, ranks))
        stack = f"; rank {first} was here\n\n{self._stacks[first]}\n" if self._stacks[first] else ""
        return TimedOut(
            f"rank {names} of {self._size} did not arrive within {timeout_s:g} s (timeout_s), "
            f"where the others waited{stack}\n{LOG}{self._stderr(first)}"
        )

    def _disk(self) -> str:
        folder = self._paths.folder
        there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
        free = shutil.disk_usage(there).free
        if free < NO_SPACE_BYTES:
            return f"; no space is left on the disk of {folder} ({free / 1e6:.1f} MB)"
        return ""

    def _stderr(self, rank: int) -> Path:
        return self._paths.stderr(self._attempt, rank)

    def _first_failed(self) -> int:
        """Return the rank that failed first.

        Bad input comes first, then a rank that vanished, since the errors of others may follow from
        either; then the earliest. Who has lost others comes last, also if NCCL has ended it.
        Of those that got no further it is the one that has begun the fewest collectives.
        """
        left = {rank: found for rank in range(self._size) if (found := self._raised(rank))}
        # whether it has ended yet or not
        if refused := [rank for rank, found in left.items() if found.is_refusal]:
            return min(refused, key=lambda rank: left[rank].time_ns)
        ended = [rank for rank, code in enumerate(self._codes) if code not in (None, FINISHED)]
        raised = {rank: left[rank] for rank in ended if rank in left}
        vanished = [rank for rank in ended if rank not in raised]
        for rank in vanished:
            log = self._log_of_abort(rank)
            if not (raised and any(text in log for text in _NCCL_ABORTED)):
                return rank
        stuck = all(found.progress is not None for found in raised.values())

        def order(rank: int) -> tuple[bool, tuple[int, ...], int]:
            found = raised[rank]
            progress = tuple(found.progress or ()) if stuck else ()
            return found.has_lost_others, progress, found.time_ns

        return min(raised, key=order)

    def _log_of_abort(self, rank: int) -> str:
        log = self._stderr(rank)
        if self._codes[rank] != -signal.SIGABRT or not log.exists():
            return ""
        return log.read_text(errors="replace")

    def _raised(self, rank: int) -> Raised | None:
        return read_error(self._paths.error(self._attempt, rank))
