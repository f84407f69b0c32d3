"""How a search chooses its points: the keys of the group `search`, no part of any run. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Folder
from expt.config.problems import PLAIN_GROUPS, explain
from expt.errors import ConfigError

SamplerName = Literal["random", "tpe", "gp", "cmaes", "qmc", "nsga2", "pbt"]


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
    rungs: Literal["asha", "hyperband", "median"] | None = None
    min_epochs: Count = 1
    reduction: Annotated[int, Field(ge=2)] = 3
    keep_checkpoints: bool = False
    batch: Count | None = None
    random_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    population: Annotated[int, Field(ge=2)] | None = None
    interval: Count = 1
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25


PLAIN_GROUPS["search"] = Search


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Composed:
    search: Search


def parse_search(node: Mapping[str, Any]) -> Search:
    """The settings of a search. Raises ConfigError with a line for each that is wrong."""
    found = {**node}
    if isinstance(found.get("budget"), int | float):
        found["budget"] = str(found["budget"])  # which has no unit
    for key in ("constraints", "when", "warm_start"):
        found[key] = _as_list(key, found.get(key) or [])
    try:
        return TypeAdapter(_Composed).validate_json(json.dumps({"search": found}, default=str)).search
    except ValidationError as error:
        raise ConfigError(explain(error, {"search": found})) from None


def _as_list(key: str, value: Any) -> Any:
    """One text is a list of one; `when` may be a mapping, as YAML has it."""
    if key == "when" and isinstance(value, Mapping):
        return tuple(f"{condition}: {word}" for condition, words in value.items() for word in _words(words))
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _words(words: Any) -> Sequence[str]:
    return [words] if isinstance(words, str) else [str(word) for word in words]
