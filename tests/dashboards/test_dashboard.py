"""When pictures are drawn: as often as a hundredth of the time of training allows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from expt.config.schema import TensorBoard
from expt.dashboards import events, tensorboard
from expt.dashboards.events import Writer, writer
from expt.dashboards.pictures import RunPictures
from expt.dashboards.tensorboard import Dashboard, LayerValues
from expt.runs.paths import RunPaths
from expt.runs.tags import GRADIENT_NORM, WEIGHT_NORM
from expt.training.learner import Position
from tests.dashboards.folders import measure, record
from tests.facade import Patch
from tests.training.test_loop import CLASSES, learner, plain


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class SlowPictures(RunPictures):
    """Are drawn in `seconds`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([str(label) for label in range(CLASSES)], mean=[0.0] * 2, std=[1.0] * 2)
        self._clock, self.seconds, self.drawn = clock, 0.5, list[str]()

    def draw(self, review: Any, split: str, events: Writer | None, step: int) -> None:
        self.drawn.append(split)
        self._clock.now += self.seconds


class Watched:
    """A run of epochs of which only the clock knows, under a dashboard."""

    def __init__(self, folder: Path, clock: Clock, *, rank_0: bool = True, **options: Any) -> None:
        self.clock, self.pictures = clock, SlowPictures(clock)
        self.position = Position(steps_per_epoch=10, total_steps=100)
        self.events = Writer(folder, {}, {}) if rank_0 else None
        off: dict[str, Any] = dict.fromkeys(("norms", "histograms", "health"), False)
        self.dashboard = Dashboard(
            self.events,
            learner(plain()),
            self.position,
            self.pictures,
            settings=TensorBoard(**{**off, "images": "spare", **options}),
        )

    def epoch(self, seconds: float, *, may_end: bool = False, ends: bool = False) -> bool:
        """Train for so long, then evaluate; returns whether pictures of that were drawn."""
        before = len(self.pictures.drawn)
        self.dashboard.watch(iter(()))
        self.clock.now += seconds
        self.position.step += 10
        wish = self.dashboard.wants_review()
        self.dashboard.end_epoch()
        self.dashboard.expect_evaluation(review=wish, may_end=may_end)
        self.dashboard.review()
        self.dashboard.end_evaluation("val", is_last=ends)
        return len(self.pictures.drawn) > before


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: Patch) -> Iterator[Watch]:
    """`watch(images="end")` begins a run under a dashboard with these options."""
    clock, begun = Clock(), list[Watched]()
    monkeypatch.setattr(tensorboard, "time", clock)

    def begin(**options: Any) -> Watched:
        begun.append(Watched(tmp_path, clock, **options))
        return begun[-1]

    yield begin
    for watched in begun:
        watched.dashboard.close(complete=False)


@pytest.mark.parametrize("images", ["spare", "end"])
def test_pictures_take_a_hundredth_of_the_training(watch: Watch, images: str) -> None:
    run = watch(images=images)
    assert not run.epoch(9.9), "the first are taken to cost 0.1 s"
    assert run.epoch(0.2)
    assert run.dashboard.spent_s == pytest.approx(0.5)
    assert not run.epoch(89.8), "0.5 s are spent, and as much would be added"
    assert run.epoch(0.2)
    run.pictures.seconds = 0.0
    assert not run.epoch(0.0)
    assert run.epoch(50.0)
    assert run.epoch(0.0), "those before have cost nothing"


def test_pictures_that_are_asked_for_are_drawn_and_those_that_are_not_never(watch: Watch) -> None:
    assert [run.epoch(0.0) for run in [watch(images=True)] for _ in range(2)] == [True, True]
    assert not watch(images=False).epoch(1e6)
    assert not watch(images=True, rank_0=False).epoch(1e6), "rank 0 alone draws"
    at_end = watch(images="end")
    assert not at_end.epoch(0.0)
    assert not at_end.epoch(0.0, may_end=True), "it might have been the last"
    assert at_end.epoch(0.0, may_end=True, ends=True)
    assert not watch(images="spare").epoch(0.0, may_end=True, ends=True)


def test_all_ranks_look_on_where_rank_0_wishes(watch: Watch) -> None:
    other = watch(rank_0=False)
    for wish in (True, False):
        other.dashboard.expect_evaluation(review=wish)
        assert (other.dashboard.review() is not None) == wish


def test_layers_that_are_updated_apart_have_norms(tmp_path: Path) -> None:
    """The phases of a GAN do that; a layer that is not used has norms of its weights."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    settings = TensorBoard(images=False, norms=True, histograms=False, health=False)
    values, events = LayerValues(learner(module), settings), Writer(tmp_path, {}, {})
    for used in (0, 1):
        module.zero_grad()
        module[used](torch.ones(1, 2 + used)).sum().backward()
        values.note_gradients()
    values.show(events, 3)
    events.close(complete=False)
    expected = {f"{WEIGHT_NORM}/{layer}" for layer in range(3)}
    expected |= {f"{GRADIENT_NORM}/{layer}" for layer in range(2)}
    assert {*EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]} == expected
    ((step, norm),) = scalars(tmp_path, f"{GRADIENT_NORM}/0")
    assert step == 3
    assert norm == pytest.approx(9**0.5), "of three outputs, each of two inputs and a bias"


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
