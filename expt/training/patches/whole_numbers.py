"""Numbers that are read of sharded tensors, as by `float(weights.norm())`: those of the whole.

torch gives each worker the number of its own part, so that an optimiser that scales by a norm would train something
else, by other steps on each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's docs on extending it have it


class WholeNumbers(TorchDispatchMode):
    """While entered, they are read so: a collective, for what all workers read alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See TorchDispatchMode. Every way to read a number ends here: float(), item(), `if`, or `alpha=` a tensor."""
        if func is torch.ops.aten._local_scalar_dense.default and hasattr(args[0], "full_tensor"):
            args = (args[0].full_tensor(),)
        return func(*args, **(kwargs or {}))


def read_whole_numbers(optimizer: Optimizer) -> None:
    """Let its steps read them so."""
    mode: Any = WholeNumbers()

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)
