"""A run whose workers torchrun or Slurm has started: rank 0 composes it, the others hear of it from there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console

from expt import machine, signals
from expt.config import secrets
from expt.config.parse import parse_elsewhere
from expt.data.files import prepare
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.launch import rendezvous
from expt.launch.rendezvous import Arrival, Rendezvous
from expt.runs.attempt import Launch, end_record, recorded
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
from expt.runs.request import Asked
from expt.runs.result import INTERRUPTED
from expt.runs.resume import warn
from expt.runs.view.progress import RunDisplay, print_summary, watched
from expt.runs.worker_error import LOG, write_error
from expt.worker.diagnosis import lost_peers
from expt.worker.main import main, worker_of_environment

# What rank 0 decides for all; gpus and threads are each machine's own.
AGREED = ("world_size", "backend", "channels_last", "onednn")


class Terminal(NamedTuple):
    """What torchrun has given this process to print to."""

    out: TextIO
    err: TextIO


def earlier_folder() -> Path | None:
    """The folder in which this job's run began, where torchrun has started its workers again."""
    folder = rendezvous.of_environment().earlier()
    return Path(folder) if folder else None


def lead(asked: Asked) -> None:
    """Rank 0's part: make the folder the run's, tell the others, train. Raises what a person must know."""
    config, run_paths = asked.config, asked.paths
    meeting = rendezvous.of_environment()
    arrivals = meeting.gather()
    with at_work(run_paths):
        asked = dataclasses.replace(asked, begun=asked.begun or _started_again(meeting))
        if asked.begun and not run_paths.checkpoints.exists():
            warn(f"{run_paths.folder}: has no checkpoint on this machine, the run starts from the beginning")
        begun = Launch(
            config=config,
            paths=run_paths,
            started=asked.started,
            attempt=asked.next_attempt(),
            again=asked.begun,
            about={**asked.about, **_where(arrivals)},
        )
        with recorded(begun, asked.on_start) as source:
            told = {
                "folder": str(run_paths.folder.resolve()),
                "source": str(source) if source else None,
                "attempt": begun.attempt,
                "settings": {**asked.settings, **{key: getattr(config, key) for key in AGREED}},
                "env": dict(asked.env),
            }
            meeting.tell(arrivals, secrets.hidden(told))  # whoever reaches the store could read it
            with _logged(run_paths, begun.attempt, 0) as terminal:
                console = Console(file=terminal.out)
                display = RunDisplay(run_paths, console, epochs=config.epochs, print_every=config.print_every)
                with watched(display):
                    _train(begun, source, meeting, terminal)
    print_summary(Console(), run_paths)


def _started_again(meeting: Rendezvous) -> bool:
    # Torchrun's count is this node's own, and starts anew with a new torchrun: what the store knows counts too.
    return meeting.earlier() is not None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def follow(started: float) -> RunPaths:
    """The part of every other rank; returns the run's folder. Raises ExptError."""
    meeting = rendezvous.of_environment()
    told = meeting.listen()
    if "refused" in told:  # rank 0 tells the person
        sys.exit(told["refused"])
    run_paths = RunPaths(Path(told["folder"]))
    config = parse_elsewhere(told["settings"], machine.detect())
    os.environ.update(secrets.restored(told["env"], {}))
    source = Path(told["source"]) if told["source"] else None
    begun = Launch(config=config, paths=run_paths, started=started, attempt=told["attempt"])
    with _logged(run_paths, begun.attempt, int(os.environ["RANK"])) as terminal:
        try:
            _train(begun, source, meeting, terminal)
        except Interrupted:  # rank 0 says so
            sys.exit(signals.exit_code())
    return run_paths


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


def _where(arrivals: list[Arrival]) -> dict[str, Any]:
    """The fields of result.json that say which machines the workers are on."""
    return {
        "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
        "node": arrivals[0].host,
        "hosts": rendezvous.hosts(arrivals),
    }


def _train(begun: Launch, source: Path | None, meeting: Rendezvous, terminal: Terminal) -> None:
    config, run_paths = begun.config, begun.paths
    prepare(config.dataset)  # under a file lock, so that one worker of each machine does it
    status = main(
        config,
        run_paths,
        begun.started,
        source,
        meeting.group_store(),
        tell=lambda error: _report(error, begun, terminal),
    )
    if status == INTERRUPTED:
        go_on = shlex.quote(f"hydra.run.dir={run_paths.folder}")
        raise Interrupted(f"interrupted; to go on: the same command with {go_on} resume=auto")


def _report(error: Exception, begun: Launch, terminal: Terminal) -> None:
    """Say what ends this worker: in a line to the person, and in the run's folder."""
    me, run_paths = worker_of_environment(begun.config), begun.paths
    raised = str(error) if isinstance(error, ExptError) else f"{type(error).__name__}: {error}"
    text = lost_peers(error, me) or f"rank {me.rank} of {me.world_size}: {raised}"
    text = f"{secrets.hidden(text)}\n{LOG}{run_paths.stderr(begun.attempt, me.rank)}"
    print(f"error: {text}", file=terminal.err, flush=True)
    with contextlib.suppress(OSError):
        write_error(run_paths.error(begun.attempt, me.rank), error, getattr(error, "exit_code", 1))
    if me.rank == 0:
        end_record(run_paths, RunFailed(text))


@contextlib.contextmanager
def _logged(run_paths: RunPaths, attempt: int, rank: int) -> Iterator[Terminal]:
    """Let what this process prints go to its log files, those of its node; gives the terminal."""
    out, err = run_paths.stdout(attempt, rank), run_paths.stderr(attempt, rank)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files = {1: out.open("ab"), 2: err.open("ab")}
    except OSError as error:
        warn(f"{out.parent}: cannot hold this worker's logs here ({error.strerror}); they follow")
        yield Terminal(sys.stdout, sys.stderr)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in files}
    for number, file in files.items():
        os.dup2(file.fileno(), number)
        file.close()
    try:
        with os.fdopen(os.dup(kept[1]), "w") as out_there, os.fdopen(os.dup(kept[2]), "w") as err_there:
            yield Terminal(out_there, err_there)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)
