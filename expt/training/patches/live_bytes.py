"""How much memory tensors take at a time, and what is computed, told by the operations; of fake
tensors too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # as torch's docs on extending it have it
from torch.utils._pytree import tree_leaves

_CASTS = (torch.ops.aten._to_copy.default,)


@functools.cache
def _flop() -> dict[str, Any]:
    """From the name of an operation to what counts its work."""
    from torch.utils.flop_counter import flop_registry  # late: it imports triton

    known = {str(operation).replace(".", "::"): count for operation, count in flop_registry.items()}
    attention = "aten::_scaled_dot_product_flash_attention"
    for end in ("", "_backward"):  # that of a CPU, which torch counts from 2.15 on
        known.setdefault(f"{attention}_for_cpu{end}", known[f"{attention}{end}"])
    return {
        **known,
        "aten::mkldnn_rnn_layer": _of_lstm,
        "aten::mkldnn_rnn_layer_backward": _twice_of_lstm,
    }


def _of_lstm(inputs: Tensor, weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """Of a layer of nn.LSTM on a CPU, `inputs` being [steps, samples, size], which torch's counter
    does not know.
    """
    return 2 * inputs.shape[0] * inputs.shape[1] * (weight.numel() + hidden_weight.numel())


def _twice_of_lstm(*args: Any, **_: Any) -> int:
    return 2 * _of_lstm(*args)


class Held(NamedTuple):
    """Bytes at a moment."""

    bytes: int
    cast_bytes: int
    """Of these: copies of parameters in another type, as autocast makes them."""


class LiveBytes(TorchDispatchMode):
    """While it is entered, the bytes of all storages that operations have made and that are still
    held; and their FLOP.

    torch's FlopCounterMode would keep tensors alive by its hooks. A storage counts once, however
    many views of it there are; those of before do not count."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = weakref.WeakSet(parameter.untyped_storage() for parameter in parameters)
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._changes: list[tuple[int, Held]] = []
        """By a storage that came, or that went."""
        self.flop, self._work = 0, _flop()

    @property
    def now(self) -> int:
        """How many changes there were so far, for `peaks`."""
        return len(self._changes)

    def number(self, tensor: Tensor) -> int | None:
        """That of its storage; None of one from before."""
        return self._numbers.get(tensor.untyped_storage())

    def peaks(self, ends: Iterable[int], without: Container[int | None] = ()) -> list[Held]:
        """What is held at most in each span of changes that ends there, beside the storages of some
        numbers.
        """
        found, live, start = list[Held](), Held(0, 0), 0
        for end in ends:
            peak = live
            for number, change in self._changes[start:end]:
                if number not in without:
                    live = Held(live.bytes + change.bytes, live.cast_bytes + change.cast_bytes)
                    peak = max(peak, live)
            found.append(peak)
            start = end
        return found

    @property
    def peak(self) -> Held:
        """What was held at most."""
        return self.peaks([self.now])[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count what is new in its outputs."""
        found = func(*args, **(kwargs or {}))
        if count := self._work.get(func.name().partition(".")[0]):
            self.flop += count(*args, **(kwargs or {}), out_val=found)
        is_cast = (
            func in _CASTS
            and isinstance(args[0], Tensor)
            and args[0].untyped_storage() in self._parameters
        )
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), is_cast=is_cast)
        return found

    def _count(self, storage: torch.UntypedStorage, *, is_cast: bool) -> None:
        if storage in self._numbers or storage in self._parameters:
            return
        self._numbers[storage] = number = self.now
        size = storage.nbytes()
        self._changes.append((number, Held(size, size * is_cast)))
        weakref.finalize(storage, self._changes.append, (number, Held(-size, -size * is_cast)))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
