"""Runs anywhere below a folder: filtered, sorted, in a list, and two of them side by side."""

from __future__ import annotations

import contextlib
import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich.table import Table

from expt.config.kinds import metrics_of
from expt.errors import ConfigError, absent, decimals, did_you_mean
from expt.runs.found import FoundRun, results_below, without_copies
from expt.runs.overrides import unquoted
from expt.runs.view.text import (
    STALE,
    UNLIMITED,
    Console,
    as_csv,
    cells,
    elapsed,
    plain_table,
    setting,
    shown_path,
)

T = TypeVar("T")
Values: TypeAlias = Mapping[str, Any]
"""Columns, settings and metrics of a run."""

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def runs_below(folder: Path) -> list[FoundRun]:
    """Return every run below `folder`. Raises ConfigError where there is no such folder."""
    if not folder.is_dir():
        if folder.is_file():
            raise ConfigError(f"{folder}: is a file; name its folder, {folder.parent}")
        raise ConfigError(f"{folder}: {absent(folder, 'folder')}")
    return without_copies(results_below(folder))[0]  # copies such as those in MLflow's folder


def chosen(runs: Sequence[FoundRun], filters: Sequence[str]) -> list[FoundRun]:
    """Return the runs that pass every filter, such as `model=mlp` and `optimizer.lr<0.1`.

    Raises ConfigError for a text that is not a filter, or of a key that no run has.
    """
    every = [*map(values_of, runs)]
    tests = [_filter(text, every) for text in filters]
    return [run for run, own in zip(runs, every, strict=True) if all(test(own) for test in tests)]


def values_of(run: FoundRun) -> Values:
    """Return the values of a run, and each element of a list by a key of its own."""
    lists = ((key, value) for key, value in run.settings.items() if isinstance(value, list))
    elements = {f"{key}.{at}": each for key, value in lists for at, each in enumerate(value)}
    return {**elements, **run.values}


def in_order(runs: Sequence[FoundRun], key: str = "started") -> list[FoundRun]:
    """Sort runs by a column, setting or metric: newest first, accuracies from the highest."""
    names = {run.objective for run in runs} if key == "best" else {key}
    down = any(falls(name, runs) for name in names)
    return ordered(
        runs, lambda run: values_of(run).get(key, str(run.typed.get(key, ""))), falling=down
    )


def falls(key: str, runs: Iterable[FoundRun]) -> bool:
    """Return whether the highest value of `key` comes first."""
    return key == "started" or any(run.is_higher_better(key) for run in runs)


def best_first(runs: Iterable[FoundRun]) -> list[str]:
    """Return the metrics of runs, the one that is shown next to the loss first, the loss last."""
    names = [name for run in runs for name in metrics_of(run.config.get("task")) if name != "loss"]
    return list(dict.fromkeys([*names, "loss"]))


def ordered(items: Sequence[T], value_of: Callable[[T], Any], *, falling: bool) -> list[T]:
    """Sort items by their values; those without one, or with nan, come last either way."""
    valued = [(value_of(item), item) for item in items]
    without = [item for value, item in valued if value in (None, "") or value != value]
    having = [pair for pair in valued if pair[0] not in (None, "") and pair[0] == pair[0]]
    are_numbers = all(isinstance(value, int | float) for value, _ in having)
    having.sort(key=lambda pair: pair[0] if are_numbers else str(pair[0]), reverse=falling)
    return [*(item for _, item in having), *without]


def check_key(key: str, runs: Iterable[FoundRun]) -> None:
    """Raise ConfigError where no run has `key`."""
    _check(key, {known for run in runs for known in (*values_of(run), *run.typed)})


def _check(key: str, known: Collection[str]) -> None:
    if key not in known:
        hint = did_you_mean(key, known) or " `report --csv -` has all of them in its first line."
        raise ConfigError(f"{key}: no run has such a column, setting or metric.{hint}")


def parts_of(text: str, every: Sequence[Values]) -> tuple[str, str, str]:
    """Return a filter's key, comparison and value. Raises ConfigError as `chosen`."""
    match = re.fullmatch(r"\s*([^=!<>]+?)\s*(==?|!=|<=|>=|<|>)\s*(.*?)\s*", text, re.DOTALL)
    if match is None:
        raise ConfigError(f"{text}: write KEY=VALUE, with = != < > <= or >=")
    key = re.sub(r"\[(\d+)\]", r".\1", match[1])
    known = {known for values in every for known in values}
    _check(key, known)
    return key, match[2], match[3]


def _filter(text: str, every: Sequence[Values]) -> Callable[[Values], bool]:
    key, how, wanted = parts_of(text, every)
    if how in ("=", "==", "!="):
        is_there = any(_equal(values.get(key), wanted) for values in every)
        is_like = _matches if re.search(r"[*?]", wanted) and not is_there else _equal
        return lambda run: is_like(run.get(key), wanted) == (how != "!=")
    if (limit := _number(wanted)) is None:
        raise ConfigError(f"{text}: {wanted!r} is not a number")

    def within(run: Values) -> bool:
        value = _number(run.get(key))
        return value is not None and bool(_COMPARE[how](value, limit))

    return within


def _matches(value: Any, pattern: str) -> bool:
    """Return whether a value is like `pattern`: `*` and `?`; brackets are a list's."""
    text = "null" if value is None else str(value)
    if isinstance(value, bool):
        text = text.lower()
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _equal(value: Any, wanted: str) -> bool:
    """Return whether it is the value that was typed: `1e-3`, `True`, `[64,32]`, `'a b'`."""
    if value is None:
        return wanted.lower() in ("null", "none")
    if isinstance(value, bool):
        return wanted.lower() == str(value).lower()
    number, other = _number(value), _number(wanted)
    if number is not None and other is not None:
        return number == other or (number != number and other != other)
    text = str(value)
    if text[:1] in ("[", "{"):  # its spaces and quotes are Python's
        text, wanted = (re.sub(r"[\s'\"]", "", each) for each in (text, wanted))
    return text in (wanted, unquoted(wanted))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    for kind in (int, float):  # an int is exact, however large
        with contextlib.suppress(TypeError, ValueError):
            return kind(value)
    return None


def print_listing(console: Console, runs: Sequence[FoundRun], stale: Collection[Path] = ()) -> None:
    """Print a line for each run; the terminal wraps one that is too long, so no path is cut."""
    objectives = {run.objective for run in runs if run.objective}
    shared = objectives.pop() if len(objectives) == 1 else ""
    metric = best_first(runs)[0]
    known = {tag for run in runs for tag in run.metrics}
    finals = [tag for tag in (f"{metric}/test", f"{metric}/val") if tag in known][:1]
    about = ("model", "dataset", "workers")
    columns = ("run", "status", *about, f"best {shared}".strip(), *finals, "train time")
    table = plain_table(columns, left=("run", "status", "model", "dataset"))
    for run in runs:
        values, best = run.values, _shown(run.values["best"])
        table.add_row(
            *cells(
                values["run"],
                f"{run.status}, {STALE}" if run.folder in stale else run.status,
                *(values.get(key) or "" for key in about),
                best if shared or not best else f"{best} {run.objective}",
                *(_shown(values.get(tag)) for tag in finals),
                elapsed(run.trained_s) if run.trained_s else "",
            )
        )
    table.width = UNLIMITED
    console.print(table, soft_wrap=True)


def listing_csv(runs: Sequence[FoundRun]) -> str:
    """Return a line for each run, with every setting and metric that any of them has."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    rows: list[list[Any]] = [keys]
    for run in runs:
        values = dict(run.values)
        if values["started"] is not None:
            began = datetime.fromtimestamp(values["started"])
            values["started"] = began.isoformat(timespec="seconds")
        rows.append([values.get(key) for key in keys])
    return as_csv(rows)


def side_by_side(first: FoundRun, second: FoundRun) -> Table:
    """Return the settings in which two runs differ, then their results and differences."""
    columns = ("", shown_path(first.folder), shown_path(second.folder))
    table = plain_table((*columns, "difference"), left=columns)
    both = (first, second)
    metrics = dict.fromkeys(tag for run in both for tag in run.metrics)
    results = ["status", "workers", "best", *metrics, "time"]
    others = {*results, "run", "started"}
    settings = dict.fromkeys(key for run in both for key in run.values if key not in others)
    rows = [(key, *(setting(run.values.get(key, "")) for run in both)) for key in settings]
    rows.append(("commit", *map(_commit, both)))
    versions = (run.record.get("versions", {}).items() for run in both)
    rows.append(("versions", *(", ".join(map(" ".join, each)) for each in versions)))
    for name, a, b in rows:
        if a != b:
            table.add_row(*cells(name, a, b, ""))
    table.add_section()
    for key in results:
        x, y = (run.values.get(key) for run in both)
        difference = f"{y - x:+.4g}" if isinstance(x, float) and isinstance(y, float) else ""
        table.add_row(*cells(key, _shown(x), _shown(y), difference))
    return table


def _commit(run: FoundRun) -> str:
    git = run.record.get("git") or {}
    return git.get("commit", "")[:12] + (" with changes" if git.get("diff") else "")


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if abs(value) >= 10 else decimals(value)
