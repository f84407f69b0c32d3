"""The contract of features, and the one of values of any kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from expt.errors import ConfigError, DataError, listed
from expt.late import np, torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

Record: TypeAlias = "dict[str, Any]"
"""The answer for one sample: its origin and the prediction."""
Arrays: TypeAlias = "dict[str, np.ndarray]"
Known: TypeAlias = "Callable[[], Tensor | None]"
"""Reads the targets of training samples, or of some; None where they are not known beforehand."""
_SHOWN = 3
_BY_NAME = dict[str, "type[Feature]"]()


class Answers(NamedTuple):
    """The answers on some samples, in order."""

    about: Sequence[Mapping[str, str | int]]
    """The origin of each: its path, its number in a file of several, and its other columns."""
    arrays: Arrays
    """[n, ...] each."""
    beside: Mapping[str, Sequence[str]] = {}
    """Names of the classes, labels or numbers in the arrays, by their places."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of each picture as it lies."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """The description of a sample's inputs, or of its targets."""

    names: tuple[str, ...] = ()
    """The names of classes, labels, numbers or columns; empty where they have none."""
    scales: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """The mean and deviation by which those of these names are standardised, if they are."""

    noun: ClassVar[str] = "sample"
    """The noun for a sample with such inputs."""
    has_one_class: ClassVar[bool] = False
    """True if a sample is of one class, so that classes can be smoothed, mixed and drawn evenly."""
    has_unit: ClassVar[bool] = False
    """True if values are numbers in a unit of their own, which may be large."""
    each: ClassVar[str] = "sample"
    """The unit that a model gives outputs for: sample, pixel or token; empty where nobody knows."""
    is_image: ClassVar[bool] = False
    """True if values are images of pixels, which are normalised and augmented."""
    outputs: ClassVar[str] = ""
    """Outputs of a model for such targets, in words."""

    gives_sizes: ClassVar[bool] = True
    """True if another dataset's values become like these by keys of their sizes."""
    loose: ClassVar[Collection[str]] = ()
    """The sizes in which samples may differ from those that were trained on."""
    absent_fix: ClassVar[str] = "add some, or hold out other samples"
    """A fix for classes that are absent."""

    def __init_subclass__(cls) -> None:
        """Keep the class for `read`. Raise ConfigError where one of expt's is called so."""
        known = _BY_NAME.get(cls.__name__, cls)
        if known.__module__.startswith("expt.") and known.__module__ != cls.__module__:
            raise ConfigError(f"{cls.__module__}.{cls.__name__}: expt has one; rename the class")
        _BY_NAME[cls.__name__] = cls

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        """Return the feature of a custom `dataset`, whose first sample has such `targets`."""
        raise NotImplementedError

    @classmethod
    def of_columns(cls, names: Sequence[str], scales: Mapping[str, Any]) -> Feature:
        """Return the feature of a table's columns of numbers, in units of the `scales`."""
        return cls(names=tuple(names))

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a table that have them, by name."""
        return self.names

    @property
    def unit_width(self) -> int:
        """The numbers that `in_units` takes for each sample; 0 if they have no other units."""
        return len(self.scales)

    @property
    def unscaled(self) -> Feature:
        """The same in its own units, as it stands in a table."""
        return dataclasses.replace(self, scales={})

    def in_units(self, values: Tensor) -> Tensor:
        """Return standardised values, T for each sample, in their own units, as float64."""
        mean, deviation = self._scales_on(values.device)
        rows = values.reshape(-1, len(mean)).double()
        found = torch.addcmul(mean, rows, deviation)
        # Zeros stay zeros, which float32 rounds to numbers next to them where standardised.
        found = torch.where(found.abs() <= torch.finfo(torch.float32).eps * mean.abs(), 0.0, found)
        return found.reshape(values.shape)

    def as_written(self, values: Tensor) -> np.ndarray:
        """Return values in their own units as predictions have them, as float64."""
        return as_array(self.in_units(values))

    def from_units(self, values: Tensor) -> Tensor:
        """Return values in their own units as a model gives them, as float64."""
        mean, deviation = self._scales_on(values.device)
        rows: Tensor = (values.double().reshape(-1, len(mean)) - mean) / deviation
        return rows.reshape(values.shape)

    def _scales_on(self, device: Any) -> Tensor:
        scales: Tensor = torch.tensor([*self.scales.values()], dtype=torch.float64, device=device)
        return scales.T

    @property
    def shapes(self) -> Mapping[str, Any]:
        """The keywords of sizes that a model may ask for."""
        return {"num_classes": len(self.names)} if self.names else {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys by which another dataset's values become like these."""
        return self.shapes if self.gives_sizes else {}

    @property
    def record(self) -> dict[str, Any]:
        """The record of it, see `read`: its name, and the fields that are not empty."""
        fields = {key: one for key, one in vars(self).items() if one not in (None, "", (), {})}
        return {"feature": type(self).__name__, **fields}

    @staticmethod
    def read(record: Mapping[str, Any]) -> Feature:
        """Return the feature that was recorded. Raise ConfigError where that is none."""
        try:
            cls, values = _BY_NAME[record["feature"]], {**record}
            del values["feature"]
            return cls(**{name: _tuples(value) for name, value in values.items()})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "the record describes the run's samples as another version of expt does; train it"
                " again with this one"
            ) from error

    def in_words(self) -> Iterator[str]:
        """Yield lines on it, for the start of a run."""
        return iter(())

    def differing(self, other: Feature) -> Iterator[str]:
        """Yield how weights that were trained with `other` were trained otherwise."""
        if type(self) is not type(other):
            return
        if len(other.names) == len(self.names):  # of other lengths they don't fit
            pairs = zip(other.names, self.names, strict=True)
            if others := [pair for pair in pairs if len({*pair}) > 1]:
                were, are = (listed(one, _SHOWN) for one in zip(*others, strict=True))
                kind = type(self).__name__.lower()
                yield (
                    f"were trained with the {kind} {were}, and this run has {are} at the same"
                    " positions; these start from what was learned for the former"
                )
        if other.scales != self.scales:
            yield "were trained on rows with other means and deviations"

    def drawn(self, number: int, generator: Generator) -> Tensor | None:
        """Return random values [number, ...]; None where their shape is not known."""
        if not (size := self.shapes.get("image_size")):
            return None
        return torch.rand((number, self.shapes["channels"], *size), generator=generator)

    def check(self, sample: Any) -> Any:
        """Return a custom sample (inputs, targets) as it is trained on. Raise DataError."""
        return sample

    def fit(self, trained: Feature, label: str) -> tuple[Sequence[int] | None, str]:
        """Return the place of each class among those `trained`, and a note on others.

        The places are None where all are equal. Raise ConfigError where a model of `trained` values
        does not take these, of the dataset `label`.
        """
        for key in sorted({*self.shapes, *trained.shapes} - {*self.loose}):
            has, wanted = (_shown(key, one.shapes.get(key)) for one in (self, trained))
            if has != wanted:
                raise ConfigError(
                    f"{label}: has {has}, and the model takes {wanted}; use data like the run's"
                )
        return None, ""

    def absent(self, known: Known) -> Sequence[str]:
        """Return the names of classes that do not occur among training targets."""
        return ()

    def seen(self, known: Known) -> Feature:
        """Return the feature with facts about training targets."""
        return self

    def likeliest(self, top: int) -> Feature:
        """Return the one whose answers are the `top` likeliest classes."""
        raise ConfigError(f"--top {top}: works for classification only")

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return a batch's predictions, with targets where they are known, and their names."""
        raise NotImplementedError

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return the prediction for one sample."""
        raise NotImplementedError

    def answers(self, given: Answers) -> Iterator[Record]:
        """Yield each sample's origin and prediction."""
        lists = {name: _short(array) for name, array in given.arrays.items()}
        return ({**about, **self.answer(lists, place)} for place, about in enumerate(given.about))

    def cells(self, answer: Record) -> Record:
        """Return one of `answers` as the cells of a table, those of other columns as they are.

        A cell's name is no other's.
        """
        return spread(answer, {})

    def line(self, answer: Record) -> str:
        """Return the prediction for one sample in a line."""
        cells = self.cells(answer).items()
        return "  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in cells)

    def named_apart(self, given: Answers) -> Answers:
        """Return answers in which no column of a sample's origin is called as a prediction is."""
        one = {name: array[:1] for name, array in given.arrays.items()}
        (answer,) = self.answers(given._replace(about=[{}], arrays=one))
        own = {*given.arrays, *given.beside, *answer, *self.cells(answer)}
        names = new_names(given.about[0], own)
        about = [{names[name]: each[name] for name in each} for each in given.about]
        return given._replace(about=about)

    def joined(self, several: Iterable[Answers]) -> Iterator[Answers]:
        """Yield the answers, those of one sample together."""
        yield from several


@dataclass(frozen=True, kw_only=True)
class Anything(Feature):
    """Values of any kind, such as those of a custom dataset; their shape if they are a tensor."""

    each: ClassVar[str] = ""
    gives_sizes: ClassVar[bool] = False
    loose: ClassVar[Collection[str]] = ("image_size",)
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Empty where a value is no tensor."""
    are_inputs: bool = False

    @classmethod
    def like(cls, value: Any, *, are_inputs: bool = False) -> Anything:
        """Return the feature of a sample's `value`."""
        if getattr(value, "shape", None) is None:
            return cls(are_inputs=are_inputs)
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(shape=tuple(value.shape), dtype=dtype, are_inputs=are_inputs)

    @classmethod
    def of_columns(cls, names: Sequence[str], scales: Mapping[str, Any]) -> Feature:
        own = {name: scales[name] for name in names if name in scales}
        return cls(names=tuple(names), scales=own, shape=(len(names),), dtype="float32")

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        return cls.like(targets)

    @property
    def shapes(self) -> Mapping[str, Any]:
        """The sizes of an image, which a row is too; or the number of values of targets."""
        if not self.dtype:
            return {}
        if not self.are_inputs:
            is_integer = not self.shape and "int" in self.dtype  # a class, or a count
            return {} if is_integer else {"num_classes": math.prod(self.shape)}
        if not 1 <= len(self.shape) <= 3:
            return {}
        channels, *size = (1,) * (3 - len(self.shape)) + self.shape
        return {"channels": channels, "image_size": tuple(size)}

    def drawn(self, number: int, generator: Generator) -> Tensor | None:
        if not self.dtype:
            return None
        values = torch.rand((number, *self.shape), generator=generator)
        return values.to(getattr(torch, self.dtype))

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Sequence[str]]]:
        """Return the predictions of a custom task by their names."""
        if isinstance(predicted, list | tuple) and all(isinstance(x, Mapping) for x in predicted):
            return _of_samples(predicted), {}
        found = [as_array(tensor) for tensor in tensors_in(predicted)]
        if not found:
            kind = type(predicted).__name__
            raise ConfigError(
                f"the task predicts a {kind}; give tensors [B, ...], or a list with a dict of"
                " tensors for each sample"
            )
        names = [f"output_{place}" for place in range(len(found))] if len(found) > 1 else ["output"]
        if isinstance(predicted, Mapping) and len(predicted) == len(found):
            names = [*map(apart, map(str, predicted))]
        several = dict(zip(names, found, strict=True))
        if isinstance(targets, torch.Tensor) and targets.dim() and targets.numel() == len(targets):
            several["target"] = as_array(targets.flatten())
        return several, {}

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        """Return its part of each tensor."""
        return {name: several[place] for name, several in arrays.items()}


def _of_samples(predicted: Sequence[Mapping[str, Any]]) -> Arrays:
    """Return predictions that have a dict for each sample, of tensors of any shape."""
    found = dict[str, np.ndarray]()
    for name in dict.fromkeys(name for one in predicted for name in one):
        found[apart(str(name))] = array = np.empty(len(predicted), object)
        for place, one in enumerate(predicted):
            parts = [_short(as_array(each[None]))[0] for each in tensors_in(one.get(name))]
            array[place] = parts[0] if isinstance(one.get(name), torch.Tensor) else parts
    return found


class Features(NamedTuple):
    """The features of a dataset's samples."""

    inputs: Feature
    targets: Feature

    @property
    def shapes(self) -> dict[str, Any]:
        """The keywords of sizes that a model may ask for."""
        return {**self.inputs.shapes, **self.targets.shapes}

    @property
    def record(self) -> dict[str, Any]:
        """The record of both."""
        return {"inputs": self.inputs.record, "targets": self.targets.record}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Features:
        """Return those in the `data` of a run's record. Raise ConfigError for another version's."""
        return cls(*(Feature.read(record.get(name) or {}) for name in cls._fields))


def noun_of(record: Mapping[str, Any]) -> str:
    """Return the noun for a sample of a run or an evaluation, from its record."""
    data = record.get("data") or {}
    return Features.read(data).inputs.noun if "inputs" in data else "image"


def at_least_single(numbers: Tensor) -> Tensor:
    """Return numbers in float32; those of a model in float64 stay as they are."""
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor for NumPy, which has no short floats."""
    tensor = at_least_single(tensor) if tensor.is_floating_point() else tensor
    found: np.ndarray = tensor.cpu().numpy()
    return found


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, detached."""
    if isinstance(tree, torch.Tensor):
        yield tree.detach()
    elif isinstance(tree, Mapping | list | tuple):
        for below in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(below)


def like_targets(targets: Any, predicted: Tensor) -> dict[str, Tensor]:
    """Return the targets as `target`, in the shape of the predictions, if they are as many."""
    if isinstance(targets, torch.Tensor) and targets.numel() == predicted.numel():
        return {"target": at_least_single(targets.reshape(predicted.shape))}
    return {}


def spread(answer: Record, prefixes: Mapping[str, str]) -> Record:
    """Return an answer with a cell for each entry of its mappings, under one of `prefixes`.

    Where that is the name of another cell, it ends with a `_` more.
    """
    found: Record = {}
    for key, value in answer.items():
        if key not in prefixes or not isinstance(value, Mapping):  # another column may be so called
            found[key] = value
            continue
        for name, each in value.items():
            cell = f"{prefixes[key]}{name}"
            while cell in found or cell in answer:
                cell += "_"
            found[cell] = each
    return found


def new_names(names: Collection[str], taken: Collection[str]) -> dict[str, str]:
    """Return a name for each column of a table that is not `taken`: its own, or `table.NAME`."""
    found = dict[str, str]()
    for name in names:
        new = name
        while new in taken or (new != name and new in names):
            new = f"table.{new}"
        found[name] = new
    return found


def apart(name: str) -> str:
    """Return a target's name that is not a column which says where a sample is from."""
    return f"{name} predicted" if name in ("path", "row", "index", "line", "target") else name


def labelled(sample: Any, inputs: str, label: str = "label") -> tuple[Any, Any]:
    """Return a sample (`inputs`, `label`). Raise DataError where it is none."""
    if isinstance(sample, list | tuple) and len(sample) == 2:
        return sample[0], sample[1]
    is_some = isinstance(sample, list | tuple)
    found = f"{len(sample)} values" if is_some else f"a {type(sample).__name__}"
    raise DataError(f"it is {found}, expected ({inputs}, {label})")


def _tuples(value: Any) -> Any:
    """Return tuples in place of the lists that JSON made of them."""
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _shown(key: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " x ".join(map(str, value))
    return f"no {key}" if value is None else f"{key} {value}"


def _short(array: np.ndarray) -> list[Any]:
    """Return nested lists, of float32 as Python floats with just its digits."""
    if array.dtype == np.float32:
        array = np.array([float(f"{x:.9g}") for x in array.ravel().tolist()]).reshape(array.shape)
    return list(array.tolist())
