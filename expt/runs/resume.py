"""Where a run goes on from: a checkpoint found and checked, the record cut back to it.

Before workers start.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expt.config import keys
from expt.config.identity import Content, shown
from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.runs import checkpoint_file, metrics_file, provenance, tags
from expt.runs.paths import RunPaths
from expt.runs.plan import OF_PLAN, refuse_other_plan
from expt.runs.result import COMPLETED, Record, Resumed, result_of_any


def find(
    config: RunConfig,
    content: Content,
    paths: RunPaths,
    *,
    may_have_run: bool,
    else_from: Path | None = None,
) -> Path | None:
    """The checkpoint from which the run of `paths` resumes, or that of `else_from`; None for a new
    start.

    Damaged checkpoints of this run are set aside, with a warning. Raises CheckpointError if none is
    left, ConfigError if it is another experiment's."""
    source = None
    if may_have_run:
        source = _in_folder(paths)
        if source is None and any(paths.checkpoints.glob("*.corrupt*")):
            raise CheckpointError(
                f"{paths.checkpoints}: every checkpoint there is damaged; {_mend(paths)}"
            )
        if source is None and paths.metrics.exists():
            warn(f"{paths.folder}: has no checkpoint, the run starts from the beginning")
    if source is None and config.resume not in (None, "auto"):
        source = _elsewhere(Path(str(config.resume)))
    if source is None and else_from is not None:
        source = _elsewhere(else_from)
    if source is not None:
        state = checkpoint_file.read(source)
        _refuse_another(config, state["config"], source)
        _refuse_another_fork(config, content, state["config"], source)
        _refuse_shorter(config, state["position"], source)
        _refuse_other_content(config, content, state["position"], source, paths)
        record = result_of_any(RunPaths(source.parent.parent))
        refuse_other_plan(config, state, record.get("steps_per_epoch"), source)
        source = before_its_end(config, state, source)
    return source


def cut_back(source: Path, paths: RunPaths) -> Resumed:
    """Make the run's folder what it was when `source` was written; returns what result.json says of
    that.
    """
    state = checkpoint_file.read(source)
    of_source = RunPaths(source.parent.parent)
    paths.metrics.write_bytes(lines_of(of_source, state))
    has_best = state["best"] and _has_best(paths.best, state)
    if not has_best and paths.best.exists() and (damage := checkpoint_file.damage_of(paths.best)):
        warn(
            f"{damage}; set aside as {checkpoint_file.set_aside(paths.best)}"
        )  # the test at the end would be of it
    if state["best"] and not has_best:
        beside, last = source.with_name(paths.best.name), source.with_name(paths.last.name)
        there = (
            source,
            *map(_before, (paths.best, beside)),
            beside,
            *checkpoint_file.candidates(last),
        )
        best = next((path for path in there if _has_best(path, state)), None)
        if best is not None:
            paths.checkpoints.mkdir(parents=True, exist_ok=True)
            checkpoint_file.keep_as(best, paths.best)
        else:
            warn(
                f"{beside}: is not the best that {source.name} knows of; the best is chosen from"
                " later epochs"
            )
    return {"checkpoint": str(source), "step": state["position"]["step"]}


def lines_of(source: RunPaths, state: Mapping[str, Any]) -> bytes:
    """Of metrics.jsonl what was there when the checkpoint with this `state` was written."""
    tests_later = state["config"].get("eval_split") != "test"
    step = state["position"]["step"]
    return metrics_file.until(source, state["metrics_bytes"], step, tests_later=tests_later)


def _in_folder(paths: RunPaths) -> Path | None:
    """The newest of this very run.

    Raises ConfigError where nothing but a damaged file says that there is one.
    """
    found = checkpoint_file.candidates(paths.last)
    if paths.result.exists() or paths.metrics.exists():
        try:
            return _newest(found, mine=True)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_mend(paths)}") from None
    try:
        return _newest(found, mine=False)
    except CheckpointError as error:
        raise ConfigError(
            f"{paths.folder}: no {paths.result.name} says that a run is there, and {error}; choose"
            " another folder"
        ) from error


def _mend(paths: RunPaths) -> str:
    return (
        f"put back a copy, or remove the folder {paths.checkpoints}: the run then starts from the"
        " beginning"
    )


def _elsewhere(path: Path) -> Path:
    found = [path] if path.is_file() else checkpoint_file.candidates(RunPaths(path).last)
    try:
        source = _newest(found, mine=False)
    except CheckpointError as error:
        raise ConfigError(
            f"resume={path}: {error}; give another run's folder, or another checkpoint"
        ) from error
    if source is None:
        raise ConfigError(
            f"resume={path}: there is no checkpoint; give a run's folder, or a checkpoint in it"
        )
    return source


def _newest(found: list[Path], *, mine: bool) -> Path | None:
    """The first that is whole. Raises CheckpointError if there are some, and none is."""
    problem = None
    for path in found:
        try:
            checkpoint_file.check(path)
        except CheckpointError as error:
            problem = error
            where = f"set aside as {checkpoint_file.set_aside(path)}" if mine else "passed over"
            warn(f"{error}; {where}")
        else:
            return path
    if problem:
        raise CheckpointError(f"no checkpoint is left to go on from: {problem}")
    return None


def before_its_end(config: RunConfig, state: Mapping[str, Any], source: Path) -> Path:
    """`source`, or what it was before its epoch was ended early, where the run goes on in that
    epoch now.
    """
    path, position = RunPaths(source.parent.parent).within_epoch, state["position"]
    steps_per_epoch = state.get("steps_per_epoch")
    if (
        steps_per_epoch is None
        or not path.is_file()
        or not 0 < position["step_in_epoch"] < steps_per_epoch
    ):
        return source
    total = min(
        config.epochs * steps_per_epoch + position.get("offset", 0), config.max_steps or math.inf
    )
    try:
        checkpoint_file.check(path)
        of_this = checkpoint_file.read(path)["position"] == position
    except CheckpointError as error:
        warn(
            f"{error}; what goes on has the end of an epoch in its midst, at step"
            f" {position['step']}"
        )
        return source
    return path if of_this and total > position["step"] else source


def _before(best: Path) -> Path:
    return checkpoint_file.older(best, 1)


def _has_best(path: Path, state: Mapping[str, Any]) -> bool:
    try:
        found = checkpoint_file.read(path)  # before its sum is made, which reads all of it
        return bool(
            found["is_best"]
            and found["best"] == state["best"]
            and checkpoint_file.damage_of(path) is None
        )
    except Exception:  # missing, or damaged in one of many ways
        return False


def _refuse_another(config: RunConfig, saved: Mapping[str, Any], source: Path) -> None:
    now, then = keys.flat(shown(config)), keys.flat(saved)
    differs = [key for key in keys.differing(then, now, "resume") if key not in OF_PLAN]
    problems = [
        f"{key}={now.get(key)}: the checkpoint is of a run with {then.get(key)}" for key in differs
    ]
    if problems:
        raise ConfigError(
            [*problems, f"{source} can't be gone on from so; give what it had, or start a new run"]
        )


def _refuse_another_fork(
    config: RunConfig, content: Content, saved: Mapping[str, Any], source: Path
) -> None:
    """Raise ConfigError where the run is no fork of what `fork` names; its text does, should that
    be gone.
    """
    then = saved.get("fork")
    if config.fork in (None, then) or result_of_any(RunPaths(source.parent.parent)).get(
        "content", {}
    ).get("fork") == (content.fork or ""):
        return
    whose = "no fork" if then is None else f"a fork of {then}"
    raise ConfigError(
        f"fork={config.fork}: the run of {source} is {whose}; leave it out, or choose another"
        " folder"
    )


def _refuse_shorter(config: RunConfig, position: Mapping[str, int], source: Path) -> None:
    """Raise ConfigError where more has been trained already than is asked for: it would be said to
    be less.
    """
    asked: dict[str, tuple[int | None, int]] = {
        "epochs": (config.epochs, position["epoch"]),
        "max_steps": (config.max_steps, position["step"]),
    }
    for key, (wanted, done) in asked.items():
        if wanted is not None and wanted < done:
            raise ConfigError(
                f"{key}={wanted}: the run of {source} has come to"
                f" {key.removeprefix('max_').removesuffix('s')} {done} already; give {key}={done}"
                " or more, or start a new run"
            )


def _refuse_other_content(
    config: RunConfig, content: Content, position: Mapping[str, int], source: Path, paths: RunPaths
) -> None:
    """Raise ConfigError where the data is other now, or where the record would hide that the source
    is.
    """
    folder = source.parent.parent
    record = result_of_any(RunPaths(folder))
    then = record.get("content")
    if then is None:  # of a version that did not look
        return
    if then["data"] != content.data:
        raise ConfigError(
            f"dataset: its files are not those that the run of {source} was trained on; "
            f"{_place_of(config.dataset)}, or start a new run"
        )
    if then["code"] == content.code:
        return
    other = "its own classes have other source now"
    anew = f"to train it anew: {rerun_command(folder)}"
    if _is_trained(config, position, record):
        if record.get("status") == COMPLETED or tags.metric("loss", "test") in (
            record.get("metrics") or {}
        ):
            raise ConfigError(f"{folder}: the run is complete, and {other}; {anew}")
        raise ConfigError(
            f"{folder}: the run is trained to its end, but not tested, and {other}; to test it: "
            f"{evaluate_command(folder)}; {anew}"
        )
    if (
        folder.resolve() == paths.folder.resolve()
    ):  # one record can't say that its numbers are of both
        raise ConfigError(
            f"{folder}: {other}; to go on in a new folder, type {settings_to_resume(folder)};"
            f" {anew}"
        )
    warn(f"{source}: the run's own classes have other source now; what goes on from it is of both")


def is_trained(config: RunConfig, paths: RunPaths) -> bool:
    """Whether the run of `paths` has a checkpoint of the end of its training."""
    try:
        position = checkpoint_file.read(paths.last)["position"]
    except Exception:  # as of _has_best
        return False
    return _is_trained(config, position, result_of_any(paths))


def _is_trained(config: RunConfig, position: Mapping[str, int], record: Record) -> bool:
    of_epochs = config.epochs * record.get("steps_per_epoch", math.inf)
    return position["step"] >= min(of_epochs, config.max_steps or math.inf)


def evaluate_command(folder: Path) -> str:
    """What to type to test the weights of a run, whatever its own classes are now."""
    return f"{provenance.program()} evaluate {shlex.quote(str(folder))}"


def rerun_command(folder: Path) -> str:
    """What to type to train a run anew, in a new folder."""
    return f"{provenance.program()} rerun {shlex.quote(str(folder))}"


def settings_to_resume(folder: Path) -> str:
    """What to type to go on from a run in a new folder, as after a change of its own classes."""
    return f"its settings with {shlex.quote(f'resume={folder}')} and without hydra.run.dir"


def _place_of(dataset: object) -> str:
    """What to do for the files of a dataset to be found."""
    keys = [key for key in ("root", "path") if hasattr(dataset, key)]
    return f"give dataset.{keys[0]}=PATH with the same files" if keys else "put these back"
