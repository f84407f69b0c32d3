"""Tests with cards in place of CPU workers: `scripts/soft_gpu pytest tests/worker`.

A run that would have N workers on a CPU then has N cards, over NCCL. Each test is run by a fork of
the process that has collected it, which itself leaves CUDA alone: a process that has used it cannot
be forked. EXPT_TEST_CARDS=1 takes the cards that the machine has, four of them.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest import runner

from expt.config import auto
from expt.machine import Machine
from tests import soft_gpu

if TYPE_CHECKING:
    from torch import device

VARIABLE = "EXPT_TEST_CARDS"
ON = VARIABLE in os.environ or soft_gpu.is_preloaded(os.environ)
"""Whether the tests of this process have cards."""
BACKEND = "nccl" if ON else "gloo"
UNIT = "GPU" if ON else "cores"
"""What runs are packed on."""
MACHINE = Machine(gpus=("0", "1", "2", "3") if ON else (), cpus=2)


def device_of(rank: int) -> device:
    """Return the device of a worker."""
    import torch

    return torch.device("cuda", rank) if ON else torch.device("cpu")


def skipped() -> tuple[str, ...]:
    """Return the marks of tests that this session can't run."""
    soft = soft_gpu.is_preloaded(os.environ)
    return (*(("cpu",) if ON else ()), *(("real_gpu",) if soft else ()))


def take(config: pytest.Config) -> None:
    """Run the tests of this process on cards."""
    config.pluginmanager.register(_Forking())
    os.environ[VARIABLE] = "1"  # for its commands, too
    fill_auto()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() leaves CUDA alone
    if soft_gpu.is_preloaded(os.environ):  # each process of the tests has its own cards
        os.environ["EXPT_LOCKS"] = tempfile.mkdtemp()


def fill_auto() -> None:
    """Have `gpus=auto` stand for as many as there would be workers on a CPU."""

    def gpus(node: auto.Node, machine: Machine) -> int:
        found, said = auto.gpus(node, machine), isinstance(node.get("world_size"), int)
        return found if said or VARIABLE not in os.environ else min(found, auto.CPU_WORKERS)

    auto._VALUES["gpus"] = gpus


class _Forking:
    """A plugin that runs each test in a fork of this process."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _forked(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _forked(item: pytest.Item) -> Sequence[Any]:
    """Return the reports of a test that another process has run."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            _test(item, file)
        handle = os.pidfd_open(pid)
        if not select.select([handle], [], [], _limit_s(item))[0]:
            os.kill(pid, signal.SIGABRT)  # pytest's faulthandler says where it was
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        if code == 0:
            restore = item.ihook.pytest_report_from_serializable
            return [restore(config=item.config, data=data) for data in pickle.load(file)]
    why = f"the test's process ended with {code}"
    call = runner.CallInfo.from_call(lambda: pytest.fail(why, pytrace=False), "call")
    return [runner.pytest_runtest_makereport(item, call)]


def _test(item: pytest.Item, file: IO[bytes]) -> NoReturn:
    code = 1
    try:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # here, for threads of autograd can't make the pool at once
        found = runner.runtestprotocol(item, log=False)
        store = item.ihook.pytest_report_to_serializable
        pickle.dump([store(config=item.config, report=report) for report in found], file)
        file.flush()
        code = 0
    finally:
        os._exit(code)


def _limit_s(item: pytest.Item) -> float:
    """Return less than pytest-timeout's limit, which would end this process."""
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout") or item.config.getini("timeout")
    return float(marker.args[0] if marker else given) - 2
