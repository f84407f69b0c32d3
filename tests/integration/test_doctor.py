"""`python -m expt doctor`, and the completion of words by a shell."""

import gzip
import math
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expt.command import doctor
from tests.facade import Patch, as_typed, ended, environment, run, start_cold

TIMEOUT_S = 60


def lines(stdout: str) -> dict[str, tuple[str, str]]:
    """What each check was about: its outcome and what was found."""
    words = [
        line.split(maxsplit=2)
        for line in stdout.splitlines()
        if line[:4] in ("pass", "fail", "note")
    ]
    return {what: (outcome, found.strip()) for outcome, what, found in words}


def test_a_machine_that_can_train_passes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    done = run("doctor", f"dataset.root={tmp_path / 'data'}", cwd=tmp_path, COLUMNS="200")
    assert "too few to reach" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(done.stdout)
    needed = as_typed("python torch torchvision CPU /dev/shm disk workers")
    assert [found[what][0] for what in needed] == ["pass"] * len(needed)
    assert found["datasets"][0] == "note"
    assert "times as long" in found["threads"][1]
    assert "\x1b" not in done.stdout, "colours are for terminals"
    assert {path.name for path in tmp_path.iterdir()} == {"data"}, "it leaves nothing"


def test_a_torch_that_cannot_be_imported_fails_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not found')")
    done = ended(start_cold("doctor", cwd=tmp_path, COLUMNS="60"))
    assert (done.returncode, done.stderr) == (1, "")
    assert lines(done.stdout)["torch"][0] == "fail"
    assert "libcudart.so.12" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 60
    refused = run("doctor", "gpus=2", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: doctor gpus=2: ")


def test_data_that_no_run_could_read_fails(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(b""))
    found = {finding.what: finding for finding in doctor._datasets(str(tmp_path / "data"))}
    assert found["mnist"].outcome == "fail"
    assert "train-images-idx3-ubyte.gz is not an IDX file" in found["mnist"].found
    assert found["datasets"].found.startswith("not here: fashion_mnist, cifar10, cifar100; ")


@pytest.mark.parametrize(("slow", "outcome"), [(0.0, "note"), (math.inf, "pass")])
def test_threads_that_wait_for_cores_are_noted(
    slow: float, outcome: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(doctor, "SLOW_THREADS", slow)
    before = torch.get_num_threads()
    found = doctor._threads()
    torch.set_num_threads(before)
    assert found.outcome == outcome
    assert ("threads=1" in found.fix) == (outcome == "note")


@pytest.mark.usefixtures("_forkserver")  # one that the fault is not a part of
def test_two_workers_that_cannot_train_fail_with_the_error() -> None:
    found = doctor.two_workers("gpus=0", "++hydra.job.env_set.EXPT_FAULT='1:2:raise'")
    assert found.outcome == "fail"
    assert "a fault on purpose" in found.found
    assert found.fix


def read_until(terminal: int, there: Callable[[str], bool]) -> str:
    """What a program writes to `terminal`, until it is `there`."""
    text, deadline = "", time.monotonic() + TIMEOUT_S
    while not there(text):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 4096).decode()
    return text


@pytest.mark.slow
def test_the_tab_key_completes_keys_values_and_commands_in_bash(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("expt")
    if not script.exists() or not shutil.which("bash"):
        pytest.skip("needs bash, and expt installed")
    own = environment(
        PATH=f"{script.parent}:{os.environ['PATH']}", PS1="> ", TERM="dumb", INPUTRC=os.devnull
    )
    driver, terminal = pty.openpty()
    with subprocess.Popen(["bash", "--norc", "-i"], cwd=tmp_path, env=own, stdin=terminal,
        stdout=terminal,
                          stderr=terminal, start_new_session=True) as bash:  # fmt: skip
        try:
            os.write(driver, b'eval "$(expt -sc install=bash)"; echo in""stalled\n')
            read_until(driver, lambda text: "installed" in text)
            os.write(driver, b"expt optimizer.we\t")
            read_until(driver, lambda text: "optimizer.weight_decay=" in text)
            os.write(driver, b"0.1 model=\t\t")
            read_until(
                driver,
                lambda text: {"model=mlp", "model=convnet", "model=resnet18"} <= set(text.split()),
            )
            os.write(driver, b"mlp batch_norm=\t\t")
            read_until(
                driver, lambda text: {"batch_norm=groups", "batch_norm=sync"} <= set(text.split())
            )
            os.write(driver, b"\x15expt re\t\t")
            read_until(driver, lambda text: {"report", "rerun", "resume="} <= set(text.split()))
        finally:
            bash.kill()
            os.close(driver)
            os.close(terminal)
