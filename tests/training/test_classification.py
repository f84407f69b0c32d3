"""Class weights, balanced sampling, mixup and cutmix equal a plain loop on any workers."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from expt.config.schema import RunConfig
from expt.data import indexing
from expt.data.augment import Mixing
from expt.data.kinds.originals import Digits
from expt.data.loading import Batch
from expt.errors import ConfigError, DataError
from expt.features import Classes
from expt.late import Late
from expt.tasks.classification import Classification, Config
from expt.tasks.language_model import LanguageModel
from expt.tasks.task import Facts
from expt.training.collectives import Worker
from tests.conftest import Configured
from tests.ranks import together
from tests.training import plain

v2: Any = Late("torchvision.transforms.v2")
SEED, BATCH, LIMIT, LR, EPOCHS = 3, 96, 210, 0.5, 2
WEIGHTS = [0.0, 8.0, 1.0, 0.5, 3.0, 1.0, 0.1, 2.0, 1.0, 5.0]
SETTINGS: tuple[str, ...] = (
    "model.hidden=[]", f"batch_size={BATCH}", f"epochs={EPOCHS}", f"seed={SEED}",
    "drop_last=false", "threads=1",
)  # fmt: skip
SETTINGS += ("optimizer=plain_sgd", f"optimizer.lr={LR}", f"dataset.train_limit={LIMIT}")
SETTINGS += ("label_smoothing=0.1",)
DIGITS = Digits(name="digits", val_fraction=0.1, train_limit=None, mean=None, std=None)


def trained_on(worker: Worker, configs: list[RunConfig]) -> list[dict[str, Any]]:
    return [
        plain.trained_on(worker, dataclasses.replace(each, world_size=worker.world_size))
        for each in configs
    ]


def mixed(
    images: torch.Tensor, labels: torch.Tensor, share: float, box: tuple[slice, slice] | None
) -> list[torch.Tensor]:
    """By torchvision, of a whole batch."""
    kind: Any = v2.MixUp(num_classes=10) if box is None else v2.CutMix(num_classes=10)
    params = {"labels": labels, "batch_size": len(labels)}
    if box is None:
        params |= {"lam": share}
    else:
        rows, columns = box
        params |= {"lam_adjusted": share}
        params |= {"box": (columns.start, rows.start, columns.stop, rows.stop)}
    return [kind.transform(each, params) for each in (images, labels)]


def plain_loop(
    *, weights: list[float] | None = None, balanced: bool = False, mixing: Mixing | None = None
) -> dict[str, Any]:
    """CrossEntropyLoss of the whole batch; an evaluation by the plain one."""
    torch.manual_seed(SEED)
    net = nn.Linear(64, 10)
    images, labels = map(torch.tensor, DIGITS.load("train"))
    pixels = ((images / 255 - 0.3053) / 0.3760).float()
    train, val = indexing.split(len(labels), 0.1, LIMIT)
    by_class = torch.ones(10) if weights is None else torch.tensor(weights)
    criterion = nn.CrossEntropyLoss(by_class, label_smoothing=0.1)
    of_shares = nn.CrossEntropyLoss(by_class, label_smoothing=0.1, reduction="sum")
    curve = []
    for epoch in range(1, EPOCHS + 1):
        drawn = (
            indexing.balanced(labels[train], SEED, epoch)
            if balanced
            else indexing.permutation(LIMIT, SEED, epoch)
        )
        for number, batch in enumerate(train[drawn].split(BATCH)):
            if mixing is None:
                logits, right = (
                    net(pixels[batch].flatten(1)),
                    functional.one_hot(labels[batch], 10).float(),
                )
                loss = criterion(logits, labels[batch])
            else:
                share, box = mixing.drawn(SEED, epoch, number, (8, 8))
                inputs, right = mixed(pixels[batch], labels[batch], share, box)
                logits = net(inputs.flatten(1))
                loss = of_shares(logits, right) / (right @ by_class).sum()
            plain.descend(net, loss, LR)
            curve.append(
                [loss.item(), right[torch.arange(len(right)), logits.argmax(1)].mean().item()]
            )
    logits = net(pixels[val].flatten(1))
    found = {"loss": functional.cross_entropy(logits, labels[val]).item()}
    return {
        "curve": curve,
        "val": {**found, "accuracy": (logits.argmax(1) == labels[val]).float().mean().item()},
    }


def test_the_curve_is_that_of_whole_batches(configured: Configured, tmp_path: Path) -> None:
    """210 samples in batches of 96: the last has 18, unevenly shared."""
    same = (*SETTINGS, "gradient_accumulation=2")
    weighted, balanced = f"task.class_weights={WEIGHTS}", "dataset.sampling=balanced"
    words: tuple[list[str], ...] = (
        ["task.class_weights=balanced"],
        [balanced],
        ["mixup=0.4"],
        ["mixup=0.4", "cutmix=1.0", weighted],
    )
    configs = [configured(*same, *each) for each in words]
    ours = together(tmp_path, 4, functools.partial(trained_on, configs=configs))
    counts = torch.tensor(DIGITS.load("train").labels)[
        indexing.split(1437, 0.1, LIMIT)[0]
    ].bincount()
    expected = [plain_loop(weights=(LIMIT / 10 / counts).tolist()), plain_loop(balanced=True)]
    expected += [plain_loop(mixing=Mixing(10, mixup=0.4))]
    expected += [plain_loop(weights=WEIGHTS, mixing=Mixing(10, mixup=0.4, cutmix=1.0))]
    for every in ours:
        for found, theirs in zip(every, expected, strict=True):
            values = [[each["loss"], each["accuracy"]] for each in found["steps"]]
            assert torch.tensor(values) == pytest.approx(torch.tensor(theirs["curve"]), abs=1e-4)
            assert found["val"] == pytest.approx(theirs["val"], abs=1e-4)


def test_a_batch_of_classes_without_weight_moves_nothing() -> None:
    task = Classification(0.0, WEIGHTS)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    total, weight = task.training_loss(logits, Batch(None, torch.zeros(4, dtype=torch.int64), 4))
    assert (float(total), float(weight)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("weights", "counts", "said"),
    [
        (
            "balanced",
            (),
            "task.class_weights=balanced: needs the class of each sample before it is read",
        ),
        ((1.0, 2.0), (), "task.class_weights: has 2 weights, and there are 3 classes"),
        (
            "balanced",
            (3, 0, 1),
            "task.class_weights=balanced: of class b there is no sample to train on",
        ),
    ],
)
def test_class_weights_are_checked(weights: Any, counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        Config(class_weights=weights).build(
            Facts(class_counts=counts, targets=Classes(names=("a", "b", "c")), trains=True)
        )


def test_a_balanced_order_takes_classes_equally_and_their_samples_too() -> None:
    classes = torch.tensor([4] * 61 + [0] * 7 + [9] * 3)[
        torch.randperm(71, generator=torch.Generator().manual_seed(1))
    ]
    orders = [indexing.balanced(classes, seed, epoch) for seed, epoch in ((0, 1), (0, 2), (1, 1))]
    assert torch.equal(orders[0], indexing.balanced(classes, 0, 1))
    assert not any(torch.equal(orders[0], other) for other in orders[1:])
    for order in orders:
        assert len(order) == 71
        taken = torch.bincount(classes[order], minlength=10)[[0, 4, 9]]
        assert (int(taken.sum()), int(taken.max() - taken.min())) == (71, 1)
        for each in (0, 4, 9):
            times = torch.bincount(order, minlength=71)[classes == each]
            assert times.max() - times.min() <= 1
    taken_so_far = orders[0].tolist()
    before = [taken_so_far[:place].count(each) for place, each in enumerate(taken_so_far)]
    assert indexing.times_before(orders[0]).tolist() == before


VOCAB = 11


def test_a_model_for_other_targets_is_told() -> None:
    with pytest.raises(
        DataError, match=r"gives float32 \[2, 7\] for targets int64 \[2, 5\]; let it give logits"
    ):
        LanguageModel().loss(
            torch.zeros(2, 7), Batch(None, torch.zeros(2, 5, dtype=torch.int64), 2)
        )


def test_a_loss_beyond_measure_has_an_infinite_perplexity() -> None:
    assert LanguageModel().derive({"loss": 1000.0})["perplexity"] == math.inf
    assert math.isnan(LanguageModel().derive({"loss": math.nan})["perplexity"])
