"""Which runs measure the same thing again: they differ by their seed and fold alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from expt.config.identity import REPEATED, hyperparameters
from expt.runs.result import FoundRecord


def experiments(runs: Iterable[FoundRecord]) -> list[list[FoundRecord]]:
    """The runs, those that repeat one another together.

    Forks of parents that differ by their seeds are repetitions where each goes on with its parent's
    seed. Where two of them have the same seed, each parent is an experiment of its own."""
    return [part for group in _grouped(runs, without_seed) for part in _by_parent(group)]


def seed_and_fold(run: FoundRecord) -> tuple[Any, ...]:
    """By which the runs of an experiment are told apart, and paired with those of another."""
    if config := run.get("config"):
        return config.get("seed"), (config.get("dataset") or {}).get("fold")
    overrides = run.get("overrides") or {}
    return tuple(overrides.get(key) for key in REPEATED)


def without_seed(run: FoundRecord) -> str:
    """Equal for runs that differ by their seed and fold alone, in all that they have come to,
    whatever was typed.
    """
    if "seedless_identity" in run:
        return run["seedless_identity"]
    known: Any = run.get("config")
    if known:  # of an older version
        flat = hyperparameters(known)
        known = [
            {key: flat[key] for key in flat if key not in REPEATED},
            run.get("content"),
        ]
    else:  # refused, before it had a configuration
        known = {
            key: value for key, value in run.get("overrides", {}).items() if key not in REPEATED
        }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]


def parent_of(run: FoundRecord) -> str:
    """The checkpoint that a fork began from, by its run's identity and the step; "" of another run."""
    content = run.get("content")
    return content.get("fork", "") if content else ""


def _by_parent(group: Sequence[FoundRecord]) -> list[list[FoundRecord]]:
    parents = _grouped(group, parent_of)
    seeds = [seed for forks in parents for seed in {seed_and_fold(run) for run in forks}]
    return parents if len(set(seeds)) < len(seeds) else [list(group)]


def _grouped(
    runs: Iterable[FoundRecord], by: Callable[[FoundRecord], Hashable]
) -> list[list[FoundRecord]]:
    groups: dict[Hashable, list[FoundRecord]] = {}
    for run in runs:
        groups.setdefault(by(run), []).append(run)
    return list(groups.values())
