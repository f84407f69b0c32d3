"""What a notebook shows of a run and of a sweep."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from expt.config.kinds import metrics_of
from expt.errors import ConfigError
from expt.runs.result import FAILED, FoundRecord, Record
from expt.runs.view import curves
from expt.runs.view.leaderboard import SHOWN, lines, objective_of, rows
from expt.runs.view.text import elapsed
from expt.runs.worker_error import in_one_line


def of_run(folder: Path, record: Record, history: curves.History) -> str:
    """Return a table of the run's metrics by split, its folder and its curves."""
    task, metrics = (record.get("config") or {}).get("task"), record.get("metrics") or {}
    names = list(metrics_of(task))
    found = [
        [split, *(_number(metrics.get(f"{name}/{split}")) for name in names)]
        for split in ("train", "val", "test")
    ]
    parts = [f"<b>{escape(str(record.get('status', 'no record')))}</b>"]
    if best := record.get("best"):
        parts.append(f"best {escape(best['metric'])} {best['value']:.4f} in epoch {best['epoch']}")
    trained = f"trained {elapsed(sum(record.get('epoch_s') or [0.0]))}"
    parts += [trained, f"<code>{escape(str(folder))}</code>"]
    error = [_failure("error", record["error"])] if record.get("error") else []
    table = _table(["", *names], [line for line in found if any(line[1:])])
    return "".join([f"<p>{' &middot; '.join(parts)}</p>", *error, table, _picture(record, history)])


def of_sweep(runs: Sequence[FoundRecord]) -> str:
    """Return the leaderboard, best first, and what has failed."""
    if not runs:
        return "<p>no runs</p>"
    head, *below = lines(rows(runs)[:SHOWN], objective_of(runs))
    found = []
    if failed := [run for run in runs if run["status"] == FAILED]:
        found.append(f"<p><b style='color:#c00'>{len(failed)} of {len(runs)} runs failed</b></p>")
    found += [_failure(run["folder"].name, run.get("error") or "") for run in failed]
    folder = f"<p><code>{escape(str(runs[0]['folder'].parent))}</code></p>"
    return "".join([*found, _table(head, below), folder])


def _failure(name: str, error: object) -> str:
    return f"<p>{escape(name)}: {escape(in_one_line(str(error)))}</p>"


def _table(head: Iterable[str], below: Iterable[Iterable[str]]) -> str:
    def cells(kind: str, line: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in line) + "</tr>"

    body = "".join(cells("td", line) for line in below)
    return f"<table><thead>{cells('th', head)}</thead><tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _picture(record: Record, history: curves.History) -> str:
    """Return the curves; nothing for a run of one epoch, or without matplotlib."""
    if len(history) < 2:
        return ""
    try:
        picture = curves.png(curves.figure(record, history, height=2.4, panels=2))
    except ConfigError:
        return ""
    data = base64.b64encode(picture).decode()
    return f"<img alt='learning curves' src='data:image/png;base64,{data}'>"
