"""Optimizer states that wait in the host's memory, and are on the device only while a step needs
them.

FSDP's CPUOffloadPolicy also has the parameters there, which is not needed for this.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BYTES_AT_ONCE = 256 * 2**20
"""Bytes of parameters whose states are on the device together."""


def offload_states(optimizer: Optimizer, *, bytes_at_once: int = BYTES_AT_ONCE) -> None:
    """Have each step update the parameters in turns, with the states of one turn on the device.

    Between steps they are in pinned memory; scalars stay where they are. Numbers are those of one
    update of all, for an optimizer that updates each parameter by its own gradient and state."""
    host = HostStates(optimizer)
    update = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        whole = [group["params"] for group in self.param_groups]
        try:
            for part in in_parts(whole, bytes_at_once):
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
    optimizer.register_load_state_dict_post_hook(lambda _: host.store(set(optimizer.state)))
    host.store(set(optimizer.state))


class HostStates:
    """Where the states of an optimizer's parameters are between steps."""

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
            kept = self._kept.get((parameter, name))
            if kept is None:
                kept = torch.empty_like(value, device="cpu", pin_memory=True)
                self._kept[parameter, name] = kept
            self._optimizer.state[parameter][name] = kept.copy_(value, non_blocking=True)

    def wait(self) -> None:
        """Return when the host has all states; the device's own next work need not wait for it."""
        if self._kept:
            torch.cuda.synchronize(next(iter(self._kept))[0].device)

    def _states(self, parameters: set[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        for parameter in parameters:
            for name, value in list(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.dim():
                    yield parameter, name, value


def in_parts(groups: Sequence[Sequence[Tensor]], bytes_at_once: int) -> Iterator[set[Tensor]]:
    """Yield the parameters that have a gradient, in order, so many bytes at once."""
    part, size = set[Tensor](), 0
    for parameter in (each for group in groups for each in group if each.grad is not None):
        if part and size + parameter.nbytes > bytes_at_once:
            yield part
            part, size = set(), 0
        part.add(parameter)
        size += parameter.nbytes
    if part:
        yield part
