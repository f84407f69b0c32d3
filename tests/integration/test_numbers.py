"""The numbers are those of a plain single-process loop, whatever the number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from expt.data import indexing
from expt.data.cache import Arrays
from expt.data.kinds.originals import Digits
from expt.models.vision import MLP
from tests.conftest import Trained
from tests.facade import as_typed

SEED, BATCH, STEPS, LR, MOMENTUM, EVERY = 3, 48, 30, 0.05, 0.9, 11
MEAN, STD = 0.3053, 0.3760
DIGITS = Digits(name="digits", val_fraction=0.1, train_limit=None, mean=(MEAN,), std=(STD,))


def _images(arrays: Arrays, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.array(arrays.images))[indices].float() / 255
    return (images - MEAN) / STD, torch.from_numpy(np.array(arrays.labels))[indices]


def reference() -> tuple[list[float], dict[int, float]]:
    """Loss of each step, and the accuracy on the held-out images after each EVERY and at the end,
    of a loop without expt's training code."""
    arrays = DIGITS.load("train")
    train, val = indexing.split(len(arrays.labels), 0.1, None)
    torch.manual_seed(SEED)
    net = MLP(channels=1, image_size=(8, 8), num_classes=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    losses, accuracy = list[float](), dict[int, float]()
    epoch = 0
    while len(losses) < STEPS:
        epoch += 1
        order = train[indexing.permutation(len(train), SEED, epoch)]
        for batch in order.split(BATCH)[: len(order) // BATCH]:
            images, labels = _images(arrays, batch)
            loss = functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if (step := len(losses)) % EVERY == 0 or step == STEPS:
                images, labels = _images(arrays, val)
                accuracy[step] = float((net(images).argmax(1) == labels).double().mean())
            if step == STEPS:
                break
    return losses, accuracy


def test_the_loss_curve_is_that_of_a_plain_loop(trained: Trained) -> None:
    size = f"batch_size={BATCH} max_steps={STEPS} seed={SEED} world_size=4 eval_every_steps={EVERY}"
    done = trained(*as_typed(f"{size} log_every=1 threads=1"))
    losses, accuracy = reference()
    curve = dict(done.curve("running/loss"))
    per_epoch = done.result["steps_per_epoch"]
    steps = range(1, STEPS + 1)
    assert [curve[step] for step in steps] == pytest.approx(losses[:STEPS], abs=1e-4)
    of_epochs = dict(done.curve("loss/train"))
    assert of_epochs[per_epoch] == pytest.approx(np.mean(losses[:per_epoch]), abs=1e-4)
    # 143 held-out images don't divide by 4.
    assert dict(done.curve("accuracy/val")) == pytest.approx(accuracy, abs=1e-12)
    assert done.result["best"]["step"] == max(accuracy, key=lambda step: accuracy[step])
