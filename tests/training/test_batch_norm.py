"""Batch norm over all workers' images equals one layer's; in groups, each group's."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError
from expt.training import batch_norm
from expt.training.collectives import Worker
from tests.ranks import together

IMAGES = torch.randn(24, 2, 5, 6, generator=torch.Generator().manual_seed(0)) * 3 + 5
WEIGHTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


def net(**options: object) -> nn.Sequential:
    """With a batch norm behind a convolution, and one behind a linear layer."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten()]  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.Linear(48, 7), nn.BatchNorm1d(7, **options), nn.Linear(7, 3))  # type: ignore[arg-type]


def learn(module: nn.Module, images: Tensor = IMAGES, weights: Tensor = WEIGHTS) -> None:
    (module(images) * weights).sum().backward()


def among_workers(sizes: list[int], module: nn.Module) -> list[nn.Module]:
    """What workers with so many of the images each make of `module` in two steps."""
    everyones: list[Tensor] = [torch.empty(0)] * len(sizes)
    barrier = threading.Barrier(len(sizes), timeout=10)

    def worker(rank: int, share: nn.Module, images: Tensor, weights: Tensor) -> None:
        def gather(values: Tensor) -> Tensor:
            everyones[rank] = values.clone()
            barrier.wait()
            found = torch.stack(everyones)
            barrier.wait()
            return found

        batch_norm.synchronise(share, gather)
        for _ in range(2):
            learn(share, images, weights)

    copies = [copy.deepcopy(module) for _ in sizes]
    shares = zip(copies, IMAGES.split(sizes), WEIGHTS.split(sizes), strict=True)
    threads = [
        threading.Thread(target=worker, args=(rank, *share)) for rank, share in enumerate(shares)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return copies


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([12, 12], {}),
        ([6, 6, 6, 6], {"eps": 0.5}),
        ([1, 20, 3], {"affine": False}),
        ([1, 20, 3], {"momentum": None}),
        ([1, 20, 3], {"track_running_stats": False}),
    ],
)
def test_all_workers_together_are_one(sizes: list[int], options: dict[str, object]) -> None:
    alone = net(**options)
    workers = among_workers(sizes, alone)
    for _ in range(2):
        learn(alone)
    for index, parameter in enumerate(alone.parameters()):
        gradients = [list(worker.parameters())[index].grad for worker in workers]
        total = torch.stack([gradient for gradient in gradients if gradient is not None]).sum(0)
        assert parameter.grad is not None
        torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=2e-5)
    for worker in workers:
        for mine, expected in zip(worker.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(mine, expected)
        if "track_running_stats" not in options:
            torch.testing.assert_close(worker.eval()(IMAGES), alone.eval()(IMAGES))


def test_in_double_no_digit_is_lost() -> None:
    alone, synced = nn.BatchNorm1d(7).double(), nn.Sequential(nn.BatchNorm1d(7).double())
    batch_norm.synchronise(synced, lambda values: values[None])
    found = list[tuple[Tensor, Tensor]]()
    for one in (alone, synced):
        rows = torch.randn(24, 7, generator=torch.Generator().manual_seed(0)).double()
        outputs = one(rows.requires_grad_())
        outputs.pow(3).sum().backward()
        assert rows.grad is not None
        found.append((outputs, rows.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_each_group_is_normalised_by_itself() -> None:
    grouped, alone = net(), net()
    batch_norm.group(grouped, 8)
    learn(grouped)
    statistics = []
    for part, weights in zip(IMAGES.split(8), WEIGHTS.split(8), strict=True):
        one = net()
        learn(one, part, weights)
        statistics.append([buffer.double() for buffer in one.buffers()])
        learn(alone, part, weights)
    for mine, theirs in zip(grouped.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, *each in zip(grouped.buffers(), *statistics, strict=True):
        torch.testing.assert_close(mine.double(), torch.stack(each).mean(0))


@pytest.mark.parametrize(
    "options", [{}, {"track_running_stats": False}, {"dtype": torch.float64}], ids=str
)
def test_a_layer_in_groups_may_be_of_any_kind(options: dict[str, Any]) -> None:
    layer, images = (
        nn.Sequential(nn.BatchNorm2d(2, **options)),
        IMAGES.to(options.get("dtype", torch.float32)),
    )
    batch_norm.group(layer, 12)
    expected = [functional.batch_norm(part, None, None, training=True) for part in images.split(12)]
    torch.testing.assert_close(layer(images), torch.cat(expected))


def test_what_is_left_over_makes_no_tiny_group() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    batch_norm.group(layer, 8)
    values = torch.randn(9, 3)
    found = layer(values)
    torch.testing.assert_close(
        found[5:], functional.batch_norm(values[5:], None, None, training=True)
    )


def test_a_batch_of_one_value_is_refused_as_torch_does() -> None:
    layer, alone = nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    batch_norm.synchronise(layer, lambda values: torch.stack([values, torch.zeros_like(values)]))
    messages = []
    for one in (layer, alone):
        with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
            one(torch.zeros(1, 3))
        messages.append(str(raised.value).replace("torch.Size([1, 3])", "[1, 3]"))
    assert messages[0] == messages[1]


def test_a_copy_of_torchs_own_waits_for_no_other_worker(tmp_path: Path) -> None:
    def alone(worker: Worker) -> list[float]:
        layer = nn.SyncBatchNorm(2)
        batch_norm.part_from_workers(layer)
        if worker.rank == 0:
            layer(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        return layer.running_mean.tolist()  # type: ignore[union-attr]

    found = together(tmp_path, 2, alone)
    assert found == [[pytest.approx(0.2), pytest.approx(0.4)], [0.0, 0.0]]


class Own(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda module: batch_norm.group(module, 8),
        lambda module: batch_norm.synchronise(module, lambda values: values),
    ],
)
def test_custom_batch_norm_class_is_refused(change: Callable[[nn.Module], None]) -> None:
    with pytest.raises(
        ConfigError,
        match="the model's layer 1 is a Own, which only batch_norm=per_worker leaves as it",
    ):
        change(nn.Sequential(nn.Conv2d(1, 1, 1), Own(4)))


def test_statistics_are_averaged_over_workers() -> None:
    mine, other = net(), net()
    for module, images in ((mine, IMAGES[:12]), (other, IMAGES[12:])):
        batch_norm.group(module, 6)
        learn(module, images, WEIGHTS[:12])
    theirs = torch.cat([buffer for buffer in other.buffers() if buffer.dim()])
    expected = [
        (ours + others) / 2 for ours, others in zip(mine.buffers(), other.buffers(), strict=True)
    ]
    batch_norm.averaging_of_statistics(mine, lambda values: torch.stack((values, theirs)))()
    for buffer, mean in zip(mine.buffers(), expected, strict=True):
        torch.testing.assert_close(buffer.to(mean.dtype), mean)
