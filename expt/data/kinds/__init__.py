"""Kinds of datasets: their keys, and the questions that the rest of expt asks them.

Each kind is a subclass in a module of expt.data.kinds, found there by the names that its field
`name` may have. Such a module must import without torch and NumPy: the driver reads it, and `open`
imports them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Count, Folder, Fraction, Key, Name, Positive
from expt.errors import ConfigError
from expt.features import ROLES, Anything, Classes, Feature, Features, Mask, Tokens
from expt.late import np

Check = Callable[[int], None]
"""Checks data in a number of threads; raises DataError that names all that is wrong."""

if TYPE_CHECKING:
    import torch

    from expt.data.source import Source


class Opening(NamedTuple):
    """The way in which a worker opens a dataset."""

    task: Any
    """The configured task, which takes the targets."""
    device: torch.device
    num_workers: int = 0
    """Processes that read for this worker."""
    trained_on: Features | None = None
    """The features in the record of a run that is evaluated: their columns and scales are used."""


HeldOut = Annotated[Fraction, Key(evaluate=True, varies="split")]
ValSplit = Annotated[
    Literal["random", "last"],
    Key(evaluate=True, varies="split", only_if={"dataset.val_split": "last"}),
]
Group = Annotated[
    Name | None, Key(evaluate=True, varies="split", only_if={"dataset.group": IS_SET})
]
"""The column, or such, whose samples of one value are held out together."""
TrainLimit = Annotated[Count | None, Key(fork="epoch", evaluate=True, varies="split")]
Mean = Annotated[tuple[float, ...] | None, Key(evaluate=True)]
Std = Annotated[tuple[Positive, ...] | None, Key(evaluate=True)]
Standardise = Annotated[bool, Key(evaluate=True)]
TargetTransform = Annotated[
    Literal["log", "log1p"] | None,
    Key(evaluate=True, only_if={"dataset.target_transform": IS_SET}),
]
Place = Annotated[Folder, Key(result="none")]
"""The folder of files; their content is part of the identity."""
SplitNames = tuple[Literal["train", "val", "test"], ...] | None
Splits = Annotated[SplitNames, Key(evaluate=True, example="'dataset.splits=[train,test]'")]
"""Which parts of a folder are used; None: all that are there."""
Readers = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], Key(result="none")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    """How training images are moved; conf/dataset has the meaning of each key."""

    crop_padding: Annotated[int, Field(ge=0)] = 0
    padding_mode: Annotated[
        Literal["constant", "reflect"], Key(only_if={"dataset.augment.crop_padding": IS_SET})
    ] = "constant"
    flip: bool | Literal["alternate"] = False
    cutout: Annotated[int, Field(ge=0)] = 0

    @property
    def is_set(self) -> bool:
        """True if images are changed at all."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(self))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetConfig:
    """A dataset as it is configured; conf/dataset/ explains its keys."""

    if TYPE_CHECKING:
        name: Any  # a Literal of each kind's names
    val_fraction: HeldOut
    train_limit: TrainLimit
    mean: Mean
    std: Std
    augment: Annotated[Augment, Key(fork=True, evaluate=True)] = dataclasses.field(
        default_factory=Augment
    )
    folds: Annotated[Annotated[int, Field(ge=2)] | None, Key(evaluate=True, varies="split")] = None
    fold: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Key(evaluate=True, varies="repetition", cost=False, only_if={"dataset.folds": IS_SET}),
    ] = None
    sampling: Annotated[Literal["balanced"] | None, Key(fork="epoch", evaluate=True)] = None
    shuffle: Annotated[
        bool, Key(fork="epoch", evaluate=True, only_if={"dataset.shuffle": False})
    ] = True

    OFFERS: ClassVar[tuple[type[Feature], ...]] = (Classes,)
    """The targets that it has for a task; a custom task takes any."""

    # ---- its settings, as rules, reports and records ask for them ----

    @property
    def label(self) -> str:
        """How it is chosen, for messages."""
        return f"dataset={self.name}"

    def title(self, chosen: str | None, typed: Mapping[str, Any]) -> str:
        """Return its name in reports, by the word that chose it and the keys that were typed."""
        return Path(str(typed["path"])).stem if typed.get("path") else chosen or self.name

    def note(self, used: Literal["to train", "to evaluate", "for pictures"]) -> str:
        """Return a warning where it is used to train only, to evaluate only, or for pictures."""
        return ""

    def problems(self, task: Any) -> list[str]:
        """Return contradictions among its own keys, or with the task, one line each."""
        return []

    @property
    def counted_as(self) -> Mapping[str, str]:
        """The keys that count by another value for the run's identity, which has their files."""
        return {}

    @property
    def needed(self) -> tuple[int, int] | None:
        """The height and width that pictures are decoded at, at the least; None: as they are."""
        return None

    @property
    def texts(self) -> tuple[str, tuple[str, ...]]:
        """The key that names columns of texts, and these; empty where inputs are others."""
        return "", ()

    def is_causal(self, task: Any) -> bool:
        """Return whether the tokens of texts are targets, too."""
        role, _ = self.texts
        return role in ("prompt", "messages") or bool(role and task and task.takes is Tokens)

    def known_features(self, vocabulary: int | None = None) -> Features | None:
        """Return its features, if no file of samples need be read.

        Of a text whose tokenizer is not there the `vocabulary` is the number of tokens.
        """
        return None

    def parts(self) -> Collection[str] | None:
        """Return which of train, val and test there are, if that shows without reading them."""
        return None

    def measured(self) -> Literal["test", "all"]:
        """Return the split that an evaluation measures by default."""
        return "test" if "test" in (self.parts() or ["test"]) else "all"

    def may_validate(self) -> bool:
        """Return whether it may have samples that validate."""
        return self.val_fraction > 0 or self.folds is not None

    def evaluated_at_once(self, trained: int) -> int | None:
        """Return the samples of a worker's evaluation step, if no more than it has `trained` on."""
        return None

    # ---- its files, in the driver ----

    def prepare(self, task: Any = None, *, learns: bool = True) -> Check | None:
        """Find, else download, decode and check the files; quick if that is done.

        The configured `task` takes its targets, and `learns` says whether it is trained on. Return
        a check that takes longer, and may be done while a run trains. Raise DataError that names
        missing or damaged files.
        """
        return None

    def fingerprint(self) -> str | None:
        """Return a digest of the files; None if the settings say it all."""
        return None

    def described(self, task: Any) -> str:
        """Return a line on the parts of the files that a run takes; printed at its start."""
        return ""

    def keep(self, folder: Path) -> None:
        """Copy the tokenizer of texts into a folder of the run."""

    # ---- its samples, on a worker ----

    def opening(self) -> Literal["at once", "slowly", "in turn"]:
        """Return how workers open it: slowly to look at pictures, in turn if it may download."""
        return "at once"

    def open(self, how: Opening) -> Source:
        """Return its parts."""
        raise NotImplementedError

    def look(self, source: Source) -> None:
        """Look at pictures that `prepare` could not see. Raise DataError for all that is wrong."""

    # ---- predictions ----

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return a function that says where a sample of a split is from, by its number."""
        return lambda index: {"index": index}

    def check_pixels(self, path: str, images: np.ndarray) -> None:
        """Raise ConfigError for images of a file that are not counted as those of training."""
        low, high = images.min(), images.max()
        if images.dtype.kind == "f" and not (low >= 0 and high <= 1):
            raise ConfigError(f"{path}: holds floats from {low:g} to {high:g}, expected 0 to 1")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raise ConfigError if they are unknown."""
        fix = "give tokens, int64 [N, length], or --split"
        raise ConfigError(f"{self.label}: how it makes tokens of a text is not known; {fix}")

    def lines(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        """Return the number and the tokens of each line of a text; raise as `encode` does."""
        return iter([(0, np.array(self.encode("")))])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Images(DatasetConfig):
    """Images, each of one class."""

    transforms: Annotated[
        tuple[dict[str, Any], ...] | None,
        Key(fork=True, evaluate=True, example="'dataset.transforms=[{_target_: mine.Noise}]'"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OfTexts(DatasetConfig):
    """Rows of a table; their inputs may be texts, which a tokenizer reads."""

    text: Annotated[Name | None, Key(only_if={"dataset.text": IS_SET})] = None
    prompt: Annotated[Name | None, Key(only_if={"dataset.prompt": IS_SET})] = None
    response: Annotated[Name | None, Key(only_if={"dataset.response": IS_SET})] = None
    messages: Annotated[Name | None, Key(only_if={"dataset.messages": IS_SET})] = None
    tokenizer: Annotated[Folder | None, Key(result="none")] = None
    max_tokens: Annotated[
        Count | None, Key(evaluate=True, only_if={"dataset.max_tokens": IS_SET})
    ] = None
    group_by_length: Annotated[
        bool, Key(fork="epoch", evaluate=True, only_if={"dataset.group_by_length": IS_SET})
    ] = False

    @property
    def texts(self) -> tuple[str, tuple[str, ...]]:
        for role, keys in ROLES.items():
            if any(getattr(self, key) is not None for key in keys):
                return role, tuple(filter(None, (getattr(self, key) for key in keys)))
        return "", ()

    def keep(self, folder: Path) -> None:
        if self.texts[1]:
            from expt.data import tokenizer  # late: most datasets have no texts

            tokenizer.keep(str(self.tokenizer), folder)

    def with_tokenizer(self, content: str) -> str:
        """Return the digest `content` of the dataset's files with that of its tokenizer."""
        from expt.data import tokenizer

        own = tokenizer.fingerprint(str(self.tokenizer)) if self.texts[1] else ""
        return f"{content}-{own}" if own else content

    def problems_of_texts(self, task: Any) -> list[str]:
        """Return contradictions of the keys of texts and the task, one line each."""
        (role, _), found = self.texts, list[str]()
        given = [key for keys in ROLES.values() for key in keys if getattr(self, key) is not None]
        ways = "dataset.text, dataset.prompt and dataset.response, or dataset.messages"
        if not role:
            if task.takes is Tokens:
                found.append(f"task={task.name}: dataset={self.name} needs texts; name {ways}")
            if self.max_tokens or self.group_by_length:
                found.append("dataset.max_tokens, group_by_length: are of texts; name dataset.text")
            return found
        if (*given,) != ROLES[role]:
            found.append(f"dataset.{', '.join(given)}: texts are named by {ways}")
        if role != "text" and task.takes not in (Tokens, Anything):
            found.append(f"dataset.{role}: is for task=language_model; name dataset.text")
        if self.tokenizer is None:
            fix = "give its folder, or use model=transformers, whose own is taken"
            found.append(f"dataset.tokenizer=null: texts need one; {fix}")
        if self.group_by_length and not self.shuffle:
            found.append("dataset.group_by_length=true: draws the order; use dataset.shuffle=true")
        return found


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OfPictures(DatasetConfig):
    """Pictures of any size, whose targets may be masks."""

    if TYPE_CHECKING:
        image_size: Any
        draft: bool

    @property
    def needed(self) -> tuple[int, int] | None:
        return self.image_size if self.draft else None

    def mask_classes(self) -> int | None:
        """Return the number of classes in its masks, if it says so."""
        return None

    def mask(self, task: Any) -> Mask:
        """Return the feature of masks, by the number of classes of the dataset, else of a task."""
        settings = {"ignore_index": task.ignore_index} if hasattr(task, "ignore_index") else {}
        return Mask(num_classes=self.mask_classes() or task.num_classes, **settings)

    def problems_of_masks(self, task: Any) -> list[str]:
        """Return contradictions of the keys of masks and the task, one line each."""
        found, name, known = list[str](), self.name, self.mask_classes()
        if self.augment.is_set:
            fault = "moves images without their masks"
            found.append(f"dataset.augment: {fault}; leave it out of {name}")
        if task.takes is Mask:
            if known is None and task.num_classes is None:
                found.append(f"task.num_classes: dataset={name} has none; use task.num_classes=21")
            elif known is not None and task.num_classes not in (None, known):
                fix = f"dataset={name} has {known}; leave it out"
                found.append(f"task.num_classes={task.num_classes}: {fix}")
        return found
