"""Linear layers by oneDNN; `onednn`, a key of its own, switches it.

On AMD's CPUs, the MKL that torch multiplies with reaches less than half of its speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from expt.errors import first_line
from expt.training.patches.changed import warn_changed


def use_for_linear(module: nn.Module) -> None:
    """Have oneDNN compute the linear layers inside `module`, where this torch has it; parameters
    stay what they are.
    """
    if not torch.backends.mkldnn.is_available():
        return
    try:
        _product(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ) as error:  # no such operator, or one with other arguments
        warn_changed("oneDNN for linear layers", first_line(error), "say so with onednn=false")
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


class Linear(nn.Linear):
    """torch's own, but for how a float32 batch [B, in_features] is multiplied."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, in_features] to [B, out_features]; what is not float32 goes torch's way."""
        # Of a wrong size torch says which it is, oneDNN does not.
        fits = input.dim() == 2 and input.shape[1] == self.in_features
        plain = fits and input.dtype == self.weight.dtype == torch.float32
        if (
            not plain or torch.is_autocast_enabled("cpu") or torch.jit.is_tracing()
        ):  # TensorBoard's graph
            return functional.linear(input, self.weight, self.bias)
        output: torch.Tensor = _Affine.apply(input, self.weight, self.bias)
        return output


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if of_input else None,
            _product(gradient.t(), input.t()) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """left @ right.T + bias; torch.compile uses the same operator, aten has none for float32."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
