"""Runs anywhere below a folder, filtered and sorted."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fnmatch
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from expt.config.identity import hyperparameters
from expt.config.keys import flat
from expt.config.schema import RunConfig
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, did_you_mean
from expt.runs import tags
from expt.runs.result import Record, results_below
from expt.runs.typed import unquoted
from expt.runs.view.progress import shown_path

T = TypeVar("T")
Values: TypeAlias = Mapping[str, Any]
"""Of a run, by columns, settings and metrics."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class ListedRun:
    """A run's folder, and what result.json says of it."""

    folder: Path
    result: Record

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """All that a run can be chosen or sorted by: columns, settings and metrics."""
        result, metrics = self.result, self.result.get("metrics") or {}
        best = result.get("best")
        return {
            "run": shown_path(self.folder),
            "started": result.get("started"),
            "status": result.get("status"),
            "workers": result.get("world_size"),
            "best": (
                best["value"]
                if best
                else metrics.get(f"best/{self.objective}", metrics.get(self.objective))
            ),
            "time": sum(result.get("epoch_s") or [0.0]),
            **settings_of(result),
            **metrics,
        }

    @property
    def objective(self) -> str:
        """What its best value is a value of."""
        config: Mapping[str, Any] = self.result.get("config") or {}
        objective = self.result.get("objective")
        return str(objective["name"] if objective else config.get("objective", ""))


def settings_of(record: Record, *, lists_as_text: bool = True) -> dict[str, Any]:
    """All settings of a run, flat, as they are typed.

    A person's own class has the name by which it was chosen, or else the class's.
    """
    config = flat(record.get("config") or {})
    as_they_are = type(None) if lists_as_text else (type(None), list)
    kept = {key: value for key, value in config.items() if isinstance(value, as_they_are)}
    found: dict[str, Any] = {**hyperparameters(config), **kept}
    for group in [
        key for key, value in found.items() if value == "_target_" and f"{key}.target" in found
    ]:
        own = f"{group}.kwargs."
        typed = {key: f"{group}.{key.removeprefix(own)}" for key in found if key.startswith(own)}
        found = {
            (key if typed.get(key) in found else typed.get(key, key)): value
            for key, value in found.items()
        }
        chosen_as = record.get("overrides", {}).get(group)
        found[group] = (
            chosen_as if isinstance(chosen_as, str) else found[f"{group}.target"].rpartition(".")[2]
        )
    return {**_own_choices(record), **found}


def _own_choices(record: Record) -> dict[str, str]:
    """What was chosen of groups that are no settings themselves, a person's own and `experiment`,
    as it was typed.
    """
    typed: Mapping[str, Any] = record.get("overrides") or {}
    texts = {key: value for key, value in typed.items() if isinstance(value, str)}
    return {
        key: text
        for key, text in texts.items()
        if "@" in key or not ("." in key or key in _OWN_SETTINGS)
    }


_OWN_SETTINGS = {field.name for field in dataclasses.fields(RunConfig)}


def runs_below(folder: Path) -> list[ListedRun]:
    """Every run below `folder`. Raises ConfigError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    return [ListedRun(paths.folder, result) for paths, result in results_below(folder)]


def chosen(runs: Sequence[ListedRun], filters: Sequence[str]) -> list[ListedRun]:
    """The runs that pass every filter, as in `model=mlp` and `optimizer.lr<0.1`; ConfigError for a
    wrong one.
    """
    tests = [filter_of(text, [run.values for run in runs]) for text in filters]
    return [run for run in runs if all(test(run.values) for test in tests)]


def in_order(
    runs: Sequence[ListedRun], key: str = "started", *, reverse: bool = False
) -> list[ListedRun]:
    """The runs by a column, a setting or a metric: newest first, accuracies from the highest, all
    else rising.
    """
    records = [run.result for run in runs]
    down = any(
        falls(tag, records) for tag in ({run.objective for run in runs} if key == "best" else [key])
    )
    return ordered(runs, lambda run: run.values.get(key), falling=down != reverse)


def falls(key: str, records: Iterable[Record]) -> bool:
    """Whether the highest value of `key` comes first, as of when a run began, and of what is better
    so.
    """
    return key == "started" or any(
        tags.is_higher_better(key, metrics_of(task)) for task in map(_task, records)
    )


def _task(record: Record) -> Any:
    return (record.get("config") or {}).get("task")


def best_first(records: Iterable[Record]) -> list[str]:
    """The metrics of some runs, the one that is shown beside the loss first, and the loss last."""
    names = [name for task in map(_task, records) for name in metrics_of(task) if name != "loss"]
    return list(dict.fromkeys([*names, "loss"]))


def ordered(items: Sequence[T], value_of: Callable[[T], Any], *, falling: bool) -> list[T]:
    """The items by their values; those without one, or with nan, come last, either way."""
    having, without = list[tuple[Any, T]](), list[T]()
    for item in items:
        value = value_of(item)
        if value in (None, "") or value != value:
            without.append(item)
        else:
            having.append((value, item))
    mixed = len({isinstance(value, str) for value, _ in having}) > 1
    having.sort(key=lambda pair: str(pair[0]) if mixed else pair[0], reverse=falling)
    return [*(item for _, item in having), *without]


def check_key(key: str, runs: Sequence[ListedRun]) -> None:
    """Raise ConfigError where no run has `key`."""
    _check(key, {key for run in runs for key in run.values})


def _check(key: str, known: Collection[str], *, is_order: bool = False) -> None:
    if key not in known:
        what = "setting" if is_order else "column, setting or metric"
        all_of_them = "" if is_order else " `report --csv -` has all of them in its first line."
        raise ConfigError(
            f"{key}: no run has such a {what}.{did_you_mean(key, known) or all_of_them}"
        )


def filter_of(
    text: str, runs: Sequence[Values], *, is_order: bool = False
) -> Callable[[Values], bool]:
    """What `text`, as in `model=mlp`, asks of a run; `runs` are the values of those that it is
    about.

    `is_order` refuses what would be about all of them by a mistake, as `model!=mpl`.
    Raises ConfigError for a text that is no filter, or of a key that no run has.
    """
    typed, how, wanted = _parts(text)
    key = _full_key(typed, runs, is_order=is_order)
    if how in ("=", "==", "!="):
        is_value = not re.search(r"[*?]", wanted) or any(
            _equal(run.get(key), wanted) for run in runs
        )
        is_like = _equal if is_value else _has_pattern
        if is_order and how == "!=" and not any(is_like(run.get(key), wanted) for run in runs):
            raise ConfigError(f"{text}: no run has {key}={wanted}, and so all would be meant")
        return lambda run: is_like(run.get(key), wanted) == (how != "!=")
    limit = _number(wanted)
    if limit is None:
        raise ConfigError(f"{text}: {wanted!r} is no number")

    def within(run: Values) -> bool:
        value = _number(run.get(key))
        return value is not None and _COMPARE[how](value, limit)

    return within


def key_of(text: str, runs: Sequence[Values]) -> str:
    """The setting that an order with this filter is about.

    Raises ConfigError as `filter_of` does.
    """
    return _full_key(_parts(text)[0], runs, is_order=True)


def _parts(text: str) -> Sequence[str]:
    match = re.fullmatch(r"\s*([^=!<>]+?)\s*(==?|!=|<=|>=|<|>)\s*(.*?)\s*", text, re.DOTALL)
    if match is None:
        raise ConfigError(f"{text}: write KEY=VALUE, with = != < > <= or >=")
    return match.groups()


def _full_key(key: str, runs: Sequence[Values], *, is_order: bool) -> str:
    """`optimizer.lr` of `lr`, as in the names of folders: of several the one in which the runs
    differ.
    """
    known = {known for run in runs for known in run}
    several = sorted(each for each in known if each.endswith(f".{key}"))
    differing = [each for each in several if _differ(each, runs)]
    if key in known and is_order and differing and not _differ(key, runs):
        raise ConfigError(
            f"{key}: is the same in all runs; they differ in {' and '.join(differing)}"
        )
    if key in known or not several:
        _check(key, known, is_order=is_order)
        return key
    if len(found := differing or several) > 1:
        raise ConfigError(
            f"{key}: may be {', '.join(found[:-1])} or {found[-1]}; write the whole key"
        )
    return found[0]


def _differ(key: str, runs: Sequence[Values]) -> bool:
    return len({str(run.get(key)) for run in runs}) > 1


def fits(text: str, pattern: str) -> bool:
    """Whether a text is like that, where `*` stands for anything and `?` for a character; brackets
    are a list's.
    """
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _equal(value: Any, wanted: str) -> bool:
    """Whether it is the value that a person has typed, as a command takes it: `1e-3`, `True`,
    `[64,32]`, `'a b'`.
    """
    if value is None:
        return wanted.lower() in ("null", "none")
    if isinstance(value, bool):
        return wanted.lower() == str(value).lower()
    number, other = _number(value), _number(wanted)
    if number is not None and other is not None:
        return number == other or (number != number and other != other)
    text = str(value)
    return text in (wanted, unquoted(wanted)) or (
        text[:1] == wanted[:1] == "[" and _same(_listed(text), _typed(wanted))
    )


def _same(value: Any, wanted: Any) -> bool:
    """The same by parts."""
    if isinstance(wanted, str):
        return _equal(value, wanted)
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict)
            and value.keys() == wanted.keys()
            and _same([*value.values()], [*map(wanted.get, value)])
        )
    are_lists = isinstance(wanted, list) and isinstance(value, list | tuple)
    return are_lists and len(value) == len(wanted) and all(map(_same, value, wanted))


def _listed(text: str) -> Any:
    """A list of which `settings_of` has made a text; None where it can't be read."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


@functools.lru_cache
def _typed(text: str) -> Any:
    """A list of texts, lists and dicts; None where it can't be read."""
    import yaml  # late: for lists alone

    try:
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        return None


def _has_pattern(value: Any, wanted: str) -> bool:
    if value is None or isinstance(value, bool):
        return fits("null" if value is None else str(value).lower(), wanted)
    return fits(str(value), wanted)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    for kind in (int, float):  # an int is exact, however large
        with contextlib.suppress(TypeError, ValueError):
            return kind(value)
    return None
