"""A dataset by the name of its class in torchvision.datasets."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, Size
from expt.data.cache import cache_dir, fetch, of_files
from expt.data.image_files import names_below, open_picture
from expt.data.kinds import Images, Place, Readers, problems_of_masks
from expt.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from expt.data.memory import InMemory
    from expt.data.source import Source

_SPLITS = {
    "train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",),
}  # fmt: skip
_MASKS: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "Cityscapes": (19, {"mode": "fine", "target_type": "semantic"}),
    "OxfordIIITPet": (3, {"target_types": "segmentation"}),
    "SBDataset": (21, {"mode": "segmentation"}),
    "VOCSegmentation": (21, {}),
}
"""The number of classes in the masks of a dataset, and what makes its class give these."""
# The numbers in its masks that its benchmark counts, in the order of their classes.
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_PACKED = (".zip", ".tar", ".tgz", ".gz")  # what was unpacked counts, not whether its archive stays


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torchvision(Images):
    """Images with classes, masks, labels or numbers, as torchvision's class gives them."""

    name: Literal["torchvision"]
    set: str
    options: dict[str, Any] | None = None
    root: Place | None
    download: Annotated[bool, Key(result="none")]
    image_size: Size | None
    channels: Literal[1, 3] | None = None
    num_workers: Readers

    TASKS = ("classification", "multilabel", "regression", "segmentation")
    known_once_fetched = True
    looks_when_opened = True
    may_have_val = True

    def has_masks(self, segments: bool) -> bool:
        return segments

    def mask_classes(self) -> int | None:
        return _MASKS[self.set][0] if self.set in _MASKS else None

    def problems(self, task: Any) -> list[str]:
        return problems_of_masks(self, task) if task.TARGETS == "mask" else []

    @property
    def folder(self) -> Path:
        """The folder of its files, now or later, as torchvision lays them out."""
        return Path(self.root) if self.root is not None else cache_dir() / "torchvision" / self.set

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """Have torchvision download the dataset into a folder that is empty, or not there."""
        if self._files():
            return
        _class(self.set)
        fetch(
            self.folder,
            lambda cls, root: [*self._constructed(cls, root, fetches=True).values()],
            self.set,
            download=self.download,
            missing=f"dataset.set={self.set}: no files in {self.folder}; put there what"
            f" torchvision.datasets.{self.set} unpacks, or give dataset.root=FOLDER",
            is_there=lambda: bool(self._files()),
        )

    def fingerprint(self) -> str | None:
        """Return that of all files in the folder; None if they are yet to be downloaded."""
        files = self._files()
        return of_files(self.folder, files) if files else None

    def _files(self) -> list[str]:
        return [name for name in names_below(self.folder) if not name.endswith(_PACKED)]

    def open(
        self, task: Any, device: torch.device, num_workers: int, trained_on: Any = None
    ) -> Source:
        """Read from memory where torchvision holds the images there, else one by one."""
        import torch

        from expt.data.custom import some_targets
        from expt.data.image_files import values_of
        from expt.data.images import of_numbers, of_pictures, pictures_of, row
        from expt.data.masks import of_masks

        if task.TARGETS == "mask":
            masks = self._read(_MASKS.get(self.set, (0, {}))[1])
            target = _classes_of_masks(self.set, values_of(self, task).ignore_index)
            return of_masks(masks, self, task, num_workers, target)
        sets = self._read({})
        train, pictures = sets["train"], pictures_of(sets, self)
        if task.TARGETS in ("labels", "numbers"):
            number = len(row(train[0][1]))
            known = [name for name in getattr(train, "attr_names", ()) if name]
            names = known if len(known) == number else [*map(str, range(number))]
            found = of_numbers(pictures, torch.zeros(len(train), number), names, num_workers)
            raw = dataclasses.replace(pictures["train"], target=row)
            return dataclasses.replace(found, targets_of=functools.partial(some_targets, raw))
        as_they_are = not (self.image_size or self.channels)
        held = {part: _in_memory(each, device) for part, each in sets.items() if as_they_are}
        memory = {part: each for part, each in held.items() if each is not None}
        classes = _class_names(self.set, train)
        return of_pictures(pictures, classes, labels_of(train), num_workers, memory)

    def _read(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Construct each part. Raise DataError for files that are missing or damaged."""
        try:
            return self._constructed(_class(self.set), self.folder, more)
        except TypeError as error:
            raise ConfigError(f"dataset.set={self.set}: {error}; see dataset.options") from error
        except ImportError as error:
            raise ConfigError(f"dataset.set={self.set}: {error}; install it") from error
        except (OSError, RuntimeError, ValueError, EOFError, LookupError) as error:
            raise DataError(
                f"dataset.set={self.set}: its files in {self.folder} cannot be read"
                f" ({' '.join(str(error).split())}); remove them to fetch them again, or give"
                " another dataset.root"
            ) from error

    def _constructed(
        self, cls: Any, root: Path, more: Mapping[str, Any] | None = None, fetches: bool = False
    ) -> dict[str, Any]:
        """Return its parts, by the argument that chooses one: `train`, `split` or `image_set`."""
        takes = inspect.signature(cls).parameters
        chosen = {**(self.options or {}), **(more or {})}
        if "download" in takes:
            chosen["download"] = fetches
        if "loader" in takes:
            chosen.setdefault("loader", functools.partial(open_picture, mode="RGB"))
        if "train" in takes:
            both = {"train": True, "test": False}
            return {part: cls(str(root), train=value, **chosen) for part, value in both.items()}
        key = next(
            (key for key in ("split", "image_set") if key in takes and key not in chosen), ""
        )
        if not key:
            return {"train": cls(str(root), **chosen)}
        found = {}
        for part, words in _SPLITS.items():
            for word in words:
                try:
                    found[part] = cls(str(root), **chosen, **{key: word})
                    break
                except ValueError as error:
                    if f"for argument {key}" not in str(error):  # how torchvision refuses a split
                        raise
        if "train" not in found:
            raise ConfigError(
                f"dataset.set={self.set}: its {key} is not train; give one in dataset.options"
            )
        return found


def _class(name: str) -> Any:
    """Return a class of torchvision's datasets. Raise ConfigError for another name."""
    library = importlib.import_module("torchvision.datasets")
    if name not in library.__all__:
        raise ConfigError(
            f"dataset.set={name}: not in torchvision.datasets.{did_you_mean(name, library.__all__)}"
        )
    return getattr(library, name)


def labels_of(found: Any) -> Tensor | None:
    """Return the class of each sample, int64 [N], if torchvision's class keeps them."""
    import torch

    samples = getattr(found, "_samples", None)
    kept = [getattr(found, name, None) for name in ("targets", "labels", "_labels", "y")]
    kept.append([label for _, label in samples] if samples else None)
    labels = next((each for each in kept if each is not None and len(each) == len(found)), None)
    found = None if labels is None else torch.as_tensor(labels)
    return found.long() if found is not None and found.dim() == 1 else None


def _class_names(name: str, found: Any) -> Sequence[str]:
    labels, names = labels_of(found), getattr(found, "classes", None) or ()
    number = max(len(names), 0 if labels is None else int(labels.max()) + 1)
    if not number:
        raise ConfigError(
            f"dataset.set={name}: its class does not say how many classes there are; use"
            f" dataset._target_=torchvision.datasets.{name} with num_classes"
        )
    return [*map(str, names)] if len(names) == number else [*map(str, range(number))]


def _in_memory(found: Any, device: torch.device) -> InMemory | None:
    """Return a part of the images that a class of torchvision holds as uint8 `data`, if it does."""
    import numpy as np
    import torch

    from expt.data.checked_samples import to_tensor
    from expt.data.images import in_memory

    data, labels = getattr(found, "data", None), labels_of(found)
    images = torch.as_tensor(data) if isinstance(data, np.ndarray | torch.Tensor) else None
    if images is None or images.dtype != torch.uint8 or labels is None:
        return None
    first = to_tensor(found[0][0])
    layouts = [images[:, None]] if images.dim() == 3 else [images, images.permute(0, 3, 1, 2)]
    fitting = [each for each in layouts if torch.equal(each[0], first)]
    return in_memory((fitting[0].contiguous(), labels), device) if fitting else None


def _classes_of_masks(name: str, ignored: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return what makes classes from 0 on of a mask's numbers, as they are counted in papers."""
    import numpy as np

    if name == "OxfordIIITPet":  # 1 is the pet, 2 what is around it, 3 the edge
        return lambda numbers: numbers - 1
    if name == "Cityscapes":
        table = np.full(256, ignored, np.int64)
        table[[*_CITYSCAPES]] = range(len(_CITYSCAPES))
        return lambda numbers: table[np.clip(numbers, 0, 255)]
    return lambda numbers: np.where(numbers == 255, ignored, numbers)  # an object's edge
