"""TensorBoard's HPARAMS tab: the settings and the end of a run in its event file.

Each run describes only itself. Without an experiment's description next to it, TensorBoard makes
the columns from all runs that it is shown: every setting of every model has one, those in which the
runs differ come first, and every scalar is a metric. SummaryWriter.add_hparams would write that
description, and make a second run of each (pytorch #32651).
"""

# Imports of TensorBoard are late: half a second that a sweep without failures, or a first step,
# need not wait for.
from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

from expt.runs.paths import EVENT_FILES, RunPaths

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]


Value: TypeAlias = bool | int | float | str


def begin(hyperparameters: Mapping[str, Value]) -> Summary:
    """Return the summary of a run with these settings that has begun."""
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo  # type: ignore[attr-defined]

    start = SessionStartInfo()
    for key, value in columns(hyperparameters).items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[key], kind, value)
    return _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def columns(hyperparameters: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings by the names of their columns, such as `mlp.hidden` of a model.

    TensorBoard shows five until others are chosen, first those in which runs differ: under common
    names the settings of models would fill them. A custom class is shown by its name.
    """
    shown = dict(hyperparameters)
    for group in ("model", "dataset", "optimizer", "scheduler"):
        if shown.get(group) == "_target_":
            shown[group] = shown.pop(f"{group}.target")
        owner = group
        if group in ("model", "dataset"):
            owner = str(shown.get(group, group)).rpartition(".")[2]
        for key in [key for key in shown if key.startswith(f"{group}.")]:
            name = key.removeprefix(f"{group}.").removeprefix("kwargs.")
            shown[f"{owner}.{name}"] = shown.pop(key)
    return shown


def end(status: Literal["success", "failure"], time_s: float) -> Summary:
    """Return the summary of a run that ended at `time_s` [seconds since the epoch]."""
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo  # type: ignore[attr-defined]

    code = api_pb2.Status.Value(f"STATUS_{status.upper()}")  # type: ignore[attr-defined]
    info = SessionEndInfo(status=code, end_time_secs=time_s)
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=info)


def _summary(tag: str, **content: Any) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined]

    data = HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    about = metadata.create_summary_metadata(data)
    # TensorBoard's own writer adds the empty tensor.
    value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def event_file(folder: Path, time_s: float, number: int) -> Path:
    """Return an event file as TensorBoard's writer names it; files are read by second, number."""
    host = socket.gethostname()
    return folder / f"{EVENT_FILES}{int(time_s):010d}.{host}.{os.getpid()}.{number}"


def append(file: IO[bytes], *events: Event) -> None:
    """Write events to a file, to an empty one the version that it begins with."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.summary.writer.record_writer import RecordWriter

    version = Event(wall_time=events[0].wall_time, file_version="brain.Event:2")
    writer = RecordWriter(file)
    for event in events if file.tell() else (version, *events):
        writer.write(event.SerializeToString())
    writer.flush()


def add_failure(folder: Path, hyperparameters: Mapping[str, Value]) -> None:
    """Say that a run has failed; where it has no event file yet, also its settings."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]

    now = time.time()
    events = [Event(wall_time=now, summary=end("failure", now))]
    path = max(RunPaths(folder).event_files(), default=None)
    if path is None:
        path = event_file(folder, now, 0)
        events.insert(0, Event(wall_time=now, summary=begin(hyperparameters)))
    with path.open("ab") as file:
        append(file, *events)
