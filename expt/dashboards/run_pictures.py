"""A run's pictures: the first batch that it trained on, and what an evaluation got wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from expt.dashboards import pictures
from expt.dashboards.events import Writer
from expt.dashboards.pictures import Mistakes, Review, worst_of
from expt.data.loading import Batch
from expt.runs import tags
from expt.training import collectives

TRAIN_IMAGES, MISTAKES = 16, 16


class RunPictures:
    """One worker's part of them; `mean` and `std` of each channel are what images were normalised
    by.
    """

    def __init__(
        self, class_names: Sequence[str], *, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._names = class_names
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self._first: Batch | None = None

    def keep_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the first is kept until there is something else to draw."""
        for batch in itertools.islice(batches, 1):
            few = batch.inputs[:TRAIN_IMAGES].clone(), batch.targets[:TRAIN_IMAGES].clone()
            self._first = None if batch.weightless else Batch(*few, batch.global_size)
            yield batch
        yield from batches

    def review(self) -> Review:
        """What is to observe an evaluation."""
        return Review(len(self._names), keep=MISTAKES)

    def draw(self, review: Review, split: str, events: Writer | None, step: int) -> None:
        """Add what every worker's `review` has seen to rank 0's `events`; a collective."""
        confusion = None if review.confusion is None else review.confusion.cpu()
        gathered = collectives.gather_across_workers((confusion, review.mistakes()))
        if events is None:
            return
        total = torch.stack([part for part, _ in gathered if part is not None]).sum(0)
        if self._first is not None:
            self._draw_first(self._first, events)
            self._first = None
        if len(total) <= pictures.MOST_CLASSES:
            events.picture(
                tags.confusion(split), pictures.confusion_matrix(total.numpy(), self._names), step
            )
        worst = worst_of([mistakes for _, mistakes in gathered if mistakes is not None], MISTAKES)
        if worst is not None and len(worst.labels):
            self._draw_mistakes(worst, tags.mistakes(split), events, step)

    def _draw_first(self, batch: Batch, events: Writer) -> None:
        """The batch as the model saw it, after augmentation."""
        captions = [caption(self._names, target) for target in batch.targets.cpu()]
        images = self._visible(batch.inputs.cpu())[: len(captions)]
        if captions:
            events.picture(tags.TRAIN_IMAGES, pictures.image_grid(images, captions), 1)

    def _draw_mistakes(self, worst: Mistakes, tag: str, events: Writer, step: int) -> None:
        numbers = zip(
            worst.predicted.tolist(),
            worst.probabilities.tolist(),
            worst.labels.tolist(),
            strict=True,
        )
        captions = [
            f"{self._names[wrong]} {sure:.0%}\nis {self._names[right]}"
            for wrong, sure, right in numbers
        ]
        events.picture(tag, pictures.image_grid(self._visible(worst.images), captions), step)

    def _visible(self, images: Tensor) -> pictures.Bytes:
        """Normalised images [N, C, H, W] as bytes [N, H, W, C]."""
        pixels = (images.float() * self._std + self._mean).clamp_(0, 1).mul_(255).round_().byte()
        array: pictures.Bytes = np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())
        return array


def caption(names: Sequence[str], target: Tensor) -> str:
    """What stands below an image of a class [], or of a mixed one that has shares of classes
    [num_classes].
    """
    if not target.dim():
        return names[int(target)]
    shares, classes = target.topk(2)
    found = zip(shares.tolist(), classes.tolist(), strict=True)
    return "\n".join(f"{names[index]} {share:.0%}" for share, index in found if share)
