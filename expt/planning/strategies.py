"""What each strategy takes of a card, how long its step is, and which one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from expt.planning.cards import Card
from expt.planning.measured import Model, Pass
from expt.planning.memory import Memory, Setting, Strategy, memory
from expt.planning.scaling import BACKWARD, Cluster, all_reduce_s, bucket_s, sharded_s

UTILISATION = 0.4
"""Share of a card's peak that a step's products reach; 0.3 to 0.5 are usual for transformers."""

NEAR = 1.25
"""Steps that differ by less are told apart by no such model: of those the simplest strategy is
taken.
"""


HOST_BYTES_PER_S = 20e9
"""Between a card and the host's pinned memory, each way; 12 to 25 GB/s are usual of PCIe 3 and 4.
"""


@dataclass(frozen=True, kw_only=True)
class Plan(Memory):
    """Of one strategy, with or without checkpointed activations, for each card."""

    strategy: Strategy
    checkpointing: bool
    step_s: float | None

    @property
    def total_bytes(self) -> float:
        """For each card."""
        kept = self.parameter_bytes + self.gradient_bytes + self.state_bytes
        return kept + self.activation_bytes + self.other_bytes


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
    """By `passes` of two sizes, see `memory`."""
    taken = memory(strategy, model, passes, setting, card)
    step_s = (
        _step_s(strategy, model, passes[0], setting, cluster, card)
        if card and setting.flops
        else None
    )
    return Plan(
        strategy=strategy, checkpointing=checkpointing, step_s=step_s, **dataclasses.asdict(taken)
    )


def _step_s(
    strategy: Strategy, model: Model, asked: Pass, setting: Setting, cluster: Cluster, card: Card
) -> float:
    """Computation at a usual share of the card's peak, the update, and what of the exchange does
    not hide.
    """
    part_s = asked.flop / (setting.flops * UTILISATION)
    share = setting.shards_of(strategy)
    touched = 3 * (model.parameter_bytes + model.gradient_bytes + 2 * model.state_bytes) / share
    update_s = touched / card.memory_bytes_per_s
    if setting.offload:
        update_s += 2 * (model.state_bytes - model.scalar_bytes) / share / HOST_BYTES_PER_S
    compute_s = setting.parts * part_s + update_s
    workers = setting.workers
    if workers == 1:
        return compute_s
    if strategy == "ddp":
        total = model.gradient_bytes * setting.gradient_size
        buckets = max(1, math.ceil(total / setting.bucket_bytes))
        exchange = buckets * bucket_s(total / buckets, workers, cluster)
        exposed = exchange * max(_last(model, model.block_bytes), 1 / buckets)
        return compute_s + exchange - min(exchange - exposed, cluster.overlap * BACKWARD * part_s)
    gather, scatter = _sharded_exchange_s(strategy, model, setting, cluster)
    gathers = 2 if setting.reshards else 1
    reductions = 1 if setting.keeps_whole_gradients else setting.parts
    exchange = setting.parts * gathers * gather + reductions * scatter
    exposed = (gather + scatter) * max(
        _last(model, model.unit_bytes), 1 / (len(model.unit_bytes) + 1)
    )
    return compute_s + exposed + max(0.0, exchange - exposed - setting.parts * part_s)


def _sharded_exchange_s(
    strategy: Strategy, model: Model, setting: Setting, cluster: Cluster
) -> tuple[float, float]:
    """To gather all parameters once, and to reduce all gradients."""
    share, workers = setting.shards_of(strategy), setting.workers
    gather = sharded_s(model.parameter_bytes * setting.gather_size, share, cluster)
    sent = model.gradient_bytes * setting.reduce_size
    scatter = sharded_s(sent, share, cluster)
    if strategy == "hsdp":
        between = cluster.network if workers > cluster.per_node else cluster.inside
        scatter += all_reduce_s(sent / share, math.ceil(workers / share), between)
    return gather, scatter


def _last(model: Model, units: Sequence[int]) -> float:
    """Share of the parameters, those in no unit, that nothing hides: gathered before all else, and
    summed after it.
    """
    return 1 - sum(units) / model.parameter_bytes if units else 0.0


def best(plans: Sequence[Plan], part: int) -> tuple[Plan | None, str]:
    """The one to take for `part` samples at a time, and why; None where nothing fits."""
    fitting = [each for each in plans if each.largest_part is None or each.largest_part >= part]
    if not fitting:
        return None, _why_none(plans, part)
    order: dict[Strategy, int] = {"ddp": 0, "hsdp": 1, "fsdp": 2}
    fastest = min(each.step_s or 0.0 for each in fitting)
    near = [each for each in fitting if (each.step_s or 0.0) <= NEAR * fastest]
    chosen = min(near, key=lambda each: (each.checkpointing, order[each.strategy]))
    timed = fastest > 0  # of a card of unknown speed there are no steps to compare
    if chosen.strategy == "ddp" and not chosen.checkpointing:
        return chosen, "all fits on each card" + (
            ", and nothing else is faster by a quarter" if timed else ""
        )
    without = list(dict.fromkeys(name(each) for each in plans if each not in fitting))
    do = "does" if len(without) == 1 else "do"
    why = f"it fits, which {' and '.join(without)} {do} not" if without else "it fits"
    return chosen, why + ("; no other that fits is faster by a quarter" if timed else "")


def _why_none(plans: Sequence[Plan], part: int) -> str:
    smallest = min(plans, key=lambda each: each.total_bytes)
    room = max(each.largest_part or 0 for each in plans)
    if room:
        roomy = max(plans, key=lambda each: each.largest_part or 0)
        return (
            f"{part} samples at a time fit with none; {room} do with {name(roomy)}: raise"
            " gradient_accumulation"
        )
    return (
        f"not one sample fits; {name(smallest)} takes least: more cards, larger ones, or a smaller"
        " model"
    )


def name(plan: Plan) -> str:
    """In a sentence."""
    return plan.strategy + (" with checkpointed activations" if plan.checkpointing else "")
