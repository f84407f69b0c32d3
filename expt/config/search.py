"""The keys of the group `search`: how trials are chosen. They are not part of any run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Folder
from expt.config.parse import explain
from expt.errors import ConfigError

SamplerName = Literal["random", "tpe", "gp", "cmaes", "qmc", "nsga2"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Search:
    """The keys below `search`; conf/search says what each means."""

    name: SamplerName
    runs: Count = 64
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    budget: str | None = None
    constraints: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    warm_start: tuple[Folder, ...] = ()
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
}
"""The samplers, or kinds of rungs, that use a key; all others are always used."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Composed:
    search: Search


def parse_search(node: Mapping[str, Any]) -> Search:
    """Return the settings of a search. Raises ConfigError with a line for each wrong one."""
    found = {**node}
    if isinstance(found.get("budget"), int | float):
        found["budget"] = str(found["budget"])  # which has no unit
    for key in ("constraints", "when", "warm_start"):
        found[key] = _as_list(key, found.get(key) or [])
    try:
        text = json.dumps({"search": found}, default=str)
        search = TypeAdapter(_Composed).validate_json(text).search
    except ValidationError as error:
        raise ConfigError(explain(error, {"search": found}, _Composed)) from None
    if problems := [*_ignored(search)]:
        raise ConfigError(problems)
    return search


def _ignored(search: Search) -> Iterator[str]:
    """Yield what is wrong with keys that were changed and have no effect in this search."""
    chosen = {"search": search.name, "search.rungs": search.rungs}
    unchanged = {field.name: field.default for field in fields(search)}
    for key, (by, kinds) in _USED_BY.items():
        value = getattr(search, key)
        if value != unchanged[key] and chosen[by] not in kinds:
            fix = f"use it with {by}={' or '.join(kinds)}"
            yield f"search.{key}={value}: has no effect; {fix}"


def _as_list(key: str, value: Any) -> Any:
    """Return a text as a list of one, and a mapping of `when` as texts."""
    if key == "when" and isinstance(value, Mapping):
        return tuple(
            f"{condition}: {word}" for condition, words in value.items() for word in _words(words)
        )
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _words(words: Any) -> Sequence[str]:
    return [words] if isinstance(words, str) else [str(word) for word in words]
