"""The points of a grid as runs: composed by Hydra, each in a folder of its own, those that are done
recognised.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from expt.command import experiment
from expt.command.composed_run import ComposedRun, env_of, numbered, set_folder
from expt.command.hydra_adapter import settings_of_point
from expt.command.hydra_errors import COMPOSING, as_config_error
from expt.command.overrides import about_run, folder_names, of_named_grid, swept_keys, typed_in
from expt.command.own_class import folded
from expt.command.parents import Parents
from expt.command.point_composer import PointComposer
from expt.command.sweep_shorter import ShorterRuns
from expt.config import keys, main_code, user_code
from expt.config.auto import fill_auto_of_a_sweep
from expt.config.identity import Content, identity, shown
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.launch.job import QUEUED, Job
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, DAMAGED, Objective, OfSearch, Record, read_result
from expt.runs.sweep import has_own_name, results_of_sweep

ASKED, OF_SETTINGS = "asked:", "settings:"
"""Before the keys of runs that had no configuration, and of an older version's, which knew runs by
their settings.
"""

AHEAD = 50
"""Points that are composed before the first of them starts, where none has been found in a folder
that has runs.
"""


class Grid:
    """The runs of one sweep folder, new ones and those that an earlier command left there."""

    def __init__(self, folder: Path, machine: Machine, *, fetch: bool = True) -> None:
        """With `fetch` datasets that are known by what they hold are downloaded where they are not
        there.
        """
        self.folder, self._machine, self._fetch = folder, machine, fetch
        # A run that could not be made into a configuration is known by what was asked of it.
        self._known: dict[str, RunPaths] = {}
        self._typed, self._names = set[str](), set[str]()
        self.completed: dict[Path, Objective] = {}
        """What earlier commands have completed, by the folders; copies of runs, too."""
        for paths, found in results_of_sweep(folder):
            main_code.find_kept(paths.code)
            if found["status"] == DAMAGED:
                left = "what is there is left alone, and a run of its settings gets a new folder"
                warn(f"{paths.result}: is damaged; {left}")
            if (key := _known_as(found)) and (key not in self._known or has_own_name(paths, found)):
                self._known[key] = paths  # and no copy of it
            self._typed.add(_asked(found.get("arguments", ())))
            if found["status"] == COMPLETED:
                self.completed[paths.folder] = found.get("objective") or Objective(
                    name="", value=None
                )
        self._by_settings: dict[Hashable, RunPaths] | None = None
        self._jobs, self._contents, self._parents = (
            dict[str, Job](),
            dict[str, Content](),
            Parents(folder),
        )
        self._yaml: Sequence[Path] = ()
        self._is_of_others = bool(self._known)  # until a point is found there
        self._shorter, self._is_longer = ShorterRuns(folder), False

    def compose(
        self,
        composer: PointComposer,
        master: DictConfig,
        points: Sequence[Sequence[str]],
        first_number: int,
    ) -> Iterator[ComposedRun]:
        """Compose one run after another, as asked for.

        Warns of another grid's folder.
        """
        keys = _swept_keys(master)
        names = folder_names([folded(filter_overrides(point)) for point in points], keys)
        points = [self._parents.with_words(point) for point in points]
        asked = [folded(filter_overrides(point)) for point in points]
        ahead = list[ComposedRun]()
        for number, (point, overrides, name) in enumerate(
            zip(points, asked, names, strict=True), first_number
        ):
            ahead.append(self._run(composer, master, point, overrides, number, name, {}))
            if not self._is_of_others or len(ahead) == AHEAD:
                yield from ahead
                ahead.clear()
        self._warn_of_others(len(points))
        yield from ahead

    def found(
        self,
        composer: PointComposer,
        master: DictConfig,
        point: Sequence[str],
        of_search: OfSearch,
        keys: Collection[str],
    ) -> ComposedRun:
        """The run of a point that a search of these keys has chosen, which its record says."""
        self._is_of_others = False
        (name,) = folder_names([folded(filter_overrides(point))], keys)
        point = self._parents.with_words(point)
        asked = folded(filter_overrides(point))
        return self._run(
            composer, master, point, asked, of_search["number"], name, {"search": of_search}
        )

    def config_of(
        self, composer: PointComposer, master: DictConfig, point: Sequence[str]
    ) -> RunConfig:
        """The settings of the run of a point. Raises ConfigError where it has none."""
        settings = composer.settings(master, point)
        if settings is None:
            return parse(settings_of_point(composer.compose(master, point)), self._machine)
        return parse(fill_auto_of_a_sweep(settings), self._machine)

    def _run(
        self,
        composer: PointComposer,
        master: DictConfig,
        point: Sequence[str],
        overrides: Sequence[str],
        number: int,
        name: str,
        more: Record,
    ) -> ComposedRun:
        self._yaml = self._yaml or experiment.folders_of(master.hydra)
        settings, composed, refused = composer.settings(master, point), None, None
        compose = functools.partial(composer.compose, master, point)
        try:
            if settings is None:
                composed = numbered(compose(), number)
                set_folder(
                    composed, RunPaths(self.folder / name)
                )  # which `${hydra:...}` may ask for
        except COMPOSING as problem:
            refused, compose = (
                as_config_error(problem, overrides),
                functools.partial(copy.deepcopy, master),
            )
        job = self._job(settings, composed, overrides, name, more, refused)
        about = job.request.about if job.request else {}
        if about.get("arguments") != overrides:  # refused, or another point's too
            about = {**about_run(job.name, overrides), **more}
        return ComposedRun(number, overrides, job, compose, about)

    def _warn_of_others(self, num_points: int) -> None:
        """The newest sweep may not be the one that was meant; to add points to a sweep is fine."""
        if not self._is_of_others:
            return
        self._is_of_others = False  # once: sweepers may come with further batches
        if self._is_longer:
            warn(
                f"hydra.sweep.dir={self.folder}: its runs are shorter ones and stay as they are;"
                " those asked for are others, and train from their beginning; add resume=auto, and"
                " each goes on from the shorter one"
            )
            return
        warn(
            f"hydra.sweep.dir={self.folder}: the runs there are of another grid, none of the"
            f" {num_points} asked for; type that grid to resume it, or leave hydra.sweep.dir out"
            " for a folder of their own"
        )

    def _job(
        self,
        known_settings: Mapping[str, Any] | None,
        composed: DictConfig | None,
        overrides: Sequence[str],
        name: str,
        more: Record,
        refused: ConfigError | None,
    ) -> Job:
        """The job of a point, by its settings, its whole configuration or `refused`; the same if it
        is named twice.
        """
        config, settings, content, key, error = None, None, None, "", refused
        try:
            if refused is not None:
                raise refused
            settings = (
                settings_of_point(composed)
                if composed is not None
                else fill_auto_of_a_sweep(known_settings or {})
            )
            with experiment.told(overrides, self._yaml):
                config = parse(settings, self._machine)
            content = self.content_of(config)
            key = identity(config, content)
        except ConfigError as problem:
            error = problem
        except OmegaConfBaseException as problem:
            error = as_config_error(problem, overrides)
        key = key or _asked(overrides)
        if key in self._jobs:
            return self._jobs[key]
        known = self._known_as(key, config, content, overrides)
        self._is_of_others &= (
            known is None and _asked(overrides) not in self._typed
        )  # else of other code or data
        paths = known or RunPaths(self.folder / self._unused(name, key))
        request = None
        if config is not None and settings is not None and content is not None:
            about: Record = {**about_run(paths.folder.name, overrides), **more}
            shorter = None
            if known is None and (config.resume == "auto" or self._is_of_others) and self._known:
                shorter = self._shorter.of(config, content)
                self._is_longer |= shorter is not None
                self._is_of_others &= shorter is None or config.resume != "auto"
            request = RunRequest(
                config=config,
                settings=settings,
                content=content,
                paths=paths,
                about=about,
                env={} if composed is None else env_of(composed, paths),
                may_have_run=True,
                goes_on_from=shorter.folder if shorter and config.resume == "auto" else None,
            )
        status, objective = QUEUED, self.completed.get(paths.folder)
        if objective:
            if paths.metrics.exists():
                status, error = COMPLETED, None
            else:
                warn(f"{paths.folder}: its {paths.metrics.name} is gone; the run is made anew")
        self._jobs[key] = job = Job(
            paths, request, status, error, objective if status == COMPLETED else None
        )
        return job

    def _known_as(
        self, key: str, config: RunConfig | None, content: Content | None, overrides: Sequence[str]
    ) -> RunPaths | None:
        """The run of that point, if there is one; a refusal is one of a point that can run now."""
        known = self._known.get(key) or self._known.get(_asked(overrides))
        if known is None and config is not None and content is not None:
            known = self._known.get(identity(config, content))
        if known is None and config is not None:
            known = self._of_older_version(config, content) or self._without_data(config, content)
        return known

    def _of_older_version(self, config: RunConfig, content: Content | None) -> RunPaths | None:
        """A run known by its settings alone, if no other point has claimed it, and it can have been
        this one.
        """
        key = OF_SETTINGS + identity(config)
        paths = self._known.get(key)
        if paths is None or content is None:
            return None
        then = read_result(paths).get("config", {})
        of_other_data = content.data and then.get("dataset", {}).get("root") != getattr(
            config.dataset, "root", None
        )
        starts = [
            None if source == "auto" else source for source in (then.get("resume"), config.resume)
        ]
        if of_other_data or starts[0] != starts[1]:
            return None
        self._by_settings = None
        return self._known.pop(key)

    def _without_data(self, config: RunConfig, content: Content | None) -> RunPaths | None:
        """The run of these very settings, where the data cannot be looked at now."""
        if content is not None:
            return None
        if self._by_settings is None:
            known = {paths.folder for paths in self._known.values()}
            of_runs = [run for run in results_of_sweep(self.folder) if run[0].folder in known]
            of_runs.reverse()  # of several the first counts
            self._by_settings = {
                _settings(found["config"]): paths for paths, found in of_runs if "config" in found
            }
        return self._by_settings.get(_settings(json.loads(json.dumps(shown(config), default=str))))

    def content_of(self, config: RunConfig) -> Content:
        """What a run is made of beside its settings.

        Raises ConfigError where something is not there.

        Looked at once for all points that have the same data and classes: a folder may hold many
        images."""
        key = repr(
            (config.dataset, user_code.targets(config), config.weights, config.fork, config.resume)
        )
        if key not in self._contents:
            self._contents[key] = self._parents.content(config, fetch=self._fetch)
        return self._contents[key]

    def _unused(self, name: str, key: str) -> str:
        if name in self._names or RunPaths(self.folder / name).result.exists():
            name = f"{name},{key.removeprefix(ASKED)}"
        self._names.add(name)
        return name


def _known_as(found: Record) -> str | None:
    """The key under which a run that is there is found again; None where its record does not say."""
    if "identity" not in found:
        return _asked(found["arguments"]) if "arguments" in found else None
    return found["identity"] if "content" in found else OF_SETTINGS + found["identity"]


def _asked(overrides: Sequence[str]) -> str:
    return ASKED + hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:12]


def _settings(config: Mapping[str, Any]) -> Hashable:
    return _hashable(
        {key: value for key, value in config.items() if keys.meaning(key).result != "none"}
    )


def _hashable(content: Any) -> Hashable:
    """Equal for equal content of JSON."""
    if isinstance(content, dict):
        return frozenset((key, _hashable(value)) for key, value in content.items())
    return tuple(map(_hashable, content)) if isinstance(content, list) else content


def _swept_keys(master: DictConfig) -> list[str]:
    """The keys with several values, of the command and of a named grid."""
    return swept_keys([*of_named_grid(master), *typed_in(master.hydra)])
