"""Each named initialisation: which weights it draws, and what they look like."""

from typing import Any

import pytest
import torch
from torch import nn

from expt.config import groups
from expt.models.build import initialise

FAN_IN, FAN_OUT = 400, 900


def layers(init: Any) -> tuple[nn.Linear, nn.Conv2d, nn.BatchNorm2d]:
    """A linear layer, a convolution of the same two fans, and a batch norm, initialised."""
    torch.manual_seed(0)
    made = (
        nn.Linear(FAN_IN, FAN_OUT),
        nn.Conv2d(FAN_IN // 100, FAN_OUT // 100, 10),
        nn.BatchNorm2d(3),
    )
    initialise(nn.ModuleList([*made]), init)
    return made


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (groups.NormalInit(name="normal", std=0.01, zero_bias=True), 0.01),
        (
            groups.XavierInit(name="xavier", distribution="uniform", zero_bias=True),
            (2 / (FAN_IN + FAN_OUT)) ** 0.5,
        ),
        (
            groups.XavierInit(name="xavier", distribution="normal", zero_bias=True),
            (2 / (FAN_IN + FAN_OUT)) ** 0.5,
        ),
        (
            groups.KaimingInit(
                name="kaiming", distribution="normal", mode="fan_in", zero_bias=True
            ),
            (2 / FAN_IN) ** 0.5,
        ),
        (
            groups.KaimingInit(
                name="kaiming", distribution="uniform", mode="fan_out", zero_bias=True
            ),
            (2 / FAN_OUT) ** 0.5,
        ),
    ],
    ids=["normal", "xavier uniform", "xavier normal", "kaiming fan_in", "kaiming fan_out, uniform"],
)
def test_the_spread_of_the_weights(init: Any, std: float) -> None:
    linear, convolution, norm = layers(init)
    for layer in (linear, convolution):
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx(std, rel=0.03)
        assert float(weight.mean()) == pytest.approx(0, abs=std / 20)
        assert layer.bias is not None
        assert not layer.bias.any()
        # A uniform distribution ends at the square root of 3 times its deviation.
        uniform = getattr(init, "distribution", "normal") == "uniform"
        assert (float(weight.abs().max()) <= std * 3**0.5 + 1e-6) == uniform
    assert (norm.weight == 1).all()


def test_orthogonal_rows_have_the_length_of_the_gain() -> None:
    linear, _, _ = layers(groups.OrthogonalInit(name="orthogonal", gain=3.0, zero_bias=False))
    assert torch.allclose(linear.weight.T @ linear.weight, 9 * torch.eye(FAN_IN), atol=1e-3)
    assert linear.bias.any()


def test_default_draws_nothing() -> None:
    plain = nn.Linear(3, 3)
    before, state = plain.weight.clone(), torch.get_rng_state()
    initialise(plain, groups.DefaultInit(name="default"))
    assert torch.equal(plain.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
