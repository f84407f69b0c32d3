"""One run's numbers by epoch: as records, as a table of pandas, as curves of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from expt.config.tasks import metrics_of
from expt.errors import ConfigError, did_you_mean
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

PANELS = 4
"""Metrics that have a panel each; of more the first."""


class History(list[dict[str, float]]):
    """A run's epochs in order: each a dict of `epoch`, `step` and the last value of every tag in
    it.

    `history["loss/val"]` is the curve of one tag: a value for each epoch that has one.
    """

    @classmethod
    def of(cls, paths: RunPaths) -> History:
        """That of the run of these files; empty where it has not measured anything yet."""
        epochs: dict[int, dict[str, float]] = {}
        for point in MetricsReader(paths).read():
            epochs.setdefault(point.epoch, {"epoch": point.epoch}).update(
                {"step": point.step, point.tag: point.value}
            )
        return cls(epochs[number] for number in sorted(epochs))

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
        """A row for each epoch, a column for each tag. Raises ImportError without pandas."""
        from pandas import DataFrame

        return DataFrame(list(self), columns=self.tags)


def figure(
    record: Record, history: History, *, height: float = 3.2, panels: int = PANELS
) -> Figure:
    """The loss and the task's metrics by epoch: train dashed, val a line, test a dot at the epoch
    that it is of.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "to draw curves needs matplotlib; install it with pip install 'expt[plot]'"
        ) from None
    metrics = list(metrics_of((record.get("config") or {}).get("task")))
    drawn = [
        metric
        for metric in metrics
        if any(f"{metric}/{split}" in history.tags for split in ("train", "val"))
    ]
    drawn = drawn[:panels] or metrics[:1]
    drawing: Figure = _shown_by_notebooks(Figure)(
        figsize=(1.3 * height * len(drawn), height), layout="constrained"
    )
    for axes, metric in zip(drawing.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        _draw(axes, metric, record, history)
    return drawing


def _draw(axes: Any, metric: str, record: Record, history: Sequence[dict[str, float]]) -> None:
    best = record.get("best")
    for split, style in (("train", "--"), ("val", "-"), ("test", "o")):
        points = [
            (epoch["epoch"], epoch[f"{metric}/{split}"])
            for epoch in history
            if f"{metric}/{split}" in epoch
        ]
        if (
            len(points) == 1 and split == "test" and best
        ):  # measured at the end, of the best epoch's weights
            points = [(best["epoch"], points[0][1])]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o-" if len(points) == 1 else style,
                label=split,
                linewidth=1.3,
            )
    axes.set(title=metric, xlabel="epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)


def _shown_by_notebooks(figure_class: Any) -> Any:
    """The class of a figure that shows itself in a notebook where nobody has said %matplotlib
    inline.
    """

    class Curves(figure_class):  # type: ignore[misc]
        """matplotlib's Figure."""

        def _repr_png_(self) -> bytes:
            return png(self)

    return Curves


def png(drawing: Any) -> bytes:
    """A figure as a picture."""
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=90)
    return file.getvalue()
