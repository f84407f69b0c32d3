"""The origin of a run in its identity and record: the run that it continues, or is a fork of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expt.config import keys
from expt.config.identity import LENGTH, VERSION, Content, Identity, differing, digest, shown
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.runs import checkpoint_file
from expt.runs.named_checkpoint import WHICH, Checkpoint, checkpoint_named, no_run, run_named
from expt.runs.paths import RunPaths
from expt.runs.result import RUNNING, Forked, Record, result_of_any

OTHER_VERSION = (
    "is of another version of expt, whose runs are shown but not continued; start a new run"
)


def record_to_continue(config: RunConfig, paths: RunPaths | None = None) -> Record:
    """Return the record of the run that is continued; empty where a run begins.

    It is in the folder `paths`, if that has a checkpoint, or the one that `resume` names.
    """
    if paths and (checkpoint_file.candidates(paths.last) or paths.forked.exists()):
        return result_of_any(paths)
    with contextlib.suppress(ConfigError):  # the error there is reported later
        if config.resume not in (None, "auto"):
            return result_of_any(RunPaths(run_named("resume", str(config.resume))[0]))
    return Record()


def identity(config: RunConfig, content: Content, before: Record) -> Identity:
    """Return the identity of a run with this content, which continues that of the record `before`.

    A run that continues itself, only further, is the run that it would have been in one go.
    """
    alone = dataclasses.replace(config, resume=None)
    with contextlib.suppress(ConfigError, KeyError):
        then = dataclasses.replace(recorded(before["config"]), resume=None)
        made = before["content"]
        is_same = digest(then, made, but=LENGTH) == digest(alone, content, but=LENGTH)
        if is_same and digest(then, made) == before["identity"]:
            config = alone
    return Identity.of(config, content)


def fork_content(config: RunConfig, before: Record) -> Content:
    """Return the digests of the checkpoint that a fork begins from; none where it is no fork.

    `before` is the record of the run that it continues. Raises ConfigError where no run is forked.
    """
    made = before.get("content", Content())
    if "fork" in made and config.fork in (None, before.get("config", {}).get("fork")):
        return {"fork": made["fork"], "seedless_fork": made["seedless_fork"]}
    if config.fork is None:
        return {}
    try:
        record = fork_parent(config.fork)
        step = fork_checkpoint(config.fork).step
    except ConfigError:
        if config.resume is not None:  # its own checkpoint has continued it
            return {}
        raise
    if record.get("status") == RUNNING and (run_named("fork", config.fork)[1] or "last") in WHICH:
        warn(f"fork={config.fork}: the run is still under way; it is forked at step {step}")
    of, seedless = record["identity"], record["seedless_identity"]
    return {"fork": f"{of}@{step}", "seedless_fork": f"{seedless}@{step}"}


def fork_checkpoint(given: str, step: str = "") -> Checkpoint:
    """Return the checkpoint that `fork=given` names, or that run's of a `step`, if one is given."""
    run, which = run_named("fork", given)
    return checkpoint_named("fork", given, run, step or which or "last")


def fork_parent(given: str) -> Record:
    """Return the record of the run that `fork=given` names. Raises ConfigError for none."""
    run, _ = run_named("fork", given)
    record = result_of_any(RunPaths(run))
    if record.get("version", VERSION) != VERSION:
        raise ConfigError(f"fork={given}: {OTHER_VERSION}")
    if not {"config", "identity", "seedless_identity", "content", "arguments"} <= record.keys():
        if not Path(given).is_file():
            raise ConfigError(f"fork={given}: {no_run(run)}")
        alone = f"has no run around it; its weights alone are taken by weights={given}"
        raise ConfigError(f"fork={given}: {checkpoint_file.damage_of(Path(given)) or alone}")
    return record


def fork_entry(config: RunConfig, found: Checkpoint) -> Forked:
    """Return the entry of result.json for the checkpoint of another run that this one forks."""
    record = result_of_any(found.paths)
    return {
        "given": str(config.fork),
        "run": str(found.run.resolve()),
        "identity": record["identity"],
        "seedless_identity": record["seedless_identity"],
        "step": found.step,
        "epoch": found.epochs_done,
        "arguments": record["arguments"],
        "changed": _changes(found.config, config),
    }


def updated_fork_entry(record: Record, config: RunConfig) -> Forked:
    """Return the entry of the fork with this record, continued with the settings `config`."""
    entry = record["forked_from"]
    of_parent = {key: then for key, (then, _) in entry["changed"].items()}
    return {**entry, "changed": _changes({**keys.flat(record["config"]), **of_parent}, config)}


def _changes(parent: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Return both values of each setting that differs from the parent's and changes the numbers."""
    then = keys.flat(parent)
    now = keys.flat(shown(config))
    changed = differing(then, now, "result")
    groups = tuple(key.removesuffix("name") for key in changed if key.endswith(".name"))
    both = then.keys() & now.keys() - {*changed}  # of another optimizer the rate counts, too
    changed += sorted(x for x in both if groups and x.startswith(groups) and then[x] != now[x])
    where_begun = keys.varying("source")
    return {key: [then.get(key), now.get(key)] for key in changed if key not in where_begun}
