"""An optimiser and a schedule that go on from another's state, with their own settings.

torch's `load_state_dict` brings back the settings that were saved, learning rate and all. Here the
state comes from there (moments, counters, the place in the schedule), and each setting that is
another now is as it is now."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from expt.training.optim import OneCycle, Schedule
from expt.training.optimizer_state import adapted

Group = dict[str, Any]
State = Mapping[str, Any]
SET_BY_SCHEDULES = {
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "momentum",
    "base_momentum",
    "max_momentum",
    "betas",
}


class Earlier(NamedTuple):
    """What was trained with until now, built anew by its settings over the same parameters, and its
    saved states.
    """

    optimizer: Optimizer
    scheduler: LRScheduler
    optimizer_state: State
    scheduler_state: State


def carry_over(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    earlier: Earlier,
    *,
    same_optimizer: bool,
    same_schedule: bool,
    place: int,
) -> None:
    """Have the new `optimizer` and `scheduler` go on from the earlier ones; the next step uses the
    new settings.

    Without `same_optimizer` its state begins anew. Without `same_schedule`, which says that the
    schedule has the same kind and settings, it is as if it had been advanced `place` times, but for
    one that looks at metrics, which begins."""
    new = set[str]() if same_schedule else SET_BY_SCHEDULES
    groups = [
        _merged(group, earlier, new) if same_optimizer else dict(group)
        for group in optimizer.param_groups
    ]
    states = _states(optimizer, earlier) if same_optimizer else {}
    indices = itertools.count()
    numbered = [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]
    optimizer.load_state_dict(adapted(optimizer, {"state": states, "param_groups": numbered}))
    _fill_momentum(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step of the optimiser has come before
        if isinstance(scheduler, Schedule | OneCycle):
            _set_place(scheduler, place)
        elif same_schedule:
            _continue(scheduler, optimizer, earlier)
        elif not isinstance(scheduler, ReduceLROnPlateau):
            for _ in range(place):
                scheduler.step()


def _members(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(optimizer: Optimizer, earlier: Earlier) -> dict[int, Any]:
    """What was saved of each parameter, by its number in the new groups."""
    saved = itertools.chain.from_iterable(
        group["params"] for group in earlier.optimizer_state["param_groups"]
    )
    number = dict(zip(_members(earlier.optimizer), saved, strict=True))
    states = earlier.optimizer_state["state"]
    found = (
        (index, states.get(number[one]))
        for index, one in enumerate(_members(optimizer))
        if one in number
    )
    return {index: state for index, state in found if state is not None}


def _merged(group: Group, earlier: Earlier, new: set[str]) -> Group:
    """The group as it was saved, but for settings that are others than those of then, and the keys
    `new`.

    Of one whose parameters were in several groups nothing is as it was saved.
    """
    owner = {
        one: at
        for at, built in enumerate(earlier.optimizer.param_groups)
        for one in built["params"]
    }
    owners = {owner.get(one) for one in group["params"]}
    if len(owners) > 1 or None in owners:
        return dict(group)
    at = owners.pop()
    assert at is not None
    built, saved = earlier.optimizer.param_groups[at], earlier.optimizer_state["param_groups"][at]
    kept = [
        key
        for key in group
        if key in saved and key not in new and _equal(group[key], built.get(key))
    ]
    more = {
        key: saved[key] for key in saved if key not in group and key not in built
    }  # an own optimiser's state
    return {**group, **more, **{key: saved[key] for key in kept if key != "params"}}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _fill_momentum(optimizer: Optimizer) -> None:
    """As `build_optimizer` has it: buffers where there is a momentum, which before may have been 0;
    else none.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not group["momentum"]:
                optimizer.state[parameter].pop("momentum_buffer", None)
            elif optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _set_place(scheduler: Schedule | OneCycle, place: int) -> None:
    """Have a schedule that is a function of the step be where it is after `place` steps."""
    end = scheduler.total_steps - 1 if isinstance(scheduler, OneCycleLR) else place
    scheduler.last_epoch = min(place, end) - 1
    scheduler.step()
    scheduler.last_epoch = place


def _continue(scheduler: LRScheduler, optimizer: Optimizer, earlier: Earlier) -> None:
    """One of which nothing but the learning rate is another: what it has made of that it makes of
    the new one.
    """
    new, built, saved = (
        scheduler.state_dict(),
        earlier.scheduler.state_dict(),
        earlier.scheduler_state,
    )
    merged = {
        key: saved[key] if key in saved and _equal(new[key], built.get(key)) else new[key]
        for key in new
    }
    scheduler.load_state_dict({**{key: saved[key] for key in saved if key not in built}, **merged})
    for group, before in zip(
        optimizer.param_groups, earlier.optimizer_state["param_groups"], strict=False
    ):
        if _equal(group.get("initial_lr"), before.get("initial_lr")) and not isinstance(
            scheduler, ReduceLROnPlateau
        ):
            continue
        if isinstance(scheduler, ReduceLROnPlateau):
            if not _equal(group["lr"], before["lr"]):  # it is given: the plateau is looked for anew
                scheduler.num_bad_epochs = scheduler.cooldown_counter = 0
        elif before.get("initial_lr"):
            group["lr"] = group["initial_lr"] * (before["lr"] / before["initial_lr"])
