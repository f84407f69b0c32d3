"""scripts/mutate: the words it takes, what it remembers, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from scripts.mutation import trials
from scripts.mutation.belonging import tests_of
from scripts.mutation.changes import ROOT, Change, equivalent, modules, sample
from scripts.mutation.trials import NOTICED, SURVIVED


def main() -> None:
    """Try the changes, those that were noticed by an earlier command left out, and print what
    survived.
    """
    options = _options()
    found = sample(options.seed, options.count, modules(options.modules))
    known, seen = equivalent(), _remembered(options.log)
    left = [
        change
        for change in found
        if (change.path, *change.lines) not in known and change.key not in seen
    ]
    print(
        f"{len(found)} changes; {len(found) - len(left)} are known, or were noticed before",
        flush=True,
    )
    trials.warm()
    limits = _limits(left, options.jobs)
    if untried := [change for change in left if change.path not in limits]:
        print(
            f"{len(untried)} changes are left out, for the tests of their modules fail without"
            " them",
            flush=True,
        )
    left = [change for change in left if change.path in limits]
    found = [change for change in found if change not in untried]
    survivors: list[Change] = []
    options.log.parent.mkdir(parents=True, exist_ok=True)

    def told(change: Change, outcome: str, took_s: float, said: str) -> None:
        del said
        print(f"{outcome:9} {took_s:5.1f} s  {change.where}\n{change.diff()}", flush=True)
        if outcome == SURVIVED:
            survivors.append(change)
            return
        with options.log.open("a") as file:
            print(
                json.dumps({"key": change.key, "where": change.where, "outcome": outcome}),
                file=file,
            )

    trials.run(left, options.jobs, limits.__getitem__, told)
    _conclude(found, survivors, sum((change.path, *change.lines) in known for change in found))


def _options() -> argparse.Namespace:
    about = (
        "Change single lines of expt/ at random, and say which changes the tests that belong to"
        " them notice."
    )
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--modules", default="**/*.py", help="as in 'worker/*.py' (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="changes at a time"
    )
    log = "remembers what was noticed, so that a second call resumes"
    parser.add_argument("--log", type=Path, default=ROOT / "build/mutants.jsonl", help=log)
    return parser.parse_args()


def _remembered(log: Path) -> set[str]:
    return (
        {json.loads(line)["key"] for line in log.read_text().splitlines()}
        if log.exists()
        else set()
    )


def _limits(left: list[Change], jobs: int) -> dict[str, float]:
    """How long each module's tests may take: three times as long as they do without a change, and
    ten seconds.
    """
    tests = {
        change.path: {test.partition("::")[0] for test in tests_of(change.path)} for change in left
    }
    texts = {file: (ROOT / file).read_text() for file in sorted(set[str]().union(*tests.values()))}
    took: dict[str, float] = {}

    def told(unchanged: Change, outcome: str, took_s: float, said: str) -> None:
        if outcome == SURVIVED:
            took[unchanged.path] = took_s
        else:
            print(f"{unchanged.path}: fails without a change\n{said}", flush=True)

    trials.run(
        [Change(file, text, text) for file, text in texts.items()], jobs, lambda _: 600.0, told
    )
    return {
        path: 3 * sum(map(took.__getitem__, files)) + 10
        for path, files in tests.items()
        if files <= took.keys()
    }


def _conclude(found: list[Change], survivors: list[Change], equivalents: int) -> None:
    tried = len(found) - equivalents
    noticed = tried - len(survivors)
    share = f"{noticed} of {tried} changes {NOTICED} ({noticed / max(1, tried):.0%})"
    print(f"\n{share}, {equivalents} equivalent left out")
    for change in sorted(survivors, key=lambda change: change.where):
        print(f"{change.where}\n{change.diff()}")
