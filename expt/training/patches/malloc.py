"""How glibc's malloc treats memory that a step has freed."""

from __future__ import annotations

import ctypes
import sys

# Their numbers in malloc.h; mallopt takes a C int.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30
MMAP_LIMIT_BYTES = 2**25
"""What glibc before 2.35 allows at most."""


def keep_freed() -> None:
    """Have blocks of up to 1 GiB used again rather than returned to the kernel, in this process; glibc only.

    Each step frees its activations and takes as many anew: as fresh pages, they cost up to a third of a step on a CPU.
    See mallopt(3).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        if not libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
            libc.mallopt(M_MMAP_THRESHOLD, MMAP_LIMIT_BYTES)
