"""Hooks on the gradient of a parameter, which torch tells nobody of."""

from __future__ import annotations

from torch import Tensor


def has_hooks(parameter: Tensor) -> bool:
    """Whether something was registered by `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
