"""Tasks that are not classification: the numbers of a plain loop, whatever the number of
workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expt.data import indexing
from expt.worker import fault
from tests.conftest import RunFolder, as_typed, run
from tests.training.plain import descend

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset
import expt


class Rows(Dataset):
    def __init__(self, train=True, size=107):
        generator = torch.Generator().manual_seed(int(train))
        self.features = torch.randn(size, 6, generator=generator)
        self.targets = self.features @ torch.arange(6.0)
        self.weights = torch.rand(size, generator=generator) ** 4

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"row": self.features[index]}, (self.targets[index], self.weights[index])


class Weighted(expt.Task):
    def forward(self, model, batch):
        return model(batch.inputs["row"])[:, 0]

    def loss(self, outputs, batch):
        targets, weights = batch.targets
        return (weights * (outputs - targets) ** 2).sum(), weights.sum()

    def measure(self, outputs, batch):
        return {"mae": ((outputs - batch.targets[0]).abs().sum(), len(outputs))}


class Linear(nn.Linear):
    def __init__(self, **_):
        super().__init__(6, 1)
"""
SIZE, HELD_OUT, BATCH, LR, STEPS = 107, 10, 36, 0.05, 6
YAML = {
    "dataset": "_target_: own.Rows\n",
    "task": "_target_: own.Weighted\nmetrics: {mae: min}\n",
    "model": "_target_: own.Linear\n",
}
WORDS: tuple[str, ...] = (
    *as_typed("dataset=own task=own model=own optimizer=plain_sgd"),
    f"optimizer.lr={LR}",
    f"batch_size={BATCH}",
)
WORDS += ("gpus=0", "threads=1", "epochs=2", "log_every=1", "drop_last=false", "hydra.run.dir=run")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a person's own module and YAML."""
    (tmp_path / "own.py").write_text(OWN)
    for group, text in YAML.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], float]:
    """The loss of each step, and the last mean absolute error."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SIZE, 6, generator=generator)
    targets, weights = features @ torch.arange(6.0), torch.rand(SIZE, generator=generator) ** 4
    train, val = indexing.split(SIZE, 0.1, None, torch.zeros(SIZE))
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 1)
    losses = list[float]()
    for epoch in (1, 2):
        for batch in train[indexing.permutation(len(train), 0, epoch)].split(BATCH):
            squares = (net(features[batch])[:, 0] - targets[batch]) ** 2
            loss = (weights[batch] * squares).sum() / weights[batch].sum()
            descend(net, loss, LR)
            losses.append(loss.item())
    error = (net(features[val])[:, 0] - targets[val]).abs().mean().item()
    return losses, error


def test_a_loss_by_weights_is_that_of_the_global_batch(
    own: Path, reference: tuple[list[float], float]
) -> None:
    done = run(*WORDS, "world_size=2", "gradient_accumulation=3", cwd=own)
    assert done.returncode == 0, done.stderr
    found, (losses, error) = RunFolder(own / "run"), reference
    curve = dict(found.curve("running/loss"))
    assert [curve[step] for step in range(1, STEPS + 1)] == pytest.approx(losses, abs=1e-4)
    assert found.result["metrics"]["mae/val"] == pytest.approx(error, abs=1e-5)
    assert found.result["objective"]["name"] == "mae/val"
    assert found.result["best"]["value"] == min(value for _, value in found.curve("mae/val")), (
        "lower is better"
    )
    assert "mae" in done.stdout


@pytest.mark.slow
def test_it_resumes_to_the_same_bits(own: Path) -> None:
    words = (*WORDS, "world_size=2", "epochs=6", "checkpoint.every_steps=1")
    assert run(*words, cwd=own).returncode == 0
    (own / "run").rename(own / "whole")
    assert run(*words, cwd=own, **{fault.VARIABLE: "1:8:kill"}).returncode == 1
    again = run(*words, "resume=auto", cwd=own)
    assert again.returncode == 0, again.stderr
    assert 0 < RunFolder(own / "run").result["resumed_from"]["step"] < 8
    assert RunFolder(own / "run").points == RunFolder(own / "whole").points


def test_what_is_of_images_is_refused_for_other_samples(own: Path) -> None:
    done = run("dataset=own", "task=own", "dataset.mean=[0.5]", "world_size=1", cwd=own)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "dataset.mean, std and augment: are of images" in done.stderr
