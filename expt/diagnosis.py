"""What torch raises, in a person's words: another worker that did not come, memory that did not suffice."""

from __future__ import annotations

import re

import torch
from torch import distributed as dist

from expt.errors import ExptError, OutOfMemory, TimedOut
from expt.schema import RunConfig

_CPU_MEMORY = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+)")


def in_words(error: Exception, config: RunConfig) -> Exception:
    """The ExptError that says what `error` means; `error` itself where nothing better is known."""
    text = str(error)
    if isinstance(error, ExptError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return _explained(error, OutOfMemory(f"out of GPU memory: {_first_line(error)}\n{_to_need_less(config)}"))
    if isinstance(error, RuntimeError) and (asked := _CPU_MEMORY.search(text)):
        size = f"{int(asked[1]) / 1e9:.1f} GB"
        return _explained(error, OutOfMemory(f"out of memory: {size} more were asked for\n{_to_need_less(config)}"))
    if isinstance(error, MemoryError):
        return _explained(error, OutOfMemory(f"out of memory {text}\n{_to_need_less(config)}"))
    if isinstance(error, RuntimeError) and ("Timed out waiting" in text or _is_store_timeout(error)):
        return _explained(
            error, TimedOut(f"waited for another worker, in vain, for {config.timeout_s:g} s (timeout_s)")
        )
    return error


def _is_store_timeout(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) and re.search(r"time[d ]*out", str(error), re.IGNORECASE) is not None


def _explained(cause: Exception, error: ExptError) -> ExptError:
    error.__cause__ = cause
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


def _to_need_less(config: RunConfig) -> str:
    """What to set, for a run that needed too much memory."""
    each = config.batch_size // config.world_size
    part = each // config.gradient_accumulation
    now = f"batch_size={config.batch_size} is {each} images on each of {config.world_size} workers"
    if part != each:
        now += f", {part} at a time"
    ways = []
    if part > 1:
        ways += [f"gradient_accumulation={2 * config.gradient_accumulation} (the same numbers)"]
        ways += [f"batch_size={config.batch_size // 2}"]
    if config.amp is False:
        ways += ["amp=true"]
    return f"{now}; try {', or '.join(ways) or 'a smaller model'}"
