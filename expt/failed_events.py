"""A failed run in TensorBoard's HPARAMS tab: what its worker could no longer write, in the run's single event file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from expt.paths import EVENT_FILES, RunPaths


def add_failure(folder: Path, hyperparameters: Mapping[str, bool | int | float | str]) -> None:
    """Say that the run of `folder` has failed; where it has no event file yet, also what it was."""
    # late: half a second that a sweep without failures need not wait for
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE  # type: ignore[attr-defined]
    from tensorboard.plugins.hparams.plugin_data_pb2 import (  # type: ignore[attr-defined]
        HParamsPluginData,
        SessionEndInfo,
    )
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import hparams

    now = time.time()
    end = SessionEndInfo(status=STATUS_FAILURE, end_time_secs=now)
    content = HParamsPluginData(session_end_info=end, version=metadata.PLUGIN_DATA_VERSION)
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(content))
    events = [Event(wall_time=now, summary=Summary(value=[value]))]
    path = max(RunPaths(folder).event_files(), default=None)
    if path is None:
        path = folder / f"{EVENT_FILES}{now:.0f}.{socket.gethostname()}.{os.getpid()}.0"
        _, start, _ = hparams(dict(hyperparameters), {})
        events = [Event(wall_time=now, file_version="brain.Event:2"), Event(wall_time=now, summary=start), *events]
    with path.open("ab") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()
