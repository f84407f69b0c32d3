"""expt from Python: its docstrings' examples, and how results look in a notebook."""

import dataclasses
import doctest
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expt
from expt import api
from expt.errors import SweepFailed
from expt.python.results import FailedResult, SweepResult
from tests.facade import Capture, Patch, python


@pytest.mark.slow
@pytest.mark.usefixtures("_forkserver")
def test_the_docstrings_examples_come_to_what_they_say(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"expt": expt}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for function in (api.run, api.rerun, api.list_runs, api.sweep):
        found = doctest.DocTestParser().get_doctest(
            function.__doc__ or "", names, function.__name__, None, None
        )
        assert found.examples
        runner.run(found, clear_globs=False)
        names = found.globs
    assert runner.summarize(verbose=False) == (0, runner.tries)
    looked_at(names["result"], names["again"])
    in_a_notebook(names["runs"])


def looked_at(result: expt.Result, again: expt.Result) -> None:
    """What a finished run can be asked."""
    assert result.config["optimizer"]["lr"] == 0.1
    assert list(result.metrics) == result.metrics._ipython_key_completions_()
    with pytest.raises(KeyError, match=r"accurcy/val: the run has no such metric\. Did you mean"):
        _ = result.metrics["accurcy/val"]
    (epoch,) = result.history
    assert result.history["loss/val"] == [epoch["loss/val"]] == [again.metrics["loss/val"]]
    assert list(result.history.to_pandas()["accuracy/val"]) == [result.metrics["accuracy/val"]]
    with pytest.raises(KeyError, match=r"loss/vall: there is no such tag\. Did you mean"):
        _ = result.history["loss/vall"]
    assert result.load("last").class_names == tuple("0123456789")
    assert {"metrics", "history", "config", "folder", "plot", "load", "best", "status"} <= {
        *dir(result)
    }


def in_a_notebook(runs: SweepResult) -> None:
    """How results show themselves."""
    first, head, *below = repr(runs).splitlines()
    assert first == "expt.SweepResult of 4 runs"
    assert (head.split()[:3], len(below)) == (["model", "optimizer.lr", "accuracy/val"], 4)


def recorded(folder: Path, points: str = "", **record: Any) -> expt.Result:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(points)
    return expt.Result(folder, record)  # type: ignore[arg-type]


def test_curves_are_drawn_by_epoch_with_the_test_where_it_is_of(tmp_path: Path) -> None:
    values = (
        (10, 1, "loss/train", 2.0),
        (10, 1, "loss/val", 1.5),
        (20, 2, "loss/val", 1.0),
        (20, 2, "loss/test", 1.2),
    )
    keys = ("step", "epoch", "tag", "value")
    points = "".join(
        f"{dict(zip(keys, point, strict=True))}\n".replace("'", '"') for point in values
    )
    result = recorded(
        tmp_path / "a <b>",
        points,
        status="completed",
        best={"metric": "loss/val", "value": 1.5, "epoch": 1},
    )
    (axes,) = result.plot(tmp_path / "curves.png").axes
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
    drawn = {line.get_label(): np.array(line.get_data()).tolist() for line in axes.lines}
    assert all(line.get_visible() for line in axes.get_xgridlines())
    assert drawn == {"train": [[1], [2.0]], "val": [[1, 2], [1.5, 1.0]], "test": [[1], [1.2]]}
    html = result._repr_html_()
    assert "data:image/png;base64" in html
    assert "a &lt;b&gt;" in html


def test_plot_without_matplotlib_is_told(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = recorded(tmp_path / "a", status="running")
    with pytest.raises(expt.ConfigError, match=r"pip install 'expt\[plot\]'"):
        result.plot()
    assert "running" in result._repr_html_()


def test_best_of_a_sweep_and_failures(tmp_path: Path) -> None:
    def run(name: str, value: float | None, of: str = "loss/val") -> Path:
        (tmp_path / name).mkdir()
        text = "null" if value is None else str(value).replace("nan", "NaN")
        objective = f'{{"name": "{of}", "value": {text}}}'
        (tmp_path / name / "result.json").write_text(
            f'{{"status": "completed", "objective": {objective}}}'
        )
        return tmp_path / name

    folders = [run("a", 2.0), run("b", math.nan), run("c", 1.0), run("d", None)]
    runs = SweepResult.of_failed(
        SweepFailed("", folders[:3], {folders[3]: "rank 0: it broke"}, folders)
    )
    assert [type(run) for run in runs] == [expt.Result] * 3 + [FailedResult]
    assert runs.best.folder == folders[2]
    assert (len(runs.completed), [run.error for run in runs.failed]) == (3, ["rank 0: it broke"])
    expected = ["expt.Result failed", f"  folder   {folders[3]}", "  error    rank 0: it broke"]
    assert repr(runs[3]).splitlines() == expected
    halfway = SweepResult(
        [*runs, dataclasses.replace(runs[2], record={**runs[2].record, "status": "pruned"})]
    )
    assert (halfway.best.folder, len(halfway.completed), len(halfway.pruned)) == (folders[2], 3, 1)
    with pytest.raises(expt.RunFailed, match="no run has completed, measured"):
        _ = SweepResult(runs[3:]).best
    of_another = expt.Result.of(run("e", 0.9, of="accuracy/val"))
    with pytest.raises(expt.RunFailed, match="chosen by different ones"):
        _ = SweepResult([*runs, of_another]).best


def test_folder_of_a_result_is_absolute(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text('{"status": "completed"}')
    monkeypatch.chdir(tmp_path)
    assert expt.Result.of(Path("run")).folder == tmp_path / "run"


def test_quiet_is_a_keyword(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    (result,) = expt.sweep("-q", "epochs=1", "max_steps=1", world_size=1)
    assert result.record["steps"] == 1
    assert not capsys.readouterr().out


INTERRUPTED = """
import signal, sys, threading, os, time, expt, expt.errors
from pathlib import Path
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
def interrupt():
    while not Path("run/checkpoints").exists():
        time.sleep(0.05)
    assert {number: signal.getsignal(number) for number in before} == before
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
argv, out, environ = list(sys.argv), sys.stdout, dict(os.environ)
try:
    expt.run(epochs=100_000, world_size=1, tensorboard={"images": False}, folder="run", quiet=True)
except expt.errors.Interrupted:
    print("interrupted")
assert (sys.argv, sys.stdout, dict(os.environ)) == (argv, out, environ)
"""


def test_interrupt_lets_workers_save(tmp_path: Path) -> None:
    done = python(INTERRUPTED, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    record = json.loads((tmp_path / "run/result.json").read_text())
    assert record["status"] == "interrupted"
    assert (tmp_path / "run/checkpoints/last.safetensors").exists()


def test_runs_start_in_threads(tmp_path: Path) -> None:
    def work(seed: int) -> float:
        small = {"epochs": 1, "world_size": 1, "dataset": {"train_limit": 64}}
        folder = tmp_path / str(seed)
        return expt.run(small, seed=seed, folder=folder, quiet=True).metrics["loss/val"]

    with ThreadPoolExecutor(3) as threads:
        at_once = list(threads.map(work, (1, 2, 3)))
    assert len(set(at_once)) == 3


EDITED = """
import importlib, pickle, sys
from pathlib import Path
text = '''from torch import nn
from helper import SIGN
class Net(nn.Sequential):
    def __init__(self, image_size, num_classes, channels=1):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
    def forward(self, images):
        return SIGN * super().forward(images)
'''
Path("net.py").write_text(text)
Path("helper.py").write_text("SIGN = 1")
import expt
from expt.launch import forkserver
forkserver.warm()  # here it is a fork of this process, and is to have no module of it
import net
small = dict(epochs=1, world_size=1, tensorboard={"images": False})
import torch
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True, warn_only=True)
drawn = torch.get_rng_state()
expt.run(small, model=net.Net, debug=True, deterministic=True, folder="a", quiet=True)
assert torch.get_deterministic_debug_mode() == 1
assert torch.equal(torch.get_rng_state(), drawn)
assert torch.get_float32_matmul_precision() == "medium"
assert pickle.loads(pickle.dumps(net.Net)) is net.Net is sys.modules["net"].Net
Path("helper.py").write_text("SIGN = -1")
result = expt.run(small, model=net.Net, folder="b", quiet=True)
print({*result.record["imported"]} >= {"net", "helper"})
trained, images = expt.load("b"), torch.rand(4, 1, 8, 8)
print(type(trained.model) is net.Net, sys.modules["net"] is net, sys.modules["helper"].SIGN)
again = net.Net((8, 8), 10)
again.load_state_dict(trained.model.state_dict())
print(bool((trained.model(images) == -again(images)).all()))
print(type(expt.load("a").model) is net.Net)
"""


RUNS = """
import expt
def run(name):
    small = dict(epochs=1, world_size=1, tensorboard={"images": False})
    return expt.run(small, folder=name, quiet=True).status
"""
FORKED = """
import multiprocessing, os, sys, threading
import expt
from expt.command import grammar
from mine import run
def compose_on(until):
    while not until.is_set():
        with grammar.lock:
            pass
print(run("parent"))
over = threading.Event()
thread = threading.Thread(target=compose_on, args=[over])
thread.start()
with multiprocessing.get_context("fork").Pool(2) as pool:  # daemons, which may have no children
    print(*pool.map(run, ["a", "b"]))
over.set()
thread.join()
argv, env = [*sys.argv], {**os.environ}
try:
    expt.run("--cfg", "job")
except expt.ConfigError:
    print((argv, env) == (sys.argv, os.environ))
"""


def test_the_first_use_of_expt_draws_no_random_number() -> None:
    program = "import random, expt; random.seed(0); expt.run; print(random.random())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert float(done.stdout) == random.Random(0).random(), done.stderr


def test_forked_processes_run_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RUNS)
    done = python(FORKED, cwd=tmp_path)
    assert done.stdout.split() == ["completed"] * 3 + ["True"], done.stderr


def test_what_is_edited_is_used_as_it_was_trained(tmp_path: Path) -> None:
    done = python(EDITED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "False True 1", "True", "True"]
    assert done.stderr.count("helper.py") == 2, "the call, and the load, report it"
