"""Numbers by evaluation: as records, as a table of pandas, as curves of matplotlib."""

from __future__ import annotations

import base64
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, overload

from expt.config.kinds import metrics_of
from expt.errors import ConfigError, did_you_mean, require
from expt.runs.found import FoundRun
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import Record, evaluated_tag, read_result
from expt.runs.view.listing import best_first
from expt.runs.view.settings import rows_in_order
from expt.runs.view.text import setting, shown_path

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from pandas import DataFrame

PANELS = 4
"""The largest number of metrics that are drawn."""
_LEGEND = 24
"""The largest number of runs or settings that a legend names."""
_CYCLE = 10
"""The number of colours that matplotlib has without a map."""
_STYLES = {"train": "--", "val": "-", "test": "o"}
_ALONE = {"train": "x", "val": "_", "test": "o"}
"""The marks of curves of a single point, where a line would not be seen."""
_LONGEST = 110
"""The longest name in a legend [characters]."""


class History(list[dict[str, float]]):
    """A run's epochs in order: each a dict of `epoch`, `step` and the last value of every tag.

    Of a run that is evaluated within epochs each is until an evaluation. `history["loss/val"]` is
    the curve of one tag: a value for each that has one.
    """

    @classmethod
    def of(cls, paths: RunPaths) -> History:
        """Read the history of a run; it is empty where nothing is measured yet."""
        rows, tag = cls(), evaluated_tag(read_result(paths))
        ends = True
        for point in MetricsReader(paths).read():
            if ends and (not rows or point.step > rows[-1]["step"]):
                rows.append({})
                ends = False
            rows[-1].update({"epoch": point.epoch, "step": point.step, point.tag: point.value})
            ends = ends or point.tag == tag
        return rows

    @overload  # type: ignore[override]
    def __getitem__(self, at: str) -> list[float]: ...
    @overload
    def __getitem__(self, at: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, str):
            return super().__getitem__(at)
        if at not in (tags := self.tags):
            raise KeyError(f"{at}: there is no such tag.{did_you_mean(at, tags)}")
        return [epoch[at] for epoch in self if at in epoch]

    @property
    def tags(self) -> list[str]:
        """Every tag that some epoch has."""
        return list(dict.fromkeys(tag for epoch in self for tag in epoch))

    def _ipython_key_completions_(self) -> list[str]:
        return self.tags

    def to_pandas(self) -> DataFrame:
        """Return a row for each epoch, a column for each tag. Raises ImportError without pandas."""
        from pandas import DataFrame

        return DataFrame(list(self), columns=self.tags)


def figure(
    record: Record, history: History, *, height: float = 3.2, panels: int = PANELS
) -> Figure:
    """Draw the loss and the task's metrics by epoch, the test at the epoch that it is of.

    Raises ConfigError without matplotlib.
    """
    metrics = list(metrics_of((record.get("config") or {}).get("task")))
    known = set(history.tags)
    drawn = [each for each in metrics if {f"{each}/train", f"{each}/val"} & known]
    drawn = drawn[:panels] or metrics[:1]
    figure_class: Any = _figure_class()

    class Curves(figure_class):  # type: ignore[misc]
        """A figure that shows itself in a notebook without %matplotlib inline."""

        def _repr_png_(self) -> bytes:
            return _png(self)

    drawing: Figure = Curves(figsize=(1.3 * height * len(drawn), height), layout="constrained")
    for axes, metric in zip(drawing.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        _draw(axes, metric, record, history)
    return drawing


def _draw(axes: Any, metric: str, record: Record, history: History) -> None:
    best = record.get("best")
    within = len({row["epoch"] for row in history}) < len(history)  # evaluated within epochs
    unit = "step" if within else "epoch"
    for split, style in _STYLES.items():
        tag = f"{metric}/{split}"
        points = [(row[unit], row[tag]) for row in history if tag in row]
        if len(points) == 1:
            style = "o-"
            if split == "test" and best:  # measured at the end, of the best epoch's weights
                points = [(best[unit], points[0][1])]  # type: ignore[literal-required]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=split, linewidth=1.3)
    axes.set(title=metric, xlabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)


def learning_curves(runs: Sequence[FoundRun], file: Path | io.BytesIO) -> Figure:
    """Draw and return the loss and the first metric of each run by step.

    The suffix of `file` is its format; in memory it is SVG. Raises ConfigError without matplotlib.
    """
    drawing: Figure = _figure_class()(figsize=(12, 4.5), dpi=120, layout="constrained")
    metrics = [*dict.fromkeys(("loss", best_first(runs)[0]))]
    drawn_in = drawing.subplots(1, len(metrics), squeeze=False)[0]
    panels = dict(zip(metrics, drawn_in, strict=True))
    names = _names(runs)
    colours = _colours([*dict.fromkeys(names)])
    drawn = dict[str, Any]()
    for name, run in zip(names, runs, strict=True):
        points = MetricsReader(run.paths).read()
        for metric, axes in panels.items():
            for split, style in _STYLES.items():
                tag = f"{metric}/{split}"
                curve = [(point.step, point.value) for point in points if point.tag == tag]
                how = {"color": colours[name], "linewidth": 1.2}
                if curve:
                    style = _ALONE[split] if len(curve) == 1 else style
                    (line,) = axes.plot(*zip(*curve, strict=True), style, **how)
                    drawn.setdefault(name, line)
    for metric, axes in panels.items():
        how_to_read = "dashed or x: train, line or bar: val, dot: test"
        axes.set(xlabel="step", title=f"{metric} ({how_to_read})")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        _leave_out_diverged(axes, falling=runs[0].is_higher_better(metric))
    if drawn:
        left = len(drawn) - _LEGEND
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "fontsize": 7}
        place["title"] = f"and {left} more" if left > 0 else None
        labels = [shorten(name, _LONGEST, placeholder="...") for name in drawn]
        legend = drawing.legend([*drawn.values()][:_LEGEND], labels[:_LEGEND], **place)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a setting may have dollars
    drawing.savefig(file, format=None if isinstance(file, Path) else "svg")
    return drawing


def _leave_out_diverged(axes: Any, *, falling: bool) -> None:
    """Limit a panel where some values are so far off that all others would be one line."""
    curves = [[y for y in map(float, line.get_ydata()) if math.isfinite(y)] for line in axes.lines]
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    sign = -1 if falling else 1
    values = [sign * y for curve in curves for y in curve]
    first, least = statistics.median(sign * curve[0] for curve in curves), min(values)
    reach = max(first - least, abs(first) / 10)
    if max(values) - least > 100 * reach > 0:
        axes.set(ylim=sorted((sign * (least - reach / 2), sign * (least + 5 * reach))))


def predicted_against_true(
    predicted: np.ndarray, true: np.ndarray, names: Sequence[str], file: io.BytesIO
) -> None:
    """Draw the predictions [n, T] of the first targets against the truth, as SVG.

    Raises ConfigError without matplotlib.
    """
    number = min(len(names), PANELS)
    drawing = _figure_class()(figsize=(3.6 * number, 3.6), dpi=120, layout="constrained")
    for place, axes in enumerate(drawing.subplots(1, number, squeeze=False)[0]):
        x, y = true[:, place], predicted[:, place]
        axes.plot(x, y, ".", markersize=4, alpha=0.4, rasterized=True)
        axes.axline((x[0], x[0]), slope=1, color="black", linewidth=0.8)
        axes.set(xlabel="true", ylabel="predicted")
        axes.set_title(names[place], parse_math=False)
        axes.grid(alpha=0.3)
    drawing.savefig(file, format="svg")


def _colours(names: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each name, no two of them equal."""
    from matplotlib import colormaps

    if len(names) <= _CYCLE:
        return {name: f"C{number}" for number, name in enumerate(names)}
    every = colormaps["turbo"].resampled(len(names))
    return {name: every(number) for number, name in enumerate(names)}


def _names(runs: Sequence[FoundRun]) -> list[str]:
    """Return the name of each run in a legend: its settings in a sweep, which its seeds share."""
    if len({run.folder.parent for run in runs}) > 1 or not is_sweep(runs[0].folder.parent):
        return [shown_path(run.folder) for run in runs]
    settings = rows_in_order(runs)
    if len(settings) == 1:  # then seeds and folds tell them apart
        return [run.folder.name for run in runs]
    found = {
        run.folder: ", ".join(f"{key}={setting(value)}" for key, value in row.settings.items())
        for row in settings
        for run in row.runs
    }
    return [found[run.folder] or run.folder.name for run in runs]


def refuse_undrawable(option: str, file: Path) -> None:
    """Raise ConfigError without matplotlib, or for a format that it does not write."""
    known = ", ".join(sorted(_figure_class()().canvas.get_supported_filetypes()))
    if file.suffix[1:] not in known.split(", "):
        raise ConfigError(f"{option} {file}: its suffix is none of {known}")


def _figure_class() -> Any:
    require("curves", "matplotlib", extra="plot")
    from matplotlib.figure import Figure

    return Figure


def _png(drawing: Any) -> bytes:
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=90)
    return file.getvalue()


def in_html(record: Record, history: History) -> str:
    """Return the curves for a notebook; nothing for a run of one epoch, or without matplotlib."""
    if len(history) < 2:
        return ""
    try:
        drawing = figure(record, history, height=2.4, panels=2)
    except ConfigError:
        return ""
    data = base64.b64encode(_png(drawing)).decode()
    return f"<img alt='learning curves' src='data:image/png;base64,{data}'>"
