"""Bad tasks, metrics, data and models, as a person types them: one line with the value and the
mend."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from expt.command import main as command
from expt.config.parse import parse
from expt.data.fingerprint import content_of
from expt.errors import ExptError
from expt.launch import forkserver, one_run
from expt.machine import Machine
from tests.composing import composed
from tests.facade import Capture, Patch, request_of

OWN = """
import torch
from torch import nn
import expt


class Rows(torch.utils.data.Dataset):
    def __init__(self, train, kind):
        self.kind = kind
        self.x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        row, odd = self.x[index], index == 5
        return {
            "no number": (row * float("nan"), row.sum()),
            "dict": ({"row": row}, row.sum()),
            "integers": (row.int(), row.sum()),
            "no target": {"row": row},
            "two targets": (row, row[:2]),
            "labels": (row, torch.tensor([0.0, 2.0 if odd else 1.0])),
            "class": (row.view(1, 2, 3), 7 if odd else 1),
            "lengths": (row[: 5 if odd else 6], row.sum()),
        }.get(self.kind, (row, row.sum()))


class Tokens(Rows):
    vocab_size, context = 5, 4

    def __getitem__(self, index):
        tokens, other = torch.zeros(4).long(), torch.full((4,), 9 if index == 5 else 1)
        if self.kind == "long":
            return torch.zeros(6).long(), torch.zeros(6).long()
        if self.kind == "float": return tokens / 2, tokens
        return {"input": (other, tokens), "target": (tokens, other)}[self.kind]


class NoLoss(expt.Task):
    pass


class Own(expt.Task):
    def __init__(self, kind):
        self.kind, self.weight_is_samples = kind, kind == "other weight"

    def loss(self, outputs, batch):
        squares = (outputs[:, 0] - batch.targets) ** 2
        return {
            "no weight": squares.mean(),
            "no gradient": (squares.sum().detach(), len(squares)),
            "nothing": None,
            "other weight": (squares.sum(), 2.0),
        }.get(self.kind, (squares.sum(), len(squares)))

    def measure(self, outputs, batch):
        error = (outputs[:, 0] - batch.targets).abs()
        return {
            "no measure": None,
        }.get(self.kind, {"mae": (error.sum(), len(error))})


class Net(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 1)
        self.kind = kind

    def forward(self, rows):
        return {"nothing": None, "dict": {"out": rows}}.get(self.kind, super().forward(rows))


class Wide(nn.Linear):
    def __init__(self, width):
        super().__init__(6, width)
"""
YAML = {
    "dataset/rows": "_target_: bad_tasks.Rows\nkind: plain\n",
    "dataset/tokens": "_target_: bad_tasks.Tokens\nkind: plain\n",
    "task/own": "_target_: bad_tasks.Own\nkind: plain\nmetrics: {mae: min}\n",
    "task/no_loss": "_target_: bad_tasks.NoLoss\n",
    "model/wide": "_target_: bad_tasks.Wide\nwidth: 1\n",
    "model/net": "_target_: bad_tasks.Net\nkind: plain\n",
}


class Bad(NamedTuple):
    words: str
    says: str


TABLE = "dataset=table dataset.path=t.csv dataset.targets=y "
TEXT = "task=language_model model=transformer dataset=text dataset.root="
TOKENS = "task=language_model model=transformer batch_size=8 dataset=tokens dataset.kind="
REGRESSION = "task=regression model=mlp batch_size=8 dataset=rows dataset.kind="
ROWS = "task=own model=net batch_size=8 dataset=rows dataset.kind="
TASK = "model=net batch_size=8 dataset=rows task=own task.kind="

CASES = {
    # metrics
    "no such metric": Bad("objective=f1/val",
        "objective=f1/val: is not measured; use one of loss/train"),
    "a metric of another task": Bad(
        "task=regression dataset=diabetes objective=accuracy/val",
        "objective=accuracy/val: is not measured; use one of loss/train"
    ),
    # tables
    "texts for labels": Bad(
        f"{TABLE} task=multilabel dataset.features=[a] dataset.targets=name",
        "a label is 0 or 1: give each a column"
    ),
    "a key of an own dataset without a YAML": Bad(
        "~dataset +dataset._target_=bad_tasks.Rows +dataset.kind=plain dataset.folds=4",
        "dataset.folds=4: ",
    ),
    # texts
    "a context longer than the text": Bad(f"{TEXT}t.csv dataset.context=5000",
        "dataset.context=5000: only "),
    "a token out of range": Bad(f"{TOKENS}input",
        "sample 5: its inputs hold the token 9, expected 0 to 4 (vocab_size"),
    "tokens that are not integers": Bad(f"{TOKENS}float",
        "sample 0: its inputs are torch.float32; let them be tokens"),
    "a sample longer than the context": Bad(f"{TOKENS}long",
        "a sample has 6 tokens, and the model takes 4; cut it, o"),
    "no tokens": Bad("task=language_model model=mlp dataset=rows batch_size=8",
        "a sample's targets are torch.float32"),
    # masks
    "masks of an unknown number of classes": Bad("task=segmentation model=unet dataset=rows",
        "task.num_classes: a custom dataset has none; give it, e.g."),
    # samples
    "images' settings for rows": Bad(f"{ROWS}plain dataset.mean=[0.5]",
        "dataset.mean, std and augment: are of images"),
    "nan in a sample": Bad(f"{ROWS}'no number'",
        "at step 1 (epoch 1) on rank 0, for inputs, column 0, of the traini"),
    "samples of unequal length": Bad(f"{ROWS}lengths", "has another shape than sample"),
    "targets that are not labels": Bad(
        "task=multilabel model=mlp batch_size=8 dataset=rows dataset.kind=labels",
        "some targets are neither 0 nor 1;"
    ),
    "a class out of range": Bad("dataset=rows dataset.kind=class dataset.num_classes=3",
        "sample 5: its label is 7, e"),
    "no targets": Bad(f"{REGRESSION}'no target'",
        "model=mlp: needs channels, image_size, num_classes, and the datase"),
    "two targets for one output": Bad(
        "task=regression model=net batch_size=8 dataset=rows dataset.kind='two targets'",
        "the model gives float32 [8, 1], and a batch's targets are float32 [8, 2]"
    ),
    # models
    "rows for a model of images": Bad(
        "task=regression model=resnet18 dataset=rows",
        "model=resnet18: takes images [channels, height, width], and a s"
    ),
    "no images for a named model": Bad(
        "task=own model=torchvision model.arch=resnet18 dataset=rows dataset.kind=dict",
        "model=torchvision: needs channels, image_size, and the dataset has not",
    ),
    "tokens for a named model": Bad(
        "task=language_model model=torchvision model.arch=resnet18 batch_size=8 dataset=tokens "
        "dataset.kind=input",
        "the dataset gives it tokens; use model=transformer",
    ),
    "integers for numbers": Bad(f"{REGRESSION}integers",
        "model=mlp: takes float32, and a sample's inputs are int32;"),
    "a model that gives nothing": Bad(
        "task=regression model=net model.kind=nothing batch_size=8 dataset=rows",
        "the model gives a NoneType, and a batch's targets"
    ),
    "an argument of another type": Bad("task=own model=wide model.width=abc dataset=rows",
        "as Wide(width='abc'): Typ"),
    # own tasks
    "a task without a loss": Bad("task=no_loss model=net dataset=rows", "abstract method"),
    "a loss without a weight": Bad(f"{TASK}'no weight'", "Own.loss is float32 []; give its sum"),
    "a loss without a gradient": Bad(f"{TASK}'no gradient'",
        "Own.loss gives a number without a gradient; compute it"),
    "no loss": Bad(f"{TASK}nothing", "Own.loss is a NoneType"),
    "a loss with an unsaid weight": Bad(f"{TASK}'other weight'",
        "Own.loss: its weights add up to 14 for 56 samples,"),
    "no sums": Bad(f"{TASK}'no measure'",
        "Own.measure gives a NoneType; return a dict of name: (sum, weight)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the cases name."""
    root = tmp_path_factory.mktemp("bad_tasks")
    (root / "bad_tasks.py").write_text(OWN)
    for name, text in YAML.items():
        (root / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "conf" / f"{name}.yaml").write_text(text)
    rows = "".join(
        f"{number / 2},{'nan' if number == 7 else number},x{number},0.5\n" for number in range(60)
    )
    (root / "t.csv").write_text(f"a,b,name,y\n{rows}")
    return root


TYPED = (
    "a metric of another task",
    "texts for labels",
    "a class out of range",
    "nan in a sample",
    "an argument of another type",
    "a key of an own dataset without a YAML",
    "no sums",
)
ALWAYS = ("world_size=1", "log_every=7", "drop_last=false")


@pytest.mark.parametrize("name", TYPED)
def test_bad_task_one_line(name: str, world: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Some of each kind, as they are typed."""
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    case = CASES[name]
    monkeypatch.setattr(sys, "argv", ["expt", *shlex.split(case.words), *ALWAYS])
    monkeypatch.setattr(forkserver, "kill", lambda: None)  # this session's is used again
    with pytest.raises(SystemExit) as ended:
        command.main(sys.argv[1:])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("error: "), "Traceback" in err) == (2, 1, False), err
    assert case.says in err


def _carry_out(words: Sequence[str], world: Path, folder: Path) -> None:
    config = parse(composed(*words, conf=world / "conf"), Machine(cpus=2))
    one_run.run(request_of(config, folder, content_of(config)))


@pytest.mark.parametrize("name", [name for name in CASES if name not in TYPED])
def test_the_others_are_too(name: str, world: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Without the command around it, as a sweep's point is composed, which takes half the time."""
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    with pytest.raises(ExptError) as told:
        _carry_out((*shlex.split(CASES[name].words), *ALWAYS), world, tmp_path / "run")
    assert (told.value.exit_code, "\n" in str(told.value)) == (2, False), told.value
    assert CASES[name].says in str(told.value)
