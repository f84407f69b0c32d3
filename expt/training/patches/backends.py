"""Which package a process group's backend is from: torch reads what every installed one says of itself.

It does so in each process that makes a group, in 8 ms; here once in the process that all workers are forked from.
"""

from __future__ import annotations

import contextlib
import functools

from torch.distributed import Backend


def look_up_once() -> None:
    """Look for gloo and NCCL now, and have it remembered, in the processes forked from this one too."""
    real = getattr(Backend, "_ensure_backend_registered", None)
    if real is None:  # a torch that doesn't look, as 2.11
        return
    remembered = functools.cache(real)
    for name in ("gloo", "nccl"):
        with contextlib.suppress(Exception):  # a package that is broken: whoever needs it will hear of it
            remembered(name)
    Backend._ensure_backend_registered = staticmethod(remembered)  # type: ignore[method-assign]
