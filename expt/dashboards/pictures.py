"""Pictures of a run for TensorBoard: images with captions, and a confusion matrix."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expt.dashboards.events import Writer
from expt.data.loading import Batch
from expt.runs import tags
from expt.runs.result import ByClass
from expt.training import collectives

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

Bytes = npt.NDArray[np.uint8]

WIDTH = 350
"""The width of TensorBoard's cards [pixels]: another width is stretched or shrunk there, with
its text.
"""
_COLUMNS, _TILE, _GAP, _LINE = 4, 84, 3, 13
_NAME = 96
"""The longest name of a class [pixels]."""
_DARK = (12, 44, 92)
"""The colours of a cell of 100 %, and of all text."""
_AT_ONCE = 4
"""The number of batches whose worst mistakes are kept before they are merged."""
MOST_CLASSES = 400
"""The largest number of classes whose confusion matrix is drawn."""
_NAMED, _NUMBERED, _READABLE = 100, 20, 10
"""The largest number whose names are drawn, whose counts are, and whose cells fit a card."""
TRAIN_IMAGES, MISTAKES = 16, 16
"""The largest number of images of a picture."""


def whole(image: Bytes) -> Image:
    """Return an image [H, W, C] of 1 or 3 channels as a picture of its size."""
    from PIL import Image  # late, as below

    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def image_grid(images: Bytes, captions: Sequence[str]) -> Image:
    """Draw images [N, H, W, C] of 1 or 3 channels, each above the lines of its caption."""
    from PIL import Image, ImageDraw  # late: 0.1 s that a run without pictures need not wait for

    images = images if images.shape[3] in (1, 3) else images[..., :1]
    height, width = images.shape[1:3]
    side = max(height, width)  # a small image is enlarged by a whole number, a larger one shrunk
    times = Fraction(_TILE // side) if side <= _TILE else Fraction(_TILE, side)
    height, width = max(1, int(height * times)), max(1, int(width * times))
    lines = max(caption.count("\n") + 1 for caption in captions)
    cell_width, cell_height = _TILE + _GAP, height + lines * _LINE + 8
    rows = -(-len(images) // _COLUMNS)
    mode = "L" if images.shape[3] == 1 else "RGB"
    resampling = Image.Resampling.NEAREST if height >= images.shape[1] else Image.Resampling.BOX
    canvas = Image.new(mode, (WIDTH, rows * cell_height), "white")
    draw, font = ImageDraw.Draw(canvas), _font(10)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = index % _COLUMNS * cell_width, index // _COLUMNS * cell_height
        tile = whole(image).resize((width, height), resampling)
        canvas.paste(tile, (left + (_TILE - width) // 2, top))
        for line, text in enumerate(caption.split("\n")):
            place = left, top + height + 1 + line * _LINE
            draw.text(place, _shortened(text, _TILE, font), font=font, fill="black")
    return canvas


def confusion_matrix(counts: npt.NDArray[np.int64], names: Sequence[str]) -> Image:
    """Draw the numbers of samples [true class, predicted class].

    The darker a cell, the larger its share of the true class.
    """
    from PIL import Image, ImageDraw

    classes = len(names)
    font = _font(11 if classes <= _NUMBERED else 8)
    labels = [_shortened(name, _NAME, font) for name in names] if classes <= _NAMED else []
    longest = max((int(font.getlength(label)) for label in labels), default=0)
    margin = max(18, longest + 8) if labels else 2
    cell = _cell(classes, margin)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # The root: rare confusions are to be seen.
    shades = (np.sqrt(shares) * 255).astype(np.uint8)
    # Grey levels that a palette turns blue: text in the ramp's own colours stays smooth.
    side, end = classes * cell, margin + classes * cell
    canvas = Image.new("L", (max(WIDTH, end + 2), end + 2 + _LINE), 0)
    draw = ImageDraw.Draw(canvas)
    canvas.paste(
        Image.fromarray(shades).resize((side, side), Image.Resampling.NEAREST), (margin, margin)
    )
    draw.rectangle((margin - 1, margin - 1, end, end), outline=60)
    draw.text((4, end + 1), "rows: true, columns: predicted", font=_font(11), fill=255)
    middles = [margin + index * cell + cell // 2 for index in range(classes)]
    for middle, label in zip(middles, labels, strict=False):
        draw.text((margin - 5, middle), label, font=font, fill=255, anchor="rm")
        if longest <= cell - 4:  # else only rows are named; columns have their order
            draw.text((middle, margin - 5), label, font=font, fill=255, anchor="ms")
    if classes <= _NUMBERED:
        _draw_counts(draw, counts, middles, cell, is_dark=shades > 110)
    ramp = np.linspace((255, 255, 255), _DARK, 256).astype(np.uint8)
    canvas.putpalette(ramp.tobytes())
    return canvas


def _draw_counts(
    draw: ImageDraw,
    counts: npt.NDArray[np.int64],
    middles: Sequence[int],
    cell: int,
    *,
    is_dark: npt.NDArray[np.bool_],
) -> None:
    """Write the counts that are not zero into their cells."""
    largest = str(counts.max())
    fitting = [size for size in (12, 11, 10, 9) if _font(size).getlength(largest) < cell]
    font = _font(fitting[0] if fitting else 8)
    for row, column in zip(*np.nonzero(counts), strict=True):
        fill = 0 if is_dark[row, column] else 255
        text = str(counts[row, column])
        draw.text((middles[column], middles[row]), text, font=font, fill=fill, anchor="mm")


def _cell(classes: int, margin: int) -> int:
    """Return a cell's side: up to ten classes fit TensorBoard's card, more of them a screen."""
    if classes <= _READABLE:
        return min(44, (WIDTH - 2 - margin) // classes)
    return 36 if classes <= _NUMBERED else max(2, 1000 // classes)


@cache
def _font(size: int) -> FreeTypeFont | ImageFont:
    """Return DejaVu Sans of the system or matplotlib, else Pillow's font, which has ASCII only."""
    from PIL import ImageFont

    files = ["DejaVuSans.ttf"]
    if matplotlib := find_spec("matplotlib"):
        folder = Path(str(matplotlib.origin)).parent
        files.append(str(folder / "mpl-data" / "fonts" / "ttf" / files[0]))
    for file in files:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(file, size)
    return ImageFont.load_default(size)


def _shortened(text: str, width: int, font: FreeTypeFont | ImageFont) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


class Mistakes(NamedTuple):
    """Wrongly classified samples [K], the most costly first; images [K, C, H, W] as they are."""

    losses: Tensor  # cross-entropy
    labels: Tensor
    predicted: Tensor
    probabilities: Tensor  # which the model gave to the predicted class
    images: Tensor


Seen = tuple[Tensor, Sequence[Mistakes]]


class Review:
    """This worker's confusion matrix of an evaluation, and its `keep` worst mistakes.

    A model may have more outputs than there are classes.
    """

    def __init__(self, num_classes: int, *, keep: int) -> None:
        self._num_classes, self._keep = num_classes, keep
        self.confusion: Tensor | None = None
        """Counts, int64 [true class, predicted class]; None before the first batch."""
        self._parts: list[Mistakes] = []

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Take in a batch, whose labels must all count, and its logits [B, num_classes].

        The label of a sample with shares of classes is that of the largest. Waits for no device.
        """
        classes, labels = max(self._num_classes, logits.shape[1]), batch.targets
        labels = labels if labels.dim() == 1 else labels.argmax(1)
        chances = logits.float().log_softmax(1)
        highest, predicted = chances.max(1)
        if self.confusion is None:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=labels.device)
        # Not bincount, which asks the device how many cells there are.
        self.confusion.view(-1).index_add_(0, labels * classes + predicted, torch.ones_like(labels))
        if not self._keep:
            return
        losses = chances.gather(1, labels[:, None])[:, 0].neg()
        losses = losses.masked_fill(predicted == labels, -1.0)
        worst = losses.topk(min(self._keep, len(losses))).indices
        picked = (
            part.index_select(0, worst)
            for part in (losses, labels, predicted, highest.exp(), batch.inputs)
        )
        self._parts.append(Mistakes(*picked))
        if len(self._parts) > _AT_ONCE:  # else batches of few samples would be kept whole
            self._parts = [_most_costly(self._parts, self._keep)]

    def gather(self) -> Seen | None:
        """Return on rank 0 all workers' confusion matrix and their mistakes; a collective."""
        confusion = None if self.confusion is None else self.confusion.cpu()
        found = collectives.gather_across_workers((confusion, self.mistakes()))
        counted = [part for part, _ in found if part is not None]
        if not counted:
            return None
        return torch.stack(counted).sum(0), [some for _, some in found if some is not None]

    def mistakes(self) -> Mistakes | None:
        """Return the worst of all batches, on the CPU; None where there was no batch."""
        return worst_of(self._parts, self._keep)


def _most_costly(parts: Sequence[Mistakes], keep: int) -> Mistakes:
    joined = Mistakes(*(torch.cat(column) for column in zip(*parts, strict=True)))
    order = joined.losses.argsort(descending=True, stable=True)[:keep]
    return Mistakes(*(column.index_select(0, order) for column in joined))


def worst_of(parts: Sequence[Mistakes], keep: int) -> Mistakes | None:
    """Return the `keep` most costly mistakes of all `parts`, on the CPU."""
    if not parts:
        return None
    found = Mistakes(*(column.cpu() for column in _most_costly(parts, keep)))
    wrong = int((found.losses >= 0).sum())  # those that are right come last, see Review
    return Mistakes(*(column[:wrong] for column in found))


def all_names(names: Sequence[str], outputs: int) -> list[str]:
    """Return the names of a model's outputs: those beyond the classes have a number."""
    return [*names, *map(str, range(len(names), outputs))]


def by_class(counts: Tensor, names: Sequence[str]) -> dict[str, ByClass]:
    """Return the shares of each class by a confusion matrix [true class, predicted class].

    A share of no sample is None.
    """

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    names, found = all_names(names, len(counts)), dict[str, ByClass]()
    given, guessed, right = counts.sum(1).tolist(), counts.sum(0).tolist(), counts.diag().tolist()
    for number, (name, row) in enumerate(zip(names, counts.tolist(), strict=True)):
        found[name] = {
            "samples": given[number],
            "precision": share(right[number], guessed[number]),
            "recall": share(right[number], given[number]),
            "f1": share(2 * right[number], given[number] + guessed[number]),
            "predicted": {names[at]: count for at, count in enumerate(row) if count},
        }
    return found


def caption(names: Sequence[str], target: Tensor) -> str:
    """Return the caption of a class [], or of a mixed image's shares [num_classes]."""
    if not target.dim():
        return names[int(target)]
    shares, classes = target.topk(2)
    found = zip(shares.tolist(), classes.tolist(), strict=True)
    return "\n".join(f"{names[index]} {share:.0%}" for share, index in found if share)


class RunPictures:
    """One worker's pictures of a run; images were normalised by `mean` and `std` of channels.

    Without these, of samples that are no images, only the confusion matrix is drawn.
    """

    def __init__(
        self, class_names: Sequence[str], *, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._names, self._keep = class_names, MISTAKES if mean else 0
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self._first: Batch | None = None

    def keep_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; keep the first until there is something else to draw."""
        for batch in itertools.islice(batches, 1 if self._keep else 0):
            few = batch.inputs[:TRAIN_IMAGES].clone(), batch.targets[:TRAIN_IMAGES].clone()
            self._first = None if batch.weightless else Batch(*few, batch.global_size)
            yield batch
        yield from batches

    def review(self) -> Review:
        """Return the observer of an evaluation."""
        return Review(len(self._names), keep=self._keep)

    def draw(self, seen: Seen | None, split: str, events: Writer | None, step: int) -> None:
        """Draw the mistakes that all workers have `seen` into rank 0's `events`."""
        if events is None or seen is None:
            return
        total, mistakes = seen
        names = all_names(self._names, len(total))
        if self._first is not None:
            targets = self._first.targets.cpu()
            captions = [caption(self._names, target) for target in targets]
            self._draw_grid(events, tags.TRAIN_IMAGES, self._first.inputs.cpu(), captions, 1)
            self._first = None
        if len(total) <= MOST_CLASSES:
            events.picture(tags.CONFUSION + split, confusion_matrix(total.numpy(), names), step)
        worst = worst_of(mistakes, MISTAKES)
        if worst is not None:
            each = zip(worst.predicted, worst.probabilities, worst.labels, strict=True)
            captions = [
                f"{names[int(wrong)]} {float(sure):.0%}\nis {names[int(right)]}"
                for wrong, sure, right in each
            ]
            self._draw_grid(events, tags.MISTAKES + split, worst.images, captions, step)

    def _draw_grid(
        self, events: Writer, tag: str, images: Tensor, captions: Sequence[str], step: int
    ) -> None:
        if captions:
            visible = (images.float() * self._std + self._mean).clamp_(0, 1)
            pixels = visible.mul_(255).round_().byte().permute(0, 2, 3, 1)
            events.picture(tag, image_grid(np.ascontiguousarray(pixels), captions), step)
