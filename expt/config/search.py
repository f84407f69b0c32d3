"""How a search chooses its points: the keys of the group `search`, no part of any run.

Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Folder
from expt.config.problems import explain
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


HEEDED_BY: Mapping[str, Sequence[SamplerName]] = {
    "random_fraction": ("tpe", "gp", "cmaes", "nsga2", "qmc"),
    "population": ("cmaes", "nsga2"),
    "warm_start": ("tpe", "gp", "nsga2"),
}
"""The samplers to which a key says anything; one that is not here says something to all."""
OF_RUNGS = {"min_epochs": ("asha", "median"), "reduction": ("asha",)}
"""The same of kinds of rungs."""


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
        search = (
            TypeAdapter(_Composed).validate_json(json.dumps({"search": found}, default=str)).search
        )
    except ValidationError as error:
        raise ConfigError(explain(error, {"search": found}, _Composed)) from None
    if problems := [*_ignored(search)]:
        raise ConfigError(problems)
    return search


def _ignored(search: Search) -> Iterator[str]:
    """What is wrong with keys that are not as by default, and that nothing in this search would
    heed.
    """
    values = {field.name: (getattr(search, field.name), field.default) for field in fields(search)}
    given = {
        key: value
        for key, (value, default) in values.items()
        if default is not MISSING and value != default
    }
    for key in given:
        if search.name not in (heeding := HEEDED_BY.get(key, (search.name,))):
            other = f"search={' or '.join(heeding)}"
            yield (
                f"search.{key}={given[key]}: search={search.name} does not heed it; leave it out,"
                f" or use {other}"
            )
        elif search.rungs not in (kinds := OF_RUNGS.get(key, (search.rungs,))):
            mend = f"leave it out, or use search.rungs={' or '.join(map(str, kinds))}"
            rungs = "null" if search.rungs is None else search.rungs
            yield f"search.{key}={given[key]}: search.rungs={rungs} does not heed it; {mend}"


def _as_list(key: str, value: Any) -> Any:
    """One text is a list of one; `when` may be a mapping, as YAML has it."""
    if key == "when" and isinstance(value, Mapping):
        return tuple(
            f"{condition}: {word}" for condition, words in value.items() for word in _words(words)
        )
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _words(words: Any) -> Sequence[str]:
    return [words] if isinstance(words, str) else [str(word) for word in words]
