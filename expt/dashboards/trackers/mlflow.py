"""Runs in MLflow."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT
from expt.dashboards.trackers import MAX_TEXT, Copy, Named, Tracker, send_apart, without_password
from expt.runs.metrics_file import Point

if TYPE_CHECKING:
    from expt.dashboards.snapshot import Snapshot

KEY = "expt.key"
MAX_METRICS = 1000
"""Points of one request, as MLflow documents."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(Tracker):
    """MLflow's server, database or files; `pip install 'expt[mlflow]'`."""

    PACKAGE: ClassVar[str | None] = "mlflow"
    tracking_uri: str | None = None
    experiment: str | None = None
    tags: dict[str, str] | None = None
    checkpoints: bool = False

    def problems(self, read: Mapping[str, str]) -> Sequence[str]:
        """Return a line for an address with a password."""
        uri = self.tracking_uri
        if uri is None or without_password(uri) == uri or "mlflow.tracking_uri" in read:
            return ()
        return (
            f"mlflow.tracking_uri={without_password(uri)}: a password would be written into the"
            " run's folder; set MLFLOW_TRACKING_URI, or give ${oc.env:NAME}",
        )

    def copy(self, run: Snapshot, state: dict[str, Any], key_of: Callable[[Path], str]) -> Copy:
        """Return the copy of a run."""
        return MLflowCopy(run, state, self, key_of)


class MLflowCopy(Copy):
    """A run's copy there, found by its key; the server says which points it has."""

    def __init__(
        self, run: Snapshot, state: dict[str, Any], settings: Config, key_of: Callable[[Path], str]
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
        def send(some: Named) -> None:
            self._client.log_batch(self._id, **{kind: [entry for _, entry in some]})  # type: ignore[arg-type]

        send_apart([(entry.key, entry) for entry in entries], send, self._reach)

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
            send_apart([(path.name, send)], lambda some: some[0][1](), self._reach)
        status = _status(run.status) or "KILLED"
        self._client.set_terminated(self._id, status, int(at * 1000))
        if run.sweep is not None:
            status = _status(sweep_status) or "RUNNING"
            self._client.update_run(self._sweep.info.run_id, status=status)


def _unusable(uri: str) -> str:
    """Return why a file of SQLite can't be used, which MLflow would try for minutes."""
    import sqlite3  # late: workers read the settings, too

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


def _status(status: str) -> str | None:
    """Return MLflow's word for the status of a run; None where it has none."""
    from expt.runs.result import COMPLETED, FAILED, PRUNED  # late: it imports the configuration

    return {COMPLETED: "FINISHED", FAILED: "FAILED", PRUNED: "SCHEDULED"}.get(status)
