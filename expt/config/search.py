"""The settings of a search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Folder, typed
from expt.config.explained import explain
from expt.errors import ConfigError

SamplerName = Literal["random", "tpe", "gp", "cmaes", "qmc", "nsga2"]


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


def _as_texts(value: Any) -> Any:
    """Return one text, or a mapping from conditions to axes, as several texts."""
    if isinstance(value, Mapping):
        every = {key: axes if isinstance(axes, list) else [axes] for key, axes in value.items()}
        return tuple(f"{key}: {axis}" for key, axes in every.items() for axis in axes)
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, list | tuple | None) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_texts)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Search:
    """The keys below `search`; conf/search has the meaning of each."""

    name: SamplerName
    runs: Count = 64
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    budget: Annotated[str | None, BeforeValidator(_as_text)] = None
    constraints: Texts = ()
    when: Texts = ()
    warm_start: Annotated[tuple[Folder, ...], BeforeValidator(_as_texts)] = ()
    rungs: Literal["asha", "median"] | None = None
    min_epochs: Count = 1
    reduction: Annotated[int, Field(ge=2)] = 3
    keep_checkpoints: bool = False
    batch: Count | None = None
    random_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    population: Annotated[int, Field(ge=2)] | None = None


_USED_BY = {
    "random_fraction": ("search", ("tpe", "gp", "cmaes", "nsga2", "qmc")),
    "population": ("search", ("cmaes", "nsga2")),
    "warm_start": ("search", ("tpe", "gp", "nsga2")),
    "min_epochs": ("search.rungs", ("asha", "median")),
    "reduction": ("search.rungs", ("asha",)),
    "keep_checkpoints": ("search.rungs", ("asha", "median")),
}
"""The samplers, or kinds of rungs, that use a key; all others are always used."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Composed:
    search: Search


def parse_search(node: Mapping[str, Any]) -> Search:
    """Return the settings of a search. Raises ConfigError with a line for each wrong one."""
    found = {"search": dict(node)}
    try:
        search = TypeAdapter(_Composed).validate_json(json.dumps(found, default=str)).search
    except ValidationError as error:
        raise ConfigError(explain(error, found, _Composed)) from None
    if problems := [*_ignored(search)]:
        raise ConfigError(problems)
    return search


def _ignored(search: Search) -> Iterator[str]:
    """Yield a line for each key that was changed and has no effect in this search."""
    chosen = {"search": search.name, "search.rungs": search.rungs}
    unchanged = {field.name: field.default for field in fields(search)}
    for key, (by, kinds) in _USED_BY.items():
        value = getattr(search, key)
        if value != unchanged[key] and chosen[by] not in kinds:
            fix = f"use it with {by}={' or '.join(kinds)}"
            yield f"search.{key}={typed(value)}: has no effect; {fix}"
