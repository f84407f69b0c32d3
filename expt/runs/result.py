"""result.json: what a run says of itself, from its first moment to its end.

Read and written here alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.config.secrets import hidden
from expt.errors import warn
from expt.runs import plain_json, tags
from expt.runs.atomic import write_atomically
from expt.runs.folder_lock import is_held
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.provenance import Provenance
from expt.runs.record_parts import (
    Begun,
    Best,
    EvaluationOf,
    Forked,
    Host,
    Made,
    Objective,
    OfSearch,
    Resumed,
    StoppedEarly,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from typing_extensions import Unpack

RUNNING, COMPLETED, FAILED, INTERRUPTED, PAUSED = (
    "running",
    "completed",
    "failed",
    "interrupted",
    "paused",
)
STATUSES = (RUNNING, COMPLETED, FAILED, INTERRUPTED, PAUSED)
DAMAGED, LOST = "damaged", "lost"
"""Said of a run whose result.json cannot be read, and of one that was killed and so could not say
that it no longer
runs; no run says it of itself."""


class Record(Provenance, total=False):
    """The keys of result.json.

    Each may be missing: in a run under way, a refused one, or one of an older version.
    """

    status: str
    error: str
    error_kind: str
    """The name of its class in expt.errors, or Python's."""
    search: OfSearch
    """Missing in a run that no search has found."""
    name: str
    overrides: dict[str, Any]
    """What was typed, as keys and values; `arguments` has the words."""
    arguments: list[str]
    rerun_of: str
    identity: str
    seedless_identity: str
    """Equal for runs that differ by their seed alone."""
    content: Made
    """Missing in a run of a version that looked at settings alone; its identity is that of the
    settings.
    """
    config: dict[str, Any]
    seed: int
    started: float
    """From when on a person waited for the first step [seconds since the epoch]."""
    attempts: int
    until_epoch: int
    """The epoch after which this attempt pauses; missing where it goes to the run's end."""
    resumed_from: Resumed
    weights_from: Begun
    forked_from: Forked
    evaluation_of: EvaluationOf
    """Missing in the record of a run."""
    resumable: bool
    world_size: int
    local_world_size: int
    node: str
    hosts: list[Host]
    backend: str | None
    devices: list[str]
    master_port: int | None
    data: dict[str, Any]
    steps_per_epoch: int
    total_steps: int
    steps: int
    metrics: dict[str, float]
    """The last value of every tag."""
    best: Best | None
    objective: Objective
    stopped_early: StoppedEarly | None
    device_s: float
    """Seconds of its devices, of all attempts; `device_s_before` is of those before this one."""
    device_s_before: float
    energy_j: float
    """Of its GPUs, by NVML; `energy_j_before` is that of earlier attempts, less what the meters
    showed then.
    """
    energy_j_before: float
    epoch_s: list[float]
    eval_s: float
    dashboard_s: float
    samples_per_s: float | None
    first_step_s: float | None


class FoundRecord(Record, total=False):
    """The record of a run that was found, and where."""

    folder: Path


def read_result(paths: RunPaths) -> Record:
    """The content of result.json, empty if there is none yet; only that it is damaged where no run
    can have written it.

    Whoever writes there then sets it aside first, see `_to_be_changed`.
    """
    try:
        content: Record = with_nan(json.loads(paths.result.read_text(encoding="utf-8")))
        as_written().validate_python(content, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (
        IsADirectoryError,
        ValueError,
        AttributeError,
        RecursionError,
    ):  # no JSON, no object, other types
        return {"status": DAMAGED}
    return (
        content if content.get("status") in STATUSES else {"status": DAMAGED}
    )  # another program's


def whole_epochs(record: Record) -> int:
    """How many are done, those of the run that it is a fork of included."""
    return (record["forked_from"]["epoch"] if "forked_from" in record else 0) + len(
        record.get("epoch_s") or ()
    )


def objective_of(record: Record) -> float:
    """What the run is chosen by; nan where it was not measured, or the record has lost it."""
    value = record.get("objective", {}).get("value")
    return math.nan if value is None else value


def _to_be_changed(paths: RunPaths) -> Record:
    """The content of result.json; where it is damaged, or another program's, it gets another name,
    with a warning.
    """
    content = read_result(paths)
    if content.get("status") != DAMAGED:
        return content
    names = (
        paths.result.with_name(f"{paths.result.name}.damaged{number or ''}")
        for number in itertools.count()
    )
    aside = next(name for name in names if not name.exists())
    paths.result.rename(aside)
    warn(f"{paths.result}: is damaged, or no run's, and set aside as {aside.name}")
    return {}


def with_nan(content: Record) -> Record:
    """The record with nan where JSON has null for it."""
    metrics = content.get("metrics")
    if not isinstance(metrics, dict) or None not in metrics.values():
        return content
    numbers = {tag: math.nan if value is None else value for tag, value in metrics.items()}
    found: Record = {**content, "metrics": numbers}
    objective = content.get("objective")
    if isinstance(objective, dict) and objective.get("value") is None:
        found["objective"] = {**objective, "value": numbers.get(objective.get("name", ""))}
    return found


def results(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """The runs of a sweep's folder by name, and what result.json says of each."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        paths = RunPaths(path)
        if found := result_of_any(paths):
            yield paths, found


def results_below(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """The runs anywhere below `folder`, itself included, and what result.json says of each."""
    paths = RunPaths(folder)
    if found := result_of_any(paths):
        yield paths, found
        return  # what is inside a run is no other
    with contextlib.suppress(PermissionError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield from results_below(path)


def result_of_any(paths: RunPaths) -> Record:
    """The content of result.json, or that it is damaged, or its run lost; empty where there is none
    of expt's.
    """
    try:
        content = read_result(paths)
        if is_lost(paths, content):
            content["status"] = LOST
        if content.get("status") in (RUNNING, LOST):
            content = {**content, **so_far(paths, content)}
        written = (
            json.loads(paths.result.read_bytes()) if content.get("status") == DAMAGED else content
        )
    except (OSError, ValueError, RecursionError):
        return {"status": DAMAGED} if paths.result.is_file() else {}
    known = isinstance(written, dict) and written.get("status") in {*STATUSES, LOST}
    return content if known else {}


@functools.cache
def as_written() -> TypeAdapter[Record]:
    """What checks a record; takes 10 ms to make."""
    from pydantic import TypeAdapter  # late: not for `expt --help`

    return TypeAdapter(Record)


def is_lost(paths: RunPaths, content: Record) -> bool:
    """Whether nobody is at work in a run that says running; of another machine's nobody can say."""
    if (
        content.get("status") != RUNNING
        or content.get("node") != socket.gethostname()
        or is_held(paths)
    ):
        return False
    return read_result(paths).get("status") == RUNNING  # else it has ended between the two looks


def so_far(paths: RunPaths, record: Record) -> Record:
    """What a run has come to that has not completed, by its metrics.jsonl; empty where it has
    measured nothing.
    """
    config: Mapping[str, Any] = record.get("config") or {}
    points, name = MetricsReader(paths).read(), str(config.get("objective"))
    if not points or "objective" not in config:
        return {}
    last = {point.tag: point.value for point in points}
    since = record["forked_from"]["step"] if "forked_from" in record else 0
    bests = [point for point in points if point.tag == tags.best(name) and point.step > since]
    first = next(
        (point for point in bests if point.value == bests[-1].value), None
    )  # it is logged after each epoch
    return {
        "metrics": last,
        "best": {"metric": name, "value": first.value, "epoch": first.epoch} if first else None,
        "objective": {"name": name, "value": first.value if first else last.get(name)},
        "epoch_s": [
            point.value for point in points if point.tag == tags.EPOCH_S and point.step > since
        ],
    }


def create_result(paths: RunPaths, *, may_exist: bool = False, **fields: Unpack[Record]) -> None:
    """Make the folder this run's, by creating result.json.

    Raises FileExistsError where another run has done so; this very run may have, if it `may_exist`.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    if may_exist:
        _to_be_changed(paths)
    text = plain_json.dumps(hidden({"status": RUNNING, **fields}), indent=2) + "\n"
    write_atomically(paths.result, text, may_exist=may_exist)


def update_result(paths: RunPaths, **fields: Unpack[Record]) -> None:
    """Replace the given top-level fields of result.json, and keep the others."""
    content = {**_to_be_changed(paths), **hidden(fields)}
    write_atomically(paths.result, plain_json.dumps(content, indent=2) + "\n")
