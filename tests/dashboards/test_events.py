"""Event files that continue others."""

from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expt.dashboards import events
from expt.dashboards.events import Writer, writer
from expt.runs.paths import RunPaths
from tests.dashboards.folders import measure, record
from tests.facade import Patch


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_points_after_the_checkpoint_are_rewritten(tmp_path: Path, monkeypatch: Patch) -> None:
    """As by a run that was killed between its test and its end, twice."""
    monkeypatch.setattr(events, "_let_the_second_pass", lambda files: None)
    paths = record(tmp_path)
    measure(paths, 10, 20)
    first = Writer(tmp_path, {}, {})
    for step in (10, 20):
        first.write(step, {"loss/train": 1 / step})
    first.write(20, {"loss/test": 0.5})
    first.picture("mistakes/test", Image.new("L", (1, 1)), 20)
    first.write(30, {"loss/train": 9.0})
    first.close(complete=False)
    for _ in range(2):
        again = writer(paths, {"seed": 1}, {}, resumed_at=20, end_pictures=True, is_done=True)
        again.write(20, {"loss/test": 0.25})
        again.close()
    assert len(paths.event_files()) == 2
    assert [step for step, _ in scalars(tmp_path, "loss/train")] == [10, 20]
    assert scalars(tmp_path, "loss/test") == [(20, 0.25)]
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["images"] == ["mistakes/test"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "result.json", "metrics.jsonl", *(path.name for path in paths.event_files())
    }  # fmt: skip


def test_a_file_that_ends_in_the_middle_of_an_event_is_read_until_there(tmp_path: Path) -> None:
    first = Writer(tmp_path, {}, {})
    for step in (1, 2):
        first.write(step, {"loss/train": 0.5})
    first.close(complete=False)
    (file,) = RunPaths(tmp_path).event_files()
    file.write_bytes(file.read_bytes()[:-3])
    steps = [event.step for event, _ in events.records([file]) if event.summary.value]
    assert steps[-1] == 1
