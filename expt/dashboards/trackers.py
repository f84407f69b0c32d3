"""Copies of runs in MLflow, W&B and trackio, and a run as a dashboard records it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import getpass
import itertools
import json
import math
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from expt.config.identity import hyperparameters
from expt.config.schema import MLflow, Trackio, Wandb, without_password
from expt.errors import warn
from expt.runs.metrics_file import Point
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import (
    COMPLETED,
    DAMAGED,
    FAILED,
    LOST,
    PRUNED,
    RUNNING,
    Record,
    is_lost,
    read_result,
)

EPOCH = "epoch"
"""The tag of the points that have a step's epoch."""
_TAGGED = "identity seedless_identity command attempts rerun_of error until_epoch".split()
"""Fields of a record that are tags."""
KEY = "expt.key"
"""The tag in MLflow by which a copy is found."""
MAX_TEXT, MAX_METRICS = 5000, 1000
"""Characters of a parameter, and points of one request, as MLflow documents."""
_STATUS = {COMPLETED: "FINISHED", FAILED: "FAILED", PRUNED: "SCHEDULED"}
"""MLflow's words; any other status is KILLED."""
INIT_S, FINISH_S = 10, 30
"""Seconds that W&B gets to begin and to end."""
KILLED = 255
"""W&B's exit code of a run that was interrupted."""
_EXIT_CODES = {COMPLETED: 0, PRUNED: 0, FAILED: 1}
_Named: TypeAlias = Sequence[tuple[str, Any]]
"""Entries of one request, each with the name by which a warning calls it."""
_refused = set[str]()
"""Names of entries whose refusal was reported."""


class Snapshot(NamedTuple):
    """A run without its points."""

    paths: RunPaths
    record: Record
    status: str
    """The status in result.json, or lost."""

    @property
    def name(self) -> str:
        """The name of the run's folder when it was made."""
        return str(self.record.get("name") or self.paths.folder.absolute().name)

    @property
    def has_ended(self) -> bool:
        """True if it is no longer running."""
        return self.status != RUNNING

    @property
    def sweep(self) -> Path | None:
        """The folder of its sweep."""
        above = self.paths.folder.absolute().parent
        return above if is_sweep(above) else None

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The configuration, flat; the typed settings, where the run was refused."""
        return hyperparameters(self.record.get("config") or self.record.get("overrides") or {})

    @property
    def tags(self) -> dict[str, str]:
        """Further facts of the run, as texts."""
        record: Mapping[str, Any] = self.record
        forked, begun = record.get("forked_from") or {}, record.get("weights_from") or {}
        user = None
        with contextlib.suppress(KeyError, OSError, ImportError):  # a container's nameless user
            user = getpass.getuser()
        found = {
            "expt.folder": self.paths.folder.absolute(),
            "expt.sweep": self.sweep.name if self.sweep else None,
            "expt.status": self.status,
            "expt.version": (record.get("versions") or {}).get("expt"),
            "git.commit": (record.get("git") or {}).get("commit"),
            "host": record.get("node"),
            "user": user,
            **{f"expt.fork.{key}": forked.get(key) for key in ("run", "identity", "step", "epoch")},
            **{f"expt.weights.{key}": begun.get(key) for key in ("run", "identity")},
            "expt.search.number": (record.get("search") or {}).get("number"),
            **{f"expt.{key}": record.get(key) for key in _TAGGED},
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    @property
    def summary(self) -> dict[str, float]:
        """Results of the run other than the last value of each tag."""
        record: Mapping[str, Any] = self.record
        found = {
            "objective": (record.get("objective") or {}).get("value"),
            "best/epoch": (record.get("best") or {}).get("epoch"),
            **{key: record.get(key) for key in ("samples_per_s", "first_step_s", "eval_s")},
        }
        known = {key: float(value) for key, value in found.items() if value is not None}
        return {key: value for key, value in known.items() if math.isfinite(value)}

    def files(self, *, checkpoints: bool) -> list[Path]:
        """Return the files that a dashboard keeps of it."""
        paths = self.paths
        found = [paths.result, paths.metrics, *sorted(paths.hydra.glob("*.yaml"))]
        if checkpoints:
            found += [paths.best, paths.last]
        return [path for path in found if path.is_file()]

    def digest(self, *, checkpoints: bool) -> str:
        """Return a text that changes where there is something else to send."""
        stats = [(path.name, path.stat()) for path in self.files(checkpoints=False)]
        sizes = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
        return json.dumps([self.status, checkpoints, sizes])


def snapshot(paths: RunPaths, *, even_lost: bool = True) -> Snapshot | None:
    """Return the run of a folder; None where there is none whose record can be read.

    Whether a run that says running is lost is looked up if `even_lost`.
    """
    record = read_result(paths)
    status = record.get("status", DAMAGED)
    if status == DAMAGED:  # or there is none yet
        return None
    return Snapshot(paths, record, LOST if even_lost and is_lost(paths, record) else status)


def with_epochs(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the points, and before the first of each step one that has the step's epoch."""
    step = None
    for point in points:
        if point.step != step:
            step = point.step
            yield Point(point.step, point.epoch, EPOCH, float(point.epoch))
        yield point


class Copy(Protocol):
    """A run's copy in a tracker, made of a snapshot, its state that is kept here, and settings."""

    address: str
    """Its address for a person."""

    def describe(self, run: Snapshot) -> None:
        """Send settings and tags."""

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet."""

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files of a run that has ended."""

    def leave(self) -> None:
        """Let go of a run that is still under way."""


def _send(
    named: _Named, send: Callable[[_Named], object], reach: Callable[[Exception], object]
) -> None:
    """Send these together, or else all that is not refused, and warn of the rest.

    `reach` raises where nothing can be sent now.
    """
    try:
        send(named)
    except Exception as error:
        reach(error)
        if half := len(named) // 2:
            for some in (named[:half], named[half:]):
                _send(some, send, reach)
        elif (key := named[0][0]) not in _refused:
            _refused.add(key)
            warn(f"{key}: the dashboard refuses its value ({in_a_line(error)}); all else is sent")


def in_a_line(error: BaseException) -> str:
    """Return the innermost reason of a library's error, in a line."""
    while (inner := error.__cause__ or error.__context__) is not None and str(inner):
        error = inner
    text = " ".join(without_password(str(error) or type(error).__name__).split())
    return text if len(text) <= 160 else f"{text[:160]}..."


def _unsent(
    points: Sequence[Point], state: dict[str, Any]
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step's points that `state` does not have, and then note them: they are sent."""
    sent = state.setdefault("steps", {})
    for step, row in itertools.groupby(points, key=lambda point: point.step):
        if new := {each.tag: each.value for each in row if step > sent.get(each.tag, -1)}:
            yield step, new
            sent |= dict.fromkeys(new, step)


class MLflowCopy(Copy):
    """A run's copy there, found by its key; the server says which points it has."""

    def __init__(
        self, run: Snapshot, state: dict[str, Any], settings: MLflow, key_of: Callable[[Path], str]
    ) -> None:
        """Find or create the run of the key, below that of its sweep."""
        # Give up soon: the sender tries again later, and asks which points have arrived.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        from mlflow import MlflowClient, get_tracking_uri

        if problem := _unusable(settings.tracking_uri or get_tracking_uri()):
            raise OSError(problem)
        self._settings, self._client = settings, MlflowClient(tracking_uri=settings.tracking_uri)
        name = settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "expt"
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        above = {}
        if run.sweep is not None:
            about = {"expt.folder": str(run.sweep)}
            self._sweep = self._find(key_of(run.sweep), run.sweep.name, about, run)
            above = {"mlflow.parentRunId": self._sweep.info.run_id}
        found = self._find(state["key"], run.name, above, run)
        self._params = {*found.data.params}
        # `data.metrics` does not have the steps.
        self._marks = {metric.key: metric.step for metric in found.data.to_proto().metrics}
        self.address = f"{settings.tracking_uri or 'MLflow'}: experiment {name}"

    def _find(self, key: str, name: str, tags: dict[str, str], run: Snapshot) -> Any:
        wanted = f"tags.`{KEY}` = '{key}'"
        found = self._client.search_runs([self._experiment], wanted, max_results=1)
        started = int(run.record.get("started", 0) * 1000) or None
        create, every = self._client.create_run, {KEY: key, **tags}
        copy = found[0] if found else create(self._experiment, started, every, run_name=name)
        self._id = copy.info.run_id
        if self._settings.tags:  # not as it is created: one that is refused would stop that
            self._tag(self._settings.tags)
        return copy

    def describe(self, run: Snapshot) -> None:
        """Send settings and tags; parameters stay as the run's first attempt had them."""
        from mlflow.entities import Param

        settings = {_name(key): str(value)[:MAX_TEXT] for key, value in run.settings.items()}
        self._log("params", [Param(*x) for x in settings.items() if x[0] not in self._params])
        self._tag({key: value[:MAX_TEXT] for key, value in run.tags.items()})
        self._params |= settings.keys()
        self._client.update_run(self._id, status="RUNNING")

    def _tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._log("tags", [RunTag(key, str(value)) for key, value in tags.items()])

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet."""
        from mlflow.entities import Metric

        metrics, marks = list[Metric](), dict(self._marks)
        for point in points:
            if point.step > marks.get(key := _name(point.tag), -1):
                marks[key] = point.step
                metrics.append(Metric(key, point.value, int(at * 1000), point.step))
        for start in range(0, len(metrics), MAX_METRICS):
            some = metrics[start : start + MAX_METRICS]
            self._log("metrics", some)
            self._marks |= {metric.key: metric.step for metric in some}

    def _log(self, kind: str, entries: Sequence[Any]) -> None:
        def send(some: _Named) -> None:
            self._client.log_batch(self._id, **{kind: [entry for _, entry in some]})  # type: ignore[arg-type]

        _send([(entry.key, entry) for entry in entries], send, self._reach)

    def _reach(self, error: Exception) -> None:
        from mlflow.exceptions import MlflowException

        code = error.get_http_status_code() if isinstance(error, MlflowException) else 500  # type: ignore[no-untyped-call]
        if not (400 <= code < 500 or isinstance(error, TypeError | ValueError)):
            raise error
        self._client.update_run(self._id, status="RUNNING")  # fails for one that is deleted

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files."""
        step, at = int(run.record.get("steps") or 0), run.paths.result.stat().st_mtime
        self.add([Point(step, 0, tag, value) for tag, value in run.summary.items()], at)
        for path in run.files(checkpoints=self._settings.checkpoints):
            inside = path.parent.relative_to(run.paths.folder)
            where = None if inside == Path() else str(inside).lstrip(".")
            send = functools.partial(self._client.log_artifact, self._id, str(path), where)
            _send([(path.name, send)], lambda some: some[0][1](), self._reach)
        status = _STATUS.get(run.status, "KILLED")
        self._client.set_terminated(self._id, status, int(at * 1000))
        if run.sweep is not None:
            status = _STATUS.get(sweep_status, "RUNNING")
            self._client.update_run(self._sweep.info.run_id, status=status)


def _unusable(uri: str) -> str:
    """Return why a file of SQLite can't be used, which MLflow would try for minutes."""
    kind, _, path = uri.partition(":///")
    if kind == "sqlite" and path:
        try:
            with contextlib.closing(sqlite3.connect(path.partition("?")[0])) as database:
                database.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            return f"{uri}: {error}"
    return ""


def _name(tag: str) -> str:
    """Return the tag in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", tag, flags=re.ASCII)[:250]


class WandbCopy(Copy):
    """A run's copy there, known by its key; W&B's own count of steps says where it continues."""

    def __init__(
        self, run: Snapshot, state: dict[str, Any], settings: Wandb, _: Callable[[Path], str]
    ) -> None:
        """Begin the run of the key in `state`, or resume it."""
        import wandb

        self._settings, self._wandb = settings, wandb
        self._run: Any = wandb.init(
            project=settings.project or os.environ.get("WANDB_PROJECT") or "expt",
            entity=settings.entity,
            group=settings.group
            or os.environ.get("WANDB_RUN_GROUP")
            or (run.sweep.name if run.sweep else None),
            tags=settings.tags or None,
            name=run.name,
            id=state["key"],
            resume="allow",
            reinit="create_new",  # runs of a sweep lie side by side
            dir=str(run.paths.folder),
            mode=settings.mode,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S,
                finish_timeout_raises=True, x_disable_stats=True, disable_code=True,
                disable_git=True,
            ),
        )  # fmt: skip
        self._state = state  # offline nobody else knows the points there
        self._next: int = self._run.step if self._run.url else self._state.get("next_step", 0)
        self.address = self._run.url or f"kept offline in {run.paths.folder / 'wandb'}"

    def describe(self, run: Snapshot) -> None:
        """Send the settings as W&B's config, and facts that W&B has no other place for."""
        update = functools.partial(self._run.config.update, allow_val_change=True)
        self._each({**run.settings, **run.tags}, update)

    def _each(self, values: Mapping[str, Any], send: Callable[[dict[str, Any]], object]) -> None:
        def reach(error: Exception) -> None:
            if not isinstance(error, TypeError | ValueError | self._wandb.errors.UsageError):
                raise error

        _send([*values.items()], lambda some: send(dict(some)), reach)

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet; a later session's of a row go to the next."""
        for step, row in _unsent(points, self._state):
            if step >= self._next - 1:
                self._next = max(step, self._next)
                self._each(row, functools.partial(self._run.log, step=self._next))
                self._state["next_step"] = self._next + 1

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files. Raise TimeoutError where not all could be uploaded."""
        about = {"status": run.status, "error": run.record.get("error")}
        self._each({**run.summary, **about}, self._run.summary.update)
        for path in run.files(checkpoints=self._settings.checkpoints):
            self._run.save(str(path), base_path=str(run.paths.folder), policy="now")
        self._run.finish(exit_code=_EXIT_CODES.get(run.status, KILLED))

    def leave(self) -> None:
        """Leave a run that is still under way; W&B takes it for finished until more comes."""
        self._run.finish(exit_code=0)


class TrackioCopy(Copy):
    """A run's copy there, known by its name and key."""

    def __init__(
        self, run: Snapshot, state: dict[str, Any], settings: Trackio, _: Callable[[Path], str]
    ) -> None:
        """Note where the run goes; `describe` begins or resumes it."""
        self._settings, self._state, self._project = settings, state, settings.project or "expt"
        self.address = f"trackio show --project {self._project}"
        self._run: Any = None

    def describe(self, run: Snapshot) -> None:
        """Begin or resume the run; trackio takes settings only as a run begins."""
        import trackio

        self.leave()
        begin = functools.partial(
            trackio.init, self._project, f"{run.name}-{self._state['key']}", resume="allow",
            group=self._settings.group or (run.sweep.name if run.sweep else None),
            space_id=self._settings.space_id, config={**run.settings, **run.tags}, embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        with contextlib.redirect_stdout(None):
            self._run = contextvars.Context().run(begin)  # else it finishes the run before

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet."""
        for step, row in _unsent(points, self._state):
            self._run.log(row, step=step)

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send summary and files, and an alert of a run that has failed."""
        import trackio

        files = trackio.Artifact(f"run-{self._state['key']}", type="run")
        for path in run.files(checkpoints=self._settings.checkpoints):
            files.add_file(path)
        with contextlib.redirect_stdout(None):
            self._run.log(run.summary, step=int(run.record.get("steps") or 0))
            if run.status == FAILED:
                about, level = str(run.record.get("error")), trackio.AlertLevel.ERROR
                self._run.alert(f"{run.name} failed", about[:MAX_TEXT], level)
            self._run.log_artifact(files)
        self.leave()

    def leave(self) -> None:
        """Wait until all that was logged is there."""
        if self._run is not None:
            with contextlib.redirect_stdout(None):
                self._run.finish()


COPIES: dict[str, tuple[Any, Any]] = {
    "mlflow": (MLflow, MLflowCopy),
    "wandb": (Wandb, WandbCopy),
    "trackio": (Trackio, TrackioCopy),
}
"""Each tracker's settings, and its `Copy`."""
