"""`expt lr_range`: the losses at rising rates, and the proposed one."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from expt.command.lr_range import Point, propose
from tests.facade import as_typed, run

OF_ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, part):
        self.x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

class Net(torch.nn.Linear):
    def __init__(self, num_classes):
        super().__init__(6, num_classes)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
"""
TYPED = "dataset={_target_:rows.Rows,num_classes:2,train:{part:all},val:{part:all},test:null} "
TYPED += "model={_target_:rows.Net}"


def by_hand(steps: int, least: float, most: float) -> list[float]:
    """The losses of batches that are the whole of `Rows`, by a plain loop."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    net = nn.Linear(6, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    losses = list[float]()
    for step in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        losses.append(loss.item())
        rate = least * (most / least) ** (step / (steps - 1))
        with torch.no_grad():
            for weight in net.parameters():
                weight.data -= rate * (weight.grad if weight.grad is not None else 0)
    return losses


def test_the_losses_are_those_of_a_plain_loop_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(OF_ROWS)
    words = as_typed(f"{TYPED} optimizer=plain_sgd batch_size=32")
    done = run("lr_range", *words, "--from=0.001", "--to=100", "--steps=24", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "warning" not in done.stderr, "24 epochs of a batch each are enough"
    assert [each["loss"] for each in found["lr_range"]] == pytest.approx(
        by_hand(24, 1e-3, 100.0), 1e-3
    )
    rates = [each["lr"] for each in found["lr_range"]]
    assert rates == pytest.approx([1e-3 * 1e5 ** (step / 23) for step in range(24)])
    assert found["proposed"] in rates
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.py", "__pycache__"}


def test_a_run_whose_first_loss_is_infinite_is_the_whole_test(tmp_path: Path) -> None:
    infinite = """
    def forward(self, x):
        print("forward", file=open("forwards.txt", "a"))
        return super().forward(x) * float("inf")
"""
    (tmp_path / "rows.py").write_text(OF_ROWS + infinite)
    words = as_typed(f"{TYPED} optimizer=plain_sgd batch_size=32 world_size=1")
    forwards = list[int]()
    for steps in (5, 24):  # in the epochs that it has at first, and not
        done = run("lr_range", *words, f"--steps={steps}", "--output=x.png", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "--output x.png: there is no finite loss to draw" in done.stderr
        found = json.loads(done.stdout)
        assert (found["lr_range"], found["proposed"]) == ([], None)
        forwards.append((tmp_path / "forwards.txt").read_text().count("forward"))
    assert forwards[1] == 2 * forwards[0]


def test_a_test_within_an_epoch_names_no_setting_that_nobody_typed(tmp_path: Path) -> None:
    words = ("dataset.train_limit=320", "world_size=1", "freeze=[]", "eval_split=null")
    for given in (words[:-1], words):
        done = run("lr_range", *given, "--steps=3", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        assert len(json.loads(done.stdout)["lr_range"]) == 3


def curve(*losses: float) -> list[Point]:
    return [Point(10.0**at, loss, loss) for at, loss in enumerate(losses)]


def test_the_steepest_fall_before_the_loss_diverges_is_proposed() -> None:
    assert propose(curve(4, 4, 4, 3, 1, 0.9, 0.9, 50, 1, 0)) in (10.0**3, 10.0**4)
    assert propose(curve(1, 1, 1, 1)) is None
    assert propose(curve(1, 2, 3, 4)) is None
    assert propose([]) is None
    assert propose(curve(-1, -1, -2, -5, -6, -6, -6, 90, 1)) in (10.0**2, 10.0**3)
    assert propose(curve(2, 2, 1, 0.01, -1, -1, -1)) in (10.0**2, 10.0**3)
    falls = [5 - 4 / (1 + math.exp((50 - at) / 5)) + 0.1 * (-1) ** at for at in range(100)]
    assert propose(curve(*falls)) == pytest.approx(10.0**50, rel=1e4)  # the noise is steeper


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("epochs=3", "epochs=3"),
        ("+optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("scheduler.warmup_epochs=1", "scheduler.warmup_epochs=1"),
        ("seed=1,2", "seed=1,2"),
        ("--from=1 --to=0.1", "--from"),
        ("--steps=0", "0"),
        ("send=[mlflow]", "send"),
        ("--output=range.xyz", "range.xyz"),
        ("--output=nowhere/range.png", "nowhere/range.png"),
        ("hydra.run.dir=here", "hydra.run.dir=here"),
        ("log_every=5", "log_every=5"),
        ("sweep=models_by_lr", "sweep=models_by_lr"),
        ("tensorboard.images=false", "tensorboard.images=false"),
        ("optimizr=adam", "optimizr"),
    ],
)
def test_words_that_make_no_test_are_refused(words: str, named: str, tmp_path: Path) -> None:
    done = run("lr_range", *as_typed(words), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert not [*tmp_path.iterdir()]
