"""What each strategy takes of a card, how long its step is, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from expt.planning.cards import Card
from expt.planning.measured import Model, Pass
from expt.planning.scaling import BACKWARD, Cluster, all_reduce_s, bucket_s, sharded_s

Strategy = Literal["ddp", "fsdp", "hsdp"]
UTILISATION = 0.4
"""Share of a card's peak that a step's products reach; 0.3 to 0.5 are usual for transformers."""

NEAR = 1.25
"""Steps that differ by less are told apart by no such model: of those the simplest strategy is taken."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step is carried out."""

    workers: int
    per_node: int
    parts: int
    """gradient_accumulation"""
    mixed: bool
    flops: float
    """Of a card, at most, in the type that products are computed in; 0 where that is not known."""
    bucket_bytes: float
    gradient_size: float = 1.0
    """On its way, as a share of float32."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Of one strategy, with or without checkpointed activations, for each card; bytes."""

    strategy: Strategy
    checkpointing: bool
    parameter_bytes: float
    gradient_bytes: float
    state_bytes: float
    activation_bytes: float
    other_bytes: float
    """Buffers, the moving average, and of sharded parameters those that are gathered for a moment."""
    largest_part: int | None
    """Samples that fit on a card at a time; 0 if none does."""
    step_s: float | None

    @property
    def total_bytes(self) -> float:
        """For each card."""
        kept = self.parameter_bytes + self.gradient_bytes + self.state_bytes
        return kept + self.activation_bytes + self.other_bytes


def shards(strategy: Strategy, setting: Setting) -> int:
    """Workers that have a part of each parameter each."""
    return {"ddp": 1, "fsdp": setting.workers, "hsdp": min(setting.workers, setting.per_node)}[strategy]


def plan(
    strategy: Strategy,
    model: Model,
    passes: Sequence[Pass],
    setting: Setting,
    cluster: Cluster,
    card: Card | None,
    *,
    checkpointing: bool,
) -> Plan:
    """By `passes` of two sizes, the first of which is the asked one; between and beyond activations are a line."""
    asked, other = passes
    share = shards(strategy, setting)
    sharded = strategy != "ddp"
    gathered = _gathered(model, mixed=setting.mixed) if sharded else 0.0
    parameter_bytes, gradient_bytes = model.parameter_bytes / share, model.gradient_bytes / share
    state_bytes = model.state_bytes / share
    average = model.average_bytes / share
    casts = asked.cast_bytes if sharded else 0  # FSDP's own copies in mixed precision come and go with each block
    fixed = model.buffer_bytes + average + gathered
    activations = asked.activation_bytes - casts
    slope = (other.activation_bytes - asked.activation_bytes) / (other.samples - asked.samples)
    largest = None
    if card is not None:
        kept = parameter_bytes + gradient_bytes + state_bytes + fixed
        room = card.usable_bytes - kept - (activations - slope * asked.samples)
        update = card.usable_bytes - kept - model.update_bytes / share
        largest = max(0, math.floor(room / slope)) if update >= 0 and slope > 0 else 0
    return Plan(
        strategy=strategy,
        checkpointing=checkpointing,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        activation_bytes=max(activations, model.update_bytes / share),
        other_bytes=fixed,
        largest_part=largest,
        step_s=_step_s(strategy, model, asked, setting, cluster, card) if card and setting.flops else None,
    )


def _gathered(model: Model, *, mixed: bool) -> float:
    """Whole parameters and gradients that sharding has on a card for a moment.

    What is in no block (embeddings, the head) from the first use to the last gradient; of the blocks the one in use,
    the next one, which is on its way, and a block's gradients.
    """
    size = 0.5 if mixed else 1.0
    rest = model.parameter_bytes - sum(model.block_bytes)
    largest = max(model.block_bytes, default=0)
    return size * (2 * rest + 3 * largest)


def _step_s(strategy: Strategy, model: Model, asked: Pass, setting: Setting, cluster: Cluster, card: Card) -> float:
    """Computation at a usual share of the card's peak, the update, and what of the exchange does not hide."""
    part_s = asked.flop / (setting.flops * UTILISATION)
    share = shards(strategy, setting)
    touched = 3 * (model.parameter_bytes + model.gradient_bytes + 2 * model.state_bytes) / share
    update_s = touched / card.memory_bytes_per_s
    compute_s = setting.parts * part_s + update_s
    workers = setting.workers
    if workers == 1:
        return compute_s
    if strategy == "ddp":
        total = model.gradient_bytes * setting.gradient_size
        buckets = max(1, math.ceil(total / setting.bucket_bytes))
        exchange = buckets * bucket_s(total / buckets, workers, cluster)
        exposed = exchange * max(_last(model), 1 / buckets)
        return compute_s + exchange - min(exchange - exposed, cluster.overlap * BACKWARD * part_s)
    size = 0.5 if setting.mixed else 1.0
    inside = workers if strategy == "fsdp" else share
    gather = sharded_s(model.parameter_bytes * size, inside, cluster)
    scatter = sharded_s(model.gradient_bytes, inside, cluster)
    if strategy == "hsdp":
        scatter += all_reduce_s(model.gradient_bytes / share, math.ceil(workers / share), cluster.network)
    exchange = setting.parts * 2 * gather + scatter
    exposed = (gather + scatter) * max(_last(model), 1 / (len(model.block_bytes) + 1))
    return compute_s + exposed + max(0.0, exchange - exposed - setting.parts * part_s)


def _last(model: Model) -> float:
    """Share of the parameters, those in no block, that nothing hides: gathered before all else, and summed after it."""
    return 1 - sum(model.block_bytes) / model.parameter_bytes if model.block_bytes else 0.0


def best(plans: Sequence[Plan], part: int) -> tuple[Plan | None, str]:
    """The one to take for `part` samples at a time, and why; None where nothing fits."""
    fitting = [each for each in plans if each.largest_part is None or each.largest_part >= part]
    if not fitting:
        return None, _why_none(plans, part)
    order: dict[Strategy, int] = {"ddp": 0, "hsdp": 1, "fsdp": 2}
    fastest = min(each.step_s or 0.0 for each in fitting)
    near = [each for each in fitting if (each.step_s or 0.0) <= NEAR * fastest]
    chosen = min(near, key=lambda each: (each.checkpointing, order[each.strategy]))
    if chosen.strategy == "ddp" and not chosen.checkpointing:
        return chosen, "all fits on each card, and nothing else is faster by a quarter"
    without = list(dict.fromkeys(name(each) for each in plans if each not in fitting))
    do = "does" if len(without) == 1 else "do"
    why = f"it fits, which {' and '.join(without)} {do} not" if without else "it fits"
    return chosen, f"{why}; no other that fits is faster by a quarter"


def _why_none(plans: Sequence[Plan], part: int) -> str:
    smallest = min(plans, key=lambda each: each.total_bytes)
    room = max(each.largest_part or 0 for each in plans)
    if room:
        roomy = max(plans, key=lambda each: each.largest_part or 0)
        return f"{part} samples at a time fit with none; {room} do with {name(roomy)}: raise gradient_accumulation"
    return f"not one sample fits; {name(smallest)} takes least: more cards, larger ones, or a smaller model"


def name(plan: Plan) -> str:
    """In a sentence."""
    return plan.strategy + (" with checkpointed activations" if plan.checkpointing else "")
