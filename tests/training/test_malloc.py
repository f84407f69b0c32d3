"""Memory that was freed is used again, without fresh pages from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from expt.training import patches
if sys.argv[1] == "kept":
    patches.keep_freed()
def step():
    activations = [np.ones(number * 300_000, np.float32) for number in (1, 2, 3)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_step_takes_no_fresh_pages() -> None:
    def faults(how: str) -> int:
        return int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, how], capture_output=True, check=True
            ).stdout
        )

    assert faults("kept") < 100 < faults("as it comes")


GAPS = """
import mmap, sys
import numpy as np
from expt.training import patches
if sys.argv[1] == "given back":
    patches.give_back_freed()
np.ones(2_000_000, np.float32)  # freed, and all that is smaller lies in one heap from now on
before = int(open("/proc/self/statm").read().split()[1])
gathered, kept = [], []
for _ in range(60):
    gathered.append(np.ones(300_000, np.float32))
    kept.append(np.ones(25_000, np.float32))
gathered.clear()
print((int(open("/proc/self/statm").read().split()[1]) - before) * mmap.PAGESIZE)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_what_is_freed_between_what_stays_is_given_back() -> None:
    def held(how: str) -> int:
        return int(
            subprocess.run(
                [sys.executable, "-c", GAPS, how], capture_output=True, check=True
            ).stdout
        )

    kept = 60 * 25_000 * 4
    assert held("given back") < 2 * kept < 5 * kept < held("as it comes")
