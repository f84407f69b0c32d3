"""Muon trains hidden matrices and AdamW the rest, as torch's two would, with one state."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn, optim

from expt.config.groups import Muon, OneCycle, ParameterGroup
from expt.errors import ConfigError
from expt.training.optim import build_optimizer, build_scheduler, hidden_matrices

SETTINGS: dict[str, Any] = {
    "name": "muon", "lr": 0.02, "momentum": 0.9, "nesterov": True, "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "words": nn.Embedding(7, 4), "flat": nn.Flatten(), "first": nn.Linear(12, 8),
        "norm": nn.LayerNorm(8),
        "second": nn.Linear(8, 8), "head": nn.Linear(8, 3),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def train(module: nn.Module, optimizers: list[optim.Optimizer], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        module(torch.randint(7, (5, 3), generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True)
    )


def names(module: nn.Module, parameters: Any) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters()
        if any(parameter is one for one in parameters)
    }


def test_hidden_matrices_are_neither_embeddings_nor_the_head() -> None:
    module: Any = net()
    assert names(module, hidden_matrices(module)) == {"first.weight", "second.weight"}
    module.head = nn.Linear(4, 7)
    module.head.weight = module.words.weight
    assert names(module, hidden_matrices(module)) == {"first.weight", "second.weight"}, "it is tied"


@pytest.mark.parametrize("unguarded", [True, False])
def test_it_is_torchs_muon_beside_torchs_adamw(unguarded: bool) -> None:
    ours, theirs = net(), net()
    optimizer = build_optimizer(Muon(**SETTINGS), ours, unguarded=unguarded)
    matrices = hidden_matrices(theirs)
    rest = [parameter for parameter in theirs.parameters() if parameter not in matrices]
    hidden = [parameter for parameter in theirs.parameters() if parameter in matrices]
    muon = optim.Muon(
        hidden, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = optim.AdamW(rest, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    train(ours, [optimizer], 4)
    train(theirs, [muon, adamw], 4)
    assert same(ours, theirs)
    assert not same(ours, net())


def test_it_goes_on_from_its_state_to_the_same_bits() -> None:
    whole, resumed = net(), net()
    first = build_optimizer(Muon(**SETTINGS), whole)
    train(whole, [first], 3)
    second = build_optimizer(Muon(**SETTINGS), resumed)
    resumed.load_state_dict(whole.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for module, optimizer in ((whole, first), (resumed, second)):
        optimizer.param_groups[0]["lr"] = 0.5  # as a schedule sets it
        train(module, [optimizer], 2)
    assert same(whole, resumed)
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()


def test_it_takes_groups_and_a_schedule() -> None:
    module = net()
    head = ParameterGroup(match="head|second", lr_scale=0.5, weight_decay=0.0)
    config = Muon(**SETTINGS, groups=(head,), decay_biases_and_norms=False)
    optimizer = build_optimizer(config, module)
    found = [
        (names(module, group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        ({"first.weight"}, 0.02, 0.1),
        ({"second.weight"}, 0.01, 0.0),
        ({"words.weight"}, 0.02, 0.1),
        ({"first.bias", "norm.weight", "norm.bias"}, 0.02, 0.0),
        ({"head.weight"}, 0.01, 0.0),
        ({"second.bias", "head.bias"}, 0.01, 0.0),
    ]
    schedule = OneCycle(name="one_cycle", rise_fraction=0.3, start_factor=0.1, end_factor=0.01)
    build_scheduler(schedule, optimizer, steps_per_epoch=5, total_steps=10)
    lowered = [group["lr"] for group in optimizer.param_groups]
    assert lowered == pytest.approx([lr * 0.1 for _, lr, _ in found])


def test_a_model_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer=muon: the model has no weight matrix but for .*; use optimizer=a",
    ):
        build_optimizer(
            Muon(**SETTINGS), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
        )
