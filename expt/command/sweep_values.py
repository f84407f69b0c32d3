"""A sweep's values, each by itself, before the first run starts; that a point cannot run is told in
its turn.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from expt.command.hydra_adapter import settings_of_point
from expt.command.overrides import parsed
from expt.config.groups import GROUPS
from expt.config.parse import wrong_values
from expt.errors import ConfigError
from expt.machine import Machine

MAX_VALUES = 200
"""Of each key that are looked at, which takes 0.5 ms each."""


def refuse_empty(words: Sequence[str], loader: ConfigLoader) -> None:
    """Raise ConfigError for what is to have several values, and has none: a grid would have no
    point.
    """
    found = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    if problems := [
        why for override in found if override.is_discrete_sweep() and (why := why_empty(override))
    ]:
        raise ConfigError(problems)


def why_empty(override: Override) -> str:
    """What is wrong with a word that has no value; nothing with one that has some."""
    if next(override.sweep_string_iterator(), None) is not None:
        return ""
    word, key = override.input_line, override.key_or_group
    if not isinstance(override.value(), Glob):
        return (
            f"{word}: its range is empty; the end, which is not part of it, must lie behind the"
            " first value"
        )
    choices = override.config_loader.get_group_options(key) if override.config_loader else []
    if not choices:
        return (
            f"{word}: matches nothing, for {key} is no group of files; give values, as in {key}=A,B"
        )
    return f"{word}: matches nothing; {key} is one of {', '.join(choices)}"


def refuse_wrong_values(
    points: Sequence[Sequence[str]],
    composed: DictConfig,
    machine: Machine,
    is_group: Callable[[str], bool],
) -> None:
    """Raise ConfigError for values that no point of the grid can have; `composed` is one of its
    points.
    """
    try:
        settings = settings_of_point(composed)
    except OmegaConfBaseException:  # it has an error of its own
        return
    values: dict[str, list[object]] = {}
    for override in _of_its_own_kind(points, is_group):
        values.setdefault(override.key_or_group, []).append(override.value())
    if wrong := wrong_values(
        settings, {key: found[:MAX_VALUES] for key, found in values.items()}, machine
    ):
        raise ConfigError(wrong)


def _of_its_own_kind(
    points: Sequence[Sequence[str]], is_group: Callable[[str], bool]
) -> Iterator[Override]:
    """The overrides, each once, whose values mean the same in all points; not those of a group with
    several choices.
    """
    found = parsed(
        list(dict.fromkeys(word for point in points for word in filter_overrides(point)))
    )
    chosen = [
        override
        for override in found
        if override.package is not None or is_group(override.key_or_group)
    ]
    choices = collections.Counter(override.key_or_group for override in chosen)
    several = {group for group, times in choices.items() if times > 1}
    sets_any = bool(several - GROUPS.keys())  # an experiment, or a group of a person's own
    for override in found:
        above = override.key_or_group.partition(".")[0]
        of_several = "." in override.key_or_group and (above in several or sets_any)
        unknown = override.is_delete() or any(
            text in str(override.value()) for text in ("${", "???")
        )
        if not (
            override.key_or_group in choices
            or "/" in override.key_or_group
            or of_several
            or unknown
        ):
            yield override
