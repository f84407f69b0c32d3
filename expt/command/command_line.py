"""The settings of a command line, read in one pass: as Hydra takes them, checked, and completed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from expt.command.conf_files import checked, own_folders
from expt.command.grammar import Override, parse, parse_one, readable, replaces
from expt.command.hydra_part import own_folders_of
from expt.command.words import Exact, Options
from expt.config import kept_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.errors import ConfigError, FolderInUse, refuse_undecoded, warn
from expt.runs import lineage
from expt.runs.found import latest_sweep, results
from expt.runs.named_checkpoint import run_named
from expt.runs.overrides import for_strategy, inherited, key_of, quoted, unquoted
from expt.runs.paths import RunPaths, is_held, is_sweep
from expt.runs.result import Record

LATEST = "hydra.sweep.dir=latest"


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
    words = [word if isinstance(word, Exact) else readable(word) for word in options.settings]
    settings = [_latest_sweep() if word == LATEST else str(word) for word in words]
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
    """Raise ConfigError for a new run in the folder of one, or if there is nothing to resume.

    With other settings next to `resume=auto` a new run may be meant, which the same command resumes
    later: then only warn.
    """
    key, what = ("hydra.sweep.dir", "sweep") if sweep else ("hydra.run.dir", "run")
    given, resumes = last_value(settings, key), last_value(settings, "resume") == "auto"
    if given is None:
        if resumes and not sweep:
            fix = "name it, e.g. hydra.run.dir=FOLDER"
            raise ConfigError(f"resume=auto: continues in the folder of a run; {fix}")
        return
    folder, paths = Path(given), RunPaths(Path(given))
    left = (paths.result, paths.metrics, paths.overrides, paths.checkpoints, paths.logs(0).parent)
    is_there = is_sweep(folder) if sweep else any(map(Path.exists, left))
    if is_there and not (resumes or sweep):
        if is_held(paths):
            raise FolderInUse(f"{key}={given}: another command is at work there; wait for it")
        raise ConfigError(
            f"{key}={given}: holds a run already; choose another folder, or resume that run with"
            " resume=auto (if it has completed, with a larger epochs)"
        )
    if is_there or not resumes or "$" in given or (folder.exists() and not folder.is_dir()):
        return
    if not sweep and len(settings) <= 2:
        raise ConfigError(f"{key}={folder}: holds no run to resume; name the folder of one")
    warn(f"{key}={folder}: holds no {what}; a new {what} begins there")


def _latest_sweep() -> str:
    """Return the setting of the newest sweep's folder."""
    if (newest := latest_sweep(Path("outputs"))) is None:
        raise ConfigError(f"{LATEST}: there is no sweep in outputs/sweeps yet")
    return f"hydra.sweep.dir={quoted(newest)}"


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
        earlier = words_of(paths.overrides)
        typed = parse(["resume=auto", *settings])
        kept = [
            word
            for word in earlier
            if word not in settings and not any(replaces(each, parse_one(word)) for each in typed)
        ]
        return [*for_strategy(kept, settings), *settings], own_folders_of(paths.hydra_settings)
    if not (forked := _forked(settings)):
        return settings, []
    known = Parents(Path(folder) if sweep and folder is not None else None)
    values = [value for value in forked if not known.has(value)]
    runs = [RunPaths(run_named("fork", value)[0]) for value in values]
    for run in runs:
        kept_code.find_kept(run.code)
    own = own_folders_of(runs[0].hydra_settings) if runs else []
    return (settings if sweep else known.with_words(settings)), own


def words_of(overrides: Path) -> list[str]:
    """Return the words in a run's file of overrides, interpolations as they were typed."""
    found: Any = OmegaConf.to_container(OmegaConf.load(overrides), resolve=False)
    return [*map(str, found)]


def _forked(words: Sequence[str]) -> list[str]:
    """Return the values of the last `fork` among the words."""
    found = list[str]()
    for given in [parse_one(word) for word in words if key_of(word) == "fork"][-1:]:
        several = [given]
        if given.is_sweep_override():  # in which Hydra's grammar has escaped the texts
            several = [parse_one(f"fork={text}") for text in given.sweep_string_iterator()]
        found += (str(value) for each in several if (value := each.value()))
    return found


class Parents:
    """The parents of the forks of a sweep; its own records hold, if those are changed or gone."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @functools.cached_property
    def _known(self) -> dict[str, Record]:
        records = [run.record for run in results(self._folder)] if self._folder else []
        forks = [each for each in records if {"forked_from", "content"} <= each.keys()]
        return {record["forked_from"]["given"]: record for record in forks}

    def has(self, given: str) -> bool:
        """Return whether the sweep has a fork of `given` already."""
        return given in self._known

    def with_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a run after those of its parent, or of the record if that is gone."""
        if not (values := _forked(words)):
            return list(words)
        try:
            known = self._known.get(values[0])
            of = known["forked_from"] if known else lineage.fork_parent(values[0])
        except ConfigError:
            return list(words)
        return [*inherited(of["arguments"], words), *words]

    def of_fork(self, config: RunConfig, before: Record) -> Content:
        """Return the digests of a fork, at the checkpoint that the first fork of the sweep had.

        Raises ConfigError where the value of `fork` is not a run.
        """
        return lineage.fork_content(config, self._known.get(config.fork or "", before))
