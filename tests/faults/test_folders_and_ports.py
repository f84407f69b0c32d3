"""Two commands for one folder, port or file; variables that another launcher has left."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expt.launch.workers import bind_free_port
from tests.data.test_files import config, write_idx_set
from tests.facade import TIMEOUT_S, Patch, RunFolder, as_typed, run, start
from tests.faults.running import listening, wait_until


def test_twenty_runs_at_once_have_twenty_ports_on_loopback() -> None:
    held = [bind_free_port() for _ in range(20)]
    ports = {listener.getsockname()[1] for listener in held}
    assert len(ports) == 20
    assert {address for address, port in listening([os.getpid()]) if port in ports} == {"127.0.0.1"}
    for listener in held:
        listener.close()


def test_what_another_launcher_left_in_the_environment_does_no_harm(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        left = {
            "MASTER_ADDR": "203.0.113.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
            "LOCAL_RANK": "7",
            "GROUP_RANK": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "5",
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "nowhere" / "error"),
        }
        done = run("epochs=1", "hydra.run.dir=here", cwd=tmp_path, **left)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "here").result["world_size"] == 2


def test_of_two_runs_at_once_one_downloads(tmp_path: Path, monkeypatch: Patch) -> None:
    import torchvision.datasets

    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "cache"))
    fetched = []

    def mnist(root: Path, download: bool) -> None:
        fetched.append("mnist")
        time.sleep(0.2)  # a slow network
        write_idx_set(root / "MNIST" / "raw", ".gz")

    monkeypatch.setattr(torchvision.datasets, "MNIST", mnist)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(config("mnist", tmp_path, True).prepare)
    assert fetched == ["mnist"]


def test_a_folder_that_is_renamed_while_its_run_begins_is_named(tmp_path: Path) -> None:
    words = as_typed("epochs=1 world_size=2 tensorboard.images=false hydra.run.dir=run")
    process = start(*words, cwd=tmp_path)
    folder, renamed = tmp_path / "run", tmp_path / "renamed"
    wait_until((folder / "logs").is_dir, process)
    folder.rename(renamed)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in stderr
    if process.returncode:  # else its workers had opened their files
        assert "run was renamed or removed" in stderr
