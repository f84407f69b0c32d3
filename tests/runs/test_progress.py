"""The terminal's view of a run: what fits, and what stays."""

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from expt.features import Anything, Classes, Columns, Feature, Features, Image, Tokens
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, create_result, update_result
from expt.runs.view import progress
from expt.runs.view.progress import (
    MAX_LAST_BYTES,
    Printed,
    RunDisplay,
    RunState,
    describe_data,
    watched,
)
from expt.runs.view.summary import print_summary
from expt.runs.view.text import Console, shown_path
from tests.facade import Capture, Patch, record_points

RUNNING = {"running/loss": 1.25, "running/accuracy": 0.625, "speed/running_samples_per_s": 54321.0}
OF_EPOCH = {"loss/train": 1.5, "accuracy/train": 0.5, "speed/samples_per_s": 12345.0}
OF_EPOCH["speed/epoch_s"] = 2.0
EVALUATED = {"loss/val": 2.0, "accuracy/val": 0.25}


def shown(folder: Path, width: int, step: int, *, terminal: bool = True) -> str:
    """What is on the screen when the display ends, the run being at `step` of 4000."""
    paths = RunPaths(folder)
    create_result(paths, may_exist=True, total_steps=4000)
    paths.metrics.unlink(missing_ok=True)
    ended = {**OF_EPOCH, **EVALUATED, "best/accuracy/val": 0.25}
    if step > 100:  # an epoch has ended before
        record_points(paths, (100, 11, ended))
    record_points(paths, (step, 12, RUNNING))
    if step == 4000:
        tested = {"loss/test": 3.0, "accuracy/test": 0.125}
        record_points(paths, (step, 12, ended), (step, 12, tested))
    out = io.StringIO()
    with RunDisplay(
        paths, Console(file=out, force_terminal=terminal, width=width), epochs=200
    ) as display:
        display.update()
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 59, 80, 200])
def test_the_progress_is_whole_in_any_terminal(tmp_path: Path, width: int) -> None:
    """In a narrow one its numbers are wrapped."""
    plain = re.sub(r"\x1b\[[?\d;]*\w", "", shown(tmp_path, width, 240))
    words = plain.rpartition("epoch 12/200")[2].split()
    assert {"240/4000", "loss", "acc", "img/s"} <= {*words}
    assert "val" not in words, "which is of the epoch before"
    assert "…" not in plain


def test_in_a_file_it_is_lines_without_colour(tmp_path: Path) -> None:
    text = shown(tmp_path, 60, 4000, terminal=False)
    assert text.splitlines() == [
        "epoch 11/200  step 100/4000  loss 1.5000  acc 0.5000  val 0.2500  img/s 12,345  best",
        "epoch 12/200  step 4000/4000  loss 1.5000  acc 0.5000  val 0.2500  img/s 12,345",
    ]


def test_an_objective_that_is_no_column_is_shown_by_its_name() -> None:
    values = {**OF_EPOCH, **EVALUATED, "best/accuracy/val": 0.25}
    assert "val 0.2500" in progress.in_words(values)
    values = {**OF_EPOCH, **EVALUATED, "best/loss/val": 1.75}
    words = progress.in_words(values)
    assert {"accuracy/val 0.2500", "loss/val 2.0000"} <= {*words}
    without_metrics = {"loss/train": 1.5, "best/loss/val": 1.75, "loss/val": 2.0}
    assert progress.in_words(without_metrics) == ["loss 1.5000", "val 2.0000"]


@pytest.mark.parametrize("width", [44, 80])
def test_epochs_stay_as_lines_with_the_best_marked(tmp_path: Path, width: int) -> None:
    text = re.sub(r"\x1b\[[?\d;]*\w", "", shown(tmp_path, width, 4000))
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("epoch") and "val" in line and "/4000" not in line
    ]
    assert lines == [
        "epoch  11/200  loss 1.5000  acc 0.5000  val 0.2500  img/s 12,345  best",
        "epoch  12/200  loss 1.5000  acc 0.5000  val 0.2500  img/s 12,345",
    ]


def test_no_epoch_is_left_out_nor_told_twice(tmp_path: Path) -> None:
    """Tell every epoch, also if several end between two looks, or after a resume."""
    paths, out = RunPaths(tmp_path), io.StringIO()
    create_result(
        paths, total_steps=50, steps_per_epoch=10, resumed_from={"checkpoint": "x", "step": 10}
    )
    nan = {**OF_EPOCH, "accuracy/val": float("nan")}
    record_points(paths, *((10 * epoch, epoch, nan) for epoch in (1, 2, 3)))
    with RunDisplay(paths, Console(file=out, width=200), epochs=99) as display:
        display.update()
        before = out.getvalue()
        for step, epoch, value in ((40, 4, 0.5), (50, 5, 0.25)):
            record_points(paths, (step, epoch, {**OF_EPOCH, "accuracy/val": value}))
            record_points(paths, (step, epoch, {"best/accuracy/val": 0.5}))
        record_points(paths, (50, 5, {"accuracy/test": 0.125}))
    assert "epoch 2/5" in before
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert [(line[1], line[line.index("val") + 1], line[-1]) for line in lines] == [
        ("2/5", "nan", "12,345"),
        ("3/5", "nan", "12,345"),
        ("4/5", "0.5000", "best"),
        ("5/5", "0.2500", "12,345"),
    ]


def test_what_workers_print_is_told_with_the_rank(tmp_path: Path) -> None:
    paths, out = RunPaths(tmp_path), io.StringIO()
    for rank in (0, 1):
        paths.stdout(0, rank).parent.mkdir(parents=True)
        paths.stdout(0, rank).write_text("of an earlier attempt\n")
    with (
        RunDisplay(paths, Console(file=out), epochs=1) as display,
        paths.stdout(0, 1).open("a") as log,
    ):
        display.update()
        log.write("here [bold] I am\nand \x1b[2Jno end")
    expected = ["[rank 1] here [bold] I am", "[rank 1] and \\x1b[2Jno end"]
    assert out.getvalue().splitlines() == expected


def test_worker_warning_is_told_once(tmp_path: Path, capsys: Capture) -> None:
    paths, out = RunPaths(tmp_path), io.StringIO()
    for rank in (0, 1):
        paths.stderr(0, rank).parent.mkdir(parents=True)
        paths.stderr(0, rank).write_text("warning: of an earlier attempt\n")
    with RunDisplay(paths, Console(file=out), epochs=1) as display:
        display.update()
        for rank in (1, 0):
            with paths.stderr(0, rank).open("a") as log:
                log.write(
                    "UserWarning: not ours\nwarning: 20 outputs \x1b[2J\n" + "x" * MAX_LAST_BYTES
                )
    assert out.getvalue() == ""
    assert capsys.readouterr().err == "warning: [rank 0] 20 outputs \\x1b[2J\n"


def test_who_prints_without_end_is_cut_short_at_the_end(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.stdout(0, 1).parent.mkdir(parents=True)
    printed = Printed(paths)
    paths.stdout(0, 1).write_text("x" * (MAX_LAST_BYTES + 1))
    assert list(printed.new(last=True))[1:] == [(1, f"... more in {paths.stdout(0, 1)}")]


def test_time_left_follows_this_attempts_speed(tmp_path: Path, monkeypatch: Patch) -> None:
    """And no longer than the minutes that training may take, over all attempts."""
    now = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    paths, state = RunPaths(tmp_path), RunState(RunPaths(tmp_path), epochs=4)
    resumed_from: Any = {"checkpoint": "x", "step": 1000}
    create_result(paths, resumed_from=resumed_from, config={"max_minutes": 10})
    record_points(paths, (1000, 10, {"loss/train": 1.0, "speed/epoch_s": 580.0}))
    state.read()
    assert (state.total_steps, state.left_s) == (0, None), "the worker has not said yet"
    update_result(paths, total_steps=1040, steps_per_epoch=100)
    record_points(paths, (1010, 11, {"running/loss": 1.0}))
    state.read()
    assert (state.epoch, state.epochs, state.total_steps) == (11, 11, 1040)
    now[0] = 55.0
    assert state.left_s is None, "one look says no speed"
    record_points(paths, (1020, 11, {"running/loss": 1.0}))
    state.read()
    assert state.left_s == 10.0
    now[0] = 62.0
    assert state.left_s == 8.0, "of ten minutes 580 s and 12 s are over"
    record_points(paths, (1040, 11, {"loss/train": 0.5}))
    state.read()
    assert (state.values["loss/train"], state.left_s) == (0.5, None), "it is done"


@pytest.mark.parametrize("plain_line_s", [progress.PLAIN_LINE_S, -1.0])
def test_printed_every_n_steps(plain_line_s: float, tmp_path: Path, monkeypatch: Patch) -> None:
    """And no step twice, where an evaluation or the time that has passed made a line due, too."""
    monkeypatch.setattr(progress, "PLAIN_LINE_S", plain_line_s)
    paths = RunPaths(tmp_path)
    create_result(paths, total_steps=90, steps_per_epoch=30)
    loss = {step: {"running/loss": step / 10} for step in (5, 10, 15, 20, 30)}
    record_points(
        paths,
        *((step, 1, loss[step]) for step in (5, 10)),
        (10, 1, {**EVALUATED, "best/accuracy/val": 0.25}),
        *((step, 1, loss[step]) for step in (15, 20, 30)),
        (30, 1, {**OF_EPOCH, "loss/train": 0.75}),
        (30, 1, {"best/accuracy/val": 0.25}),
        (40, 2, {"running/loss": 4.0}),
    )
    out = io.StringIO()
    with RunDisplay(paths, Console(file=out), epochs=4, print_every=10) as display:
        display.update()
    assert out.getvalue().splitlines() == [
        "epoch 1/3  step 10/90  loss 1.0000  val 0.2500  best",
        "epoch 1/3  step 20/90  loss 2.0000",
        "epoch 1/3  step 30/90  loss 0.7500  acc 0.5000  img/s 12,345",
        "epoch 2/3  step 40/90  loss 4.0000",
    ]


def test_without_a_terminal_each_number_is_shown_once(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_S", -1.0)
    monkeypatch.setattr(progress, "REFRESH_S", -1.0)
    paths, out = RunPaths(tmp_path), io.StringIO()
    create_result(paths, total_steps=200, steps_per_epoch=100)
    speed = "speed/running_samples_per_s"
    steps = {49: {speed: 1.0}, 50: {"running/loss": 4.0, speed: 2.0}, 53: {speed: 3.0}}
    steps |= {56: {**EVALUATED, "best/accuracy/val": 0.5}, 57: {speed: 4.0}}
    with RunDisplay(paths, Console(file=out, width=99), epochs=4) as display:
        for step, values in steps.items():
            record_points(paths, (step, 1, values))
            display.update()
    lines = [
        line.partition("/200  ")[2].partition("  0")[0] for line in out.getvalue().splitlines()
    ]
    assert lines == ["img/s 1", "loss 4.0000  img/s 2", "img/s 3", "val 0.2500", "img/s 4"]


def test_a_look_between_an_evaluation_and_its_best(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_S", -1.0)
    monkeypatch.setattr(progress, "REFRESH_S", -1.0)
    paths, out = RunPaths(tmp_path), io.StringIO()
    create_result(paths, total_steps=100, steps_per_epoch=100)
    with RunDisplay(paths, Console(file=out, width=99), epochs=1) as display:
        for values in (RUNNING, OF_EPOCH, EVALUATED, {"best/accuracy/val": 0.25}):
            record_points(paths, (100, 1, values))
            display.update()
    assert [line.endswith("best") for line in out.getvalue().splitlines()] == [False, True]


def test_plain_output_tells_each_step(tmp_path: Path, monkeypatch: Patch) -> None:
    now, out, paths = [0.0], io.StringIO(), RunPaths(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    create_result(paths, total_steps=200, steps_per_epoch=100)
    with RunDisplay(paths, Console(file=out, width=99), epochs=4) as display:
        for step in (1, 2, 3):
            record_points(paths, (step, 1, {"speed/running_samples_per_s": step}))
            for _ in range(7):
                now[0] += 1
                display.update()
    steps = [line.split()[3] for line in out.getvalue().splitlines()]
    assert steps == ["1/200", "2/200", "3/200"], "at seconds 7, 14 and 21"


def summary_of(paths: RunPaths) -> str:
    out = io.StringIO()
    print_summary(Console(file=out, width=200), paths)
    return out.getvalue()


def summary(paths: RunPaths) -> list[list[str]]:
    return [line.split() for line in summary_of(paths).splitlines()]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_metric_that_is_nan_next_to_a_loss_is_explained(
    value: float | None, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path)
    create_result(paths, config={"task": {"name": "regression"}, "epochs": 1})
    metrics: Any = {"loss/val": 0.5, "rmse/val": 0.7, "r2/val": value, "loss/test": 0.5}
    update_result(paths, status=COMPLETED, metrics={**metrics, "r2/test": 0.5})
    (line,) = [line for line in summary_of(paths).splitlines() if line.startswith("nan ")]
    assert "r2/val: " in line
    assert "test" not in line
    for ordinary in ({**metrics, "r2/val": 0.5}, {**metrics, "loss/val": value}):
        update_result(paths, metrics=ordinary)
        lines = summary_of(paths).splitlines()
        assert not [line for line in lines if line.startswith("nan ")], "that is said elsewhere"


def test_summary_has_numbers_and_next_steps(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/bin/expt"])
    paths = RunPaths(tmp_path / "outputs" / "my day" / "run")
    config = {"task": {"name": "classification"}}
    create_result(paths, world_size=2, devices=[], config=config)
    metrics = {"loss/train": 0.5, "accuracy/train": 0.75, "loss/test": 0.25, "accuracy/test": 1.0}
    best: Any = {"metric": "accuracy/val", "value": 0.875, "epoch": 1}
    update_result(paths, status=COMPLETED, metrics=metrics, best=best)
    update_result(paths, epoch_s=[1.5, 2.0], samples_per_s=1234.5)
    assert summary(paths) == [
        ["loss", "accuracy", "of", "epoch"],
        ["train", "0.5000", "0.7500", "2,", "the", "last"],
        ["test", "0.2500", "1.0000", "1,", "the", "best"],
        ["trained", *["3.5", "s", "by", "2", "workers", "on", "the", "CPU,", "1,234", "images/s"]],
        ["best", "accuracy/val", "0.8750", "in", "epoch", "1"],
        ["run", "folder", "outputs/my", "day/run"],
        ["look", "at", "it", "tensorboard", "--logdir", "'outputs/my", "day'"],
        ["compare", "expt", "report"],
    ]
    head, train, *_ = summary_of(paths).splitlines()
    assert head.index("accuracy") + len("accuracy") == train.index("0.7500") + len("0.7500")
    assert shown_path(Path("/elsewhere")) == "/elsewhere"
    (tmp_path / "outputs" / "my day" / "photos").mkdir()
    assert summary(paths)[-2][-1] == "day/run'", "not where other things lie"


def test_summary_says_that_nothing_was_trained(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    create_result(paths, steps=40, resumed_from={"checkpoint": "last.safetensors", "step": 20})
    assert summary(paths)[0][:1] != ["nothing"]
    update_result(paths, resumed_from={"checkpoint": "last.safetensors", "step": 40})
    assert summary(paths)[0][:4] == ["nothing", "was", "left", "to"]
    assert "40," in summary(paths)[0]


def test_a_run_that_is_over_before_the_first_look_is_told(tmp_path: Path) -> None:
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = RunDisplay(paths, Console(file=out, width=200), epochs=1)
    with watched(display):
        create_result(paths, total_steps=20, steps_per_epoch=20)
        record_points(paths, (20, 1, {**OF_EPOCH, **EVALUATED}))
    assert out.getvalue().startswith("epoch 1/1  step 20/20  loss 1.5000")


def test_of_a_run_that_was_refused_nothing_is_told(tmp_path: Path) -> None:
    paths, out = RunPaths(tmp_path), io.StringIO()
    create_result(paths, total_steps=10)
    record_points(paths, (10, 1, {**OF_EPOCH, "accuracy/val": 0.5, "best/accuracy/val": 0.5}))
    with RunDisplay(paths, Console(file=out), epochs=1):
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("inputs", "label", "noun"),
    [
        (Image(channels=3, image_size=(32, 32)), "img/s", "images"),
        (Columns(names=("a",), width=1), "rows/s", "rows"),
        (Tokens(vocab_size=256, context=9), "windows/s", "windows"),
        (Anything(), "samples/s", "samples"),
    ],
)
def test_names_of_samples(inputs: Feature, label: str, noun: str, tmp_path: Path) -> None:
    paths, out = RunPaths(tmp_path), io.StringIO()
    create_result(paths, total_steps=30, data=Features(inputs, Anything()).record)
    record_points(paths, (20, 1, RUNNING))
    with RunDisplay(paths, Console(file=out, width=100), epochs=3, print_every=20) as display:
        display.update()
    update_result(paths, status=COMPLETED, samples_per_s=1234.0)
    print_summary(Console(file=out, width=100), paths)
    assert f"acc 0.6250  {label} 54,321" in out.getvalue()
    assert f"1,234 {noun}/s" in out.getvalue()


def test_a_run_says_first_what_it_has_found() -> None:
    sizes = {"train_size": 4380, "val_size": 48, "test_size": 120}
    told = Features(Image(channels=1, image_size=(8, 8)), Classes(names=(*"abcd",))).record
    assert describe_data({**sizes, **told}) == ["4,380 train, 48 val, 120 test; 4 classes"]
    (uneven,) = describe_data({**sizes, **told, "majority": ["a", 0.915]})
    assert uneven.endswith("4 classes, 91.5% of train are a")
    assert describe_data({**sizes, "test_size": 0}) == ["4,380 train, 48 val"]
    of_stream = describe_data({"train_size": 4380, "val_size": None, "is_uncounted": True})
    assert of_stream == ["4,380 train in an epoch (a stream)"]
    assert describe_data({}) == [""]
