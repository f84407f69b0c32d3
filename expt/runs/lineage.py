"""The runs that a run comes from: the one that it continues, and the parent of a fork."""

from __future__ import annotations

import contextlib
import dataclasses

from expt.config import keys
from expt.config.identity import LENGTH, VERSION, Content, Identity, digest, shown
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.runs.checkpoint_file import candidates
from expt.runs.named_checkpoint import WHICH, Checkpoint, named, no_run, whole
from expt.runs.paths import RunPaths
from expt.runs.result import RUNNING, Forked, Record, result_of_any

OTHER_VERSION = (
    "is of another version of expt, whose runs are shown but not continued; start a new run"
)


def continued(config: RunConfig, paths: RunPaths | None = None) -> Record:
    """Return the record of the run that is continued; empty where a run begins.

    That is the one in its own folder `paths`, if it has a checkpoint, or the one that `resume`
    names.
    """
    if paths and (candidates(paths.last) or paths.forked.exists()):
        return result_of_any(paths)
    with contextlib.suppress(ConfigError):  # what is wrong there is said later
        if config.resume not in (None, "auto"):
            return result_of_any(RunPaths(named("resume", str(config.resume))[0]))
    return Record()


def identified(config: RunConfig, content: Content, before: Record) -> Identity:
    """Return the identity of a run with this content, which continues that of the record `before`.

    A run that continues itself, only further, is the run that it would have been in one go.
    """
    alone = dataclasses.replace(config, resume=None)
    with contextlib.suppress(ConfigError, KeyError):
        then, made = dataclasses.replace(recorded(before["config"]), resume=None), before["content"]
        is_same = digest(then, made, but=LENGTH) == digest(alone, content, but=LENGTH)
        if is_same and digest(then, made) == before["identity"]:
            config = alone
    return Identity.of(config, content)


def of_fork(config: RunConfig, before: Record) -> Content:
    """Return the digests of the checkpoint that a fork begins from; none where it is no fork.

    Raises ConfigError where no such run is.
    """
    made, then = before.get("content", Content()), before.get("config", {})
    if "fork" in made and config.fork in (None, then.get("fork")):
        return {"fork": made["fork"], "seedless_fork": made["seedless_fork"]}
    if config.fork is None:
        return {}
    try:
        record, found = record_of(config.fork), forked(config.fork)
    except ConfigError:
        if config.resume is not None:  # its own checkpoint has what came of it
            return {}
        raise
    if record.get("status") == RUNNING and (named("fork", config.fork)[1] or "last") in WHICH:
        warn(f"fork={config.fork}: the run is still under way; it is forked at step {found.step}")
    of, seedless = record["identity"], record["seedless_identity"]
    return {"fork": f"{of}@{found.step}", "seedless_fork": f"{seedless}@{found.step}"}


def forked(given: str, step: str = "") -> Checkpoint:
    """Return the checkpoint of the other run, of this step where it is known."""
    run, which = named("fork", given)
    return whole("fork", given, run, step or which or "last")


def record_of(given: str) -> Record:
    """Return the record of the run that `fork=given` names. Raises ConfigError for none."""
    run, _ = named("fork", given)
    record = result_of_any(RunPaths(run))
    if record.get("version", VERSION) != VERSION:
        raise ConfigError(f"fork={given}: {OTHER_VERSION}")
    if not {"config", "identity", "seedless_identity", "content", "arguments"} <= record.keys():
        raise ConfigError(f"fork={given}: {no_run(run)}")
    return record


def forked_from(config: RunConfig, found: Checkpoint) -> Forked:
    """Return what result.json says of the other run's checkpoint."""
    record = result_of_any(RunPaths(found.run))
    then, now = keys.flat(found.state["config"]), keys.flat(shown(config))
    begun = keys.varying("source")
    changed = (key for key in keys.differing(then, now, "result") if key not in begun)
    return {
        "given": str(config.fork),
        "run": str(found.run.resolve()),
        "identity": record["identity"],
        "seedless_identity": record["seedless_identity"],
        "step": found.step,
        "epoch": found.epochs_done,
        "arguments": record["arguments"],
        "changed": {key: [then.get(key), now.get(key)] for key in changed},
    }
