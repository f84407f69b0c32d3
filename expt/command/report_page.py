"""`expt report SWEEP --html FILE`: all that a reader wants to know of a sweep, on one page."""

from __future__ import annotations

import collections
import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expt.command.conclude import again
from expt.config.keys import flat
from expt.errors import ConfigError, counted, first_line, listed, require
from expt.features import Features, Numbers
from expt.late import np
from expt.runs.found import FoundRun, without_copies
from expt.runs.view import curves, page, verdict
from expt.runs.view.leaderboard import leaderboard
from expt.runs.view.listing import falls
from expt.runs.view.settings import Row, objective_name, rows
from expt.runs.view.text import cells, plain_table, setting, shown_path
from expt.search.conclusion import best_of, importance, importance_tables

CHEAP_S = 10.0
"""The longest evaluation that is repeated for a picture."""
NAMED = 6
"""The largest number of settings that the question names."""


def page_about(folder: Path, runs: Sequence[FoundRun], sort: str | None) -> str:
    """Return the page about these runs of a sweep. Raises ConfigError without its libraries."""
    require("--html", "matplotlib", "scipy", "optuna", extra="plot,search")  # a page has no gaps
    runs = without_copies(runs)[0]
    best = best_of(folder, runs)
    sections = {
        "Question": _question(runs),
        "Results": page.table(leaderboard(runs, sort, whole=True)),
        "Is the best one better?": _unless_refused(_verdict, runs),
        "Learning curves": page.drawn_curves([run for row in rows(runs) for run in row.runs]),
        "What mattered": _unless_refused(_importance, folder, runs),
        **(_of_best(best) if best else {}),
    }
    return page.page(shown_path(folder), sections.items())


def _question(runs: Sequence[FoundRun]) -> list[str]:
    values = collections.defaultdict[str, set[str]](set)
    for row in rows(runs):
        for key, value in row.settings.items():
            values[key].add(str(value))
    keys = [key for key, several in values.items() if len(several) > 1]
    objective = objective_name(runs)
    side = "highest" if falls(objective, runs) else "lowest"
    count = collections.Counter(run.status for run in runs)
    by_status = ", ".join(f"{number} {status}" for status, number in count.items())
    varied = f" by {listed(keys, NAMED)}" if keys else ""
    return page.paragraph(
        f"What leads to the {side} {objective}{varied}?",
        f"{counted(len(runs), 'run')}: {by_status}.",
    )


def _unless_refused(section: Callable[..., list[str]], *args: Any) -> list[str]:
    try:
        return section(*args)
    except ConfigError as error:  # too few runs say so
        return page.paragraph(re.sub(r"^--\w+: ", "", str(error)))


def _verdict(runs: Sequence[FoundRun]) -> list[str]:
    found = verdict.verdicts(runs)
    return [*page.table(verdict.verdict_table(found)), *page.paragraph(*found.notes)]


def _importance(folder: Path, runs: Sequence[FoundRun]) -> list[str]:
    tables = importance_tables(importance(folder, runs))
    return [piece for table in tables for piece in page.table(table)]


def _of_best(row: Row) -> dict[str, list[str]]:
    """Return the sections about the best setting, and of the first of its runs."""
    settings = plain_table(("setting", "value"), left=("setting", "value"))
    for key, value in flat(row.first.config).items():
        settings.add_row(*cells(key, setting(value)))
    from expt.dashboards.events import pictures_of_evaluations  # late: few have pictures

    shown = page.pictures(pictures_of_evaluations(row.first.paths))
    return {
        "The best": [
            *page.paragraph(row.name, "To train it again:"),
            page.command(again(row.first, row.runs)),
            *_residuals(row.first),
            *shown,
            "<details><summary>All its settings</summary>",
            *page.table(settings),
            "</details>",
        ]
    }


def _residuals(run: FoundRun) -> list[str]:
    """Return predictions of a regression's best weights against the truth; nothing of others."""
    data, eval_s = run.record.get("data") or {}, run.record.get("eval_s", math.inf)
    if "targets" not in data or not isinstance(Features.read(data).targets, Numbers):
        return []
    if eval_s > CHEAP_S * max(1, len(run.record.get("epoch_s") or ())):
        return page.paragraph(f"Its evaluations take over {CHEAP_S:g} s: no predictions are drawn.")
    from expt.inference.plan import Plan  # late: torch
    from expt.inference.predict import Predictor

    split, drawing = "test" if data.get("test_size") else "val", io.BytesIO()
    try:
        answers = [*Predictor(Plan([(run.folder, "best")], split=split, device="cpu"))]
        predicted, true = (
            np.concatenate([each.arrays[name] for each in answers]) for name in ("values", "target")
        )
        names = answers[0].beside["target_names"]
        curves.predicted_against_true(predicted, true, names, drawing)
    except Exception as error:  # of a custom dataset, whose files may be gone
        return page.paragraph(f"Its predictions are not drawn: {first_line(error)}")
    return [f"<h3>Predictions of {split}</h3>", page.picture(drawing)]
