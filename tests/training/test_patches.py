"""If torch's private parts have changed, a run says so and has the same numbers."""

import json
import platform
from pathlib import Path

import pytest

import expt
from tests.conftest import Trained
from tests.facade import RunFolder, python

SMALL = ("epochs=1", "dataset.train_limit=640", "log_every=2", "ddp.shared_memory=false")
UNGUARDED = (
    "DistributedDataParallel without the guards is left out; say so with patches.unguarded=false"
)
BACKWARD = "the shorter backward pass is left out; say so with patches.backward=false"


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a run by the torch that is installed."""
    folder = tmp_path_factory.mktemp("known")
    known = RunFolder(expt.run(*SMALL, f"hydra.run.dir='{folder}'").folder)
    assert warnings(known) == []
    return known.points


def own(name: str) -> str:
    return f"+model._target_=tests.training.changed_torch.{name}"


def warnings(run: RunFolder) -> list[str]:
    lines = (run.folder / "logs" / "0" / "0" / "stderr.log").read_text().splitlines()
    return [line for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("Renamed", [
            "SGD without the guards is left out; say so with patches.unguarded=false",
            UNGUARDED, BACKWARD,
        ]),
        pytest.param("Reshaped", [UNGUARDED], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_goes_on_where_torch_has_changed(
    name: str, left_out: list[str], trained: Trained, points: list[str]
) -> None:
    changed = trained(own(name), *SMALL)
    found = warnings(changed)
    assert [line.rpartition("); ")[2] for line in found] == left_out
    assert all(" has changed (" in line for line in found)
    assert changed.points == points


LEFT_OUT = ("patches.unguarded=false", "patches.backward=false", "patches.malloc=false")


@pytest.mark.cpu("memory of the host is glibc's to keep")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
@pytest.mark.parametrize(
    "keys",
    [pytest.param((), id="kept"), pytest.param(LEFT_OUT, id="left out", marks=pytest.mark.slow)],
)
def test_patch_left_out(keys: tuple[str, ...], trained: Trained, points: list[str]) -> None:
    run = trained(own("Looking"), *SMALL, *keys)
    printed = (run.folder / "logs" / "0" / "0" / "stdout.log").read_text()
    assert printed.endswith("True False\n" if keys else "False True\n"), "gloo may print before"
    assert warnings(run) == []
    assert run.points == points


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
def test_freed_memory_is_kept_or_given_back(tmp_path: Path) -> None:
    done = python(PROGRAM, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["kept"] < 100 < found["faults"]
    kept = 60 * 25_000 * 4
    assert found["given back"] < 2 * kept < 5 * kept < found["held"]
