"""A sweep's points: Hydra composes each choice of groups once, and the values of a point are set on
a copy of that.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import AnyNode, DictConfig, ListConfig, Node, OmegaConf

from expt.command.hydra_adapter import set_values
from expt.command.hydra_words import changed
from expt.command.overrides import parsed
from expt.command.own_class import spelled_out
from expt.command.parents import Parents
from expt.config.parse import plain, with_value


class PointComposer:
    """Composes a sweep's points as Hydra does, which takes 0.15 s for each, in 3 ms.

    Hydra's own sweeper composes each point before the first run, only to see whether it can be.
    Here it is given a second loader, which composes those alone that hold a choice or a key not
    seen before; the launcher composes each point as its turn comes."""

    def __init__(self, context: HydraContext, config: DictConfig) -> None:
        self.loader = context.config_loader
        self._is_group: dict[str, bool] = {}
        self._chosen: dict[tuple[str, ...], _Chosen | None] = {}
        self.parents = Parents(Path(str(config.hydra.sweep.dir)))
        """Of the points that are forks."""
        if config.hydra.runtime.choices.get("hydra/sweeper") != "basic":
            return  # others may do more with what is composed than look whether it can be
        try:
            _ = vars(Sweeper)["validate_batch_is_legal"]  # what asks for it, and looks at nothing
            context.config_loader = cast(ConfigLoader, _Checks(self.loader, self))
        except (AttributeError, KeyError):
            changed(
                "this version of Hydra checks a sweep's points in another way; the first run may"
                " come late"
            )

    def compose(self, master: DictConfig, point: Sequence[str]) -> DictConfig:
        """The whole configuration of one point. Raises what Hydra raises where there is none."""
        point = self.parents.with_words(point)
        with contextlib.suppress(
            Exception
        ):  # a mistake, for which Hydra has many classes; below it tells it itself
            words = parsed(spelled_out(point))
            chosen, values = self._chosen_by(master, words)
            if chosen is not None:
                composed = chosen.composed()
                if set_values(composed, values, words):
                    OmegaConf.copy_cache(from_config=master, to_config=composed)
                    return composed
        return self.loader.load_sweep_config(master, spelled_out(point))

    def settings(self, master: DictConfig, point: Sequence[str]) -> Mapping[str, Any] | None:
        """What `plain` gives for the point, 50 times as fast; None where the whole configuration
        has to be asked.
        """
        point = self.parents.with_words(point)
        with contextlib.suppress(Exception):  # as above
            chosen, values = self._chosen_by(master, parsed(spelled_out(point)))
            return chosen.with_values(values) if chosen else None
        return None

    def is_group(self, master: DictConfig, key: str) -> bool:
        """Whether `key` is that of a group, in whose folder Hydra looks for a choice."""
        if key not in self._is_group:  # looks into folders, which takes a moment
            asked = OmegaConf.to_container(master.hydra.overrides.hydra)
            name = (
                master.hydra.job.config_name if master.hydra.searchpath else None
            )  # else it is read for nothing
            options = self.loader.get_group_options(key, None, name, cast(list[str], asked))
            self._is_group[key] = bool(options)
        return self._is_group[key]

    def _chosen_by(
        self, master: DictConfig, words: Sequence[Override]
    ) -> tuple[_Chosen | None, list[Override]]:
        """What Hydra composes of the words that choose, and the words that set a value; None where
        they cannot part.
        """
        if any(word.is_sweep_override() or word.key_or_group == "hydra" for word in words):
            return None, []
        values = [word for word in words if self._sets_value(master, word)]
        choices = tuple(str(word.input_line) for word in words if word not in values)
        if choices not in self._chosen:
            composed = self.loader.load_sweep_config(master, list(choices))
            self._chosen[choices] = _Chosen.of(composed)
        return self._chosen[choices], values

    def _sets_value(self, master: DictConfig, word: Override) -> bool:
        key = word.key_or_group
        if word.is_hydra_override() or word.package is not None:
            return False
        return isinstance(word.value(), dict) or not self.is_group(master, key)


class _Chosen:
    """What Hydra composed of a point's choices alone."""

    def __init__(self, pickled: bytes, settings: Mapping[str, Any] | None) -> None:
        self._pickled, self._settings = pickled, settings

    @classmethod
    def of(cls, composed: DictConfig) -> _Chosen | None:
        """None where it cannot be copied: a person's own class for a configuration may not be
        importable.
        """
        try:
            pickled = pickle.dumps(
                composed, pickle.HIGHEST_PROTOCOL
            )  # ten times as fast as a deep copy
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
        simple = not composed.hydra.job.env_set and all(
            map(_is_simple, _nodes(composed, but="hydra"))
        )
        return cls(pickled, plain(composed) if simple else None)

    def composed(self) -> DictConfig:
        """A new copy."""
        return cast(DictConfig, pickle.loads(self._pickled))

    def with_values(self, values: Sequence[Override]) -> Mapping[str, Any] | None:
        """The settings with these values; None where one of them is more than a new value of a
        setting.
        """
        settings = self._settings
        for word in values:
            path, value = word.key_or_group.split("."), word.value()
            if settings is None or word.type != OverrideType.CHANGE or not _is_plain(value):
                return None
            if not _holds_value(settings, path):
                return None
            settings = with_value(settings, path, value)
        return settings


def _nodes(config: DictConfig | ListConfig, *, but: str = "") -> Iterator[Node]:
    """All that is in it, interpolations not resolved."""
    keys: Iterable[Any] = config.keys() if isinstance(config, DictConfig) else range(len(config))
    for key in keys:
        if key == but:
            continue
        node = config._get_node(key)
        assert isinstance(node, Node)
        yield node
        if isinstance(node, DictConfig | ListConfig) and not (node._is_none() or _is_asked(node)):
            yield from _nodes(node)


def _is_asked(node: Node) -> bool:
    return node._is_missing() or node._is_interpolation()


def _is_simple(node: Node) -> bool:
    """Whether it takes any value for what it is, and nobody else's depends on it."""
    return not _is_asked(node) and (
        type(node) is AnyNode or OmegaConf.get_type(node) in (dict, list)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return "${" not in value and value != "???"
    return value is None or isinstance(value, bool | int | float)


def _holds_value(settings: Any, path: Sequence[str]) -> bool:
    """Whether there is a single value at `path`."""
    for key in path:
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return not isinstance(settings, dict | list)


class _Checks:
    """A config loader for a sweeper that looks at no point, only whether it can be composed."""

    def __init__(self, loader: ConfigLoader, composer: PointComposer) -> None:
        self._loader, self._composer = loader, composer
        self._checked: set[str] = set()
        self._nothing = OmegaConf.create(
            {}, flags={"struct": True}
        )  # has no key, and says so to whoever reads one

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Compose the point if something in it is new; else give what nobody can take for a
        configuration.
        """
        new = {self._what_to_check(master_config, word) for word in sweep_overrides} - self._checked
        if not new:
            return self._nothing
        self._checked |= new
        return self._composer.compose(master_config, sweep_overrides)

    def _what_to_check(self, master: DictConfig, override: str) -> str:
        """Of a group every choice, of a mapping all keys, of another key its name: its value is
        checked in its turn.
        """
        key, _, value = override.partition("=")
        names = value.startswith("{") or self._composer.is_group(
            master, key.lstrip("+~").partition("@")[0]
        )
        return override if names else key
