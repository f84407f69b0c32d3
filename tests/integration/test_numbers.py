"""The numbers are those of a plain single-process loop, whatever the number of workers."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional

from expt.data import indexing
from expt.data.cache import Arrays
from expt.data.kinds.originals import Digits
from expt.models.vision import MLP
from tests.conftest import Trained
from tests.facade import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether, train_alone
from tests.worker.conftest import train_together as train_together  # the fixture

SEED, BATCH, STEPS, LR, MOMENTUM, EVERY = 3, 48, 30, 0.05, 0.9, 11
MEAN, STD = 0.3053, 0.3760
DIGITS = Digits(name="digits", val_fraction=0.1, train_limit=None, mean=(MEAN,), std=(STD,))


def _images(arrays: Arrays, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.array(arrays.images))[indices].float() / 255
    return (images - MEAN) / STD, torch.from_numpy(np.array(arrays.labels))[indices]


def reference() -> tuple[list[float], dict[int, float]]:
    """Return each step's loss and the validation accuracy every EVERY steps, by a plain loop."""
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


@pytest.mark.slow
def test_the_curve_is_gloos(trained: Trained) -> None:
    """A sum of two does not depend on their order."""
    words = ("world_size=2", "max_steps=20", "log_every=1", "threads=1")
    shared = trained(*words, name="shared").curve("running/loss")
    gloo = trained(*words, "ddp.shared_memory=false", name="gloo").curve("running/loss")
    assert len(shared) == 20
    assert shared == gloo


WORDS = as_typed(
    "model=convnet model.widths=[8,8] model.kernels=[3,3] model.strides=[1,2] "
    "model.paddings=[same,same] model.hidden=null model.dropout=0 dataset.train_limit=320 "
    "epochs=1 log_every=1 threads=1"
)

Numbers = dict[str, list[tuple[int, float]]]


@pytest.fixture
def numbers(train_together: TrainTogether) -> Callable[..., Numbers]:
    @functools.cache
    def of(size: int, *words: str) -> Numbers:
        done = train_together(
            size, *WORDS, *words, name="-".join(words).replace("=", "") + str(size)
        )
        return {tag: done.curve(tag) for tag in ("running/loss", "loss/val", "loss/test")}

    return of


def assert_same(one: Numbers, other: Numbers) -> None:
    for tag, curve in one.items():
        assert len(curve) == {"running/loss": 5, "loss/val": 1, "loss/test": 1}[tag]
        assert [step for step, _ in other[tag]] == [step for step, _ in curve]
        assert [value for _, value in other[tag]] == pytest.approx(
            [value for _, value in curve], abs=2e-4
        ), tag


def test_over_all_workers_any_number_of_them_is_one(numbers: Callable[..., Numbers]) -> None:
    alone = numbers(1, "batch_norm=sync")
    assert_same(alone, numbers(4, "batch_norm=sync"))
    assert_same(alone, numbers(2, "batch_norm=sync", "ddp.shared_memory=false"))
    with pytest.raises(AssertionError):  # else this tests nothing
        assert_same(alone, numbers(2, "batch_norm=per_worker"))


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        pytest.param(4, "batch_norm=groups batch_norm_group=16", marks=pytest.mark.slow),
        (2, "batch_norm=groups batch_norm_group=8 gradient_accumulation=2"),
        pytest.param(2, "batch_norm=sync gradient_accumulation=2", marks=pytest.mark.slow),
    ],
)
def test_grouped_and_accumulated(numbers: Callable[..., Numbers], workers: int, words: str) -> None:
    assert_same(numbers(1, *as_typed(words)), numbers(workers, *as_typed(words)))


__all__ = ["train_alone", "train_together"]

GAN_WORDS = as_typed(
    "experiment=gan epochs=1 +dataset.val_fraction=0.5 batch_size=120 log_every=1 drop_last=false"
)


@pytest.mark.slow
def test_gan_on_any_workers(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    """Use 718 images, of which the last batch has 118, which workers share unequally."""
    words = (*GAN_WORDS, "callbacks=[{_target_: expt.training.callback.Generated, noise: 32}]")
    several = train_together(3, *words, name="several")
    one = train_alone(*words, name="one")
    for tag in ("running/loss", "running/generator", "loss/val", "generator/test"):
        assert dict(several.curve(tag)) == pytest.approx(dict(one.curve(tag)), abs=1e-4), tag
    drawn = EventAccumulator(str(one.folder), {"images": 0})
    drawn.Reload()
    assert [image.step for image in drawn.Images("generated/images")] == [6]
