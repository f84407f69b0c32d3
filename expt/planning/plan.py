"""From a run's configuration to the plan of each strategy, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from expt.config.schema import RunConfig
from expt.planning.cards import FRAGMENTS, Card
from expt.planning.measured import Measuring, Model, Pass, Wanted
from expt.planning.samples import sample
from expt.planning.scaling import Cluster, Link
from expt.planning.strategies import UTILISATION, Plan, Setting, Strategy, best, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

INSIDE_LATENCY_S, NETWORK_LATENCY_S = 3e-6, 10e-6
INSIDE_BYTES_PER_S = 20e9
"""Within a node, where the card does not say."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was found out."""

    model: Model
    part: int
    """Samples that a card is to take at a time."""
    flop: int
    """Of those, forward and backward."""
    card: Card | None
    plans: Sequence[Plan]
    best: Plan | None
    why: str
    notes: list[str]


def planned(config: RunConfig, card: Card | None, *, tokens: int | None, per_node: int, network: float) -> Planned:
    """What the run takes on `per_node` GPUs of each machine, with a `network` of bytes a second for each GPU.

    `tokens` is the size of a vocabulary that no file says. Raises ConfigError and DataError, see Measuring and sample.
    """
    measuring = Measuring(config, sample(config, tokens))
    part = config.batch_size // config.world_size // config.gradient_accumulation
    model = measuring.model()
    setting = _setting(config, card, per_node)
    link = Link(INSIDE_LATENCY_S, card.link_bytes_per_s if card and card.link_bytes_per_s else INSIDE_BYTES_PER_S)
    cluster = Cluster(per_node, link, Link(NETWORK_LATENCY_S, network))
    plans, kept = list[Plan](), None
    for wanted in _checkpointing(config, model):
        passes = _passes(measuring, part, wanted)
        kept = kept or passes[0]
        plans += [
            plan(strategy, model, passes, setting, cluster, card, checkpointing=bool(wanted))
            for strategy in _strategies(config, per_node)
        ]
    assert kept
    chosen, why = best(plans, part) if card else (None, "")
    plans.sort(key=lambda each: ("ddp", "fsdp", "hsdp").index(each.strategy))
    notes = _notes(config, card, per_node, network)
    return Planned(
        model=model, part=part, flop=kept.flop, card=card, plans=plans, best=chosen, why=why, notes=notes
    )  # fmt: skip


def _passes(measuring: Measuring, part: int, wanted: Wanted) -> tuple[Pass, Pass]:
    """Of the asked size, and of a larger one: a line through both is above what lies between."""
    return measuring.measure(part, wanted), measuring.measure(8 * part, wanted)


def _checkpointing(config: RunConfig, model: Model) -> list[Wanted]:
    found: list[Wanted] = [()]
    if config.activation_checkpointing:
        return [*found, config.activation_checkpointing]
    return [*found, "auto"] if model.block_bytes else found


def _strategies(config: RunConfig, per_node: int) -> list[Strategy]:
    """Those that differ: one worker shards nothing, and replicas are machines of equal size, two or more."""
    if config.world_size == 1:
        return ["ddp"]
    several = config.world_size > per_node and not _against_hsdp(config.world_size, per_node)
    return ["ddp", "fsdp", "hsdp"] if several else ["ddp", "fsdp"]


def _against_hsdp(workers: int, per_node: int) -> str:
    """Why several machines are no replicas; empty where they are."""
    if per_node == 1:
        return "its replicas are machines, and one GPU has nothing to share out"
    if workers % per_node:
        return f"its replicas are whole machines, and {workers} GPUs do not fill machines of {per_node}"
    return ""


def _setting(config: RunConfig, card: Card | None, per_node: int) -> Setting:
    flops = 0.0
    if card:
        flops = card.tf32_flops if config.matmul_precision != "highest" else card.fp32_flops
        flops = card.bf16_flops if config.amp else flops
    return Setting(
        workers=config.world_size,
        per_node=per_node,
        parts=config.gradient_accumulation,
        mixed=bool(config.amp),
        flops=flops,
        bucket_bytes=config.ddp.bucket_cap_mb * 2**20,
        gradient_size=0.5 if config.ddp.comm_hook in ("bf16", "fp16") else 1.0,
    )


def _notes(config: RunConfig, card: Card | None, per_node: int, network: float) -> list[str]:
    notes = ["activations as without torch.compile, which needs fewer"] if config.compile else []
    if config.world_size > per_node and (why := _against_hsdp(config.world_size, per_node)):
        notes.append(f"no hsdp: {why}")
    if card is None:
        return notes
    notes.append(f"1 GiB of the card for CUDA and NCCL, and {FRAGMENTS:.0%} that fragments")
    if card.bf16_flops:
        notes.append(f"products at {UTILISATION:.0%} of the card's peak; data always ready, no card slower than others")
    if config.world_size > per_node:
        notes.append(f"{per_node} GPUs in each machine, {network * 8 / 1e9:g} Gbit/s between them for each GPU")
    return notes
