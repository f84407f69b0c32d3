"""Whether the rows of a leaderboard differ: its first against each other, paired by seed."""

from __future__ import annotations

import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.table import Table

from expt.config.identity import REPEATED, flat
from expt.errors import ConfigError
from expt.runs.result import COMPLETED, FoundRecord
from expt.runs.view.cells import cells, setting
from expt.runs.view.leaderboard import Row, objective_of, rows
from expt.runs.view.query import falls

LEVEL = 0.05
"""The chance of calling any two rows different that are not."""
POWER = 0.8


@dataclass(frozen=True)
class Verdict:
    """What `pairs` runs say of the best row's lead over another; nan where they say nothing."""

    other: Row
    pairs: int
    lead: float
    low: float
    high: float
    p: float
    seeds: int | None

    @property
    def in_words(self) -> str:
        """What one may conclude."""
        if self.pairs < 2:
            return "too few seeds in common"
        if math.isnan(self.p):
            return "the same lead in each, no spread to judge it by" if self.lead else "equal in each seed"
        if self.p < LEVEL:
            return "a difference"
        return "none shown" + (f"; {self.seeds:,} seeds would" if self.seeds and self.seeds > self.pairs else "")


def verdicts(
    runs: Sequence[FoundRecord], metric: str | None = None, difference: float | None = None
) -> tuple[Row, list[Verdict]]:
    """The best row, and what is known of its lead over each other.

    A paired t-test, with Holm's correction for the comparisons of all rows with one another: which of them is the best
    was seen in the same numbers. `seeds` is how many it would take to show the lead seen here, or one of `difference`,
    with a power of 0.8. Raises ConfigError where there is nothing to compare, or statsmodels is missing.
    """
    try:
        from statsmodels.stats.multitest import multipletests
    except ImportError:
        raise ConfigError("--verdict: needs statsmodels; pip install 'expt[verdict]'") from None
    found = [(row, values) for row in rows(runs, metric) if (values := _by_seed(row, metric))]
    if len(found) < 2 or max(len(values) for _, values in found) < 2:
        raise ConfigError("--verdict: compares settings by their seeds; make them an axis of the sweep, seed=0,1,2,3,4")
    raw = {(a, b): _t_test(_differences(found[a][1], found[b][1]))[0] for a, b in combinations(range(len(found)), 2)}
    known = [pair for pair, p in raw.items() if not math.isnan(p)]
    corrected = multipletests([raw[pair] for pair in known], LEVEL, "holm")[1] if known else []
    p_of = dict(zip(known, map(float, corrected), strict=True))
    sign = 1 if falls(metric or objective_of(runs), runs) else -1
    (best, of_best), *others = found
    return best, [
        _verdict(
            row,
            [sign * lead for lead in _differences(of_best, values)],
            p_of.get((0, index), math.nan),
            functools.partial(_seeds_for, size=difference, comparisons=max(1, len(known))),
        )
        for index, (row, values) in enumerate(others, 1)
    ]


def table(best: Row, found: Sequence[Verdict], difference: float | None = None) -> Table:
    """A line for each verdict."""
    keys = list(best.settings)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = [*keys, "seeds", "lead of the best", "95 % interval", "p", "verdict"]
    for column in columns:
        shown.add_column(cells(column)[0], justify="left" if column in {*keys, "verdict"} else "right", overflow="fold")
    shown.add_row(*cells(*(setting(best.settings[key]) for key in keys), str(len(best.values)), "", "", "", "the best"))
    for one in found:
        interval = "" if math.isnan(one.low) else f"{one.low:+.4f} to {one.high:+.4f}"
        p = "" if math.isnan(one.p) else "<0.0001" if one.p < 1e-4 else f"{one.p:.4f}"
        lead = "" if math.isnan(one.lead) else f"{one.lead:+.4f}"
        words = one.in_words + (f" show one of {difference:g}" if difference and "would" in one.in_words else "")
        settings = (setting(one.other.settings.get(key, "")) for key in keys)
        shown.add_row(*cells(*settings, str(one.pairs), lead, interval, p, words))
    return shown


def notes(found: Sequence[Verdict]) -> Iterator[str]:
    """What the table's numbers rest on, a line each."""
    number = len(found) * (len(found) + 1) // 2
    yield (
        "lead and interval of each pair alone, of runs with the same seed; p by a paired t-test, corrected (Holm) for "
        f"{number} comparison{'s' if number > 1 else ''}"
    )
    if any(flat(run.get("config") or {}).get("dataset.folds") for one in found for run in one.other.runs):
        yield "folds share training samples: differences of folds are less sure than this says"


def _by_seed(row: Row, metric: str | None) -> dict[tuple[Any, ...], float]:
    """The value of each completed run with a number, by seed and fold."""
    values: dict[tuple[Any, ...], float] = {}
    for run in row.runs:
        if run["status"] != COMPLETED:
            continue
        objective = run.get("objective")
        value = run["metrics"].get(metric) if metric else objective["value"] if objective else None
        if value is not None and math.isfinite(value):
            settings = flat(run.get("config") or run.get("overrides") or {})
            values[tuple(settings.get(key) for key in REPEATED)] = value
    return values


def _differences(first: Mapping[Any, float], second: Mapping[Any, float]) -> list[float]:
    return [first[key] - second[key] for key in first if key in second]


def _t_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """p, and the 95 % interval of the mean; nan where there are too few, or no spread at all to judge by."""
    from scipy import stats

    if len({*differences}) < 2:
        return math.nan, math.nan, math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of differences that are nearly the same
        tested = stats.ttest_1samp(differences, 0.0)
        interval = tested.confidence_interval(1 - LEVEL)
    return float(tested.pvalue), float(interval.low), float(interval.high)


def _verdict(row: Row, leads: Sequence[float], p: float, seeds_for: Callable[[Sequence[float]], int | None]) -> Verdict:
    lead = statistics.fmean(leads) if leads else math.nan
    _, low, high = _t_test(leads)
    return Verdict(row, len(leads), lead, low, high, p, seeds_for(leads))


def _seeds_for(leads: Sequence[float], *, size: float | None, comparisons: int) -> int | None:
    """How many seeds would show a lead of `size`, or the mean one; None where that cannot be known."""
    from statsmodels.stats.power import TTestPower

    spread = statistics.stdev(leads) if len(leads) > 1 else 0.0
    size = abs(statistics.fmean(leads)) if leads and size is None else size
    if not spread or not size or not 0.02 < size / spread < 4:  # beyond, the solver finds none
        return None
    needed = TTestPower().solve_power(effect_size=size / spread, alpha=LEVEL / comparisons, power=POWER)
    return max(2, math.ceil(float(needed)))
