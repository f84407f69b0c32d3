"""A failed run in TensorBoard's HPARAMS tab: what its worker could no longer write, in the run's single event file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from expt import hparams
from expt.paths import EVENT_FILES, RunPaths


def add_failure(folder: Path, hyperparameters: Mapping[str, bool | int | float | str]) -> None:
    """Say that the run of `folder` has failed; where it has no event file yet, also what it was."""
    # late: half a second that a sweep without failures need not wait for
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.summary.writer.record_writer import RecordWriter

    now = time.time()
    events = [Event(wall_time=now, summary=hparams.end("failure", now))]
    path = max(RunPaths(folder).event_files(), default=None)
    if path is None:
        path = folder / f"{EVENT_FILES}{now:.0f}.{socket.gethostname()}.{os.getpid()}.0"
        start = Event(wall_time=now, summary=hparams.begin(hyperparameters))
        events = [Event(wall_time=now, file_version="brain.Event:2"), start, *events]
    with path.open("ab") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()
