"""Summaries: final numbers, evaluations, ancestors, stale code, and next commands."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from expt import errors
from expt.config import own_code
from expt.config.kinds import metrics_of
from expt.errors import counted, decimals, printable
from expt.features import noun_of
from expt.runs import provenance
from expt.runs.failure import mistake_in
from expt.runs.found import FoundRun
from expt.runs.named_checkpoint import WHICH
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import (
    COMPLETED,
    PRUNED,
    Begun,
    ByClass,
    Forked,
    Record,
    read_result,
    result_of_any,
    whole_epochs,
)
from expt.runs.tags import SPLITS
from expt.runs.view.text import (
    STALE,
    Console,
    cells,
    field,
    gpus_named,
    plain_table,
    resume_command,
    say,
    setting,
    shown_path,
)

_SHOWN = 3
"""The largest number of commands that are printed."""
_MOST_CLASSES = 20
"""The largest number of classes of an evaluation that are shown one by one."""


def print_summary(console: Console, paths: RunPaths) -> None:
    """Print the final numbers, each with its epoch, and the next commands."""
    result = read_result(paths)
    longer = resume_command(paths, result.get("ended_by", "epochs"))
    is_pruned = result.get("status") == PRUNED
    resumed_at = result.get("resumed_from", {}).get("step")
    if not is_pruned and resumed_at and resumed_at == result.get("steps"):
        at_end = f"nothing was left to train: the run was at its end, step {resumed_at}, already"
        say(console, f"{at_end}; to continue: {longer}")
    console.print(_final_numbers(result))
    _say_undefined(console, result.get("metrics") or {})
    if forked := result.get("forked_from"):
        say(console, field("forked from", f"{shown_path(Path(forked['run']))}, {_since(forked)}"))
    speed = f"{result.get('samples_per_s') or 0:,.0f} {noun_of(result)}s/s"
    trained_s = sum(result.get("epoch_s") or [0])
    say(console, field("trained", f"{trained_s:.1f} s by {_where(result)}, {speed}"))
    if best := result.get("best"):
        told = f"{best['metric']} {decimals(best['value'])} {_when(result, best)}"
        unjudged = "the last checkpoint, as nothing was evaluated"
        say(console, field("best", told if _eval_split(result) else unjudged))
    if stopped := result.get("stopped_early"):
        why = f"{_when(result, stopped)}: {stopped['reason']}"
        say(console, field("stopped", f"{why}; to continue: {longer}"))
    folder = shown_path(paths.folder)
    if is_pruned:
        command = resume_command(paths)
        say(console, field("pruned", f"after {epochs_done(result)}; to continue: {command}"))
    say(console, field("run folder", folder))
    if paths.operators.exists():
        say(console, f"\n{paths.operators.read_text(encoding='utf-8')}")
        trace = shown_path(paths.trace)
        say(console, field("trace", f"{trace}, to open at https://ui.perfetto.dev"))
    say(console, field("look at it", f"tensorboard --logdir {_quoted(logdir(paths.folder))}"))
    if folder.startswith("outputs/"):  # where the report looks by itself
        say(console, field("compare", f"{provenance.program()} report"))


def _final_numbers(result: Record) -> Table:
    """Return a table of the last numbers of each split."""
    values: Mapping[str, float | None] = result.get("metrics") or {}
    metrics = metrics_of((result.get("config") or {}).get("task"))
    table = plain_table(("", *metrics, "of epoch"), left=[""])
    for split in SPLITS:
        if f"loss/{split}" in values:
            numbers = (_number(values.get(f"{metric}/{split}", "")) for metric in metrics)
            table.add_row(*cells(split, *numbers, _epoch_of(split, result)))
    if majority := (result.get("data") or {}).get("majority"):  # a model has to be above it
        name, share = majority
        shares = (_number(share) if metric == "accuracy" else "" for metric in metrics)
        table.add_row(*cells("majority", *shares, f"the share of {name} in train"))
    return table


def _number(value: float | Literal[""] | None) -> str:
    """Return nothing for a value that was not measured; a nan is null in the record."""
    if value is None:
        return "nan"
    return decimals(value) if value != "" else ""


def _say_undefined(console: Console, *several: Mapping[str, float | None]) -> None:
    """Print which metrics are nan though the loss of the same samples is a number."""
    found = dict[str, None]()
    for values in several:
        are_nan = [tag for tag, value in values.items() if value is None or math.isnan(value)]
        losses = {tag for tag in values if tag not in are_nan}
        found |= dict.fromkeys(x for x in are_nan if f"loss/{x.rpartition('/')[2]}" in losses)
    if found:
        why = "these samples do not define them, e.g. as all have one value of a target"
        say(console, field("nan", f"{', '.join(found)}: {why}"))


def _quoted(path: Path) -> str:
    return shlex.quote(shown_path(path))


def logdir(folder: Path) -> Path:
    """Return the folder around the run's, where nothing but runs is.

    TensorBoard calls a run that is its own logdir `.`, and finds no metrics of it for HPARAMS.
    """
    around = folder.parent
    only_runs = all(RunPaths(path).result.exists() for path in around.iterdir() if path.is_dir())
    return around if only_runs else folder


def _epoch_of(split: str, result: Record) -> str:
    """Return the epoch of the last numbers; those of a test at the end are of the best one."""
    last, best = whole_epochs(result), result.get("best")
    each_epoch = split != "test" or _eval_split(result) in ("test", None)
    if each_epoch or not best:
        return f"{last}, the last"
    return f"{_moment(result, best).removeprefix('epoch ')}, the best"


def _eval_split(result: Record) -> str | None:
    split: str | None = (result.get("config") or {}).get("eval_split", "val")
    return split


def epochs_done(result: Record) -> str:
    """Return how much of a run has been trained, such as `3 of 9 epochs`."""
    return f"{whole_epochs(result)} of {(result.get('config') or {}).get('epochs', '?')} epochs"


def _where(result: Record) -> str:
    workers = counted(result.get("world_size", 1), "worker")
    return f"{workers} on {gpus_named(result.get('devices'))}"


def _moment(record: Record, at: Mapping[str, Any]) -> str:
    """Return when something was: an epoch, or a step where those are evaluated within epochs."""
    config, step = record.get("config") or {}, at.get("step")
    within = any(config.get(f"eval_every_{unit}") for unit in ("steps", "minutes"))
    return f"step {step}" if within and step else f"epoch {at['epoch']}"


def _when(result: Record, at: Mapping[str, Any]) -> str:
    moment = _moment(result, at)
    return f"{'at' if moment.startswith('step') else 'in'} {moment}"


def print_evaluations(console: Console, evaluated: Sequence[RunPaths]) -> None:
    """Print a row for each evaluation; of a single one a few lines more."""
    records = [read_result(paths) for paths in evaluated]
    metrics = dict.fromkeys(
        name for record in records for name in metrics_of(record["config"]["task"])
    )
    columns = ["", *metrics, "samples", "of epoch"]
    rows = [_row_of_evaluation(record, metrics) for record in records]
    if len(records) > 1:
        columns.insert(0, "run")
        for row, paths, record in zip(rows, evaluated, records, strict=True):
            several = record["evaluation_of"].get("mean_of")
            name = f"mean of {len(several)}" if several else paths.folder.parents[1].name
            row.insert(0, name)
    console.print(plain_table(columns, rows, left=("run", "")))
    _say_undefined(console, *(record["metrics"] for record in records))
    run = evaluated[0].folder.parents[1]
    if len(records) == 1:
        _print_classes(console, records[0]["evaluation_of"].get("by_class", {}))
        for line in _facts_of_evaluation(records[0]):
            say(console, line)
    if len(records) == 1 or "mean_of" in records[-1]["evaluation_of"]:
        say(console, field("numbers", shown_path(evaluated[-1].result)))
    around = run.parent if len(records) > 1 else logdir(run)
    say(console, field("look at it", f"tensorboard --logdir {_quoted(around)}"))


def _row_of_evaluation(record: Record, metrics: Iterable[str]) -> list[str]:
    about, values = record["evaluation_of"], record["metrics"]
    dataset = "" if about["own_data"] else f"{about['dataset']} "
    numbers = (_number(values.get(f"{metric}/{about['split']}", "")) for metric in metrics)
    epoch = _moment(read_result(RunPaths(Path(about["run"]))), about).removeprefix("epoch ")
    if about["checkpoint"] in WHICH:
        epoch += f", the {about['checkpoint']}"
    split = f"{dataset}{about['split']}{', flips' if about.get('flips') else ''}"
    return [split, *numbers, f"{about['samples']:,}", "" if "mean_of" in about else epoch]


def _print_classes(console: Console, classes: Mapping[str, ByClass]) -> None:
    """Print the shares of each class, unless there are too many."""
    if not 0 < len(classes) <= _MOST_CLASSES:
        return
    table = plain_table(("class", "samples", "precision", "recall", "F1"), left=["class"])
    for name, found in classes.items():
        shares = (found["precision"], found["recall"], found["f1"])
        shown = ("" if share is None else f"{share:.4f}" for share in shares)
        table.add_row(*cells(name, found["samples"], *shown))
    console.print(table)


def _facts_of_evaluation(record: Record) -> Iterator[str]:
    about, seconds = record["evaluation_of"], record["eval_s"]
    speed = f"{about['samples'] / max(seconds, 1e-9):,.0f} {noun_of(record)}s/s"
    yield field("measured", f"{seconds:.1f} s by {_where(record)}, {speed}")
    if record["config"]["dataset"].get("standardise_targets"):
        yield field("unit", "the loss is of standardised targets, metrics are in their own unit")
    then = read_result(RunPaths(Path(about["run"])))
    config, metrics, split = then.get("config") or {}, then.get("metrics") or {}, about["split"]
    # The numbers of the run for the same weights on the same samples.
    which = "last" if split == config.get("eval_split") else "best"
    same = (
        about["own_data"]
        and not about.get("flips")
        and split in ("val", "test")
        and about["checkpoint"] == which
    )
    if same and then.get("status") == COMPLETED:
        found = [tag for tag in record["metrics"] if isinstance(metrics.get(tag), float)]
        if shown := ", ".join(f"{tag.partition('/')[0]} {decimals(metrics[tag])}" for tag in found):
            yield field("then", f"the run itself recorded {shown}")


def print_ancestry(console: Console, runs: Sequence[FoundRun]) -> None:
    """Print which weights runs began with, and the tree of forks."""
    begun: dict[str, list[Path]] = {}
    for run in runs:
        if "weights_from" in run.record:
            begun.setdefault(_origin(run.record["weights_from"]), []).append(run.folder)
    for origin, folders in begun.items():
        whose = shown_path(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
        say(console, field("weights", f"{whose}: from {origin}"))
    print_forks(console, runs)


def _origin(begun: Begun) -> str:
    """Return the run or file of first weights, and which of its checkpoints."""
    epoch = f"epoch {begun['epoch']}" if begun.get("epoch") is not None else None
    average = "moving average" if begun.get("average") else None
    details = ", ".join(filter(None, (begun.get("which"), epoch, average)))
    file = shown_path(Path(begun.get("run") or begun["file"]))
    return f"{file} ({details})" if details else file


def print_forks(console: Console, runs: Sequence[FoundRun]) -> None:
    """Print a tree for each run that has forks among `runs` and is none itself."""
    records = {run.folder.resolve(): run.record for run in runs}
    known = {record["identity"]: at for at, record in records.items() if "identity" in record}
    below: dict[Path, list[Path]] = {}
    unread = list(records)
    while unread:
        folder = unread.pop()
        if forked := records[folder].get("forked_from"):
            parent = Path(forked["run"])
            if parent not in records:  # it has been moved, lies elsewhere, or is gone
                parent = known.get(forked["identity"], parent)
            if parent not in records:
                records[parent] = result_of_any(RunPaths(parent))
                unread.append(parent)
            below.setdefault(parent, []).append(folder)
    for root in sorted(folder for folder in below if "forked_from" not in records[folder]):
        console.print(_tree_of_forks(root, below, records), soft_wrap=True)


def _since(forked: Forked) -> str:
    changes = forked["changed"].items()
    changed = ", ".join(f"{key} {setting(then)} -> {setting(now)}" for key, (then, now) in changes)
    return f"at step {forked['step']}" + (f": {changed}" if changed else "")


def _tree_of_forks(
    folder: Path, below: Mapping[Path, Sequence[Path]], records: Mapping[Path, Record]
) -> Tree:
    """Return the run of `folder` with its forks, by the step at which they part from it."""
    record = records[folder]
    label = shown_path(folder) + ("" if record else " (no longer there)")
    if (forked := record.get("forked_from")) is None:
        label = field("forks", label)
    else:
        label += f"  {_since(forked)}"
    objective = record.get("objective")
    if objective and objective["value"] is not None:
        label += f"  {objective['name']} {decimals(objective['value'])}"
    tree = Tree(Text(printable(label)))
    forks = below.get(folder, ())
    for fork in sorted(forks, key=lambda each: (records[each]["forked_from"]["step"], each)):
        tree.children.append(_tree_of_forks(fork, below, records))
    return tree


def stale(runs: Iterable[FoundRun]) -> list[Path]:
    """Return the folders of runs whose custom classes have other source now.

    One whose classes are not found from here is not known to be stale.
    """
    today = functools.cache(own_code.fingerprint)
    return [run.folder for run in runs if own_code.has_other_source(run.record, today)]


def print_stale(console: Console, folders: Sequence[Path]) -> None:
    """Print which runs are stale, with the commands that repeat the first of them."""
    if folders:
        about = f"{len(folders)} {STALE}: their custom classes have other source now; to run again"
        say(console, f"\n{about}", "bold yellow")
    for folder in folders[:_SHOWN]:
        say(console, f"      {provenance.program()} rerun {_quoted(folder)}")
    if (left := len(folders) - _SHOWN) > 0:
        say(console, f"      and so on for {left} more that are marked")


def how_to_continue(request: RunRequest, error: errors.ExptError) -> str:
    """Return how to continue after the `error` of a run that has a checkpoint.

    Empty where that would fail again.
    """
    run, command = shlex.quote(shown_path(request.paths.folder)), resume_command(request.paths)
    has_code = bool(request.identity.content.get("code"))  # an edit makes another run
    in_new = f"then type its settings with resume={run} to continue in a new folder"
    if isinstance(error, errors.Diverged):
        return ""
    if isinstance(error, errors.RunFailed):
        if has_code and mistake_in(str(error)):
            return f"\nmend it, {in_new}"
        return f"\nto continue from its last checkpoint: {command}"
    # Not a refusal, after which the record is as before.
    is_recorded = read_result(request.paths).get("error") == str(error)
    if not (is_recorded and isinstance(error, errors.ConfigError)):
        return ""
    if has_code:
        return f"; {in_new}"
    if isinstance(error, errors.DataError) and request.identity.content.get("data"):
        again = f"continue by {command}, else begin with weights={run}@last"
        return f"; with the data as before {again}"
    return f"; then continue by {command}"
