"""What TensorBoard shows beside curves: pictures, norms, the model, the ranks' health; and when each is due."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from expt.config.schema import RunConfig
from expt.data.build import DataInfo
from expt.data.loading import Batch
from expt.runs import tags
from expt.tensorboard import norms, pictures
from expt.tensorboard.events import Writer
from expt.tensorboard.log import Log
from expt.tensorboard.mistakes import Mistakes, Review, worst_of
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position

SHARE = 0.01
"""Of the time of training: what pictures may take where they are not asked for."""
FIRST_S = 0.1
"""What the first pictures, or the graph, are taken to cost until they have been seen [seconds]."""
TRAIN_IMAGES, MISTAKES = 16, 16


class Dashboard:
    """One worker's part of it; only rank 0, which has the event file, draws."""

    def __init__(
        self,
        config: RunConfig,
        info: DataInfo,
        learner: Learner,
        worker: Worker,
        *,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        steps: tuple[int, int],
    ) -> None:
        wanted = self._wanted = config.tensorboard
        self._info, self._learner, self._worker = info, learner, worker
        self._steps_per_epoch, self._total_steps = steps
        channels = info.channels
        self._mean = torch.tensor(mean or [0.0] * channels).view(-1, 1, 1)
        self._std = torch.tensor(std or [1.0] * channels).view(-1, 1, 1)
        self._layers = norms.layers(learner.module) if worker.rank == 0 and (wanted.norms or wanted.histograms) else {}
        self._gradient_norms: Tensor | None = None
        self._gradients: dict[str, Tensor] = {}
        self._first: Batch | None = None
        self._graph_due = (
            worker.rank == 0 and wanted.graph is not False and not (config.compile and wanted.graph == "auto")
        )
        self._table_due = worker.rank == 0
        self.trained_s = self.spent_s = 0.0
        """Seconds of training so far, and of all this."""
        self._last_s = FIRST_S
        self._began = time.perf_counter()
        self._position, self._until = Position(), 0

    def watch(self, batches: Iterator[Batch], position: Position) -> Iterator[Batch]:
        """The epoch's batches, the first of which is kept for its picture if it is the run's."""
        self._began, self._position = time.perf_counter(), position
        self._until = min(position.step - position.step_in_epoch + self._steps_per_epoch, self._total_steps)
        return batches if position.step or self._worker.rank or not self._wanted.images else self._keep_first(batches)

    def _keep_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in itertools.islice(batches, 1):
            few = batch.images[:TRAIN_IMAGES].clone(), batch.labels[:TRAIN_IMAGES].clone()
            self._first = Batch(*few, batch.global_size)
            yield batch
        yield from batches

    def before_update(self) -> None:
        """Note the gradients of the epoch's last step, before the optimiser drops them."""
        if not self._layers or self._position.step + 1 != self._until:
            return
        began = time.perf_counter()
        parameters = [parameter for own in self._layers.values() for _, parameter in own]
        if any(parameter.grad is None for parameter in parameters):
            return
        scale = self._learner.precision.scaler.get_scale()
        if self._wanted.norms:
            grads = [[p.grad for _, p in own if p.grad is not None] for own in self._layers.values()]
            self._gradient_norms = norms.norms(grads) / scale
        if self._wanted.histograms:
            named = itertools.chain.from_iterable(self._layers.values())
            self._gradients = {name: p.grad / scale for name, p in named if p.grad is not None}
        self.spent_s += time.perf_counter() - began

    def wants_pictures(self) -> bool:
        """Whether this rank wants pictures of the evaluation that follows the epoch that has just ended."""
        self.trained_s += time.perf_counter() - self._began
        wanted, final = self._wanted.images, self._position.step == self._total_steps
        if wanted is False or self._worker.rank:
            return False
        return wanted is True or (final and wanted == "end") or self._can_spare(self._last_s)

    def _can_spare(self, seconds: float) -> bool:
        return self.spent_s + seconds <= SHARE * self.trained_s

    def review(self) -> Review:
        """What is to observe the coming evaluation, on every rank alike."""
        return Review(self._info.num_classes, keep=MISTAKES)

    def draw(self, review: Review | None, split: str, log: Log | None, position: Position) -> None:
        """Add the pictures of an evaluation, a collective if there is a review; let TensorBoard see all of it."""
        if review is not None:
            self._draw(review, split, log.events if log else None, position.step)
        if log:
            log.flush()

    def _draw(self, review: Review, split: str, events: Writer | None, step: int) -> None:
        began = time.perf_counter()
        confusion = None if review.confusion is None else review.confusion.cpu()
        gathered = collectives.gather_across_workers((confusion, review.mistakes()))
        if events is not None:
            total = torch.stack([part for part, _ in gathered if part is not None]).sum(0)
            if self._first is not None:
                self._draw_first(events)
            if len(total) <= pictures.MOST_CLASSES:
                picture = pictures.confusion_matrix(total.numpy(), self._info.class_names)
                events.picture(tags.confusion(split), picture, step)
            worst = worst_of([mistakes for _, mistakes in gathered if mistakes is not None], MISTAKES)
            if worst is not None and len(worst.labels):
                self._draw_mistakes(worst, tags.mistakes(split), events, step)
        self._last_s = time.perf_counter() - began
        self.spent_s += self._last_s

    def _draw_first(self, events: Writer) -> None:
        """The first batch, as the model saw it after augmentation."""
        assert self._first is not None
        captions = [self._info.class_names[label] for label in self._first.labels.tolist() if label >= 0]
        images = self._visible(self._first.images.cpu())[: len(captions)]
        if captions:
            events.picture(tags.TRAIN_IMAGES, pictures.image_grid(images, captions), 1)
        self._first = None

    def _draw_mistakes(self, worst: Mistakes, tag: str, events: Writer, step: int) -> None:
        names = self._info.class_names
        numbers = zip(worst.predicted.tolist(), worst.probabilities.tolist(), worst.labels.tolist(), strict=True)
        captions = [f"{names[wrong]} {sure:.0%}\nis {names[right]}" for wrong, sure, right in numbers]
        events.picture(tag, pictures.image_grid(self._visible(worst.images), captions), step)

    def _visible(self, images: Tensor) -> pictures.Bytes:
        """Normalised images [N, C, H, W] as bytes [N, H, W, C]."""
        pixels = (images.float() * self._std + self._mean).clamp_(0, 1).mul_(255).round_().byte()
        array: pictures.Bytes = np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())
        return array

    def show(self, events: Writer, step: int) -> None:
        """After an epoch: norms, histograms and the model."""
        began = time.perf_counter()
        if self._gradient_norms is not None:
            weights = norms.norms([[p.detach() for _, p in own] for own in self._layers.values()])
            both = torch.stack([self._gradient_norms, weights]).tolist()
            for kind, values in zip((tags.GRADIENT_NORM, tags.WEIGHT_NORM), both, strict=True):
                named = (f"{kind}/{layer}" for layer in self._layers)
                events.write(step, dict(zip(named, values, strict=True)))
            self._gradient_norms = None
        if self._wanted.histograms:
            self._add_histograms(events, step)
        if self._table_due:
            events.text(tags.PARAMETERS, norms.parameter_table(self._learner.module), step)
            self._table_due = False
        self.spent_s += time.perf_counter() - began
        if self._graph_due and (self._wanted.graph is True or self._can_spare(2 * FIRST_S + self._last_s)):
            self._add_graph(events, step)

    def _add_histograms(self, events: Writer, step: int) -> None:
        for own in self._layers.values():
            for name, parameter in own:
                for kind, values in (("weights", parameter.detach()), ("gradients", self._gradients.get(name))):
                    if values is not None and bool(values.isfinite().all()):
                        events.histogram(f"{kind}/{name}", values, step)
        self._gradients = {}

    def _add_graph(self, events: Writer, step: int) -> None:
        began, module, device = time.perf_counter(), self._learner.module, self._worker.device
        images = torch.zeros(1, self._info.channels, *self._info.image_size, device=device)
        modes = {part: part.training for part in module.modules()}
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            try:
                module.eval()
                events.graph(module, images)
            except Exception as error:  # a model that cannot be traced can be trained all the same
                events.text(tags.GRAPH_ERROR, f"could not be traced: {type(error).__name__}: {error}", step)
            finally:
                for part, training in modes.items():
                    part.training = training
        self._graph_due = False
        self.spent_s += time.perf_counter() - began
