"""An IterableDataset of known length: each sample is one worker's, by its position, whatever the
number of workers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.data import build, samples
from expt.data.build import Data
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch, Shard
from expt.data.samples import IterableLoader
from expt.errors import ConfigError, DataError
from expt.worker.build import build_data
from expt.worker.run import Run
from tests.conftest import Configured, as_typed
from tests.worker.conftest import ALONE, TrainAlone, train_alone
from tests.worker.test_run import values

__all__ = ["train_alone"]

SIZE, BATCH = 23, 5


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Its positions and some noise, through a buffer that shuffles."""

    def __init__(self, train: bool, said: int = SIZE) -> None:
        self._said, self._epoch = said, -1

    def __len__(self) -> int:
        return self._said

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        waiting = [np.random.randint(1000)]
        for number in range(SIZE):
            waiting.append(number)
            chosen = waiting.pop(random.randrange(len(waiting)))
            yield (
                torch.tensor([chosen, torch.rand(()).item(), self._epoch]),
                torch.tensor(float(number)),
            )


class Pictures(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, train: bool) -> None:
        self.most = 3 if train else 9

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(12):
            yield torch.full((1, 2, 2), number / 12), number % (self.most + 1)


def data_of(
    kind: type,
    rank: int = 0,
    workers: int = 1,
    num_workers: int = 0,
    drop_last: bool = False,
    **more: Any,
) -> Data:
    classes, readers = 4 if kind is Pictures else None, more.pop("readers", "auto")
    kwargs: dict[str, Any] = {key: more.pop(key) for key in ("said", "drawing") if key in more}
    own = Custom(
        target=f"{__name__}.{kind.__name__}",
        num_classes=classes,
        val={"train": False},
        num_workers=readers,
        kwargs=kwargs,
    )
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "seed": 3,
        "drop_last": drop_last,
        "channels_last": False,
        **more,
    }
    return build.build(
        own,
        shard=Shard(rank, workers),
        device=torch.device("cpu"),
        num_workers=num_workers,
        **settings,
    )


def whole(parts: list[list[Batch]]) -> list[list[Any]]:
    """The global batches of all workers' parts."""
    together = [
        [part for part in of_batch if not part.weightless] for of_batch in zip(*parts, strict=True)
    ]
    return [torch.cat([part.inputs for part in of_batch]).tolist() for of_batch in together]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_is_the_same_on_any_number_of_workers(drop_last: bool) -> None:
    one = data_of(Numbers, drop_last=drop_last)
    assert one.val is not None
    assert (one.train.size, one.val.size) == (SIZE, SIZE)
    epochs = [whole([list(one.train.epoch(epoch))]) for epoch in (1, 2)]
    assert [len(batch) for batch in epochs[0]] == [5, 5, 5, 5] + [3] * (not drop_last)
    assert epochs[0] != epochs[1], "drawn anew"
    assert {row[2] for batch in epochs[1] for row in batch} == {2.0}, "it is told of the epoch"
    for part in (one.train.epoch(1), one.val.evaluation()):
        targets = torch.cat([batch.targets for batch in part])
        assert torch.equal(targets, torch.arange(float(len(targets))))
    for workers in (2, 4):
        several = [data_of(Numbers, rank, workers, drop_last=drop_last) for rank in range(workers)]
        assert [
            whole([list(each.train.epoch(epoch)) for each in several]) for epoch in (1, 2)
        ] == epochs
        assert whole([list(each.train.epoch(2, skip=2)) for each in several]) == epochs[1][2:]
        evaluated = [
            batch.inputs for each in several if each.val for batch in each.val.evaluation()
        ]
        assert torch.cat(evaluated).tolist() == [
            row for batch in one.val.evaluation() for row in batch.inputs.tolist()
        ]
    read_ahead = data_of(Numbers, num_workers=3, drop_last=drop_last)
    assert whole([list(read_ahead.train.epoch(2))]) == epochs[1]


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_seeded_from_the_first_batch_that_draws(num_workers: int) -> None:
    """What one draws hangs on its position, whichever before it draw, and on however many workers.

    A pass begins anew where a generator has moved, and only there.
    """

    def rows(*drawing: int, workers: int = 1) -> list[list[list[float]]]:
        parts = []
        for rank in range(workers):
            how: Any = {"drawing": drawing, "readers": num_workers}
            parts.append(list(data_of(Late, rank, workers, num_workers, **how).train.epoch(1)))
        return [[*map(list, batch)] for batch in whole(parts)]

    before = torch.get_rng_state()
    early = [row for batch in rows(0, 9, 10, 20) for row in batch if row[0]]
    for workers in (1, 2, 4):
        late = [row for batch in rows(9, 10, 20, workers=workers) for row in batch if row[0]]
        assert late == early
    assert torch.equal(torch.get_rng_state(), before)
    if num_workers == 0:
        loaders = [data_of(Late, drawing=drawing, readers=0).train for drawing in ((), (9, 20))]
        passes = []
        for loader in loaders:
            Late.passes = 0
            list(loader.epoch(1))
            list(loader.epoch(2))
            passes.append(Late.passes)
        assert passes == [2, 3]


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
    batches = data_of(kind, readers=0, batch_size=1).train.epoch(1)
    assert all(float(batch.inputs) == float(batch.targets) for batch in batches)


def test_a_cheap_stream_is_read_in_the_worker_itself() -> None:
    loader = data_of(Late, num_workers=3).train
    assert isinstance(loader, IterableLoader)
    assert loader._reading.num_workers == 0


def test_images_of_classes_are_normalised_checked_and_mixed() -> None:
    one = data_of(Pictures, mixup=0.4)
    assert (one.info.shapes["num_classes"], one.info.shapes["channels"]) == (4, 1)
    mixed = [list(data_of(Pictures, rank, 2, mixup=0.4).train.epoch(1)) for rank in range(2)]
    assert whole(mixed) == whole([list(one.train.epoch(1))])
    assert one.test is not None
    with pytest.raises(DataError, match=r"^sample 4: its label is 4, expected 0 to 3"):
        list(one.test.evaluation())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_that_ends_before_its_length_is_told(num_workers: int) -> None:
    with pytest.raises(DataError, match=r"^the dataset ended after 23 samples"):
        list(data_of(Numbers, num_workers=num_workers, said=30).train.epoch(1))
    assert len(list(data_of(Numbers, said=10).train.epoch(1))) == 2, "the rest is not asked for"


def test_it_cannot_be_drawn_from_by_class() -> None:
    loader = data_of(Pictures).train
    assert isinstance(loader, IterableLoader)
    drawing = dataclasses.replace(loader._options, balanced=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"^dataset\.sampling=balanced: an IterableDataset comes"):
        samples.loading(loader._reading.dataset, 0, lambda sample: sample)(torch.arange(3), drawing)


def test_none_of_it_is_held_out(configured: Configured) -> None:
    """Its samples have no places of their own: those that validate would be trained on."""
    words = (
        "~dataset",
        f"+dataset._target_={__name__}.Numbers",
        "task=regression",
        *as_typed("model=mlp batch_size=5"),
    )
    with pytest.raises(ConfigError, match=r"^dataset\.val_fraction=0\.1: .*dataset\.val="):
        build_data(configured(*words), ALONE)
    with pytest.raises(ConfigError, match=r"^dataset\.folds=3: .*dataset\.val="):
        build_data(configured(*words, "+dataset.folds=3", "+dataset.fold=1"), ALONE)


def test_a_run_on_it_resumes_to_the_same_bits(train_alone: TrainAlone, tmp_path: Path) -> None:
    words: tuple[str, ...] = (
        "~dataset",
        f"+dataset={{_target_: {__name__}.Numbers, val: {{train: false}}, num_workers: 0}}",
        "task=regression",
    )
    words += (
        "model=mlp",
        "model.hidden=[]",
        *as_typed("batch_size=5 epochs=2 drop_last=false log_every=1"),
    )

    def stop(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == 6

    done = train_alone(*words, "optimizer.lr=0.001")
    last = (
        train_alone(*words, "optimizer.lr=0.001", name="stopped", before=stop).folder
        / "checkpoints"
        / "last.pt"
    )
    assert values(train_alone(*words, "optimizer.lr=0.001", name="stopped", source=last)) == values(
        done
    )
