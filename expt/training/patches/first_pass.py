"""What an own model does in a first forward pass that sharding would lose: what it reads, and what
it writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # as torch's docs on extending it have it
from torch.utils._pytree import tree_leaves

Told = Callable[[str], Exception]
"""From the name of a parameter to what is raised."""


class Span(NamedTuple):
    """A parameter's memory from before it was sharded, which is held for its place to stay its own."""

    storage: torch.UntypedStorage
    start: int
    end: int


class _Reads(TorchDispatchMode):
    """While it is entered, no operation may read the memory of `spans`."""

    def __init__(self, spans: Mapping[str, Span], told: Told) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spans, self._told = spans, told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) in (Tensor, nn.Parameter):
                self._refuse(tensor.data_ptr())
        return func(*args, **(kwargs or {}))

    def _refuse(self, place: int) -> None:
        for name, span in self._spans.items():
            if span.start <= place < span.end:
                raise self._told(name)


def refuse_stale_reads(module: nn.Module, spans: Mapping[str, Span], told: Told) -> None:
    """Raise what `told` makes of the name of a span that is read, in the first pass in training and
    in an evaluation.

    What is there stays as it was before the run.
    """
    for training in (True, False):
        mode = _Reads(spans, told)
        leave = functools.partial(mode.__exit__, None, None, None)
        _in_first_pass(module, mode.__enter__, leave, training=training)


def refuse_lost_writes(units: Mapping[str, nn.Module], told: Told) -> None:
    """Raise what `told` makes of a parameter that is written to while its unit has it whole, to be
    dropped again.
    """
    for prefix, unit in units.items():
        _watch_writes(prefix, unit, told)


def _watch_writes(prefix: str, unit: nn.Module, told: Told) -> None:
    whole = list[tuple[str, Tensor, int, int]]()

    def note() -> None:
        found = unit.named_parameters(prefix)
        whole.extend(
            (name, one, one._version, one.data_ptr())
            for name, one in found
            if type(one) is nn.Parameter
        )

    def compare() -> None:
        for name, one, version, place in whole:
            if (one._version, one.data_ptr()) != (version, place):
                raise told(name)
        whole.clear()

    _in_first_pass(unit, note, compare, training=True)


def _in_first_pass(
    module: nn.Module, enter: Callable[[], object], leave: Callable[[], object], *, training: bool
) -> None:
    """Hooks that stay there, and do nothing later: where a pass fails torch does not let them be
    removed.
    """
    begun, ended = list[bool](), list[bool]()

    def before(*_: object) -> None:
        if module.training is training and not begun:
            begun.append(True)
            enter()

    def after(*_: object) -> None:
        if begun and not ended:
            ended.append(True)
            leave()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, prepend=True, always_call=True)
