"""Whether a run in a search's folder is one of the present command, but for what is searched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from expt.command.hydra_errors import COMPOSING
from expt.command.search_points import PointMaker
from expt.config import keys
from expt.config.identity import Content, identity, shown
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.config.search import Search
from expt.errors import ConfigError
from expt.runs import sweep
from expt.runs.result import Record
from expt.search.folder import Found
from expt.search.sampler import LEAST_OTHERS
from expt.search.space import Values

UNTAUGHT = ("pbt", "random", "qmc")
"""Samplers that learn from no run."""
NAMED = 3
"""Keys that a line names."""


class FixedSettings:
    """Compares runs with what this command would train at their points, as a grid does to know its
    runs again.
    """

    def __init__(
        self, maker: PointMaker, searched: Collection[str], typed: Collection[str]
    ) -> None:
        """`typed` are the keys that the command names beside those `searched`."""
        self._maker, self._searched, self._typed = maker, searched, typed

    def differences(self, values: Values, record: Record) -> list[str]:
        """The keys that change a number and are another in the run of this record, which lies at
        the point `values`.

        Of a run that was refused, what was typed for it: another try is with what is typed now.
        None where that can't be told, as of a point that would have no settings."""
        try:
            if "config" not in record:
                return self._typed_anew(values, record)
            config = self._maker.config(values)
        except (ConfigError, *COMPOSING):
            return []
        try:
            content = self._maker.content(config)
        except ConfigError:  # its data is gone, maybe, and the run is known by its settings
            return self._of_settings(config, record)
        if self._is_same(config, content, record):
            return []
        return self._keys(config, content, record) or ["an older version of expt"]

    def _typed_anew(self, values: Values, record: Record) -> list[str]:
        then, now = record.get("overrides", {}), self._maker.overrides(values)
        if "parent" in record.get("search", {}):  # a population's fork has the words of its parent
            return []
        keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
        return [key for key in keys if key not in self._searched]

    def _of_settings(self, config: RunConfig, record: Record) -> list[str]:
        of_population = ("fork",) if "parent" in record.get("search", {}) else ()
        try:
            if identity(recorded(record["config"]), but=of_population) == identity(
                config, but=of_population
            ):
                return []
        except (ConfigError, KeyError):  # of another version
            return []
        return self._keys(config, None, record)

    def _is_same(self, config: RunConfig, content: Content, record: Record) -> bool:
        known = record.get("identity")
        if "content" not in record:  # of a version that knew runs by their settings alone
            return known == identity(config)
        if "parent" in record.get(
            "search", {}
        ):  # of a population: by what it is a fork of it is another, and is not
            there = Content(**record["content"])._replace(fork=None, seedless_fork=None)
            known = identity(recorded(record["config"]), there, but=("fork",))
            return known == identity(config, content, but=("fork",))
        return known == identity(config, content)

    def _keys(self, config: RunConfig, content: Content | None, record: Record) -> list[str]:
        """`content` is None where it can't be looked at."""
        then, now = keys.flat(record["config"]), keys.flat(shown(config))
        differing = [key.removesuffix(".name") for key in keys.differing(then, now, "result")]
        found = [key for key in differing if key not in self._searched]
        typed = [key for key in found if key in self._typed or key in record.get("overrides", {})]
        before: Mapping[str, Any] = record.get("content") or {}
        if content is None:
            return typed or found
        parts = [
            part
            for part in ("data", "code", "weights")
            if before.get(part) != getattr(content, part)
        ]
        return typed or found or [f"its {part}" for part in parts]


def told(found: Found, folder: str, *, can_learn: bool) -> str:
    """What to say of runs in the folder that do not count; nothing where there are none."""
    parts, names = (
        list[str](),
        list(dict.fromkeys(key for keys in found.differing.values() for key in keys)),
    )
    if count := len(found.differing):
        keys = ", ".join([*names[:NAMED], *["..."] * (len(names) > NAMED)])
        parts.append(f"{_runs(count)} of other settings ({keys})")
    if count := len(found.outside):
        parts.append(f"{_runs(count)} outside of the space")
    if not parts:
        return ""
    several = len(found.differing) + len(found.outside) > 1
    line = (
        f"hydra.sweep.dir={folder}: has {' and '.join(parts)}, which {'do' if several else 'does'}"
        " not count here"
    )
    learn = f"; search.warm_start=[{folder}] lets the search learn from those of other settings"
    return line + (learn if can_learn and found.differing else "")


def told_copies(found: Found, folder: str) -> str:
    """What to say of folders there that a person has copied; or nothing."""
    return f"hydra.sweep.dir={folder}: has {sweep.told(found.copies)}" if found.copies else ""


def told_by_hand(found: Found, folder: str, settings: Search) -> str:
    """What to say of runs there that are of the space and the settings, and that no search has
    chosen; or nothing.
    """
    if not found.by_hand:
        return ""
    least = f", from {LEAST_OTHERS} on," if settings.name == "cmaes" else ""
    what = "may be the best" + (
        "" if settings.name in UNTAUGHT else f" and{least} inform the search"
    )
    line = f"has {_runs(len(found.by_hand))} of this space that no search has chosen"
    return (
        f"hydra.sweep.dir={folder}: {line}; such runs {what}, and are not among"
        f" search.runs={settings.runs}"
    )


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"


def names_of_others(found: Found) -> Sequence[str]:
    """Of the folders that do not count, and of their copies; copies of others are told wherever
    runs are counted.
    """
    others = {*found.differing, *found.outside}
    return sorted(
        [*others, *(copy.name for copy, kept in found.copies.items() if kept.name in others)]
    )
