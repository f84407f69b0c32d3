"""What a step takes of a card by each strategy, and how long it is, of a model of 100 numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from expt.config.parse import parse
from expt.config.schema import Sharding
from expt.machine import Machine
from expt.planning.cards import CARDS, GIB, card
from expt.planning.measured import Model, Moment, Pass
from expt.planning.memory import Setting
from expt.planning.plan import planned
from expt.planning.scaling import Cluster, Link, sharded_s
from expt.planning.strategies import HOST_BYTES_PER_S, Plan, plan
from expt.training.patches.live_bytes import Held
from tests.composing import composed

MODEL = Model(
    parameters=100, parameter_bytes=400, gradient_bytes=400, state_bytes=800, buffer_bytes=8, average_bytes=0,
    update_bytes=0, block_bytes=(100, 100, 100), unit_bytes=(100, 100, 100), scalar_bytes=0, state_bytes_at_once=200,
    against_sharding=None,
    gathered_dtype=None,
)  # fmt: skip


def moment(gradients: int, held: int, casts: int, *, beside: int) -> Moment:
    """In whose `held` bytes there are 10 of a gradient that is just computed."""
    return Moment(gradients, Held(held, casts), Held(beside, casts))


PASSES = [
    Pass(
        samples=2,
        moments=(moment(0, 120, 20, beside=110), moment(400, 60, 0, beside=50)),
        flop=1000,
    ),
    Pass(
        samples=4,
        moments=(moment(0, 220, 20, beside=210), moment(400, 70, 0, beside=60)),
        flop=2000,
    ),
]
SETTING = Setting(workers=8, shards=4, parts=1, flops=0.0, bucket_bytes=2.0**20)
CLUSTER = Cluster(4, Link(1e-6, 1e9), Link(1e-5, 1e8))


def of_setting(strategy: Any = "fsdp", **given: Any) -> Plan:
    setting = dataclasses.replace(SETTING, **given)
    return plan(strategy, MODEL, PASSES, setting, CLUSTER, None, checkpointing=False)


@pytest.mark.parametrize(
    ("strategy", "share", "activations"), [("fsdp", 8, 110 - 50), ("hsdp", 4, 50)]
)
def test_what_is_sharded(strategy: Any, share: int, activations: float) -> None:
    found = of_setting(strategy)
    assert (found.parameter_bytes, found.gradient_bytes, found.state_bytes) == (
        400 / share,
        400 / share,
        800 / share,
    )
    assert found.other_bytes == 8 + 200 + 400, (
        "of what is in no unit, and of units: gathered, coming, own and sent"
    )
    assert found.activation_bytes == activations, "gradients come as activations go"
    assert found.largest_part is None


def test_with_ddp_all_is_on_each_card() -> None:
    found = of_setting("ddp")
    assert (found.parameter_bytes, found.gradient_bytes, found.state_bytes) == (400, 400, 800)
    assert (found.activation_bytes, found.other_bytes) == (120, 8)


def test_sharded_parameters_travel_in_mixed_precision_by_themselves() -> None:
    found = of_setting(gather_size=0.5)
    assert found.activation_bytes == 50, (
        "before gradients came 90, autocast's copies are FSDP's own"
    )
    assert found.other_bytes == 8 + 100 + 250, "gradients are sent in float32"


@pytest.mark.parametrize(("given", "gradients", "gathered", "activations"), [
    ({}, 400, 100 + 300, 120), ({"reduce_size": 0.5}, 200, 100 + 250, 120),
    ({"reduces_each_part": True}, 50, 200 + 400, 110),
])  # fmt: skip
def test_gradients_of_parts_are_whole_until_they_are_reduced(
    given: Any, gradients: float, gathered: float, activations: float
) -> None:
    found = of_setting(parts=4, **given)
    assert (found.gradient_bytes, found.activation_bytes) == (
        gradients,
        activations,
    ), "with what is just computed"
    assert found.other_bytes == 8 + gathered


def test_what_is_gathered_may_stay_until_the_backward_pass() -> None:
    found = of_setting(reshards=False)
    assert found.total_bytes == 50 + 100 + 8 + 110 + 400 + 100 + 200, (
        "all parameters, and gradients on their way"
    )
    assert of_setting(reshards=False, parts=4).total_bytes - 50 - 100 - 8 == 120 + 400 + 400 + 100


def test_each_part_that_is_reduced_and_each_gathering_take_time() -> None:
    slow = dataclasses.replace(CARDS["l4"], name="slow")

    def step_s(**given: Any) -> float:
        setting = dataclasses.replace(SETTING, flops=1e15, parts=4, **given)
        found = plan("fsdp", MODEL, PASSES, setting, CLUSTER, slow, checkpointing=False).step_s
        assert found is not None
        return found

    gather = sharded_s(400, 8, CLUSTER)
    assert step_s(reduces_each_part=True) - step_s() == pytest.approx(3 * gather, rel=1e-3)
    assert step_s() - step_s(reshards=False) == pytest.approx(4 * gather, rel=1e-3)
    assert step_s(offload=True) - step_s() == pytest.approx(
        2 * 800 / 8 / HOST_BYTES_PER_S, rel=1e-3
    )


def test_states_in_the_host_s_memory_are_on_the_card_for_the_update_alone() -> None:
    found = of_setting("ddp", offload=True)
    assert found.state_bytes == 0
    assert found.total_bytes == 400 + 400 + 8 + 200, (
        "a part's states in the update, more than the activations"
    )
    assert of_setting("fsdp", offload=True).state_bytes == 0


def test_the_largest_part_just_fits() -> None:
    small = dataclasses.replace(card("24GiB"), memory_bytes=(GIB + 1608 + 1020) / 0.95)
    found = plan("ddp", MODEL, PASSES, SETTING, CLUSTER, small, checkpointing=False)
    assert found.largest_part == 20, "20 + 50 for each sample"
    tiny = dataclasses.replace(small, memory_bytes=GIB)
    assert plan("ddp", MODEL, PASSES, SETTING, CLUSTER, tiny, checkpointing=False).largest_part == 0


def test_a_plan_is_by_the_settings_of_sharding() -> None:
    words = composed("model=mlp", "model.hidden=[256,256,256]", "optimizer=adamw", "batch_size=64")
    base = parse(words, Machine(gpus=tuple("01234567"), cpus=8))

    def of(strategy: str = "fsdp", sharding: Any = None, parts: int = 2, **given: Any) -> Plan:
        made = dataclasses.replace(
            base, gradient_accumulation=parts, sharding=Sharding(**(sharding or {})), **given
        )
        found = planned(made, None, tokens=None, per_node=8, network=1e9).plans
        return next(each for each in found if each.strategy == strategy)

    parted = of()
    assert parted.gradient_bytes == 8 * parted.parameter_bytes
    assert of(parts=1).gradient_bytes == parted.parameter_bytes
    assert of(sharding={"reduce_each_part": True}).gradient_bytes == parted.parameter_bytes
    assert of(sharding={"reduce_dtype": "bf16"}).gradient_bytes == 4 * parted.parameter_bytes
    assert of(sharding={"reshard_after_forward": False}).other_bytes > 1.15 * parted.other_bytes
    mixed, float32 = of(amp="bf16"), of(amp="bf16", sharding={"param_dtype": "float32"})
    assert mixed.other_bytes < 0.8 * float32.other_bytes
    assert of("ddp", offload="cpu").state_bytes < 100
    assert of("hsdp", sharding={"shards": 4}).parameter_bytes == 2 * parted.parameter_bytes
