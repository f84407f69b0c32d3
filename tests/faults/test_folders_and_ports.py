"""Two commands that want the same folder, port or file; surroundings that another launcher has
left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import expt
from expt.errors import FolderInUse
from expt.launch.workers import bind_free_port
from tests.conftest import RunFolder, run, start
from tests.data.test_files import config, write_idx_set
from tests.faults.running import listening, training, wait_until
from tests.integration.test_sweep import results


def test_of_two_commands_in_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    process, _ = training(tmp_path)
    here = f"hydra.run.dir='{tmp_path / 'here'}'"
    for words in (["resume=auto", here], [here]):
        with pytest.raises(FolderInUse):
            expt.run(*words)
    seen = len(RunFolder(tmp_path / "here").curve("running/loss"))
    wait_until(lambda: len(RunFolder(tmp_path / "here").curve("running/loss")) > seen, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert RunFolder(tmp_path / "here").result["attempts"] == 1


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


def test_of_two_runs_at_once_one_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "cache"))
    fetched = []

    def mnist(root: Path, download: bool) -> None:
        fetched.append("mnist")
        time.sleep(0.2)  # a slow network
        write_idx_set(root / "MNIST" / "raw", ".gz")

    monkeypatch.setattr(torchvision.datasets, "MNIST", mnist)
    threads = [threading.Thread(target=config("mnist", tmp_path, True).prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["mnist"]


@pytest.mark.slow
def test_data_that_gets_lost_in_mid_sweep_fails_the_runs_that_need_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_idx_set(data, sizes=(640, 64))
    words = (
        *(
            "-m",
            "dataset=mnist",
            f"dataset.root={data}",
            "dataset.download=false",
            "seed=0,1",
            "epochs=20",
        ),
        *("hydra.sweep.dir=sweep", "hydra.launcher.max_concurrent=1"),
    )
    process = start(*words, cwd=tmp_path)
    wait_until((tmp_path / "sweep" / "seed=0" / "metrics.jsonl").exists, process)
    (data / "train-labels-idx1-ubyte").rename(tmp_path / "elsewhere")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        err
        == f"warning: dataset=mnist: the files in {data} are not the published ones\nerror: 1 of 2"
        " runs failed\n"
    )
    found = results(tmp_path / "sweep")
    assert {name: result["status"] for name, result in found.items()} == {
        "seed=0": "completed",
        "seed=1": "failed",
    }
    missing = "dataset=mnist: train-labels-idx1-ubyte (plain or .gz) not found in"
    assert found["seed=1"]["error"].startswith(missing)
    shutil.move(tmp_path / "elsewhere", data / "train-labels-idx1-ubyte")
    again = expt.sweep(*words[1:-2], f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    assert {result.folder.name for result in again} == {"seed=0", "seed=1"}
