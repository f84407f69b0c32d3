"""Look for leftovers of each fault: processes, listening sockets, names in shared memory."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import expt
from expt.errors import ExptError
from expt.launch import forkserver
from expt.worker import fault
from tests.faults.running import open_ports, wait_until, working_in

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Look after the test for processes that work in its folder."""
    forkserver.warm()  # that of expt.run, which stays for the whole session
    names = set(SHARED_MEMORY.glob("expt-*"))
    others = set(
        multiprocessing.active_children()
    )  # loaders of a test before, which its garbage holds
    yield
    wait_until(lambda: not working_in(tmp_path), timeout_s=5)
    wait_until(lambda: set(SHARED_MEMORY.glob("expt-*")) <= names, timeout_s=5)
    assert set(multiprocessing.active_children()) <= others, "workers of expt.run"
    results = [json.loads(path.read_text() or "{}") for path in tmp_path.rglob("result.json")]
    ports = {result["master_port"] for result in results if result.get("master_port")}
    wait_until(lambda: not ports & open_ports(), timeout_s=5)  # threads end after their process


Failing = Callable[..., ExptError]


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    """`failing("1:30:kill")` trains with that fault in tmp_path/here and returns the error."""

    def fail(what: str, *arguments: str) -> ExptError:
        words = (
            f"+hydra.job.env_set.{fault.VARIABLE}='{what}'",
            f"hydra.run.dir='{tmp_path / 'here'}'",
        )
        with pytest.raises(ExptError) as raised:
            expt.run(*arguments, *words)
        return raised.value

    return fail
