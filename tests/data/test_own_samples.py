"""A person's own Dataset that raises, or gives what no batch can be made of: one line says which
sample, and where.
"""

import inspect
import random
import time
import traceback
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from expt.data import checked_samples, custom
from expt.data.augment import Mixing
from expt.data.build import keep_doubles, mixing_of
from expt.data.changes import Watched
from expt.data.checked_samples import structure_of
from expt.data.kinds.custom import Custom
from expt.data.loader import loading
from expt.data.loading import Batch, LoaderOptions
from expt.data.source import Source
from expt.errors import ConfigError, DataError, ExptError, RunFailed
from expt.features import Classes
from expt.tasks.classification import Config as Classification
from expt.tasks.multilabel import Config as Multilabel
from expt.tasks.regression import Config as Regression
from tests.facade import Patch

FILES: dict[str, Any] = {}
MULTILABEL, REGRESSION = (
    Multilabel(name="multilabel", threshold=0.5),
    Regression(name="regression", loss="mse"),
)
OPTIONS = LoaderOptions(batch_size=4, device=torch.device("cpu"))


class Rows(Dataset[Any]):
    def __init__(self, train: bool, kind: str) -> None:
        self.kind = kind
        if kind in ("drops", "packs"):
            self.collate = {
                "drops": lambda rows: default_collate([*filter(None, rows)]),
                "packs": packed,
            }[kind]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        row, odd = torch.full((3,), float(index)), index == 5
        if odd and self.kind == "mistake":
            return FILES["five"]
        if odd and self.kind == "disk":
            raise OSError("the disk is gone")
        other: dict[str, Any] = {
            "none": None,
            "drops": None,
            "dict": {"row": row},
            "three": (row, row.sum(), 1),
            "double": (row.double(), row.sum()),
            "integers": ({"row": row.int()}, row.sum()),
            "keys": ({"row": row, "more": row}, row.sum()),
            "image": (torch.rand(1, 2, 2), 1, 3),
        }
        usual: dict[str, Any] = {
            "integers": ({"row": row}, row.sum()),
            "keys": ({"row": row}, row.sum()),
        }
        usual["all doubles"] = (row.double(), row.double().sum())
        usual["image"] = (torch.rand(1, 2, 2), 1)
        return (
            other[self.kind]
            if odd and self.kind in other
            else usual.get(self.kind, (row, row.sum()))
        )


def packed(samples: list[Any]) -> Any:
    return torch.cat([row for row, _ in samples])[None], None


class Nothing(Rows):
    def __getitem__(self, index: int) -> Any:
        return None


class Numbers(Rows):
    """Of Python's kinds, which make the same batches."""

    def __getitem__(self, index: int) -> Any:
        return [index, float(index), True][index % 3], index


class Unsized(Dataset[Any]):
    pass


class Stream(IterableDataset[Any]):
    def __init__(self, train: bool, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        if self.kind == "begins":
            raise KeyError("no file")
        return map(Rows(True, self.kind).__getitem__, range(8))


def opened(
    name: str, kind: str, task: Any = None, *, readers: int = 0, num_classes: int | None = None
) -> Source:
    config = Custom(target=f"{__name__}.{name}", kwargs={"kind": kind}, num_classes=num_classes)
    return custom.source(config, readers, task)


def batches(name: str, kind: str, task: Any = None, **how: Any) -> list[Batch]:
    return [*opened(name, kind, task, **how).train.load(torch.arange(8), OPTIONS).epoch(1)]


def line_of(code: str) -> int:
    return inspect.getsource(inspect.getmodule(line_of)).splitlines().index(code) + 1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Rows", "Stream"])
@pytest.mark.parametrize("readers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        ("mistake", DataError, "raised KeyError: 'five' ({file}, line {mistake})"),
        ("disk", RunFailed, "raised OSError: the disk is gone ({file}, line {disk})"),
    ],
)
def test_what_reading_raises_is_told_with_the_sample_and_the_line(
    kind: str, error: type[ExptError], told: str, readers: int, name: str
) -> None:
    """Alike from a process that reads; a mistake is not tried again, and what the disk has a part
    in may be.
    """
    codes = {
        "mistake": '            return FILES["five"]',
        "disk": '            raise OSError("the disk is gone")',
    }
    lines = {each: line_of(code) for each, code in codes.items()}
    method = {"Rows": "__getitem__", "Stream": "__iter__"}[name]
    with pytest.raises(ExptError) as caught:
        batches(name, kind, readers=readers)
    traceback.clear_frames(
        caught.tb
    )  # else its reader is in a cycle, with which processes end 5 s late
    assert type(caught.value) is error
    assert str(caught.value) == f"sample 5: {name}.{method} " + told.format(file=__file__, **lines)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("Rows", "none", "sample 5: it holds NoneType, and the first training sample"),
        ("Nothing", "", "found <class 'NoneType'>"),
        ("Stream", "none", "sample 5: it holds NoneType, and the first training sample"),
        ("Rows", "dict", "sample 5: it holds {'row': 'torch.float32'}, and the first"),
        ("Rows", "three", "sample 5: it holds ['torch.float32', 'torch.float32', 'number'], and"),
        ("Rows", "double", "sample 5: it holds ['torch.float64', 'torch.float32'], and the first"),
        ("Rows", "integers", "sample 5: it holds [{'row': 'torch.int32'}, 'torch.float32'], and"),
        ("Rows", "keys", "sample 5: it holds [{'row': 'torch.float32', 'more': 'torch.float32'}"),
        ("Rows", "drops", "collate makes tensors of 3 for 4 samples; put the samples first"),
        ("Rows", "packs", "collate makes tensors of 1 for 4 samples"),
        ("Stream", "begins", "Stream.__iter__ raised KeyError: 'no file' ("),
        ("Unsized", "", "must have __len__"),
    ],
)
def test_samples_that_make_no_batch_are_told_in_a_line(name: str, kind: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batches(name, kind)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


class OfClasses(Rows):
    """Rows of numbers, or two tensors, each of one class."""

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(4.0) + index
        label = {"float": float(index % 2), "fraction": 0.5, "third": 2}.get(self.kind, index % 2)
        inputs: dict[str, Any] = {"dict": {"a": row, "b": row}, "array": row.double().numpy()}
        return inputs.get(self.kind, row), (
            label if index == 5 or self.kind == "float" else index % 2
        )


@pytest.mark.parametrize("kind", ["plain", "float", "array", "dict"])
def test_what_has_a_class_need_be_no_image(kind: str) -> None:
    source = opened("OfClasses", kind, Classification(), num_classes=2)
    first, second = source.train.load(torch.arange(8), OPTIONS).epoch(1)
    inputs = first.inputs["b"] if kind == "dict" else first.inputs
    assert torch.equal(inputs, torch.arange(4.0) + torch.arange(4)[:, None])
    assert inputs.dtype == torch.float32
    assert torch.equal(torch.cat([first.targets, second.targets]), torch.tensor([0, 1] * 4))
    assert source.features.targets == Classes(names=("0", "1"))


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("OfClasses", "fraction", "sample 5: its label is 0.5, expected 0 to 1"),
        ("OfClasses", "third", "sample 5: its label is 2, expected 0 to 1"),
        ("Last", "", "its images are (8, 8, 3), read as (channels"),
        ("Rows", "image", "sample 5: it is 3 values, expected (image, label)"),
    ],
)
def test_wrong_samples_of_classes_are_told_in_a_line(name: str, kind: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        batches(name, kind, Classification(), num_classes=2)
    assert told in str(caught.value)


class Last(Rows):
    """Images whose channels come last."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(8, 8, 3), 1


def test_a_method_collate_makes_targets_of_anything() -> None:
    assert batches("Listed", "", MULTILABEL)[0].targets.tolist() == [[0, 1]] * 4


class Listed(Rows):
    """Each with a list of targets, of which no batch would be made."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), [0, 1]

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        rows, targets = zip(*samples, strict=True)
        return torch.stack(rows), torch.tensor(targets)


@pytest.mark.parametrize(
    ("kind", "mixes", "told"),
    [
        ("plain", {"cutmix": 0.5}, "cutmix=0.5: cuts images"),
        ("dict", {"mixup": 0.5}, "mixup=0.5: adds tensors"),
        ("plain", {"mixup": 0.5}, ""),
    ],
)
def test_what_cannot_be_mixed(kind: str, mixes: Any, told: str) -> None:
    source = opened("OfClasses", kind, Classification(), num_classes=2)
    if not told:
        assert mixing_of(source, **{"cutmix": None, **mixes}) == Mixing(2, mixup=0.5)
        return
    with pytest.raises(ConfigError) as caught:
        mixing_of(source, **{"mixup": None, "cutmix": None, **mixes})
    assert str(caught.value).startswith(told)


def test_numbers_of_pythons_are_all_alike() -> None:
    first, second = (batch.inputs.tolist() for batch in batches("Numbers", ""))
    assert [*first, *second] == [0, 1, 1, 3, 4, 1, 6, 7]
    assert structure_of((True, [1.5])) == structure_of((2, [3]))


SHARED = np.random.default_rng(0)


class Drawing(Dataset[Any]):
    """Reads by generators, counters and caches of its own."""

    seen: ClassVar[list[int]] = []
    odd: ClassVar[Any] = {type("Odd", (), {"__repr__": None})(): "of which nothing is known"}

    def __init__(self, train: bool, what: str) -> None:
        self.what, self.cache = what, dict[int, Any]()
        self.late: Any = None
        self.numpy, self.torch, self.count = np.random.default_rng(0), torch.Generator(), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.late = self.late or object()
        self.cache[index] = index
        self.count += self.what == "count"
        draws: dict[str, Any] = {"numpy": self.numpy.random, "torch": self.torch.seed}
        draws |= {"SHARED": SHARED.random, "seen": lambda: self.seen.append(index)}
        draws.get(self.what, int)()
        return torch.rand(3), torch.rand(())


@pytest.mark.parametrize("what", ["numpy", "torch", "count", "SHARED", "seen", "nothing"])
def test_what_reading_changes_is_known_by_name(what: str) -> None:
    dataset = Custom(target=f"{__name__}.Drawing", kwargs={"what": what})
    notes = custom.source(dataset, 0, REGRESSION).notes
    assert [f".{what}, " in note for note in notes] == [True] * (what != "nothing")


class Rare(Dataset[Any]):
    """Changes only the samples of a rare class, neither the first nor the last."""

    def __init__(self, train: bool, how: str, rare: int, has_targets: bool) -> None:
        self.rare, self.how, self.count = rare, how, 0
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator()
        self.python = random.Random(0)
        if has_targets:
            self.targets = [int(self.is_rare(index)) for index in range(2000)]

    def counted(self) -> list[float]:
        self.count += 1
        return [0.0] * 3

    def is_rare(self, index: int) -> bool:
        return index % self.rare == 2

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ways: dict[str, Any] = {
            "numpy": lambda: self.numpy.normal(size=3),
            "torch": lambda: torch.rand(3, generator=self.torch),
            "python": lambda: [self.python.random()] * 3,
            "count": lambda: self.counted(),
            "fresh": lambda: np.random.default_rng().normal(size=3),
            "system": lambda: [random.SystemRandom().random()] * 3,
            "clock": lambda: [time.perf_counter_ns() % 1_000_003] * 3,
            "global": lambda: np.random.normal(size=3),
        }
        noise = ways[self.how]() if self.is_rare(index) else [0.0] * 3
        return torch.as_tensor(noise).float(), int(self.is_rare(index))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "U3", "datetime64[s]", "bool"])
def test_a_change_of_any_number_of_an_array_is_seen(dtype: str) -> None:
    kept: Any = Drawing(True, "nothing")
    kept.numbers = np.zeros(20_001, dtype)[::2]
    for place in (1, 8191, 10_000):
        watched = Watched(kept, {})
        assert watched.lost({}) == []
        kept.numbers[place] = 1
        assert watched.lost({}) == ["numbers"]


@pytest.mark.parametrize("what", ["swapped", "small beside the others", "next to a nan"])
def test_a_change_of_any_number_of_a_tensor_is_seen(what: str) -> None:
    kept: Any = Drawing(True, "nothing")
    kept.numbers = torch.arange(20_000.0) + 1e6
    kept.numbers[-1] = torch.nan if what == "next to a nan" else 0
    watched = Watched(kept, {})
    assert watched.lost({}) == []
    if what == "swapped":
        kept.numbers[1:3] = kept.numbers[1:3].flip(0)
    else:
        kept.numbers[1] += 0.125
    assert watched.lost({}) == ["numbers"]


def test_attributes_are_seen_next_to_parameters_that_begin_as_they_do() -> None:
    module: Any = prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)
    for name in ("step_size", "step_of_me", "step_g", "step_of_v"):
        module.register_parameter(name, nn.Parameter(torch.ones(2)))
    module.step, module.step_of = 0, [0]
    watched = Watched(module, {})
    module.step, module.step_of[0], module.weight = 1, 1, torch.ones(2, 2)
    assert watched.lost({}) == ["step", "step_of"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        *[(name, f"dataset.{name}, which") for name in ("numpy", "torch", "python", "count")],
        *[(name, "samples that were read twice") for name in ("fresh", "system", "clock")],
        ("global", None),
    ],
)
@pytest.mark.parametrize(("rare", "has_targets"), [(5, False), (40, False), (1500, True)])
def test_what_reading_a_rare_class_changes_is_known(
    how: str, told: str | None, rare: int, has_targets: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(checked_samples, "LIMIT_S", 60)
    kwargs = {"how": how, "rare": rare, "has_targets": has_targets}
    dataset = Custom(target=f"{__name__}.Rare", num_classes=2, num_workers=0, kwargs=kwargs)
    notes = custom.source(dataset, 0).notes
    assert [told in note for note in notes] == [True] if told else notes == []


class Series(Dataset[Any]):
    """Gives rows over time, or pictures."""

    def __init__(self, train: bool, shape: list[int], dtype: str) -> None:
        self.rows = torch.zeros(8, *shape, dtype=getattr(torch, dtype))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 2


class Collating(Series):
    """Says itself what a batch is."""

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "noted", "inputs"),
    [
        ("Series", [5, 3], "float32", True, [1, 5, 3]),
        ("Series", [5, 3], "float64", True, [1, 5, 3]),
        ("Series", [5, 3], "uint8", False, [1, 5, 3]),
        ("Series", [1, 5, 3], "float32", False, [1, 5, 3]),
        ("Collating", [5, 3], "float32", False, [5, 3]),
    ],
)
def test_series_are_not_taken_for_pictures_in_silence(
    name: str, shape: list[int], dtype: str, noted: bool, inputs: list[int]
) -> None:
    kwargs = {"shape": shape, "dtype": dtype}
    dataset = Custom(target=f"{__name__}.{name}", num_classes=2, num_workers=0, kwargs=kwargs)
    found = custom.source(dataset, 0)
    assert ["collate" in note for note in found.notes] == [True] * noted
    assert [*found.example[0].shape] == inputs


class FromFile(Dataset[Any]):
    """Gives the place in a file that it holds open, moves it, and writes a log."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)
        self.file.seek(3)
        self.log = path.with_name("log").open("wb", buffering=0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        reader = get_worker_info()
        number = float(reader.id if reader else -1)
        self.log.write(b"%d" % index)
        return torch.tensor([float(self.file.seek(1, 1))]), torch.tensor(number)


def test_each_reading_process_has_its_own_place_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(bytes(100))
    dataset = FromFile(tmp_path / "records")
    options = LoaderOptions(batch_size=2, device=torch.device("cpu"))
    loader = loading(dataset, 2)(torch.arange(8), options)
    found: dict[float, list[float]] = {}
    for batch in loader.epoch(1):
        for place, reader in zip(batch.inputs[:, 0].tolist(), batch.targets.tolist(), strict=True):
            found.setdefault(reader, []).append(place)
    assert found == {0.0: [4.0, 5.0, 6.0, 7.0], 1.0: [4.0, 5.0, 6.0, 7.0]}
    assert dataset.file.tell() == 3
    assert sorted((tmp_path / "log").read_bytes()) == [*b"01234567"]
    dataset.file.close()
    dataset.log.close()


@pytest.mark.parametrize("readers", [0, 2])
def test_doubles_stay_for_a_model_in_double(readers: int) -> None:
    options = LoaderOptions(batch_size=4, device=torch.device("cpu"))
    rows = Rows(train=True, kind="all doubles")
    for module, expected in ((nn.Linear(1, 1), torch.float32), (nn.Linear(1, 1).double(), None)):
        loader = loading(rows, readers)(torch.arange(8), options)
        keep_doubles(module, [loader])
        batch = next(loader.epoch(1))
        assert batch.inputs.dtype == batch.targets.dtype == (expected or torch.float64)
