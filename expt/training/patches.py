"""The private parts of torch and of glibc that expt reads or replaces.

Each gives way, with a warning, where torch has changed.

unguarded: optimizers and DistributedDataParallel guard themselves against torch.compile, and import
it on first use, two seconds of a core at the start of every worker. Here are the same classes
without the guards. A model may still be compiled: these are never called from compiled code.

backward: `(loss * weight).backward()` takes two kernels more, and a good deal of Python, together
6 % of the mlp's step on a CPU. `loss.backward(weight)` imports sympy to compare two shapes.

malloc: a step of ResNet-18 on 32 images takes some 1,000 fresh pages in place of 20,000, of the
convnet on 128 some 50 in place of 3,000; where pages are dear that is up to a third of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from expt.errors import first_line

T = TypeVar("T", bound=Optimizer)

LEAVE_GUARDS = "say so with patches.unguarded=false"


def without_guards(cls: type[T]) -> type[T]:
    """Return the optimizer class `cls`, unguarded; `cls` where this torch guards it differently."""
    if not hasattr(cls.step, "__wrapped__"):
        warn_changed(f"{cls.__name__} without the guards", "its step has none", LEAVE_GUARDS)
        return cls
    names = ("add_param_group", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["zero_grad"] = _zero_grad
    methods["step"] = torch.no_grad()(inspect.unwrap(cls.step))
    return type(cls.__name__, (cls,), methods)


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Drop gradients; torch's also marks itself for the profiler, which takes longer."""
    if not set_to_none:
        inspect.unwrap(Optimizer.zero_grad)(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return tensor._version


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return DistributedDataParallel around `module`, unguarded where this torch allows it."""
    try:
        with _compiler_set_aside():
            return _unguarded()(module, **options)
    except AttributeError as error:  # comes before the workers' first message to each other
        warn_changed("DistributedDataParallel without the guards", str(error), LEAVE_GUARDS)
        return DistributedDataParallel(module, **options)


def _unguarded() -> type[DistributedDataParallel]:
    """Raise AttributeError where torch has no such guard."""
    inside = inspect.unwrap(DistributedDataParallel._inside_ddp_forward)
    if not inspect.isgeneratorfunction(inside):
        raise AttributeError("_inside_ddp_forward is not a generator")
    # A generator below `contextmanager`, below the guard.
    methods = {"_inside_ddp_forward": contextlib.contextmanager(inside)}
    return type("DistributedDataParallel", (DistributedDataParallel,), methods)


@contextlib.contextmanager
def _compiler_set_aside() -> Iterator[None]:
    """Answer DistributedDataParallel's question about its compilation without an import."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    no = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    torch._dynamo = no  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo


_ENDS_GRAPH = (False, False)
"""Neither keeps the graph nor makes one of the gradients."""
_INTO_LEAVES = {"allow_unreachable": True, "accumulate_grad": True}


def backward(loss: Tensor, weight: float, of: Sequence[Tensor] = ()) -> None:
    """Add the gradients of `(loss * weight).backward()`, to the bit, for `loss` [], `of` these."""
    run = _engine()
    # Other kinds of tensors may have a `backward` of their own
    if run is None or type(loss) is not Tensor:
        (loss * weight).backward(inputs=of or None)
        return
    gradient = _gradient(weight, loss.dtype, loss.device)
    run((loss,), (gradient,), *_ENDS_GRAPH, tuple(of), **_INTO_LEAVES)


@functools.cache  # of an epoch's batches, and the last of it; a CUDA graph reads it where it lies
def _gradient(weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), weight, dtype=dtype, device=device)


@functools.cache
def _engine() -> Callable[..., Any] | None:
    """Return the function in which torch's `backward` ends; None where this torch has another."""
    leaf = torch.ones((), requires_grad=True)
    try:
        run: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
        run((leaf * 3,), (torch.full((), 2.0),), *_ENDS_GRAPH, (), **_INTO_LEAVES)
    except (AttributeError, TypeError) as error:
        warn_changed(
            "the shorter backward pass", first_line(error), "say so with patches.backward=false"
        )
        return None
    return run


# Their numbers in malloc.h; mallopt takes a C int.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**28
GIVEN_BACK_BYTES = 2**16
MMAP_LIMIT_BYTES = 2**25
"""The most that glibc before 2.35 allows."""


def give_back_freed() -> None:
    """Return tensors of 64 KiB and more to the kernel when they are freed; glibc only.

    Units that fully_shard gathers leave gaps between tensors that stay, several times a worker's
    share of the model. By itself glibc returns only blocks larger than all that were freed before.
    """
    _mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)


def keep_freed() -> None:
    """Keep up to 256 MiB for the next step's activations, as by mallopt(3); glibc only."""
    _mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    if not _mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        _mallopt(M_MMAP_THRESHOLD, MMAP_LIMIT_BYTES)


def _mallopt(option: int, value: int) -> bool:
    libc: Any = ctypes.CDLL(None)
    return bool(libc.mallopt(option, value))


def collectives_begun() -> int:
    """Return the number of collectives that this worker has begun, for any thread."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    return int(group._get_sequence_number_for_group()) if group else 0


@functools.cache  # once in a process
def warn_changed(what: str, how: str, remedy: str) -> None:
    """Warn in this worker's log that torch's own way is taken instead of `what`, and why."""
    text = f"warning: torch {torch.__version__} has changed ({how}); {what} is left out; {remedy}"
    print(text, file=sys.stderr, flush=True)
