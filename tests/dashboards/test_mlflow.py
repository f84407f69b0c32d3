"""Each point of a run is in MLflow's own store once, whatever happens in between."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from expt.dashboards import trackers
from expt.dashboards.sender import Sender, runs_in
from expt.late import Late
from expt.runs.paths import RunPaths
from tests.dashboards.folders import measure, record, sweep
from tests.facade import Capture, Patch, RunFolder, run

mlflow: Any = Late("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # what packages of others say at their import


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs: MLflow takes a second for its tables."""
    pytest.importorskip("mlflow", exc_type=ImportError)
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(tmp_path: Path, tables: Path, monkeypatch: Patch) -> str:
    monkeypatch.chdir(tmp_path)  # where MLflow puts files
    return f"sqlite:///{shutil.copy(tables, tmp_path)}"


def runs_of(store: str) -> dict[str, Any]:
    client = mlflow.MlflowClient(tracking_uri=store)
    (experiment,) = [each for each in client.search_experiments() if each.name == "mine"]
    found = client.search_runs([experiment.experiment_id])
    names = [each.info.run_name for each in found]
    assert len({*names}) == len(names), "no run is there twice"
    return dict(zip(names, found, strict=True))


def points(store: str, copy: Any, tag: str) -> list[tuple[int, float]]:
    client = mlflow.MlflowClient(tracking_uri=store)
    found = client.get_metric_history(copy.info.run_id, tag)
    return sorted((point.step, point.value) for point in found)


def steps(store: str, paths: RunPaths) -> dict[str, Counter[int]]:
    copy = runs_of(store)[paths.folder.name]
    tags = ("epoch", "loss/train", "speed/epoch_s")
    return {tag: Counter(step for step, _ in points(store, copy, tag)) for tag in tags}


def once(*wanted: int) -> dict[str, Counter[int]]:
    return {tag: Counter(wanted) for tag in ("epoch", "loss/train", "speed/epoch_s")}


def test_half_live_and_half_later(tmp_path: Path, store: str) -> None:
    paths = record(tmp_path / "run")
    live = Sender("mlflow", {"tracking_uri": store})
    measure(paths, 1, 2)
    live.send([paths])
    measure(paths, 3)
    live.send([paths])
    live.end()
    measure(paths, 4, 5)
    record(paths.folder, status="completed")
    for number in (1, 0):
        later = Sender("mlflow", {"tracking_uri": store})
        later.send([paths], last=True)
        assert later.num_sent == number
        later.end()
    assert steps(store, paths) == once(1, 2, 3, 4, 5)
    copy = runs_of(store)["run"]
    assert copy.info.status == "FINISHED"
    assert copy.data.params["optimizer.lr"] == "0.1"


def test_lost_dashboard_gets_the_rest(tmp_path: Path, store: str, monkeypatch: Patch) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1)
    live = Sender("mlflow", {"tracking_uri": store})
    live.send([paths])
    measure(paths, 2)
    with monkeypatch.context() as lost:
        lost.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            live.send([paths])
    measure(paths, 3)
    live.send([paths])
    live.end()
    assert steps(store, paths) == once(1, 2, 3)


def test_a_run_that_is_resumed_from_an_older_checkpoint(tmp_path: Path, store: str) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1)
    size = paths.metrics.stat().st_size
    measure(paths, 2, 3, 4)
    live = Sender("mlflow", {"tracking_uri": store})
    live.send([paths])
    record(paths.folder, status="interrupted")
    live.send([paths], last=True)
    record(paths.folder, started=2000.0)
    paths.metrics.write_bytes(paths.metrics.read_bytes()[:size])
    measure(paths, 2, 3, 4, 5, speed=2.75)
    live.send([paths])
    assert runs_of(store)["run"].info.status == "RUNNING", "the same copy is resumed"
    live.end()
    assert steps(store, paths) == once(1, 2, 3, 4, 5)


def test_what_may_still_be_refused_is_left_alone_until_the_end(tmp_path: Path, store: str) -> None:
    folder = sweep(tmp_path / "grid")
    refused = record(folder / "a", status="failed")
    live = Sender("mlflow", {"tracking_uri": store})
    live.send(runs_in(folder))
    assert {*refused.folder.iterdir()} == {refused.result}
    live.send(runs_in(folder), last=True)
    live.end()
    expected = {"a": "FAILED", "grid": "FAILED"}
    assert {name: copy.info.status for name, copy in runs_of(store).items()} == expected


def test_two_senders_do_not_send_the_same(tmp_path: Path, store: str, capsys: Capture) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1)
    live, other = (Sender("mlflow", {"tracking_uri": store}) for _ in range(2))
    live.send([paths])
    measure(paths, 2)
    other.send([paths], last=True)
    assert "another command" in capsys.readouterr().err
    live.send([paths])
    live.end()
    assert steps(store, paths) == once(1, 2)


@pytest.mark.slow
def test_a_sweep_whose_dashboard_is_out_of_reach_is_sent_afterwards(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    grid = ("-m", "optimizer.lr=0.1,1e30", "epochs=2", "hydra.sweep.dir=sent")
    done = run(*grid, "send=mlflow", "mlflow.tracking_uri=http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "mlflow" in done.stderr
    to = ("--tracking-uri", store, "--experiment", "mine")
    for number in (2, 0):
        sent = run("send", "sent", *to, cwd=tmp_path)
        assert sent.returncode == 0, sent.stderr
        assert f"{number} of 2 runs had something new" in sent.stdout
    there = runs_of(store)
    for path in (path.parent for path in tmp_path.glob("sent/*/result.json")):
        here, copy = RunFolder(path), there[path.name]
        assert copy.data.tags["mlflow.parentRunId"] == there["sent"].info.run_id
        assert copy.data.tags["expt.identity"] == here.result["identity"]
        wanted = {"completed": "FINISHED", "failed": "FAILED"}
        assert copy.info.status == wanted[here.result["status"]]
        for tag in ("loss/train", "loss/val", "lr"):
            assert points(store, copy, tag) == [
                each for each in here.curve(tag) if each[1] == each[1]
            ]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("metrics", "loss/train"), ("params", "optimizer.lr"), ("tags", "user"), ("tags", "mine")],
)
def test_a_value_that_is_refused_takes_no_other_along(
    kind: str, refused: str, tmp_path: Path, store: str, monkeypatch: Patch, capsys: Capture
) -> None:
    others, log = record(tmp_path / "run"), mlflow.MlflowClient.log_batch
    measure(others, 1, 2)
    record(others.folder, status="completed")

    def log_batch(client: Any, run_id: str, **some: Any) -> None:
        if refused in [each.key for each in some.get(kind, ())]:
            raise mlflow.MlflowException.invalid_parameter_value(f"no {refused}")
        log(client, run_id, **some)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(trackers, "_REFUSED", set())
    sender = Sender("mlflow", {"tracking_uri": store, "tags": {"mine": "1", "other": "2"}})
    sender.send([others], last=True)
    sender.end()
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning:" in line]
    assert [refused in line for line in lines] == [True]
    data = runs_of(store)["run"].data
    assert not {refused} & {**data.metrics, **data.params, **data.tags}.keys()
    left = {"speed/epoch_s", "model", "expt.status", "epoch", "other"}
    assert left <= {**data.metrics, **data.params, **data.tags}.keys()
