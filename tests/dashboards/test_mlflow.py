"""A real MLflow server on this machine: what it shows of a sweep, of which it missed a part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFolder, ended, environment, run, start

FAILS = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes)); self.left = 45
    def forward(self, images):
        self.left -= self.training
        if self.left < 0:
            raise ValueError("this model fails in its third epoch")
        return super().forward(images)
"""
GRID = (
    "-m",
    "--config-dir",
    "conf",
    "model=mlp,fails",
    "optimizer.lr=0.1,0.01",
    "epochs=4",
    "tensorboard.norms=false",
)
START_S = 90


class Server:
    """`mlflow server` with its files in `folder`, on a port of its own, which it keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [
            "--port",
            str(self.port),
            "--backend-store-uri",
            "sqlite:///m.db",
            "--artifacts-destination",
            "files",
        ]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--workers", "1", *words],
                cwd=self.folder, stdout=log, stderr=log, start_new_session=True, env=environment(),
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.uri}/health", timeout=5),
            ):
                return
            time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self.uri}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def runs(self) -> dict[str, dict[str, Any]]:
        """By name: status, tags, params, metrics (the last of each) and id."""
        experiment = self.ask("experiments/get-by-name?experiment_name=tests")["experiment"][
            "experiment_id"
        ]
        found = self.ask("runs/search", experiment_ids=[experiment]).get("runs", [])
        names = Counter(each["info"]["run_name"] for each in found)
        assert set(names.values()) <= {1}, "no run is there twice"
        return {each["info"]["run_name"]: self._plain(each) for each in found}

    def _plain(self, found: dict[str, Any]) -> dict[str, Any]:
        lists = {name: found["data"].get(name, []) for name in ("tags", "params", "metrics")}
        plain = {
            name: {pair["key"]: pair["value"] for pair in pairs} for name, pairs in lists.items()
        }
        return {**plain, "status": found["info"]["status"], "id": found["info"]["run_id"]}

    def points(self, run_id: str, tag: str) -> list[tuple[int, float]]:
        found = self.ask(f"metrics/get-history?run_id={run_id}&metric_key={tag}").get("metrics", [])
        return [(point["step"], point["value"]) for point in found]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("mlflow", exc_type=ImportError)
    (tmp_path / "server").mkdir()
    found = Server(tmp_path / "server")
    found.start()
    yield found
    found.signal(signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "fails.yaml").write_text("_target_: fails.Net\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_whose_server_dies_in_between_is_there_in_the_end(
    server: Server, folder: Path
) -> None:
    alone = run(*GRID, "hydra.sweep.dir=alone", cwd=folder)
    assert alone.returncode == 1
    to = {"MLFLOW_TRACKING_URI": server.uri}
    sweep = start(
        *GRID, "send=mlflow", "mlflow.experiment=tests", "hydra.sweep.dir=sent", cwd=folder, **to
    )
    while not any('"run"' in path.read_text() for path in folder.glob("sent/*/.sent/mlflow.json")):
        time.sleep(0.05)
        assert sweep.poll() is None
    server.signal(signal.SIGKILL)
    done = ended(sweep)
    assert done.returncode == 1
    assert "error: 2 of 4 runs failed" in done.stderr
    assert "not all could be sent" in done.stderr
    folders = sorted(path.parent for path in folder.glob("sent/*/result.json"))
    assert len(folders) == 4
    for path in folders:
        assert RunFolder(path).points == RunFolder(folder / "alone" / path.name).points, (
            "equal to the bit"
        )
    refused = run("send", "sent", cwd=folder, **to)
    assert refused.returncode == 1
    assert "Connection refused; type it again later, nothing is sent twice" in refused.stderr
    server.start()
    for _ in range(2):
        sent = run("send", "sent", cwd=folder, **to)
        assert sent.returncode == 0, sent.stderr
        holds_all(server, folders)
    assert "0 of 4 runs had something new" in sent.stdout


def holds_all(server: Server, folders: list[Path]) -> None:
    """Settings, status and each point of the runs, once, below the sweep."""
    there = server.runs()
    assert there.keys() == {"sent", *(path.name for path in folders)}
    assert there["sent"]["status"] == "FAILED"
    for path in folders:
        copy, here = there[path.name], RunFolder(path).result
        assert copy["status"] == {"completed": "FINISHED", "failed": "FAILED"}[here["status"]]
        assert copy["tags"]["mlflow.parentRunId"] == there["sent"]["id"]
        assert copy["tags"]["expt.identity"] == here["identity"]
        assert copy["params"]["optimizer.lr"] == str(here["config"]["optimizer"]["lr"])
        if here["status"] == "failed":
            assert "this model fails in its third epoch" in copy["tags"]["expt.error"]
        else:
            assert copy["metrics"]["objective"] == here["objective"]["value"]
        for tag in ("loss/train", "loss/val", "lr", "speed/epoch_s"):
            assert server.points(copy["id"], tag) == RunFolder(path).curve(tag), (path, tag)
        files = server.ask(f"artifacts/list?run_id={copy['id']}")["files"]
        assert {"hydra", "metrics.jsonl", "result.json"} <= {file["path"] for file in files}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_hangs_and_a_command_that_is_killed(server: Server, folder: Path) -> None:
    to = {"MLFLOW_TRACKING_URI": server.uri}
    words = (
        "send=mlflow",
        "mlflow.experiment=tests",
        "hydra.run.dir=run",
        "tensorboard.norms=false",
    )
    process = start(*words, "epochs=2000", cwd=folder, **to)
    while not knows_settings(server):
        time.sleep(0.2)
        assert process.poll() is None
    server.signal(signal.SIGSTOP)
    at = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 130
    assert time.monotonic() - at < 8, "the server gets 2 s"
    server.signal(signal.SIGCONT)
    epochs = len(RunFolder(folder / "run").curve("loss/val")) + 2
    done = run("hydra.run.dir=run", "resume=auto", f"epochs={epochs}", cwd=folder, **to)
    assert done.returncode == 0, done.stderr
    assert run("send", "run", cwd=folder, **to).returncode == 0
    (copy,) = server.runs().values()
    assert copy["status"] == "FINISHED"
    assert copy["tags"]["now.epochs"] == str(epochs), "a parameter stays what it was at first"
    for tag in ("loss/train", "loss/val", "accuracy/test"):
        assert server.points(copy["id"], tag) == RunFolder(folder / "run").curve(tag)


def knows_settings(server: Server) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):  # there is no such experiment yet
        return any(copy["params"] for copy in server.runs().values())
    return False
