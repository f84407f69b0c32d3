"""Whether the rows of a leaderboard differ: its first against each other, paired by seed."""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from rich.table import Table

from expt.config.keys import flat
from expt.errors import ConfigError, did_you_mean
from expt.runs import tags
from expt.runs.result import COMPLETED, FoundRecord
from expt.runs.view.cells import cells, setting
from expt.runs.view.leaderboard import Row, objective_of, rows, value_of
from expt.runs.view.power import pairs_needed
from expt.runs.view.query import falls, ordered
from expt.runs.view.repetitions import seed_and_fold

LEVEL = 0.05
"""The chance of calling any two rows different that are not."""
NAMED = 3
"""Runs that count nowhere."""
LEAST_EFFECT = 0.02
"""The smallest lead, in standard deviations, that a number of seeds is looked for."""


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
    needs_more: bool = False
    """Whether more than that many seeds would be needed, nobody has looked how many."""

    @property
    def in_words(self) -> str:
        """What one may conclude."""
        more = "more than " if self.needs_more else ""
        if self.pairs < 2:
            return "too few seeds in common"
        if math.isnan(self.p):
            return (
                "the same lead in each, no spread to judge it by"
                if self.lead
                else "equal in each seed"
            )
        if self.p < LEVEL:
            return "a difference" + (", and not in favour of the best" if self.lead < 0 else "")
        return "none shown" + (
            f"; {more}{self.seeds:,} seeds would" if self.seeds and self.seeds > self.pairs else ""
        )


@dataclass(frozen=True)
class Verdicts:
    """The best row, and what is known of its lead over each other."""

    best: Row
    best_seeds: int
    others: tuple[Verdict, ...]
    corrected_for: int
    """How many comparisons have a p."""
    has_unequal_seeds: bool
    first_by_mean: Row
    """Over all its seeds, whichever they are."""
    not_finite: int
    """Completed runs that count nowhere."""
    again: tuple[str, ...] = ()
    """Completed runs that count nowhere, since one before them in the row has their seed and fold.
    """


_Seeds: TypeAlias = tuple[int | None, bool]
"""How many, and whether more than that."""
_OfSeeds: TypeAlias = Mapping[tuple[Any, ...], float]
"""The finite value of each completed run, by seed and fold."""


@dataclass(frozen=True)
class _Measured:
    row: Row
    values: _OfSeeds
    not_finite: int
    again: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Over all its seeds; nan where one of them has come to nothing."""
        return math.nan if self.not_finite else statistics.fmean(self.values.values())


def verdicts(
    runs: Sequence[FoundRecord], metric: str | None = None, difference: float | None = None
) -> Verdicts:
    """Judge the lead of the best row: the first of several seeds that no other with several in
    common leads on those.

    A paired t-test, with Holm's correction for the comparisons of all rows with one another: which
    of them is the best was seen in the same numbers. `seeds` is how many it would take to show the
    lead seen here, or one of `difference`, with a power of 0.8. Raises ConfigError where there is
    nothing to compare, or statsmodels is missing."""
    try:
        from statsmodels.stats.multitest import multipletests
    except ImportError:
        raise ConfigError("--verdict: needs statsmodels; pip install 'expt[verdict]'") from None
    metric = metric or _common_objective(runs)
    sign = 1 if falls(metric, runs) else -1
    measured = [one for row in rows(runs) if (one := _measured(row, metric)).values]
    found = ordered(measured, lambda one: one.mean, falling=sign > 0)
    _check_seeds(found)
    raw = {
        (a, b): _t_test(_differences(found[a].values, found[b].values))[0]
        for a, b in combinations(range(len(found)), 2)
    }
    known = [pair for pair, p in raw.items() if not math.isnan(p)]
    corrected = multipletests([raw[pair] for pair in known], LEVEL, "holm")[1] if known else []
    p_of = dict(zip(known, map(float, corrected), strict=True))
    best = _index_of_best(found, sign)
    seeds_for = functools.partial(_seeds_for, size=difference, comparisons=max(1, len(known)))
    others = tuple(
        _verdict(
            found[best],
            one,
            sign,
            p_of.get((min(best, index), max(best, index)), math.nan),
            seeds_for,
        )
        for index, one in enumerate(found)
        if index != best
    )
    has_unequal_seeds = len({frozenset(one.values) for one in found}) > 1
    not_finite = sum(one.not_finite for one in found)
    row, seeds = found[best].row, len(found[best].values)
    again = tuple(name for one in found for name in one.again)
    return Verdicts(
        row, seeds, others, len(known), has_unequal_seeds, found[0].row, not_finite, again
    )


def check_metric(metric: str, runs: Iterable[FoundRecord]) -> None:
    """Raise ConfigError where no run has measured `metric`."""
    known = {tag: None for run in runs for tag in run.get("metrics") or {}}
    if metric not in known:
        told = [
            tag
            for tag in known
            if tag in tags.COMPARABLE or tag.partition("/")[0] not in tags.OF_EXPT
        ]
        hint = (
            did_you_mean(metric, known)
            or f" They have {', '.join(told)}; without --metric it is the objective."
        )
        raise ConfigError(f"--metric {metric}: no run has such a metric.{hint}")


def table(found: Verdicts, difference: float | None = None) -> Table:
    """A line for each verdict."""
    best = found.best
    keys = list(best.settings)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = [*keys, "seeds", "lead of the best", "95 % interval", "p", "verdict"]
    for column in columns:
        shown.add_column(
            cells(column)[0],
            justify="left" if column in {*keys, "verdict"} else "right",
            overflow="fold",
        )
    shown.add_row(
        *cells(
            *(setting(best.settings[key]) for key in keys),
            str(found.best_seeds),
            "",
            "",
            "",
            "the best",
        )
    )
    for one in found.others:
        interval = "" if math.isnan(one.low) else f"{_signed(one.low)} to {_signed(one.high)}"
        p = "" if math.isnan(one.p) else "<0.0001" if one.p < 1e-4 else f"{one.p:.4f}"
        lead = "" if math.isnan(one.lead) else _signed(one.lead)
        words = one.in_words + (
            f" show one of {difference:g}" if difference and "would" in one.in_words else ""
        )
        settings = (setting(one.other.settings.get(key, "")) for key in keys)
        shown.add_row(*cells(*settings, str(one.pairs), lead, interval, p, words))
    return shown


def _signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) >= 5e-5 else f"{value:+.1e}" if value else "0"


def notes(found: Verdicts) -> Iterator[str]:
    """What the table's numbers rest on, a line each."""
    number, known = len(found.others) * (len(found.others) + 1) // 2, found.corrected_for
    of_all = "" if known == number else f" that {'has' if known == 1 else 'have'} one, of {number}"
    yield (
        "lead and interval of each pair alone, of runs with the same seed; p by a paired t-test,"
        f" corrected (Holm) for {known} comparison{'' if known == 1 else 's'}{of_all}"
    )
    if found.has_unequal_seeds:
        first = ", ".join(
            f"{key}={setting(value)}" for key, value in found.first_by_mean.settings.items()
        )
        by_mean = (
            ""
            if found.first_by_mean is found.best
            else f"; by the mean of all its own it would be {first}"
        )
        who = (
            "another" if any(one.pairs > 1 and one.lead < 0 for one in found.others) else "no other"
        )
        yield (
            f"the rows have unequal seeds: {who} with two or more in common leads the best on"
            f" those{by_mean}"
        )
    if found.not_finite:
        yield f"completed runs without a finite number, which count nowhere: {found.not_finite}"
    if found.again:
        more = f" and {len(found.again) - NAMED:,} more" if len(found.again) > NAMED else ""
        yield (
            "completed runs of a seed that a run before them in the row has, which count nowhere: "
            f"{', '.join(found.again[:NAMED])}{more}"
        )
    runs = (run for row in (found.best, *(one.other for one in found.others)) for run in row.runs)
    if any(flat(run.get("config") or {}).get("dataset.folds") for run in runs):
        yield "folds share training samples: differences of folds are less sure than this says"


def _measured(row: Row, metric: str) -> _Measured:
    values, again = dict[tuple[Any, ...], float](), list[str]()
    for run in row.runs:
        if run["status"] != COMPLETED or (value := value_of(run, metric)) is None:
            continue
        if (key := seed_and_fold(run)) in values:
            again.append(str(run["folder"]))
        else:
            values[key] = value
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    return _Measured(row, finite, len(values) - len(finite), tuple(again))


def _common_objective(runs: Sequence[FoundRecord]) -> str:
    done = [run["objective"] for run in runs if run["status"] == COMPLETED]
    if len(names := [*dict.fromkeys(objective["name"] for objective in done if objective)]) > 1:
        raise ConfigError(
            "--verdict: compares runs by one number, and these were chosen by"
            f" {' and '.join(names)}; name one, as in --metric {names[0]}"
        )
    return objective_of(runs)


def _check_seeds(found: Sequence[_Measured]) -> None:
    most = max((len(one.values) for one in found), default=0)
    if len(found) < 2 or most < 2:
        have = f"here {len(found)} setting{'s have' if len(found) != 1 else ' has'} completed runs"
        seeds = f" of {most} seed{'s' * (most > 1)}" if most else ""
        mend = "make seeds an axis of the sweep beside others, seed=0,1,2,3,4"
        raise ConfigError(f"--verdict: compares settings by their seeds; {have}{seeds}; {mend}")


def _index_of_best(found: Sequence[_Measured], sign: int) -> int:
    """The mean of a row that has other seeds than another says which seeds it has, too."""
    rivals = [one for one in found if not one.not_finite]
    several = [
        index for index, one in enumerate(found) if len(one.values) > 1
    ]  # one seed can't be judged by
    for index in several:
        if not any(_leads(rival.values, found[index].values, sign) for rival in rivals):
            return index
    return several[0]


def _leads(first: _OfSeeds, second: _OfSeeds, sign: int) -> bool:
    differences = _differences(first, second)
    return len(differences) > 1 and sign * _mean(differences, first, second) > 0


def _differences(first: _OfSeeds, second: _OfSeeds) -> list[float]:
    """By how much the first is above the second with each seed that both have, without what
    rounding has done.
    """
    pairs = _pairs(first, second)
    rounding = _rounding(pairs)
    found = [a - b for a, b in pairs]
    # Where one number lies within the rounding of each of them, all may be that one.
    low = max((value - bound for value, bound in zip(found, rounding, strict=True)), default=0.0)
    high = min((value + bound for value, bound in zip(found, rounding, strict=True)), default=0.0)
    return (
        [min(zip(rounding, found, strict=True))[1]] * len(found) if found and low <= high else found
    )


def _mean(differences: Sequence[float], first: _OfSeeds, second: _OfSeeds) -> float:
    mean = statistics.fmean(differences) if differences else math.nan
    return 0.0 if abs(mean) <= statistics.fmean(_rounding(_pairs(first, second)) or [0.0]) else mean


def _pairs(first: _OfSeeds, second: _OfSeeds) -> list[tuple[float, float]]:
    return [(first[key], second[key]) for key in first if key in second]


def _rounding(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """How far each difference may be off by the last digits of its two values alone: of quotients,
    half of this.
    """
    is_single = all(
        ctypes.c_float(value).value == value for pair in pairs for value in pair
    )  # torchmetrics' are
    return [4 * (2**-23 if is_single else 2**-52) * max(map(abs, pair)) for pair in pairs]


def _t_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """p, and the 95 % interval of the mean; nan where there are too few, or no spread at all to
    judge by.
    """
    from scipy import stats

    if len({*differences}) < 2:
        return math.nan, math.nan, math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of differences that are nearly the same
        tested = stats.ttest_1samp(differences, 0.0)
        interval = tested.confidence_interval(1 - LEVEL)
    return float(tested.pvalue), float(interval.low), float(interval.high)


def _verdict(
    best: _Measured,
    other: _Measured,
    sign: int,
    p: float,
    seeds_for: Callable[[Sequence[float], float], _Seeds],
) -> Verdict:
    differences = _differences(best.values, other.values)
    leads = [sign * value for value in differences]
    lead = sign * _mean(differences, best.values, other.values) + 0.0  # which is no -0.0
    _, low, high = _t_test(leads)
    return Verdict(other.row, len(leads), lead, low, high, p, *seeds_for(leads, lead))


def _seeds_for(
    leads: Sequence[float], lead: float, *, size: float | None, comparisons: int
) -> _Seeds:
    """How many seeds would show a lead of `size`, or the one seen; None where that cannot be known."""
    spread = statistics.stdev(leads) if len(leads) > 1 else 0.0
    size = abs(lead) if size is None else size
    if not spread or not size:
        return None, False
    effect = size / spread
    needed = pairs_needed(max(effect, LEAST_EFFECT), LEVEL / comparisons)
    return (needed - 1, True) if effect < LEAST_EFFECT else (needed, False)
