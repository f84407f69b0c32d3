"""torch without its compiler.

Optimisers and DistributedDataParallel guard themselves against torch.compile, and import it on first use to do so: more
than a second at the start of every worker. Here are the same classes without the guards. A model may still be compiled:
what is unguarded is never called from compiled code, for expt compiles the model alone.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

T = TypeVar("T", bound=Optimizer)


def optimizer(cls: type[T]) -> type[T]:
    """The optimiser class `cls`, unguarded."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(cls.step))
    return type(cls.__name__, (cls,), methods)


class DataParallel(DistributedDataParallel):
    """DistributedDataParallel, unguarded."""

    # A generator below `contextmanager`, below the guard.
    _inside_ddp_forward = contextlib.contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _compiler_set_aside():
            super().__init__(*args, **kwargs)


@contextlib.contextmanager
def _compiler_set_aside() -> Iterator[None]:
    """Let DistributedDataParallel's question about its own compilation find a no, and not an import."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    no = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    torch._dynamo = no  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo
