"""How much memory tensors take at a time, and what is computed, told by the operations; of fake tensors too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's docs on extending it have it
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
    return {**known, "aten::mkldnn_rnn_layer": _of_lstm, "aten::mkldnn_rnn_layer_backward": _twice_of_lstm}


def _of_lstm(inputs: Tensor, weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """Of a layer of nn.LSTM on a CPU, `inputs` being [steps, samples, size], which torch's counter does not know."""
    return 2 * inputs.shape[0] * inputs.shape[1] * (weight.numel() + hidden_weight.numel())


def _twice_of_lstm(*args: Any, **_: Any) -> int:
    return 2 * _of_lstm(*args)


class LiveBytes(TorchDispatchMode):
    """While it is entered, the bytes of all storages that operations have made and that are still held; and their FLOP.

    torch's FlopCounterMode would keep tensors alive by its hooks. A storage counts once, however many views of it there
    are; those of before do not count.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = weakref.WeakSet(parameter.untyped_storage() for parameter in parameters)
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.live = self.live_casts = 0
        self.peak: int = 0
        self.casts_at_peak = 0
        """Of the peak: copies of parameters in another type, as autocast makes them."""
        self._since = (0, 0)
        self.flop, self._work = 0, _flop()

    def peak_since(self) -> tuple[int, int]:
        """The peak since this was asked last, and the copies of parameters in it."""
        found, self._since = self._since, (self.live, self.live_casts)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count what is new in its outputs."""
        found = func(*args, **(kwargs or {}))
        if count := self._work.get(func.name().partition(".")[0]):
            self.flop += count(*args, **(kwargs or {}), out_val=found)
        is_cast = func in _CASTS and isinstance(args[0], Tensor) and args[0].untyped_storage() in self._parameters
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), is_cast=is_cast)
        return found

    def _count(self, storage: torch.UntypedStorage, *, is_cast: bool) -> None:
        if storage in self._seen or storage in self._parameters:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self._add(size, is_cast)
        weakref.finalize(storage, self._add, -size, is_cast)
        if self.live > self.peak:
            self.peak, self.casts_at_peak = self.live, self.live_casts
        if self.live > self._since[0]:
            self._since = (self.live, self.live_casts)

    def _add(self, size: int, is_cast: bool) -> None:
        self.live += size
        if is_cast:
            self.live_casts += size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
