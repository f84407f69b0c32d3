"""What result.json has below its keys: see expt.runs.result.Record."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict


class Host(TypedDict):
    """A machine of a run, and the ranks that it had."""

    name: str
    ranks: list[int]


class Best(TypedDict):
    """The best epoch, by the run's objective."""

    metric: str
    value: float
    epoch: int


class Objective(TypedDict):
    """What the run is chosen by; the value is None where it was never measured."""

    name: str
    value: float | None


class StoppedEarly(TypedDict):
    """The epoch after which a run has ended before its last, and why."""

    epoch: int
    reason: str


class Resumed(TypedDict):
    """The checkpoint from which the last attempt resumed."""

    checkpoint: str
    step: int


class EvaluationOf(TypedDict):
    """What the record of an evaluation is about; its `metrics`, `config` and all else are the
    evaluation's own.
    """

    run: str
    checkpoint: str
    epoch: int
    step: int
    split: str
    own_data: bool
    """Whether the samples are the run's own."""
    dataset: NotRequired[str]
    """What they are called, if they are not."""
    samples: int
    class_names: NotRequired[list[str]]


class Begun(TypedDict):
    """The file that a run's first weights were loaded from, and what is known of the run that wrote
    it, if one did.
    """

    file: str
    identity: str | None
    run: NotRequired[str]
    """Its folder."""
    which: NotRequired[str | None]
    """Of its checkpoints: best or last."""
    epoch: NotRequired[int]
    """After how many it was saved."""
    checksum: NotRequired[str | None]
    """As in `content`."""
    average: NotRequired[bool]
    """Whether they are a moving average."""
    left_out: NotRequired[list[str]]
    """Tensors of the model that were not in the file, or of another shape."""


class Forked(TypedDict):
    """The checkpoint of another run that this one is a fork of, and what is other since."""

    given: str
    """The value of `fork`."""
    run: str
    """The folder of that run."""
    identity: str
    seedless_identity: str
    step: int
    epoch: int
    """Whole epochs that it had done."""
    arguments: list[str]
    """The words that ask for that run: those of the fork are what was typed beside them."""
    changed: dict[str, list[Any]]
    """The settings that are others: of each what it was, and what it is."""


class Made(TypedDict):
    """What the run is made of beside its settings, see expt.config.identity.Content."""

    data: str | None
    code: str | None
    weights: NotRequired[str]
    fork: NotRequired[str]
    seedless_fork: NotRequired[str]


class OfSearch(TypedDict):
    """The place of a run in the search that has found it, counted from 0."""

    number: int
    replaces: NotRequired[int]
    """Of population based training: the run whose place it has taken."""
    parent: NotRequired[int]
    """The better one that it is a fork of."""
