"""What is in TensorBoard's event files: read again when a run goes on that had come to its end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expt.runs import tags

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]


def read_events(files: Sequence[Path]) -> Iterator[Event]:
    """All events, in their order; a file may end in the middle of one."""
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
    """Whether HPARAMS would tell of the run's end, or of settings that are not those of `start`."""
    from tensorboard.plugins.hparams import metadata

    now = _settings(start)
    for event in read_events(files):
        told = {value.tag for value in event.summary.value}
        if metadata.SESSION_END_INFO_TAG in told:
            return True
        if metadata.SESSION_START_INFO_TAG in told and _settings(event.summary) != now:
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
    """What a run had drawn when it came to `step`, without its settings and what it drew because it
    then ended.

    `measured` are the tags of the curves that have a point of that step. What comes after the first
    other one is of the end, and with `end_pictures` so are those of evaluations."""
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
    """What a run had drawn of its curves when it came to `step`, without pictures."""
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
    """Of what metrics.jsonl holds: the norms of layers are in the event files alone."""
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
