"""Memory that was freed is used again, without fresh pages from the kernel."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import json, mmap, os, resource
import numpy as np
from expt.training import patches

def step():
    activations = [np.ones(number * 300_000, np.float32) for number in (1, 2, 3)]

def faults():
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

def held():
    np.ones(2_000_000, np.float32)  # freed, and all that is smaller lies in one heap from now on
    before = resident()
    gathered, kept = [], []
    for _ in range(60):
        gathered.append(np.ones(300_000, np.float32))
        kept.append(np.ones(25_000, np.float32))
    gathered.clear()
    return resident() - before

def apart(measure, setting):
    ends, result = os.pipe()
    if os.fork() == 0:
        setting()
        os.write(result, b"%d" % measure())
        os._exit(0)
    os.wait()
    return int(os.read(ends, 100))

nothing = lambda: None
print(json.dumps({
    "kept": apart(faults, patches.keep_freed), "faults": apart(faults, nothing),
    "given back": apart(held, patches.give_back_freed), "held": apart(held, nothing),
}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_step_takes_no_fresh_pages_and_what_is_freed_between_what_stays_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert found["kept"] < 100 < found["faults"]
    kept = 60 * 25_000 * 4
    assert found["given back"] < 2 * kept < 5 * kept < found["held"]
