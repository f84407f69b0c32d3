"""Slow weights, against lookahead written down plainly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from expt.training.lookahead import Lookahead

STEPS, PER_EPOCH = 24, 5  # the last epoch is cut short


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def step(module: nn.Module, number: int) -> None:
    """Moves weights and statistics alike for equal modules."""
    generator = torch.Generator().manual_seed(number)
    module.train()(torch.randn(8, 4, generator=generator))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 10)


def plain(*, every: int, keep: float, power: float, start: int) -> dict[str, torch.Tensor]:
    """What is evaluated at the end."""
    module = net()
    slow: dict[str, torch.Tensor] = {}
    for number in range(1, STEPS + 1):
        step(module, number)
        state = module.state_dict()
        epoch = (number - 1) // PER_EPOCH
        if epoch >= start and number % every == 0:
            if not slow:
                slow = copy.deepcopy(state)
            else:
                share = keep * (number / STEPS) ** power
                for name, value in state.items():
                    if value.is_floating_point():
                        slow[name] = share * slow[name] + (1 - share) * value
                        value.copy_(slow[name])
        if slow and (number % PER_EPOCH == 0 or number == STEPS):
            for name, value in state.items():
                if value.is_floating_point():
                    value.copy_(slow[name])
    return module.state_dict()


def ours(settings: dict[str, float], *, stop: int | None = None) -> dict[str, torch.Tensor]:
    module = net()
    lookahead = Lookahead(module, **settings)  # type: ignore[arg-type]
    for number in range(1, STEPS + 1):
        step(module, number)
        lookahead.after_step(epoch=1 + (number - 1) // PER_EPOCH, step=number, total_steps=STEPS)
        if number % PER_EPOCH == 0 or number == STEPS:
            lookahead.end_epoch()
        if number == stop:
            saved = copy.deepcopy((module.state_dict(), lookahead.state_dict()))
            lookahead = Lookahead(module := net(), **settings)  # type: ignore[arg-type]
            module.load_state_dict(saved[0])
            lookahead.load_state_dict(saved[1])
    return module.state_dict()


@pytest.mark.parametrize(
    ("every", "keep", "power", "start"),
    [(3, 0.5, 0.0, 0), (4, 0.77, 3.0, 2), (1, 0.9, 1.0, 0)],
    ids=str,
)
def test_the_weights_are_those_of_a_plain_loop(
    every: int, keep: float, power: float, start: int
) -> None:
    settings = {"every_steps": every, "keep": keep, "power": power, "start_epochs": start}
    expected, found = plain(every=every, keep=keep, power=power, start=start), ours(settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for stop in (2, 13, 20):
        again = ours(settings, stop=stop)
        assert all(torch.equal(again[name], found[name]) for name in found)


def test_without_any_that_are_slow_nothing_changes() -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    lookahead = Lookahead(module, every_steps=1, keep=0.5, power=0.0, start_epochs=1)
    lookahead.after_step(epoch=1, step=1, total_steps=9)
    lookahead.end_epoch()
    assert lookahead.state_dict() == {}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_weights_in_half_precision_have_slow_ones_in_float32() -> None:
    """Movements far below a unit in the last place of bfloat16 add up."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    lookahead = Lookahead(module, every_steps=1, keep=0.999, power=0.0, start_epochs=0)
    for number in range(1, 4001):
        lookahead.after_step(epoch=1, step=number, total_steps=4000)
        with torch.no_grad():
            module.weight.fill_(2.0)
    assert float(lookahead.state_dict()["weight"]) == pytest.approx(2 - 0.999**3999, rel=1e-3)
