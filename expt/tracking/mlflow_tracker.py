"""MLflow: a run for each run, below one for its sweep. The server alone says what it has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from expt.config.trackers import MLflow, without_password
from expt.errors import warn
from expt.runs.metrics_file import Point
from expt.runs.provenance import program
from expt.runs.result import COMPLETED, FAILED, PAUSED, RUNNING
from expt.tracking.cursor import Cursor
from expt.tracking.snapshot import Marks, Snapshot, marked, runs_of, sweep_status
from expt.tracking.tracker import Refused, Times, in_a_line

KEY, SENT = "expt.key", "expt.sent"
MAX_METRICS, MAX_PARAMS, MAX_TAGS = 1000, 100, 100
"""Of one request, as MLflow documents."""
MAX_TEXT = 5000
_STATUS = {RUNNING: "RUNNING", COMPLETED: "FINISHED", FAILED: "FAILED", PAUSED: "SCHEDULED"}
"""What else ends a run is MLflow's KILLED."""
T = TypeVar("T")


def quick() -> None:
    """Let MLflow's client give up soon: whoever calls tries again later, and asks first what has
    arrived.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


class MLflowTracker:
    """An MLflow server, or a store on the disk, by MLflow's own client."""

    def __init__(self, settings: MLflow) -> None:
        quick()
        import mlflow
        from mlflow import MlflowClient

        self._settings = settings
        uri = settings.tracking_uri or mlflow.get_tracking_uri()
        self.where = without_password(uri)
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._experiment: str | None = None
        self._sweeps: dict[Path, tuple[Cursor, str]] = {}

    def check(self) -> None:
        """One request, which changes nothing there."""
        self._client.search_experiments(max_results=1)

    def open(self, run: Snapshot, cursor: Cursor) -> MLflowCopy:
        """Find the run by its key, or make it.

        Raises Refused for one that a person has deleted there.
        """
        parent = {"mlflow.parentRunId": self._sweep(run)} if run.sweep else {}
        found = self._found_or_made(
            cursor, run, run.name, {**parent, "mlflow.user": run.tags.get("user", "")}
        )
        return MLflowCopy(self._client, found, cursor, self._settings, self.where)

    def address(self) -> str | None:
        """The experiment's page, where a server shows it."""
        if self._experiment is None or not self.where.startswith("http"):
            return self.where if self._experiment else None
        return f"{self.where.rstrip('/')}/#/experiments/{self._experiment}"

    def end_sweeps(self) -> None:
        """Say what has become of the sweeps whose runs were opened."""
        for folder, (cursor, run_id) in self._sweeps.items():
            runs = runs_of(folder)
            status = _STATUS.get(sweep_status(run.status for run in runs), "KILLED")
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                ended = int(max(run.ended_at for run in runs) * 1000)
                self._client.set_terminated(run_id, status=status, end_time=ended)
            cursor.close()
        self._sweeps = {}

    def _sweep(self, run: Snapshot) -> str:
        """The MLflow run above those of a sweep."""
        folder = run.sweep
        assert folder is not None
        if folder not in self._sweeps:
            cursor = Cursor(folder, "mlflow")
            try:
                found = self._found_or_made(
                    cursor, run, folder.name, {"mlflow.user": run.tags.get("user", "")}
                )
                shared = ("expt.command", "expt.version", "git.commit")
                tags = {key: value for key, value in run.tags.items() if key in shared} | {
                    "expt.folder": str(folder)
                }
                for key, value in tags.items():
                    self._client.set_tag(found.info.run_id, key, value[:MAX_TEXT])
                self._client.update_run(found.info.run_id, status="RUNNING")
            except BaseException:
                cursor.close()
                raise
            self._sweeps[folder] = cursor, found.info.run_id
        return self._sweeps[folder][1]

    def _found_or_made(
        self, cursor: Cursor, run: Snapshot, name: str, tags: Mapping[str, str]
    ) -> Any:
        if self._experiment is None:
            self._experiment = self._experiment_id()
        found = self._client.search_runs(
            [self._experiment],
            f"tags.`{KEY}` = '{cursor.key}'",
            run_view_type=_of_all(),
            max_results=1,
        )
        if found and found[0].info.lifecycle_stage == "deleted":
            raise Refused(f"{name}: was deleted there")
        if found:
            return found[0]
        started = None if run.started_at is None else int(run.started_at * 1000)
        every = {KEY: cursor.key, **tags, **(self._settings.tags or {})}
        made = self._client.create_run(
            self._experiment, start_time=started, tags=every, run_name=name
        )
        cursor.state |= {"at": self.where, "run": made.info.run_id}
        cursor.save()
        return made

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name, number = self._settings.experiment, os.environ.get("MLFLOW_EXPERIMENT_ID")
        if name is None and number:
            return number
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "expt"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another has come first
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


class MLflowCopy:
    """A run there."""

    def __init__(
        self, client: Any, found: Any, cursor: Cursor, settings: MLflow, where: str
    ) -> None:
        self._client, self._cursor, self._settings, self._where = client, cursor, settings, where
        self._id: str = found.info.run_id
        self._params: dict[str, str] = dict(found.data.params)
        self._tags: dict[str, str] = dict(found.data.tags)
        self._status: str = found.info.status
        # Of each tag the server knows the last point; `data.metrics` would not tell its step.
        self.marks: Marks = {metric.key: metric.step for metric in found.data.to_proto().metrics}

    def name_of(self, tag: str) -> str:
        """MLflow allows letters, digits and `_-. :/`."""
        return re.sub(r"[^\w\-. :/]", "_", tag, flags=re.ASCII)[:250]

    def describe(self, run: Snapshot) -> None:
        """Parameters are for ever there: one that a resumed run has otherwise becomes a tag."""
        if run.has_ended and self._tags.get(SENT) == self._digest(run):
            return
        params = {self.name_of(key): str(value)[:MAX_TEXT] for key, value in run.settings.items()}
        tags = {
            f"now.{key}": value
            for key, value in params.items()
            if self._params.get(key, value) != value
        }
        tags |= {key: value[:MAX_TEXT] for key, value in run.tags.items()}
        if "git.commit" in tags:
            tags["mlflow.source.git.commit"] = tags["git.commit"]
        tags["mlflow.source.name"] = run.tags.get("expt.command", program())[:MAX_TEXT]
        tags["mlflow.source.type"] = "LOCAL"
        self._log(
            params={key: value for key, value in params.items() if key not in self._params},
            tags={key: value for key, value in tags.items() if self._tags.get(key) != value},
        )
        self._params |= params
        self._tags |= tags
        if not run.has_ended and self._status != "RUNNING":
            self._client.update_run(self._id, status="RUNNING")
            self._status = "RUNNING"

    def add(self, points: Sequence[Point], times: Times) -> None:
        """A thousand in one request; what has arrived is known even where a later one fails."""
        from mlflow.entities import Metric

        for batch in _batches(points, MAX_METRICS):
            metrics = [
                Metric(point.tag, point.value, int(times(point.step) * 1000), point.step)
                for point in batch
            ]
            self._client.log_batch(self._id, metrics=metrics)
            marked(batch, self.marks)

    def end(self, run: Snapshot) -> bool:
        """Status, summary and files; nothing where that was sent before."""
        digest = self._digest(run)
        if self._tags.get(SENT) == digest:
            return False
        step = run.last_step
        summary = [Point(step, 0, self.name_of(tag), value) for tag, value in run.summary.items()]
        self.add(
            [point for point in summary if point.step > self.marks.get(point.tag, -1)],
            lambda _: run.ended_at,
        )
        complete = self._send_files(run)
        status = _STATUS.get(run.status, "KILLED")
        self._client.set_terminated(self._id, status=status, end_time=int(run.ended_at * 1000))
        self._status = status
        if complete:
            self._client.set_tag(self._id, SENT, digest)
            self._tags[SENT] = digest
        return True

    def leave(self) -> None:
        """The server keeps it as it is."""

    def _digest(self, run: Snapshot) -> str:
        return run.digest(checkpoints=self._settings.checkpoints)

    def _send_files(self, run: Snapshot) -> bool:
        for path in run.files(checkpoints=self._settings.checkpoints):
            inside = path.parent.relative_to(run.paths.folder)
            try:
                self._client.log_artifact(
                    self._id, str(path), None if inside == Path() else str(inside).lstrip(".")
                )
            except Exception as error:  # a store of files is another service than that of numbers
                warn(
                    "mlflow: files of runs could not be stored among its artifacts"
                    f" ({in_a_line(error)})"
                )
                return False
        return True

    def _log(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        for batch in _batches([Param(key, value) for key, value in params.items()], MAX_PARAMS):
            self._client.log_batch(self._id, params=batch)
        for some in _batches([RunTag(key, value) for key, value in tags.items()], MAX_TAGS):
            self._client.log_batch(self._id, tags=some)


def _of_all() -> Any:
    from mlflow.entities import ViewType

    return ViewType.ALL


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
