"""What TensorBoard shows of a run: curves, pictures, norms, the model; and when each is due."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from expt.dashboards.events import Writer
from expt.dashboards.layers import LayerValues, parameter_table
from expt.dashboards.pictures import Review, whole
from expt.dashboards.run_pictures import RunPictures
from expt.data.loading import Batch
from expt.runs import tags
from expt.training.callback import Observer
from expt.training.learner import Learner, Position

SHARE = 0.01
"""Of the time of training: what pictures may take where they are not asked for."""
FIRST_S = 0.1
"""What the first pictures, or the graph, are taken to cost until they have been seen [seconds]."""


class Dashboard(Observer):
    """One worker's part of it; only rank 0, which has the event file, draws."""

    def __init__(
        self,
        events: Writer | None,
        learner: Learner,
        position: Position,
        pictures: RunPictures | None,
        *,
        example: Any,
        images: bool | Literal["end", "spare"],
        graph: bool | Literal["auto"],
        norms: bool,
        histograms: bool,
    ) -> None:
        self._events, self._learner, self._position, self._example = (
            events,
            learner,
            position,
            example,
        )
        self._pictures, self._images = pictures, images
        self._layers: LayerValues | None = None
        if (events or learner.shards > 1) and (norms or histograms):
            self._layers = LayerValues(learner, norms=norms, histograms=histograms)
        self._graph, self._graph_due, self._table_due = (
            graph,
            graph is not False and learner.shards == 1,
            True,
        )
        self.spent_s = self._trained_s = 0.0
        self._pictures_s, self._epoch_began = FIRST_S, time.perf_counter()
        self._reviews = False
        self._review: Review | None = None

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The run's first batch is kept for its picture."""
        self._epoch_began = time.perf_counter()
        keeps = self._events and self._images and not self._position.step
        return self._pictures.keep_first(batches) if self._pictures and keeps else batches

    def before_update(self) -> None:
        """The gradients of the epoch's last step are noted."""
        if self._layers and self._position.steps_left_in_epoch == 1:
            with self._timed():
                self._layers.note_gradients()

    def wants_review(self) -> bool:
        """Pictures of the coming evaluation are drawn where they are asked for, or can be spared."""
        self._trained_s += time.perf_counter() - self._epoch_began
        if self._images is False or not self._events:
            return False
        at_end = self._images == "end" and self._position.is_run_done
        return self._images is True or at_end or self._can_spare(self._pictures_s)

    def _can_spare(self, seconds: float) -> bool:
        return self.spent_s + seconds <= SHARE * self._trained_s

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - began

    def end_epoch(self, *, review: bool) -> None:
        """Norms, histograms and the model are shown."""
        self._reviews = review
        with self._timed():
            if self._layers:
                self._layers.show(self._events, self._position.step)
        if not self._events:
            return
        with self._timed():
            if self._table_due:
                table = parameter_table(self._learner.module)
                self._events.text(tags.PARAMETERS, table, self._position.step)
                self._table_due = False
        if self._graph_due and (
            self._graph is True or self._can_spare(2 * FIRST_S + self._pictures_s)
        ):
            with self._timed():
                self._show_graph(self._events)
        self._events.flush()

    def review(self) -> Review | None:
        """Counts what the model gets wrong, on every rank, where pictures of it are due."""
        self._review = self._pictures.review() if self._pictures and self._reviews else None
        return self._review

    def end_evaluation(self, split: str) -> None:
        """Draws what the review has seen, a collective; lets TensorBoard see all of it."""
        if self._pictures and self._review is not None:
            before = self.spent_s
            with self._timed():
                self._pictures.draw(self._review, split, self._events, self._position.step)
            self._pictures_s = self.spent_s - before
        if self._events:
            self._events.flush()

    def values(self, values: Mapping[str, float]) -> None:
        """Points of curves."""
        if self._events:
            self._events.write(self._position.step, values)

    def picture(self, tag: str, image: torch.Tensor) -> None:
        """As it is, in the IMAGES tab."""
        if self._events:
            self._events.picture(tag, whole(image.numpy()), self._position.step)

    def close(self, *, complete: bool) -> None:
        """The event file is closed; the HPARAMS tab then says whether the run is complete."""
        if self._events:
            self._events.close(complete=complete)

    def _show_graph(self, events: Writer) -> None:
        module = self._learner.module
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        modes = {part: part.training for part in module.modules()}
        halved = any(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
        with self._learner.precision.autocast() if halved else contextlib.nullcontext():
            self._trace(events, module, modes, device)
        self._graph_due = False

    def _trace(
        self,
        events: Writer,
        module: torch.nn.Module,
        modes: Mapping[torch.nn.Module, bool],
        device: torch.device,
    ) -> None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            try:
                module.eval()
                events.graph(module, self._example)
            except Exception as error:  # a model that cannot be traced can be trained all the same
                problem = f"could not be traced: {type(error).__name__}: {error}"
                events.text(tags.GRAPH_ERROR, problem, self._position.step)
            finally:
                for part, training in modes.items():
                    part.training = training
