"""A run whose workers torchrun or Slurm has started: rank 0 composes it, the others hear of it from
there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console

from expt import machine, signals
from expt.config import main_code, secrets
from expt.config.auto import agreed
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed, warn
from expt.launch import last_word, processes, rendezvous
from expt.launch.rendezvous import Arrival, Rendezvous
from expt.runs.attempt import Attempt, put_back, record_end
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation, RunRequest, received
from expt.runs.result import INTERRUPTED, Record
from expt.runs.typed import setting
from expt.runs.view.progress import RunDisplay, watched
from expt.runs.view.summary import print_summary
from expt.runs.worker_error import LOG, write_error
from expt.worker.diagnosis import lost_peers
from expt.worker.main import main, worker_of_environment


class Terminal(NamedTuple):
    """What torchrun has given this process to print to."""

    out: TextIO
    err: TextIO


def earlier_folder() -> Path | None:
    """The folder in which this job's run began, where torchrun has started its workers again."""
    folder = rendezvous.of_environment().earlier()
    return Path(folder) if folder else None


def lead(request: RunRequest, on_start: Callable[[], None] | None = None) -> None:
    """Rank 0's part: make the folder the run's, tell the others, train.

    Raises what a person must know.
    """
    config, paths = request.config, request.paths
    meeting = rendezvous.of_environment()
    arrivals = meeting.gather()
    with at_work(paths):
        ran = _started_again(meeting) or (request.may_have_run and paths.result.exists())
        if ran and not paths.checkpoints.exists():
            warn(
                f"{paths.folder}: has no checkpoint on this machine, the run starts from the"
                " beginning"
            )
        request = dataclasses.replace(
            request,
            may_have_run=request.may_have_run or ran,
            about={**request.about, **_where(arrivals)},
        )
        # Where the logs of the first attempt are on another machine's disk, this is not the first
        # all the same.
        attempt = Attempt(
            request=request,
            number=max(request.next_attempt(), int(ran)),
            started_at=time.monotonic(),
        )
        with attempt.recorded(on_start) as source:
            sent = request.to_send()
            sent["settings"] |= {key: getattr(config, key) for key in agreed()}
            told = {**sent, "source": str(source) if source else None, "attempt": attempt.number}
            meeting.tell(arrivals, told)
            with (
                last_word.kept(paths.folder, attempt.number),
                _logged(paths, attempt.number, 0) as terminal,
            ):
                console = Console(file=terminal.out)
                display = RunDisplay(
                    paths,
                    console,
                    epochs=config.epochs,
                    print_every=config.print_every,
                    errors=terminal.err,
                )
                with watched(display):
                    _train(attempt, source, meeting, terminal)
    print_summary(Console(), paths)


def _started_again(meeting: Rendezvous) -> bool:
    # Torchrun's count is this node's own, and starts anew with a new torchrun: what the store knows
    # counts too.
    return (
        meeting.earlier() is not None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    )


def follow(typed_at: float) -> RunPaths:
    """The part of every other rank; returns the run's folder. Raises ExptError."""
    meeting = rendezvous.of_environment()
    told = meeting.listen()
    if "refused" in told:  # rank 0 tells the person
        sys.exit(told["refused"])
    request = received(told, machine.detect(), typed_at=typed_at)
    os.environ.update(request.env)
    source = Path(told["source"]) if told["source"] else None
    attempt = Attempt(request=request, number=told["attempt"], started_at=time.monotonic())
    with _logged(request.paths, attempt.number, int(os.environ["RANK"])) as terminal:
        try:
            _train(attempt, source, meeting, terminal)
        except Interrupted:  # rank 0 says so
            sys.exit(signals.exit_code())
    return request.paths


@contextlib.contextmanager
def refusal_told() -> Iterator[None]:
    """Rank 0: let the others end where the configuration is refused, without a word of theirs."""
    try:
        yield
    except ConfigError as error:
        with contextlib.suppress(RunFailed):
            meeting = rendezvous.of_environment()
            meeting.tell(meeting.gather(), {"refused": error.exit_code})
        raise


def _where(arrivals: list[Arrival]) -> Record:
    """The fields of result.json that say which machines the workers are on."""
    return {
        "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
        "node": arrivals[0].host,
        "hosts": rendezvous.hosts(arrivals),
    }


def _train(attempt: Attempt, source: Path | None, meeting: Rendezvous, terminal: Terminal) -> None:
    config, paths = attempt.request.config, attempt.paths
    main_code.find_kept(paths.code)
    learns = not isinstance(attempt.request.instead, Evaluation)
    config.dataset.prepare(
        config.task, learns=learns
    )  # under a file lock, so that one worker of each machine does it
    status = main(
        config,
        paths,
        attempt.waited_since,
        source,
        meeting.group_store(),
        report=lambda error: _report(error, attempt, terminal),
        until_epoch=attempt.request.until_epoch,
    )
    if status == INTERRUPTED:
        folder = setting("hydra.run.dir", paths.folder)
        raise Interrupted(f"interrupted; to go on: the same command with {folder} resume=auto")


def _report(error: Exception, attempt: Attempt, terminal: Terminal) -> None:
    """Say what ends this worker: in a line to the person, and in the run's folder."""
    me, paths = worker_of_environment(attempt.request.config), attempt.paths
    raised = str(error) if isinstance(error, ExptError) else f"{type(error).__name__}: {error}"
    text = lost_peers(error, me) or f"rank {me.rank} of {me.world_size}: {raised}"
    text = f"{secrets.hidden(text)}\n{LOG}{paths.stderr(attempt.number, me.rank)}"
    print(f"error: {text}", file=terminal.err, flush=True)
    with contextlib.suppress(OSError):
        write_error(paths.error(attempt.number, me.rank), error, getattr(error, "exit_code", 1))
    if me.rank == 0 and not (isinstance(error, ConfigError) and put_back(paths)):
        record_end(paths, RunFailed(text))


@contextlib.contextmanager
def _logged(paths: RunPaths, attempt: int, rank: int) -> Iterator[Terminal]:
    """Let what this process prints go to its log files, those of its node; gives the terminal."""
    out, err = paths.stdout(attempt, rank), paths.stderr(attempt, rank)
    kept = [os.dup(1), os.dup(2)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        processes.print_to(out, err)
    except OSError as error:
        for number in kept:
            os.close(number)
        warn(f"{out.parent}: cannot hold this worker's logs here ({error.strerror}); they follow")
        yield Terminal(sys.stdout, sys.stderr)
        return
    try:
        out_there, err_there = (os.fdopen(number, "w", closefd=False) for number in kept)
        with out_there, err_there:
            yield Terminal(out_there, err_there)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(kept, start=1):
            os.dup2(before, number)
            os.close(before)
