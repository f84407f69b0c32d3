"""Targets of a sample: one class, labels of 0 and 1, numbers, or a mask of classes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from expt.errors import ConfigError, DataError, did_you_mean, listed
from expt.features.feature import (
    Answers,
    Arrays,
    Feature,
    Known,
    Record,
    apart,
    at_least_single,
    labelled,
    like_targets,
    spread,
)
from expt.late import np, torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Deviations from 0, beyond which a variance from sums of squares loses more than four digits.
_FAR = 100.0
_SHOWN = 3
_INVERSE = {"log": "exp", "log1p": "expm1"}


@dataclass(frozen=True, kw_only=True)
class Classes(Feature):
    """One class of each sample.

    A prediction is the likeliest class, and the probability of all or of the `top` likeliest.
    """

    has_one_class: ClassVar[bool] = True
    outputs: ClassVar[str] = "logits of the classes"
    are_names: bool = False
    """True if a class that is called 1 has that name, and not only that number."""
    column: str = ""
    """The column of a table that has them."""
    top: int | None = None

    def in_words(self) -> Iterator[str]:
        yield f"{len(self.names)} classes"

    def check(self, sample: Any) -> Any:
        if type(sample) is tuple and len(sample) == 2:  # as most are: calls take their time
            inputs, label = sample
            if type(label) is int and 0 <= label < len(self.names):
                return sample
        inputs, label = labelled(sample, "inputs")
        return inputs, self.number(label)

    def number(self, label: Any) -> int:
        """Return a label as a number. Raise DataError where it is none of a class."""
        number = label if type(label) is int else _integral(label)
        if number is None or not 0 <= number < len(self.names):
            raise DataError(
                f"its label is {label!r}, expected 0 to {len(self.names) - 1}; fix the label, or"
                " dataset.num_classes"
            )
        return number

    def fit(self, trained: Feature, label: str) -> tuple[Sequence[int] | None, str]:
        names, has = trained.names, len(self.names)
        known = trained.shapes.get("num_classes")
        is_other = isinstance(trained, Classes) and self.names != names
        if self._by_number(trained):
            if has != known:
                raise ConfigError(
                    f"{label}: has {has} classes, and the run's model {known}; use data of its"
                    " classes"
                )
            note = "its classes have other names than the run's, and are taken by their numbers"
            return None, note if is_other else ""
        if unknown := [name for name in self.names if name not in names]:
            raise ConfigError(
                f"{label}: has the class {listed(unknown, 1)}, which the run does not know; it has"
                f" {listed(names)}.{did_you_mean(unknown[0], names)}"
            )
        missing = [name for name in names if name not in self.names]
        note = f"lacks the run's classes {listed(missing)}" if missing else ""
        return [*map(names.index, self.names)] if is_other else None, note

    def _by_number(self, trained: Feature) -> bool:
        """Return whether names are missing on one side; a folder called 1 has a name."""
        if not isinstance(trained, Classes):
            return True
        if all(name.isdigit() for name in (*self.names, *trained.names)):
            return _are_numbers(self.names) and not self.are_names
        return _are_numbers(self.names) or _are_numbers(trained.names)

    @property
    def columns(self) -> Sequence[str]:
        return (self.column,) if self.column else ()

    def absent(self, known: Known) -> Sequence[str]:
        if (values := known()) is None:
            return ()
        counts = values.bincount(minlength=len(self.names)).tolist()
        return [name for name, count in zip(self.names, counts, strict=True) if not count]

    def likeliest(self, top: int) -> Feature:
        if not 1 <= top <= len(self.names):
            raise ConfigError(f"--top {top}: the run has {len(self.names)} classes")
        return dataclasses.replace(self, top=top)

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return probabilities [n, C] and the likeliest class of each."""
        found = {"class": predicted.argmax(1), "probabilities": predicted}
        width = predicted.shape[1]
        if self.top:
            found["probabilities"], classes = predicted.topk(self.top)
            found |= {"class": classes[:, 0], "classes": classes}
        is_row = isinstance(targets, torch.Tensor) and targets.dim() == 1
        if is_row and not targets.is_floating_point():
            found["target"] = targets
        names = [*map(self._name, range(max(width, len(self.names))))]
        return {name: each.cpu().numpy() for name, each in found.items()}, {"class_names": names}

    def _name(self, place: int) -> str:
        return self.names[place] if place < len(self.names) else str(place)

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return class, probability, and those of all or of the likeliest."""
        chosen, chances, name = arrays["class"][place], arrays["probabilities"][place], self._name
        found: Record = {"class": name(chosen), "probability": chances[0 if self.top else chosen]}
        if self.top:
            likeliest = zip(arrays["classes"][place], chances, strict=True)
            found["top"] = [{"class": name(each), "probability": of} for each, of in likeliest]
        else:
            found["probabilities"] = {name(each): of for each, of in enumerate(chances)}
        if "target" in arrays:
            found["target"] = name(arrays["target"][place])
        return found

    def cells(self, answer: Record) -> Record:
        """Return `p_NAME` for probabilities, or `class_2` and on for the next likeliest."""
        if self.top:
            others = enumerate(answer["top"][1:], 2)
            cells = {f"{key}_{place}": each[key] for place, each in others for key in each}
            answer = {**answer, "top": cells}
        return spread(answer, {"top": "", "probabilities": "p_"})

    def line(self, answer: Record) -> str:
        """Return the likeliest classes."""
        if self.top:
            chances = {each["class"]: each["probability"] for each in answer["top"]}
        else:
            several = sorted(answer["probabilities"].items(), key=lambda each: -each[1])
            chances = dict(several[:_SHOWN])
        return _in_words(chances, answer.get("target"))


def _in_words(chances: Mapping[str, float], truth: str | None) -> str:
    words = ", ".join(f"{name} {chance:.4f}" for name, chance in chances.items()) or "none"
    return words if truth is None else f"{words}  target {truth or 'none'}"


def _are_numbers(names: Sequence[str]) -> bool:
    """Return whether these are the names of classes that have none."""
    return [*names] == [str(number) for number in range(len(names))]


def _integral(label: Any) -> int | None:
    """Return a label as an integer, if it is one: 2.7 must not become class 2."""
    try:
        number = int(label)
        return number if float(label) == number else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last by a tensor of several
        return None


@dataclass(frozen=True, kw_only=True)
class Labels(Feature):
    """Labels of 0 and 1: a sample may have any number.

    A prediction is those whose probability reaches the `threshold`, and the probability of each.
    """

    outputs: ClassVar[str] = "logits of the labels"
    gives_sizes: ClassVar[bool] = False
    threshold: float = 0.5

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        number = math.prod(_shape_of(targets))
        return cls(names=tuple(f"label_{place}" for place in range(number)))

    def absent(self, known: Known) -> Sequence[str]:
        if (values := known()) is None or values.dim() != 2:
            return ()
        pairs = zip(self.names, (values > 0).any(0).tolist(), strict=True)
        return [name for name, occurs in pairs if not occurs]

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return probabilities [n, labels]."""
        found = {"probabilities": predicted, **like_targets(targets, predicted)}
        arrays = {name: each.cpu().numpy() for name, each in found.items()}
        return arrays, {"label_names": self.names}

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return labels and probabilities."""
        chances = dict(zip(self.names, arrays["probabilities"][place], strict=True))
        found: Record = {
            "labels": [name for name, chance in chances.items() if chance >= self.threshold],
            "probabilities": chances,
        }
        if "target" in arrays:
            pairs = zip(self.names, arrays["target"][place], strict=True)
            found["target"] = [name for name, on in pairs if on > 0.5]
        return found

    def cells(self, answer: Record) -> Record:
        """Return labels with a `;` between them, and `p_NAME` for probabilities."""
        cells = spread(answer, {"probabilities": "p_"})
        return {key: ";".join(x) if isinstance(x, list) else x for key, x in cells.items()}

    def line(self, answer: Record) -> str:
        chances = {name: answer["probabilities"][name] for name in answer["labels"]}
        truth = answer.get("target")
        return _in_words(chances, truth if truth is None else ", ".join(truth))


def _shape_of(targets: Any) -> tuple[int, ...]:
    """Return the shape of a custom sample's targets. Raise DataError for no tensor."""
    if not hasattr(targets, "shape"):
        kind = type(targets).__name__
        raise DataError(f"sample 0: its targets are a {kind}; let them be a tensor")
    return tuple(targets.shape)


@dataclass(frozen=True, kw_only=True)
class Numbers(Feature):
    """Numbers to predict, which are written in their own units."""

    has_unit: ClassVar[bool] = True
    outputs: ClassVar[str] = "numbers"
    gives_sizes: ClassVar[bool] = False
    shape: tuple[int, ...] = ()
    origin: float | tuple[float, ...] = 0.0
    """A number near which they lie, if that is far from 0 by their deviation; of a row each."""
    transform: str = ""
    """`log` or `log1p`, if their logarithms are trained on."""

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        return cls(shape=_shape_of(targets))

    @property
    def shapes(self) -> Mapping[str, Any]:
        return {"num_classes": math.prod(self.shape)}

    @classmethod
    def of_columns(cls, names: Sequence[str], scales: Mapping[str, Any]) -> Feature:
        own = {name: scales[name] for name in names if name in scales}
        return cls(names=tuple(names), shape=(len(names),), scales=own)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"target_transform": self.transform} if self.transform else {}

    @property
    def unit_width(self) -> int:
        return len(self.names if self.transform else self.scales)

    def in_units(self, values: Tensor) -> Tensor:
        found = super().in_units(values) if self.scales else values.double()
        return getattr(torch, _INVERSE[self.transform])(found) if self.transform else found

    def from_units(self, values: Tensor) -> Tensor:
        found = getattr(values.double(), self.transform)() if self.transform else values.double()
        return super().from_units(found) if self.scales else found

    def seen(self, known: Known) -> Feature:
        if self.transform or (found := known()) is None:
            return self
        values, number = found.double().flatten(), self.shape[0] if len(self.shape) == 1 else 1
        if number > 1 and len(values) % number == 0:
            return dataclasses.replace(self, origin=tuple(map(_near, values.view(-1, number).T)))
        return dataclasses.replace(self, origin=_near(values))

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return values float64 [n, T]."""
        flat = predicted.reshape(len(predicted), -1)
        found = {"values": flat, **like_targets(targets, flat)}
        arrays = {name: self.as_written(tensor) for name, tensor in found.items()}
        return arrays, {"target_names": self._named(flat.shape[1])}

    def _named(self, number: int) -> Sequence[str]:
        if number == len(self.names):
            return self.names
        return ["value"] if number == 1 else [f"value_{place}" for place in range(number)]

    def as_written(self, values: Tensor) -> np.ndarray:
        """Return values in their own units with the digits that their type has, as float64."""
        single = at_least_single(values).cpu()
        if self.transform or self.scales:
            rounding = torch.finfo(single.dtype).eps / 2 * single.double().abs().clamp(min=0.01)
            exact, beyond = (self.in_units(x) for x in (single, single + rounding))
            return _shortest(exact.numpy(), (beyond - exact).abs().numpy())
        shortest: np.ndarray = single.numpy().astype(str).astype(np.float64)  # 0.1, not 0.100000001
        return shortest

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return them by the targets' names."""
        values = arrays["values"][place]
        names = self._named(len(values))
        found: Record = dict(zip(map(apart, names), values, strict=True))
        if "target" in arrays:
            found["target"] = dict(zip(names, arrays["target"][place], strict=True))
        return found

    def cells(self, answer: Record) -> Record:
        """Return numbers, and `target_NAME` for the truth."""
        return spread(answer, {"target": "target_"})


def _near(values: Tensor) -> float:
    mean = float(values.mean())
    return mean if abs(mean) > _FAR * float(values.std(correction=0)) else 0.0


def _shortest(exact: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return numbers of few digits that are no farther from the exact ones than `room`."""
    with np.errstate(all="ignore"):
        places = np.floor(np.log10(room))
        found: np.ndarray = exact + 0.0  # no -0.0
        for place in np.unique(places[np.isfinite(places)]):
            for coarser in (0, 1, 2):
                rounded = np.round(exact, -int(place) - coarser)
                fits = (places == place) & (np.abs(rounded - exact) <= room)
                found[fits] = rounded[fits] + 0.0
    return found


@dataclass(frozen=True, kw_only=True)
class Mask(Feature):
    """The class of each pixel, int64 [height, width]."""

    each: ClassVar[str] = "pixel"
    outputs: ClassVar[str] = "logits of each pixel's classes"
    absent_fix: ClassVar[str] = "masks are to hold 0, 1, ..., or task.ignore_index"
    num_classes: int
    ignore_index: int = 255

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        return cls(num_classes=task.num_classes, ignore_index=task.ignore_index)

    @property
    def shapes(self) -> Mapping[str, Any]:
        return {"num_classes": self.num_classes}

    def check(self, sample: Any) -> Any:
        inputs, mask = labelled(sample, "image", "mask")
        mask = torch.as_tensor(mask)
        if mask.dim() != 2 or mask.is_floating_point():
            raise DataError(
                f"its mask is {mask.dtype} {list(mask.shape)}, expected class numbers, int64"
                " [height, width]"
            )
        self.check_values(mask, "its mask")
        return inputs, mask.long()

    def check_values(self, mask: Any, name: str) -> None:
        """Raise DataError for a value that is neither a class nor to be ignored."""
        out = (mask < 0) | (mask >= self.num_classes)
        out &= mask != self.ignore_index
        if out.any():
            is_jpeg = name.lower().endswith((".jpg", ".jpeg"))
            fix = "JPEG changes numbers: save masks as PNG" if is_jpeg else "fix it, or num_classes"
            raise DataError(
                f"{name} holds the class {int(mask[out][0])}, expected 0 to {self.num_classes - 1},"
                f" or {self.ignore_index} (task.ignore_index); {fix}"
            )

    def absent(self, known: Known) -> Sequence[str]:
        if (values := known()) is None:
            return ()
        there = torch.isin(torch.arange(self.num_classes), values.long()).tolist()
        return [str(number) for number, occurs in enumerate(there) if not occurs]

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return masks [n, H, W], uint8 where classes are few enough."""
        masks = predicted.cpu().numpy()
        return {"masks": masks.astype(np.uint8 if masks.max(initial=0) < 256 else np.uint16)}, {}

    def answers(self, given: Answers) -> Iterator[Record]:
        """Yield the mask of each as an array [H, W]."""
        pairs = zip(given.about, given.arrays["masks"], strict=True)
        return ({**about, "mask": mask} for about, mask in pairs)
