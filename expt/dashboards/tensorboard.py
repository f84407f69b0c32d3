"""The curves, pictures and norms that TensorBoard shows of a run, and when each is due."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from expt.config.schema import TensorBoard
from expt.dashboards.events import Writer
from expt.dashboards.pictures import Review, RunPictures, whole
from expt.data.loading import Batch
from expt.runs import tags
from expt.training import sharding
from expt.training.learner import Learner, Position

SHARE = 0.01
"""The share of the time of training for pictures that nobody asked for."""
FIRST_S = 0.1
"""The assumed cost of the first pictures [seconds], until they have been drawn."""


class Dashboard:
    """One worker's part of it, which changes no number; only rank 0, with the event file, draws."""

    def __init__(
        self,
        events: Writer | None,
        learner: Learner,
        position: Position,
        pictures: RunPictures | None,
        *,
        settings: TensorBoard,
    ) -> None:
        self._events, self._learner, self._position = events, learner, position
        self._pictures = pictures
        self._images = settings.images if pictures else False
        self._layers: LayerValues | None = None
        if (events or learner.strategy.shards > 1) and (settings.norms or settings.histograms):
            self._layers = LayerValues(learner, settings)
        self.spent_s = self._trained_s = 0.0
        self._pictures_s, self._epoch_began = FIRST_S, time.perf_counter()
        self._reviews = self._reviews_end = False
        self._review: Review | None = None

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Keep the run's first batch for its picture."""
        self._epoch_began = time.perf_counter()
        keeps = self._events and self._images and not self._position.step
        return self._pictures.keep_first(batches) if self._pictures and keeps else batches

    def before_update(self) -> None:
        """Note the gradients of the epoch's last step."""
        if self._layers and self._position.steps_left_in_epoch == 1:
            with self._timed():
                self._layers.note_gradients()

    def wants_review(self) -> bool:
        """Return whether the coming evaluation is drawn: on request, or where there is time."""
        self._trained_s += time.perf_counter() - self._epoch_began
        if self._images is False or not self._events:
            return False
        has_time = self.spent_s + self._pictures_s <= SHARE * self._trained_s
        return self._images is True or has_time

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - began

    def leave_out(self, seconds: float) -> None:
        """Leave seconds of the epoch out, in which nothing was trained."""
        self._epoch_began += seconds

    def expect_evaluation(self, *, review: bool, may_end: bool = False) -> None:
        """Say whether the next evaluation is drawn, and whether the run may end with it."""
        self._reviews, self._reviews_end = review, self._images == "end" and may_end

    def end_epoch(self) -> None:
        """Show norms and histograms."""
        with self._timed():
            if self._layers:
                self._layers.show(self._events, self._position.step)
        if self._events:
            self._events.flush()

    def review(self) -> Review | None:
        """Return the counter of the model's mistakes, on every rank, where pictures are due."""
        reviews = self._reviews or self._reviews_end
        self._review = self._pictures.review() if self._pictures and reviews else None
        return self._review

    @property
    def draws_end(self) -> bool:
        """True if the run's end is drawn, and the evaluation before it was not."""
        return self._reviews_end and not self._reviews

    def end_evaluation(self, split: str, *, is_last: bool = False) -> None:
        """Draw the mistakes of the review, if each or this one is shown, a collective; flush."""
        if self._pictures and self._review is not None and (self._reviews or is_last):
            before = self.spent_s
            with self._timed():
                seen = self._review.gather()
                self._pictures.draw(seen, split, self._events, self._position.step)
            self._pictures_s = self.spent_s - before
        if self._events:
            self._events.flush()

    def values(self, values: Mapping[str, float]) -> None:
        """Add points to curves."""
        if self._events:
            self._events.write(self._position.step, values)

    def picture(self, tag: str, image: torch.Tensor) -> None:
        """Add an image to the IMAGES tab as it is."""
        if self._events:
            self._events.picture(tag, whole(image.numpy()), self._position.step)

    def close(self, *, complete: bool) -> None:
        """Close the event file; the HPARAMS tab then says whether the run is complete."""
        if self._events:
            self._events.close(complete=complete)


class LayerValues:
    """Norms or histograms of each layer's gradients and weights in an epoch's last step."""

    def __init__(self, learner: Learner, settings: TensorBoard) -> None:
        self._learner, self._settings = learner, settings
        self._layers = layers(learner.module)
        self._gradient_norms: Tensor | None = None
        self._gradients: dict[str, Tensor] = {}

    def note_gradients(self) -> None:
        """Note the gradients before the optimiser drops them; not where some are missing.

        Waits for no device.
        """
        trained = list(itertools.chain.from_iterable(self._layers.values()))
        if not trained or any(parameter.grad is None for _, parameter in trained):
            return
        scale = self._learner.precision.scale
        gradients = {name: p.grad for name, p in trained if p.grad is not None}
        if self._settings.norms:
            own = [[gradients[name] for name, _ in layer] for layer in self._layers.values()]
            self._gradient_norms = norms(own) / scale
        if self._settings.histograms:
            self._gradients = {name: gradient / scale for name, gradient in gradients.items()}

    def show(self, events: Writer | None, step: int) -> None:
        """Add the noted gradients, and the weights; a collective of a sharded model's ranks."""
        if self._gradient_norms is not None:
            weights = norms([[p.detach() for _, p in own] for own in self._layers.values()])
            both, strategy = torch.stack([self._gradient_norms, weights]), self._learner.strategy
            if strategy.shards > 1:
                squares, size = both.double() ** 2, strategy.world_size
                both = sharding.sum_over_shards(squares, strategy.shards, size).sqrt()
            kinds = (tags.GRADIENT_NORM, tags.WEIGHT_NORM)
            for kind, values in zip(kinds, both.tolist(), strict=True):
                named = (f"{kind}/{layer}" for layer in self._layers)
                if events:
                    events.write(step, dict(zip(named, values, strict=True)))
            self._gradient_norms = None
        if self._settings.histograms:
            for name, parameter in itertools.chain.from_iterable(self._layers.values()):
                parts = {"weights": parameter.detach(), "gradients": self._gradients.get(name)}
                for kind, part in parts.items():
                    values = None if part is None else sharding.whole(part).to_dense()
                    if events and values is not None and bool(values.isfinite().all()):
                        events.histogram(f"{kind}/{name}", values, step)
            self._gradients = {}


def layers(module: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return each submodule's trained parameters that are not empty, with their full names."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found.setdefault(name.rpartition(".")[0] or "model", []).append((name, parameter))
    return found


def norms(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the 2-norm of each group of tensors, float32 [groups], of this worker's shards.

    Waits for no device.
    """
    each = (
        torch.stack([torch.linalg.vector_norm(sharding.local(one)).float() for one in group])
        for group in tensors
    )
    return torch.stack([group.square().sum() for group in each]).sqrt()
