"""Numbers that are read of sharded tensors, as by `float(weights.norm())`: those of the whole.

torch gives each worker the number of its own part, so that an optimiser or a schedule that goes by
a norm would train something else, by other steps on each worker."""

from __future__ import annotations

from typing import Any

import torch

from expt.training.patches.changed import warn_changed


def read_whole_numbers() -> None:
    """From now on they are read so in this process: a collective, for what all workers read alike.

    Every way to read one ends in the one operator: float(), item(), `if`, or `alpha=` a tensor.
    """
    from torch.distributed.tensor import DTensor

    try:
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    except AttributeError as error:
        warn_changed(
            "reading whole numbers",
            str(error),
            "float() and item() of a sharded tensor are of a part of it",
        )
        return
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number


def _whole_number(_: Any, arguments: Any, __: Any) -> Any:
    return arguments[0].full_tensor().item()
