"""A backward pass from a loss that counts with a weight; switched off by `patches.backward=false`.

`(loss * weight).backward()` takes two kernels more, and a good deal of Python: together 6 % of the
mlp's step on a CPU. `loss.backward(weight)` imports sympy to compare two shapes, in every worker,
for half a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expt.errors import first_line
from expt.training.patches.changed import warn_changed


def backward(loss: Tensor, weight: float) -> None:
    """Add the gradients of `loss` [] times `weight`: those of `(loss * weight).backward()` to the
    bit.
    """
    run = _engine()
    if (
        run is None or type(loss) is not Tensor
    ):  # other kinds of tensors may have a `backward` of their own
        (loss * weight).backward()
        return
    _run(run, loss, _gradient(weight, loss.dtype, loss.device))


@functools.cache  # of an epoch's batches, and the last of it; a CUDA graph reads it where it lies
def _gradient(weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), weight, dtype=dtype, device=device)


@functools.cache
def _engine() -> Callable[..., Any] | None:
    """What torch's own `backward` ends in; None where this torch has it in another way."""
    leaf = torch.ones((), requires_grad=True)
    try:
        run: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
        _run(run, leaf * 3, torch.full((), 2.0))
    except (AttributeError, TypeError) as error:
        warn_changed(
            "the shorter backward pass", first_line(error), "say so with patches.backward=false"
        )
        return None
    return run


def _run(run: Callable[..., Any], loss: Tensor, gradient: Tensor) -> None:
    keep_graph = create_graph = False
    run(
        (loss,),
        (gradient,),
        keep_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
