"""Loaders: the batches that workers see, from memory and streamed; and the errors of a person's own
data."""

import contextlib
import dataclasses
import gc
import multiprocessing
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from expt.data import loading
from expt.data.images import image_part
from expt.data.loader import Loader
from expt.data.loading import Batch, LoaderOptions, Shard, prefetched
from expt.data.memory import eval_batch_size
from expt.errors import DataError
from expt.features import Classes
from tests.data.loaders import makers
from tests.facade import Patch, alive, environment, python
from tests.faults.running import wait_until
from tests.warm import Command

CPU = torch.device("cpu")
SIZE = 23
IMAGES = torch.randint(
    0, 256, (SIZE, 2, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(SIZE)
ALL = torch.arange(SIZE)


class InRam(Dataset[Any]):
    """Samples as `convert` gives them; counts what is read."""

    def __init__(
        self, convert: Callable[[Tensor], Any] = lambda image: image, labels: Tensor = LABELS
    ) -> None:
        self.convert = convert
        self.labels = labels
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read.append(index)
        return self.convert(IMAGES[index]), self.labels[index].item()


class Same(InRam):
    """Samples that are all of one image."""

    def __init__(self, image: Any) -> None:
        super().__init__(lambda _: image)


FIVE = LoaderOptions(batch_size=5, device=CPU, shuffle=True)


in_memory, _, rows = makers(IMAGES, LABELS, FIVE)


def streamed(
    indices: Tensor = ALL,
    dataset: Dataset[Any] | None = None,
    *,
    channels: int = 2,
    num_classes: int = SIZE,
    num_workers: int = 0,
    **options: Any,
) -> Loader:
    classes = Classes(names=tuple(map(str, range(num_classes))))
    part = image_part(dataset or InRam(), (channels, 4, 3), num_workers, classes)
    return part.load(indices, dataclasses.replace(FIVE, **options))


make_loader = pytest.mark.parametrize("make", [in_memory, streamed])
make_any = pytest.mark.parametrize("make", [in_memory, streamed, rows])


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(one.inputs, two.inputs)
        and torch.equal(one.targets, two.targets)
        and one[2] == two[2]
        for one, two in zip(left, right, strict=True)
    )


@make_any
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_together_see_what_one_sees(
    make: Callable[..., Loader], world_size: int, drop_last: bool
) -> None:
    alone = list(make(drop_last=drop_last).epoch(3))
    loaders = [
        make(drop_last=drop_last, shard=Shard(rank, world_size)) for rank in range(world_size)
    ]
    for loader in loaders:
        for number, batch in enumerate(loader.epoch(3)):
            assert torch.equal(loader.indices(3, number), batch.targets)
    assert {len(loader) for loader in loaders} == {len(alone)}
    for whole, *parts in zip(alone, *(loader.epoch(3) for loader in loaders), strict=True):
        counted = [part for part in parts if not part.weightless]
        assert torch.equal(torch.cat([part.inputs for part in counted]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in counted]), whole.targets)
        assert {part.global_size for part in parts} == {len(whole.targets)}
    assert sum(len(batch.targets) for batch in alone) == (20 if drop_last else SIZE)


@make_loader
def test_a_worker_without_a_sample_still_takes_part(make: Callable[..., Loader]) -> None:
    *_, last = make(shard=Shard(3, 4)).epoch(0)  # three samples, four workers
    assert (last.inputs.shape, last.weightless, last.global_size) == ((1, 2, 4, 3), True, 3)


@make_any
def test_epochs_differ_and_repeat(make: Callable[..., Loader]) -> None:
    loader = make(seed=7)
    first, second = list(loader.epoch(0)), list(loader.epoch(1))
    assert not same(first, second)
    assert same(list(make(seed=7).epoch(1)), second)
    assert not same(list(make(seed=8).epoch(0)), first)
    in_order = make(shuffle=False)
    assert torch.cat([batch.targets for batch in in_order.epoch(4)]).equal(LABELS)


@make_any
@pytest.mark.parametrize("skip", [0, 1, 4, 5, 9])
def test_skip_gives_the_tail_of_the_epoch(make: Callable[..., Loader], skip: int) -> None:
    shard = Shard(1, 2)
    assert same(
        list(make(shard=shard).epoch(2, skip=skip)), list(make(shard=shard).epoch(2))[skip:]
    )


def test_skipped_samples_are_not_read() -> None:
    dataset = InRam()
    batches = list(streamed(dataset=dataset, drop_last=True).epoch(2, skip=3))
    assert dataset.read == torch.cat([batch.targets for batch in batches]).tolist()
    assert len(dataset.read) == 5


@make_any
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 25])
def test_an_evaluation_counts_each_sample_once(
    make: Callable[..., Loader], world_size: int
) -> None:
    chosen = ALL[1:]
    seen: list[int] = []
    for rank in range(world_size):
        for batch in make(chosen, shard=Shard(rank, world_size), eval_batch_size=4).evaluation():
            assert batch.global_size == len(batch.targets) == len(batch.inputs) <= 4
            seen += batch.targets.tolist()
    assert seen == chosen.tolist()


@make_loader
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_normalised_per_channel(
    make: Callable[..., Loader], channels_last: bool
) -> None:
    mean, std = (0.2, 0.7), (0.5, 0.3)
    (batch,) = make(shuffle=False, mean=mean, std=std, channels_last=channels_last).evaluation()
    expected = (IMAGES.double() / 255 - torch.tensor(mean).view(2, 1, 1)) / torch.tensor(std).view(
        2, 1, 1
    )
    assert batch.inputs.dtype == torch.float32
    torch.testing.assert_close(batch.inputs, expected.float(), rtol=1e-5, atol=1e-6)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert batch.inputs.is_contiguous(memory_format=layout)
    (plain,) = make(shuffle=False).evaluation()
    torch.testing.assert_close(plain.inputs, IMAGES.float() / 255)


@pytest.mark.parametrize(
    "convert",
    [
        lambda image: image,
        lambda image: image.float() / 255,
        lambda image: image.double() / 255,
        lambda image: image.permute(1, 2, 0).numpy(),
    ],
    ids=["uint8", "float32", "float64", "array"],
)
def test_every_kind_of_image_comes_out_alike(convert: Callable[[Tensor], Any]) -> None:
    options: dict[str, Any] = {"mean": (0.2, 0.7), "std": (0.5, 0.3), "shuffle": False}
    (expected,) = in_memory(**options).evaluation()
    (batch,) = streamed(dataset=InRam(convert), **options).evaluation()
    torch.testing.assert_close(batch.inputs, expected.inputs)
    assert torch.equal(batch.targets, expected.targets)


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA"])
def test_pil_images_of_any_mode(mode: str) -> None:
    channels = 1 if mode == "L" else 3

    def convert(image: Tensor) -> Image.Image:
        return Image.fromarray(image[0].numpy()).convert(mode)

    (batch,) = streamed(dataset=InRam(convert), channels=channels, shuffle=False).evaluation()
    torch.testing.assert_close(batch.inputs[:, :1], IMAGES[:, :1].float() / 255)


class Noisy(InRam):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        noise = torch.rand(2, 4, 3) + random.random() + float(np.random.rand())
        return noise / 3, index


def test_augmentation_depends_on_seed_epoch_and_sample_alone() -> None:
    def by_sample(loader: Loader, epoch: int) -> dict[int, list[float]]:
        return {
            label: image.flatten().tolist()
            for batch in loader.epoch(epoch)
            for image, label in zip(batch.inputs, batch.targets.tolist(), strict=True)
        }

    before = torch.get_rng_state()
    alone = by_sample(streamed(dataset=Noisy()), 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(image) for image in alone.values()}) == SIZE
    processes = streamed(dataset=Noisy(), shard=Shard(0, 2), num_workers=2)
    for epoch in (0, 1):
        part = by_sample(processes, epoch)
        assert len(part) == 14
        assert ({label: alone[label] for label in part} == part) == (epoch == 1)


class Sometimes(InRam):
    """Draws for some samples only, none of which is in the first batch."""

    def __init__(self, *drawing: int) -> None:
        super().__init__()
        self.drawing = drawing

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        if index in self.drawing:
            drawn = random.random() + np.random.rand() + float(torch.rand(()))
            return image.float() / 255 * drawn / 3, label
        return image.float() / 255, label


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_seeded_from_the_first_batch_that_draws(num_workers: int) -> None:
    """Reading again, in whatever process and order, changes nothing of what a sample draws."""
    order = [int(batch.targets) for batch in streamed(batch_size=1).epoch(1)]
    drawing = order[7], order[12], order[20]
    random.seed(1)
    before = str(random.getstate()), str(np.random.get_state()), torch.get_rng_state()
    found = list(streamed(dataset=Sometimes(*drawing), num_workers=num_workers).epoch(1))
    single = [*streamed(dataset=Sometimes(*drawing), batch_size=1).epoch(1)]
    assert torch.equal(
        torch.cat([batch.inputs for batch in found]), torch.cat([batch.inputs for batch in single])
    )
    assert (str(random.getstate()), str(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    again = Sometimes(*drawing)
    list(streamed(dataset=again).epoch(1))
    assert again.read == [*order[:10], *order[5:]]  # the second batch twice, each other once


def test_loader_processes_outlive_an_epoch_and_an_early_stop() -> None:
    loader = streamed(num_workers=2)
    for batch in loader.epoch(0):
        assert len(batch.targets) == 5
        break
    started = {process.pid for process in multiprocessing.active_children()}
    assert same(list(loader.epoch(1, skip=1)), list(streamed().epoch(1))[1:])
    assert same(list(loader.evaluation()), list(streamed().evaluation()))
    assert {process.pid for process in multiprocessing.active_children()} == started
    assert len(started) == 2


def test_a_daemonic_process_reads_by_itself(monkeypatch: Patch) -> None:
    """One of a multiprocessing.Pool may have no children."""
    config = vars(multiprocessing.current_process())["_config"]
    monkeypatch.setitem(config, "daemon", True)
    assert same(list(streamed(num_workers=2).epoch(1)), list(streamed().epoch(1)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_is_named(num_workers: int) -> None:
    def raises(text: str, dataset: Dataset[Any], **options: Any) -> None:
        with pytest.raises(DataError, match=f"^{re.escape(text)}"):
            list(streamed(dataset=dataset, num_workers=num_workers, **options).evaluation())

    odd = InRam(lambda image: image[:, 1:] if torch.equal(image, IMAGES[7]) else image)
    raises("sample 7: its image is (2, 3, 3), expected (2, 4, 3)", odd)
    raises("sample 20: its label is 20, expected 0 to 19", InRam(), num_classes=20)
    raises("sample 0: its label is -1, expected 0 to 22", InRam(labels=LABELS - 1))
    raises(
        "sample 2: its label is 2.5, expected 0 to 22",
        InRam(labels=torch.tensor([0.0, 1.0, 2.5] * 9)),
    )
    raises(
        "sample 1: its label is nan, expected 0 to 22",
        InRam(labels=torch.tensor([0.0, torch.nan] * 12)),
    )
    raises(
        "sample 0: expected an image of uint8 or float, CHW, found int64 [2, 4, 3]",
        InRam(lambda image: image.long()),
    )
    raises(
        "sample 0: expected an image of uint8 or float, CHW, found a str", InRam(lambda _: "a.png")
    )
    for kind in ("U1", "O", "datetime64[s]", "longdouble", ">f4"):
        empty: Any = np.zeros((2, 4, 3), kind)
        found = f"{empty.dtype} [2, 4, 3]"
        raises(f"sample 0: expected an image of uint8 or float, CHW, found {found}", Same(empty))


def test_a_label_may_be_any_whole_number() -> None:
    (batch,) = streamed(dataset=InRam(labels=LABELS.double())).evaluation()
    assert torch.equal(batch.targets, LABELS)


ORPHANS = """
import multiprocessing, os, signal, sys, time
from tests.data.test_loading import streamed
batches = streamed(num_workers=2).epoch(0)
next(batches), next(batches)  # one of each process: both have started
children = [process.pid for process in multiprocessing.active_children()]
os.kill(children[0], signal.SIGINT)  # Ctrl-C is for the worker alone
next(batches)
with open(sys.argv[1] + ".new", "w") as file:
    print(*children, file=file)
os.rename(file.name, sys.argv[1])
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_loader_processes_die_with_their_worker(tmp_path: Path) -> None:
    told = tmp_path / "children"
    worker = Command([str(told)], Path(__file__).parents[2], environment(), ORPHANS)
    wait_until(told.exists, worker)
    children = {int(pid) for pid in told.read_text().split()}
    assert len(alive(children)) == 2
    worker.kill()
    wait_until(lambda: not alive(children), timeout_s=2)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "parts", "expected"),
    [
        (64, 1, 1, 512),
        (512, 1, 1, 2048),
        (512, 4, 4, 1024),
        (512, 1, 4, 1024),
        (4096, 1, 1, 4096),
        (8, 1, 1, 256),
    ],
)
def test_a_gpu_evaluates_more_at_a_time(
    batch_size: int, world_size: int, parts: int, expected: int
) -> None:
    options = dataclasses.replace(
        FIVE, batch_size=batch_size, shard=Shard(0, world_size), batch_parts=parts
    )
    assert eval_batch_size(dataclasses.replace(options, device=torch.device("cuda"))) == expected
    assert eval_batch_size(options) is None


def test_a_loader_is_in_no_cycle_that_keeps_its_processes() -> None:
    """torch waits 5 s for those of one that only the collector of garbage finds."""
    classes = Classes(names=tuple(map(str, range(SIZE))))
    part = image_part(TensorDataset(IMAGES, LABELS), (2, 4, 3), 1, classes)
    loader = part.load(ALL, LoaderOptions(batch_size=5, device=CPU))
    assert next(iter(loader.epoch(1))).size == 5
    seen = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert seen() is None
    finally:
        gc.enable()


SENT = """
import torch

class Sent(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((4,), index / 16), index % 2
"""


ANEW = """
import multiprocessing, runpy, tempfile
tempfile.tempdir = None  # a forked command knows its folder for temporary files
vars(multiprocessing.current_process())["_config"].pop("tempdir", None)
runpy.run_module("expt", run_name="__main__", alter_sys=True)
"""


def test_reading_processes_that_cannot_send_are_refused_at_once(tmp_path: Path) -> None:
    """torch notes it in a thread of that process, and waits."""
    (tmp_path / "mine.py").write_text(SENT)
    (long := tmp_path / ("x" * 120)).mkdir()
    words = "{_target_: mine.Sent, num_classes: 2, train: {}, test: null, num_workers: 1}"
    given = (f"dataset={words}", "model=mlp", "epochs=1", "world_size=1", "batch_size=4")
    done = python(ANEW, *given, "hydra.run.dir=run", cwd=tmp_path, TMPDIR=str(long))
    assert done.returncode == 2, done.stderr
    assert f"TMPDIR={long}" in done.stderr
    assert "dataset.num_workers=1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


GPU = torch.device("cuda", 0)


class Streams:
    """The streams by their names, and in which order who was told what."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = self.named("main")

    def named(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.told.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: Patch) -> Iterator[Streams]:
    found = Streams()
    loading._side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: found.named("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    monkeypatch.setattr(
        Tensor,
        "record_stream",
        lambda self, stream: found.told.append(f"{int(self)} is used by {stream.name}"),
    )
    yield found
    loading._side_stream.cache_clear()


def made(streams: Streams, count: int) -> Iterator[tuple[Any, Any, str]]:
    for number in range(count):
        streams.told.append(f"{number} is made on {streams.current.name}")
        yield {"image": torch.tensor(number)}, torch.tensor(10 + number), "no tensor"


def test_a_batch_is_made_aside_and_waited_for_by_its_user_alone(streams: Streams) -> None:
    for batch in prefetched(made(streams, 2), GPU):
        streams.told.append(f"{int(batch[1]) - 10} is taken on {streams.current.name}")
    assert streams.told == [
        "side waits for main", "0 is made on side", "main waits for side", "0 is used by main",
        "10 is used by main", "0 is taken on main", "1 is made on side", "main waits for side",
        "1 is used by main", "11 is used by main", "1 is taken on main",
    ]  # fmt: skip


def test_whoever_asks_on_another_stream_is_the_one_that_waits(streams: Streams) -> None:
    batches = prefetched(made(streams, 1), GPU)
    with streams.entered(streams.named("other")):
        next(batches)
    assert streams.told[2:] == ["other waits for side", "0 is used by other", "10 is used by other"]


def test_on_a_cpu_there_is_no_stream(streams: Streams) -> None:
    assert len(list(prefetched(made(streams, 2), torch.device("cpu")))) == 2
    assert streams.told == ["0 is made on main", "1 is made on main"]
