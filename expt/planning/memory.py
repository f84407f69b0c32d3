"""What a step takes of a card's memory, by its moments: gradients come as activations go, and units
are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from expt.planning.cards import Card
from expt.planning.measured import Model, Moment, Pass

Strategy = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step is carried out."""

    workers: int
    shards: int
    """Workers of hsdp that share a replica."""
    parts: int
    """gradient_accumulation"""
    flops: float
    """Of a card, at most, in the type that products are computed in; 0 where that is not known."""
    bucket_bytes: float
    gradient_size: float = 1.0
    """On its way between workers of ddp, as a share of float32; so the next two."""
    gather_size: float = 1.0
    """Of parameters that are sharded, where they are gathered."""
    reduce_size: float = 1.0
    """Of gradients that are whole, where parameters are sharded."""
    reduces_each_part: bool = False
    reshards: bool = True
    """Whether what is gathered is dropped between forward and backward."""
    offload: bool = False
    """Whether the optimiser's states wait in the host's memory."""

    def shards_of(self, strategy: Strategy) -> int:
        """Workers that have a part of each parameter each."""
        return {"ddp": 1, "fsdp": self.workers, "hsdp": self.shards}[strategy]

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether those of a step's parts are added up before they are shared out."""
        return self.parts > 1 and not self.reduces_each_part


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of a card at the moment at which all of it is most; bytes."""

    parameter_bytes: float
    gradient_bytes: float
    """Once there are all."""
    state_bytes: float
    activation_bytes: float
    """Or what the update takes, where that is more; what is left for them beside all gradients."""
    other_bytes: float
    """Buffers, the moving average, and of sharded parameters those that are gathered for a moment.
    """
    largest_part: int | None
    """Samples that fit on a card at a time; 0 if none does."""


class _Load(NamedTuple):
    """What a pass holds at a moment beside what is kept from step to step; bytes."""

    gradients: float
    gathered: float
    activations: float
    for_each_sample: float
    """Of the activations."""

    @property
    def total(self) -> float:
        """Of all."""
        return self.gradients + self.gathered + self.activations


def memory(
    strategy: Strategy, model: Model, passes: Sequence[Pass], setting: Setting, card: Card | None
) -> Memory:
    """By `passes` of two sizes, the first of which is the asked one; between and beyond activations
    are a line.
    """
    share = 1 / setting.shards_of(strategy)
    parameters, states = share * model.parameter_bytes, share * model.state_bytes
    in_update = states
    if setting.offload:
        states, in_update = (
            share * model.scalar_bytes,
            share * (model.scalar_bytes + model.state_bytes_at_once),
        )
    fixed = model.buffer_bytes + share * model.average_bytes
    gradients = kept_gradients(strategy, model, setting)
    loads = _loads(strategy, model, passes, setting)
    worst = max(loads, key=lambda load: load.total)
    in_update += parameters + fixed + share * (model.gradient_bytes + model.update_bytes)
    base = parameters + states + fixed
    total = max(base + worst.total, in_update)
    activations = max(0.0, total - base - gradients - worst.gathered)
    largest = None
    if card is not None:
        fits = in_update <= card.usable_bytes
        largest = _largest(loads, passes[0].samples, card.usable_bytes - base) if fits else 0
    return Memory(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=states,
        activation_bytes=activations,
        other_bytes=total - parameters - states - gradients - activations,
        largest_part=largest,
    )


def kept_gradients(strategy: Strategy, model: Model, setting: Setting) -> float:
    """What all gradients take between backward and update, or, where that is more, between the
    parts of a step.
    """
    if strategy == "ddp":
        return model.gradient_bytes
    if setting.keeps_whole_gradients:
        return setting.reduce_size * model.gradient_bytes
    return model.gradient_bytes / setting.shards_of(strategy)


def _loads(
    strategy: Strategy, model: Model, passes: Sequence[Pass], setting: Setting
) -> list[_Load]:
    asked, other = passes
    own_casts = strategy != "ddp" and setting.gather_size < 1  # of FSDP, in place of autocast's
    kept = kept_gradients(strategy, model, setting)
    come = (
        strategy != "ddp" and setting.parts == 1
    )  # else they are there, in buckets or from the part before
    has_fresh = (
        strategy != "ddp" and not setting.keeps_whole_gradients
    )  # counted with what is gathered

    def held(moment: Moment) -> float:
        found = moment.without_gradients if has_fresh else moment.held
        return found.bytes - own_casts * found.cast_bytes

    return [
        _Load(
            gradients=kept * one.gradient_bytes / model.gradient_bytes if come else kept,
            gathered=0.0 if strategy == "ddp" else _gathered(model, setting, one.gradient_bytes),
            activations=held(one),
            for_each_sample=(held(more) - held(one)) / (other.samples - asked.samples),
        )
        for one, more in zip(asked.moments, other.moments, strict=True)
    ]


def _gathered(model: Model, setting: Setting, done: int) -> float:
    """Whole parameters and gradients that sharding has on a card for a moment, where `done` bytes
    of these are shared.

    What is in no unit from the first use to the last gradient. Of the units, as FSDP2 goes through
    them: the one in use; the next one, on its way; the gradients of the one before, as they are
    sent; and, where they are not added to those of another part, its own. Once it has these it
    drops its parameters."""
    size, sent = setting.gather_size, setting.reduce_size
    fresh = 0.0 if setting.keeps_whole_gradients else size
    units = (0, *model.unit_bytes, 0)
    in_turn = max(
        max(size * (own + following) + fresh * own + sent * before, size * following + (fresh + sent) * own)
        for following, own, before in zip(units, units[1:], units[2:], strict=False)
    ) if model.unit_bytes else 0.0  # fmt: skip
    rest = model.parameter_bytes - sum(model.unit_bytes)
    if setting.reshards:
        return max((size + fresh) * rest + in_turn, (size + fresh + sent) * rest)
    held = size * max(model.parameter_bytes - done, rest)
    largest = max(model.unit_bytes, default=rest)
    return held + fresh * rest + (fresh + sent) * largest


def _largest(loads: Sequence[_Load], samples: int, room: float) -> int:
    """Samples whose activations fit into `room` at every moment."""
    found = [
        math.floor(samples + (room - load.total) / load.for_each_sample)
        for load in loads
        if load.for_each_sample > 0
    ]
    fits = all(load.total <= room for load in loads if load.for_each_sample <= 0)
    return max(0, min(found)) if found and fits else 0
