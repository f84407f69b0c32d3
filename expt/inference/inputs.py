"""The inputs of a run's model, from files or from values in a program, as its dataset gave them.

Free of torch until something is computed. `of_feature` has those of pictures, tables and texts.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from expt.data.image_files import (
    files_below,
    left_out,
    of_suffix,
    report_left_out,
)
from expt.data.kinds import DatasetConfig
from expt.errors import ConfigError, DataError, first_line
from expt.features import Features

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""
ARRAYS = (".npy", ".npz")
NAMES = ("x", "images", "inputs")
"""The names of the array that is taken from an .npz with several."""
_NUMBERS, _MOST = 10_000_000, 1024
"""The inputs and the samples of a batch whose size nobody chose: 40 MB of float32."""


class Piece(NamedTuple):
    """Some samples of a file, in order."""

    about: Sequence[Mapping[str, str | int]]
    """The origin of each."""
    samples: Any
    """Values that `Inputs` takes; never mapped read-only."""
    skipped: Sequence[str] = ()
    """Why others of the file can't be used, a line each."""
    targets: Any = None
    """Where the inputs say what they are."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of pictures as they lie."""


class Inputs:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` return a batch on the model's device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They come out as float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, come out standardised, [N, 1, 1, F]; where it has
    texts or gaps, give lists of them (None is a gap) or a DataFrame, which are encoded as in
    training. A text comes out as its tokens, int64 [1, length]. Other samples must be tensors or
    arrays, one or a batch, and are only moved.

    Raise ConfigError for what is not a sample, DataError for a damaged picture.
    """

    noun: ClassVar[str] = "sample"
    suffixes: ClassVar[Sequence[str]] = ARRAYS
    """Suffixes of named files, besides pictures; empty if any will do."""
    below: ClassVar[Sequence[str]] = ARRAYS
    """Suffixes looked for in a folder, besides pictures."""

    def __init__(self, dataset: DatasetConfig, features: Features, device: Any = "cpu") -> None:
        self.dataset, self.feature, self.targets = dataset, features.inputs, features.targets
        self.device = device
        self.files: Sequence[str] = ()
        self._opened: Sequence[Any] = ()

    # ---- values in a program ----

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        if isinstance(samples, list | tuple):
            return self._joined(samples)
        given, shape = as_tensor(samples), getattr(self.feature, "shape", ())
        if shape and given.dim() not in (len(shape), len(shape) + 1):
            raise ConfigError(
                f"samples of shape {list(given.shape)}: those of training are {[*shape]}; give one,"
                " or a batch"
            )
        return (given[None] if given.dim() == len(shape) else given).to(self.device)

    def _joined(self, samples: Sequence[Sample]) -> Tensor:
        import torch

        return torch.cat([self(sample) for sample in samples])

    # ---- files ----

    @property
    def pictures(self) -> tuple[str, ...]:
        """The suffixes of pictures, where they are inputs."""
        return ()

    @property
    def size(self) -> int | None:
        """The number of samples in the files, where it is known before they are read."""
        sizes = [*map(self._size_of, self._opened)]
        return sum(sizes) if all(sizes) and sizes else None

    def _size_of(self, opened: Any) -> int:
        return len(opened)

    @property
    def at_once(self) -> int:
        """The number of samples of a batch, where nobody chooses one."""
        return max(1, min(_MOST, _NUMBERS // max(1, self._numbers)))

    @property
    def _numbers(self) -> int:
        return int(self._opened[0][:1].size)

    def open(self, paths: Sequence[Path]) -> None:
        """Take the samples of files and folders.

        Raise ConfigError for paths and files that the model does not take, DataError for damaged
        ones.
        """
        self.files = [file for path in paths for file in self._files_of(path)]
        self._opened = [*map(self._open, self.files)]

    def _files_of(self, path: Path) -> list[str]:
        """Return a file that is named, or of a folder those below it, sorted by folder."""
        suffixes = (*self.pictures, *(self.below if path.is_dir() else self.suffixes))
        own = [suffix for suffix in suffixes if suffix not in self.pictures]
        wanted = ", ".join(["pictures (.jpg, .png, ...)"] * bool(self.pictures) + own)
        if path.is_dir():
            # A part of a segmentation_folder has its masks next to its images.
            has_masks = (path / "images").is_dir() and (path / "masks").is_dir()
            folder = path / "images" if has_masks and self.pictures else path
            every = files_below(folder)
            if not (found := of_suffix(every, suffixes)):
                raise ConfigError(f"{path}: no {self.noun} lies in it or below; expected {wanted}")
            report_left_out(folder, left_out(every, found), self.noun)
            return found
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        if self.suffixes and path.suffix.lower() not in suffixes:
            raise ConfigError(f"{path}: the run was trained on {self.noun}s; give {wanted}")
        return [str(path)]

    def _open(self, path: str) -> Any:
        array = array_of(path)
        if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
            )
        shape, sizes = array.shape[1:], self.feature.shapes
        wanted = sizes.get("channels"), *sizes.get("image_size", ())
        if len(wanted) > 1 and len(shape) <= 3 and (1,) * (3 - len(shape)) + shape != wanted:
            raise ConfigError(f"{path}: samples are {list(shape)}, not {list(wanted)}")
        return array

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield the samples of the files, up to `size` at a time."""
        for path, array in zip(self.files, self._opened, strict=True):
            for start in range(0, len(array), size):
                part = array[start : start + size].copy()
                about: list[Mapping[str, str | int]] = [
                    {"path": path, "index": start + place} for place in range(len(part))
                ]
                yield Piece(about, self._checked(path, part))

    def _checked(self, path: str, part: np.ndarray) -> np.ndarray:
        return part.astype("float32") if part.dtype == "float64" else part


def as_tensor(given: Any) -> Tensor:
    """Return a tensor, or that of an array. Raise ConfigError for another value."""
    import numpy as np
    import torch

    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(f"a {type(given).__name__}: give a tensor or an array")


def array_of(path: str) -> np.ndarray:
    """Return the array of a .npy, mapped into memory, or that of an .npz that has one of NAMES."""
    import numpy as np

    try:
        if path.lower().endswith(".npy"):
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name in NAMES or len(file.files) == 1]
            if not names:
                has = ", ".join(file.files) or "none"
                raise ConfigError(f"{path}: holds the arrays {has}; call one {' or '.join(NAMES)}")
            array = file[names[0]]
            return array
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}); replace it") from error
