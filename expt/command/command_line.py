"""The settings of a command line, read in one pass: as Hydra takes them, checked, and completed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from expt.command.conf_files import checked, own_folders
from expt.command.hydra_part import own_folders_of
from expt.command.overrides import Override, parse, parse_one, readable, replaces
from expt.command.words import Exact, Options
from expt.config import kept_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.errors import ConfigError, FolderInUse, refuse_undecoded, warn
from expt.runs import continuing
from expt.runs.named_checkpoint import named
from expt.runs.paths import RunPaths, is_held, is_sweep
from expt.runs.request import (
    for_strategy,
    inherited,
    key_of,
    quoted,
    unquoted,
)
from expt.runs.result import COMPLETED, Record, read_result
from expt.runs.sweep import latest_sweep, results_of_sweep


def last_value(settings: Sequence[str], key: str) -> str | None:
    """Return the value of a key, of several words the last."""
    found = [word.partition("=")[2] for word in settings if key_of(word) == key]
    return unquoted(found[-1]) if found else None


def read(options: Options, *, begins: bool = True) -> tuple[list[str], list[Path]]:
    """Return the settings in Hydra's grammar, and the folders of custom YAML.

    A run that is resumed or forked gets the settings that it was started with. Raises ConfigError;
    one that torchrun starts again does not begin, and is in a folder of its own already.
    """
    refuse_undecoded([*options.settings, os.getcwd()])
    settings = [
        str(word) if isinstance(word, Exact) else readable(word) for word in options.settings
    ]
    settings = _with_latest(settings)
    check_repeated(parse(settings))
    if begins:
        _check_folder(settings, sweep=options.sweep)
    settings, own = _with_earlier(settings, sweep=options.sweep)
    if options.config_dir is None and own:
        return settings, checked(own)
    return settings, own_folders(options.config_dir, settings)


def check_repeated(overrides: Sequence[Override]) -> None:
    """Warn of a key that is typed twice. Raise ConfigError where that hides values of an axis."""
    for earlier, later in itertools.combinations(overrides, 2):
        word, other = earlier.input_line, later.input_line
        if word == other or not replaces(later, earlier):
            continue
        if earlier.is_sweep_override() or later.is_sweep_override():
            raise ConfigError(f"{word}: {other} has the key too; type it once, with all its values")
        warn(f"{word}: the key is there twice, and the last counts, {other}")


def _check_folder(settings: Sequence[str], *, sweep: bool) -> None:
    if last_value(settings, "resume") == "auto":
        return _refuse_nothing_to_resume(settings, sweep=sweep)
    if (given := last_value(settings, "hydra.run.dir")) is None:
        return
    paths = RunPaths(Path(given))
    left = (paths.result, paths.metrics, paths.checkpoints, paths.logs(0).parent)
    if any(map(Path.exists, left)):
        if is_held(paths):
            raise FolderInUse(
                f"hydra.run.dir={given}: another command is at work there; wait for it"
            )
        is_done = read_result(paths).get("status") == COMPLETED
        way = "train it for longer with a larger epochs and" if is_done else "resume that run with"
        raise ConfigError(
            f"hydra.run.dir={given}: holds a run already; choose another folder, or {way}"
            " resume=auto"
        )


def _refuse_nothing_to_resume(settings: Sequence[str], *, sweep: bool) -> None:
    """Refuse `resume=auto` without a folder, or with one that holds nothing to resume.

    With other settings a new run may be meant, which the same command resumes later: then only
    warn.
    """
    key, what = ("hydra.sweep.dir", "sweep") if sweep else ("hydra.run.dir", "run")
    if (given := last_value(settings, key)) is None:
        if sweep:
            return
        raise ConfigError(
            "resume=auto: continues in the folder of a run; name it, e.g. hydra.run.dir=FOLDER"
        )
    folder, paths = Path(given), RunPaths(Path(given))
    left = (paths.result, paths.overrides, paths.checkpoints)
    there = is_sweep(folder) if sweep else any(map(Path.exists, left))
    if there or "$" in given or (folder.exists() and not folder.is_dir()):
        return
    if sweep or len(settings) > 2:
        return warn(f"{key}={folder}: holds no {what}; a new {what} begins there")
    raise ConfigError(f"{key}={folder}: holds no run to resume; name the folder of one")


def _with_latest(settings: Sequence[str]) -> list[str]:
    """Put the newest sweep's folder in the place of `latest`."""
    words = list(settings)
    for at, word in enumerate(words):
        if word == "hydra.sweep.dir=latest":
            newest = latest_sweep(Path("outputs"))
            if newest is None:
                raise ConfigError(f"{word}: there is no sweep in outputs/sweeps yet")
            words[at] = f"hydra.sweep.dir={quoted(newest)}"
    return words


def _with_earlier(settings: list[str], *, sweep: bool) -> tuple[list[str], list[str]]:
    """Put the settings of the run that is resumed or forked before those that are typed.

    Returns the folders of custom YAML that it was started with, too. The runs of a sweep get the
    settings of their parents one by one, see `Parents`. Raises ConfigError where the value of
    `fork` is no run.
    """
    folder = last_value(settings, f"hydra.{'sweep' if sweep else 'run'}.dir")
    paths = None if sweep or folder is None else RunPaths(Path(folder))
    if paths and last_value(settings, "resume") == "auto" and paths.overrides.exists():
        kept_code.find_kept(paths.code)
        earlier = [str(word) for word in OmegaConf.load(paths.overrides)]
        typed = parse(["resume=auto", *settings])
        kept = [
            word
            for word in earlier
            if word not in settings and not any(replaces(each, parse_one(word)) for each in typed)
        ]
        own = own_folders_of(paths.hydra_settings)
        return [*for_strategy(kept, earlier, settings), *settings], own
    given = next((word for word in reversed(settings) if key_of(word) == "fork"), None)
    if given is None:
        return settings, []
    known = Parents(Path(folder) if sweep and folder is not None else None)
    values = [value for value in _values(parse_one(given)) if not known.has(value)]
    runs = [RunPaths(named("fork", value)[0]) for value in values]
    for run in runs:
        kept_code.find_kept(run.code)
    own = own_folders_of(runs[0].hydra_settings) if runs else []
    return (settings if sweep else known.with_words(settings)), own


def _values(override: Override) -> list[str]:
    """Return its values; of several ones Hydra's grammar has escaped the texts."""
    several = [override]
    if override.is_sweep_override():
        several = [parse_one(f"fork={text}") for text in override.sweep_string_iterator()]
    return [str(value) for each in several if (value := each.value())]


class Parents:
    """The parents of the forks of a sweep; its own records hold, if those are changed or gone."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @functools.cached_property
    def _known(self) -> dict[str, Record]:
        records = [record for _, record in results_of_sweep(self._folder)] if self._folder else []
        forks = [each for each in records if {"forked_from", "content"} <= each.keys()]
        return {record["forked_from"]["given"]: record for record in forks}

    def has(self, given: str) -> bool:
        """Return whether the sweep has a fork of `given` already."""
        return given in self._known

    def with_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a run after those of its parent, or of the record if that is gone."""
        given = next((word for word in reversed(words) if key_of(word) == "fork"), None)
        if given is None or not (values := _values(parse_one(given))):
            return list(words)
        try:
            known = self._known.get(values[0])
            of = known["forked_from"] if known else continuing.record_of(values[0])
        except ConfigError:
            return list(words)
        return [*inherited(of["arguments"], words), *words]

    def of_fork(self, config: RunConfig, before: Record) -> Content:
        """Return the digests of a fork, at the checkpoint that the first fork of the sweep had.

        Raises ConfigError where the value of `fork` is not a run.
        """
        return continuing.of_fork(config, self._known.get(config.fork or "", before))
