"""A run that goes on from another's checkpoint with other settings: found, checked, and taken into
its folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from expt.config import keys
from expt.config.identity import Content, shown
from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.runs import checkpoint_file
from expt.runs.forkable import TRIES, Found, all_of, choice, damaged, is_meant, whole_of, whole_ones
from expt.runs.parent import named
from expt.runs.paths import RunPaths
from expt.runs.result import RUNNING, Forked, Record, result_of_any
from expt.runs.resume import before_its_end, lines_of
from expt.runs.weights_file import WHICH

OF_LENGTH = {"batch_size", "drop_last", "dataset.train_limit"}
"""What changes the number of an epoch's steps."""


def identified(given: str) -> tuple[str, str]:
    """What identifies the checkpoint of `fork=given`, wherever it lies, and that but for seeds; see
    Content.

    Raises ConfigError where there is none.
    """
    run, which = named(given)
    record, found = result_of_any(RunPaths(run)), _of(given, run, which)
    if record.get("status") == RUNNING and which in WHICH:  # else it is said which one is meant
        warn(
            f"fork={given}: the run of {run} is still under way; it is forked at step {found.step}"
        )
    return f"{record['identity']}@{found.step}", f"{record['seedless_identity']}@{found.step}"


def epochs_before(given: str) -> int:
    """The whole epochs that a run with `fork=given` has of its parent.

    Raises ConfigError where there is none.
    """
    run, which = named(given)
    return _with_length(_of(given, run, which), result_of_any(RunPaths(run))).epochs_done


def _with_length(found: Found, record: Record) -> Found:
    """The checkpoint with what an older version has not written into it: how long an epoch is."""
    return found._replace(state={"steps_per_epoch": record.get("steps_per_epoch"), **found.state})


def _of(given: str, run: Path, which: str) -> Found:
    there = list(all_of(run))
    fitting = [found for found in there if is_meant(found, which)]
    if fitting:
        return _whole_of(fitting, given, run)
    bad = damaged(run)
    for file, damage in bad.items():
        if which in (file.name, file.stem):
            raise ConfigError(f"fork={given}: {damage}; {whole_ones(run)}")
    there = [found for found in there if found.file not in bad]
    wanted = {"last": "last", "best": "best"}.get(
        which, f"of {which.replace(':', ' ')}" if ":" in which else which
    )
    wanted = f"of step {which}" if which.isdigit() else wanted
    raise ConfigError(
        f"fork={given}: {run} has no checkpoint {wanted}; {choice(there)}{_told(bad)}"
    )


def _whole_of(fitting: Sequence[Found], given: str, run: Path) -> Found:
    """One of several files of the same checkpoint. Raises ConfigError where all are damaged."""
    try:
        return whole_of(fitting)
    except CheckpointError as damage:
        raise ConfigError(f"fork={given}: {damage}; {whole_ones(run)}") from None


def _told(bad: Collection[Path]) -> str:
    return f"; damaged: {', '.join(path.name for path in bad)}" if bad else ""


def find(config: RunConfig, content: Content, paths: RunPaths) -> Path:
    """The checkpoint that the run of `paths` begins from: taken into its folder before, or the
    other run's.

    Raises ConfigError where it is gone, or can't be gone on from with these settings.
    """
    if paths.forked.exists():
        if (damage := checkpoint_file.damage_of(paths.forked)) is None:
            return paths.forked
        warn(f"{damage}; it is taken anew")
    source = beginning(config, content)
    if result_of_any(RunPaths(source.parent.parent))["content"]["code"] != content.code:
        warn(
            f"fork={config.fork}: the run's own classes have other source now; its state goes on in"
            " theirs"
        )
    return source


def beginning(config: RunConfig, content: Content) -> Path:
    """The checkpoint of the other run that one with these settings begins from.

    Raises ConfigError where it is gone, or can't be gone on from with these settings.
    """
    run = named(str(config.fork)).run
    known = content.fork or identified(str(config.fork))[0]  # with resume=auto it need not be there
    step = known.rpartition("@")[2]
    fitting = [found for found in all_of(run) if is_meant(found, step)]
    if not fitting:
        raise ConfigError(
            f"fork={config.fork}: the run has gone on since, and its checkpoint of step {step} is"
            f" no longer there; {choice(list(all_of(run)))}"
        )
    record = result_of_any(RunPaths(run))
    found = _with_length(_whole_of(fitting, str(config.fork), run), record)
    _refuse(config, content, record, found, run)
    return before_its_end(config, found.state, found.file)


def begin(source: Path, config: RunConfig, paths: RunPaths) -> Path:
    """Take the checkpoint into the run's folder, with the curves until there; returns where.

    From then on the run has no need of the other's folder. Raises CheckpointError where the
    checkpoint is damaged."""
    if source != paths.forked:
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        for left in reversed(range(TRIES)):
            try:
                checkpoint_file.keep_as(source, paths.forked)
                checkpoint_file.check(paths.forked)
                break
            except CheckpointError:  # a run that is under way may just have written another
                checkpoint_file.remove([paths.forked])
                checkpoint_file.remove_unnamed(
                    paths.checkpoints
                )  # a further try is to take other parts
                if not left:
                    _refuse_damaged(source, config)
                    raise
    state = checkpoint_file.read(paths.forked)
    of_source = paths if source == paths.forked else RunPaths(source.parent.parent)
    paths.metrics.write_bytes(lines_of(of_source, state))
    return paths.forked


def _refuse_damaged(source: Path, config: RunConfig) -> None:
    """Raise CheckpointError where the other run's checkpoint is not what was written, and not its
    copy alone.
    """
    if damage := checkpoint_file.damage_of(source):
        raise CheckpointError(f"fork={config.fork}: {damage}; {whole_ones(source.parent.parent)}")


def forked_from(config: RunConfig, source: Path) -> Forked:
    """What result.json says of the checkpoint `source`, which is in the other run's folder."""
    run, state = source.parent.parent, checkpoint_file.read(source)
    record = result_of_any(RunPaths(run))
    found = _with_length(Found(source, state), record)
    return {
        "given": str(config.fork),
        "run": str(run.resolve()),
        "identity": record["identity"],
        "seedless_identity": record["seedless_identity"],
        "step": found.step,
        "epoch": found.epochs_done,
        "arguments": record["arguments"],
        "changed": {key: [*values] for key, values in _changed(config, state["config"]).items()},
    }


def _changed(config: RunConfig, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that are others than those with which the checkpoint was written: what it was,
    and what it is.
    """
    then, now = keys.flat(saved), keys.flat(shown(config))
    begun = keys.varying("source")
    changed = [key for key in keys.differing(then, now, "result") if key not in begun]
    return {key: (then.get(key), now.get(key)) for key in changed}


def _refuse(config: RunConfig, content: Content, record: Record, found: Found, run: Path) -> None:
    """Raise ConfigError for each setting that can't be another in a fork, and where nothing is left
    to train.
    """
    changed = _changed(config, found.state["config"])
    weights = f"or begin a further run, with what fits of its weights, by weights={run}@last"
    problems = []
    if config.weights is not None:
        problems.append(
            f"weights={config.weights}: a fork has its weights from fork={config.fork}; leave one"
            " of them out"
        )
    then, now = keys.flat(found.state["config"]), keys.flat(shown(config))
    begun = keys.varying("source")
    for key in keys.differing(then, now, "fork"):
        if key not in begun:
            problems.append(
                f"{key}={keys.typed(now.get(key))}: a fork keeps its {key.partition('.')[0]}, and"
                f" {run} has {keys.typed(then.get(key))}; leave it out, {weights}"
            )
    for key in () if found.ends_epoch else keys.differing(then, now, "fork_within_epoch"):
        if key not in begun and keys.meaning_in(now, key).fork == "epoch":
            problems.append(
                f"{key}={keys.typed(now.get(key))}: can't change within an epoch, and step {found.step}"
                f" of {run} is within epoch {found.epoch}; use a checkpoint at an epoch's end:"
                f" {choice(list(all_of(run)))}"
            )
    if config.max_steps is not None and (length := sorted(OF_LENGTH & changed.keys())):
        problems.append(
            f"max_steps={config.max_steps}: counts steps, of which an epoch has others with another"
            f" {length[0]}; give epochs, and max_steps=null"
        )
    if (then_data := record["content"]["data"]) != content.data and not problems:
        problems.append(
            f"dataset: its files are not those that {run} was trained on, {keys.typed(then_data)};"
            f" {weights}"
        )
    if problems := problems or _ended(config, found, run):
        raise ConfigError(problems)


def _ended(config: RunConfig, found: Found, run: Path) -> list[str]:
    """What is wrong where nothing is left to train."""
    asked = (
        ("epochs", config.epochs, found.epochs_done, "epoch"),
        ("max_steps", config.max_steps, found.step, "step"),
    )
    return [
        f"{key}={wanted}: the checkpoint of {run} has come to {what} {come} already; give"
        f" {key}={come + 1} or more, or an earlier checkpoint: {choice(list(all_of(run)))}"
        for key, wanted, come, what in asked
        if wanted is not None and come >= wanted
    ]
