"""TensorBoard's event file: one writer, and one file for each attempt at a run."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expt.dashboards import hparams
from expt.runs import tags
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths, written
from expt.runs.result import read_result

if TYPE_CHECKING:
    from PIL.Image import Image
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from torch.utils.tensorboard import SummaryWriter

OBJECTIVE = "(objective)/"
"""Before the name of the objective in HPARAMS."""
_OF_THE_RUN = ("_hparams_/", "custom_scalars__config__")


def writer(
    paths: RunPaths,
    hyperparameters: Mapping[str, hparams.Value],
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
    _replace_files(paths, hparams.begin(hyperparameters), [record for _, record in kept])
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
        hparams.append(file, forget, Event(wall_time=now, summary=start))
        file.writelines(kept)
    there = temporary.replace(hparams.event_file(paths.folder, now, -1))  # before SummaryWriter's 0
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
        hyperparameters: Mapping[str, hparams.Value] | None = None,
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
            self._add(hparams.end("success", time.time()))
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported at the first log point: 0.3 s that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
            if self._hyperparameters is not None:
                self._add(hparams.begin(self._hyperparameters))
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
