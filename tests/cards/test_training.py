"""What only workers on cards do in training: offload, run out of memory, meet over NCCL."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from expt.config.parse import parse
from expt.errors import OutOfMemory, RunFailed
from expt.machine import Machine
from expt.training import collectives
from expt.worker.run import Run
from tests.cards.ranks import ranks
from tests.composing import composed
from tests.conftest import Cards, Trained
from tests.facade import RunFolder, as_typed, request_of, run
from tests.worker.conftest import assert_same

SHORT = as_typed("dataset.train_limit=128 batch_size=32 epochs=2 log_every=1")


LAST = Path("parts/checkpoints/last.safetensors")


def train_sharded() -> None:
    """Train a sharded model to its end, and another with a stop, both with states on the host."""
    worker = collectives.worker_from(os.environ, gpus=range(2))
    words = (*SHORT, "gpus=2", "strategy=fsdp", "optimizer=adamw", "offload=cpu")
    with collectives.process_group(worker, backend="nccl", timeout_s=60):
        config = parse(composed(*words), Machine(gpus=("0", "1"), cpus=2))
        for folder, source, until in (("whole", None, 2), ("parts", None, 1), ("parts", LAST, 2)):
            asked = request_of(config, Path(folder), until_epoch=until)
            assert Run(asked, worker).train(source) == ("pruned" if until == 1 else "completed")


@pytest.mark.slow
def test_sharded_states_may_be_on_the_host(cards: Cards, trained: Trained, tmp_path: Path) -> None:
    """Compared with a whole model, saved, resumed and evaluated, with the numbers of a CPU."""
    cards(count=2)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    ranks(f"from {__name__} import train_sharded; train_sharded()", 2, tmp_path)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    assert_same(parts, whole)
    on_cpu = trained(*SHORT, "optimizer=adamw", "gpus=0", "world_size=2", name="cpu")
    found, expected = ([value for _, value in run.curve("running/loss")] for run in (whole, on_cpu))
    assert found == pytest.approx(expected, abs=1e-5)


LARGE = as_typed("gpus=2 gradient_accumulation=auto optimizer.momentum=0 max_steps=2 epochs=1")


def test_gradients_are_averaged_without_copying_the_largest(cards: Cards, trained: Trained) -> None:
    """Weights and gradients take 75 MB of 115; a copy of the largest would take 36 MB more."""
    cards(count=2, memory=115e6)
    done = trained(*LARGE, "model.hidden=[3000,3000]")
    assert "micro_batch_size" not in done.result


def test_averaging_reserves_no_more_than_all_gradients_take(cards: Cards, trained: Trained) -> None:
    """Not a bucket of 32 MiB."""
    cards(count=2, memory=30e6)
    words = ("model=convnet", "batch_size=256", "dataset.train_limit=512")
    assert "micro_batch_size" not in trained(*LARGE, *words).result


class Spoiling(nn.Module):
    """Changes its inputs, and lacks memory for `most` samples of an evaluation."""

    def __init__(self, most: int, num_classes: int) -> None:
        super().__init__()
        self.most, self.layer = most, nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        images.div_(2)
        if not self.training and len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
        outputs: Tensor = self.layer(images.flatten(1))
        return outputs


@pytest.mark.slow
def test_an_evaluation_in_halves_is_of_inputs_as_they_came(cards: Cards, trained: Trained) -> None:
    cards(count=1)
    words = (*SHORT, "gpus=1", "~model", f"+model._target_={__name__}.Spoiling")
    losses = [
        trained(*words, f"+model.most={most}", name=str(most)).result["metrics"]["loss/val"]
        for most in (1000, 20)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Keeping(nn.Module):
    """Has the samples of its last step on rank 1, a MiB each, when gradients are averaged."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 3 * 2**14, bias=False) for _ in range(3)))
        self.last, self.kept = nn.Linear(64, num_classes), [torch.empty(0)]

    def forward(self, images: Tensor) -> Tensor:
        here = self.training and torch.distributed.get_rank() == 1
        self.kept.clear()
        if here:
            self.kept.append(images.new_empty(len(images), 2**18))
        weights = torch.stack([each.sum() for each in self.layers.parameters()]).sum()
        outputs: Tensor = self.last(images.flatten(1))
        return outputs + 0 * weights


@pytest.mark.slow
def test_memory_for_averaging_counts_in_fitting(cards: Cards, trained: Trained) -> None:
    """Else rank 1 would fail within the collective, for which rank 0 waits."""
    cards(count=2, memory=133e6)
    words = ("~model", f"+model._target_={__name__}.Keeping", "batch_size=64")
    done = trained(*LARGE, *words)
    assert done.result["micro_batch_size"] < 32


def test_a_gpu_filled_by_others_is_told(cards: Cards, trained: Trained, tmp_path: Path) -> None:
    cards(full=(0,))
    done = run("gpus=[0]", *SHORT, cwd=tmp_path)
    assert done.returncode == 1
    assert "other processes hold" in done.stderr
    assert "batch_size=" not in done.stderr
    cards(full=(0, 1, 2, 3))
    trained("gpus=0", *SHORT, name="on the CPU")
    done = run("predict", "on the CPU", "--split", "test", cwd=tmp_path)
    assert done.returncode == 1
    assert "other processes hold" in done.stderr
    cards(memory=2e6)
    with pytest.raises(OutOfMemory, match=r"try .*dataset"):
        trained("gpus=1", *SHORT)


def test_too_large_weights_get_no_advice(cards: Cards, trained: Trained, tmp_path: Path) -> None:
    cards(memory=20e6)
    with pytest.raises(OutOfMemory, match="try a smaller model"):
        trained("gpus=1", "model=resnet18", *SHORT)
    trained("gpus=0", "model=mlp", *SHORT, name="on the CPU")
    cards(memory=1e6)
    done = run("evaluate", "on the CPU", "gpus=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "try gpus=0" in done.stderr


def test_a_custom_state_on_the_host_is_refused_with_the_fix(cards: Cards, trained: Trained) -> None:
    """Loaded it is on the card, as its parameter."""
    cards(count=1)
    with pytest.raises(RunFailed, match=r"torch\.zeros_like") as raised:
        trained("gpus=1", *SHORT, "optimizer={_target_: tests.worker.odd_optimizers.OnHost}")
    assert "whole model" not in str(raised.value)


SENT = """
import os, torch
from expt.training import collectives
worker = collectives.worker_from(os.environ, gpus=range(2))
with collectives.process_group(worker, backend="nccl", timeout_s=60):
    mine = torch.arange(20_000_000) + worker.rank
    sent = collectives.from_rank_0(mine if worker.rank == 0 else None)
    assert torch.equal(sent, torch.arange(20_000_000))
    zero, one = collectives.gather_across_workers(mine)
    assert (zero[-1], one[-1]) == (19_999_999, 20_000_000)
    assert torch.cuda.max_memory_allocated() < 2.1 * collectives.BUCKET_BYTES
"""


@pytest.mark.slow
def test_objects_go_from_worker_to_worker_in_pieces(cards: Cards, tmp_path: Path) -> None:
    """160 MB are no more than a bucket on a card."""
    cards(count=2)
    ranks(SENT, 2, tmp_path)


@pytest.mark.slow
def test_several_optimizers_have_the_numbers_of_a_cpu(cards: Cards, trained: Trained) -> None:
    """In float16, too, where a scaler unscales the gradients of all."""
    own = "optimizer.groups=[{match: weight, optimizer: {name: sgd, lr: 0.1}}]"
    words = (*SHORT, "optimizer=adamw", own, "gradient_clip=1.0")
    on_cpu = trained(*words, "gpus=0", "world_size=2", name="cpu").curve("running/loss")
    cards(count=2)
    for amp, near in (("false", 1e-5), ("fp16", 1e-2)):
        found = trained(*words, "gpus=2", f"amp={amp}", name=amp).curve("running/loss")
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in on_cpu], abs=near)
