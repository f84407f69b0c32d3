"""`expt evaluate` with real workers: same numbers on any number, nothing left of a failure."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import expt
from expt.command import evaluate, trained_runs
from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.runs.view.text import Console
from tests.conftest import Trained
from tests.facade import Capture, Patch, as_typed, ended, own_model, run, start

DATA = """
from torch.utils.data import Dataset
import torch
class Turned(Dataset):
    classes = [*"9876543210"]  # the numbers of digits from the other end
    def __init__(self, train):
        import expt.data, numpy
        found = numpy.load(expt.data.__file__.replace("__init__.py", "digits.npz"))
        part = "train" if train else "test"
        self.images, self.targets = found[f"{part}_images"], found[f"{part}_labels"]
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        return torch.from_numpy(self.images[index]), 9 - int(self.targets[index])
"""


def test_any_number_of_workers_counts_each_sample_once(
    trained: Trained, tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    """Evaluate a model with batch norm and a moving average, in a folder that was moved."""
    quiet = ("world_size=2", "threads=1", "tensorboard.images=false")
    run = trained("model=convnet", "epochs=2", "ema=0.9", "dataset.train_limit=320", *quiet)
    recorded, best = run.result["metrics"], run.result["best"]
    drawn = [worker["rng"]["torch"] for worker in run.state()["workers"]]
    assert not torch.equal(*drawn), "each worker draws numbers of its own"
    record = (run.folder / "result.json").read_bytes()
    moved = run.folder.rename(tmp_path / "moved")
    (tmp_path / "turned.py").write_text(DATA)
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "turned.yaml").write_text(
        "_target_: turned.Turned\nnum_classes: 10\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = expt.evaluate(moved, "world_size=3")
    assert found["accuracy/test"] == recorded["accuracy/test"]
    assert found["loss/test"] == pytest.approx(recorded["loss/test"], rel=1e-6)
    printed = capfd.readouterr().out
    assert f"then         the run itself recorded loss {recorded['loss/test']:.4f}" in printed
    assert "by 3 workers on " in printed
    assert printed.count("class  samples  precision  recall      F1\n0           29 ") == 1
    turned = expt.evaluate(moved, "dataset=turned", "world_size=1", quiet=True)
    assert turned["accuracy/test"] == recorded["accuracy/test"]
    with pytest.raises(ConfigError, match="turned has no Nope"):
        expt.evaluate(moved, "dataset=turned", "dataset._target_=turned.Nope", "world_size=1")
    assert (moved / "result.json").read_bytes() == record
    assert {path.name for path in (moved / "evaluations").iterdir()} == {"test", "turned-test"}
    about = read_result(RunPaths(moved / "evaluations" / "test"))["evaluation_of"]
    assert (about["samples"], about["epoch"], about["checkpoint"]) == (360, best["epoch"], "best")


SLOW = """
    if os.path.exists("slow"):
        open("evaluating", "w").close()
        time.sleep(60)
"""


def test_ctrl_c_leaves_nothing(trained: Trained, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    few = ("epochs=1", "max_steps=2", "world_size=1", "tensorboard.images=false")
    run = trained(*few, *own_model(tmp_path, SLOW, "slow_net"))
    (tmp_path / "slow").touch()
    there = sorted(os.listdir(run.folder))
    command = start("evaluate", str(run.folder), cwd=tmp_path)
    while not (tmp_path / "evaluating").exists():
        assert command.poll() is None
    command.send_signal(signal.SIGINT)
    done = ended(command)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted; nothing was written: type the command again\n"
    assert sorted(os.listdir(run.folder)) == there


def test_best_of_sweep_wrong_folders(trained: Trained, tmp_path: Path, capfd: Capture) -> None:
    sweep = tmp_path / "sweep"
    few = as_typed("epochs=1 max_steps=2 world_size=1 tensorboard.images=false")
    run = trained(*few, name="sweep/a")
    value = run.result["objective"]["value"]
    for name, more in (("b", 0.01), ("c", 0.0)):  # of one run: what counts is what records say
        shutil.copytree(run.folder, sweep / name)
        text = (sweep / name / "result.json").read_text()
        text = text.replace(str(value), str(value + more))
        other = text.replace('identity": "', f'identity": "{name}')
        (sweep / name / "result.json").write_text(other)
    shutil.copytree(sweep / "b", sweep / "z")
    capfd.readouterr()
    evaluate.main([str(sweep), "--best", "2", "split=val", "world_size=1"])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["b", "val"], ["a", "val"]]
    shutil.rmtree(sweep / "z")
    (sweep / "multirun.yaml").write_text(
        f"search: {{constraints: ['accuracy/val<{value + 1e-3}']}}"
    )
    text = (sweep / "c" / "result.json").read_text()
    (sweep / "c" / "result.json").write_text(text.replace("{", '{"search": {"number": 2},', 1))
    evaluate.main([str(sweep), "--best", "3", "split=val", "world_size=1"])
    lines = capfd.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines[1:-1]]
    assert shown == ["a", "c", "mean", "numbers"], "b breaks the limit"
    (sweep / "multirun.yaml").unlink()
    (sweep / "c" / "checkpoints" / "best.safetensors").unlink()
    for words, said in (
        ([str(sweep)], "holds 3 runs; name one"),
        ([str(tmp_path / "no")], "no such folder"),
        ([str(sweep / "a" / "checkpoints")], "is not a folder of a run"),
        ([str(sweep / "a"), "--best", "2"], "--best 2: "),
        (["split=val"], "split=val: "),
        ([str(sweep / "c")], "c@best: .* it has step 2 .*, last"),
    ):
        with pytest.raises(ConfigError, match=said):
            evaluate.main(words)
    evaluate.main([f"{sweep / 'c'}@last", "split=val", "world_size=1"])
    assert (sweep / "c" / "evaluations" / "val-last" / "result.json").exists()


def test_the_mean_of_several_runs_is_measured_next_to_each(
    trained: Trained, tmp_path: Path
) -> None:
    few = ("model=mlp", "epochs=1", "dataset.train_limit=320", "world_size=1")
    runs = [trained(*few, f"seed={seed}", name=f"sweep/{seed}").folder for seed in (0, 1)]
    measured = dict[int, list[dict[str, Any]]]()
    for number in (1, 2):
        words = ("evaluate", *map(str, runs), f"world_size={number}", "--json")
        measured[number] = json.loads(run(*words, cwd=tmp_path).stdout)["evaluations"]
    *own, mean = measured[2]
    assert [each["metrics"]["loss/test"] for each in own] == pytest.approx(
        [read_result(RunPaths(run))["metrics"]["loss/test"] for run in runs], rel=1e-6
    )
    assert mean["evaluation_of"]["mean_of"] == [*map(str, runs)]
    assert mean["folder"] == str(runs[0] / "evaluations" / "test-mean-of-2_2")
    assert mean["metrics"] == pytest.approx(measured[1][-1]["metrics"], rel=1e-6)
    predicted = [expt.predict(run, split="test") for run in runs]
    chances = np.mean([[[*x["probabilities"].values()] for x in each] for each in predicted], 0)
    labels = np.array([int(record["target"]) for record in predicted[0]])
    loss = -np.log(chances[np.arange(len(labels)), labels]).mean()
    assert mean["metrics"]["loss/test"] == pytest.approx(loss, rel=1e-5)
    assert mean["metrics"]["accuracy/test"] == (chances.argmax(1) == labels).mean()
    found = expt.evaluate(runs[0], "world_size=1", flips=True, quiet=True)
    flipped = expt.predict(runs[0], split="test", flips=True)
    right = [record["class"] == record["target"] for record in flipped]
    assert found["accuracy/test"] == pytest.approx(np.mean(right))
    assert (runs[0] / "evaluations" / "test-flips").is_dir()
    for name in "ab":
        (tmp_path / "new" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "new" / name / "x.png")
    other = ("dataset=image_folder", "dataset.root=new", "world_size=1")
    done = run("evaluate", *map(str, runs), *other, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "3 of 3 evaluations failed: " in done.stderr


def test_a_sweeps_runs_are_filtered(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    few = as_typed("epochs=1 max_steps=2 world_size=1 tensorboard.images=false")
    for name, rate in (("a", 0.1), ("b", 0.01), ("c", 0.01)):
        trained(*few, f"optimizer.lr={rate}", f"seed={len(name + str(rate))}", name=f"sweep/{name}")
    (tmp_path / "sweep" / "multirun.yaml").write_text("{}")
    sweep = str(tmp_path / "sweep")

    def chosen(*filters: str, best: int | None = None) -> list[str]:
        found = trained_runs.chosen([sweep], None, Console(), best=best, filters=filters)
        return sorted(run.name for run, _ in found)

    capsys.readouterr()
    assert chosen("optimizer.lr=0.1") == ["a"]
    assert capsys.readouterr().out.split() == ["run", f"{sweep}/a"]
    assert len(chosen("optimizer.lr<0.5")) == 3
    assert len(chosen(best=2)) == 2
    (best,) = chosen()
    by_sweep, by_run = (expt.predict(run, split="test") for run in (sweep, f"{sweep}/{best}"))
    assert [*by_sweep] == [*by_run]
    for filters in (["optimizer.lr=7"], ["optimizer.lt=0.1"]):
        with pytest.raises(ConfigError, match=filters[0].partition("=")[0]):
            chosen(*filters)
    with pytest.raises(ConfigError, match="is for a sweep"):
        trained_runs.chosen([f"{sweep}/a"], None, Console(), filters=["seed=0"])
