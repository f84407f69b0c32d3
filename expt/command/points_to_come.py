"""The points of a typed grid that the command has not come to: each is composed, in 20 ms, when its
turn comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from expt.command.hydra_adapter import product
from expt.command.hydra_errors import COMPOSING
from expt.command.overrides import (
    as_dict,
    folder_names,
    of_named_grid,
    parsed,
    swept_keys,
    typed_in,
)
from expt.command.own_class import folded
from expt.command.point_composer import PointComposer
from expt.command.sweep_points import Grid
from expt.config.identity import shown
from expt.errors import ExptError
from expt.runs.added import Added
from expt.runs.view.query import Values, settings_of

Words = Sequence[str]


class ComingPoint:
    """A point that is to become a run."""

    def __init__(self, words: Words, name: str, to_come: PointsToCome) -> None:
        self.words, self.name, self._to_come = words, name, to_come

    @functools.cached_property
    def settings(self) -> Values:
        """As far as they are known by what was typed; also what was typed and is none, as
        `experiment`.
        """
        return {**as_dict(self.words), **self._to_come.settings(self.words)}

    @functools.cached_property
    def unsure(self) -> Collection[str]:
        """Those that hang on others, by `${KEY}` or `auto`."""
        return self._to_come.unsure(self.words)


class PointsToCome:
    """Those of the grid that is under way; a search has none, as it chooses each when its turn
    comes.

    What they come to is asked only where an order comes: the choices of groups are composed once,
    and the values set."""

    def __init__(
        self, composer: PointComposer, master: DictConfig, grid: Callable[[], Grid]
    ) -> None:
        self._composer, self._master, self._grid = composer, master, grid
        self._points: Sequence[Words] = ()
        self._added: Sequence[Added] = ()
        self._num_seen = self._num_before = 0
        self._chosen: dict[tuple[str, ...], tuple[Values, frozenset[str]]] = {}

    @property
    def typed(self) -> list[str]:
        """The words of the command, after those of a named grid."""
        return [*of_named_grid(self._master), *typed_in(self._master.hydra)]

    def begin(self, points: Sequence[Words], added: Sequence[Added], first_number: int) -> None:
        """Let `points` be the next to come, and then what was `added`; Hydra may hand over others
        after them.
        """
        self._points, self._added, self._num_before, self._num_seen = points, added, first_number, 0

    def next_has_come(self) -> None:
        """Let the first of them be none any more."""
        self._num_seen += 1

    def all_have_come(self) -> None:
        """Let none of these be left."""
        self._num_seen = len(self._points) + len(self._added)

    def left(self) -> list[ComingPoint]:
        """Those that are still to come, in their order."""
        later = self._later()
        if self._num_seen == len(self._points) + len(self._added) and not later:
            return []
        own = [*self._points, *later]
        keys = swept_keys(self.typed)
        names = folder_names([_asked(point) for point in own], keys)
        points = [
            ComingPoint(_asked(words), name, self) for words, name in zip(own, names, strict=True)
        ]
        now = points[: len(self._points)]
        for each in self._added:
            (name,) = folder_names([each.words], [*keys, *each.keys])
            now.append(ComingPoint(each.words, name, self))
        return [*now[self._num_seen :], *points[len(self._points) :]]

    def settings(self, words: Words) -> Values:
        """Those of a point, but for what is `unsure`."""
        typed, (chosen, _) = self._parted(words)
        return {**chosen, **settings_of({"config": typed})}

    def unsure(self, words: Words) -> frozenset[str]:
        """The keys of a point's settings that hang on others."""
        typed, (_, unsure) = self._parted(words)
        values = settings_of({"config": typed})
        return unsure | {
            key for key, value in values.items() if value == "auto" or "${" in str(value)
        }

    def _parted(self, words: Words) -> tuple[dict[str, Any], tuple[Values, frozenset[str]]]:
        """What is typed for single settings, and what the choices of groups come to."""
        overrides = parsed(words)
        chosen = [each for each in overrides if self._chooses(each.key_or_group, each.value())]
        choices = tuple(str(each.input_line) for each in chosen)
        if choices not in self._chosen:
            self._chosen[choices] = self._composed(words)
        return {
            each.key_or_group: each.value() for each in overrides if each not in chosen
        }, self._chosen[choices]

    def same(self, words: Words) -> Hashable:
        """Equal for points that are the same run."""
        return frozenset(self.settings(_asked(words)).items())

    def _later(self) -> Sequence[Words]:
        """The points of the grid that Hydra hands over in further batches."""
        if not self._points or not self._master.hydra.sweeper.get("max_batch_size"):
            return ()
        return product(parsed(self.typed))[self._num_before + len(self._points) :]

    def _chooses(self, key: str, value: object) -> bool:
        return isinstance(value, dict) or self._composer.is_group(self._master, key)

    def _composed(self, words: Words) -> tuple[Values, frozenset[str]]:
        """The settings, and which of them are not what is written for them."""
        try:
            config = shown(self._grid().config_of(self._composer, self._master, words))
            written: Any = OmegaConf.to_container(
                self._composer.compose(self._master, words), resolve=False
            )
        except (*COMPOSING, ExptError):
            return {}, frozenset()
        written.pop("hydra", None)
        found, before = (
            settings_of({"config": config, "overrides": as_dict(words)}),
            settings_of({"config": written}),
        )
        return found, frozenset(key for key, value in before.items() if found.get(key) != value)


def _asked(point: Words) -> list[str]:
    return folded(filter_overrides(point))
