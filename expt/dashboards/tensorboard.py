"""TensorBoard's curves, pictures, norms and histograms of a run, and when pictures are drawn."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

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
    """A run's curves and pictures on one worker; only rank 0, which has the event file, draws."""

    def __init__(
        self,
        events: Writer | None,
        learner: Learner,
        position: Position,
        pictures: RunPictures | None,
        *,
        settings: TensorBoard,
    ) -> None:
        self._events, self._position = events, position
        self._pictures = pictures
        self._images = settings.images if pictures else False
        self._layers: LayerValues | None = None
        if (events or learner.strategy.shards > 1) and (settings.norms or settings.histograms):
            self._layers = LayerValues(learner, settings)
        self.spent_s = self._trained_s = 0.0
        self._pictures_s, self._epoch_began = FIRST_S, time.perf_counter()
        self._draws: Literal["none", "last", "each"] = "none"
        """The coming evaluations that are drawn: none, each, or only the run's last."""
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
        if self._images is False or not self._events:
            return False
        has_time = self.spent_s + self._pictures_s <= SHARE * (self._trained_s + self._epoch_s)
        return self._images is True or has_time

    @property
    def _epoch_s(self) -> float:
        """The seconds of training since the epoch began."""
        return time.perf_counter() - self._epoch_began

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
        ends = self._images == "end" and may_end
        self._draws = "each" if review else "last" if ends else "none"

    def end_epoch(self) -> None:
        """Show norms and histograms."""
        self._trained_s += self._epoch_s
        with self._timed():
            if self._layers:
                self._layers.show(self._events, self._position.step)
        if self._events:
            self._events.flush()

    def review(self) -> Review | None:
        """Return the counter of the model's mistakes, on every rank, where pictures are due."""
        draws = self._draws != "none"
        self._review = self._pictures.review() if self._pictures and draws else None
        return self._review

    @property
    def draws_end(self) -> bool:
        """True if the run's end is drawn, and the evaluation before it was not."""
        return self._draws == "last"

    def end_evaluation(self, split: str, *, is_last: bool = False) -> None:
        """Draw the mistakes of the review, if each or this one is shown, a collective; flush."""
        if self._pictures and self._review is not None and (self._draws == "each" or is_last):
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

    def picture(self, tag: str, image: Tensor) -> None:
        """Add an image to the IMAGES tab as it is."""
        if self._events:
            self._events.picture(tag, whole(image.numpy()), self._position.step)

    def close(self, *, complete: bool) -> None:
        """Close the event file; the HPARAMS tab then says whether the run is complete."""
        if self._events:
            self._events.close(complete=complete)


class LayerValues:
    """Norms or histograms of each layer's gradients and weights after an epoch's last step."""

    def __init__(self, learner: Learner, settings: TensorBoard) -> None:
        self._learner, self._settings = learner, settings
        self._layers = layers(learner.module)
        self._gradient_norms: dict[str, Tensor] = {}
        """Those of each layer that has some."""
        self._gradients: dict[str, Tensor] = {}
        """Those of each parameter that has one."""

    def note_gradients(self) -> None:
        """Note the gradients before the optimizer drops them, in each update of the last step.

        An update of some parameters leaves the others' as they were noted. Waits for no device.
        """
        scale = self._learner.precision.scale
        for layer, parameters in self._layers.items():
            found = {name: each.grad for name, each in parameters.items() if each.grad is not None}
            if found and self._settings.norms:
                self._gradient_norms[layer] = norm([*found.values()]) / scale
            if self._settings.histograms:
                self._gradients |= {name: gradient / scale for name, gradient in found.items()}

    def show(self, events: Writer | None, step: int) -> None:
        """Add the noted gradients, and the weights; a collective of a sharded model's ranks."""
        if self._layers and self._settings.norms:
            norms = self._norms()
            if events:
                events.write(step, norms)
            self._gradient_norms = {}
        if self._settings.histograms:
            for name, weight in itertools.chain(*(each.items() for each in self._layers.values())):
                parts = {"weights": weight.detach(), "gradients": self._gradients.get(name)}
                for kind, part in parts.items():
                    values = None if part is None else sharding.whole(part).to_dense()
                    if events and values is not None and bool(values.isfinite().all()):
                        events.histogram(f"{kind}/{name}", values, step)
            self._gradients = {}

    def _norms(self) -> Mapping[str, float]:
        """Return the norms by their tags; of gradients those that some worker has noted."""
        weights = {layer: norm([*each.values()]) for layer, each in self._layers.items()}
        none, noted = torch.zeros_like(next(iter(weights.values()))), self._gradient_norms
        rows = [
            torch.stack([noted.get(layer, none) for layer in weights]),
            torch.stack([*weights.values()]),
            torch.tensor([float(layer in noted) for layer in weights], device=none.device),
        ]
        table, strategy = torch.stack(rows), self._learner.strategy
        if strategy.shards > 1:
            squares, size = table.double() ** 2, strategy.world_size
            table = sharding.sum_over_shards(squares, strategy.shards, size).sqrt()
        gradients, of_weights, are_noted = table.tolist()
        every = zip(weights, gradients, of_weights, are_noted, strict=True)
        found = dict[str, float]()
        for layer, gradient, weight, is_noted in every:
            found[f"{tags.WEIGHT_NORM}/{layer}"] = weight
            if is_noted:
                found[f"{tags.GRADIENT_NORM}/{layer}"] = gradient
        return found


def layers(module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return each submodule's trained parameters that are not empty, by their full names."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found.setdefault(name.rpartition(".")[0] or "model", {})[name] = parameter
    return found


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of tensors together, float32 [], of this worker's shards.

    Waits for no device.
    """
    each = [torch.linalg.vector_norm(sharding.local(one.detach())).float() for one in tensors]
    return torch.stack(each).square().sum().sqrt()
