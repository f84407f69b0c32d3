"""What is said of a run before it runs: memory, work, strategies, cards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from expt.command import plan as command
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.machine import Machine
from expt.planning.cards import CARDS, GIB, card
from expt.planning.measured import Measuring
from expt.planning.plan import planned
from expt.planning.samples import sample
from expt.planning.scaling import (
    Cluster,
    Link,
    all_reduce_cpu_s,
    bucket_s,
    gather_s,
    sharded_s,
    slowest_s,
)
from expt.planning.strategies import Plan, best
from expt.training import offload
from expt.training.patches.fake_tensors import FakeTensorMode
from expt.training.patches.live_bytes import LiveBytes
from expt.training.sharding import choose_units, own_parameters
from tests.composing import composed

LM = (
    "model=transformer",
    "task=language_model",
    "dataset=text",
    "dataset.root=nowhere",
    "dataset.context=32",
)
SMALL = ("model.layers=3", "model.width=64", "model.heads=2", "optimizer=adamw", "batch_size=8")


def config(*words: str, gpus: int = 8) -> RunConfig:
    return parse(composed(*words), Machine(gpus=tuple(map(str, range(gpus))), cpus=8))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["model=mlp,convnet"],
            "model=mlp,convnet: several values make a sweep; plan looks at one run; name one value",
        ),
        (
            ["optimizer.lr=0.1,0.2"],
            "optimizer.lr=0.1,0.2: several values make a sweep; plan looks at one run",
        ),
        (
            ["-m", "model=mlp,convnet"],
            "-m: plan looks at one run; name one value, or try a sweep out by python -m",
        ),
        (["model=mlp", "--multirun"], "--multirun: plan looks at one run"),
    ],
)
def test_a_plan_of_several_runs_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        command.main(words)
    assert str(refused.value).startswith(told)


def test_live_bytes_are_those_of_storages_that_are_held() -> None:
    given = torch.zeros(1000)
    ends = list[int]()
    with LiveBytes() as live:
        kept = given + 1
        view = kept[:10]
        ends.append(live.now)
        other = kept * 2
        number = live.number(other)
        del other, kept
        ends.append(live.now)
        last = given + 2
        del view, last
        ends.append(live.now)
    assert [each.bytes for each in live.peaks([*ends, live.now])] == [
        4000,
        8000,
        8000,
        0,
    ], "the view holds the first"
    assert [each.bytes for each in live.peaks(ends, {number})] == [4000, 4000, 8000]
    assert (live.peak.bytes, live.number(given)) == (8000, None)
    weight = nn.Parameter(torch.zeros(50, 20))
    with LiveBytes([weight]) as live, torch.autocast("cpu", torch.bfloat16):
        held = given.view(20, 50) @ weight
        assert (live.peak.cast_bytes, live.flop) == (2000, 2 * 20 * 50 * 20)
        assert held.dtype == torch.bfloat16


def test_attention_is_counted_as_the_products_that_it_is() -> None:
    """Two of queries, keys and values in the forward pass, and five in the backward pass, which
    does one again.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
        with LiveBytes() as live:
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            ).sum().backward()
    assert live.flop == (2 + 5) * 2 * 2 * 3 * 40 * 40 * 8


class Attends(nn.Module):
    """Attention by torch's function, by that under a name of its own, and by torch's layer."""

    def __init__(self, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.head, self.dropout = (
            nn.Embedding(vocab_size, 8),
            nn.Linear(8, vocab_size),
            dropout,
        )
        self.layer = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> Any:
        inner = self.tokens(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        for attention in (functional.scaled_dot_product_attention, scaled_dot_product_attention):
            inner = attention(inner, inner, inner, None, self.dropout, is_causal=True)
        found = inner.transpose(1, 2).flatten(-2)
        return self.head(self.layer(found, found, found, need_weights=False)[0])


@pytest.mark.parametrize("checkpointing", ["false", "[layer]"])
def test_attention_with_dropout_keeps_no_square_on_gpus(checkpointing: str) -> None:
    def measured(dropout: float, gpus: int, *, on_gpus: bool = False) -> Any:
        own = f"model={{_target_: {__name__}.Attends, dropout: {dropout}}}"
        made = config(*LM, own, "dataset.context=256", "batch_size=8", gpus=gpus)
        return Measuring(made, sample(made), on_gpus=on_gpus).measure(
            4, [] if checkpointing == "false" else ["layer"]
        )

    plain, dropped, on_cpus = measured(0.0, 1), measured(0.1, 1), measured(0.1, 0)
    assert dropped == plain == measured(0.1, 0, on_gpus=True)
    assert on_cpus.activation_bytes > 2 * plain.activation_bytes, "it has no such kernel"
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention


def test_an_lstm_is_counted_as_the_products_that_it_is() -> None:
    lstm, steps = (
        nn.LSTM(8, 12, num_layers=2, batch_first=True),
        torch.ones(2, 5, 8, requires_grad=True),
    )
    with LiveBytes() as live:
        lstm(steps)[0].sum().backward()
    weights = sum(one.numel() for one in lstm.parameters() if one.dim() == 2)
    assert live.flop == 3 * 2 * 2 * 5 * weights


def test_a_model_of_adamw_has_two_states_for_each_parameter() -> None:
    made = config(*LM, *SMALL, "ema=0.9")
    found = Measuring(made, sample(made)).model()
    assert found.gradient_bytes == found.parameter_bytes == 4 * found.parameters
    assert found.state_bytes == pytest.approx(2 * found.parameter_bytes, rel=1e-3)
    assert found.average_bytes == found.parameter_bytes
    frozen = config(*LM, *SMALL, "freeze=[blocks]")
    assert len(found.block_bytes) == 3
    less = Measuring(frozen, sample(frozen)).model()
    assert less.gradient_bytes == found.gradient_bytes - sum(found.block_bytes)


@pytest.mark.parametrize("wrap", ["auto", "1000", "['[13]']"])
def test_units_are_those_that_a_run_gathers(wrap: str) -> None:
    words = ("model=mlp", "model.hidden=[64,64,64]", "strategy=fsdp", f"sharding.wrap={wrap}")
    made = config(*words, "batch_size=64")
    module = _real(made, 1)[0]
    units = choose_units(module, made.sharding.wrap)
    assert len(units) == (2 if "13" in wrap else 3 + (wrap == "auto"))
    found = Measuring(made, sample(made)).model()
    assert [*found.unit_bytes] == [sum(one.nbytes for one in unit.parameters()) for unit in units]
    assert not found.block_bytes


def test_a_unit_within_a_unit_is_gathered_by_itself() -> None:
    inner = nn.Linear(4, 4, bias=False)
    outer = nn.Sequential(nn.Linear(4, 8, bias=False), inner)
    assert [[*map(len, own)] for own in own_parameters(nn.Sequential(outer), [inner, outer])] == [
        [8],
        [4],
    ]


def test_states_that_are_offloaded_come_back_so_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = config(*LM, *SMALL, "offload=cpu")
    at_once = Measuring(made, sample(made)).model()
    assert (
        at_once.state_bytes_at_once
        == at_once.state_bytes - at_once.scalar_bytes
        == 2 * at_once.parameter_bytes
    )
    monkeypatch.setattr(offload, "BYTES_AT_ONCE", 2**16)
    parted = Measuring(made, sample(made)).model()
    assert parted.state_bytes_at_once < at_once.state_bytes_at_once / 5
    assert parted.state_bytes == at_once.state_bytes


def test_activations_are_those_of_a_step_that_is_computed() -> None:
    """The same step with numbers, and its gradients handed on."""
    made = config(*LM, *SMALL)
    measuring = Measuring(made, sample(made))
    found, checkpointed = measuring.measure(4, ()), measuring.measure(4, "auto")
    module, task, batch = _real(made, 4)
    with LiveBytes(module.parameters()) as live:
        outputs = task.forward(module, batch)
        task.training_loss(outputs, batch)[0].backward()
    inputs = 2 * 4 * 32 * 8
    assert found.activation_bytes == pytest.approx(live.peak.bytes + inputs, rel=0.01)
    assert checkpointed.activation_bytes < 0.7 * found.activation_bytes
    assert found.flop < checkpointed.flop < 1.4 * found.flop
    assert measuring.measure(8, ()).flop == 2 * found.flop


def _real(made: RunConfig, size: int) -> Any:
    from expt.models.build import build
    from expt.tasks.build import build as build_task

    one = sample(made)
    module = build(made.model, made.init, one.shapes, one.batch(1).inputs)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )
    return module, build_task(made.task, one.shapes), one.batch(size)


def of(strategy: Any, largest: int, step_s: float, *, checkpointing: bool = False) -> Plan:
    return Plan(
        strategy=strategy, checkpointing=checkpointing, parameter_bytes=1, gradient_bytes=1, state_bytes=1,
        activation_bytes=1, other_bytes=0, largest_part=largest, step_s=step_s,
    )  # fmt: skip


def test_the_fastest_that_fits_is_taken_and_of_equals_the_simplest() -> None:
    ddp, fsdp = of("ddp", 4, 1.0), of("fsdp", 16, 0.98)
    slow = of("ddp", 8, 1.3, checkpointing=True)
    assert best([fsdp, slow, ddp], 4)[0] is ddp
    chosen, why = best([ddp, slow, fsdp], 8)
    assert chosen is fsdp
    assert why.startswith("it fits, which ddp does not")
    assert best([ddp, slow], 8)[0] is slow
    assert best([of("ddp", 4, 1.0), of("fsdp", 4, 0.7)], 4)[0] != of("ddp", 4, 1.0), (
        "that much is no error"
    )
    none, why = best([ddp, slow, fsdp], 32)
    assert none is None
    assert why == "32 samples at a time fit with none; 16 do with fsdp: raise gradient_accumulation"
    assert best([of("ddp", 0, 1.0)], 1)[1].startswith("not one sample fits; ddp takes least: ")


CLUSTER = Cluster(4, Link(1e-6, 1e9), Link(1e-5, 1e8))


def test_gathering_over_nodes_and_the_slowest() -> None:
    link = CLUSTER.inside
    assert gather_s(1e9, 4, link) == pytest.approx(3e-6 + 0.75)
    assert sharded_s(1e9, 4, CLUSTER) == gather_s(1e9, 4, link)
    assert sharded_s(1e9, 8, CLUSTER) == pytest.approx(
        gather_s(1e9, 4, link) + gather_s(2.5e8, 2, CLUSTER.network)
    )
    assert slowest_s([1.0, 2.0], 1) == pytest.approx(1.5)
    assert slowest_s([2.0, 1.0], 2) == pytest.approx(1.75), "both fast in a quarter of the steps"
    assert slowest_s([3.0] * 5, 100) == pytest.approx(3.0)


@pytest.mark.parametrize(("per_node", "says"), [
    (3, ["no hsdp: its replicas are whole machines, and 8 GPUs do not fill machines of 3"]),
    (1, ["no hsdp: its replicas are machines, and one GPU has nothing to share out"]), (4, []), (8, []), (16, []),
])  # fmt: skip
def test_replicas_that_cannot_be_are_told(per_node: int, says: list[str]) -> None:
    found = planned(config("model=mlp"), None, tokens=None, per_node=per_node, network=1e10)
    assert found.notes == says
    assert any(each.strategy == "hsdp" for each in found.plans) == (per_node == 4)


def test_a_whole_plan() -> None:
    made = config(*LM, *SMALL, "batch_size=32", "gpus=8")
    found = planned(made, CARDS["h200"], tokens=None, per_node=4, network=1e10)
    assert [each.strategy for each in found.plans] == ["ddp", "ddp", "fsdp", "fsdp", "hsdp", "hsdp"]
    assert found.part == 4
    assert found.best is not None
    assert (found.best.strategy, found.best.checkpointing) == ("ddp", False)
    assert all(
        each.step_s and each.largest_part and each.largest_part > 1000 for each in found.plans
    )
    alone = planned(config(*LM, *SMALL, "gpus=1"), None, tokens=None, per_node=8, network=1e10)
    assert [(each.strategy, each.step_s) for each in alone.plans] == [("ddp", None)] * 2


@pytest.mark.parametrize(
    ("text", "gib"), [("h200", 139.8), ("A100-80", 79.2), ("24GiB", 24), ("12.5 gib", 12.5)]
)
def test_a_card(text: str, gib: float) -> None:
    assert card(text).memory_bytes == gib * GIB


def test_a_card_of_several_sizes_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'a100-80' or 'a100-40'\?$"):
        card("A100")


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_a_strategy_that_is_named_is_one_of_those_that_are_planned(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "model=mlp",
        "gpus=8",
        "batch_size=64",
        f"strategy={strategy}",
        "--per-node",
        "4",
        "--card",
        "l4",
    ]
    assert command.main(words) == 0
    shown = capsys.readouterr().out
    assert "\nhsdp" in shown
    assert (
        f"assumed     every strategy, {strategy} among them, with its settings of sharding" in shown
    )


@pytest.mark.parametrize("text", ["h300", "24", "0GiB", "GiB"])
def test_an_unknown_card_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--card {text}: neither a known card \(b200, h200, "):
        card(text)


def test_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=transformer",
        "task=language_model",
        "dataset=text",
        "dataset.context=16",
        *SMALL[:3],
        "gpus=2",
    ]
    words += ["--card", "l4", "amp=true", "dataset.tokens=gone.json", "batch_size=64"]
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model       transformer: 3.4 million parameters in 3 blocks"
    assert lines[1].startswith("step        64 samples on 2 GPUs: 32 on each; ")
    assert [line.split("  ")[0] for line in lines[5:9]] == [
        "ddp",
        "ddp, checkpointed",
        "fsdp",
        "fsdp, checkpointed",
    ]
    assert "assumed     a vocabulary of 50,257 tokens, as GPT-2 has: there is no gone.json" in lines
    assert any(line.startswith("take        strategy=") for line in lines)


def test_a_class_is_planned_as_it_is_typed_for_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.main(["model={_target_: tests.planning.test_planning.Scaled, width: 3}", "gpus=2"])
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("model       tests.planning.test_planning.Scaled: 236 parameters\n")
    assert "\nddp" in shown
    assert "\nfsdp" not in shown
    assert (
        "assumed     no fsdp: the model's parameter scale has no dimension to share out; give it"
        " the shape" in shown
    )


def test_what_cannot_be_sharded_is_planned_for_ddp_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["model=mlp", "optimizer=muon", "gpus=2", "--card", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "\nfsdp" not in shown
    assert "take        strategy=ddp: " in shown
    assert "assumed     no fsdp: optimizer=muon: looks at whole matrices" in shown


def test_an_optimizer_that_reads_numbers_is_named() -> None:
    own = "tests.worker.test_optimizer.ByNumber"
    with pytest.raises(
        ConfigError, match=rf"^plan: optimizer={own} decides by numbers, and there are none"
    ):
        command.main(["model=mlp", f"optimizer={{_target_: {own}}}"])


def test_an_optimizer_of_ones_own_is_said_to_be_tried_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "assumed     torch.optim.Adamax can be sharded, which a run tries out before it begins"
    for gpus, is_said in (("gpus=2", True), ("gpus=1", False)):
        assert command.main(["model=mlp", "optimizer={_target_: torch.optim.Adamax}", gpus]) == 0
        assert (note in capsys.readouterr().out) is is_said


def test_a_model_that_reads_numbers_is_named() -> None:
    own = "tests.planning.test_planning.Asking"
    with pytest.raises(
        ConfigError, match=rf"^plan: model={own} decides by numbers, and there are none"
    ):
        command.main([f"model={{_target_: {own}}}"])


class Fails(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> Any:
        raise KeyError(f"images of {len(images)}")


class Normed(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes)
        )


def test_what_a_step_cannot_be_taken_by_is_told_in_a_line() -> None:
    own = "tests.planning.test_planning.Fails"
    told = (
        rf"^plan: model={own} cannot take a step on this data \(KeyError: .*images of 4.*,"
        r" test_planning.py:\d+\)"
    )
    with pytest.raises(ConfigError, match=told):
        command.main([f"model={{_target_: {own}}}", "gpus=2", "batch_size=8"])
    lone = (
        "^batch_size=16: a batch norm of the model cannot train on one sample by itself; use"
        " batch_size=32 or more$"
    )
    norm = [f"model={{_target_: {__name__}.Normed}}", "batch_size=16", "gpus=16"]
    with pytest.raises(ConfigError, match=lone):
        command.main(norm)
    with pytest.raises(
        ConfigError,
        match=r"^plan: batch_norm=sync is measured on the samples of one worker; use batch",
    ):
        command.main([*norm, "batch_norm=sync"])


class Scaled(nn.Module):
    """With a parameter that has no dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(images.flatten(1)))
        return found * self.scale


class Asking(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = super().forward(images.flatten(1))
        return found if found.sum() > 0 else -found


class Sparse(nn.Module):
    def __init__(self, **_: object) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 10, sparse=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(images.flatten(1).long() * 0)
        return found.sum(1)


def test_a_card_of_unknown_speed_has_no_steps_to_compare(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        command.main(["model=mlp", "gpus=8", "batch_size=64", "--card", "8GiB", "offload=cpu"]) == 0
    )
    shown = capsys.readouterr().out
    assert (
        "take        strategy=ddp: all fits on each card; with offload=null too, which moves no"
        " states\n" in shown
    )
    assert (
        "assumed     offload=cpu: states wait in the host's memory, to which each card has 20 GB/s"
        " each way" in shown
    )
    assert (
        command.main(["model=mlp", "model.hidden=[4096]", "gpus=0", "world_size=2", "offload=cpu"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "assumed     offload=cpu does nothing on a CPU" in shown
    assert (
        "assumed     no checkpoint on its way to the disk, of which rank 0 has a copy: up to 2 MiB"
        " more" in shown
    )


@pytest.mark.parametrize(("words", "says"), [
    (["model=rsnet"], "model=rsnet: not one of"), (["gpus=3"], "batch_size=64: is the global batch and must divide"),
    (["gpus=1", "strategy=fsdp"], "strategy=fsdp: shares the model out among at least 2 workers, and this run has one; "
     "use strategy=ddp, or gpus=2"),
    (["gpus=8", "strategy=hsdp", "batch_size=8"], "strategy=hsdp: replicas of 8 workers each, and the run has no more"),
    (["--card", "1GiB"], "--card 1GiB: 1 GiB is for CUDA and NCCL, and 5% fragments, which leaves nothing for tensors"),
    (["+model._target_=tests.planning.test_planning.Sparse", "gpus=1", "batch_size=8"],
     "Sparse: words would have sparse gradients, which no optimiser here takes; build it with sparse=False"),
    (["--per-node", "0"], "--per-node 0: give a number above 0"), (["--card", "x"], "--card x: neither a known card"),
])  # fmt: skip
def test_what_cannot_be_planned_is_told(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        command.main(words)
    assert str(refused.value).startswith(says)


def test_sums_take_their_share_of_the_cores_that_workers_have() -> None:
    link = Link(0.0, 1e9, cpu_s=1e-3, cpu_s_per_byte=2e-9)
    assert all_reduce_cpu_s(1e6, 4, link) == pytest.approx(6e-3 + 1.5 * 2e-3)
    apart = Cluster(4, link, link, overlap=0.0)
    shared = dataclasses.replace(apart, cores=2)
    assert bucket_s(1e6, 4, apart) == pytest.approx(1.5e-3), "the links alone"
    assert bucket_s(1e6, 4, shared) == pytest.approx(1.5e-3 + 9e-3), (
        "each message waits for another worker's"
    )
    assert bucket_s(1e6, 4, dataclasses.replace(shared, cores=100)) == pytest.approx(1.5e-3)
