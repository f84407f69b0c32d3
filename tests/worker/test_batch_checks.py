"""Results that depend on how samples are batched, where pages promise equal ones."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.facade import Capture, Patch, as_typed, run
from tests.worker.conftest import TrainAlone

OWN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
import expt

class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)

calls = 0

class Net(nn.Module):
    def __init__(self, norm=None, centre=False, drops=0.0, gathers=False, **sizes):
        super().__init__()
        norms = {None: nn.Identity(), "batch": nn.BatchNorm1d(64, track_running_stats=False),
            "layer": nn.LayerNorm(64), "frozen": Frozen(64)}
        self.layers = nn.Sequential(nn.Flatten(), norms[norm], nn.Dropout(0.5), nn.Linear(64, 10))
        self.centre, self.drops, self.gathers = centre, drops, gathers

    def forward(self, x):
        if self.gathers and not self.training:  # by the group that was there at the import
            all_gather(x.mean(0))
        x = nn.functional.dropout(x, self.drops, self.training)
        return self.layers(x - x.mean(0) if self.centre else x)

class Contrast(expt.Task):
    def __init__(self, gathers="no"):
        self.gathers = gathers

    def loss(self, outputs, batch):
        if self.gathers == "always":
            return self.training_loss(outputs, batch)
        return nn.functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def training_loss(self, outputs, batch):
        global calls
        calls += self.gathers in ("counted", "later")
        every = own = nn.functional.normalize(outputs)
        if self.gathers == "padded":
            sizes = [own.new_zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, own.new_full((1,), len(own)))
            missing = own.new_zeros(max(map(int, sizes)) - len(own), own.shape[1])
            found = zip(all_gather(torch.cat((own, missing))), sizes)
            every = torch.cat([each[:int(size)] for each, size in found])
        elif self.gathers == "yes" or (self.gathers == "later" and calls > 2):
            every = torch.cat(all_gather(own))
        return (own @ every.T).exp().sum(1).log().sum(), len(own)
"""

MODEL, ACCUMULATION = "model: in an evaluation", "gradient_accumulation=2: "
CONTRAST = "task={_target_: own_batches.Contrast, gathers: %s}"
QUICK = as_typed("epochs=1 dataset.train_limit=300 tensorboard.images=false")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "own_batches.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def assert_said(stderr: str, begins: Sequence[str]) -> None:
    lines = [re.sub(r"^warning: (\[rank 0\] )?", "", line) for line in stderr.splitlines()]
    found = [line for line in lines if "the curve" in line or MODEL in line]
    assert len(found) == len(begins)
    assert all(map(str.startswith, found, begins))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=convnet", "gradient_accumulation=2"], [ACCUMULATION]),
        (["model=mlp", "model.dropout=0.5", "gradient_accumulation=2"], []),
        (["model=convnet"], []),
        (["model={_target_: own_batches.Net, norm: batch}"], [MODEL]),
        (["model={_target_: own_batches.Net, norm: layer}", "gradient_accumulation=2"], []),
        (["model={_target_: own_batches.Net, norm: frozen}", "gradient_accumulation=2"], []),
        (
            ["model={_target_: own_batches.Net, centre: true}", "gradient_accumulation=2"],
            [ACCUMULATION, MODEL],
        ),
        ([CONTRAST % "no", "gradient_accumulation=2"], [ACCUMULATION]),
        ([CONTRAST % "no"], []),
        ([CONTRAST % "always", "model={_target_: own_batches.Net}"], []),
        ([CONTRAST % "always", "model={_target_: own_batches.Net, centre: true}"], [MODEL]),
        (
            [
                CONTRAST % "no",
                "model={_target_: own_batches.Net, drops: 0.5}",
                "gradient_accumulation=2",
            ],
            [ACCUMULATION],
        ),
    ],
)
def test_a_curve_that_is_not_the_same_is_said(
    words: list[str], said: list[str], train_alone: TrainAlone, capfd: Capture
) -> None:
    train_alone(*words, *QUICK)
    assert_said(capfd.readouterr().err, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([CONTRAST % "yes", "gradient_accumulation=2"], [ACCUMULATION]),
        ([CONTRAST % "padded", "drop_last=false", "batch_size=100"], []),
        (["model={_target_: own_batches.Net, gathers: true}"], []),
    ],
)
def test_a_loss_may_gather(words: list[str], said: list[str], tmp_path: Path) -> None:
    done = run(*words, *QUICK, "world_size=2", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_said(done.stderr, said)


def test_a_look_advances_no_global(train_alone: TrainAlone) -> None:
    found = train_alone(CONTRAST % "counted", "gradient_accumulation=2", *QUICK)
    assert sys.modules["own_batches"].calls == 2 * found.result["steps"]


@pytest.mark.parametrize("when", ["yes", "later"])
def test_workers_do_not_gather_unequal_shares_of_a_last_batch(when: str, tmp_path: Path) -> None:
    words = as_typed("epochs=1 batch_size=100 world_size=2 hydra.run.dir=run")  # 93 are left
    done = run(*words, CONTRAST % when, "drop_last=false", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "drop_last=false: " in done.stderr
    assert "drop_last=true" in done.stderr
