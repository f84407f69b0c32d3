"""What went wrong in a run, from what its workers left behind. The driver's side."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence

from expt import signals
from expt.errors import ConfigError, Diverged, ExptError, RunFailed, TimedOut
from expt.launch.processes import FINISHED
from expt.runs.paths import RunPaths
from expt.runs.worker_error import LOG, RAISED, Raised, read_error
from expt.worker import watchdog

NO_SPACE_BYTES = 1_000_000
_NCCL_GAVE_UP = "Watchdog caught collective operation timeout"


class Aftermath:
    """The workers of one attempt after one of them has failed; exit codes by rank, None for those alive."""

    def __init__(self, paths: RunPaths, attempt: int, codes: Sequence[int | None]) -> None:
        self._paths, self._attempt, self._size, self._codes = paths, attempt, len(codes), codes
        self._stacks: dict[int, str] = {}

    def timed_out(self) -> bool:
        """Whether the failure is that a worker waited in vain: those who did not wait are then the late ones."""
        rank = self._first_failed()
        raised = self._raised(rank)
        if raised is not None:
            return raised.kind == TimedOut.__name__
        if self._codes[rank] != -signal.SIGABRT:
            return False
        with contextlib.suppress(OSError):
            return _NCCL_GAVE_UP in self._paths.stderr(self._attempt, rank).read_text(errors="replace")
        return False

    def dump_stacks(self, late: Mapping[int, int]) -> None:
        """Have the `late` workers, rank to pid, write to their logs where they are."""
        sizes = {}
        for rank, pid in late.items():
            with contextlib.suppress(OSError):
                sizes[rank] = self._paths.stderr(self._attempt, rank).stat().st_size
                os.kill(pid, signals.DUMP_STACKS)
        for rank, size in sizes.items():
            self._stacks[rank] = watchdog.wait_for_dump(self._paths.stderr(self._attempt, rank), size)

    def in_words(self, timeout_s: float) -> ExptError:
        """The first failure, with its traceback if it left one, and where its log is."""
        if self._stacks:
            return self._late(timeout_s)
        rank = self._first_failed()
        raised = self._raised(rank)
        who, log = self._who(rank), self._log(rank)
        if raised is not None and raised.exit_code == ConfigError.exit_code:
            return ConfigError(raised.text)
        if raised is not None and raised.expected:
            if raised.kind == Diverged.__name__:  # all ranks say the same
                return Diverged(f"{raised.text}\n{log}")
            return RunFailed(f"{who}: {raised.text}\n{log}")
        if raised is not None:
            return RunFailed(f"{who}{RAISED}{raised.traceback.rstrip()}\n\n{log}")
        code = self._codes[rank]
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return RunFailed(f"{who} was killed by {signal.Signals(-code).name}{hint}\n{log}")
        return RunFailed(f"{who} exited with code {code} before it had completed{self._disk()}\n{log}")

    def _late(self, timeout_s: float) -> TimedOut:
        """The workers that the others waited for, and where the first of them was."""
        ranks = sorted(self._stacks)
        names = ", ".join(map(str, ranks))
        first = ranks[0]
        stack = f"; rank {first} was here\n\n{self._stacks[first]}\n" if self._stacks[first] else ""
        return TimedOut(
            f"rank {names} of {self._size} did not arrive within {timeout_s:g} s (timeout_s), "
            f"where the others waited{stack}\n{self._log(first)}"
        )

    def _disk(self) -> str:
        """A worker whose disk is full can't even say so."""
        usage = shutil.disk_usage(self._paths.folder)
        full = f"; no space is left on the disk of {self._paths.folder} ({usage.free / 1e6:.1f} MB)"
        return full if usage.free < NO_SPACE_BYTES else ""

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self._size}"

    def _log(self, rank: int) -> str:
        return f"{LOG}{self._paths.stderr(self._attempt, rank)}"

    def _first_failed(self) -> int:
        """A rank that vanished comes first, for the errors of the others may follow from that; then the earliest."""
        ended = [rank for rank, code in enumerate(self._codes) if code not in (None, FINISHED)]
        raised = {rank: found.time_ns for rank in ended if (found := self._raised(rank))}
        vanished = [rank for rank in ended if rank not in raised]
        return vanished[0] if vanished else min(raised, key=lambda rank: raised[rank])

    def _raised(self, rank: int) -> Raised | None:
        return read_error(self._paths.error(self._attempt, rank))
