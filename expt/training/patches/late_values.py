"""Models whose parameters are filled when their values are asked for, with those that they would
have had all along.

What fills the memory that torch.empty gives while a model is built is noted, and done when a
parameter is wanted: until then the kernel gives no page for it, and a worker that keeps an Nth of a
model never holds all of it. What draws is done at once, too, to leave the generator where it would
be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # as torch's docs on extending it have it
from torch.utils._pytree import tree_leaves

Values = Callable[[Tensor], Tensor]
"""Sees to it that a parameter or buffer has its values, and gives it back."""

_aten = torch.ops.aten
_FILLS = (_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_)
"""After which nothing is left of what was there before."""
_CHANGES = (*_FILLS, _aten.mul_, _aten.div_, _aten.add_, _aten.sub_, _aten.clamp_, _aten.erfinv_)
"""What may wait, where it takes numbers and no other tensor."""


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Values]:
    """The module that `make` makes, and what fills its tensors.

    No tensor may be looked at before it is filled.

    Where something else is done to a tensor than to fill it, or change it by numbers, it is filled
    at once."""
    with _Recording() as recording:
        return make(), recording.values


class _Step(NamedTuple):
    """What is to be done to a tensor that has a storage, or a part of it."""

    operation: Any
    target: Tensor
    arguments: tuple[Any, ...]
    generator: Tensor | None
    """Its state before, where numbers are drawn."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: dict[torch.UntypedStorage, list[_Step]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it can wait."""
        known = kwargs or {}
        if func is _aten.empty.memory_format:
            empty: Tensor = func(*args, **known)
            if empty.device.type == "cpu":
                self._steps[empty.untyped_storage()] = []
            return empty
        if func.is_view:
            return func(*args, **known)
        tensors = [each for each in tree_leaves((args, known)) if isinstance(each, Tensor)]
        late = [
            each
            for each in tensors
            if each.layout == torch.strided and each.untyped_storage() in self._steps
        ]
        numbers_alone = len(tensors) == 1 and not any(value is not None for value in known.values())
        if late and numbers_alone and func.overloadpacket in _CHANGES:
            self._note(func, late[0], args[1:])
            return late[0]
        for tensor in late:
            self.values(tensor)
        return func(*args, **known)

    def _note(self, operation: Any, target: Tensor, arguments: tuple[Any, ...]) -> None:
        own, generator = target.untyped_storage(), None
        if torch.Tag.nondeterministic_seeded in operation.tags:
            generator = torch.get_rng_state()
            operation(
                torch.empty_strided(target.size(), target.stride(), dtype=target.dtype), *arguments
            )
        if operation.overloadpacket in _FILLS and target.nbytes == own.nbytes():
            self._steps[own].clear()
        self._steps[own].append(_Step(operation, target.detach(), arguments, generator))

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """See Values."""
        now = torch.get_rng_state()
        for step in self._steps.pop(tensor.untyped_storage(), ()):
            if step.generator is not None:
                torch.set_rng_state(step.generator)
            step.operation(step.target, *step.arguments)
        torch.set_rng_state(now)
        return tensor
