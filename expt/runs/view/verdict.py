"""Settings compared by their seeds: the lead of the best one over each other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

from expt.errors import ConfigError, counted, listed, require
from expt.runs.found import FoundRun
from expt.runs.result import COMPLETED
from expt.runs.view.listing import falls
from expt.runs.view.settings import Row, objective_name, rows, seed_and_fold
from expt.runs.view.text import cells, plain_table, setting

NAMED = 3
"""The largest number of settings that a line names."""
LEVEL = 0.05
ROUNDING = 1e-6
"""The relative error of a value; differences within it are equal."""
Values: TypeAlias = Mapping[tuple[Any, ...], float]
"""The finite value of each completed run of a row, by seed and fold."""


class Verdict(NamedTuple):
    """The lead of the best row over another on the seeds of both; nan where it is unknown."""

    other: Row
    seeds: int
    lead: float
    low: float
    high: float
    p: float

    @property
    def in_words(self) -> str:
        """The conclusion."""
        if self.seeds < 2:
            return "too few seeds in common"
        if math.isnan(self.p):
            return "the same lead in each seed" if self.lead else "equal in each seed"
        if self.p >= LEVEL:
            return "none shown"
        return "a difference" if self.lead > 0 else "a difference, and not in favour of the best"


class Verdicts(NamedTuple):
    """The row with the best mean of several seeds, compared with each other row."""

    best: Row
    best_seeds: int
    others: tuple[Verdict, ...]
    notes: tuple[str, ...]


def verdicts(runs: Sequence[FoundRun], metric: str | None = None) -> Verdicts:
    """Compare the best row with the others by paired t-tests.

    p and the interval are corrected (Holm) for the comparisons of all rows with one another, since
    the best one was chosen by the same numbers. Raises ConfigError where there is nothing to
    compare.
    """
    metric = metric or objective_name(runs)
    sign = 1 if falls(metric, runs) else -1
    found = rows(runs)
    values = [_values(row, metric) for row in found]
    finite = [{key: x for key, x in each.items() if math.isfinite(x)} for each in values]
    seeds = [len(each) for each in finite]
    compared = [index for index, number in enumerate(seeds) if number]
    if not any(values):
        raise ConfigError(f"--verdict: no run has measured {metric}")
    if len(compared) < 2 or max(seeds) < 2:
        raise ConfigError(
            "--verdict: compares settings by their seeds; make seeds an axis of the sweep, with"
            f" others, seed=0,1,2,3,4 ({metric}: {len(compared)} rows of at most"
            f" {max(seeds)} seeds)"
        )
    pairs = itertools.combinations(compared, 2)
    raw = {(one, other): _test(finite[one], finite[other]).p for one, other in pairs}
    corrected = _holm(raw)

    def merit(index: int) -> tuple[bool, bool, float]:
        # Of a row with a run that is not finite, or failed, the mean of the others says nothing.
        is_finite, mean = finite[index] == values[index], statistics.fmean(finite[index].values())
        return is_finite, found[index].is_whole, sign * mean

    best = max((index for index in compared if seeds[index] > 1), key=merit)

    def verdict(other: int) -> Verdict:
        pair = min(best, other), max(best, other)
        p = corrected[pair]  # the interval has 0 within it where p is at least LEVEL
        level = LEVEL * raw[pair] / p if p else LEVEL / len(raw)
        tested = _test(finite[best], finite[other], level)
        low, high = sorted(sign * end + 0.0 for end in (tested.low, tested.high))
        common = len(finite[best].keys() & finite[other])
        # In this order nan stays.
        return Verdict(found[other], common, sign * tested.lead + 0.0, low, high, min(p, 1.0))

    known = counted(sum(not math.isnan(p) for p in raw.values()), "comparison")
    notes = [
        "lead and interval compare each row with the best, by runs of the same seed; interval and p"
        f" are of a paired t-test, corrected (Holm) for {known}"
    ]
    is_unequal = len({frozenset(finite[index]) for index in compared}) > 1
    notes += _notes_of_seeds(found, seeds, found[best], is_unequal=is_unequal)
    if best:
        notes.append(_note_of_first_row(found[0], seeds[0], metric))
    completed = [run for at in compared for run in found[at].runs if run.status == COMPLETED]
    if left_out := len(completed) - sum(seeds):
        why = "of a seed that is there, or without a finite value"
        notes.append(f"not counted: {left_out} completed, {why}")
    if any(run.config.get("dataset", {}).get("folds") for run in runs):
        notes.append("folds share training samples: differences are less sure than this says")
    others = tuple(verdict(index) for index in compared if index != best)
    return Verdicts(found[best], seeds[best], others, tuple(notes))


def _notes_of_seeds(
    found: Sequence[Row], seeds: Sequence[int], best: Row, *, is_unequal: bool
) -> Iterator[str]:
    """Yield how the best was found among unequal seeds, and the rows without all repetitions."""
    compared = [row for row, number in zip(found, seeds, strict=True) if number]
    incomplete = [row.name for row in compared if len(row.counted) < row.total]
    among = "of the rows with all repetitions " if incomplete and best.is_whole else ""
    if is_unequal:
        yield f"the rows have unequal seeds: {among}the best is that by the mean of its own"
    if incomplete:
        yield f"incomplete: {listed(incomplete, NAMED)}; what is missing may be the worst"
    if without := [row.name for row, number in zip(found, seeds, strict=True) if not number]:
        yield f"not compared: {listed(without, NAMED)}: no completed run has a finite value"


def _note_of_first_row(row: Row, seeds: int, metric: str) -> str:
    """Return a line that says why the first row of the leaderboard is not the best one here."""
    if metric != row.objective:
        why = f"that is by {row.objective}, and this by {metric}"
    elif seeds < 2:
        why = f"it has {counted(seeds, 'seed')}, and a verdict needs two"
    else:
        why = "it has a value that is not finite, or a seed twice"
    return f"the first row of the leaderboard is {row.name}: {why}"


def _values(row: Row, metric: str) -> Values:
    found = dict[tuple[Any, ...], float]()
    for run in row.runs:
        value = run.value_of(metric)
        if run.status == COMPLETED and value is not None:
            found.setdefault(seed_and_fold(run), value)
    return found


class _Test(NamedTuple):
    """The mean of the differences by seed, its interval, and p; nan where they have no spread."""

    lead: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def _test(first: Values, second: Values, level: float = LEVEL) -> _Test:
    """Test `first - second` by seed."""
    require("--verdict", "scipy", extra="verdict")
    from scipy import stats

    pairs = [(first[key], second[key]) for key in first if key in second]
    if not pairs:
        return _Test(math.nan)
    differences = [a - b for a, b in pairs]
    error = ROUNDING * max(abs(value) for pair in pairs for value in pair)
    lead = statistics.fmean(differences)
    if abs(lead) <= error:
        lead = 0.0
    if max(differences) - min(differences) <= 2 * error:
        return _Test(lead)
    tested = stats.ttest_1samp(differences, 0.0)
    interval = tested.confidence_interval(1 - level)
    return _Test(lead, float(interval.low), float(interval.high), float(tested.pvalue))


def _holm(p: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the corrected p, which may be above 1; nan where it is not known."""
    known = sorted((value, pair) for pair, value in p.items() if not math.isnan(value))
    steps = ((len(known) - place) * value for place, (value, _) in enumerate(known))
    corrected = zip(known, itertools.accumulate(steps, max), strict=True)
    return {**p, **{pair: value for (_, pair), value in corrected}}


def verdict_table(found: Verdicts) -> Table:
    """Return a table with a line for each verdict."""
    keys = list(found.best.settings)
    columns = (*keys, "seeds", "lead of the best", "95 % interval", "p", "verdict")
    shown = plain_table(columns, left={*keys, "verdict"})
    best = (setting(found.best.settings[key]) for key in keys)
    shown.add_row(*cells(*best, found.best_seeds, "", "", "", "the best"))
    for one in found.others:
        interval = p = ""
        if not math.isnan(one.p):
            interval = f"{_signed(one.low)} to {_signed(one.high)}"
            p = "<0.0001" if one.p < 1e-4 else f"{one.p:.4f}"
        lead = "" if math.isnan(one.lead) else _signed(one.lead)
        settings = (setting(one.other.settings.get(key, "")) for key in keys)
        shown.add_row(*cells(*settings, one.seeds, lead, interval, p, one.in_words))
    return shown


def _signed(value: float) -> str:
    if not value:
        return "0"
    return f"{value:+.4f}" if abs(value) >= 5e-5 else f"{value:+.1e}"
