"""Learning curves of several runs in one figure, with matplotlib, which only this needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from expt.errors import ConfigError
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.runs.view.progress import shown_path
from expt.runs.view.query import best_first

_LEGEND = 12
"""Runs that a legend can name without hiding the curves."""


def learning_curves(folders: Sequence[Path], file: Path) -> None:
    """Draw the loss and the first metric of each run, train dashed; the suffix of `file` is its
    format.

    Raises ConfigError without matplotlib, or for a format that it does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"{file}: needs matplotlib; install it with pip install 'expt[plot]'"
        ) from None
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    metric = best_first(read_result(RunPaths(folder)) for folder in folders)[0]
    panels = dict(zip(("loss", metric), figure.subplots(1, 2), strict=False))
    for number, folder in enumerate(folders):
        points = MetricsReader(RunPaths(folder)).read()
        for metric, axes in panels.items():
            for split, style in (("train", "--"), ("val", "-"), ("test", "o")):
                curve = [
                    (point.step, point.value)
                    for point in points
                    if point.tag == f"{metric}/{split}"
                ]
                name = shown_path(folder) if split == "train" else None
                if curve:
                    axes.plot(
                        *zip(*curve, strict=True),
                        style,
                        color=f"C{number % 10}",
                        label=name,
                        linewidth=1.2,
                    )
    for metric, axes in panels.items():
        axes.set(xlabel="step", title=f"{metric} (dashed: train, line: val, dot: test)")
        axes.grid(alpha=0.3)
    if len(folders) <= _LEGEND and panels[metric].lines:
        panels[metric].legend(fontsize=7)
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from None
