"""What a search makes of a point, before it does: its settings, and whether a run can begin with
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig

from expt.command.hydra_errors import COMPOSING
from expt.command.overrides import about_run
from expt.command.own_class import folded
from expt.command.point_composer import PointComposer
from expt.command.sweep_points import Grid
from expt.config.identity import Content, shown
from expt.config.keys import flat
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.runs import fork
from expt.search.alike import Changes
from expt.search.space import Space, Values, ways

SHARES = (0.5, 0.0, 0.999)
"""Where in a space its examples lie."""


class PointMaker:
    """The points of one command, made of its `fixed` words and those of a point in the space."""

    def __init__(
        self,
        grid: Grid,
        composer: PointComposer,
        master: DictConfig,
        fixed: Sequence[str],
        space: Space,
    ) -> None:
        self._grid, self._composer, self._master, self._fixed, self._space = (
            grid,
            composer,
            master,
            fixed,
            space,
        )

    def overrides(self, values: Values) -> Mapping[str, Any]:
        """What the record of its run would say was typed."""
        words = self._composer.parents.with_words(self._words(values))
        return about_run("", folded(filter_overrides(words)))["overrides"]

    def config(self, values: Values) -> RunConfig:
        """The settings of its run. Raises ConfigError where it has none."""
        return self._grid.config_of(self._composer, self._master, self._words(values))

    def content(self, config: RunConfig) -> Content:
        """What the run is made of beside its settings.

        Raises ConfigError where something is not there.
        """
        return self._grid.content_of(config)

    def samples(self) -> list[Values]:
        """The corners of the space; the values of one that has no settings also beside those of one
        that has.
        """
        corners = self._space.corners()
        able = [values for values in corners if self._has_settings(values)]
        for values in [values for values in corners if values not in able]:
            for key, value in values.items():
                if any(point.get(key) == value for point in able):
                    continue
                others = (self._space.beside(point, key, value) for point in able)
                able += [other for other in others if self._has_settings(other)][:1]
        return [*corners, *(values for values in able if values not in corners)]

    def _has_settings(self, values: Values) -> bool:
        try:
            self.config(values)
        except (ConfigError, *COMPOSING):
            return False
        return True

    def changes(self, base: Values) -> Changes:
        """What each parameter changes, its values composed beside the point `base`; of a number its
        ends.

        A value without settings is left out: its points fail in their turn.
        """
        found: dict[str, set[str]] = {}
        for each in self._space.parameters:
            point = base
            for above, choice in ways(each, self._space.parameters)[0]:
                point = self._space.beside(point, above.name, choice)
            points = [self._space.beside(point, each.name, end) for end in each.ends]
            settings = [
                flat(shown(self.config(values))) for values in points if self._has_settings(values)
            ]
            keys = found.setdefault(each.name, set())
            for one, other in itertools.pairwise(settings):
                keys |= {key for key in {**one, **other} if one.get(key) != other.get(key)}
        return found

    def refuse_if_none_can_begin(self, *, anew: bool) -> None:
        """Raise ConfigError for what keeps every point of the space from beginning, as far as it is
        the same in all.

        What the data, the first weights, or the run that is forked do not allow is else told of
        each point anew. Those that need not begin `anew` have no need of that run."""
        common: list[str] | None = None
        for values in self._tried():
            try:
                self._begin(self.config(values), anew=anew)
            except ConfigError as error:
                common = [line for line in error.problems if common is None or line in common]
                if common:
                    continue
            except COMPOSING:  # its own mistake, told in its turn
                pass
            return
        if common:
            raise ConfigError(common)

    def _tried(self) -> Iterable[Values]:
        return itertools.chain(map(self._space.at, SHARES), self._space.corners())

    def _begin(self, config: RunConfig, *, anew: bool) -> None:
        content = self.content(config)
        may_go_on = config.resume == "auto" and self._composer.parents.has(
            str(config.fork)
        )  # from a shorter run
        if anew and config.fork and config.resume in (None, "auto") and not may_go_on:
            fork.beginning(config, content)

    def _words(self, values: Values) -> list[str]:
        return [*self._fixed, *self._space.words(values)]
