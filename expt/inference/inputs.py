"""The inputs of a run's model, from files or from values in a program, as its dataset gave them.

They are pictures or arrays; rows and texts are in `tables`, which chooses by the feature. Free of
torch until something is computed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from expt.data import folders, pictures
from expt.data.kinds import DatasetConfig
from expt.data.table_files import reading
from expt.errors import ConfigError, DataError, absent, warn
from expt.features import Features, Image
from expt.late import np, torch
from expt.machine import usable_cpus

if TYPE_CHECKING:
    from torch import Tensor

Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""
ARRAYS = (".npy", ".npz")
_AHEAD = 2  # batches of pictures that are read while one is computed
_NUMBERS, _MOST = 10_000_000, 1024
"""The inputs and the samples of a batch whose size nobody chose: 40 MB of float32."""
NAMES = ("x", "images", "inputs")
"""The names of the array that is taken from an .npz with several."""


class Piece(NamedTuple):
    """Some samples of a file, in order."""

    about: Sequence[Mapping[str, str | int]]
    """The origin of each."""
    samples: Any
    """Values that `Inputs` takes; never mapped read-only."""
    skipped: Sequence[str] = ()
    """Why others of the file can't be used, a line each."""
    targets: Any = None
    """The targets that inputs imply."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of pictures as they lie."""


class Inputs:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` return a batch on the model's device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They become float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, become standardised, [N, 1, 1, F]; where it has
    texts or gaps, give lists of them (None is a gap) or a DataFrame, which are encoded as in
    training. A text becomes its tokens, int64 [1, length]. Other samples must be tensors or
    arrays, one or a batch, and are only moved.

    Raise ConfigError for other values, DataError for a damaged picture.
    """

    noun: ClassVar[str] = "sample"
    suffixes: ClassVar[tuple[str, ...]] = ARRAYS
    """Suffixes of named files that are not pictures; empty if any will do."""
    below: ClassVar[tuple[str, ...]] = ARRAYS
    """Suffixes of files in a folder that are not pictures."""

    def __init__(self, dataset: DatasetConfig, features: Features, device: Any = "cpu") -> None:
        self.dataset, self.feature, self.targets = dataset, features.inputs, features.targets
        self.device = device
        self.files: Sequence[str] = ()
        self._opened: Sequence[Any] = ()

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        if isinstance(samples, list | tuple):
            return torch.cat([self(sample) for sample in samples])
        return self._batch(samples)

    def _batch(self, samples: Sample) -> Tensor:
        given, shape = as_tensor(samples), getattr(self.feature, "shape", ())
        if shape and given.dim() not in (len(shape), len(shape) + 1):
            raise ConfigError(
                f"samples of shape {list(given.shape)}: those of training are {[*shape]}; give one,"
                " or a batch"
            )
        return (given[None] if given.dim() == len(shape) else given).to(self.device)

    @property
    def pictures(self) -> tuple[str, ...]:
        """The suffixes of pictures, where they are inputs."""
        return ()

    @property
    def size(self) -> int | None:
        """The number of samples in the files, where it is known before they are read."""
        return sum(len(one) for one in self._opened) or None

    @property
    def at_once(self) -> int:
        """The number of samples of a batch, where nobody chooses one."""
        shapes, own = self.feature.shapes, getattr(self.feature, "shape", ())
        image = shapes.get("channels", 1), *shapes.get("image_size", ())
        numbers: int = max(math.prod(image), math.prod(own), 256 * shapes.get("context", 0))
        return max(1, min(_MOST, _NUMBERS // numbers))

    @property
    def columns(self) -> Mapping[str, str]:
        """The other columns of tables, such as an ID, and how each is called among the answers."""
        return {}

    def open(self, paths: Sequence[Path]) -> None:
        """Take the samples of files and folders.

        Raise ConfigError for paths and files that the model does not take, DataError for damaged
        ones.
        """
        self.files = [file for path in paths for file in self._files_of(path)]
        tables = (x for x in self.files if os.path.isdir(x) or x.lower().endswith(self.suffixes))
        self._opened = [*map(self._open, tables)]

    def take(self, texts: Sequence[str]) -> None:
        """Take texts by themselves. Raise ConfigError where the model does not."""
        raise ConfigError(f"--text: the run was trained on {self.noun}s; give files")

    def _files_of(self, path: Path) -> list[str]:
        """Return a file that is named, or of a folder those below it, sorted by folder."""
        suffixes = (*self.pictures, *(self.below if path.is_dir() else self.suffixes))
        own = [suffix for suffix in suffixes if suffix not in self.pictures]
        wanted = ", ".join(["pictures (.jpg, .png, ...)", *own] if self.pictures else own)
        if path.is_dir():
            # A part of a segmentation_folder has its masks next to its images.
            has_masks = (path / "images").is_dir() and (path / "masks").is_dir()
            folder = path / "images" if has_masks and self.pictures else path
            every = folders.files_below(folder)
            if not (found := folders.of_suffix(every, suffixes)):
                raise ConfigError(f"{path}: no {self.noun} lies in it or below; expected {wanted}")
            folders.report_left_out(folder, folders.left_out(every, found), self.noun)
            return found
        if not path.exists():
            raise ConfigError(f"{path}: {absent(path)}")
        if self.suffixes and path.suffix.lower() not in suffixes:
            raise ConfigError(f"{path}: the run was trained on {self.noun}s; give {wanted}")
        return [str(path)]

    def _open(self, path: str) -> Any:
        array = samples_of(path)
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
                places = range(start, start + len(part))
                about: list[Mapping[str, str | int]] = [{"path": path, "index": x} for x in places]
                yield Piece(about, self._checked(path, part))

    def _checked(self, path: str, part: np.ndarray) -> np.ndarray:
        return part.astype("float32") if part.dtype == "float64" else part


class Pictures(Inputs):
    """Pictures in files, opened by Pillow, or in arrays and tensors."""

    noun, below = "image", ()
    feature: Image

    @functools.cached_property
    def _normalise(self) -> Any:
        from expt.data.loading import Finish, LoaderOptions

        options: Any = {"mean": self.dataset.mean, "std": self.dataset.std, "device": self.device}
        return Finish(LoaderOptions(batch_size=1, **options), self.feature.channels)

    @functools.cached_property
    def _transforms(self) -> Sequence[Callable[[Any], Any]]:
        from expt.data.checked_samples import build_transforms

        return build_transforms(getattr(self.dataset, "eval_transforms", None) or ())

    def _batch(self, samples: Sample) -> Tensor:
        images = as_tensor(samples) if are_arrays(samples) else self.picture(samples)[0]
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] != (channels := self.feature.channels):
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        normalised: Tensor = self._normalise(images.to(self.device, copy=True))
        return normalised

    def picture(self, given: Any) -> tuple[Tensor, tuple[int, int]]:
        """Return a picture, or that of a path, as the model's size has it, and how it lies.

        These are a tensor [C, H, W], and a height and width. Raise DataError for a damaged one.
        """
        from expt.data.checked_samples import Transformed
        from expt.data.images import Pictures as Opened

        channels, image_size = self.feature.channels, self.feature.image_size
        if channels not in pictures.MODES:
            raise ConfigError(f"a picture: the model takes {channels} channels; give a tensor")
        needed = None if self._transforms else self.dataset.needed
        resize = pictures.stretch if self.targets.each == "pixel" else pictures.fit
        opened = Opened([(given, 0)], channels, image_size, needed=needed, resize=resize)
        picture, _ = opened.opened(0)
        width, height = picture.size
        if not self._transforms:
            return opened.pixels(picture.image), (height, width)
        shape = channels, *image_size
        made = Transformed([(picture.image, 0)], self._transforms, shape, "dataset.eval_transforms")
        return made[0][0], (height, width)

    @property
    def pictures(self) -> tuple[str, ...]:
        return pictures.picture_suffixes()

    @property
    def size(self) -> int | None:
        return super().size or len(self.files)

    def open(self, paths: Sequence[Path]) -> None:
        super().open(paths)
        _ = self._transforms  # once, before threads use them
        if 0 < len(self._opened) < len(self.files):
            raise ConfigError("pictures and arrays: give one of them at a time")
        if note := self.dataset.note("for pictures"):
            warn(note)

    def _open(self, path: str) -> np.ndarray:
        """Return images, or one, as [n, C, H, W]."""
        array, channels, size = samples_of(path), self.feature.channels, self.feature.image_size
        if array.dtype.kind != "f" and array.dtype != "uint8":
            raise ConfigError(f"{path}: holds {array.dtype}; give uint8, or floats from 0 to 1")
        shapes = [(channels, *size), (*size, channels), *([size] if channels == 1 else [])]
        images = array[None] if array.shape in shapes else array
        if images.shape[1:] not in shapes:
            wanted = f"[images, {channels}, {', '.join(map(str, size))}]"
            raise ConfigError(f"{path}: holds {list(array.shape)}, and the model takes {wanted}")
        if images.ndim == 3:
            return images[:, None]
        return images if images.shape[1:] == shapes[0] else images.transpose(0, 3, 1, 2)

    def _checked(self, path: str, part: np.ndarray) -> np.ndarray:
        self.dataset.check_pixels(path, part)
        return part

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield images of arrays; or pictures, decoded by threads ahead of the model."""
        if self._opened:
            yield from super().pieces(size)
            return

        def read(path: str) -> tuple[str, Tensor, tuple[int, int]] | str:
            try:
                return path, *self.picture(path)
            except DataError as error:
                return str(error)

        threads = ThreadPoolExecutor(min(usable_cpus(), 16))
        groups = (self.files[at : at + size] for at in range(0, len(self.files), size))
        begun = (threads.map(read, group) for group in groups)
        try:
            pending = collections.deque(itertools.islice(begun, _AHEAD))
            while pending:
                pending.extend(itertools.islice(begun, 1))
                found = [*pending.popleft()]
                skipped = [each for each in found if isinstance(each, str)]
                good = [each for each in found if not isinstance(each, str)]
                paths, pixels, sizes = zip(*good, strict=True) if good else ((), (), ())
                samples = torch.stack(pixels) if good else ()
                yield Piece([{"path": path} for path in paths], samples, skipped, sizes=sizes)
        finally:
            threads.shutdown(cancel_futures=True)


def are_arrays(given: Any) -> bool:
    """Return whether samples are numbers already: a tensor, an array, or several."""
    if isinstance(given, list | tuple):
        return any(map(are_arrays, given))
    return isinstance(given, torch.Tensor) or (
        isinstance(given, np.ndarray) and given.dtype.kind != "O"
    )


def as_tensor(given: Any) -> Tensor:
    """Return a tensor, or that of an array. Raise ConfigError for another value."""
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(f"a {type(given).__name__}: give a tensor or an array")


def samples_of(path: str) -> np.ndarray:
    """Return the array of a file. Raise ConfigError for one that has no samples of numbers."""
    array = array_of(path)
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
        )
    return array


def array_of(path: str) -> np.ndarray:
    """Return the array of a .npy, mapped into memory, or that of an .npz that has one of NAMES."""
    with reading(Path(path)):
        if path.lower().endswith(".npy"):
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
            return array
        with open(path, "rb") as content, np.lib.npyio.NpzFile(content) as file:
            names = [name for name in file.files if name in NAMES or len(file.files) == 1]
            if not names:
                has = ", ".join(file.files) or "none"
                raise ConfigError(f"{path}: holds the arrays {has}; call one {' or '.join(NAMES)}")
            return np.asarray(file[names[0]])
