"""Results that depend on how samples are batched, where pages promise equal ones."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from expt.worker import batch_dependence
from tests.facade import Capture, Patch, as_typed, run, same
from tests.worker.conftest import TrainAlone, Trained

OWN = """
import threading
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
import expt

class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)

class Net(nn.Module):
    def __init__(self, norm=None, centre=False, **sizes):
        super().__init__()
        norms = {None: nn.Identity(), "batch": nn.BatchNorm1d(64, track_running_stats=False),
            "layer": nn.LayerNorm(64), "frozen": Frozen(64)}
        self.layers = nn.Sequential(nn.Flatten(), norms[norm], nn.Dropout(0.5), nn.Linear(64, 10))
        self.centre = centre

    def forward(self, x):
        return self.layers(x - x.mean(0) if self.centre else x)

CALLS = {"forward": 0}

class Noisy(nn.Module):
    # Draws from everything, and counts everywhere.

    def __init__(self, noise="dropout", centre=False, is_copied=True):
        super().__init__()
        self.layer, self.noise, self.centre = nn.Linear(64, 10), noise, centre
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(0)
        self.lock = None if is_copied else threading.Lock()

    def forward(self, x):
        CALLS["forward"] += 1
        self.calls += 1
        x = x.flatten(1) + 1e-6 * CALLS["forward"]
        if self.noise == "dropout":
            x = nn.functional.dropout(x, 0.5)
        elif self.noise == "rand":
            x = x + (torch.rand(len(x), 1, device=x.device) < 0.9) * torch.randn_like(x)
        elif self.noise == "own":
            x = x + torch.rand(x.shape, generator=self.generator).to(x.device)
        elif self.noise == "order":
            x = x + x[torch.randperm(len(x), device=x.device)]
        return self.layer(x - x.mean(0) if self.centre else x)

class Contrast(expt.Task):
    def __init__(self, gathers="no", late=0):
        self.gathers, self.late, self.step = gathers, late, 0

    def loss(self, outputs, batch):
        if self.gathers == "evaluation":
            all_gather(outputs)
        if self.gathers == "sums":
            dist.all_reduce(outputs.sum(0))
        return nn.functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def training_loss(self, outputs, batch):
        every = own = nn.functional.normalize(outputs)
        self.step += 1
        if self.gathers == "padded":
            sizes = [own.new_zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, own.new_full((1,), len(own)))
            missing = own.new_zeros(max(map(int, sizes)) - len(own), own.shape[1])
            found = zip(all_gather(torch.cat((own, missing))), sizes)
            every = torch.cat([each[:int(size)] for each, size in found])
        elif self.gathers == "yes" and self.step > self.late:
            every = torch.cat(all_gather(own))
        return (own @ every.T).exp().sum(1).log().sum(), len(own)
"""

MODEL, ACCUMULATION = "model: in an evaluation", "gradient_accumulation=2: "
CONTRAST = "task={_target_: own_batches.Contrast, gathers: %s}"
UNEVEN = as_typed(
    "epochs=1 dataset.train_limit=275 batch_size=100 tensorboard.images=false world_size=2"
)
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
        (
            [
                CONTRAST % "padded",
                *as_typed("drop_last=false batch_size=100 dataset.train_limit=275"),
            ],
            [],
        ),
    ],
)
def test_a_loss_may_gather(words: list[str], said: list[str], tmp_path: Path) -> None:
    done = run(*QUICK, *words, "world_size=2", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_said(done.stderr, said)


def test_workers_do_not_gather_unequal_shares_of_a_last_batch(tmp_path: Path) -> None:
    words = as_typed("epochs=1 batch_size=100 world_size=2 hydra.run.dir=run")  # 93 are left
    done = run(*words, CONTRAST % "yes", "drop_last=false", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "drop_last=false: " in done.stderr
    assert "drop_last=true" in done.stderr


NOISY = "model={_target_: own_batches.Noisy, noise: %s, centre: %s, is_copied: %s}"


@pytest.mark.parametrize(
    ("noise", "centre", "is_copied"),
    [
        *[(noise, False, True) for noise in ("dropout", "rand", "own", "order")],
        *[(noise, True, True) for noise in ("dropout", "rand")],
        pytest.param("none", True, False, marks=pytest.mark.cpu("a GPU's model is copied")),
    ],
)
def test_random_numbers_hide_no_dependence_and_are_none(
    noise: str, centre: bool, is_copied: bool, train_alone: TrainAlone, capfd: Capture
) -> None:
    more = ["gradient_accumulation=2"] if is_copied else []
    train_alone(NOISY % (noise, centre, is_copied), *more, *QUICK)
    said = [ACCUMULATION, MODEL] if is_copied else [MODEL]
    assert_said(capfd.readouterr().err, said if centre else [])


@pytest.mark.cpu("on a GPU a copy of the model is looked at, whose module counts")
@pytest.mark.parametrize("noise", ["rand", "own"])
def test_a_look_leaves_no_trace(noise: str, train_alone: TrainAlone, monkeypatch: Patch) -> None:
    words = [NOISY % (noise, True, True), "gradient_accumulation=2", *QUICK]

    def trained(name: str) -> tuple[Trained, int]:
        calls: dict[str, int] = importlib.import_module("own_batches").CALLS
        calls["forward"] = 0
        return train_alone(*words, name=name), calls["forward"]

    looked = trained("looked")
    monkeypatch.setattr(batch_dependence, "_depends", lambda *_, **__: None)
    unseen = trained("unseen")
    assert looked[1] == unseen[1]
    states = [one.state() for one, _ in (looked, unseen)]
    assert all(same(states[0][part], states[1][part]) for part in ("model", "optimizer"))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("gathers: 'yes', late: 2", "drop_last=false"),  # 75 are left of the training samples
        ("gathers: evaluation", "dataset.val_fraction=0.101"),  # 145 validate
        ("gathers: sums", "dataset.val_fraction=0.09 eval_batch_size=64"),  # 64 and 1, and 64
    ],
)
def test_unequal_shares_are_refused_once_they_are_exchanged(
    task: str, words: str, tmp_path: Path
) -> None:
    own = "task={_target_: own_batches.Contrast, %s}" % task  # noqa: UP031
    done = run(own, *as_typed(words), *UNEVEN, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "unequal shares" in done.stderr


def test_equal_shares_may_be_exchanged(tmp_path: Path) -> None:
    own = "task={_target_: own_batches.Contrast, gathers: sums}"
    done = run(own, *UNEVEN, "hydra.run.dir=run", cwd=tmp_path)  # 144 validate, 360 test
    assert done.returncode == 0, done.stderr
