"""The terminal's view of a run: what fits, and what stays."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.runs.view.progress import RunDisplay

VALUES = {"loss/train": 1.5, "accuracy/train": 0.5, "speed/samples_per_s": 12345.0, "accuracy/val": 0.25}


def shown(folder: Path, width: int, step: int, *, terminal: bool = True) -> str:
    """What is on the screen when the display ends, the run being at `step` of 4000."""
    paths = RunPaths(folder)
    create_result(paths, may_exist=True, total_steps=4000)
    paths.metrics.unlink(missing_ok=True)
    writer = MetricsWriter(paths)
    writer.write(step, 12, VALUES)
    writer.close()
    out = io.StringIO()
    with RunDisplay(paths, Console(file=out, force_terminal=terminal, width=width), epochs=200):
        pass
    return out.getvalue()


@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [
        (60, ("loss", "val"), ("acc", "img/s")),
        (80, ("loss", "val", "acc"), ("img/s",)),
        (140, ("loss", "val", "acc", "img/s"), ()),
        (200, ("loss", "val", "acc", "img/s"), ()),
    ],
)
def test_the_progress_line_fits(tmp_path: Path, width: int, there: tuple[str, ...], left_out: tuple[str, ...]) -> None:
    (*_, line) = (line for line in shown(tmp_path, width, 240).splitlines() if "epoch 12/200" in line)
    words = line.split()
    assert {*there, "left"} <= set(words)
    assert not {*left_out} & set(words)
    assert "240/4000" in line
    assert "…" not in line


def test_the_line_of_a_run_that_is_done_gives_way_to_its_summary(tmp_path: Path) -> None:
    erase_line = "\x1b[2K"
    assert shown(tmp_path, 80, 4000).endswith(erase_line)
    assert not shown(tmp_path, 80, 240).endswith(erase_line)


def test_in_a_file_it_is_lines_without_colour(tmp_path: Path) -> None:
    text = shown(tmp_path, 60, 4000, terminal=False)
    assert text == "epoch 12/200  step 4000/4000  loss 1.5000  acc 0.5000  val 0.2500  img/s 12,345\n"
