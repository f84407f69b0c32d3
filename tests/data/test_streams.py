"""An IterableDataset: of known length, each sample one worker's by its position, or without
__len__, pass after pass, on any number of workers, and resumed."""

import dataclasses
import random
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from expt.data import build
from expt.data.build import Data
from expt.data.kinds import Augment, Opening
from expt.data.kinds.custom import Custom
from expt.data.loader import Loader, StreamLoader, loading
from expt.data.loading import Batch, LoaderOptions, Shard
from expt.errors import ConfigError, DataError
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker import steps
from expt.worker.build import build_data
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import Capture, Patch, RunFolder, as_typed, built, request_of
from tests.ranks import together
from tests.worker.conftest import ALONE, TrainAlone, stop_at, train_alone

__all__ = ["train_alone"]

SIZE, BATCH, STEPS = 23, 4, 9
SLOW = pytest.mark.slow


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Its numbers in order, each with some noise and the pass."""

    def __init__(self, train: bool, size: int = SIZE) -> None:
        self.size, self.epoch, self.numbers = size if train else 7, -1, slice(None)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.size)[self.numbers]:
            noise = torch.rand(()) + random.random()
            yield torch.tensor([number, noise, self.epoch]), torch.tensor(float(number))


class Counted(Numbers):
    """Of known length, through a buffer that shuffles."""

    def __init__(self, train: bool, said: int = SIZE) -> None:
        super().__init__(True)
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        waiting = [np.random.randint(1000)]
        for number in range(SIZE):
            waiting.append(number)
            chosen = waiting.pop(random.randrange(len(waiting)))
            found = torch.tensor([chosen, torch.rand(()).item(), self.epoch])
            yield found, torch.tensor(float(number))


class Kept(Numbers):
    """With a state, by which a pass goes on: nobody begins it anew but who loads an earlier one."""

    at, reads = 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < self.size:
            self.at += 1
            type(self).reads += 1
            noise = torch.rand(()) + random.random()
            yield torch.tensor([self.at - 1, noise, self.epoch]), torch.tensor(self.at - 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shards(Numbers):
    """Of which each worker gets its own, as Hugging Face's have it."""

    def shard(self, num_shards: int, index: int) -> "Shards":
        self.numbers = slice(index, None, num_shards)
        return self


class Threaded(Numbers):
    """Read ahead by a thread, which would not live in a process that is forked."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        threading.Thread(target=self.ended.wait, daemon=True).start()
        return super().__iter__()

    ended = threading.Event()


class Pictures(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, train: bool) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(SIZE):
            yield torch.full((1, 6, 6), number / SIZE), number % 4


def data_of(kind: type, rank: int = 0, workers: int = 1, readers: int = 0, **more: Any) -> Data:
    keys: dict[str, Any] = {"train": {"train": True}, "val": {"train": False}, "kwargs": {}}
    keys |= {"num_classes": 4 if kind is Pictures else None, "num_workers": readers or "auto"}
    own = Custom(target=f"{__name__}.{kind.__name__}", **{**keys, **more.pop("own", {})})
    how: dict[str, Any] = {"batch_size": BATCH, "seed": 3, "drop_last": True, "epoch_steps": STEPS}
    return built(own, shard=Shard(rank, workers), **{**how, "num_workers": readers, **more})


def rows(batches: list[Batch]) -> list[list[float]]:
    return [row for batch in batches for row in batch.inputs.flatten(1).tolist()]


def global_rows(parts: list[list[Batch]]) -> list[list[float]]:
    """Of each batch those of all workers."""
    several = zip(*parts, strict=True)
    return [row for each in several for row in rows([part for part in each if not part.weightless])]


@pytest.mark.parametrize("drop_last", [pytest.param(False, marks=SLOW), True])
def test_an_epoch_of_a_known_length_is_a_pass_alike_on_any_number_of_workers(
    drop_last: bool,
) -> None:
    one = data_of(Counted, drop_last=drop_last)
    assert one.val is not None
    assert (one.train.size, one.val.size) == (SIZE, SIZE)
    epochs = [[*one.train.epoch(epoch)] for epoch in (1, 2)]
    assert [batch.size for batch in epochs[0]] == [4, 4, 4, 4, 4] + [3] * (not drop_last)
    assert rows(epochs[0]) != rows(epochs[1]), "drawn anew"
    assert {row[2] for row in rows(epochs[1])} == {2.0}, "it is told of the epoch"
    for part in (epochs[0], one.val.evaluation()):
        targets = torch.cat([batch.targets for batch in part])
        assert torch.equal(targets, torch.arange(float(len(targets))))
    for workers, readers in ((2, 0), (4, 0), (1, 3)):
        several = [
            data_of(Counted, rank, workers, readers, drop_last=drop_last) for rank in range(workers)
        ]
        for number, epoch in enumerate(epochs, 1):
            parts = [[*each.train.epoch(number)] for each in several]
            assert global_rows(parts) == rows(epoch)
        parts = [[*each.train.epoch(2, skip=2)] for each in several]
        assert global_rows(parts) == rows(epochs[1][2:])
        evaluated = [batch for each in several if each.val for batch in each.val.evaluation()]
        assert rows(evaluated) == rows([*one.val.evaluation()])


@pytest.mark.parametrize("readers", [0, 1])
def test_one_that_ends_before_its_length_is_told(readers: int) -> None:
    with pytest.raises(DataError, match=r"^the dataset ended after 23 samples"):
        list(data_of(Counted, readers=readers, own={"kwargs": {"said": 30}}).train.epoch(1))
    rest = data_of(Counted, own={"kwargs": {"said": 10}}).train.epoch(1)
    assert len([*rest]) == 2, "the rest is not asked for"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, Kept])
def test_pass_follows_pass_alike_on_any_number_of_workers(kind: type) -> None:
    train = data_of(kind).train
    assert (len(train), train.size) == (STEPS, STEPS * BATCH)
    epochs = [rows([*train.epoch(epoch)]) for epoch in (1, 2, 3)]
    found = [row for epoch in epochs for row in epoch]
    assert [row[0] for row in found] == [number % SIZE for number in range(3 * STEPS * BATCH)]
    assert [row[2] for row in found] == [1 + at // SIZE for at in range(len(found))]
    assert len({row[1] for row in found}) == len(found), "drawn anew for each"
    for workers, readers in ((2, 0), (4, 0), (2, 1)):
        several = [data_of(kind, rank, workers, readers).train for rank in range(workers)]
        for number, epoch in enumerate(epochs, 1):
            assert global_rows([[*each.epoch(number)] for each in several]) == epoch


class Late(IterableDataset[Any]):
    """Draws from each generator, for some positions alone."""

    passes = 0

    def __init__(self, train: bool, drawing: Sequence[int] = ()) -> None:
        self.drawing = drawing

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        Late.passes += 1
        for number in range(SIZE):
            is_drawn = number in self.drawing
            drawn = random.random() + np.random.rand() + torch.rand(()) if is_drawn else 0.0
            yield torch.tensor([float(number), float(drawn)]), torch.tensor(float(number))


@pytest.mark.parametrize("readers", [pytest.param(0, marks=SLOW), 1])
def test_samples_are_seeded_from_the_first_batch_that_draws(readers: int) -> None:
    """What one draws hangs on its position, whichever before it draw, and on however many workers.

    A pass begins anew where a generator has moved, and only there.
    """

    def loaders(*drawing: int, workers: int = 1) -> list[Loader]:
        how: Any = {"own": {"kwargs": {"drawing": drawing}, "num_workers": readers}}
        how |= {"readers": readers, "drop_last": False}
        return [data_of(Late, rank, workers, **how).train for rank in range(workers)]

    def drawn(*drawing: int, workers: int = 1) -> list[list[float]]:
        parts = [[*loader.epoch(1)] for loader in loaders(*drawing, workers=workers)]
        return [row for row in global_rows(parts) if row[0]]

    before, early = torch.get_rng_state(), drawn(0, 9, 10, 20)
    for workers in (2,) if readers else (1, 2, 4):
        assert drawn(9, 10, 20, workers=workers) == early
    assert torch.equal(torch.get_rng_state(), before)
    for drawing, passes in (((), 2), ((9, 20), 3)):
        (loader,) = loaders(*drawing)
        Late.passes = 0
        [*loader.epoch(1)], [*loader.epoch(2)]
        assert readers or Late.passes == passes


class Reused(Dataset[Any]):
    """Gives one tensor, into which it writes each sample."""

    def __init__(self, train: bool) -> None:
        self.sample = torch.zeros(1)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.sample.fill_(index), torch.tensor(float(index))


class ReusedInOrder(Reused, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(SIZE))


@pytest.mark.parametrize("kind", [Reused, ReusedInOrder])
def test_samples_may_share_memory_with_those_of_later_batches(kind: type) -> None:
    batches = data_of(kind, batch_size=1).train.epoch(1)
    assert all(float(batch.inputs) == float(batch.targets) for batch in batches)


def test_an_own_shard_is_read_by_one_worker_only() -> None:
    several = [data_of(Shards, rank, 2).train for rank in range(2)]
    parts = [rows([*each.epoch(epoch)]) for epoch in (1, 2) for each in several]
    for index in range(2):
        mine = [row[0] for row in parts[index] + parts[2 + index]]
        assert mine == [range(index, SIZE, 2)[at % len(range(index, SIZE, 2))] for at in
                        range(STEPS * BATCH)]  # fmt: skip


def test_one_that_is_cheap_or_has_started_a_thread_is_read_by_the_worker_itself() -> None:
    own = {"num_workers": "auto"}
    for kind, how, readers in ((Numbers, {}, 1), (Threaded, {}, 0), (Late, own, 0)):
        loader = data_of(kind, readers=1, own=how).train
        assert loader._reading.num_workers == readers
    Threaded.ended.set()


@pytest.mark.parametrize(
    ("kind", "readers"),
    [pytest.param(Numbers, 1, marks=SLOW), (Shards, 0), (Shards, 1), (Kept, 1)],
)
def test_an_evaluation_is_one_pass_and_has_each_sample_once(kind: type, readers: int) -> None:
    several = [data_of(kind, rank, 2, readers, eval_batch_size=2).val for rank in range(2)]
    found = []
    for _ in range(2):
        parts = [[*each.evaluation()] for each in several if each is not None]
        assert all(parts)
        found.append([row for part in parts for row in rows(part)])
    assert found[0] == found[1]
    assert sorted((row[0], row[2]) for row in found[0]) == [(number, 0) for number in range(7)]
    whole = data_of(kind).val
    assert whole is not None
    assert sorted(rows([*whole.evaluation()])) == sorted(found[0]) or kind is Shards


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=SLOW) for kind in (Numbers, Shards)), Kept]
)
@pytest.mark.parametrize("readers", [pytest.param(0, marks=SLOW), 1])
def test_it_goes_on_where_its_state_was_kept(kind: type, readers: int, capsys: Capture) -> None:
    for rank in range(2):
        uncut = [data_of(kind, rank, 2, readers).train for _ in range(2)]
        [*uncut[0].epoch(1)], [*uncut[1].epoch(1)]
        first = uncut[0].epoch(2)
        early = [next(first) for _ in range(5)]
        again = data_of(kind, rank, 2, readers).train
        assert isinstance(again, StreamLoader)
        next(again.epoch(1))  # as a comparison does, before the state is loaded
        Kept.reads = 0
        again.load_state_dict(uncut[0].state_dict())
        assert Kept.reads == 0, "nothing is read of a run that is over"
        late = rows([*again.epoch(2, skip=5)])
        assert kind is not Kept or Kept.reads == (0 if readers else 4 * BATCH)
        assert rows(early) + late == rows([*uncut[1].epoch(2)])
        assert rows([*again.epoch(3)]) == rows([*uncut[1].epoch(3)])
    told = re.findall(
        r"warning: \w+: has no state_dict .* takes \d+\.\d s", capsys.readouterr().err
    )
    assert len(told) == (0 if kind is Kept or readers else 1)
    if kind is Shards:
        with pytest.raises(ConfigError, match=r"^world_size=1: .* use world_size=2 "):
            data_of(kind).train.load_state_dict(again.state_dict())


@pytest.mark.parametrize("size", [1, 9])
def test_a_pass_that_has_become_shorter_is_refused(size: int) -> None:
    """And is not waited for."""
    uncut = data_of(Numbers).train
    [*uncut.epoch(1)]
    again = data_of(Numbers, own={"train": {"train": True, "size": size}}).train
    assert isinstance(again, StreamLoader)
    again.load_state_dict(uncut.state_dict())
    with pytest.raises(DataError, match=f"gives {size} samples in this pass"):
        next(again.epoch(2))


def test_images_are_augmented_and_mixed_alike_on_any_number_of_workers() -> None:
    own = {"augment": Augment(crop_padding=2, flip=True), "mean": (0.5,), "std": (0.5,)}
    one = data_of(Pictures, mixup=0.4, own=own)
    assert one.info.features.shapes["num_classes"] == 4
    assert (one.info.train_size, one.info.val_size) == (STEPS * BATCH, None)
    assert one.info.record["is_uncounted"]
    epoch = rows([*one.train.epoch(1)])
    several = [data_of(Pictures, rank, 2, mixup=0.4, own=own).train for rank in range(2)]
    assert global_rows([[*each.epoch(1)] for each in several]) == epoch
    plain = data_of(Pictures, own={**own, "augment": Augment()}).train
    assert epoch != rows([*plain.epoch(1)])
    drawing = dataclasses.replace(plain._options, balanced=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"^dataset\.sampling=balanced: an IterableDataset comes"):
        loading(plain._reading.dataset, 0)(torch.arange(3), drawing)


@pytest.mark.parametrize(
    ("own", "more", "said"),
    [
        ({}, {"epoch_steps": None}, r"has no __len__ .* give epoch_steps, or max_steps"),
        ({"train_limit": 3}, {}, r"^dataset\.train_limit=3: needs a dataset with __len__"),
        ({"folds": 3, "fold": 0}, {}, r"^dataset\.folds=3: needs a dataset with __len__"),
        ({"sampling": "balanced"}, {}, r"^dataset\.sampling=balanced: needs the class"),
        ({"augment": Augment(flip="alternate")}, {}, r"^dataset\.augment\.flip=alternate"),
    ],
)
def test_what_needs_a_length_is_refused(own: Any, more: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        data_of(Pictures, own=own, **more)


OWN = f"+dataset={{_target_: {__name__}.%s, val: {{train: false}}}}"
LINEAR = as_typed("task=regression model=mlp model.hidden=[] optimizer.lr=0.001")
STEPWISE = as_typed("batch_size=4 epoch_steps=9 epochs=3 log_every=1 optimizer.momentum=0")
WORDS = ("~dataset", *LINEAR, *STEPWISE)


def test_a_length_of_epochs_is_of_a_dataset_without_one(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"^epoch_steps=9: is of a dataset without __len__"):
        build_data(configured("epoch_steps=9"), ALONE)
    for kind in ("Numbers", "Counted"):  # none of it is held out: it would be trained on
        words = (*WORDS, f"+dataset={{_target_: {__name__}.{kind}}}", "epoch_steps=null")
        for key, more in (("val_fraction", ()), ("folds", ("+dataset.folds=3", "+dataset.fold=1"))):
            with pytest.raises(ConfigError, match=rf"^dataset\.{key}="):
                build_data(configured(*words, "max_steps=9", *more), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Numbers", "Kept"])
def test_a_run_on_it_has_the_numbers_of_a_plain_loop_and_resumes_to_the_same_bits(
    kind: str,
    train_alone: TrainAlone,
    tmp_path: Path,
    configured: Configured,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(steps, "MEET_EVERY_S", 0.0)
    words, weights = (*WORDS, OWN % kind), dict[str, Tensor]()

    def note(run: Run) -> None:
        weights.update({name: one.clone() for name, one in run.learner.module.state_dict().items()})

    done = train_alone(*words, before=note)
    weight, bias = (one.requires_grad_() for one in weights.values())
    losses = [loss for _, loss in done.curve("running/loss")]
    for batch, loss in zip(data_of(Numbers, seed=0).train.epoch(1), losses, strict=False):
        outputs = functional.linear(batch.inputs, weight, bias)[:, 0]
        mine = functional.mse_loss(outputs, batch.targets)
        assert mine.item() == pytest.approx(loss, rel=1e-5)
        for one, grad in zip(
            (weight, bias), torch.autograd.grad(mine, (weight, bias)), strict=True
        ):
            one.data -= 0.001 * grad
    for size in (1, 2):
        config = dataclasses.replace(configured(*words), world_size=size)
        name = f"{size} workers"
        paths = RunPaths(tmp_path / name)
        paths.folder.mkdir()

        def each(worker: Worker, paths: RunPaths = paths, config: Any = config) -> list[str]:
            ends = []
            for source in (None, paths.last):
                run = Run(request_of(config, paths.folder), worker)
                if source is None:  # within the second epoch, and the third pass
                    stop_at(14)(run)
                ends.append(run.train(source))
            return ends

        (tmp_path / f"store {size}").mkdir()
        ends = [each(ALONE)] if size == 1 else together(tmp_path / f"store {size}", size, each)
        assert ends == [["interrupted", "completed"]] * size
        again = RunFolder(paths.folder)
        assert size == 2 or again.points == done.points
        found = [loss for _, loss in again.curve("running/loss")]
        assert found == pytest.approx(losses, rel=1e-5)


def test_all_of_it_can_be_evaluated() -> None:
    own = Custom(target=f"{__name__}.Numbers", kwargs={}, val={"train": False})
    trained_on = own.open(Opening(None, torch.device("cpu"), 0)).features
    options = LoaderOptions(batch_size=5, device=torch.device("cpu"))
    sizes = {}
    for split in ("train", "val", "test", "all"):
        found = build.load(own, None, split, trained_on, options, own=True)
        sizes[split] = sum(batch.size for batch in found.evaluation())
    assert sizes == {"train": SIZE, "val": 7, "test": 7, "all": SIZE + 14}


def test_a_run_on_one_of_known_length_resumes_to_the_same_bits(train_alone: TrainAlone) -> None:
    words = ("~dataset", *LINEAR, OWN % "Counted", *STEPWISE, "epoch_steps=null")
    words += ("drop_last=false", "epochs=2")
    done = train_alone(*words)
    last = train_alone(*words, name="stopped", before=stop_at(8)).paths.last
    assert train_alone(*words, name="stopped", source=last).points == done.points
