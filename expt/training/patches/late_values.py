"""Models whose parameters take no memory until their values are asked for: those that they would have had all along.

While a model is built, what is done to memory that torch.empty gives is noted, and done when a parameter is wanted: a
worker that keeps an Nth of a model never holds all of it. What draws is done at once, too, to leave the generator where
it would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's docs on extending it have it
from torch.utils._pytree import tree_leaves

Values = Callable[[Tensor], Tensor]
"""From a parameter or buffer without memory to its values, on the CPU; from any other to itself."""

_aten = torch.ops.aten
_FILL = (_aten.normal_.default, _aten.uniform_.default, _aten.fill_.Scalar, _aten.zero_.default)
"""After which nothing is left of what was there before."""


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Values]:
    """The module that `make` makes, without memory for its parameters, and what gives their values.

    Where more is done to a parameter than to fill it and to change it in its place, by no other tensor, the module is
    made again, as it is.
    """
    before, recording = torch.get_rng_state(), _Recording()
    try:
        with recording:
            return make(), recording.values
    except Exception:  # also of torch's, for numbers that are not there; what the model itself raises is raised again
        torch.set_rng_state(before)
    return make(), lambda tensor: tensor


class _Step(NamedTuple):
    """What is done to a storage, or a part of it."""

    operation: Any
    view: tuple[Any, Any, Any]
    """Size, stride and offset."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    generator: Tensor | None
    """Its state before, where numbers are drawn."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: dict[torch.UntypedStorage, list[_Step]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it fills or changes what has no memory yet."""
        known = dict(kwargs or {})
        if func is _aten.empty.memory_format and known.get("device") in (None, torch.device("cpu")):
            empty: Tensor = func(*args, **{**known, "device": torch.device("meta"), "pin_memory": False})
            self._steps[empty.untyped_storage()] = []
            return empty
        late = [each for each in tree_leaves((args, known)) if isinstance(each, Tensor) and each.is_meta]
        if not late or func.is_view:
            return func(*args, **known)
        if func._schema.name[-1:] != "_" or any(isinstance(each, Tensor) for each in tree_leaves((args[1:], known))):
            raise NotImplementedError(f"{func} on what has no values yet")
        self._note(func, late[0], args[1:], known)
        return late[0]

    def _note(self, operation: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        steps, generator = self._steps[target.untyped_storage()], None
        if torch.Tag.nondeterministic_seeded in operation.tags:
            if keywords.get("generator") is not None:
                raise NotImplementedError(f"{operation} by a generator of its own")
            generator = torch.get_rng_state()
            operation(torch.empty_strided(target.size(), target.stride(), dtype=target.dtype), *arguments, **keywords)
        if operation in _FILL and target.nbytes == target.untyped_storage().nbytes():
            steps.clear()
        view = (target.size(), target.stride(), target.storage_offset())
        steps.append(_Step(operation, view, arguments, keywords, generator))

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """See Values."""
        if not tensor.is_meta:
            return tensor
        own = tensor.untyped_storage()
        whole = torch.empty(own.nbytes() // tensor.element_size(), dtype=tensor.dtype)
        now = torch.get_rng_state()
        for step in self._steps[own]:
            if step.generator is not None:
                torch.set_rng_state(step.generator)
            step.operation(whole.as_strided(*step.view), *step.arguments, **step.keywords)
        torch.set_rng_state(now)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
