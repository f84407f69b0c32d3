"""Event files that continue others."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expt.dashboards.events import Writer, _let_the_second_pass
from expt.runs.paths import EVENT_FILES, RunPaths


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_what_is_there_of_the_step_itself_is_not_written_again(tmp_path: Path) -> None:
    """As by a run that was killed between its test and its end."""
    first = Writer(tmp_path, {}, {})
    first.write(20, {"accuracy/val": 0.5})
    first.write(20, {"accuracy/test": 0.25})
    first.close(complete=False)
    again = Writer(tmp_path, {}, {}, continued_at=20)
    again.write(20, {"accuracy/test": 0.25, "loss/test": 1.0})
    again.write(40, {"accuracy/test": 0.75})
    again.close()
    assert len(RunPaths(tmp_path).event_files()) == 2
    assert scalars(tmp_path, "accuracy/val") == [(20, 0.5)]
    assert scalars(tmp_path, "accuracy/test") == [(20, 0.25), (40, 0.75)]
    assert scalars(tmp_path, "loss/test") == [(20, 1.0)]


def test_files_that_are_dated_ahead_are_not_waited_for(tmp_path: Path) -> None:
    """The clock was set back an hour, or two."""
    began = time.monotonic()
    now = int(time.time())
    seconds = [now - 60, now + 3600, now + 7200]
    for number, second in enumerate(seconds):
        (tmp_path / f"{EVENT_FILES}{second}.host.1.{number}").write_text(str(number))
    _let_the_second_pass(tmp_path)
    files = RunPaths(tmp_path).event_files()
    assert [path.read_text() for path in files] == ["0", "1", "2"]
    names = [int(path.name.split(".")[3]) for path in files]
    assert names[0] == now - 60
    assert names == sorted(set(names))
    assert names[-1] < time.time()
    assert time.monotonic() - began < 5
