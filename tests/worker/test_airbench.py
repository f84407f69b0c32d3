"""`experiment=airbench`: against its recipe written down plainly, on real digits in the format of
CIFAR-10.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import expt
from expt.config.datasets import Digits
from expt.config.identity import Content, shown
from expt.data import files, indexing
from expt.data.augment import Augmentation
from expt.errors import ConfigError
from expt.runs import checkpoint, resume
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from expt.worker.agreement import Agreement
from expt.worker.run import Run
from tests.conftest import Configured
from tests.integration.test_resume import _same
from tests.worker.conftest import ALONE, TrainAlone, Trained, TrainTogether

BATCH, EPOCHS, PER_EPOCH, SIZE, TEST = 16, 4, 5, 85, 20
TOTAL = EPOCHS * PER_EPOCH
LR, WHITENED, EVERY, START = 0.3, 60, 2, 1
MEAN, STD = (
    torch.tensor(values).view(1, 3, 1, 1)
    for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
)
WORDS = (
    *(
        "experiment=airbench",
        "model.widths=[6,8,8]",
        "amp=false",
        f"batch_size={BATCH}",
        f"epochs={EPOCHS}",
    ),
    *(
        f"whitening.samples={WHITENED}",
        f"optimizer.lr={LR}",
        "log_every=1",
        "tensorboard.images=false",
    ),
    *(f"lookahead.every_steps={EVERY}", f"lookahead.start_epochs={START}", "onednn=false"),
)


class Pictures(NamedTuple):
    images: Tensor
    """uint8"""
    labels: Tensor


@pytest.fixture(scope="module")
def pictures() -> dict[str, Pictures]:
    """Digits four times as large, in three colours that differ."""
    config = Digits(name="digits", val_fraction=0.0, train_limit=None, mean=None, std=None)
    found = {}
    for split, arrays, number in (
        ("train", files.load(config, "train"), SIZE),
        ("test", files.load(config, "test"), TEST),
    ):
        grey = torch.from_numpy(np.array(arrays.images[:number]))
        large = grey.repeat_interleave(4, 2).repeat_interleave(4, 3)
        coloured = torch.cat((large, large.roll(3, 3), 255 - large.roll(2, 2)), 1)
        found[split] = Pictures(coloured, torch.from_numpy(np.array(arrays.labels[:number])).long())
    return found


@pytest.fixture
def words(pictures: dict[str, Pictures], tmp_path: Path) -> tuple[str, ...]:
    """The settings, and where the pictures lie, as those of CIFAR-10 do."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    parts = dict(
        zip(
            (f"data_batch_{number}" for number in range(1, 6)),
            _fifths(pictures["train"]),
            strict=True,
        )
    )
    for name, (images, labels) in {**parts, "test_batch": pictures["test"]}.items():
        content = {"data": images.flatten(1).numpy(), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return (*WORDS, f"dataset.root={tmp_path}")


def _fifths(pictures: Pictures) -> list[Pictures]:
    return [Pictures(*part) for part in zip(*(tensor.chunk(5) for tensor in pictures), strict=True)]


class Reference(nn.Module):
    """The network, with layers of torch's alone, in float64 from float32's first weights.

    The recipe's rates are large: float32's rounding has grown to 4e-4 of the loss after 20 steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whiten, before = nn.Conv2d(3, 24, 2), 24
        self.layers = nn.Sequential(nn.GELU())
        for width in (6, 8, 8):
            self.layers.extend(
                [_convolution(before, width), nn.MaxPool2d(2), _norm(width), nn.GELU()]
            )
            self.layers.extend([_convolution(width, width), _norm(width), nn.GELU()])
            before = width
        self.layers.append(nn.MaxPool2d(3))
        self.head = nn.Linear(before, 10, bias=False)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layers(self.whiten(images)).flatten(1)) / 9
        return outputs


def _convolution(channels: int, width: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    with torch.no_grad():
        for index in range(min(channels, width)):
            layer.weight[index] = 0
            layer.weight[index, index, 1, 1] = 1
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)


def _views(net: nn.Module, images: Tensor) -> Tensor:
    def mirrored(given: Tensor) -> Tensor:
        found: Tensor = 0.5 * net(given) + 0.5 * net(given.flip(-1))
        return found

    padded = functional.pad(images, (1,) * 4, "reflect")
    shifted = [mirrored(padded[:, :, place : place + 32, place : place + 32]) for place in (0, 2)]
    return 0.5 * mirrored(images) + 0.5 * torch.stack(shifted).mean(0)


def _normalised(images: Tensor) -> Tensor:
    return (images.double() / 255 - MEAN) / STD


def _moved(images: Tensor, epoch: int, order: Tensor) -> Tensor:
    """As the numbers say that the run draws: mirrored in turn, moved by up to two pixels."""
    augment = Augmentation(crop_padding=2, flip="alternate", padding_mode="reflect")
    drawn = augment.in_turn(augment.draw(SIZE, 0, epoch), order, torch.arange(SIZE), 0, epoch)
    padded = functional.pad(_normalised(images[order]), (2,) * 4, "reflect")
    found = []
    for image, (flip, top, left) in zip(padded, drawn[:3].T.tolist(), strict=True):
        cut = image[:, top * 5 >> 15 :, left * 5 >> 15 :][:, :32, :32]
        found.append(cut.flip(-1) if flip < 2**14 else cut)
    return torch.stack(found)


def plain_loop(pictures: dict[str, Pictures]) -> tuple[list[float], nn.Module]:
    """The loss of each step, and the network at the end."""
    train = pictures["train"]
    torch.manual_seed(0)
    net = Reference()
    patches = (
        functional.unfold(_normalised(train.images[:WHITENED]), 2).transpose(1, 2).reshape(-1, 12)
    )
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    kernels = (vectors / torch.sqrt(values + 5e-4)).T.flip(0)
    kernels *= kernels.gather(1, kernels.abs().argmax(1, keepdim=True)).sign()
    with torch.no_grad():
        net.whiten.weight.copy_(torch.cat((kernels, -kernels)).view(24, 3, 2, 2))
        net.whiten.bias.zero_()  # type: ignore[union-attr]
    net.whiten.weight.requires_grad_(False)
    shifts = [layer.bias for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.requires_grad_(False)
    others = [
        p for p in net.parameters() if p.requires_grad and not any(p is shift for shift in shifts)
    ]
    # Jordan's numbers, of a loss that is summed over the batch.
    decay = 0.0153 / 11.5
    parts: list[dict[str, Any]] = [
        {"params": shifts, "lr": 64 * LR, "weight_decay": decay / 64},
        {"params": others, "lr": LR, "weight_decay": decay},
    ]
    optimizer = torch.optim.SGD(parts, momentum=0.85, nesterov=True)
    base = [part["lr"] for part in optimizer.param_groups]
    slow: dict[str, Tensor] = {}
    losses, step = [], 0
    for epoch in range(1, EPOCHS + 1):
        order = indexing.permutation(SIZE, 0, epoch)
        images, labels = _moved(train.images, epoch, order), train.labels[order]
        if epoch > 3:
            net.whiten.bias.requires_grad_(False)  # type: ignore[union-attr]
        for start in range(0, PER_EPOCH * BATCH, BATCH):
            for part, lr in zip(optimizer.param_groups, base, strict=True):
                part["lr"] = lr * float(
                    np.interp(step, (0, int(0.23 * TOTAL), TOTAL), (0.2, 1, 0.07))
                )
            batch = slice(start, start + BATCH)
            net.train()
            loss = functional.cross_entropy(net(images[batch]), labels[batch], label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if epoch > START and step % EVERY == 0:
                kept = 0.95**5 * (step / TOTAL) ** 3 if slow else 1.0
                slow = {
                    name: _towards(slow.get(name, v), v, kept)
                    for name, v in net.state_dict().items()
                }
                net.load_state_dict(slow)
        if slow:
            net.load_state_dict(slow)
    return losses, net.eval()


def _towards(slow: Tensor, value: Tensor, kept: float) -> Tensor:
    return kept * slow + (1 - kept) * value if value.is_floating_point() else value.clone()


def begin(run: Run) -> None:
    update_result(run.paths, status="running", config=shown(run.config))


def test_it_computes_what_the_recipe_does(
    words: tuple[str, ...], pictures: dict[str, Pictures], train_alone: TrainAlone
) -> None:
    losses, net = plain_loop(pictures)
    done = train_alone(*words, before=begin)
    curve = dict(done.curve("running/loss"))
    assert [curve[step] for step in range(1, 11)] == pytest.approx(losses[:10], abs=1e-5)
    assert [curve[step] for step in range(1, TOTAL + 1)] == pytest.approx(losses, abs=1e-3)
    ours = done.run.learner.module.state_dict()
    trained = [value for name, value in ours.items() if "num_batches" not in name]
    expected = [value for name, value in net.state_dict().items() if "num_batches" not in name]
    for one, other in zip(trained, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-2, atol=5e-3)
    _assert_all_see_its_views(done, pictures["test"], net)


def _assert_all_see_its_views(done: Trained, test: Pictures, net: nn.Module) -> None:
    images, net = _normalised(test.images).float(), net.float()
    loaded = expt.load(done.folder, "last")
    net.load_state_dict(
        dict(zip(net.state_dict(), loaded.model.state_dict().values(), strict=True))
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), net(images), rtol=1e-4, atol=1e-5)
        expected = _views(net, images)
        torch.testing.assert_close(loaded(images), expected, rtol=1e-4, atol=1e-5)
    accuracy = float((expected.argmax(1) == test.labels).double().mean())
    measured = dict(done.curve("accuracy/test"))[TOTAL]
    assert measured == pytest.approx(accuracy)
    assert dict(done.curve("loss/test"))[TOTAL] == pytest.approx(
        float(functional.cross_entropy(expected, test.labels)), abs=1e-4
    )
    told = expt.predict(f"{done.folder}@last", split="test")
    assert [loaded.class_names.index(each["class"]) for each in told] == expected.argmax(1).tolist()


def test_two_workers_have_the_weights_and_the_curve_of_one(
    words: tuple[str, ...], train_alone: TrainAlone, train_together: TrainTogether
) -> None:
    first = (*words, "batch_norm=sync", "max_steps=12")
    alone, two = train_alone(*first, "world_size=1"), train_together(2, *first, name="two")
    curves = [dict(done.curve("running/loss")) for done in (alone, two)]
    assert [*curves[0]] == [*range(1, 13)]
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    kernels = [
        torch.load(done.folder / "checkpoints" / "last.pt", weights_only=True)["model"][
            "whiten.weight"
        ]
        for done in (alone, two)
    ]
    assert torch.equal(*kernels)


def test_a_run_goes_on_to_the_same_bits_but_to_no_other_end(
    words: tuple[str, ...], train_alone: TrainAlone, configured: Configured
) -> None:
    whole = train_alone(*words, name="whole", before=begin)

    def leave(run: Run) -> None:
        run.agreement = Agreement(ALONE, asked_to_stop=lambda: run.position.step >= 13)

    cut = train_alone(*words, name="run", before=leave)
    assert (cut.status, cut.run.position.step) == ("interrupted", 13)
    resumed = train_alone(*words, name="run", source=cut.folder / "checkpoints" / "last.pt")
    assert resumed.points == whole.points
    states = [checkpoint.load(done.folder / "checkpoints" / "last.pt") for done in (resumed, whole)]
    for key in ("model", "lookahead", "optimizer", "scheduler", "position"):
        assert _same(states[0][key], states[1][key]), key
    with pytest.raises(
        ConfigError, match=r"epochs=5: lookahead\.power=3 follows the share of the run that is done"
    ):
        resume.find(
            configured(*words, "epochs=5", "scheduler.epochs=4"),
            Content(),
            RunPaths(whole.folder),
            may_have_run=True,
        )
