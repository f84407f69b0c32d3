"""result.json: the record of a run, its reading and writing, and the cost of runs."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import NotRequired, TypedDict

from expt.config.identity import VERSION, Content
from expt.config.own_code import Imported
from expt.config.secrets import hidden
from expt.errors import warn
from expt.gpus import energy_j
from expt.runs import tags
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths, dumps, is_held, set_aside, write_atomically
from expt.runs.provenance import Provenance

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from typing_extensions import Unpack

RUNNING, COMPLETED, FAILED = "running", "completed", "failed"
INTERRUPTED, PRUNED = "interrupted", "pruned"
STATUSES = (RUNNING, COMPLETED, FAILED, INTERRUPTED, PRUNED)
DAMAGED, LOST = "damaged", "lost"
"""The status of a run whose result.json can't be read, and of one that was killed."""


class Host(TypedDict):
    """A machine of a run, and its ranks."""

    name: str
    ranks: list[int]


class Best(TypedDict):
    """The best evaluation by the run's objective."""

    metric: str
    value: float
    epoch: int
    step: NotRequired[int]
    """The step; missing in older records."""


class Objective(TypedDict):
    """The value by which runs are ranked; None if it was never measured."""

    name: str
    value: float | None


class StoppedEarly(TypedDict):
    """The epoch after which, or within which, a run has ended before its last, and why."""

    epoch: int
    step: NotRequired[int]
    reason: str


class Resumed(TypedDict):
    """The checkpoint from which the last attempt resumed."""

    checkpoint: str
    step: int


class ByClass(TypedDict):
    """The evaluation of one class; None is a share of no sample."""

    samples: int
    precision: float | None
    recall: float | None
    f1: float | None
    predicted: dict[str, int]
    """The number of its samples that were predicted as each class, without zeros."""


class EvaluationOf(TypedDict):
    """The subject of an evaluation; `metrics`, `config` and all else are the evaluation's own."""

    run: str
    checkpoint: str
    epoch: int
    step: int
    split: str
    own_data: bool
    """True if the samples are the run's own."""
    dataset: NotRequired[str]
    """The name of other samples."""
    samples: int
    mean_of: NotRequired[list[str]]
    """The folders of several runs, if it is of their mean; `run` is the first."""
    flips: NotRequired[bool]
    class_names: NotRequired[list[str]]
    by_class: NotRequired[dict[str, ByClass]]


class Begun(TypedDict):
    """The file of a run's first weights, and facts of the run that wrote it."""

    file: str
    identity: str | None
    run: NotRequired[str]
    """Its folder."""
    which: NotRequired[str | None]
    """The name of its checkpoint."""
    epoch: NotRequired[int]
    """The number of epochs after which it was saved."""
    checksum: NotRequired[str | None]
    """The checksum in `content`."""
    average: NotRequired[bool]
    """True if they are a moving average."""
    left_out: NotRequired[list[str]]
    """Tensors of the model that were not in the file, or of another shape."""


class Forked(TypedDict):
    """The checkpoint of another run that this one is a fork of, and the changed settings."""

    given: str
    """The value of `fork`."""
    run: str
    """The folder of that run."""
    identity: str
    seedless_identity: str
    step: int
    epoch: int
    """Whole epochs that it had done."""
    arguments: list[str]
    """The words of that run's command; those of the fork come after them."""
    changed: dict[str, list[Any]]
    """The value then and now of each setting that has changed."""


class OfSearch(TypedDict):
    """The place of a run in the search that has found it, from 0."""

    number: int


class Record(Provenance, total=False):
    """The keys of result.json.

    Each may be missing: in a run under way, a refused one, or one of another version.
    """

    version: int
    """The version of its identity: a run of another version is shown, not continued."""
    status: str
    error: str
    error_kind: str
    """The name of its class in expt.errors, or Python's."""
    search: OfSearch
    name: str
    overrides: dict[str, Any]
    """The typed keys and values; `arguments` has the words."""
    arguments: list[str]
    rerun_of: str
    identity: str
    seedless_identity: str
    """Equal for runs that differ by their seed only."""
    content: Content
    imported: dict[str, Imported]
    """The source that ran of each custom module that rank 0 imported."""
    config: dict[str, Any]
    seed: int
    started: float
    """The time at which somebody began to wait for the first step [seconds since 1970]."""
    attempts: int
    until_epoch: int
    """The epoch after which this attempt pauses; missing where it goes to the run's end."""
    micro_batch_size: int
    """Samples at a time for which a worker had memory, of gradient_accumulation=auto."""
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
    base: dict[str, Any]
    """The published model that it began from; see expt.models.published_files.described."""
    compared: str
    """The subject of the comparison in expt.worker.comparison."""
    steps_per_epoch: int
    total_steps: int
    steps: int
    metrics: dict[str, float]
    """The last value of every tag."""
    best: Best | None
    objective: Objective
    stopped_early: StoppedEarly | None
    ended_by: str
    """The key whose value has ended it: with another it is trained further."""
    device_s: float
    """Seconds of its devices, of all attempts; `device_s_before` is of those before this one."""
    device_s_before: float
    energy_j: float
    """The energy of its GPUs; `energy_j_before` is of earlier attempts, less the meters then."""
    energy_j_before: float
    epoch_s: list[float]
    eval_s: float
    dashboard_s: float
    samples_per_s: float | None
    first_step_s: float | None


@functools.cache
def as_written() -> TypeAdapter[Record]:
    """Return the validator of a record; it takes 10 ms to make."""
    from pydantic import TypeAdapter  # late: not for `expt --help`

    return TypeAdapter(Record)


def _parse(text: str) -> Record | None:
    """Return the record in `text`; None where it is not a record. Raises ValueError if damaged."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("status") not in STATUSES:
            return None
        content = _with_nan(cast(Record, content))
        as_written().validate_python(content, strict=True)
    except (AttributeError, RecursionError, TypeError) as error:
        raise ValueError from error
    return content


def read_result(paths: RunPaths) -> Record:
    """Return the content of result.json as it stands there, empty if there is none yet.

    A file that no run can have written is `damaged`; who writes there sets it aside first.
    """
    try:
        return _parse(paths.result.read_text(encoding="utf-8")) or {"status": DAMAGED}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (IsADirectoryError, ValueError):
        return {"status": DAMAGED}


def result_of_any(paths: RunPaths) -> Record:
    """Return the content of result.json with the present state of a run that has not ended.

    That is its numbers until now, and whether it is lost. Empty for a file that is not expt's.
    """
    try:
        content = _parse(paths.result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"status": DAMAGED} if paths.result.is_file() else {}
    if content is None:
        return {}
    if content["status"] == RUNNING:
        if is_lost(paths, content):
            content["status"] = LOST
        content.update(so_far(paths, content))
    return content


def evaluated_tag(record: Record) -> str:
    """Return the tag that each evaluation of the run has, but for the test at its end."""
    return tags.metric("loss", (record.get("config") or {}).get("eval_split", "val") or "train")


def whole_epochs(record: Record) -> int:
    """Return how many epochs are done, those of the run that it is a fork of included."""
    before = record["forked_from"]["epoch"] if "forked_from" in record else 0
    return before + len(record.get("epoch_s") or ())


def begun_at_step(record: Record) -> int:
    """Return the step of the other run that a fork begins from; 0 for another run."""
    return record["forked_from"]["step"] if "forked_from" in record else 0


def objective_value(record: Record) -> float:
    """Return the value that the run is chosen by; nan where it was not measured."""
    value = record.get("objective", {}).get("value")
    return math.nan if value is None else value


def _with_nan(content: Record) -> Record:
    """Return the record with nan where JSON has null for it."""
    metrics = content.get("metrics")
    if not metrics or None not in metrics.values():
        return content
    numbers = {tag: math.nan if value is None else value for tag, value in metrics.items()}
    found: Record = {**content, "metrics": numbers}
    objective = content.get("objective")
    if objective and objective.get("value", 0.0) is None:
        found["objective"] = {**objective, "value": numbers.get(objective["name"])}
    return found


def is_lost(paths: RunPaths, content: Record) -> bool:
    """Return whether nobody is at work in a run of this machine that says running."""
    if content.get("status") != RUNNING or content.get("node") != socket.gethostname():
        return False
    # It may have ended between the two looks.
    return not is_held(paths) and read_result(paths).get("status") == RUNNING


def so_far(paths: RunPaths, record: Record) -> Record:
    """Return the numbers of a run that has not completed; empty if nothing is measured."""
    config: Mapping[str, Any] = record.get("config") or {}
    points, name = MetricsReader(paths).read(), str(config.get("objective"))
    if not points or "objective" not in config:
        return {}
    last = {point.tag: point.value for point in points}
    own = [point for point in points if point.step > begun_at_step(record)]
    bests = [point for point in own if point.tag == tags.BEST + name]
    # It is logged after each evaluation.
    first = next((point for point in bests if point.value == bests[-1].value), None)
    best: Best | None = None
    if first:
        best = {"metric": name, "value": first.value, "epoch": first.epoch, "step": first.step}
    return {
        "metrics": last,
        "best": best,
        "objective": {"name": name, "value": first.value if first else last.get(name)},
        "epoch_s": [point.value for point in own if point.tag == tags.EPOCH_S],
    }


def create_result(paths: RunPaths, *, may_exist: bool = False, **fields: Unpack[Record]) -> None:
    """Make the folder this run's, by creating result.json.

    Raises FileExistsError where another run has done so; this very run may have, if it `may_exist`.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    if may_exist:
        _to_be_changed(paths)
    content = {"version": VERSION, "status": RUNNING, **_hidden(fields)}
    write_atomically(paths.result, dumps(content, indent=2) + "\n", may_exist=may_exist)


def update_result(paths: RunPaths, **fields: Unpack[Record]) -> None:
    """Replace the given top-level fields of result.json, and keep the others."""
    with _updating:
        content = {**(_to_be_changed(paths) or {"version": VERSION}), **_hidden(fields)}
        write_atomically(paths.result, dumps(content, indent=2) + "\n")


def _hidden(fields: Record) -> Record:
    """Return fields without the values of variables; those of `data` are columns and classes."""
    return cast(Record, {key: x if key == "data" else hidden(x) for key, x in fields.items()})


_updating = threading.Lock()  # with debug=true the worker's thread and the driver are one process
os.register_at_fork(after_in_child=_updating._at_fork_reinit)  # type: ignore[attr-defined]


def _to_be_changed(paths: RunPaths) -> Record:
    """Return the content of result.json; set a file that is damaged aside, with a warning."""
    content = read_result(paths)
    if content.get("status") != DAMAGED:
        return content
    warn(f"{paths.result}: is damaged, or no run's; set aside as {set_aside(paths.result)}")
    return {}


def cost_until_now(record: Record) -> Record:
    """Return the cost of a run that works, up to now.

    Its energy is known only on the machine where it ran.
    """
    if "started" not in record:
        return {}
    lasted_s = max(0.0, time.time() - record["started"])
    before = record.get("device_s_before", 0.0)
    spent: Record = {"device_s": before + _num_devices(record) * lasted_s}
    if "energy_j_before" in record and record.get("node") == socket.gethostname():
        metered = energy_j(record.get("devices") or ())
        if metered is not None:
            spent["energy_j"] = record["energy_j_before"] + metered
    return spent


def _num_devices(record: Record) -> int:
    """Return the number of GPUs, or of the cores that workers on a CPU are given."""
    if record.get("devices"):
        return len(record["devices"])
    threads: int = (record.get("config") or {}).get("threads", 1)
    return record.get("world_size", 1) * threads


def device_s(record: Record) -> float:
    """Return the seconds that devices were busy; of a run that was killed those of training."""
    trained_s = sum(record.get("epoch_s") or ()) + record.get("eval_s", 0.0)
    busy_s = record.get("device_s_before", 0.0) + _num_devices(record) * trained_s
    return record.get("device_s", busy_s)
