"""The state goes on, and each setting that is another now is as it is now."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from expt.config import groups
from expt.training import optim, schedules
from expt.training.optimizer_state import adapt, as_built, carry_over

SGD: Any = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
ADAM: Any = {"name": "adam", "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
PLATEAU: Any = {
    "name": "plateau", "metric": "loss/val", "factor": 0.1, "patience": 3,
    "min_delta": 0.0, "cooldown": 0, "min_lr": 0.0,
}  # fmt: skip
CONSTANT = groups.Constant(name="constant", warmup_epochs=0.0)
Built = tuple[torch.optim.Optimizer, LRScheduler]


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def _built(module: nn.Module, optimizer: Any, scheduler: Any = CONSTANT) -> Built:
    built = optim.build_optimizer(optimizer, module)
    return built, schedules.build_scheduler(scheduler, built, steps_per_epoch=2, total_steps=20)


def _trained(module: nn.Module, built: Built, steps: int = 3) -> None:
    for _ in range(steps):
        module(torch.randn(5, 3)).square().mean().backward()
        built[0].step()
        built[0].zero_grad()
        if isinstance(built[1], schedules.Plateau):
            built[1].step(1.0)
        else:
            built[1].step()


def _carried(
    then: Any, now: Any, schedules: tuple[Any, Any] = (CONSTANT, CONSTANT), **how: Any
) -> tuple[Built, Built]:
    """Return optimizers trained for three steps by `then`, and carried over to `now`."""
    module = _module()
    earlier = _built(module, then, schedules[0])
    _trained(module, earlier)
    saved = _saved(module, earlier, _built(module, then, schedules[0]))
    new = _built(module, now, schedules[1])
    how = {"same_optimizer": True, "same_schedule": True, "place": 3, **how}
    carry_over(module, *new, saved, **how)
    return earlier, new


def _saved(module: nn.Module, trained: Built, built: Built) -> dict[str, Any]:
    states = {"optimizer": trained[0].state_dict(), "scheduler": trained[1].state_dict()}
    return {**copy.deepcopy(states), "built": as_built(module, *built)}


def _moments(built: Built, key: str) -> list[torch.Tensor]:
    parameters = {one: None for group in built[0].param_groups for one in group["params"]}
    return [built[0].state[one][key] for one in sorted(parameters, key=id)]


def test_moments_go_on_by_their_parameters_whatever_the_groups() -> None:
    grouped = groups.Adam(**{**ADAM, "lr": 0.01, "name": "adamw", "betas": (0.8, 0.99)},
        layer_decay=0.5,
                          decay_biases_and_norms=False)  # fmt: skip
    earlier, new = _carried(groups.Adam(**ADAM), grouped)
    assert len(new[0].param_groups) > len(earlier[0].param_groups) == 1
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert all(map(torch.equal, _moments(earlier, key), _moments(new, key))), key
    assert {group["betas"] for group in new[0].param_groups} == {(0.8, 0.99)}
    assert max(group["lr"] for group in new[0].param_groups) == 0.01


def test_momentum_is_taken_up_and_left() -> None:
    _, with_it = _carried(groups.SGD(**{**SGD, "momentum": 0.0}), groups.SGD(**SGD))
    assert not any(map(torch.count_nonzero, _moments(with_it, "momentum_buffer")))
    _, without = _carried(groups.SGD(**SGD), groups.SGD(**{**SGD, "momentum": 0.0}))
    assert all("momentum_buffer" not in state for state in without[0].state.values())


@pytest.mark.parametrize("skips", [False, True])
def test_a_parameter_has_a_momentum_once_it_is_trained(skips: bool) -> None:
    """Also where the first step after that is skipped, as GradScaler does by `found_inf`."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    optimizer = optim.build_optimizer(groups.SGD(**SGD), module)
    assert {*optimizer.state} == {*module[1].parameters()}
    module[0].requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    if skips:
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())  # type: ignore
    optimizer.step()
    assert {*optimizer.state} == {*module.parameters()}
    moments = [optimizer.state[each]["momentum_buffer"] for each in module.parameters()]
    assert any(map(torch.count_nonzero, moments)) is not skips


@pytest.mark.parametrize(("lr", "goes_on_with", "bad_epochs"), [(0.1, 0.1, 2), (0.05, 0.05, 0)])
def test_plateau_counts_on(lr: float, goes_on_with: float, bad_epochs: int) -> None:
    plateaus = (
        groups.Plateau(**PLATEAU),
        groups.Plateau(**{**PLATEAU, "patience": 9, "min_lr": 0.01}),
    )
    _, (optimizer, plateau) = _carried(groups.SGD(**SGD), groups.SGD(**{**SGD, "lr": lr}), plateaus)
    assert isinstance(plateau, schedules.Plateau)
    assert (plateau.best, plateau.num_bad_epochs) == (1.0, bad_epochs)
    assert (plateau.patience, plateau.min_lrs) == (9, [0.01])
    assert optimizer.param_groups[0]["lr"] == goes_on_with


def test_a_plateau_that_has_lowered_the_learning_rate() -> None:
    plateaus = (groups.Plateau(**{**PLATEAU, "patience": 0}),) * 2
    earlier, (same, _) = _carried(
        groups.SGD(**SGD), groups.SGD(**{**SGD, "momentum": 0.5}), plateaus
    )
    assert same.param_groups[0]["lr"] == earlier[0].param_groups[0]["lr"] == pytest.approx(0.001)
    assert same.param_groups[0]["momentum"] == 0.5
    _, (given, _) = _carried(groups.SGD(**SGD), groups.SGD(**{**SGD, "lr": 0.3}), plateaus)
    assert given.param_groups[0]["lr"] == 0.3


def _own(**kwargs: Any) -> groups.TargetScheduler:
    return groups.TargetScheduler(
        target="torch.optim.lr_scheduler.StepLR", kwargs={"step_size": 2, **kwargs}
    )


def test_an_own_schedule_does_to_another_learning_rate_what_it_has_done() -> None:
    same = (_own(gamma=0.5), _own(gamma=0.5))
    _, (optimizer, scheduler) = _carried(groups.SGD(**SGD), groups.SGD(**{**SGD, "lr": 1.0}), same)
    assert isinstance(scheduler, StepLR)
    assert (scheduler.last_epoch, scheduler.base_lrs) == (3, [1.0])
    assert optimizer.param_groups[0]["lr"] == 0.5
    other = (_own(gamma=0.5), _own(gamma=0.1))
    _, (optimizer, scheduler) = _carried(
        groups.SGD(**SGD), groups.SGD(**SGD), other, same_schedule=False
    )
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (3, pytest.approx(0.01))


def test_another_schedule_is_at_its_place_with_a_momentum_of_its_own() -> None:
    cycle = groups.OneCycle(name="one_cycle", rise_fraction=0.5, start_factor=0.1, end_factor=0.01)
    cosine = groups.Cosine(name="cosine", warmup_epochs=0.0, min_lr=0.0)
    _, (optimizer, _) = _carried(
        groups.SGD(**SGD), groups.SGD(**SGD), (cycle, cosine), same_schedule=False, place=10
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    _, (optimizer, _) = _carried(
        groups.SGD(**SGD), groups.SGD(**SGD), (cosine, cycle), same_schedule=False, place=99
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("config", "key"), [(groups.SGD(**SGD), "momentum_buffer"), (groups.Adam(**ADAM), "exp_avg")]
)
def test_a_state_of_other_strides_is_that_of_the_same_numbers(config: Any, key: str) -> None:
    """A fused update on the CPU goes by what lies where."""
    ends = list[torch.Tensor]()
    for now in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 4, 2)
        built = _built(module, config)
        _steps(module, built[0])
        saved = _saved(module, built, _built(module, config))
        module.to(memory_format=now)
        new = _built(module, config)
        carry_over(module, *new, saved, same_optimizer=True, same_schedule=True, place=2)
        assert new[0].state[module.weight][key].stride() == module.weight.stride()
        _steps(module, new[0])
        ends.append(module.weight.detach())
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


def _steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("keys", [{}, {"state": {}, "param_groups": [{"params": [0, 1]}]}])
def test_what_a_custom_optimizer_adds_goes_to_the_device_of_the_parameters(keys: Any) -> None:
    """torch's own state as torch does it; a count of steps stays on the host."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters(), lr=0.1)
    state = {**keys, "slow": [torch.ones(2)], "inner": {"step": torch.ones(())}}
    found = adapt(optimizer, state)
    assert (found["slow"][0].device.type, found["inner"]["step"].device.type) == ("meta", "cpu")
    assert found.keys() == state.keys()
