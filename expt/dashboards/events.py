"""TensorBoard's event file: one writer, and one file for each attempt at a run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expt.dashboards import hparams
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import read_result

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from torch.utils.tensorboard import FileWriter, SummaryWriter

    from expt.dashboards.pictures import Picture
from collections.abc import Collection, Iterator

from expt.runs import tags

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

    from expt.dashboards.pictures import Picture


def writer(
    paths: RunPaths,
    hyperparameters: Mapping[str, bool | int | float | str],
    charts: Mapping[str, Mapping[str, list[str]]],
    *,
    resumed_at: int | None,
    end_pictures: bool = False,
) -> Writer:
    """Return the writer of a run that continues after the step `resumed_at`.

    A new folder gets all curves until there. Where the run was complete, or has other settings now,
    its files are written again without its end, to which with `end_pictures` all pictures of
    evaluations belong.
    """
    earlier = [] if resumed_at is None else paths.event_files()
    if resumed_at is not None:
        elsewhere = [] if earlier else _of_resumed(paths)
        if not earlier and (parent := _of_parent(paths)):
            events = Writer(paths.folder, hyperparameters, charts, continued_at=-1)
            events.add(curves_until(parent, resumed_at))
            return events
        if elsewhere or (earlier and tells_otherwise(earlier, hparams.begin(hyperparameters))):
            files = earlier or elsewhere
            events = _anew(
                paths, files, hyperparameters, charts, resumed_at, end_pictures=end_pictures
            )
            for path in earlier:
                path.unlink()
            return events
    events = Writer(
        paths.folder, hyperparameters, charts, continued_at=resumed_at if earlier else None
    )
    if resumed_at is not None and not earlier:
        for point in MetricsReader(paths).read():
            events.write(point.step, {point.tag: point.value})
    return events


def _anew(
    paths: RunPaths,
    earlier: Sequence[Path],
    hyperparameters: Mapping[str, bool | int | float | str],
    charts: Mapping[str, Mapping[str, list[str]]],
    step: int,
    *,
    end_pictures: bool,
) -> Writer:
    """Write what the `earlier` files hold up to `step` to a new one.

    TensorBoard can't unread the settings of a run.
    """
    measured = {point.tag for point in MetricsReader(paths).read() if point.step == step}
    kept = before_the_end(earlier, step, measured, end_pictures=end_pictures)
    _let_the_second_pass(paths.folder)
    events = Writer(paths.folder, hyperparameters, charts, continued_at=-1)
    events.add(kept)
    return events


def _of_resumed(paths: RunPaths) -> list[Path]:
    """Return the event files of the run in another folder that this one resumes."""
    resumed = read_result(paths).get("resumed_from")
    return RunPaths(Path(resumed["checkpoint"]).parent.parent).event_files() if resumed else []


def _of_parent(paths: RunPaths) -> list[Path]:
    """Return the event files of the run that this one forks, until it is resumed itself."""
    result = read_result(paths)
    forks = "forked_from" in result and "resumed_from" not in result
    return RunPaths(Path(result["forked_from"]["run"])).event_files() if forks else []


class Writer:
    """Rank 0's event file in the run folder.

    `continued_at` hides what older files there hold after that step.
    """

    def __init__(
        self,
        folder: Path,
        hyperparameters: Mapping[str, bool | int | float | str] | None = None,
        charts: Mapping[str, Mapping[str, list[str]]] | None = None,
        *,
        continued_at: int | None = None,
    ) -> None:
        """Open no file yet. Without hyperparameters it is no run of the HPARAMS tab."""
        self._folder, self._continued_at = folder, continued_at
        self._hyperparameters, self._charts = hyperparameters, charts
        self._writer: SummaryWriter | None = None
        self._there: set[str] = set()
        """Tags of which the older files hold a value of that very step; it would be the same again.
        """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value to each tag."""
        for tag, value in values.items():
            events = self._open()
            if step != self._continued_at or tag not in self._there:
                events.add_scalar(tag, value, step)

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        """Add a picture to the IMAGES tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        # SummaryWriter.add_image would compress it a second time, and more slowly.
        image = Summary.Image(
            height=picture.height, width=picture.width, encoded_image_string=picture.png
        )
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        _file(self._open()).add_summary(summary, step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Add a text to the TEXT tab."""
        self._open().add_text(tag, markdown, step)

    def histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        """Add the distribution of `values`, which must be finite, to the HISTOGRAMS tab."""
        self._open().add_histogram(tag, values.detach().float().cpu(), step)

    def graph(self, module: torch.nn.Module, images: torch.Tensor) -> None:
        """Add the model's graph, from tracing it on `images`.

        Raises whatever the model raises when traced.
        """
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that tracing is deprecated; TensorBoard reads nothing newer
            self._open().add_graph(module, images)

    def add(self, events: Iterable[Event]) -> None:
        """Add what another file held."""
        file = _file(self._open())
        for event in events:
            file.event_writer.add_event(event)
        file.flush()

    def flush(self) -> None:
        """Let a running TensorBoard see what was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, complete: bool = True) -> None:
        """Write what is left; the HPARAMS tab then says that the run is `complete`."""
        if complete and self._hyperparameters is not None:
            _file(self._open()).add_summary(hparams.end("success", time.time()))
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported at the first log point: 0.3 s that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            if self._continued_at is None or self._continued_at < 0:
                # A TensorBoard that has read the files before forgets them.
                self._writer = SummaryWriter(
                    str(self._folder), purge_step=None if self._continued_at is None else 0
                )
                self._begin(self._writer)
            else:
                self._there = _tags_at(self._continued_at, RunPaths(self._folder).event_files())
                _let_the_second_pass(self._folder)
                self._writer = SummaryWriter(str(self._folder), purge_step=self._continued_at + 1)
        return self._writer

    def _begin(self, writer: SummaryWriter) -> None:
        if self._hyperparameters is not None:
            _file(writer).add_summary(hparams.begin(self._hyperparameters))
        if self._charts:
            charts = {
                category: {title: ["Multiline", tags] for title, tags in inside.items()}
                for category, inside in self._charts.items()
            }
            writer.add_custom_scalars(charts)


def _file(writer: SummaryWriter) -> FileWriter:
    file: FileWriter | None = writer.file_writer
    assert file is not None
    return file


def _let_the_second_pass(folder: Path) -> None:
    """Wait until a new file's name is a later second than those of the older ones.

    TensorBoard reads event files by the second in their names. Files that are dated ahead, from
    before the clock was set back, are renamed: their time would be waited for.
    """
    latest = 0
    for path in RunPaths(folder).event_files():
        second = int(path.name.split(".")[3])
        if second > time.time():
            latest = max(latest + 1, int(time.time()))
            path.rename(path.with_name(path.name.replace(str(second), str(latest), 1)))
        else:
            latest = second
    while int(time.time()) <= latest:
        time.sleep(0.01)


def _tags_at(step: int, files: Sequence[Path]) -> set[str]:
    return {
        value.tag
        for event in read_events(files)
        for value in event.summary.value
        if event.step == step
    }


def read_events(files: Sequence[Path]) -> Iterator[Event]:
    """Yield all events in order; a file may end in the middle of one."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]

    for path in files:
        content, place = path.read_bytes(), 0
        while place < len(content):
            length = int.from_bytes(content[place : place + 8], "little")
            begin, place = (
                place + 12,
                place + 16 + length,
            )  # the length, the data, and a checksum of four bytes each
            if place <= len(content):
                yield Event.FromString(content[begin : begin + length])


def tells_otherwise(files: Sequence[Path], start: Summary) -> bool:
    """Return whether HPARAMS would show the run's end, or other settings than `start`."""
    from tensorboard.plugins.hparams import metadata

    now = _settings(start)
    for event in read_events(files):
        found = {value.tag for value in event.summary.value}
        if metadata.SESSION_END_INFO_TAG in found:
            return True
        if metadata.SESSION_START_INFO_TAG in found and _settings(event.summary) != now:
            return True
    return False


def _settings(start: Summary) -> dict[str, str]:
    from tensorboard.plugins.hparams import metadata

    content = start.value[0].metadata.plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    return {key: str(value) for key, value in settings.items() if key != "resume"}


def before_the_end(
    files: Sequence[Path], step: int, measured: Collection[str], *, end_pictures: bool
) -> list[Event]:
    """Return a run's events up to `step`, without its settings and what it drew at its end.

    `measured` are the tags of the curves that have a point of that step. What comes after the first
    other one is of the end, and with `end_pictures` so are those of evaluations.
    """
    found, ended = list["Event"](), False
    for event in read_events(files):
        if event.HasField(
            "session_log"
        ):  # it hid what an attempt that was killed had drawn after its last checkpoint
            found = [each for each in found if each.step < event.step]
        drawn = {value.tag for value in event.summary.value}
        if event.HasField("file_version") or event.step > step or any(map(_is_of_the_run, drawn)):
            continue
        ended |= event.step == step and any(
            tag not in measured and _is_curve(event, tag) for tag in drawn
        )
        if event.step < step or not ended:
            found.append(event)
    return [each for each in found if not (end_pictures and each.step == step and _is_review(each))]


def curves_until(files: Sequence[Path], step: int) -> list[Event]:
    """Return the events of a run's curves up to `step`, without pictures."""
    found = list["Event"]()
    for event in read_events(files):
        if event.HasField("session_log"):  # as above
            found = [each for each in found if each.step < event.step]
        values = event.summary.value
        if (
            values
            and event.step <= step
            and all(value.WhichOneof("value") == "simple_value" for value in values)
        ):
            found.append(event)
    return found


def _is_of_the_run(tag: str) -> bool:
    return tag.startswith("_hparams_/") or tag == "custom_scalars__config__"


def _is_curve(event: Event, tag: str) -> bool:
    """Return whether metrics.jsonl has it too: norms of layers are only in event files."""
    kinds = {value.tag: value.WhichOneof("value") for value in event.summary.value}
    return kinds[tag] == "simple_value" and tag.partition("/")[0] not in (
        tags.GRADIENT_NORM,
        tags.WEIGHT_NORM,
    )


def _is_review(event: Event) -> bool:
    return any(
        value.tag.startswith((tags.confusion(""), tags.mistakes("")))
        for value in event.summary.value
    )
