"""What happens when something dies: real processes, real signals."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import alive, descendants, run, start

LONG = ("epochs=100000", "log_every=5", "hydra.run.dir=here")


def _wait_until(condition: Callable[[], object], timeout_s: float) -> float:
    """Seconds until `condition` held; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began


def _training(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], set[int]]:
    """A long run that has begun to train, and every process it consists of but the driver."""
    process = start(*LONG, *arguments, cwd=tmp_path)
    metrics = tmp_path / "here" / "metrics.jsonl"
    _wait_until(lambda: (metrics.exists() and metrics.stat().st_size) or process.poll() is not None, 60)
    assert process.poll() is None, process.communicate()
    return process, descendants(process.pid)


def _ranks(processes: set[int]) -> dict[int, int]:
    """From rank to pid, by the file that each worker's stdout goes to."""
    found = {}
    for pid in processes:
        target = Path(os.readlink(f"/proc/{pid}/fd/1"))
        if target.name == "stdout.log":
            found[int(target.parent.name)] = pid
    return found


def test_a_killed_worker_ends_the_run_with_its_rank_and_signal(tmp_path: Path) -> None:
    process, children = _training(tmp_path)
    os.kill(_ranks(children)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - killed < 3
    assert process.returncode == 1
    assert "rank 1 of 2 was killed by SIGKILL (out of memory?)" in err
    assert f"log: {tmp_path / 'here'}/logs/0/1/stderr.log" in err
    _wait_until(lambda: not alive(children), 2)
    result = json.loads((tmp_path / "here" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "SIGKILL" in result["error"]


def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    process, children = _training(tmp_path)
    assert len(_ranks(children)) == 2
    process.kill()
    process.communicate()
    _wait_until(lambda: not alive(children), 2)


@pytest.mark.parametrize("whole_group", [True, False], ids=["as the terminal sends it", "to the driver alone"])
def test_ctrl_c_stops_everything(tmp_path: Path, whole_group: bool) -> None:
    process, children = _training(tmp_path)
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    _wait_until(lambda: not alive(children), 2)
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "interrupted"


def _model_that(tmp_path: Path, forward: str) -> tuple[str, ...]:
    (tmp_path / "faulty.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, *, channels, image_size, num_classes):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
        "        self.steps = 0\n"
        "    def forward(self, images):\n"
        "        self.steps += 1\n"
        f"        if self.steps == 30 and os.environ['RANK'] == '1': {forward}\n"
        "        return super().forward(images)\n"
    )
    return ("+model._target_=faulty.Net", "~model.hidden", "~model.dropout", "hydra.run.dir=here")


def test_the_failing_ranks_traceback_is_the_error(tmp_path: Path) -> None:
    done = run(*_model_that(tmp_path, "raise ValueError('this is the cause')"), cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 of 2 raised" in done.stderr
    assert done.stderr.count("ValueError: this is the cause") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "Connection closed" not in done.stderr
    assert "ValueError: this is the cause" in (tmp_path / "here/logs/0/1/stderr.log").read_text()


def test_a_worker_that_leaves_with_code_0_has_failed(tmp_path: Path) -> None:
    done = run(*_model_that(tmp_path, "os._exit(0)"), cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 of 2 exited with code 0 before it had completed" in done.stderr


def test_only_loopback_is_listened_on(tmp_path: Path) -> None:
    process, children = _training(tmp_path)
    try:
        listeners = _listening({process.pid, *children})
        assert listeners, "the store listens"
        assert listeners <= {"127.0.0.1", "::1"}
    finally:
        process.kill()
        process.communicate()


def _listening(pids: set[int]) -> set[str]:
    """Addresses that the processes listen on, from the kernel's own tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address = bytes.fromhex(fields[1].partition(":")[0])
                words = [address[i : i + 4][::-1] for i in range(0, len(address), 4)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found
