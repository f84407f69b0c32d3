"""The DDP script that a person writes by hand for samples that are read one by one: rows of a
map-style Dataset, the same as a stream, or JPEGs of a Hugging Face dataset.

python -m scripts.baselines.reading --samples rows --batch-size 64 --workers 2 --readers 1
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

FEATURES, CLASSES, TRAIN, TEST = 100, 10, 100_000, 256
IMAGES, IMAGE_SIZE = 5_000, 64


class Rows(Dataset[tuple[Tensor, int]]):
    """Numbers in memory, a tensor for each sample; nothing is drawn."""

    def __init__(self, train: bool = True) -> None:
        drawn = torch.Generator().manual_seed(int(train))
        size = TRAIN if train else TEST
        self.numbers = torch.randn(size, FEATURES, generator=drawn)
        self.labels = torch.randint(CLASSES, (size,), generator=drawn)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.numbers[index], int(self.labels[index])


class Stream(IterableDataset[tuple[Tensor, int]]):
    """The same one after the other; of several workers by hand each keeps its own."""

    def __init__(self, train: bool = True, rank: int = 0, workers: int = 1) -> None:
        self._rows, self._rank, self._workers = Rows(train), rank, workers

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        samples = (self._rows[index] for index in range(len(self)))
        return itertools.islice(samples, self._rank, None, self._workers)


class Pictures(Dataset[tuple[Tensor, int]]):
    """What `write_pictures` wrote, decoded by the library."""

    def __init__(self, folder: str) -> None:
        from torchvision.transforms.functional import to_tensor

        library: Any = importlib.import_module("datasets")
        self._rows, self._to_tensor = library.load_from_disk(folder)["train"], to_tensor

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self._rows[index]
        return self._to_tensor(row["image"]), row["label"]


class Pooled(nn.Sequential):
    """Small, so that reading is what takes the time."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))


class Layers(nn.Sequential):
    """Two layers on a row."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, num_classes))


def write_pictures(folder: str) -> None:
    """Write JPEGs of a class each, as save_to_disk does."""
    from PIL import Image as Pillow

    library: Any = importlib.import_module("datasets")

    def jpeg(number: int) -> bytes:
        coarse = np.random.default_rng(number).integers(256, size=(8, 8, 3), dtype=np.uint8)
        written = io.BytesIO()
        Pillow.fromarray(coarse).resize((IMAGE_SIZE, IMAGE_SIZE)).save(written, "jpeg")
        return written.getvalue()

    def table(numbers: range) -> Any:
        columns = {
            "image": [{"bytes": jpeg(number), "path": None} for number in numbers],
            "label": [number % CLASSES for number in numbers],
        }
        names = [str(number) for number in range(CLASSES)]
        kinds = {"image": library.Image(), "label": library.ClassLabel(names=names)}
        return library.Dataset.from_dict(columns, features=library.Features(kinds))

    parts = {"train": range(IMAGES), "test": range(IMAGES, IMAGES + TEST)}
    tables = {name: table(numbers) for name, numbers in parts.items()}
    library.DatasetDict(tables).save_to_disk(folder)


def train(rank: int, args: argparse.Namespace) -> None:
    """What each worker does."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29542")
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", rank=rank, world_size=args.workers)
    torch.manual_seed(0)
    model = DistributedDataParallel(Pooled() if args.samples == "pictures" else Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loss_fn = nn.CrossEntropyLoss()
    loader, sampler = _loader(rank, args)
    epoch_s = []
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        began, running = time.time(), 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        epoch_s.append(time.time() - began)
    if rank == 0:
        print(json.dumps({"system": "by hand", "epoch_s": epoch_s}), flush=True)
    dist.destroy_process_group()


def _loader(
    rank: int, args: argparse.Namespace
) -> tuple[DataLoader[Any], DistributedSampler[Any] | None]:
    how: Any = {
        "batch_size": args.batch_size // args.workers,
        "num_workers": args.readers,
        "persistent_workers": args.readers > 0,
    }
    if args.samples == "stream":
        return DataLoader(Stream(True, rank, args.workers), **how), None
    dataset: Dataset[Any] = Rows() if args.samples == "rows" else Pictures(args.data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, args.workers, rank)
    return DataLoader(dataset, sampler=sampler, **how), sampler


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", choices=["rows", "stream", "pictures"], default="rows")
    parser.add_argument("--data", help="folder of the pictures")
    parser.add_argument("--batch-size", type=int, default=64, help="global")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--readers", type=int, default=0, help="processes that read, per worker")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    args = _arguments()
    mp.spawn(train, (args,), args.workers)
