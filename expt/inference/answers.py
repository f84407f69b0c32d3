"""What a person is told of each sample, by the run's task: classes, labels, numbers, masks, or how
likely a text is.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expt.data.tree import leaves, mapped
from expt.data.windows import NO_TARGET
from expt.errors import ConfigError
from expt.inference.plan import Plan
from expt.inference.scales import scales_of

Record = dict[str, Any]
"""Of one sample: where it is from, and what is predicted of it."""


class Answers(NamedTuple):
    """Of some samples, in order."""

    about: Sequence[Mapping[str, str | int]]
    """where each is from"""
    arrays: Mapping[str, np.ndarray]
    """[n, ...] each"""
    sizes: Sequence[tuple[int, int]] = ()
    """height and width of each picture as it lies"""


class Form(ABC):
    """How predictions are told."""

    beside: Mapping[str, np.ndarray] = {}
    """What arrays mean by their numbers: names."""

    @abstractmethod
    def arrays(self, predicted: Any, targets: Any) -> dict[str, np.ndarray]:
        """Of what the task predicts of a batch."""

    @abstractmethod
    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Of one sample of them."""

    def records(self, answers: Answers) -> Iterator[Record]:
        """Each sample's."""
        lists = {name: _short(array) for name, array in answers.arrays.items()}
        return ({**about, **self.values(lists, place)} for place, about in enumerate(answers.about))


class Classes(Form):
    """The likeliest class of each sample, and the probability of all, or of the `top` likeliest."""

    def __init__(self, names: Sequence[str], top: int | None) -> None:
        self._names, self._top = list(names), top
        self.beside = {"class_names": np.array(self._names)}

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Probabilities [n, C], and the likeliest class of each; of the likeliest alone where `top`
        says so.
        """
        _check(predicted, (None, None), "[samples, classes]")
        self._names += [
            str(number) for number in range(len(self._names), predicted.shape[1])
        ]  # an own model's
        self.beside = {"class_names": np.array(self._names)}
        found = {"class": predicted.argmax(1), "probabilities": predicted}
        if self._top:
            found["probabilities"], classes = predicted.topk(self._top)
            found |= {"class": classes[:, 0], "classes": classes}
        if isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point():
            found["target"] = targets
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Class, probability, and those of all or of the likeliest."""
        names, chosen, chances = self._names, arrays["class"][place], arrays["probabilities"][place]
        found: Record = {"class": names[chosen], "probability": chances[0 if self._top else chosen]}
        if self._top:
            likeliest = zip(arrays["classes"][place], chances, strict=True)
            found["top"] = [
                {"class": names[number], "probability": chance} for number, chance in likeliest
            ]
        else:
            found["probabilities"] = dict(zip(names, chances, strict=True))
        return {
            **found,
            **({"target": names[arrays["target"][place]]} if "target" in arrays else {}),
        }


class Labels(Form):
    """The labels of each sample, and the probability of each."""

    def __init__(self, names: Sequence[str], threshold: float) -> None:
        self._names, self._threshold = list(names), threshold
        self.beside = {"label_names": np.array(self._names)}

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Probabilities [n, labels]."""
        _check(predicted, (None, len(self._names)), "[samples, labels]")
        found = {"probabilities": predicted, **_if_alike(targets, predicted)}
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Labels by the task's threshold, and probabilities."""
        chances = dict(zip(self._names, arrays["probabilities"][place], strict=True))
        found: Record = {
            "labels": [name for name, chance in chances.items() if chance >= self._threshold],
            "probabilities": chances,
        }
        if "target" in arrays:
            found["target"] = [
                name
                for name, on in zip(self._names, arrays["target"][place], strict=True)
                if on > 0.5
            ]
        return found


class Numbers(Form):
    """The values of each sample's targets, in their own units."""

    def __init__(self, names: Sequence[str], scales: Sequence[tuple[float, float]]) -> None:
        self._names, self._scales = list(names), scales

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Values float64 [n, T]."""
        _check(predicted, None, "[samples, ...]")
        flat = predicted.reshape(len(predicted), -1)
        if len(self._names) != flat.shape[1]:
            number = flat.shape[1]
            self._names = (
                ["value"] if number == 1 else [f"value_{place}" for place in range(number)]
            )
        self.beside = {"target_names": np.array(self._names)}
        found = {"values": flat, **_if_alike(targets, flat)}
        return {name: self._in_units(tensor) for name, tensor in found.items()}

    def _in_units(self, values: Tensor) -> np.ndarray:
        numbers = values.float().cpu().numpy()
        if not self._scales:
            shortest: np.ndarray = numbers.astype(str).astype(
                np.float64
            )  # that these float32 are: 0.1, not 0.100000001
            return shortest
        columns = [
            _in_unit(column, *scale) for column, scale in zip(numbers.T, self._scales, strict=True)
        ]
        return np.stack(columns, axis=1)

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """By the targets' names."""
        found: Record = dict(zip(map(_apart, self._names), arrays["values"][place], strict=True))
        if "target" in arrays:
            found["target"] = dict(zip(self._names, arrays["target"][place], strict=True))
        return found


class Masks(Form):
    """The class of each pixel."""

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Masks [n, H, W], uint8 where classes are few enough."""
        masks = predicted.cpu().numpy()
        return {"masks": masks.astype(np.uint8 if masks.max(initial=0) < 256 else np.uint16)}

    def records(self, answers: Answers) -> Iterator[Record]:
        """The mask of each as an array [H, W]."""
        return (
            {**about, "mask": mask}
            for about, mask in zip(answers.about, answers.arrays["masks"], strict=True)
        )

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """See records."""
        return {"mask": arrays["masks"][place]}


class Likelihoods(Form):
    """How likely each text is: the mean loss of its tokens but the first [nats], and the
    perplexity.
    """

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """The summed loss of each window, and its tokens."""
        logits = predicted.float().flatten(0, -2)
        each = functional.cross_entropy(
            logits, targets.flatten().long(), ignore_index=NO_TARGET, reduction="none"
        )
        counts = (targets != NO_TARGET).sum(1)
        sums = each.double().view(targets.shape).sum(1)
        return {"tokens": counts.cpu().numpy(), "loss": sums.cpu().numpy()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Tokens that were predicted, loss and perplexity; nan where there was none."""
        return {name: arrays[name][place] for name in ("tokens", "loss", "perplexity")}

    def joined(self, several: Iterable[Answers]) -> Iterator[Answers]:
        """The windows of one text as one sample, with means in the place of sums."""
        windows = (
            (about, int(tokens), float(loss))
            for answers in several
            for about, tokens, loss in zip(  # fmt: skip
                answers.about, answers.arrays["tokens"], answers.arrays["loss"], strict=True
            )
        )
        texts = itertools.groupby(windows, key=lambda window: window[0])
        while some := list(
            itertools.islice(((about, list(group)) for about, group in texts), 1024)
        ):
            tokens = np.array([sum(window[1] for window in group) for _, group in some])
            sums = np.array([math.fsum(window[2] for window in group) for _, group in some])
            with np.errstate(invalid="ignore", over="ignore"):
                loss = sums / np.where(tokens, tokens, np.nan)
                arrays = {"tokens": tokens, "loss": loss, "perplexity": np.exp(loss)}
            yield Answers([about for about, _ in some], arrays)


class Outputs(Form):
    """What a task of one's own predicts, as it is; with the targets, where they are one value for
    each sample.
    """

    def arrays(self, predicted: Any, targets: Any) -> dict[str, np.ndarray]:
        """Each tensor by itself."""
        found = [_numbers(tensor) for tensor in leaves(mapped(Tensor.detach, predicted))]
        if not found:
            raise ConfigError(
                f"the task predicts a {type(predicted).__name__}; let its `predict` give tensors"
                " [B, ...]"
            )
        names = [f"output_{place}" for place in range(len(found))] if len(found) > 1 else ["output"]
        if isinstance(predicted, Mapping) and len(predicted) == len(found):
            names = [_apart(name) if name == "target" else name for name in map(str, predicted)]
        several = dict(zip(names, found, strict=True))
        if isinstance(targets, Tensor) and targets.dim() and targets.numel() == len(targets):
            several["target"] = _numbers(targets.flatten())
        return several

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Numbers and lists."""
        return {
            name if name == "target" else _apart(name): several[place]
            for name, several in arrays.items()
        }


def _numbers(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return found


def form_of(plan: Plan) -> Form:
    """That of the run's task."""
    task, data = plan.config.task, plan.data
    targets = _target_names(plan)
    if task.TARGETS == "class":
        return Classes(
            data.get("class_names") or [str(number) for number in range(data["num_classes"])],
            plan.asked.top,
        )
    if task.TARGETS == "labels":
        number = data["num_classes"]
        names = targets if len(targets) == number else [f"label_{place}" for place in range(number)]
        return Labels(names, task.threshold)
    if task.TARGETS == "numbers":
        return Numbers(targets, list(scales_of(plan.config.dataset, data).targets.values()))
    if task.TARGETS == "mask":
        return Masks()
    return Likelihoods() if task.TARGETS == "tokens" else Outputs()


def _target_names(plan: Plan) -> Sequence[str]:
    if names := plan.data.get("target_names"):
        return list(names)
    named = getattr(plan.config.dataset, "targets", ())
    return [named] if isinstance(named, str) else list(named)


def _apart(name: str) -> str:
    """A target's name that is not also that of a column which says where a sample is from."""
    return f"{name} predicted" if name in ("path", "row", "index", "line", "target") else name


def _if_alike(targets: Any, predicted: Tensor) -> dict[str, Tensor]:
    if isinstance(targets, Tensor) and targets.numel() == predicted.numel():
        return {"target": targets.reshape(predicted.shape).float()}
    return {}


def _check(predicted: Any, shape: tuple[int | None, ...] | None, wanted: str) -> None:
    fits = isinstance(predicted, torch.Tensor) and (
        shape is None
        or (
            len(shape) == predicted.dim()
            and all(a in (None, b) for a, b in zip(shape, predicted.shape, strict=True))
        )
    )
    if not fits:
        gives = (
            list(predicted.shape)
            if isinstance(predicted, torch.Tensor)
            else f"a {type(predicted).__name__}"
        )
        raise ConfigError(f"the model gives {gives} where {wanted} is needed")


def _in_unit(standardised: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """In the target's unit, to five decimals after the first digit of its deviation: a float32 is
    no more exact.
    """
    decimals = 5 - math.floor(math.log10(deviation))
    numbers: np.ndarray = np.round(standardised.astype(np.float64) * deviation + mean, decimals)
    return numbers


def _short(array: np.ndarray) -> list[Any]:
    """As nested lists, float32 with all its digits."""
    if array.dtype != np.float32:
        return list(array.tolist())
    rounded: list[Any] = [float(f"{number:.9g}") for number in array.ravel().tolist()]
    for size in reversed(array.shape[1:]):
        rounded = (
            [rounded[start : start + size] for start in range(0, len(rounded), size)]
            if size
            else []
        )
    return rounded
