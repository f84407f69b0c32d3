"""TensorBoard's event file: one writer, and one file for each attempt at a run.

A run's file has its settings and its end for the HPARAMS tab, and describes only itself. Without an
experiment's description next to it, TensorBoard makes the columns from all runs that it is shown:
every setting of every model has one, those in which the runs differ come first, and every scalar is
a metric. SummaryWriter.add_hparams would write that description, and make a second run of each
(pytorch #32651).
"""

# Imports of TensorBoard are late: half a second that a sweep without failures, or a first step,
# need not wait for.
from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

from expt.errors import RunFailed
from expt.runs import tags
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import EVENT_FILES, RunPaths, written
from expt.runs.result import read_result

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from torch.utils.tensorboard import SummaryWriter

Value: TypeAlias = bool | int | float | str

OBJECTIVE = "(objective)/"
"""Before the name of the objective in HPARAMS."""
_OF_THE_RUN = ("_hparams_/", "custom_scalars__config__")


def writer(
    paths: RunPaths,
    hyperparameters: Mapping[str, Value],
    charts: Mapping[str, Mapping[str, list[str]]],
    *,
    resumed_at: int | None,
    end_pictures: bool = False,
    is_done: bool = False,
) -> Writer:
    """Return the writer of a run that continues after the step `resumed_at`.

    Events until then are copied into a new file, without the settings and the run's end. With
    `end_pictures` pictures of evaluations belong to that end, unless the run `is_done`: it draws
    none again. A fork has the curves of its parent.
    """
    events = Writer(paths.folder, hyperparameters, charts)
    if resumed_at is None:
        return events
    points = [*MetricsReader(paths).read()]
    earlier, is_fork = _earlier(paths)
    if not earlier:
        for point in points:
            events.write(point.step, {point.tag: point.value})
        return events
    kept = _until(
        earlier,
        resumed_at,
        {point.tag for point in points if point.step == resumed_at},
        end_pictures=end_pictures,
        is_done=is_done,
        only_curves=is_fork,
    )
    _replace_files(paths, summary_of_start(hyperparameters), [record for _, record in kept])
    return events


def _earlier(paths: RunPaths) -> tuple[Sequence[Path], bool]:
    """Return the event files of the run that is continued, and whether that is a fork's parent."""
    if own := paths.event_files():
        return own, False
    result = read_result(paths)
    if resumed := result.get("resumed_from"):
        return RunPaths(Path(resumed["checkpoint"]).parent.parent).event_files(), False
    if forked := result.get("forked_from"):
        return RunPaths(Path(forked["run"])).event_files(), True
    return [], False


def records(files: Sequence[Path]) -> Iterator[tuple[Event, bytes]]:
    """Yield all events in order, each with its bytes; a file may end in the middle of one."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]

    for path in files:
        content = path.read_bytes()
        place = 0
        while place < len(content):
            # the length, a checksum of four bytes, the event, and another checksum
            length = int.from_bytes(content[place : place + 8], "little")
            record = content[place : place + length + 16]
            place += len(record)
            if len(record) == length + 16:
                yield Event.FromString(record[12:-4]), record


def pictures_of_evaluations(paths: RunPaths) -> dict[str, bytes]:
    """Return the newest confusion matrices and mistakes of a run and its evaluations, as PNG.

    Those of a mean over several runs or mirror images are left out.
    """
    about = {path: read_result(RunPaths(path)) for path in paths.evaluations.glob("*/")}
    own = [x for x in about if not {"mean_of", "flips"} & about[x].get("evaluation_of", {}).keys()]
    evaluations = sorted(own, key=lambda path: path.stat().st_mtime)
    files = (file for own in (paths, *map(RunPaths, evaluations)) for file in own.event_files())
    return {
        value.tag: value.image.encoded_image_string
        for event, _ in records([*files])
        for value in event.summary.value
        if value.tag.startswith((tags.CONFUSION, tags.MISTAKES)) and value.HasField("image")
    }


def _until(
    files: Sequence[Path],
    step: int,
    measured: Collection[str],
    *,
    end_pictures: bool,
    is_done: bool,
    only_curves: bool,
) -> Sequence[tuple[Event, bytes]]:
    """Return a run's events up to `step`, without its settings and the pictures of its end.

    `measured` are the tags of the curves that have a point of that step. Events after the first
    other one are of the end.
    """
    found = list[tuple["Event", bytes]]()
    is_end = False
    for event, record in records(files):
        if event.HasField("session_log"):  # hides events of earlier files from its step on
            found = [each for each in found if each[0].step < event.step]
        kinds = {value.tag: value.WhichOneof("value") for value in event.summary.value}
        is_of_file = event.WhichOneof("what") in ("file_version", "session_log")
        is_of_settings = any(tag.startswith(_OF_THE_RUN) for tag in kinds)
        is_curve = {*kinds.values()} == {"simple_value"}
        if event.step > step or is_of_file or is_of_settings or (only_curves and not is_curve):
            continue
        if event.step == step:
            curves = [tag for tag, kind in kinds.items() if kind == "simple_value"]
            is_end = is_end or any(_is_of_end(tag, measured) for tag in curves)
            is_review = any(tag.startswith((tags.CONFUSION, tags.MISTAKES)) for tag in kinds)
            is_left_out = is_end or (end_pictures and is_review)
            if is_left_out and not (is_done and is_review):
                continue
        found.append((event, record))
    return found


def _is_of_end(tag: str, measured: Collection[str]) -> bool:
    is_norm = tag.startswith((tags.GRADIENT_NORM, tags.WEIGHT_NORM))  # only in event files
    return not is_norm and tag.replace(OBJECTIVE, tags.BEST, 1) not in measured


def _replace_files(paths: RunPaths, start: Summary, kept: Sequence[bytes]) -> None:
    """Replace the event files of a run by one of these records, after those of its `start`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

    earlier, temporary = paths.event_files(), paths.folder / ".events"
    _let_the_second_pass(earlier)
    now = time.time()
    with written(temporary) as file:
        # A TensorBoard that has read the files before forgets them.
        forget = Event(wall_time=now, session_log=SessionLog(status=SessionLog.START))
        append(file, forget, Event(wall_time=now, summary=start))
        file.writelines(kept)
    there = temporary.replace(event_file(paths.folder, now, -1))  # before SummaryWriter's 0
    for path in {*earlier} - {there}:
        path.unlink()


def _let_the_second_pass(earlier: Sequence[Path]) -> None:
    """Wait until a new file gets a later name: TensorBoard reads files by the second in it."""
    while earlier and int(time.time()) == int(earlier[-1].name.split(".")[3]):
        time.sleep(0.01)


class Writer:
    """Rank 0's event file in the run folder."""

    def __init__(
        self,
        folder: Path,
        hyperparameters: Mapping[str, Value] | None = None,
        charts: Mapping[str, Mapping[str, list[str]]] | None = None,
    ) -> None:
        """Open no file yet. Without hyperparameters it is not a run of the HPARAMS tab."""
        self._folder, self._hyperparameters, self._charts = folder, hyperparameters, charts
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value to each tag, and the best value of the objective as HPARAMS' first column.

        That sorts columns by name, brackets first.
        """
        for tag, value in values.items():
            self._open().add_scalar(tag, value, step)
            if tag.startswith(tags.BEST):
                self._open().add_scalar(tag.replace(tags.BEST, OBJECTIVE, 1), value, step)

    def picture(self, tag: str, picture: Image, step: int) -> None:
        """Add a picture to the IMAGES tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        # SummaryWriter.add_image takes arrays, and compresses more slowly.
        picture.save(file := io.BytesIO(), "PNG", compress_level=1)
        image = Summary.Image(
            height=picture.height, width=picture.width, encoded_image_string=file.getvalue()
        )
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        """Add the distribution of `values`, which must be finite, to the HISTOGRAMS tab."""
        self._open().add_histogram(tag, values.detach().float().cpu(), step)

    def flush(self) -> None:
        """Let a running TensorBoard see all that was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, complete: bool = True) -> None:
        """Write all that is left; the HPARAMS tab then says that the run is `complete`."""
        if complete and self._hyperparameters is not None:
            self._add(summary_of_end("success", time.time()))
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported at the first log point: 0.3 s that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            if moved := RunPaths(self._folder).moved():  # else it would make another
                raise RunFailed(moved)
            self._writer = SummaryWriter(str(self._folder))
            if self._hyperparameters is not None:
                self._add(summary_of_start(self._hyperparameters))
            if self._charts:
                charts = {
                    category: {title: ["Multiline", tags] for title, tags in inside.items()}
                    for category, inside in self._charts.items()
                }
                self._writer.add_custom_scalars(charts)
        return self._writer

    def _add(self, summary: Summary, step: int | None = None) -> None:
        file = self._open().file_writer
        assert file is not None
        file.add_summary(summary, step)


def summary_of_start(hyperparameters: Mapping[str, Value]) -> Summary:
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


def summary_of_end(status: Literal["success", "failure"], time_s: float) -> Summary:
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
    events = [Event(wall_time=now, summary=summary_of_end("failure", now))]
    path = max(RunPaths(folder).event_files(), default=None)
    if path is None:
        path = event_file(folder, now, 0)
        events.insert(0, Event(wall_time=now, summary=summary_of_start(hyperparameters)))
    with path.open("ab") as file:
        append(file, *events)
