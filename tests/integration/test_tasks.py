"""A custom task, model and dataset as a person types them; the numbers are test_every_task's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunFolder, as_typed, run

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset
import expt


class Rows(Dataset):
    def __init__(self, train=True, size=107):
        self.features = torch.randn(size, 6, generator=torch.Generator().manual_seed(int(train)))

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"row": self.features[index]}, self.features[index].sum()


class Fit(expt.Task):
    def forward(self, model, batch):
        return model(batch.inputs["row"])[:, 0]

    def loss(self, outputs, batch):
        return ((outputs - batch.targets) ** 2).sum(), len(outputs)

    def measure(self, outputs, batch):
        return {"mae": ((outputs - batch.targets).abs().sum(), len(outputs))}


class Linear(nn.Linear):
    def __init__(self, **_):
        super().__init__(6, 1)
"""
YAML = {
    "dataset": "_target_: own.Rows\n",
    "task": "_target_: own.Fit\nmetrics: {mae: min}\n",
    "model": "_target_: own.Linear\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a person's own module and YAML."""
    (tmp_path / "own.py").write_text(OWN)
    for group, text in YAML.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(text)
    return tmp_path


def test_its_metric_is_the_objective_and_printed(own: Path) -> None:
    words = as_typed("dataset=own task=own model=own batch_size=36 epochs=2 hydra.run.dir=run")
    done = run(*words, cwd=own)
    assert done.returncode == 0, done.stderr
    found = RunFolder(own / "run")
    assert found.result["objective"]["name"] == "mae/val"
    assert found.result["best"]["value"] == min(value for _, value in found.curve("mae/val")), (
        "lower is better"
    )
    assert "mae" in done.stdout


def test_what_is_of_images_is_refused_for_other_samples(own: Path) -> None:
    done = run("dataset=own", "task=own", "dataset.mean=[0.5]", "world_size=1", cwd=own)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "dataset.mean, std and augment: are of images" in done.stderr
