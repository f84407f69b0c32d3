"""From a run's configuration to the plan of each strategy, and which one to take."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expt.config import sharding_rules
from expt.config.groups import TargetOptimizer
from expt.config.schema import RunConfig
from expt.planning.cards import FRAGMENTS, Card
from expt.planning.measured import Measuring, Model, Pass, Wanted
from expt.planning.memory import Setting, Strategy
from expt.planning.samples import sample
from expt.planning.scaling import Cluster, Link
from expt.planning.strategies import HOST_BYTES_PER_S, UTILISATION, Plan, best, name, plan
from expt.runs.view.text import in_bytes

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


def planned(
    config: RunConfig, card: Card | None, *, tokens: int | None, per_node: int, network: float
) -> Planned:
    """What the run takes on `per_node` GPUs of each machine, with a `network` of bytes a second for
    each GPU.

    `tokens` is the size of a vocabulary that no file says. Raises ConfigError and DataError, see
    Measuring and sample."""
    measuring = Measuring(config, sample(config, tokens), on_gpus=card is not None)
    part = config.batch_size // config.world_size // config.gradient_accumulation
    model = measuring.model()
    setting = _setting(config, model, card, per_node)
    link = Link(
        INSIDE_LATENCY_S,
        card.link_bytes_per_s if card and card.link_bytes_per_s else INSIDE_BYTES_PER_S,
    )
    cluster = Cluster(per_node, link, Link(NETWORK_LATENCY_S, network))
    against = _against_sharding(config, model)
    passes = {
        bool(wanted): _passes(measuring, part, wanted) for wanted in _checkpointing(config, model)
    }

    def plans_of(setting: Setting) -> list[Plan]:
        return [
            plan(strategy, model, measured, setting, cluster, card, checkpointing=checkpointing)
            for checkpointing, measured in passes.items()
            for strategy in _strategies(config, against, per_node)
        ]

    plans = plans_of(setting)
    chosen, why = best(plans, part) if card else (None, "")
    if setting.offload and card:
        why += _without_offload(
            best(plans_of(dataclasses.replace(setting, offload=False)), part)[0], chosen
        )
    plans.sort(key=lambda each: ("ddp", "fsdp", "hsdp").index(each.strategy))
    notes = _notes(config, model, card, against, per_node, network)
    flop = passes[False][0].flop
    return Planned(
        model=model, part=part, flop=flop, card=card, plans=plans, best=chosen, why=why, notes=notes
    )


def _without_offload(other: Plan | None, chosen: Plan | None) -> str:
    """What to say of the plan that is best where states stay on the card, beside the one that is
    with offload=cpu.
    """
    if other is None or chosen is None:
        return ""
    if (other.strategy, other.checkpointing) == (chosen.strategy, chosen.checkpointing):
        return "; with offload=null too, which moves no states"
    return f"; with offload=null, which moves no states, {name(other)} fits"


def _passes(measuring: Measuring, part: int, wanted: Wanted) -> tuple[Pass, Pass]:
    """Of the asked size, and of a larger one: a line through both is above what lies between."""
    return measuring.measure(part, wanted), measuring.measure(8 * part, wanted)


def _checkpointing(config: RunConfig, model: Model) -> list[Wanted]:
    found: list[Wanted] = [()]
    if config.activation_checkpointing:
        return [*found, config.activation_checkpointing]
    return [*found, "auto"] if model.block_bytes else found


def _against_sharding(config: RunConfig, model: Model) -> str:
    """Why this run, as it is, can't be sharded; empty where it can, or has one worker."""
    if config.world_size == 1:
        return ""
    if model.against_sharding:
        return "; ".join(filter(None, model.against_sharding))
    cut = dataclasses.replace(config, strategy="fsdp")
    return next(iter(sharding_rules.beside_sharding(cut)), "")


def _strategies(config: RunConfig, against: str, per_node: int) -> list[Strategy]:
    """Those that differ: one worker shards nothing, and replicas are machines of equal size, two or
    more.
    """
    if config.world_size == 1 or against:
        return ["ddp"]
    typed = config.sharding.shards
    several = config.world_size > per_node and not _against_hsdp(config.world_size, per_node)
    several |= typed != "auto" and typed < config.world_size
    return ["ddp", "fsdp", "hsdp"] if several else ["ddp", "fsdp"]


def _against_hsdp(workers: int, per_node: int) -> str:
    """Why several machines are no replicas; empty where they are."""
    if per_node == 1:
        return "its replicas are machines, and one GPU has nothing to share out"
    if workers % per_node:
        return (
            f"its replicas are whole machines, and {workers} GPUs do not fill machines of"
            f" {per_node}"
        )
    return ""


def _setting(config: RunConfig, model: Model, card: Card | None, per_node: int) -> Setting:
    wanted = config.sharding
    several = wanted.shards != "auto" and wanted.shards < config.world_size
    flops = 0.0
    if card:
        flops = card.tf32_flops if config.matmul_precision != "highest" else card.fp32_flops
        flops = card.bf16_flops if config.amp else flops
    return Setting(
        workers=config.world_size,
        shards=int(wanted.shards) if several else min(config.world_size, per_node),
        parts=config.gradient_accumulation,
        flops=flops,
        bucket_bytes=config.ddp.bucket_cap_mb * 2**20,
        gradient_size=0.5 if config.ddp.comm_hook in ("bf16", "fp16") else 1.0,
        gather_size=0.5 if model.gathered_dtype else 1.0,
        reduce_size=0.5 if wanted.reduce_dtype == "bf16" else 1.0,
        reduces_each_part=wanted.reduce_each_part,
        reshards=wanted.reshard_after_forward,
        offload=config.offload == "cpu" and config.num_gpus > 0,
    )


def _notes(
    config: RunConfig, model: Model, card: Card | None, against: str, per_node: int, network: float
) -> list[str]:
    notes = ["activations as without torch.compile, which needs fewer"] if config.compile else []
    copied = model.parameter_bytes + model.buffer_bytes + model.state_bytes + model.average_bytes
    if not config.num_gpus and copied >= 2**20:  # those of a GPU are in the host's memory
        notes.append(
            "no checkpoint on its way to the disk, of which rank 0 has a copy: up to"
            f" {in_bytes(copied)} more"
        )
    if config.offload and config.num_gpus:
        speed = f"{HOST_BYTES_PER_S / 1e9:g} GB/s"
        notes.append(
            f"offload=cpu: states wait in the host's memory, to which each card has {speed}"
            " each way"
        )
    elif config.offload:
        notes.append(
            "offload=cpu does nothing on a CPU, where the states are in its memory as it is"
        )
    if isinstance(config.optimizer, TargetOptimizer) and not against and config.world_size > 1:
        notes.append(
            f"{config.optimizer.target} can be sharded, which a run tries out before it begins"
        )
    if against:
        notes.append(f"no fsdp: {against}")
    elif config.world_size > per_node and (why := _against_hsdp(config.world_size, per_node)):
        notes.append(f"no hsdp: {why}")
    if card is None:
        return notes
    notes.append(f"1 GiB of the card for CUDA and NCCL, and {FRAGMENTS:.0%} that fragments")
    if card.bf16_flops:
        notes.append(
            f"products at {UTILISATION:.0%} of the card's peak; data always ready, no card slower"
            " than others"
        )
    if config.world_size > per_node:
        notes.append(
            f"{per_node} GPUs in each machine, {network * 8 / 1e9:g} Gbit/s between them for"
            " each GPU"
        )
    return notes
