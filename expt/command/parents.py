"""Settings of a fork: those of its parent, and what is typed beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from expt.command.compose import Override, own_folders_of, parse_one
from expt.config import main_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.errors import ConfigError
from expt.runs import continuing
from expt.runs.named_checkpoint import named
from expt.runs.paths import RunPaths
from expt.runs.request import inherited, key_of, unquoted
from expt.runs.result import Forked
from expt.runs.sweep import results_of_sweep


def with_parent(settings: Sequence[str], *, sweep: bool) -> tuple[list[str], list[str]]:
    """Put the settings of the run that is forked before those that are typed.

    Returns the folders of own YAML that it was started with, too. The runs of a sweep get their
    settings one by one, see `Parents`. Raises ConfigError where what is forked is no run.
    """
    words = list(settings)
    given = next((word for word in reversed(words) if key_of(word) == "fork"), None)
    if given is None or _continues(words):
        return words, []
    known = Parents(_folder(words, "hydra.sweep.dir") if sweep else None)
    values = [value for value in _values(parse_one(given)) if not known.has(value)]
    runs = [RunPaths(named("fork", value)[0]) for value in values]
    for run in runs:
        main_code.find_kept(run.code)
    own = own_folders_of(runs[0].hydra_settings) if runs else []
    return (words if sweep else known.with_words(words)), own


def _continues(settings: Sequence[str]) -> bool:
    """Return whether the fork itself is there, and has all its settings."""
    folder = _folder(settings, "hydra.run.dir")
    return "resume=auto" in settings and folder is not None and RunPaths(folder).overrides.exists()


def _folder(settings: Sequence[str], key: str) -> Path | None:
    found = [word.partition("=")[2] for word in settings if key_of(word) == key]
    return Path(unquoted(found[-1])) if found else None


def _values(override: Override) -> list[str]:
    """Return what it names; of several values Hydra's grammar has escaped texts."""
    if not override.is_sweep_override():
        several = [override]
    else:
        texts = override.sweep_string_iterator()
        several = [parse_one(f"fork={text}") for text in texts]
    return [str(value) for each in several if (value := each.value())]


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
        """Return whether the sweep has a fork of `given` already."""
        return given in self._known

    def epochs_before(self, given: str) -> int:
        """Return the whole epochs that a fork of `given` has of its parent.

        Raises ConfigError where that is no run.
        """
        known = self._known.get(given)
        return known[0]["epoch"] if known else continuing.epochs_before(given)

    def with_words(self, point: Sequence[str]) -> list[str]:
        """The words of a point with those of the parent before them; of one that is gone `content`
        tells.
        """
        given = next((word for word in reversed(point) if key_of(word) == "fork"), None)
        if given is None or not (values := _values(parse_one(given))):
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
