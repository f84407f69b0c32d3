"""What evaluations have come to: the numbers, of which weights they are, and where to look at them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from expt.config.datasets import noun_of
from expt.config.tasks import metrics_of
from expt.runs.paths import RunPaths
from expt.runs.record_parts import EvaluationOf
from expt.runs.result import Record, read_result
from expt.runs.view.cells import cells, say
from expt.runs.view.progress import shown_path
from expt.runs.view.summary import logdir


def print_evaluations(console: Console, evaluated: Sequence[RunPaths]) -> None:
    """A row for each; one alone has a few lines more."""
    records = [(paths, read_result(paths)) for paths in evaluated]
    metrics = dict.fromkeys(
        name for _, record in records for name in metrics_of(record["config"]["task"])
    )
    several = len(records) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (*(["run"] if several else []), "", *metrics, "samples", "of epoch"):
        table.add_column(
            column,
            justify="left" if column in ("run", "") else "right",
            no_wrap=column not in ("run", ""),
        )
    for paths, record in records:
        about = record["evaluation_of"]
        numbers = (_number(record, f"{metric}/{about['split']}") for metric in metrics)
        what = about["split"] if about["own_data"] else f"{_dataset(record)} {about['split']}"
        name = [paths.folder.parents[1].name] if several else []
        table.add_row(
            *cells(
                *name,
                what,
                *numbers,
                f"{about['samples']:,}",
                f"{about['epoch']}, the {about['checkpoint']}",
            )
        )
    console.print(table)
    for paths, record in records[: 1 if not several else 0]:
        for line in _facts(record):
            say(console, line)
        say(console, f"numbers      {shown_path(paths.result)}")
    run = records[0][0].folder.parents[1]
    around = run.parent if several else logdir(run)
    say(console, f"look at it   tensorboard --logdir {shlex.quote(shown_path(around))}")


def _facts(record: Record) -> list[str]:
    workers, about, seconds = record["world_size"], record["evaluation_of"], record["eval_s"]
    where = (
        f"{workers} worker{'s' if workers > 1 else ''} on"
        f" {', '.join(record.get('devices') or ['the CPU'])}"
    )
    found = [
        f"measured     {seconds:.1f} s by {where}, {about['samples'] / max(seconds, 1e-9):,.0f}"
        f" {noun_of(record)}s/s"
    ]
    if record["config"]["dataset"].get("standardise_targets"):
        found.append(
            "unit         targets are standardised, as in training: an error of 1 is one deviation"
            " of theirs"
        )
    if then := _then(record, about):
        shown = ", ".join(f"{tag.partition('/')[0]} {value:.4f}" for tag, value in then.items())
        found.append(f"then         the run itself recorded {shown}")
    return found


def _then(record: Record, about: EvaluationOf) -> dict[str, float]:
    """What the run recorded of the same weights on the same samples."""
    then = read_result(RunPaths(Path(about["run"])))
    config, metrics, split = then.get("config") or {}, then.get("metrics") or {}, about["split"]
    of_last = split == config.get("eval_split")
    if not about["own_data"] or then.get("status") != "completed":
        return {}
    if about["checkpoint"] != ("last" if of_last else "best") or split not in ("val", "test"):
        return {}
    return {tag: metrics[tag] for tag in record["metrics"] if isinstance(metrics.get(tag), float)}


def _dataset(record: Record) -> str:
    known = record["evaluation_of"].get("dataset")  # an older version has not written it
    return str(record["config"]["dataset"]["name"] if known is None else known)


def _number(record: Record, tag: str) -> str:
    value = record["metrics"].get(tag)
    return "" if value is None else "nan" if math.isnan(value) else f"{value:.4f}"
