"""The settings of a command line, read in one pass: as Hydra takes them, checked, and completed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from expt.command.conf_files import checked_folders, own_folders
from expt.command.grammar import Override, parse, parse_one, readable, replaces
from expt.command.hydra_part import own_folders_of
from expt.command.words import Exact, Options, last_value
from expt.config import kept_code, read_yaml
from expt.config.constraints import quoted
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.errors import ConfigError, refuse_undecoded, warn
from expt.runs import lineage
from expt.runs.found import results
from expt.runs.named_checkpoint import run_named
from expt.runs.overrides import for_strategy, inherited, is_resume_auto, key_of
from expt.runs.paths import RunPaths, foreign, in_use, is_held, is_sweep
from expt.runs.result import Record

LATEST = "hydra.sweep.dir=latest"


def read(
    options: Options, *, begins: bool = True, folder: Path | None = None
) -> tuple[list[str], list[Path]]:
    """Return the settings in Hydra's grammar, and the folders of custom YAML.

    A run that is resumed or forked gets the settings that it was started with; the runs of a sweep
    get those of their parents one by one, see `Parents`. Raises ConfigError; one that torchrun
    starts again does not begin, and has its `folder` already.
    """
    refuse_undecoded([*options.settings, os.getcwd()])
    words = [word if isinstance(word, Exact) else readable(word) for word in options.settings]
    settings = list(map(str, words))
    if LATEST in settings:
        if (newest := _latest_sweep(Path("outputs"))) is None:
            raise ConfigError(f"{LATEST}: there is no sweep in outputs/sweeps yet")
        newest_word = f"hydra.sweep.dir={quoted(newest)}"
        settings = [newest_word if word == LATEST else word for word in settings]
    check_repeated(parse(settings))
    given = last_value(settings, f"hydra.{'sweep' if options.sweep else 'run'}.dir")
    resumes = last_value(settings, "resume") == "auto"
    if begins:
        if not options.sweep:
            _check_run(given, settings, resumes=resumes)
        elif given and resumes and not is_sweep(Path(given)) and _may_become_a_folder(given):
            warn(f"hydra.sweep.dir={Path(given)}: holds no sweep; a new sweep begins there")
    earlier = RunPaths(Path(given)) if resumes and given is not None else None
    own = list[str]()
    if earlier and not options.sweep and earlier.overrides.exists():
        kept_code.find_kept(earlier.code)
        settings = [*_words_before(earlier, settings), *settings]
        own = own_folders_of(earlier.hydra_settings)
    elif forks := _values_of_fork(settings):
        parents = Parents(Path(given) if options.sweep and given is not None else None)
        own = parents.custom_yaml(forks)
        if not options.sweep:
            settings = parents.with_words(settings)
    is_earlier = options.config_dir is None and own
    folders = checked_folders(own) if is_earlier else own_folders(options.config_dir, settings)
    if folder is not None:
        settings.append(f"hydra.run.dir={quoted(folder)}")
    return settings, folders


def _latest_sweep(outputs: Path) -> Path | None:
    """Return the sweep below `outputs` whose first run began last; None where there is none."""
    pattern = str(RunPaths(Path("*/*")).result)
    folders = {path.parent.parent for path in (outputs / "sweeps").glob(pattern)}

    def began(sweep: Path) -> float:
        records = (run.record for run in results(sweep))
        return min((record["started"] for record in records if "started" in record), default=0.0)

    return max(sorted(folders), key=began, default=None)


def check_repeated(overrides: Sequence[Override]) -> None:
    """Warn of a key that is typed twice. Raise ConfigError where that hides values of an axis."""
    for earlier, later in itertools.combinations(overrides, 2):
        earlier_word, later_word = earlier.input_line, later.input_line
        if earlier_word == later_word or not replaces(later, earlier):
            continue
        if earlier.is_sweep_override() or later.is_sweep_override():
            fix = "type it once, with all its values"
            raise ConfigError(f"{earlier_word}: {later_word} has the key too; {fix}")
        warn(f"{earlier_word}: the key is there twice, and the last counts, {later_word}")


def _check_run(given: str | None, settings: Sequence[str], *, resumes: bool) -> None:
    """Raise ConfigError for a new run in the folder of one, or if there is nothing to resume.

    With other settings next to `resume=auto` a new run may be meant, which the same command resumes
    later: then only warn.
    """
    if given is None:
        if resumes:
            fix = "name it, e.g. hydra.run.dir=FOLDER"
            raise ConfigError(f"resume=auto: continues in the folder of a run; {fix}")
        return
    paths, word = RunPaths(Path(given)), f"hydra.run.dir={given}"
    is_run, found = paths.holds_run(), paths.found()
    if found and not (is_run and resumes):
        if is_held(paths):
            raise in_use(word)
        if not is_run:
            raise foreign(found[0])
        raise ConfigError(
            f"{word}: holds a run already; choose another folder, or resume that run with"
            " resume=auto (if it has completed, with a larger epochs)"
        )
    if resumes and not is_run and _may_become_a_folder(given):
        begins = f"hydra.run.dir={paths.folder}: holds no run"
        if len(settings) <= 2:
            raise ConfigError(f"{begins} to resume; name the folder of one")
        warn(f"{begins}; a new run begins there")


def _may_become_a_folder(given: str) -> bool:
    """Return whether a command may write to the folder: else it is refused later."""
    return "$" not in given and (Path(given).is_dir() or not Path(given).exists())


def _words_before(paths: RunPaths, settings: Sequence[str]) -> list[str]:
    """Return the words that a run was started with, without those that `settings` replace."""
    typed = parse(settings)
    kept = [
        word
        for word in kept_words(paths)
        if word not in settings and not any(replaces(each, parse_one(word)) for each in typed)
    ]
    return for_strategy(kept, settings)


def kept_words(paths: RunPaths) -> list[str]:
    """Return the words that a run was started with, interpolations as typed; none without them."""
    if not paths.overrides.exists():
        return []
    return [*map(str, read_yaml(paths.overrides) or ())]


def words_to_keep(paths: RunPaths, words: Sequence[str]) -> list[str]:
    """Return the words of a command for the run's record, which says where the run began.

    One that is resumed in its own folder keeps the `resume=RUN` that it was started with.
    """
    kept = [word for word in words if not is_resume_auto(word)]
    if len(kept) == len(words):
        return kept
    return [*(word for word in kept_words(paths) if key_of(word) == "resume"), *kept]


def _values_of_fork(words: Sequence[str]) -> list[str]:
    """Return the values of the last `fork` among the words."""
    forks = [parse_one(word) for word in words if key_of(word) == "fork"]
    if not forks:
        return []
    several = forks[-1:]
    if forks[-1].is_sweep_override():  # in which Hydra's grammar has escaped the texts
        several = [parse_one(f"fork={text}") for text in forks[-1].sweep_string_iterator()]
    return [str(value) for each in several if (value := each.value())]


class Parents:
    """The parents of the forks of a sweep; its own records hold, if those are changed or gone."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @functools.cached_property
    def _known(self) -> dict[str, Record]:
        records = [run.record for run in results(self._folder)] if self._folder else []
        forks = [each for each in records if {"forked_from", "content"} <= each.keys()]
        return {record["forked_from"]["given"]: record for record in forks}

    def custom_yaml(self, forks: Sequence[str]) -> list[str]:
        """Find the code of parents that the sweep has no fork of; return the first one's YAML.

        Raises ConfigError for a value of `fork` that is no run.
        """
        new = [RunPaths(run_named("fork", each)[0]) for each in forks if each not in self._known]
        for run in new:
            kept_code.find_kept(run.code)
        return own_folders_of(new[0].hydra_settings) if new else []

    def with_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a run after those of its parent, or of the record if that is gone."""
        if not (values := _values_of_fork(words)):
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
