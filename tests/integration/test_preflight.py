"""`preflight=true`: each kind of run is tried, failing ones are named, nothing is left."""

from pathlib import Path

import pytest

import expt
from expt.command import preflight
from expt.errors import ConfigError
from tests import on_cards
from tests.conftest import Configured
from tests.facade import Patch, as_typed, run

OWN = """
import torch
class Narrow(torch.nn.Module):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(3, num_classes)
    def forward(self, images):
        return self.linear(images.flatten(1))
"""


def test_a_sweep_is_tried_by_kinds_and_what_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "narrow.yaml").write_text("_target_: own.Narrow\n")
    before = {*tmp_path.rglob("*")}
    axes = as_typed(
        "model=mlp,narrow batch_size=64,7 optimizer.lr=0.1,0.01 epochs=100 world_size=2"
    )
    done = run("-m", "preflight=true", *axes, cwd=tmp_path)
    head, kind, total, *refused = done.stdout.splitlines()
    assert head.split("  ")[0] == "runs like"
    assert kind.split()[:4] == ["batch_size=64,lr=0.1,model=mlp", "2", "2", on_cards.UNIT]
    assert total.startswith("2 runs take about ")
    assert len([line for line in refused if "batch_size=7: the global batch" in line]) == 4
    shapes = [line for line in refused if "shapes cannot be multiplied" in line]
    assert [line.split()[2] for line in shapes] == [
        f"batch_size=64,lr={lr},model=narrow:" for lr in ("0.1", "0.01")
    ], "one of a kind was tried, and speaks for the others"
    assert (done.returncode, done.stderr) == (1, "error: 6 of 8 runs cannot run as they are\n")
    left = {path for path in {*tmp_path.rglob("*")} - before if "__pycache__" not in str(path)}
    assert not left


def test_a_search_is_tried_at_its_ends(tmp_path: Path) -> None:
    space = as_typed("batch_size=64,63 optimizer.lr=interval(0.1,0.2) search.runs=4")
    few = ("preflight=true", "search=random", "dataset.train_limit=320")
    done = run("-m", *few, *space, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: 1 of 2 runs cannot run as they are\n"), (
        done.stdout
    )
    assert "4 runs take about " in done.stdout


def test_the_ends_of_a_search_are_those_that_can_run(tmp_path: Path) -> None:
    few = ("preflight=true", "search=random", "dataset.train_limit=320", "search.runs=4")
    done = run("-m", *few, "world_size=2", "batch_size=interval(32,63)", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_a_single_run_leaves_no_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    done = run(
        "preflight=true", "epochs=3", "dataset.train_limit=320", "world_size=1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row[:4] == ["mlp", "on", "digits", "1"]
    assert row[5] == on_cards.UNIT
    assert done.stdout.splitlines()[2].startswith("1 run takes about ")
    assert not any(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="preflight=true: trains nothing that could be returned; leave it out"
    ):
        expt.run("preflight=true", "dataset.train_limit=320", quiet=True)


def test_kinds_differ_by_what_costs_memory_or_time(configured: Configured) -> None:
    one = configured("model=mlp", "optimizer.lr=0.1", "seed=1", "scheduler=constant")
    alike = configured("model=mlp", "optimizer.lr=0.2", "seed=2", "scheduler=cosine", "epochs=7")
    assert preflight._kind(one) == preflight._kind(alike)
    for word in as_typed(
        "model.hidden=[7] batch_size=32 amp=true optimizer.momentum=0.5 threads=3"
    ):
        other = configured("model=mlp", word)
        assert preflight._kind(other) != preflight._kind(configured("model=mlp"))
