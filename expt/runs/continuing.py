"""Continue from a run: `resume` is the same run further, `fork` another from all of its state.

Both begin from a checkpoint, which is found, compared (see `may_continue`), and brought into the
run's folder. All of it happens before workers start, and free of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.runs import checkpoint_file, lineage, metrics_file
from expt.runs.checkpoint_file import candidates
from expt.runs.may_continue import Source, check
from expt.runs.named_checkpoint import Checkpoint, checkpoint_named, checkpoints, read, run_named
from expt.runs.paths import RunPaths, set_aside, written
from expt.runs.request import RunRequest


def find(request: RunRequest) -> Source | None:
    """Return the checkpoint that the run begins from; None for a new start.

    Its own newest checkpoint if it resumes, else the one that `resume` names, else that of `fork`.
    Damaged checkpoints of its own are set aside. Raises CheckpointError if none of them is left,
    ConfigError where the run cannot begin from it.
    """
    config, paths = request.config, request.paths
    if request.resumes and (own := _own(paths)) is not None:
        source = Source("resume", own)
    elif request.source is not None:
        source = Source("resume", _elsewhere(request.source))
    elif config.fork is not None:
        step = request.identity.content.get("fork", "").rpartition("@")[2]
        there = [paths.forked] if paths.forked.exists() else []
        taken = _first_whole(there, lambda _: "it is taken again")
        source = Source("fork", taken or lineage.fork_checkpoint(config.fork, step))
    else:
        if request.resumes and paths.metrics.exists():
            warn(f"{paths.folder}: has no checkpoint, the run starts from the beginning")
        return None
    check(source, request)
    return source._replace(checkpoint=_to_train_further(config, source.checkpoint))


def _own(paths: RunPaths) -> Checkpoint | None:
    files = candidates(paths.last)
    is_run = paths.result.exists() or paths.metrics.exists()
    if files and not is_run and (damage := checkpoint_file.damage_of(files[0])):
        raise ConfigError(
            f"{damage}, and no {paths.result.name} says that a run is there; choose another folder"
        )
    found = _first_whole(files, lambda file: f"set aside as {set_aside(file)}")
    if not found and (files or any(paths.checkpoints.glob(f"{paths.last.stem}*.corrupt*"))):
        raise CheckpointError(
            f"{paths.checkpoints}: every checkpoint there is damaged; put back a copy, or remove"
            " that folder for the run to start from the beginning"
        )
    return found


def _elsewhere(given: Path) -> Checkpoint:
    """Return the newest checkpoint of another run that is whole, or the one that is named."""
    if given.is_file():
        if damage := checkpoint_file.damage_of(given):
            raise ConfigError(f"resume={given}: {damage}; give another checkpoint")
        return read(given)
    run, which = run_named("resume", str(given))
    if which:
        return checkpoint_named("resume", str(given), run, which)
    if found := _first_whole(candidates(RunPaths(run).last), lambda _: "passed over"):
        return found
    raise ConfigError(f"resume={given}: it has no checkpoint that is whole; give another run")


def _first_whole(files: Iterable[Path], pass_over: Callable[[Path], str]) -> Checkpoint | None:
    """Return the first whole checkpoint; `pass_over` damaged ones, with a warning in its words."""
    for file in files:
        if (damage := checkpoint_file.damage_of(file)) is None:
            return read(file)
        warn(f"{damage}; {pass_over(file)}")
    return None


def _to_train_further(config: RunConfig, found: Checkpoint) -> Checkpoint:
    """Return the checkpoint; if the run was ended there and trains further, the state before."""
    offset = found.state["position"].get("offset", 0)
    if config.total_steps(found.state["steps_per_epoch"], offset) <= found.step:
        return found
    path = found.paths.before_end
    if not path.is_file() or (damage := checkpoint_file.damage_of(path)) is None:
        return _before_end(found) or found
    warn(f"{damage}; the run continues from its end, at {found}")
    return found


def _before_end(found: Checkpoint) -> Checkpoint | None:
    """Return the state before the run was ended at this checkpoint; it may be damaged."""
    with contextlib.suppress(CheckpointError):
        before = read(found.paths.before_end)
        if before.state["position"] == found.state["position"]:
            return before
    return None


def take(source: Source, paths: RunPaths) -> Path:
    """Put the run's folder back to the moment of the checkpoint; return its file there.

    From then on the run has no need of the other's folder. Raises CheckpointError if it is damaged.
    """
    rule, found = source
    file = found.file
    before = _before_end(found) if rule == "resume" else None
    if found.run.resolve() != paths.folder.resolve():
        file = paths.forked if rule == "fork" else paths.last
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        _bring(found, file)
        if before and not checkpoint_file.damage_of(before.file):  # to be trained further, too
            checkpoint_file.keep_as(before.file, paths.before_end)
    tests_later = found.config.get("eval_split") != "test"
    size = found.state["metrics_bytes"]
    lines = metrics_file.until(found.paths, size, found.step, tests_later=tests_later)
    with written(paths.metrics) as metrics:
        metrics.write(lines)
    if rule == "resume":
        _bring_bests(found, before, paths)
    return file


def _bring(found: Checkpoint, target: Path) -> None:
    """Give the checkpoint the name `target`; a run under way may rename or replace it meanwhile."""
    file = found.file
    for _ in range(checkpoint_file.TRIES):
        problem = "it was replaced by another meanwhile"
        try:
            checkpoint_file.keep_as(file, target)
            checkpoint_file.check(target)
            if read(target).step == found.step:
                return
        except (CheckpointError, OSError) as error:
            problem = str(error)
        target.unlink(missing_ok=True)
        checkpoint_file.remove_unnamed(target.parent)
        same = (each for each in checkpoints(found.run) if each.step == found.step)
        file = next(same, found).file
    raise CheckpointError(f"{found.file}: cannot be taken ({problem}); give another checkpoint")


def _bring_bests(found: Checkpoint, before: Checkpoint | None, paths: RunPaths) -> None:
    """Put the best checkpoints back to the moment when this one was written.

    Also those of the state `before` the run was ended there.
    """
    bests = found.state["bests"]
    if before:
        bests = [*bests, *(each for each in before.state["bests"] if each not in bests)]
    others = [checkpoint_file.numbered(paths.best, best["step"]) for best in bests[1:]]
    wanted = [*zip((paths.best, *others), bests, strict=False)]
    if bests and _is_of(paths.best, bests[0]):
        del wanted[0]
    elif paths.best.exists() and (damage := checkpoint_file.damage_of(paths.best)):
        warn(f"{damage}; set aside as {set_aside(paths.best)}")
    origin = found.paths
    known = [found.file]
    for newest in (paths.best, origin.best, origin.last):
        known += candidates(newest)
    # The best one last: the file in its place may be another of them.
    for file, best in reversed(wanted):
        source = next((each for each in (file, *known) if _is_of(each, best)), None)
        if source is not None and source != file:
            paths.checkpoints.mkdir(parents=True, exist_ok=True)
            checkpoint_file.keep_as(source, file)
        elif source is None and file == paths.best:
            warn(
                f"{origin.best}: is not the best checkpoint that {found.file.name} recorded; the"
                " best is now chosen among later ones"
            )


def _is_of(path: Path, evaluated: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is whole and of this evaluation."""
    try:
        found = read(path).state["evaluated"]  # before it is checked, which reads all
    except CheckpointError:
        return False
    return bool(found == evaluated) and checkpoint_file.damage_of(path) is None
