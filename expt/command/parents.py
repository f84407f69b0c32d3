"""The words of a fork: those that ask for its parent, and what is typed beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from expt.command.arguments import apart, searched
from expt.command.overrides import parsed
from expt.config import main_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.errors import ConfigError
from expt.runs import continuing
from expt.runs.named_checkpoint import named
from expt.runs.paths import RunPaths
from expt.runs.result import Forked
from expt.runs.sweep import results_of_sweep
from expt.runs.typed import inherited, key_of, unquoted


def with_parent(arguments: Sequence[str]) -> list[str]:
    """The words of a command; of one run's with those before them that ask for the run that it is a
    fork of.

    A sweep's points get theirs one by one, see `Parents`. Raises ConfigError where what is forked
    is no run."""
    options, settings = apart(arguments)
    given = next((word for word in reversed(settings) if key_of(word) == "fork"), None)
    if given is None or _goes_on(settings):
        return arguments
    sweeps, (override,) = bool({"-m", "--multirun"} & {*options}), parsed([given])
    folder = _folder(settings, "hydra.sweep.dir")
    known = Parents(folder if sweeps else None)
    runs = [
        RunPaths(named("fork", value)[0]) for value in _values(override) if not known.has(value)
    ]
    for run in runs:
        main_code.find_kept(run.code)
    where = searched(runs[0], options) if runs else []
    return [*where, *arguments] if sweeps else [*where, *options, *known.with_words(settings)]


def _goes_on(settings: Sequence[str]) -> bool:
    """Whether the fork itself is there, and has all its words."""
    folder = _folder(settings, "hydra.run.dir")
    return "resume=auto" in settings and folder is not None and RunPaths(folder).overrides.exists()


def _folder(settings: Sequence[str], key: str) -> Path | None:
    return next(
        (
            Path(unquoted(word.partition("=")[2]))
            for word in reversed(settings)
            if key_of(word) == key
        ),
        None,
    )


def _values(override: Override) -> list[str]:
    """What it names, each as Hydra's grammar reads it: of several values it gives texts of that
    grammar, escaped.
    """
    words = (
        [f"fork={text}" for text in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else []
    )
    values = [each.value() for each in (parsed(words) if words else [override])]
    return [str(value) for value in values if value]


class Parents:
    """Of the forks of the sweep in `folder`: its own records say whose they are, should those have
    gone on or away.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @functools.cached_property
    def _known(self) -> dict[str, tuple[Forked, Content]]:
        records = [record for _, record in results_of_sweep(self._folder)] if self._folder else []
        return {
            record["forked_from"]["given"]: (record["forked_from"], Content(**record["content"]))
            for record in records
            if "forked_from" in record and "content" in record
        }

    def has(self, given: str) -> bool:
        """Whether the sweep has a fork of `given` already."""
        return given in self._known

    def epochs_before(self, given: str) -> int:
        """The whole epochs that a fork of `given` has of its parent.

        Raises ConfigError where that is no run.
        """
        known = self._known.get(given)
        return known[0]["epoch"] if known else continuing.epochs_before(given)

    def with_words(self, point: Sequence[str]) -> list[str]:
        """The words of a point with those of the parent before them; of one that is gone `content`
        tells.
        """
        given = next((word for word in reversed(point) if key_of(word) == "fork"), None)
        if given is None or not (values := _values(parsed([given])[0])):
            return list(point)
        known = self._known.get(values[0])
        try:
            arguments = (
                known[0]["arguments"]
                if known
                else continuing.record_of(values[0]).get("arguments", [])
            )
        except ConfigError:
            return list(point)
        return [*inherited(arguments, point), *point]

    def content(self, config: RunConfig, *, fetch: bool) -> Content:
        """What a run of the sweep is made of: forks of one run are all of the checkpoint that the
        first of them had.

        Raises ConfigError where what is forked is no run.
        """
        known = self._known.get(config.fork) if config.fork else None
        return content_of(config, fetch=fetch, fork=known[1] if known else None)
