"""torch without its compiler; switched off by `patches.unguarded=false`.

Optimisers and DistributedDataParallel guard themselves against torch.compile, and import it on
first use to do so: some two seconds of a core at the start of every worker. Here are the same
classes without the guards. A model may still be compiled: what is unguarded is never called from
compiled code, for expt compiles the model alone."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from expt.training.patches.changed import warn_changed

T = TypeVar("T", bound=Optimizer)

MEND = "say so with patches.unguarded=false"


def optimizer(cls: type[T]) -> type[T]:
    """The optimiser class `cls`, unguarded; `cls` itself where this torch guards it in another way."""
    if not hasattr(cls.step, "__wrapped__"):
        warn_changed(f"{cls.__name__} without the guards", "its step has none", MEND)
        return cls
    names = ("add_param_group", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["zero_grad"] = _zero_grad
    methods["step"] = torch.no_grad()(inspect.unwrap(cls.step))
    return type(cls.__name__, (cls,), methods)


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """torch's also marks itself for the profiler, which takes longer than all the rest."""
    if not set_to_none:
        inspect.unwrap(Optimizer.zero_grad)(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel around `module`, unguarded; torch's own where this torch guards it in
    another way.
    """
    try:
        with _compiler_set_aside():
            return _unguarded()(module, **options)
    except AttributeError as error:  # comes before the workers' first message to each other
        warn_changed("DistributedDataParallel without the guards", str(error), MEND)
        return DistributedDataParallel(module, **options)


def _unguarded() -> type[DistributedDataParallel]:
    """Raises AttributeError where torch has no such guard."""
    inside = inspect.unwrap(DistributedDataParallel._inside_ddp_forward)
    if not inspect.isgeneratorfunction(inside):
        raise AttributeError("_inside_ddp_forward is no generator")
    # A generator below `contextmanager`, below the guard.
    methods = {"_inside_ddp_forward": contextlib.contextmanager(inside)}
    return type("DistributedDataParallel", (DistributedDataParallel,), methods)


@contextlib.contextmanager
def _compiler_set_aside() -> Iterator[None]:
    """Let DistributedDataParallel's question about its own compilation find a no, and not an
    import.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    no = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    torch._dynamo = no  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo
