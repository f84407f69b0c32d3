"""The folder of a sweep: runs that earlier commands left there are found again, others are new."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from expt.command.command_line import Parents
from expt.command.compose import Composer
from expt.command.grammar import about_run, parse_one
from expt.command.hydra_part import hydra_files, place
from expt.config import kept_code, own_code
from expt.config.constraints import kind, plain, typed
from expt.config.identity import LENGTH, Content, Identity, digest
from expt.config.keys import value_at
from expt.config.parse import parse, recorded
from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.errors import ConfigError, warn
from expt.launch.job import QUEUED, Job
from expt.machine import Machine
from expt.runs import lineage
from expt.runs.found import FoundRun, results
from expt.runs.overrides import folder_names
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, DAMAGED, RUNNING, Objective, Record, begun_at_step

ASKED = "asked:"
"""Before the key of a run that has no configuration, and is known by its overrides."""


@dataclass(eq=False)
class SweepRun:
    """One run of a sweep: the job that the pool runs, and its record."""

    number: int
    words: list[str]
    job: Job
    about: Record
    """The name of the run and the words that ask for it."""
    composer: Composer

    def configuration(self) -> DictConfig:
        """Return its whole configuration, of 300 kB, so it is composed when it is asked for."""
        composed = self.composer.compose(self.words)
        place(composed, self.job.paths.folder, self.number)
        return composed

    @functools.cached_property
    def hydra_files(self) -> dict[str, str]:
        """The text of each file of `.hydra`."""
        return hydra_files(self.configuration(), self.words)

    def save_hydra_files(self) -> None:
        """Write `.hydra`."""
        self.job.paths.write_hydra(self.hydra_files)
        del self.hydra_files


class SweepFolder:
    """The runs of one sweep's folder."""

    def __init__(self, folder: Path, composer: Composer, machine: Machine) -> None:
        self.folder, self._composer, self._machine = folder, composer, machine
        self._known: dict[str, RunPaths] = {}
        self._by_words: dict[str, RunPaths] = {}
        self._runs: list[FoundRun] = []
        self.completed: dict[Path, Objective] = {}
        """The objectives of completed runs, by folder."""
        for run in results(folder):
            kept_code.find_kept(run.paths.code)
            if run.status == DAMAGED:
                warn(f"{run.paths.result}: is damaged; a run of its settings gets a new folder")
            asked = _asked(run.record.get("arguments", ()))
            key = run.record.get("identity", asked)
            if own_code.changed(run.record):  # its source is not there any more
                self._by_words.setdefault(asked, run.paths)
                continue
            self._runs.append(run)
            if key not in self._known or run.has_own_name:  # no copy
                self._known[key] = self._by_words[asked] = run.paths
            if run.status == COMPLETED:
                none = Objective(name="", value=None)
                self.completed[run.folder] = run.record.get("objective") or none
        self.parents = Parents(folder)
        self._jobs, self._contents = dict[str, Job](), dict[str, tuple[Record, Content]]()
        self._names = set[str]()

    def run(
        self, words: Sequence[str], number: int, keys: Collection[str] = (), **more: Any
    ) -> SweepRun:
        """Return the run of these words, in a folder that is named by the values of `keys`.

        `more` are fields of its record.
        """
        (name,) = folder_names([self._resolved(words)], keys)
        words = self.parents.with_words(words)
        job = self._job(words, number, name, more)
        about: Record = {**about_run(job.name, words), **more}  # type: ignore[typeddict-item]
        about = job.request.about if job.request else about
        return SweepRun(number, list(words), job, about, self._composer)

    def _resolved(self, words: Sequence[str]) -> Sequence[str]:
        """Return the words with values in place of interpolations, unless those may be secrets."""
        if not any("$" in word for word in words):
            return words
        found, settings = [*words], dict[str, Any]()
        with contextlib.suppress(ConfigError):  # it is refused in its turn
            settings = self._composer.settings(words, sweep=True)
        for at, word in enumerate(map(parse_one, words)):
            key, hides = word.key_or_group, settings.get("secrets", ())
            if settings and "${" in str(word.value()) and key not in hides:
                value = value_at(settings, key.split("."))
                found[at] = f"{key}={kind(value) or typed(value, exact=True)}"
        return found

    def corrected(self, asked: Sequence[SweepRun], keys: Sequence[str]) -> list[str]:
        """Return the names of earlier runs that a grid, with all that are `asked`, corrects.

        It names some of the earlier runs again, or has other settings with their values of its
        axes. A grid that only adds values to an axis, or repeats settings, corrects none.
        """
        folders = {run.job.paths.folder for run in asked}
        others = [run for run in self._runs if run.folder not in folders]
        values = {_values(keys, run.about.get("overrides") or {}) for run in asked}
        wanted = [run.job.request.identity.seedless for run in asked if run.job.request]
        corrects = len(others) < len(self._runs) or any(
            _values(keys, run.typed) in values and run.record.get("seedless_identity") not in wanted
            for run in others
        )
        return [run.folder.name for run in others if corrects]

    def config_of(self, words: Sequence[str]) -> RunConfig:
        """Return the settings of a run. Raises ConfigError where it has none."""
        words = self.parents.with_words(words)
        return parse(self._composer.settings(words, sweep=True), self._machine)

    def identity_of(self, config: RunConfig) -> Identity:
        """Return the identity of a run.

        Raises ConfigError where something is not there. It is looked at once for all runs that have
        the same data and classes: a folder may hold many images.
        """
        begins = config.weights, getattr(config.model, "files", None), config.fork, config.resume
        frozen = [*own_code.frozen_in(plain(config))]
        key = repr((config.dataset, own_code.targets(config), *begins, frozen))
        if key not in self._contents:
            before = lineage.record_to_continue(config)
            content = content_of(config, before)
            self._contents[key] = before, {**content, **self.parents.of_fork(config, before)}
        before, content = self._contents[key]
        return lineage.identity(config, content, before)

    def _job(self, words: Sequence[str], number: int, name: str, more: Any) -> Job:
        """Return the job of a run; the same one if it is asked for twice."""
        asked, where = _asked(words), self.folder / name
        try:
            settings = self._composer.settings(words, sweep=True, folder=where, number=number)
            config = parse(settings, self._machine)
            if config.debug:
                raise ConfigError("debug=true: is for one run, in this process; leave out -m")
            identity = self.identity_of(config)
        except ConfigError as error:  # its data cannot be looked at now, maybe
            if asked in self._jobs:
                return self._jobs[asked]
            known = self._known.get(asked) or self._by_words.get(asked)
            return self._noted(asked, known or self._unused(name, asked), None, error)
        if identity.digest in self._jobs:
            return self._jobs[identity.digest]
        known = self._known.get(identity.digest) or self._known.get(asked)
        shorter = self._shorter(config, identity) if known is None else None
        paths = known or self._unused(name, identity.digest)
        request = RunRequest(
            config=config,
            settings=settings,
            identity=identity,
            paths=paths,
            about={**about_run(paths.folder.name, words, config), **more},
            env=self._composer.environment(words),
            may_have_run=True,
            shorter=shorter.folder if shorter else None,
        )
        return self._noted(identity.digest, paths, request)

    def _noted(
        self,
        key: str,
        paths: RunPaths,
        request: RunRequest | None,
        error: ConfigError | None = None,
    ) -> Job:
        """Return the job of a run, which an earlier command may have completed."""
        job = self._jobs[key] = Job(paths, request, QUEUED, error)
        if objective := self.completed.get(paths.folder):
            if paths.metrics.exists():
                job.status, job.error, job.objective = COMPLETED, None, objective
            else:
                warn(f"{paths.folder}: its {paths.metrics.name} is gone; the run is trained again")
        return job

    def _unused(self, name: str, key: str) -> RunPaths:
        with_key = f"{name},{key.removeprefix(ASKED)}"
        more = (f"{with_key},{number}" for number in itertools.count(2))
        names = (
            each for each in itertools.chain((name, with_key), more) if each not in self._names
        )
        every = (RunPaths(self.folder / each) for each in names)
        # Without a lock `.hydra` is another program's.
        paths = next(each for each in every if not each.found(hidden=not each.lock.exists()))
        self._names.add(paths.folder.name)
        return paths

    def _shorter(self, config: RunConfig, identity: Identity) -> RunPaths | None:
        """Return the longest run with a checkpoint that this one continues with `resume=auto`."""
        if config.resume != "auto":
            return None
        longest, most, key = None, 0, digest(config, identity.content, but=LENGTH)
        for run in self._shorter_runs.get(key, ()):
            steps, per_epoch = _steps(run.record), run.record.get("steps_per_epoch") or 0
            if most < steps <= config.total_steps(per_epoch):
                longest, most = run.paths, steps
        return longest

    @functools.cached_property
    def _shorter_runs(self) -> dict[str, list[FoundRun]]:
        found: dict[str, list[FoundRun]] = {}
        for run in self._runs:
            if not {"content", "config"} <= run.record.keys() or run.status == RUNNING:
                continue
            if run.paths.last.is_file():
                key = digest(recorded(run.config), run.record["content"], but=LENGTH)
                found.setdefault(key, []).append(run)
        return found


def _values(keys: Sequence[str], typed: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(typed.get(key)) for key in keys)


def _asked(words: Sequence[str]) -> str:
    return ASKED + hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:12]


def _steps(record: Record) -> int:
    epochs = len(record.get("epoch_s") or ())
    own = epochs * record.get("steps_per_epoch", 0)
    done: int = record.get("steps") or begun_at_step(record) + own
    return done
