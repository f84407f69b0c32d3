"""The state of an optimizer: loaded where parameters lie otherwise, carried over, offloaded."""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from expt.runs.checkpoint import copied, map_leaves
from expt.training.collectives import buckets
from expt.training.optim import fill_momentum, parts_of
from expt.training.parameter_groups import members
from expt.training.schedules import OneCycle, Schedule
from expt.training.sharding import is_sharded

State = Mapping[str, Any]
Group = dict[str, Any]
KERNEL = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that choose the kernel of its update, and not its numbers."""
SET_BY_SCHEDULES = {
    *("lr", "initial_lr", "max_lr", "min_lr"),
    *("momentum", "base_momentum", "max_momentum", "betas"),
}
BYTES_AT_ONCE = 256 * 2**20
"""Bytes of parameters whose states are on the device together."""


def _toggling(optimizer: Optimizer) -> list[Any]:
    names = "train", "eval"
    every = parts_of(optimizer)
    return [each for each in every if all(callable(getattr(each, name, None)) for name in names)]


def switch(optimizer: Optimizer, to: Literal["train", "eval"]) -> None:
    """Call `train` or `eval` of an optimizer that trains at other weights than those to be used."""
    for part in _toggling(optimizer):
        getattr(part, to)()


@contextlib.contextmanager
def in_use(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Switch to the weights for evaluation in the body, which gets copies of the trained ones."""
    if not _toggling(optimizer):
        yield []
        return
    before = [one.detach().clone() for one in members(optimizer.param_groups)]
    switch(optimizer, "eval")
    yield before
    train_at(optimizer, before)


@torch.no_grad()
def train_at(optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
    """Continue to train at exactly these weights, which `in_use` has returned."""
    switch(optimizer, "train")
    for parameter, weight in zip(members(optimizer.param_groups), weights, strict=True):
        parameter.copy_(weight)


def adapt(optimizer: Optimizer, state: State) -> Any:
    """Return `state` for `optimizer.load_state_dict`, with the kernels, strides and device of now.

    torch has some kernels only for whole parameters, and fused ones on a CPU need a state to lie in
    memory as its parameter does, which may have changed with sharding or channels_last. torch moves
    its own tensors to the parameters' device, but not those that a custom optimizer adds.
    """
    groups_now, of_torch = optimizer.param_groups, {"state", "param_groups"}
    device = next(iter(members(groups_now))).device

    def to_device(_: str, value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.dim() else value

    if not (isinstance(state, Mapping) and of_torch <= state.keys()):
        return map_leaves(to_device, state)
    saved, more = state["param_groups"], {key: state[key] for key in state.keys() - of_torch}
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups_now]:
        return dict(state)  # torch says so
    kernels = ({key: group[key] for key in KERNEL if key in group} for group in groups_now)
    groups = [{**group, **kernel} for group, kernel in zip(saved, kernels, strict=True)]
    states = dict(state["state"])
    for key, parameter in zip(members(saved), members(groups_now), strict=True):
        if isinstance(values := states.get(key), Mapping):
            states[key] = {name: _laid_out(one, parameter) for name, one in values.items()}
    return {**map_leaves(to_device, more), "state": states, "param_groups": groups}


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Return `value` with the parameter's strides, if it is a tensor of the parameter's shape."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or is_sharded(parameter):
        return value
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def as_built(module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> State:
    """Return the groups and the schedule before training, with names for parameters.

    By these a checkpoint tells settings of an optimizer from values that training has changed.
    """
    names = {one: name for name, one in module.named_parameters()}
    groups = [
        {**group, "params": [names.get(one) for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    return cast(State, copied({"groups": groups, "scheduler": scheduler.state_dict()}))


def carry_over(
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    saved: State,
    *,
    same_optimizer: bool,
    same_schedule: bool,
    place: int,
) -> None:
    """Continue a checkpoint with an `optimizer` and a `scheduler` of other settings.

    `saved` has the states of both and, under `built`, `as_built` of the run that wrote it. torch's
    `load_state_dict` restores saved settings, too. Here only the state is restored (moments,
    counters, the place in the schedule), and the next step uses the new settings. Without
    `same_optimizer` its state is new. Without `same_schedule` (the same kind and settings) the
    schedule is advanced `place` times; one that looks at metrics begins.
    """
    scheduled = set[str]() if same_schedule else SET_BY_SCHEDULES
    names = as_built(module, optimizer, scheduler)["groups"]
    groups, states, more = optimizer.param_groups, dict[int, Any](), dict[str, Any]()
    if same_optimizer:
        of_torch = {"state", "param_groups"}  # a custom optimizer may have further entries
        more = {key: one for key, one in saved["optimizer"].items() if key not in of_torch}
        pairs = zip(groups, names, strict=True)
        groups = [_merged(group, named["params"], saved, scheduled) for group, named in pairs]
        by_name = _states_by_name(saved)
        numbered = enumerate(members(names))
        states = {number: by_name[name] for number, name in numbered if name in by_name}
    numbers = itertools.count()
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    optimizer.load_state_dict(adapt(optimizer, {**more, "state": states, "param_groups": groups}))
    fill_momentum(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step of the optimiser has come before
        if isinstance(scheduler, Schedule | OneCycle):
            _set_place(scheduler, place)
        elif same_schedule:
            _continue(scheduler, optimizer, saved)
        elif not isinstance(scheduler, ReduceLROnPlateau):
            for _ in range(place):
                scheduler.step()


def _states_by_name(saved: State) -> dict[str, Any]:
    """Return the saved states of an optimizer, by the names of their parameters."""
    states, groups = saved["optimizer"]["state"], saved["optimizer"]["param_groups"]
    pairs = zip(members(saved["built"]["groups"]), members(groups), strict=True)
    return {name: states[number] for name, number in pairs if number in states}


def _merged(group: Group, names: Sequence[str], saved: State, scheduled: Collection[str]) -> Group:
    """Return the group with the values that continue, if one group had its parameters."""
    before = zip(saved["built"]["groups"], saved["optimizer"]["param_groups"], strict=True)
    built, then = next((pair for pair in before if {*names} <= {*pair[0]["params"]}), ({}, {}))
    not_kept = {*scheduled, "params"}
    kept = {key: then[key] for key in then if _is_kept(key, group, built, not_kept)}
    return {**group, **kept}


def _is_kept(key: str, now: Group, built: Group, not_kept: Collection[str] = ()) -> bool:
    """Return whether a saved value continues: of an unchanged setting, or of custom code."""
    if key in now:
        return key not in not_kept and _equal(now[key], built.get(key))
    return key not in built


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(*(torch.as_tensor(each).cpu() for each in (one, other))))
    return bool(one == other)


def _set_place(scheduler: Schedule | OneCycle, place: int) -> None:
    """Move a schedule that is a function of the step to where it is after `place` steps."""
    end = scheduler.total_steps - 1 if isinstance(scheduler, OneCycleLR) else place
    scheduler.last_epoch = min(place, end) - 1
    scheduler.step()
    scheduler.last_epoch = place


def _continue(scheduler: LRScheduler, optimizer: Optimizer, saved: State) -> None:
    """Continue a schedule as if it had begun with the new learning rate."""
    fresh, built = scheduler.state_dict(), saved["built"]["scheduler"]
    kept = {key: x for key, x in saved["scheduler"].items() if _is_kept(key, fresh, built)}
    scheduler.load_state_dict({**fresh, **kept})
    groups = zip(optimizer.param_groups, saved["optimizer"]["param_groups"], strict=False)
    for group, before in groups:
        initial_lr = before.get("initial_lr")
        if isinstance(scheduler, ReduceLROnPlateau):
            if not _equal(group["lr"], before["lr"]):  # it was set: look for a plateau again
                scheduler.num_bad_epochs = scheduler.cooldown_counter = 0
        elif initial_lr and not _equal(group.get("initial_lr"), initial_lr):
            group["lr"] = group["initial_lr"] * (before["lr"] / initial_lr)


def offload_states(optimizer: Optimizer, *, bytes_at_once: int = BYTES_AT_ONCE) -> None:
    """Update the parameters of each step in turns, with the states of one turn on the device.

    Between steps they are in pinned memory; scalars stay where they are. Numbers stay the same if
    the optimizer updates each parameter by its own gradient and state. FSDP's CPUOffloadPolicy
    would move the parameters, too.
    """
    host = HostStates(optimizer)
    update = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        whole = [group["params"] for group in self.param_groups]
        try:
            changed = (one for group in whole for one in group if one.grad is not None)
            for part in map(set, buckets(changed, bytes_at_once)):
                host.load(part)
                for group, params in zip(self.param_groups, whole, strict=True):
                    group["params"] = [each for each in params if each in part]
                update(*args, **kwargs)
                host.store(part)
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    # a method, as schedulers want it
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.register_state_dict_pre_hook(lambda _: host.wait())
    for part in parts_of(optimizer):
        part.register_load_state_dict_post_hook(lambda part: host.store(set(part.state)))
    host.store(set(optimizer.state))


class HostStates:
    """The place of an optimizer's states between steps: the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[tuple[Tensor, str], Tensor] = {}

    def load(self, parameters: set[Tensor]) -> None:
        """Copy the states of `parameters` to their device."""
        for parameter, name, value in self._states(parameters):
            self._optimizer.state[parameter][name] = value.to(parameter.device, non_blocking=True)

    def store(self, parameters: set[Tensor]) -> None:
        """Begin to copy the states of `parameters` to the host; see `wait`."""
        for parameter, name, value in self._states(parameters):
            if value.device.type == "cpu":
                continue
            if (parameter, name) not in self._kept:
                pinned = torch.empty_like(value, device="cpu", pin_memory=True)
                self._kept[parameter, name] = pinned
            kept = self._kept[parameter, name].copy_(value, non_blocking=True)
            self._optimizer.state[parameter][name] = kept

    def wait(self) -> None:
        """Return when the host has all states; the device's own next work need not wait for it."""
        if self._kept:
            torch.cuda.synchronize(next(iter(self._kept))[0].device)

    def _states(self, parameters: set[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        for parameter in parameters:
            for name, value in list(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.dim():
                    yield parameter, name, value
