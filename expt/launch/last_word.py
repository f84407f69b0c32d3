"""A process that records the end of a run whose workers can't do so themselves.

Under torchrun or Slurm rank 0 keeps the record itself. NCCL's watchdog may end all ranks by
SIGABRT, in C, and the system any by SIGKILL: the record would say "running" for ever. This process,
`python -m expt.launch.last_word FOLDER ATTEMPT`, waits for the end of rank 0 by a pipe, and records
the cause. It imports nothing before.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expt.runs.paths import RunPaths

FATAL = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""The signals that Python's faulthandler writes to the log, by their names in C."""


@contextlib.contextmanager
def kept(folder: Path, attempt: int) -> Iterator[None]:
    """Have the record in `folder` ended, however this process ends in the body."""
    process = subprocess.Popen(
        [sys.executable, "-m", "expt.launch.last_word", str(folder.absolute()), str(attempt)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the launcher waits for its own to be closed
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the launcher ends the sessions of its workers
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.kill()  # whoever comes here can speak
        process.wait()


def main(folder: Path, attempt: int) -> None:
    """Wait for the end of the process that holds the other end of stdin."""
    import setproctitle

    setproctitle.setproctitle(f"expt last word {folder}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # who ends a job sends it to all of its processes
    sys.stdin.read()
    write_end(folder, attempt)


def write_end(folder: Path, attempt: int) -> None:
    """Record the end of a run that is recorded as running while nobody works in its folder."""
    from expt.errors import ConfigError
    from expt.runs.attempt import record_end
    from expt.runs.paths import RunPaths, at_work
    from expt.runs.result import RUNNING, read_result

    paths = RunPaths(folder)
    with contextlib.suppress(ConfigError), at_work(paths):  # the next attempt may be at work
        record = read_result(paths)
        if record.get("status") == RUNNING:
            record_end(paths, _what_ended(paths, attempt, record.get("world_size", 1)))


def _what_ended(paths: RunPaths, attempt: int, world_size: int) -> Exception:
    from expt.errors import RunFailed
    from expt.launch.workers import Aftermath
    from expt.runs.failure import LOG, in_one_line, read_error

    ranks = range(world_size)
    raised = {rank: each for rank in ranks if (each := read_error(paths.error(attempt, rank)))}
    logs = [paths.stderr(attempt, rank) for rank in ranks]
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    fatal = {each: f"Fatal Python error: {signal.strsignal(each)}" for each in reversed(FATAL)}
    by = {rank: -x for rank in ranks for x, line in fatal.items() if line in texts[rank]}
    own = [rank for rank, each in raised.items() if not each.has_lost_others]
    if by or own:  # a rank that another's error ended is no cause
        codes = dict.fromkeys(own, 1) or {**dict.fromkeys(raised, 1), **by}
        return Aftermath(paths, attempt, [*map(codes.get, ranks)]).in_words()
    others = "".join(f"; rank {rank}: {in_one_line(found.text)}" for rank, found in raised.items())
    ended = f"rank 0 of {world_size} has ended without a word, as a process does that is killed"
    return RunFailed(f"{ended}{others}\n{LOG}{paths.stderr(attempt, 0)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
