"""Which parameters get settings of their own, and that an optimiser then uses them."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn, optim

from expt.config.groups import SGD, Adam, ParameterGroup, TargetOptimizer
from expt.errors import ConfigError
from expt.training.optim import build_optimizer
from expt.training.parameter_groups import parameter_groups, rate_of

HEAD = ParameterGroup(match="^head", lr_scale=0.1, weight_decay=0.0)
BIAS = ParameterGroup(match=r"bias$", lr_scale=2.0)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda **more: SGD(
        name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=False, **more
    ),
    "adam": lambda **more: Adam(
        name="adam", lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.01, **more
    ),
    "adamw": lambda **more: Adam(
        name="adamw", lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.01, **more
    ),
    "own": lambda **more: TargetOptimizer(
        target="torch.optim.RMSprop", kwargs={"lr": 0.1, "weight_decay": 0.01}, **more
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = {"stem": nn.Linear(6, 5), "norm": nn.BatchNorm1d(5), "head": nn.Linear(5, 3)}
    return nn.Sequential(OrderedDict(layers))


def grouped(optimizer: optim.Optimizer, module: nn.Module) -> list[tuple[list[str], float, float]]:
    """The names in each group, its learning rate and its weight decay."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = optimizer.param_groups
    return [
        ([names[p] for p in group["params"]], group["lr"], group["weight_decay"]) for group in found
    ]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_without_groups_torch_is_given_what_it_always_was(make: Any) -> None:
    module = net()
    optimizer = build_optimizer(make(), module)
    assert parameter_groups(module, make()) == [{"params": [*module.parameters()]}]
    (group,) = optimizer.param_groups
    assert "lr_scale" not in group, "nor is it in a checkpoint"
    assert all(
        ours is theirs for ours, theirs in zip(group["params"], module.parameters(), strict=True)
    )


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_the_first_match_counts_and_the_rest_comes_first(make: Any) -> None:
    module = net()
    assert grouped(build_optimizer(make(groups=(HEAD, BIAS)), module), module) == [
        (["stem.weight", "norm.weight"], 0.1, 0.01),
        (["head.weight", "head.bias"], pytest.approx(0.01), 0.0),
        (["stem.bias", "norm.bias"], 0.2, 0.01),
    ]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_biases_and_norms_need_not_decay(make: Any) -> None:
    module = net()
    assert grouped(build_optimizer(make(decay_biases_and_norms=False), module), module) == [
        (["stem.weight", "head.weight"], 0.1, 0.01),
        (["stem.bias", "norm.weight", "norm.bias", "head.bias"], 0.1, 0.0),
    ]
    head = ParameterGroup(match="head", weight_decay=0.5)
    assert grouped(
        build_optimizer(make(decay_biases_and_norms=False, groups=(head,)), module), module
    )[2:] == [(["head.weight"], 0.1, 0.5), (["head.bias"], 0.1, 0.0)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_uses_the_settings_of_each_group(make: Any) -> None:
    """As two optimisers would, each over its own part."""

    def trained(*, groups: tuple[ParameterGroup, ...]) -> nn.Module:
        module = net()
        optimizers = [build_optimizer(make(groups=groups), module)]
        if not groups:
            optimizers.clear()
            for part, scale, decay in (
                ("stem", 1.0, 0.01),
                ("norm", 1.0, 0.01),
                ("head", 0.1, 0.0),
            ):
                optimizers.append(build_optimizer(make(), module.get_submodule(part)))
                optimizers[-1].param_groups[0] |= {"lr": 0.1 * scale, "weight_decay": decay}
        for step in range(3):
            module(torch.arange(24.0).view(4, 6) + step).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return module

    ours, theirs = trained(groups=(HEAD,)), trained(groups=())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            (HEAD, ParameterGroup(match="stem.wieght")),
            r"optimizer\.groups\.1\.match=stem\.wieght: matches no parameter of the model"
            r".* Did you mean 'stem\.weight'\?",
        ),
        (
            (BIAS, ParameterGroup(match="head.bias")),
            r"optimizer\.groups\.1\.match=head\.bias: matches no parameter of",
        ),
    ],
    ids=["nothing", "nothing more"],
)
def test_empty_group_is_refused(groups: tuple[ParameterGroup, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        build_optimizer(OPTIMIZERS["sgd"](groups=groups), net())


def test_a_setting_that_an_own_optimizer_has_not_is_refused() -> None:
    config = TargetOptimizer(target="torch.optim.Rprop", kwargs={}, decay_biases_and_norms=False)
    with pytest.raises(
        ConfigError, match=r"^optimizer: Rprop has no weight_decay, which optimizer\.groups, layer"
    ):
        build_optimizer(config, net())


def test_a_rate_that_is_a_tensor_is_told_as_it_was() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    told = rate_of(optimizer)
    rate.fill_(0.25)
    assert (told, type(told)) == (0.5, float)
