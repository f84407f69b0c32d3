"""The checkpoints that a run has, for a fork to begin from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expt.errors import CheckpointError, ConfigError, warn
from expt.runs import checkpoint_file
from expt.runs.parent import named
from expt.runs.paths import RunPaths
from expt.runs.result import Record
from expt.runs.weights_file import WHICH

TRIES = 3
"""Of one's own to read what a run that is under way may replace meanwhile."""


class Found(NamedTuple):
    """A checkpoint of the run that is forked."""

    file: Path
    state: Mapping[str, Any]
    """With its tensors left on the disk."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.state["position"]["step"])

    @property
    def epoch(self) -> int:
        """Epochs begun."""
        return int(self.state["position"]["epoch"])

    @property
    def ends_epoch(self) -> bool:
        """Whether no batch of its epoch is left."""
        position = self.state["position"]
        return (
            not 0
            < position["step_in_epoch"]
            < self.state.get("steps_per_epoch", position["step_in_epoch"] + 1)
        )

    @property
    def epochs_done(self) -> int:
        """Whole ones."""
        return self.epoch if self.ends_epoch else self.epoch - 1

    @property
    def told(self) -> str:
        """For a person who is to choose one."""
        which = f", {self.file.stem}" if self.file.stem in WHICH else ""
        return f"step {self.step} ({'' if self.ends_epoch else 'within '}epoch {self.epoch}{which})"


def is_there(run: Path) -> bool:
    """Whether there is something to fork: the run, with a checkpoint."""
    try:
        return next(all_of(named(str(run)).run), None) is not None
    except ConfigError:
        return False


def has_beginning(record: Record, paths: RunPaths) -> bool:
    """Whether a run can be trained from its beginning: of a fork, whether what it went on from is
    still there.
    """
    forked = record.get("forked_from")
    if forked is None or paths.forked.exists():
        return True
    try:
        parent = named(forked["given"]).run
    except ConfigError:
        return False
    there = (found.file for found in all_of(parent) if found.step == forked["step"])
    return any(checkpoint_file.damage_of(file) is None for file in there)


def epochs_of(run: Path) -> set[int]:
    """After which whole epochs the run has checkpoints."""
    return {found.epoch for found in all_of(run) if found.ends_epoch}


def keep(run: Path, epoch: int) -> None:
    """Let the run keep its checkpoint of that epoch's end, whatever it writes later, so that a fork
    can be repeated.

    At no cost where the disk has links, until the run has written others.
    """
    kept = RunPaths(run).forked_after(epoch)
    for _ in range(TRIES):  # a run that is under way may just have written another
        files = [found.file for found in all_of(run) if is_meant(found, f"epoch:{epoch}")]
        if kept in files or not files:
            return
        try:
            checkpoint_file.keep_as(files[0], kept)
        except (CheckpointError, OSError) as error:
            warn(f"{error}; a fork of {run} after epoch {epoch} cannot be repeated later")
            return


def is_meant(found: Found, which: str) -> bool:
    """Whether `which`, as in fork=RUN@WHICH, is that checkpoint."""
    if which.isdigit():
        return found.step == int(which)
    if which.startswith("epoch:"):
        return found.ends_epoch and found.epoch == int(which.removeprefix("epoch:"))
    return found.file.name in (which, f"{which}.pt")


def all_of(run: Path) -> Iterator[Found]:
    """Those that can be read, the last and the best first."""
    for file in _files(run):
        try:
            state = checkpoint_file.read(file)
            yield Found(
                file, {key: state[key] for key in state if key not in ("model", "ema", "optimizer")}
            )
        except Exception:  # damaged in one of many ways, or removed meanwhile
            continue


def whole_of(fitting: Sequence[Found]) -> Found:
    """The first that is what was written; a file is read through once, however many forks a sweep
    has of it.

    Raises CheckpointError, that of the first, where all are damaged.
    """
    damages = list[CheckpointError | OSError]()
    for found in fitting:
        try:
            checkpoint_file.read_steady(found.file, functools.partial(_check, found.file))
            return found
        except (CheckpointError, OSError) as error:  # OSError: it was removed meanwhile
            damages.append(error)
    raise CheckpointError(str(damages[0])) from damages[0]


def _check(file: Path) -> None:
    about = file.stat()
    _check_once(file, about.st_ino, about.st_mtime_ns, about.st_size)


@functools.lru_cache
def _check_once(file: Path, *_: int) -> None:
    """What is damaged is looked at each time, for a person may have mended it."""
    checkpoint_file.check(file)


def damaged(run: Path) -> dict[Path, CheckpointError]:
    """Those that are not what was written, and why."""
    return {file: damage for file in _files(run) if (damage := checkpoint_file.damage_of(file))}


def _files(run: Path) -> list[Path]:
    """The last and the best first."""
    paths = RunPaths(run)
    files = [
        *checkpoint_file.candidates(paths.last),
        *checkpoint_file.candidates(paths.best),
        *paths.kept_for_forks,
    ]
    return sorted(files, key=lambda path: path not in (paths.last, paths.best))


def choice(there: list[Found]) -> str:
    """What to say of the checkpoints that a run has, each step once."""
    if not there:
        return "it has none: give another run, or train it again"
    return (
        f"it has {_listed(there)}: use fork=RUN@STEP; a larger checkpoint.keep has a run keep more"
    )


def whole_ones(run: Path) -> str:
    """What to say of the checkpoints that are what was written, where the one that was meant is
    not.
    """
    bad = damaged(run)
    there = [found for found in all_of(run) if found.file not in bad]
    if not there:
        return "no other is whole: give another run, or train it again"
    newest = max(found.step for found in there)
    return f"whole: {_listed(there)}; use fork={run}@{newest}"


def _listed(there: list[Found]) -> str:
    steps = {found.step: found for found in reversed(there)}
    *others, last = (steps[step].told for step in sorted(steps))
    return f"{', '.join(others)} and {last}" if others else last
