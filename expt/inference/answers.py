"""Predictions of samples by the task's targets: classes, labels, numbers, masks, likelihoods."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor
from torch.nn import functional

from expt.data.loading import leaves, mapped
from expt.data.memory import NO_TARGET
from expt.errors import ConfigError
from expt.inference.load import Scales
from expt.inference.plan import Plan
from expt.tasks.task import at_least_single

About: TypeAlias = "dict[str, str | int]"
"""The origin of a sample: its path, its number in a file of several, and its other columns."""
Record: TypeAlias = "dict[str, Any]"
"""The answer for one sample: its origin and the prediction."""


class Answers(NamedTuple):
    """The answers on some samples, in order."""

    about: Sequence[Mapping[str, str | int]]
    arrays: Mapping[str, np.ndarray]
    """[n, ...] each."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of each picture as it lies."""


class Form:
    """How predictions are written: those of a custom task as they are."""

    beside: Mapping[str, np.ndarray] = {}
    """Names of what arrays have by their numbers."""

    def arrays(self, predicted: Any, targets: Any) -> dict[str, np.ndarray]:
        """Return a batch's predictions, and targets where there is one value for each sample."""
        found = [_numbers(tensor) for tensor in leaves(mapped(Tensor.detach, predicted))]
        if not found:
            kind = type(predicted).__name__
            raise ConfigError(f"the task predicts a {kind}; give tensors [B, ...]")
        names = [f"output_{place}" for place in range(len(found))] if len(found) > 1 else ["output"]
        if isinstance(predicted, Mapping) and len(predicted) == len(found):
            names = [_apart(name) if name == "target" else name for name in map(str, predicted)]
        several = dict(zip(names, found, strict=True))
        if isinstance(targets, Tensor) and targets.dim() and targets.numel() == len(targets):
            several["target"] = _numbers(targets.flatten())
        return several

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return one sample's."""
        return {
            name if name == "target" else _apart(name): several[place]
            for name, several in arrays.items()
        }

    def records(self, answers: Answers) -> Iterator[Record]:
        """Yield each sample's."""
        lists = {name: _short(array) for name, array in answers.arrays.items()}
        return ({**about, **self.values(lists, place)} for place, about in enumerate(answers.about))

    def joined(self, several: Iterable[Answers]) -> Iterator[Answers]:
        """Yield the answers, those of one sample together."""
        yield from several


class Classes(Form):
    """The likeliest class, and the probability of all or of the `top` likeliest."""

    def __init__(self, names: Sequence[str], top: int | None) -> None:
        self._names, self._top = list(names), top

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Return probabilities [n, C] and the likeliest class of each."""
        self._names += [str(number) for number in range(len(self._names), predicted.shape[1])]
        self.beside = {"class_names": np.array(self._names)}
        found = {"class": predicted.argmax(1), "probabilities": predicted}
        if self._top:
            found["probabilities"], classes = predicted.topk(self._top)
            found |= {"class": classes[:, 0], "classes": classes}
        if isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point():
            found["target"] = targets
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return class, probability, and those of all or of the likeliest."""
        names, chosen, chances = self._names, arrays["class"][place], arrays["probabilities"][place]
        found: Record = {"class": names[chosen], "probability": chances[0 if self._top else chosen]}
        if self._top:
            likeliest = zip(arrays["classes"][place], chances, strict=True)
            found["top"] = [{"class": names[each], "probability": of} for each, of in likeliest]
        else:
            found["probabilities"] = dict(zip(names, chances, strict=True))
        return found | ({"target": names[arrays["target"][place]]} if "target" in arrays else {})


class Labels(Form):
    """The labels above the task's threshold, and the probability of each."""

    def __init__(self, names: Sequence[str], threshold: float) -> None:
        self._names, self._threshold = list(names), threshold
        self.beside = {"label_names": np.array(self._names)}

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Return probabilities [n, labels]."""
        found = {"probabilities": predicted, **_if_alike(targets, predicted)}
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return labels and probabilities."""
        chances = dict(zip(self._names, arrays["probabilities"][place], strict=True))
        found: Record = {
            "labels": [name for name, chance in chances.items() if chance >= self._threshold],
            "probabilities": chances,
        }
        if "target" in arrays:
            pairs = zip(self._names, arrays["target"][place], strict=True)
            found["target"] = [name for name, on in pairs if on > 0.5]
        return found


class Numbers(Form):
    """The values of the targets, in their own units."""

    def __init__(self, names: Sequence[str], scales: Sequence[tuple[float, float]]) -> None:
        self._names, self._scales = list(names), scales

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Return values float64 [n, T]."""
        flat = predicted.reshape(len(predicted), -1)
        if (number := flat.shape[1]) != len(self._names):
            self._names = ["value"] if number == 1 else [f"value_{i}" for i in range(number)]
        self.beside = {"target_names": np.array(self._names)}
        found = {"values": flat, **_if_alike(targets, flat)}
        return {name: self._in_units(tensor) for name, tensor in found.items()}

    def _in_units(self, values: Tensor) -> np.ndarray:
        numbers = at_least_single(values).cpu().numpy()
        if self._scales:
            columns = zip(numbers.T, self._scales, strict=True)
            return np.stack([_in_unit(column, *scale) for column, scale in columns], axis=1)
        shortest: np.ndarray = numbers.astype(str).astype(np.float64)  # 0.1, not 0.100000001
        return shortest

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return them by the targets' names."""
        found: Record = dict(zip(map(_apart, self._names), arrays["values"][place], strict=True))
        if "target" in arrays:
            found["target"] = dict(zip(self._names, arrays["target"][place], strict=True))
        return found


class Masks(Form):
    """The class of each pixel."""

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Return masks [n, H, W], uint8 where classes are few enough."""
        masks = predicted.cpu().numpy()
        return {"masks": masks.astype(np.uint8 if masks.max(initial=0) < 256 else np.uint16)}

    def records(self, answers: Answers) -> Iterator[Record]:
        """Yield the mask of each as an array [H, W]."""
        pairs = zip(answers.about, answers.arrays["masks"], strict=True)
        return ({**about, "mask": mask} for about, mask in pairs)


class Likelihoods(Form):
    """How likely a text is: the mean loss of its tokens but the first [nats], and perplexity."""

    def arrays(self, predicted: Tensor, targets: Any) -> dict[str, np.ndarray]:
        """Return the summed loss of each window, and its tokens."""
        logits, wanted = at_least_single(predicted).flatten(0, -2), targets.flatten().long()
        each = functional.cross_entropy(logits, wanted, ignore_index=NO_TARGET, reduction="none")
        sums, counts = each.double().view(targets.shape).sum(1), (targets != NO_TARGET).sum(1)
        return {"tokens": counts.cpu().numpy(), "loss": sums.cpu().numpy()}

    def values(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return them; nan where no token was predicted."""
        return {name: arrays[name][place] for name in ("tokens", "loss", "perplexity")}

    def joined(self, several: Iterable[Answers]) -> Iterator[Answers]:
        """Yield the windows of one text as one sample, with means in the place of sums."""
        windows = (
            window
            for answers in several
            for window in zip(
                answers.about, answers.arrays["tokens"].tolist(), answers.arrays["loss"].tolist(),
                strict=True,
            )
        )  # fmt: skip
        texts = map(_summed, itertools.groupby(windows, key=operator.itemgetter(0)))
        while some := list(itertools.islice(texts, 1024)):
            about, tokens, sums = zip(*some, strict=True)
            with np.errstate(invalid="ignore", over="ignore"):
                loss = np.array(sums) / np.where(tokens, tokens, np.nan)
                arrays = {"tokens": np.array(tokens), "loss": loss, "perplexity": np.exp(loss)}
            yield Answers(about, arrays)


def _summed(text: tuple[Any, Iterable[tuple[Any, int, float]]]) -> tuple[Any, int, float]:
    about, (_, tokens, losses) = text[0], zip(*text[1], strict=True)
    return about, sum(tokens), math.fsum(losses)


def form_of(plan: Plan, scales: Scales) -> Form:
    """Return the form of the run's task, whose targets were standardised by `scales`."""
    task, data, names = plan.config.task, plan.data, plan.target_names
    numbers = [str(place) for place in range(data.get("num_classes", 0))]
    if task.TARGETS == "class":
        return Classes(data.get("class_names") or numbers, plan.top)
    if task.TARGETS == "labels":
        labels = names if len(names) == len(numbers) else [f"label_{place}" for place in numbers]
        return Labels(labels, task.threshold)
    if task.TARGETS == "numbers":
        return Numbers(names, [*scales.values()])
    return {"mask": Masks, "tokens": Likelihoods}.get(task.TARGETS, Form)()


def _numbers(tensor: Tensor) -> np.ndarray:
    tensor = at_least_single(tensor) if tensor.is_floating_point() else tensor
    found: np.ndarray = tensor.cpu().numpy()
    return found


def _apart(name: str) -> str:
    """Return a target's name that is not a column which says where a sample is from."""
    return f"{name} predicted" if name in ("path", "row", "index", "line", "target") else name


def _if_alike(targets: Any, predicted: Tensor) -> dict[str, Tensor]:
    if isinstance(targets, Tensor) and targets.numel() == predicted.numel():
        return {"target": at_least_single(targets.reshape(predicted.shape))}
    return {}


def _in_unit(standardised: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Return it to five decimals after the first digit of its deviation, as exact as float32."""
    decimals = 5 - math.floor(math.log10(deviation))
    numbers: np.ndarray = np.round(standardised.astype(np.float64) * deviation + mean, decimals)
    return numbers


def _short(array: np.ndarray) -> list[Any]:
    """Return nested lists, of float32 as Python floats with just its digits."""
    if array.dtype == np.float32:
        array = np.array([float(f"{x:.9g}") for x in array.ravel().tolist()]).reshape(array.shape)
    return list(array.tolist())
