"""How glibc's malloc treats memory that a step has freed; switched off by `patches.malloc=false`.

A step of ResNet-18 on 32 images takes some 1,000 fresh pages in place of 20,000, of the convnet on
128 some 50 in place of 3,000; where pages are dear that is up to a third of a step. A limit of 1
GiB would spare few of the rest."""

from __future__ import annotations

import ctypes
import sys

# Their numbers in malloc.h; mallopt takes a C int.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**28
GIVEN_BACK_BYTES = 2**16
MMAP_LIMIT_BYTES = 2**25
"""What glibc before 2.35 allows at most."""


def give_back_freed() -> None:
    """Have all tensors of 64 KiB and more returned to the kernel when they are freed, in this
    process; glibc only.

    What fully_shard gathers comes and goes between what stays: in one heap it leaves gaps that take
    several times a worker's share of the model. By itself glibc does so only with what is larger
    than all that was freed before."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)


def keep_freed() -> None:
    """Have up to 256 MiB used again rather than returned to the kernel, in this process; glibc
    only.

    Each step frees its activations and takes as many anew. See mallopt(3).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        if not libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
            libc.mallopt(M_MMAP_THRESHOLD, MMAP_LIMIT_BYTES)
