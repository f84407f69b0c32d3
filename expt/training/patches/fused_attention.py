"""Attention with dropout as a GPU's kernels compute it, for tensors without numbers that are taken
for a CPU's.

On a CPU torch has no fused attention with dropout, and keeps several [length, length] matrices. A
GPU's kernels keep none: they draw the mask anew, from a seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATTENTION = functional.scaled_dot_product_attention


def _without_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *more: Any,
    **named: Any,
) -> Tensor:
    return _ATTENTION(query, key, value, attn_mask, 0.0, *more, **named)


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, by whatever name it is known."""
        return (_without_dropout if func is _ATTENTION else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Within it torch's attention takes what it does on a GPU; its outputs have no dropout."""
    # Functions of torch's own that call it, as nn.MultiheadAttention's, set the mode aside.
    functional.scaled_dot_product_attention = _without_dropout
    try:
        with _WithoutDropout():
            yield
    finally:
        functional.scaled_dot_product_attention = _ATTENTION
