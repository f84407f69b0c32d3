"""Runs and their checkpoints by name: `RUN`, `RUN@best`, `RUN@40`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from expt.errors import CheckpointError, ConfigError, absent, warn
from expt.runs import checkpoint_file, provenance
from expt.runs.found import results_below
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import DAMAGED, RUNNING, Begun, Record, read_result, result_of_any

Which: TypeAlias = Literal["best", "last"]
WHICH = ("best", "last")
_NAMES = r"(last|best)(-\d+)?|\d+|epoch:\d+"


class Checkpoint(NamedTuple):
    """A checkpoint of a run."""

    file: Path
    state: Mapping[str, Any]
    """The header of the file, without tensors."""

    @property
    def run(self) -> Path:
        """The folder of the run that wrote it."""
        return self.file.parent.parent

    @property
    def paths(self) -> RunPaths:
        """The files of that run."""
        return RunPaths(self.run)

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings that the run had."""
        config: Mapping[str, Any] = self.state["config"]
        return config

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
        """True if no batch of its epoch is left."""
        in_epoch: int = self.state["position"]["step_in_epoch"]
        return not 0 < in_epoch < self.state.get("steps_per_epoch", math.inf)

    @property
    def epochs_done(self) -> int:
        """Whole epochs."""
        return self.epoch if self.ends_epoch else self.epoch - 1

    @property
    def trained_s(self) -> float:
        """The seconds of training until then, over all attempts."""
        return float(sum(self.state.get("epoch_s", ())) + self.state.get("elapsed_s", 0.0))

    def is_meant(self, which: str) -> bool:
        """Return whether `which`, of RUN@WHICH, names it."""
        if which.isdigit():
            return self.step == int(which)
        if which.startswith("epoch:"):
            return self.ends_epoch and self.epoch == int(which.removeprefix("epoch:"))
        return self.file.stem == which

    def __str__(self) -> str:
        where = "" if self.ends_epoch else "within "
        return f"step {self.step} ({where}epoch {self.epoch}, {self.file.stem})"


def read(file: Path) -> Checkpoint:
    """Read a checkpoint, without its tensors. Raises CheckpointError."""
    return Checkpoint(file, checkpoint_file.read(file))


def checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run that can be read, the last and the best first."""
    paths = RunPaths(run)
    files = [*checkpoint_file.candidates(paths.last), *checkpoint_file.candidates(paths.best)]
    for file in sorted(files, key=lambda path: path not in (paths.last, paths.best)):
        try:
            yield read(file)
        except CheckpointError:  # damaged, or removed meanwhile
            continue


def split_name(given: str, key: str = "") -> tuple[Path, str]:
    """Return the folder or file of `RUN`, `RUN@best`, `RUN@40`, ..., and the part after the @.

    That is the name of a checkpoint's file, a step, epoch:N, or "". Raises ConfigError for another.
    """
    folder, _, which = given.rpartition("@")
    if not folder or Path(given).exists():
        return Path(given), ""
    if not re.fullmatch(_NAMES, which) or Path(folder).is_file():
        use = "use @STEP, @epoch:N, @best or @last"
        raise ConfigError(f"{key}{given}: @{which} names no checkpoint; {use}")
    return Path(folder), which


def run_named(word: str, given: str) -> tuple[Path, str]:
    """Return the run that `word=given` names, and the checkpoint, as `split_name`.

    Raises ConfigError for a path that is no folder of a run.
    """
    path, which = split_name(given, f"{word}=")
    if path.is_file():
        return path.absolute().parent.parent, path.stem
    if is_sweep(path):
        raise ConfigError(f"{word}={given}: is a sweep; name one of its runs")
    if not path.exists():
        raise ConfigError(f"{word}={given}: {absent(path, fix='give that of a run')}")
    return path, which


def checkpoint_named(word: str, given: str, run: Path, which: str) -> Checkpoint:
    """Return the checkpoint `which` of a run, that `word=given` or `given` names.

    Raises ConfigError if none is there and undamaged.
    """
    damage = None
    for found in checkpoints(run):
        if not found.is_meant(which):
            continue
        try:
            checkpoint_file.read_steady(found.file, checkpoint_file.check)
            return found
        except CheckpointError as error:
            damage = damage or error
    if (file := RunPaths(run).checkpoint(which)).is_file():
        damage = damage or checkpoint_file.damage_of(file)
    listed = reversed([*checkpoints(run)])
    there = {each.step: each for each in listed if not checkpoint_file.damage_of(each.file)}
    names = ", ".join(str(there[step]) for step in sorted(there))
    key = f"{word}=" if word else ""
    keep = "checkpoint.keep=N keeps N more, checkpoint.keep_best=N the N best"
    others = f"it has {names}: use {key}RUN@STEP ({keep})" if there else "there is no other"
    problem = damage or f"{run} has no checkpoint {which}"
    raise ConfigError(f"{key}{given}: {problem}; {others}")


class Weights(NamedTuple):
    """The file that `weights` names."""

    file: Path
    run: Path | None
    """The folder of the run that wrote it; None for a file of another program's."""


def weights_named(given: str, word: str = "weights") -> Weights:
    """Return a file, or a run's best checkpoint or else the last, or the one after the @.

    Raises ConfigError, which names the key `word`, for anything else.
    """
    run, which = run_named(word, given)
    paths = RunPaths(run)
    if (file := Path(given)).is_file():
        return Weights(file, run if paths.result.exists() else None)
    which = which or ("best" if paths.best.is_file() else "last")
    return Weights(checkpoint_named(word, given, run, which).file, run)


def begun_from(given: str, checksum: str | None) -> Begun:
    """Return the entry of result.json for the weights `given`.

    Warns where the run that writes them is under way: its present file is loaded.
    """
    try:
        file, run = weights_named(given)
    except ConfigError:  # a resumed run has no need of them
        return {"file": given, "identity": None}
    begun: Begun = {"file": str(file), "identity": None, "checksum": checksum}
    if run is None:
        return begun
    if result_of_any(RunPaths(run)).get("status") == RUNNING:
        warn(f"weights={given}: the run is still training; its checkpoint as it is now is loaded")
    identity = read_result(RunPaths(run)).get("identity")
    return {**begun, "identity": identity, "run": str(run.resolve()), "which": file.stem}


def run_and_which(given: str | Path, which: str | None = None) -> tuple[Path, str]:
    """Return the run of `given` and which checkpoint is meant, the best by default.

    Raises ConfigError where `which` names another one.
    """
    folder, own = split_name(str(given))
    if own and which not in (None, own):
        raise ConfigError(f"{given}: which={which} is another checkpoint; leave one of them out")
    return folder, own or which or "best"


def trained_run(run: str | Path, which: str = "best") -> tuple[Record, Path]:
    """Return the record of the run in a folder, and the file of a checkpoint; see run_and_which.

    Raises ConfigError where there is no run that has begun to train, or not that checkpoint.
    """
    paths = RunPaths(Path(run))
    record = read_result(paths)
    if record.get("status") == DAMAGED:
        fix = f"put back a copy, or let the run write it: hydra.run.dir={run} resume=auto"
        raise ConfigError(f"{paths.result}: is damaged; {fix}")
    if "data" not in record:
        raise ConfigError(f"{run}: {no_run(paths.folder)}")
    if not re.fullmatch(_NAMES, which):
        raise ConfigError(f"which={which}: use best, last, a step or epoch:N")
    if paths.tokenizer.is_dir():  # its own place may be gone
        for holder in (record["config"]["dataset"], record["data"].get("inputs", {})):
            if "tokenizer" in holder:
                holder["tokenizer"] = str(paths.tokenizer.absolute())
    return record, checkpoint_named("", f"{run}@{which}", paths.folder, which).file


def no_run(folder: Path) -> str:
    """Return the message for a folder without a run that has begun to train."""
    if not folder.exists():
        return absent(folder, "folder of a run")
    below = [run.folder for run in results_below(folder)] if folder.is_dir() else []
    if below and below != [folder]:
        listed = shlex.join([*provenance.program().split(), "report", str(folder)])
        return f"holds {len(below)} runs; name one, such as {below[0]} ({listed} lists them)"
    return "is not a folder of a run that has begun to train; give that of one"
