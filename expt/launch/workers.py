"""One run's workers: start them, poll them, stop them, and explain a failure.

The driver's side.
"""

from __future__ import annotations

import contextlib
import functools
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
    " of a batch, and gather in training_loss only (evaluations are uneven)"
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
        """Return the failure, once those that know its cause have had time to say it; stop all."""
        after, stacks = self._aftermath(GRACE_S), dict[int, str]()
        if processes.UNKNOWN in self._exit_codes():
            self.stop()
            return WorkersLost(f"{processes.FORKSERVER_KILLED}, and all workers with it")
        if after.first.has_lost_others:
            after = self._aftermath(LATE_S)
        if after.first.waited_in_vain:
            # The others that waited give up too: those that live on are those they waited for.
            # Under NCCL all are stuck, and end up to two ticks apart.
            apart_s = 2 * self.timeout_s / watchdog.TICKS if after.first.is_stuck else 0.0
            after = self._aftermath(LATE_S + apart_s)
            stacks = self._dump_stacks()
        self.stop()
        return self._late(stacks) if stacks else after.in_words()

    def _aftermath(self, wait_s: float) -> Aftermath:
        """Look at the workers once all have ended, or the time is up."""
        processes.wait_for_all(self.processes, wait_s)
        return Aftermath(self.paths, self.attempt, self._exit_codes())

    def _dump_stacks(self) -> dict[int, str]:
        """Have the workers that live write their stacks to their logs; return them by rank."""
        sizes = dict[int, int]()
        for rank, worker in enumerate(self.processes):
            if worker.exitcode is None:
                with contextlib.suppress(OSError):
                    sizes[rank] = self._log(rank).stat().st_size
                    worker.send_signal(signals.DUMP_STACKS)
        return {rank: watchdog.wait_for_dump(self._log(rank), size) for rank, size in sizes.items()}

    def _late(self, stacks: Mapping[int, str]) -> TimedOut:
        """Return the error for workers that others waited for in vain, from their stacks."""
        first, names = min(stacks), ", ".join(map(str, stacks))
        stack = f"; rank {first} was here\n\n{stacks[first]}\n" if stacks[first] else ""
        return TimedOut(
            f"rank {names} of {len(self.processes)} did not arrive within {self.timeout_s:g} s"
            f" (timeout_s), where the others waited{stack}\n{LOG}{self._log(first)}"
        )

    def _log(self, rank: int) -> Path:
        return self.paths.stderr(self.attempt, rank)


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


@dataclass(frozen=True)
class End:
    """The end of one worker, or its state while it lives."""

    rank: int
    code: int | None
    """The exit code; None for one that lives."""
    raised: Raised | None
    """The exception that has ended it, or is about to."""
    log: Path

    @property
    def has_failed(self) -> bool:
        """True if it has ended, and not in order."""
        return self.code not in (None, FINISHED)

    @property
    def has_lost_others(self) -> bool:
        """True if it ended because another had."""
        return self.raised is not None and self.raised.has_lost_others

    @property
    def is_stuck(self) -> bool:
        """True if it ended itself for lack of progress."""
        return self.raised is not None and self.raised.progress is not None

    @property
    def waited_in_vain(self) -> bool:
        """True if others were late where it waited for them."""
        if self.raised:
            return self.raised.kind == TimedOut.__name__
        return _NCCL_GAVE_UP in self.log_of_abort

    @functools.cached_property
    def log_of_abort(self) -> str:
        """The text of its log, if it was aborted."""
        if self.code != -signal.SIGABRT or not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")


def _first(ends: Sequence[End]) -> End:
    """Return the end that the others may follow from.

    Bad input comes first, also of a worker that lives; then a worker that vanished, an exception,
    and last an abort by NCCL, which ends workers whose peers are gone.
    """
    errors = [(end, end.raised) for end in ends if end.raised]
    errors.sort(key=lambda pair: (pair[1].has_lost_others, pair[1].time_ns))
    if all(end.is_stuck for end, _ in errors if end.has_failed):  # who has done the least is late
        errors.sort(key=lambda pair: [*(pair[1].progress or ())])
    refused = [end for end, error in errors if error.is_refusal]
    raised = [end for end, _ in errors if end.has_failed]
    vanished = [end for end in ends if end.has_failed and not end.raised]
    alone = [end for end in vanished if not any(x in end.log_of_abort for x in _NCCL_ABORTED)]
    return [*refused, *alone, *raised, *vanished][0]


class Aftermath:
    """The workers of one attempt after a failure, as they were when this was made."""

    def __init__(self, paths: RunPaths, attempt: int, codes: Sequence[int | None]) -> None:
        """Read the workers' errors; `codes` are their exit codes, None for those that live."""
        self._paths = paths
        self._ends = [
            End(rank, code, read_error(paths.error(attempt, rank)), paths.stderr(attempt, rank))
            for rank, code in enumerate(codes)
        ]
        self.first = _first(self._ends)
        """The end to report."""
        self._who, self._log = f"rank {self.first.rank} of {len(codes)}", f"{LOG}{self.first.log}"

    def in_words(self) -> ExptError:
        """Return the error to report, with its traceback if it left one, and its log."""
        if self.first.raised:
            return self._of_exception(self.first.raised)
        if moved := self._paths.moved():  # and the worker's log with it
            return RunFailed(moved)
        code = self.first.code or 0
        return self._of_signal(-code) if code < 0 else self._of_exit(code)

    def _of_exception(self, raised: Raised) -> ExptError:
        if raised.is_refusal:
            refusal = DataError if raised.kind == DataError.__name__ else ConfigError
            return refusal(raised.text)
        errors = (end.raised for end in self._ends if end.raised)
        gpus = {gpu: fault for error in errors for gpu, fault in error.gpus.items()}
        if not raised.expected:
            text = f"{self._who}{RAISED}{raised.traceback.rstrip()}\n\n{self._log}"
            return RunFailed(text, gpus=gpus)
        kind = RECORDED.get(raised.kind, RunFailed)
        who = "" if kind is Diverged else f"{self._who}: "  # all say the same
        return kind(f"{who}{raised.text}\n{self._log}", gpus=gpus)

    def _of_exit(self, code: int) -> RunFailed:
        folder, text = self._paths.folder, f"{self._who} exited with code {code}"
        free = shutil.disk_usage(folder).free
        full = f"; no space is left on the disk of {folder} ({free / 1e6:.1f} MB)"
        has_room = free >= NO_SPACE_BYTES
        return RunFailed(f"{text} before it had completed{'' if has_room else full}\n{self._log}")

    def _of_signal(self, number: int) -> ExptError:
        name = next((one.name for one in signal.Signals if one == number), f"signal {number}")
        found = re.search(r"what\(\):\s*(.+)", self.first.log_of_abort)
        thrown = found[1] if found else ""  # by C++, as of gloo
        is_unequal = "collective mismatch" in thrown and "size doesn't match" in thrown
        why = f": {thrown[:300]}" if thrown else ""
        if number == signal.SIGKILL:
            why = " (out of memory?)"
        if is_unequal:
            why += f"\n{_UNEQUAL}"
        config = read_result(self._paths).get("config", {})
        if is_unequal and (config.get("strategy"), config.get("drop_last")) == ("ddp", False):
            return ConfigError(f"drop_last=false: {self._who}{why}\n{self._log}")
        return Killed(f"{self._who} was killed by {name}{why}\n{self._log}")
