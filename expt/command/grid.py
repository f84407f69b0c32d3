"""A grid: the axes of a sweep, checked before its first run, and its runs one after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from expt.command.compose import Composer, Override, key_of, parse, parse_one
from expt.config.groups import GROUPS
from expt.config.parse import wrong_values
from expt.errors import ConfigError
from expt.machine import Machine

MAX_VALUES = 200
"""Values of each key that are checked before the first run; it takes 0.5 ms each."""


class Grid:
    """All combinations of the values of a sweep's axes, of which the last varies first."""

    def __init__(self, words: Sequence[str], composer: Composer) -> None:
        """Read the axes among `words`; of several words for a key the last counts."""
        self._composer = composer
        overrides = last_of_each(words)
        self._lists = [
            composer.values(each) if each.is_sweep_override() else [str(each.input_line)]
            for each in overrides
        ]
        self._axes = [
            (each, values)
            for each, values in zip(overrides, self._lists, strict=True)
            if each.is_sweep_override()
        ]
        self.keys = [key_of(each) for each, _ in self._axes]

    def __len__(self) -> int:
        """Return the number of combinations."""
        return math.prod(map(len, self._lists))

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the words of each run."""
        return map(list, itertools.product(*self._lists))

    def check(self, machine: Machine) -> None:
        """Compose every choice, and look at every value, with the first of all other axes.

        Raises ConfigError for what no run of the grid can have; that two of them do not fit is
        said when their run's turn comes.
        """
        first = [values[0] for values in self._lists]
        chosen, wrong = dict[str, list[object]](), list[str]()
        choices = [each for each, _ in self._axes if self._chooses(each)]
        several = {each.key_or_group for each in choices}
        sets_any = bool(several - GROUPS.keys())  # an experiment, or a custom group
        for at, values in enumerate(self._lists):
            override = parse_one(values[0])
            if len(values) > 1 and self._chooses(override):
                for value in values:
                    self._composer.compose([*first[:at], value, *first[at + 1 :]])
            elif len(values) > 1 and not override.is_delete():
                above = override.key_or_group.partition(".")[0]
                if not ("." in override.key_or_group and (above in several or sets_any)):
                    found: list[object] = [each.value() for each in parse(values[:MAX_VALUES])]
                    known = [each for each in found if "${" not in str(each)]
                    chosen[override.key_or_group] = known
        self._composer.compose(first)
        try:
            settings = self._composer.settings(first, sweep=True)
        except ConfigError:  # said when the run's turn comes
            return
        wrong += wrong_values(settings, chosen, machine)
        if wrong:
            raise ConfigError(wrong)

    def _chooses(self, override: Override) -> bool:
        return self._composer.is_group(override.key_or_group)


def last_of_each(words: Sequence[str]) -> list[Override]:
    """Return the last override of each key; where the one before had a `+`, it has one too."""
    last: dict[str, Override] = {}
    for override in parse(words):
        typed = override.get_key_element()
        key = typed.lstrip("+~")
        before = last.pop(key, override).get_key_element()
        if before.startswith("+") and typed == key:
            override = parse_one(before.removesuffix(key) + str(override.input_line))
        last[key] = override
    return [*last.values()]
