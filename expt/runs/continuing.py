"""Continue from a run: `resume` is the same run further, `fork` another from all of its state.

Both begin from a checkpoint, which is found, compared as `resume` or `fork` demands (each key in
expt.config.schema says when it may differ), and brought into the run's folder. All of it happens
before workers start, and free of torch.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from expt.config import keys, own_code
from expt.config.constraints import typed
from expt.config.groups import TargetScheduler, planned_steps
from expt.config.identity import VERSION, shown
from expt.config.length import effective
from expt.config.parse import as_typed, recorded
from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.runs import checkpoint_file, lineage, metrics_file, provenance
from expt.runs.checkpoint_file import candidates
from expt.runs.named_checkpoint import Checkpoint, checkpoint_named, checkpoints, read, run_named
from expt.runs.overrides import joined, literal
from expt.runs.paths import RunPaths, set_aside, written
from expt.runs.request import RunRequest
from expt.runs.result import result_of_any

_OF_EPOCH = {"batch_size", "drop_last", "dataset.train_limit"}
"""Keys that change the number of an epoch's steps."""
_OF_PLAN = ("scheduler.epochs", "scheduler.kwargs.total_steps")
_OF_END = ("epochs", "max_steps", *_OF_PLAN)
_TRIES = 3
"""Attempts to read a file that a run under way may replace meanwhile."""


class Source(NamedTuple):
    """The checkpoint that a run begins from, and the word that names it."""

    rule: Literal["resume", "fork"]
    checkpoint: Checkpoint

    def instead(self, config: RunConfig) -> str:
        """Return the advice where the settings of the run forbid it to begin so."""
        fork = self._replace(rule="fork")
        if self.rule == "fork" or fork.changed(config):
            return self.by_weights()
        run, step = shlex.quote(str(self.checkpoint.run)), self.checkpoint.step
        settings, then = shown(config), self.checkpoint.config
        kept = [_typed(key, settings) for key in self.changed(config)]  # it has all others
        longer = {key: settings[key] for key in ("epochs", "max_steps")}
        longer = {key: n for key, n in longer.items() if n not in (None, then.get(key))}
        lengths = (fork.least_lengths(config) or longer).items()
        words = [f"fork={run}@{step}", *kept, *(f"{key}={n}" for key, n in lengths)]
        return f"begin another run from there by {' '.join(words)}"

    def by_weights(self) -> str:
        """Return the advice where nothing of the checkpoint but weights may be used."""
        run = shlex.quote(str(self.checkpoint.run))
        return f"begin a new run from what fits of its weights by weights={run}@last"

    def least_lengths(self, config: RunConfig) -> dict[str, int]:
        """Return the least values of `epochs` and `max_steps`, of those that are below them."""
        found = self.checkpoint
        least = {"epochs": found.epoch, "max_steps": found.step}
        if self.rule == "fork":  # which trains further
            least = {"epochs": found.epochs_done + 1, "max_steps": found.step + 1}
        asked = {key: getattr(config, key) for key in least}
        return {key: n for key, n in least.items() if asked[key] is not None and asked[key] < n}

    def changed(self, config: RunConfig) -> list[str]:
        """Return the keys that differ from the checkpoint's run though they must not."""
        rule: keys.Rule = self.rule
        if rule == "fork" and not self.checkpoint.ends_epoch:
            rule = "fork_within_epoch"
        exempt = _OF_PLAN if rule == "resume" else keys.varying("source")
        then, now = keys.flat(self.checkpoint.config), keys.flat(shown(config))
        found = [key for key in keys.differing(then, now, rule) if key not in exempt]
        if rule == "resume":
            found = [key for key in found if not self._is_ahead(key, config)]
        return found

    def _is_ahead(self, key: str, config: RunConfig) -> bool:
        """Return whether a key has had no effect until this checkpoint, then and now."""
        if keys.meaning(key).resume != "ahead":
            return False
        found = self.checkpoint
        lengths = (
            found.state["steps_per_epoch"],
            found.step,
            found.state["position"].get("offset", 0),
        )
        both = (recorded(found.config), config)
        return all(effective(each, *lengths).get(key) == math.inf for each in both)


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
    _refuse(source, request)
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


def _refuse(source: Source, request: RunRequest) -> None:
    """Raise ConfigError where settings, length, data or code forbid to begin so."""
    found, config, content = source.checkpoint, request.config, request.identity.content
    if found.state.get("version") != VERSION:
        raise ConfigError(f"{found.file}: {lineage.OTHER_VERSION}")
    if problems := [*_problems_of_settings(source, config)]:
        raise ConfigError(problems)
    _refuse_short(source, config)
    record = result_of_any(found.paths)
    made = record.get("content")
    if source.rule == "resume":
        then, own = found.config.get("fork"), (made or {}).get("fork")
        if config.fork not in (None, then) and own != content.get("fork", ""):
            whose = "no fork" if then is None else f"a fork of {then}"
            raise ConfigError(f"fork={config.fork}: {found.run} is {whose}; leave it out")
        _refuse_other_plan(config, found)
    if made is None:  # a checkpoint without its run
        return
    if made.get("data") != content.get("data"):
        instead = "start a new run" if source.rule == "resume" else source.by_weights()
        raise ConfigError(
            f"dataset: its files are not those that {found.run} was trained on; give these, or"
            f" {instead}"
        )
    if made.get("base") != content.get("base"):
        raise ConfigError(
            f"model.path={config.model.path}: its files are not those that {found.run} began from;"
            " give these, or start a new run"
        )
    if made.get("code") != content.get("code") or own_code.changed(record):
        _refuse_other_code(source, request)


def _refuse_other_code(source: Source, request: RunRequest) -> None:
    """Raise ConfigError where one record can't be of both versions of the code; else warn."""
    found = source.checkpoint
    other = f"{found.run}: the source of its custom classes has changed"
    is_trained = found.step >= request.config.total_steps(found.state["steps_per_epoch"])
    is_here = found.run.resolve() == request.paths.folder.resolve()
    if source.rule == "fork" or not (is_here or is_trained):
        warn(f"{other}; the continued run is trained with both versions")
        return
    run, program = shlex.quote(str(found.run)), provenance.program()
    fix = f"type its settings with resume={run} to continue in a new folder"
    if is_trained:
        fix = f"test it by {program} evaluate {run}"
    raise ConfigError(f"{other}; {fix}, or train it again by {program} rerun {run}")


def _problems_of_settings(source: Source, config: RunConfig) -> Iterator[str]:
    """Yield a problem for each setting that must be as the checkpoint's run has it."""
    found, settings = source.checkpoint, shown(config)
    now = keys.flat(settings)
    for key in source.changed(config):
        line = f"{_typed(key, settings)}: {found.run} has {_typed(key, found.config)}"
        if source.rule == "fork" and keys.meaning_in(now, key).fork == "epoch":
            yield f"{line}, which cannot change within an epoch, at {found}; fork an epoch's end"
        else:
            keep = f"a {source.rule} must keep that value"
            yield f"{line}, and {keep}; type it, or {source.instead(config)}"
    if source.rule == "fork" and config.weights is not None:
        yield f"weights={config.weights}: a fork has its parent's weights; leave it out"
    if source.rule == "fork" and config.max_steps is not None:
        changed = {*keys.differing(keys.flat(found.config), now, "result")}
        for key in sorted(_OF_EPOCH & changed):
            yield (
                f"max_steps={config.max_steps}: with another {key} an epoch has another"
                " number of steps; give epochs, and max_steps=null"
            )


def _typed(key: str, config: Mapping[str, Any]) -> str:
    """Return a setting as it is typed; a custom class with its arguments, in quotes."""
    group = key.removesuffix(".name")
    if group != key and "_target_" in (node := as_typed(config.get(group)) or ()):
        return joined([f"{group}={literal(node)}"])
    name = re.sub(r"\.target$", "._target_", group.replace(".kwargs", ""))
    return f"{name}={typed(keys.flat(config).get(key))}"


def _refuse_short(source: Source, config: RunConfig) -> None:
    """Raise ConfigError where more is trained than asked for, or nothing is left for a fork."""
    if not (least := source.least_lengths(config)):
        return
    asked = " ".join(f"{key}={getattr(config, key)}" for key in least)
    words = [f"{key}={number}" for key, number in least.items()]
    fix = f"give {' '.join(words)} or more"
    if source.rule == "fork":
        fix = f"a fork trains further; {fix} ({joined([f'fork={config.fork}', *words])})"
    found = source.checkpoint
    reached = f"{found.run} has reached {found} already"
    raise ConfigError(f"{asked}: {reached}; {fix}, or an earlier checkpoint")


def _refuse_other_plan(config: RunConfig, found: Checkpoint) -> None:
    """Raise ConfigError where the learning rates until here were planned to another end."""
    then, per_epoch = found.state["plan"], found.state["steps_per_epoch"]
    total, scheduler = config.total_steps(per_epoch), config.scheduler
    if not isinstance(scheduler, TargetScheduler):
        now = planned_steps(scheduler, steps_per_epoch=per_epoch, total_steps=total)
        keep = f"scheduler.epochs={(then or 0) / per_epoch:.10g}"
    else:
        by_epoch = scheduler.interval == "epoch"
        end = math.ceil(total / per_epoch) if by_epoch else total
        now = scheduler.kwargs.get("total_steps", end)
        keep = f"+scheduler.total_steps={then}"
    if then in (None, now):
        return
    before, after = keys.flat(found.config), keys.flat(shown(config))
    key = next((key for key in _OF_END if before.get(key) != after.get(key)), "epochs")
    run = shlex.quote(str(found.run))
    raise ConfigError(
        f"{key.replace('.kwargs', '')}={typed(after.get(key))}: the schedule of {run} was"
        f" planned to end at step {then}; to end at step {now} it would have needed other learning"
        f" rates until here; keep its plan by {keep}, or begin a new run from its weights by"
        f" weights={run}@last"
    )


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
    for _ in range(_TRIES):
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
