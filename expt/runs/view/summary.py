"""What a run has come to, at its end: the final numbers, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from expt.config.datasets import noun_of
from expt.config.tasks import metrics_of
from expt.runs import provenance
from expt.runs.paths import RunPaths
from expt.runs.result import PAUSED, Record, read_result, whole_epochs
from expt.runs.view.ancestry import forks_told
from expt.runs.view.cells import cells, say
from expt.runs.view.progress import resume_command, shown_path


def print_summary(console: Console, paths: RunPaths) -> None:
    """The final numbers, each with its epoch, and what to do next."""
    result = read_result(paths)
    is_paused = result.get("status") == PAUSED
    if (
        not is_paused
        and (step := result.get("resumed_from", {}).get("step"))
        and step == result.get("steps")
    ):
        more = (
            "a larger early_stop.patience goes on"
            if result.get("stopped_early")
            else "more epochs=... go on"
        )
        say(
            console,
            f"nothing was left to train: the run was at its end, step {step}, already; {more}",
        )
    values: Mapping[str, float | None] = result.get("metrics") or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    metrics = metrics_of((result.get("config") or {}).get("task"))
    for column in ("", *metrics, "of epoch"):
        table.add_column(column, justify="left" if not column else "right")
    for split in ("train", "val", "test"):
        if f"loss/{split}" in values:
            numbers = (_number(values, f"{metric}/{split}") for metric in metrics)
            table.add_row(*cells(split, *numbers, _epoch_of(split, result)))
    console.print(table)
    for line in _facts(result):
        say(console, line)
    if is_paused:
        say(console, f"paused       after {epochs_done(result)}; to go on: {resume_command(paths)}")
    say(console, f"run folder   {shown_path(paths.folder)}")
    if paths.operators.exists():
        operators, trace = paths.operators.read_text(encoding="utf-8"), shown_path(paths.trace)
        say(console, f"\n{operators}")
        say(console, f"trace        {trace}, to open at https://ui.perfetto.dev")
    say(
        console,
        f"look at it   tensorboard --logdir {shlex.quote(shown_path(logdir(paths.folder)))}",
    )
    if shown_path(paths.folder).startswith("outputs/"):  # where the report looks by itself
        say(console, f"compare      {provenance.program()} report")


def _number(values: Mapping[str, float | None], tag: str) -> str:
    """Nothing where it was not measured; a nan is null in the record."""
    value = values.get(tag, "")
    return f"{value:.4f}" if isinstance(value, int | float) else "nan" if value is None else ""


def logdir(folder: Path) -> Path:
    """The folder around the run's, where nothing but runs is.

    TensorBoard calls a run that is its own logdir `.`, and then finds no metrics of it for HPARAMS.
    """
    around = folder.parent
    only_runs = all(RunPaths(path).result.exists() for path in around.iterdir() if path.is_dir())
    return around if only_runs else folder


def _epoch_of(split: str, result: Record) -> str:
    """Train and val are of the last epoch; test at a run's end is of the best checkpoint."""
    last, best = whole_epochs(result), result.get("best")
    each_epoch = split != "test" or (result.get("config") or {}).get("eval_split") == "test"
    return f"{last}, the last" if each_epoch or not best else f"{best['epoch']}, the best"


def epochs_done(result: Record) -> str:
    """How much of a run has been trained, as in `3 of 9 epochs`."""
    return f"{whole_epochs(result)} of {(result.get('config') or {}).get('epochs', '?')} epochs"


def _facts(result: Record) -> list[str]:
    workers = result.get("world_size", 1)
    where = (
        f"{workers} worker{'s' if workers > 1 else ''} on"
        f" {', '.join(result.get('devices') or ['the CPU'])}"
    )
    speed = f"{result.get('samples_per_s') or 0:,.0f} {noun_of(result)}s/s"
    best = result.get("best")
    found = [f"forked from  {line}" for line in forks_told(result)]
    found += [f"trained      {sum(result.get('epoch_s') or [0]):.1f} s by {where}, {speed}"]
    if best:
        found.append(f"best         {best['metric']} {best['value']:.4f} in epoch {best['epoch']}")
    elif none := _without_best(result):
        found.append(f"no best      {none}")
    if stopped := result.get("stopped_early"):
        found.append(f"stopped      after epoch {stopped['epoch']}: {stopped['reason']}")
    return found


def _without_best(result: Record) -> str | None:
    """Why no epoch was the best, where each was evaluated."""
    values: Mapping[str, float] = result.get("metrics") or {}
    objective: Mapping[str, Any] = result.get("objective") or {}
    name = str(objective.get("name"))
    each_epoch = (result.get("config") or {}).get("eval_split") == "test"
    if math.isfinite(values.get(name, 0.0)) or (name.endswith("/test") and not each_epoch):
        return None
    tested = "; what is tested is the last" if "loss/test" in values and not each_epoch else ""
    return f"{name} was not finite in any epoch{tested}"
