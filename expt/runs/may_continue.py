"""Check whether a run may continue from a checkpoint, as `resume` or `fork` demands.

Its settings (each key in expt.config.schema says when it may differ), its length, the plan of its
learning rates, its data and its code. Free of torch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from expt.config import keys, own_code
from expt.config.constraints import in_a_shell, plain, typed
from expt.config.groups import TargetScheduler, planned_steps
from expt.config.identity import VERSION, Rule, differing, shown, without_places
from expt.config.length import effective
from expt.config.parse import as_typed, recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.runs import lineage, provenance
from expt.runs.named_checkpoint import Checkpoint
from expt.runs.overrides import joined
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import result_of_any

_OF_EPOCH = {"batch_size", "drop_last", "dataset.train_limit"}
"""Keys that change the number of an epoch's steps."""
_OF_PLAN = ("scheduler.epochs", "scheduler.kwargs.total_steps")
_OF_END = ("epochs", "max_steps", *_OF_PLAN)
_OTHER = {
    "data": "dataset: its files are not those that {run} was trained on",
    "base": "model.path={model.path}: its files are not those that {run} began from",
    "frozen": "{frozen}: the frozen networks are not those that {run} was trained with",
}


class Source(NamedTuple):
    """The checkpoint that a run begins from, and the word that names it."""

    rule: Literal["resume", "fork"]
    checkpoint: Checkpoint

    def is_own(self, paths: RunPaths) -> bool:
        """Return whether a run resumes from a checkpoint of its own folder."""
        is_here = self.checkpoint.run.resolve() == paths.folder.resolve()
        return is_here and self.rule == "resume"

    def instead(self, config: RunConfig) -> str:
        """Return the advice where the settings of the run forbid it to begin so."""
        fork = self._replace(rule="fork")
        if self.rule == "fork" or fork.changed(config):
            return self.by_weights()
        run, step = shlex.quote(str(self.checkpoint.run)), self.checkpoint.step
        settings = shown(config)
        changed = [key for key in self.changed(config) if key != "weights"]  # it has the parent's
        kept = [_typed(key, settings) for key in changed]  # it has all others
        lengths = fork.least_lengths(config)
        if not lengths:
            asked = {key: settings[key] for key in ("epochs", "max_steps")}
            then = self.checkpoint.config
            lengths = {key: n for key, n in asked.items() if n not in (None, then.get(key))}
        words = [f"fork={run}@{step}", *kept, *(f"{key}={n}" for key, n in lengths.items())]
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
        rule: Rule = self.rule
        if rule == "fork" and not self.checkpoint.ends_epoch:
            rule = "fork_within_epoch"
        exempt = _OF_PLAN if rule == "resume" else keys.varying("source")
        both = self.checkpoint.config, shown(config)
        then, now = map(keys.flat, map(without_places, both) if rule == "resume" else both)
        found = [key for key in differing(then, now, rule) if key not in exempt]
        if rule == "resume":
            found = [key for key in found if not self._is_ahead(key, config)]
        return found

    def _is_ahead(self, key: str, config: RunConfig) -> bool:
        """Return whether a key has had no effect until this checkpoint, then and now."""
        if keys.meaning(key).resume != "ahead":
            return False
        step, state = self.checkpoint.step, self.checkpoint.state
        lengths = state["steps_per_epoch"], step, state["position"].get("offset", 0)
        both = recorded(self.checkpoint.config), config
        return all(effective(each, *lengths).get(key) == math.inf for each in both)


def check(source: Source, request: RunRequest) -> None:
    """Raise ConfigError where settings, length, data or code forbid a run to begin so."""
    found, config = source.checkpoint, request.config
    if found.state.get("version") != VERSION:
        raise ConfigError(f"{found.file}: {lineage.OTHER_VERSION}")
    if source.rule == "fork" and found.state.get("owed"):
        fix = f"let it continue first, or {source.by_weights()}"
        raise ConfigError(f"fork={config.fork}: the evaluation at {found} is still to come; {fix}")
    if problems := [*_problems_of_settings(source, config)]:
        if source.rule == "resume" and not source.is_own(request.paths):
            run = shlex.quote(str(found.run))
            problems[-1] += (
                f"; with its own settings it continues by hydra.run.dir={run} resume=auto"
            )
        raise ConfigError(problems)
    _refuse_short(source, config)
    record, content = result_of_any(found.paths), request.identity.content
    made = record.get("content")
    if source.rule == "resume":
        _refuse_other_fork(config, found, made or {}, content)
        _refuse_other_plan(source, config)
    if made is None:  # a checkpoint without its run
        return
    new, by_weights = "start a new run", source.by_weights()
    instead = {"data": by_weights, "base": new}
    if source.rule == "resume":
        instead = {"data": new, "base": new, "frozen": by_weights}
    for part, fix in instead.items():
        if made.get(part) != content.get(part):
            frozen = [f"{key}={name}" for key, name in own_code.frozen_in(plain(config))]
            names = {"model": config.model, "frozen": ", ".join(frozen)}
            text = _OTHER[part].format(run=found.run, **names)
            raise ConfigError(f"{text}; give these, or {fix}")

    def today(then: Collection[str]) -> str | None:  # callbacks may be others now
        same = {*then} == {*own_code.targets(config)}
        return content.get("code") if same else own_code.fingerprint([*then])

    if own_code.has_other_source(record, today):
        _judge_other_code(source, request, own_code.changed_source(record))


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
        changed = {*differing(keys.flat(found.config), now, "result")}
        for key in sorted(_OF_EPOCH & changed):
            yield (
                f"max_steps={config.max_steps}: with another {key} an epoch has another"
                " number of steps; give epochs, and max_steps=null"
            )


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


def _refuse_other_fork(
    config: RunConfig, found: Checkpoint, made: Mapping[str, Any], content: Mapping[str, Any]
) -> None:
    """Raise ConfigError where a run that is resumed would have another parent."""
    parent = found.config.get("fork")
    if config.fork not in (None, parent) and made.get("fork") != content.get("fork", ""):
        whose = "no fork" if parent is None else f"a fork of {parent}"
        raise ConfigError(f"fork={config.fork}: {found.run} is {whose}; leave it out")


def _refuse_other_plan(source: Source, config: RunConfig) -> None:
    """Raise ConfigError where the learning rates until here were planned to another end."""
    found = source.checkpoint
    then, per_epoch = found.state["plan"], found.state["steps_per_epoch"]
    total, scheduler = config.total_steps(per_epoch), config.scheduler
    if not isinstance(scheduler, TargetScheduler):
        now = planned_steps(scheduler, steps_per_epoch=per_epoch, total_steps=total)
        keep = f"scheduler.epochs={(then or 0) / per_epoch:.10g}"
    else:
        counts = scheduler.step_counts(steps_per_epoch=per_epoch, total_steps=total)
        now = scheduler.kwargs.get("total_steps") or counts["total_steps"]
        keep = f"+scheduler.total_steps={then}"
    whose = "the schedule", "learning rates", f"keep its plan by {keep}, or "
    if then in (None, now):  # a task may have planned, too
        position = found.state["position"]
        now = config.total_steps(per_epoch, position.get("offset", 0))
        then, whose = position.get("planned", now), ("the task", "losses", "")
    if then == now:
        return
    settings = shown(config)
    before, after = keys.flat(found.config), keys.flat(settings)
    key = next((key for key in _OF_END if before.get(key) != after.get(key)), "epochs")
    raise ConfigError(
        f"{_typed(key, settings)}: {whose[0]} of {found.run} was planned to end at step {then}; to"
        f" end at step {now} it would have needed other {whose[1]} until here; {whose[2]}"
        f"{source.by_weights()}"
    )


def _judge_other_code(source: Source, request: RunRequest, names: str) -> None:
    """Warn of custom code that has changed; raise ConfigError if one record can't be of both."""
    found = source.checkpoint
    other = f"{found.run}: the source of its custom classes has changed ({names})"
    total = request.config.total_steps(found.state["steps_per_epoch"])
    is_trained = total <= found.step == found.state["evaluated_at"]
    if source.rule == "fork" or not (source.is_own(request.paths) or is_trained):
        warn(f"{other}; the continued run is trained with both versions")
        return
    run, program = shlex.quote(str(found.run)), provenance.program()
    fix = f"type its settings with resume={run} to continue in a new folder"
    if is_trained:
        fix = f"test it by {program} evaluate {run}"
    raise ConfigError(f"{other}; {fix}, or train it again by {program} rerun {run}")


def _typed(key: str, config: Mapping[str, Any]) -> str:
    """Return a setting as it is typed in a shell; a custom class with its arguments."""
    group = key.removesuffix(".name")
    if group != key and "_target_" in (node := as_typed(config.get(group)) or ()):
        return in_a_shell(f"{group}={typed(node, exact=True)}")
    name = re.sub(r"\.target$", "._target_", group.replace(".kwargs", ""))
    return in_a_shell(f"{name}={typed(keys.flat(config).get(key))}")
