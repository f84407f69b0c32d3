"""What went wrong in a run, from what its workers left behind. The driver's side."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence

from expt import signals
from expt.errors import ConfigError, Diverged, ExptError, OutOfMemory, RunFailed, TimedOut
from expt.launch.processes import FINISHED
from expt.runs.attempt import LOG, RAISED, Raised, read_error
from expt.runs.paths import RunPaths
from expt.worker import watchdog

NO_SPACE_BYTES = 1_000_000
_NCCL_GAVE_UP = "Watchdog caught collective operation timeout"
_NCCL_ABORTED = (
    _NCCL_GAVE_UP,
    "we are taking the entire process down",
    "watchdog thread terminated with exception",
)
"""What torch writes before it ends a process whose peers are gone or late."""


class Aftermath:
    """The workers of one attempt after one of them has failed; exit codes by rank, None for those
    alive.
    """

    def __init__(self, paths: RunPaths, attempt: int, codes: Sequence[int | None]) -> None:
        self._paths, self._attempt, self._size, self._codes = paths, attempt, len(codes), codes
        self._stacks: dict[int, str] = {}

    def timed_out(self) -> bool:
        """Whether the failure is that a worker waited in vain: those who did not wait are then the
        late ones.
        """
        rank = self._first_failed()
        raised = self._raised(rank)
        if raised is not None:
            return raised.kind == TimedOut.__name__
        return self._aborted(rank, _NCCL_GAVE_UP)

    def was_stuck(self) -> bool:
        """Whether the first that failed has ended itself because it got no further."""
        raised = self._raised(self._first_failed())
        return raised is not None and raised.beats is not None

    def lost_others(self) -> bool:
        """Whether all that is known is that a worker has lost others, who have not ended yet: they
        know why.
        """
        raised = self._raised(self._first_failed())
        return raised is not None and raised.has_lost_others and None in self._codes

    def dump_stacks(self, late: Mapping[int, int]) -> None:
        """Have the `late` workers, rank to pid, write to their logs where they are."""
        sizes = {}
        for rank, pid in late.items():
            with contextlib.suppress(OSError):
                sizes[rank] = self._paths.stderr(self._attempt, rank).stat().st_size
                os.kill(pid, signals.DUMP_STACKS)
        for rank, size in sizes.items():
            self._stacks[rank] = watchdog.wait_for_dump(
                self._paths.stderr(self._attempt, rank), size
            )

    def in_words(self, timeout_s: float) -> ExptError:
        """The first failure, with its traceback if it left one, and where its log is."""
        if self._stacks:
            return self._late(timeout_s)
        rank = self._first_failed()
        raised = self._raised(rank)
        who, log = self._who(rank), self._log(rank)
        if raised is not None and raised.is_refusal:
            return ConfigError(raised.text)
        if raised is not None and raised.expected:
            if raised.kind == Diverged.__name__:  # all ranks say the same
                return Diverged(f"{raised.text}\n{log}")
            if raised.kind == OutOfMemory.__name__:
                return OutOfMemory(f"{who}: {raised.text}\n{log}")
            return RunFailed(f"{who}: {raised.text}\n{log}")
        if raised is not None:
            return RunFailed(f"{who}{RAISED}{raised.traceback.rstrip()}\n\n{log}")
        code = self._codes[rank]
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return RunFailed(f"{who} was killed by {signal.Signals(-code).name}{hint}\n{log}")
        return RunFailed(
            f"{who} exited with code {code} before it had completed{self._disk()}\n{log}"
        )

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
        """Bad input comes first, then a rank that vanished, for the errors of the others may follow
        from either; then
        the earliest, and last who has lost others, whose file may bear the same time.

        Of those that got no further, it is who had come the least far. Whom NCCL ended has lost
        others: it comes last."""
        told = {rank: found for rank in range(self._size) if (found := self._raised(rank))}
        if refused := [
            rank for rank, found in told.items() if found.is_refusal
        ]:  # whether it has ended yet or not
            return min(refused, key=lambda rank: told[rank].time_ns)
        ended = [rank for rank, code in enumerate(self._codes) if code not in (None, FINISHED)]
        raised = {rank: told[rank] for rank in ended if rank in told}
        vanished = [rank for rank in ended if rank not in raised]
        if first := [
            rank for rank in vanished if not (raised and self._aborted(rank, *_NCCL_ABORTED))
        ]:
            return first[0]
        stuck = all(found.beats is not None for found in raised.values())

        def order(rank: int) -> tuple[bool, int, int]:
            found = raised[rank]
            return found.has_lost_others, found.beats or 0 if stuck else 0, found.time_ns

        return min(raised, key=order)

    def _aborted(self, rank: int, *texts: str) -> bool:
        """Whether torch has ended the rank, and has said one of `texts`."""
        if self._codes[rank] != -signal.SIGABRT:
            return False
        with contextlib.suppress(OSError):
            log = self._paths.stderr(self._attempt, rank).read_text(errors="replace")
            return any(text in log for text in texts)
        return False

    def _raised(self, rank: int) -> Raised | None:
        return read_error(self._paths.error(self._attempt, rank))
