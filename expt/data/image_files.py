"""Files below a folder, and pictures in them. Free of torch."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from expt import progress
from expt.errors import DataError, ExptError, collected, first_line, listed, warn
from expt.features import Mask
from expt.late import Image, np

if TYPE_CHECKING:
    from expt.data.checksums import Checksums

T = TypeVar("T")
PARTS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""The names that a part's folder may have, in any case."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's, by channels"""
ORIENTATION = 0x0112  # the EXIF tag
FOUND = {
    "turned": "turned upright by EXIF",
    "masks": "with masks that were turned with them",
    "kept": "with masks left as they are, whose size does not show whether to turn them",
    "transparent": "with transparency laid on white",
    "frames": "of several frames, of which the first is taken",
    "enlarged": "smaller than dataset.image_size, and enlarged to it",
}
"""Keys that the `info` of an opened picture may have."""
_AT_A_TIME = 32  # files that a thread looks at
_HIDDEN = (".", "__MACOSX", "@eaDir", "$RECYCLE.BIN")
"""How names begin that are not data; archives of a Mac and network drives have the others."""
_OF_NUMBERS = ("1", "L", "P", "I", "I;16")  # modes with one number for each pixel
_UNREADABLE = frozenset((".heic", ".heif", ".dng", ".cr2", ".cr3", ".nef", ".arw"))
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""Keys in which Pillow keeps metadata with an orientation."""
_JPEGS = ("JPEG", "MPO")


@functools.cache
def picture_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the pictures that Pillow can read, in lower case."""
    from PIL import Image, ImageFile

    Image.init()
    readable = {
        kind
        for kind, (opener, _) in Image.OPEN.items()
        if not (isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile))
        and Image.MIME.get(kind, "image/").startswith("image/")  # no video or document
    }
    return tuple(sorted(suffix for suffix, kind in Image.EXTENSION.items() if kind in readable))


def files_below(folder: str | Path, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files with such names in a folder and below it, each folder's sorted.

    Hidden files and folders are left out. Linked folders are followed, but not in circles.
    """
    found = []
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in _shown(folders) if not _leads_back(where, name)]
        found.append((where, of_suffix(_shown(names), suffixes)))
    return [os.path.join(where, name) for where, names in sorted(found) for name in sorted(names)]


def names_below(folder: str | Path) -> list[str]:
    """Return the paths below `folder` of its files, sorted."""
    return sorted(os.path.relpath(path, folder) for path in files_below(folder))


def _shown(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(_HIDDEN)]


def _leads_back(where: str, name: str) -> bool:
    """Return whether it is a link to a folder that holds one of those on the way here."""
    path = os.path.join(where, name)
    if not os.path.islink(path):
        return False
    target, way = os.path.realpath(path), (Path(where), *Path(where).parents)
    return any(each.resolve().is_relative_to(target) for each in way)


def warn_of_others(root: str) -> None:
    """Warn of folders next to train, val and test, which are not read."""
    parts = parts_there(root)
    read = {path.name for path in parts.values()}
    if Path(root) not in parts.values() and (others := {*subfolders(root)} - read):
        warn_once(f"{root}: reads {listed(sorted(read))}, and leaves out {listed(sorted(others))}")


def subfolders(folder: str | Path) -> list[str]:
    """Return the names of the folders in a folder, or linked there, sorted."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in _shown(names) if os.path.isdir(os.path.join(folder, name)))


def parts_there(root: str | Path, splits: Sequence[str] | None = None) -> dict[str, Path]:
    """Return the folders of train, val and test that there are, or of those in `splits` only.

    A folder that has none of them is train itself. Raise DataError for a split that is not there.
    """
    names = {name.lower(): name for name in subfolders(root)}
    found = {
        part: Path(root) / next(names[each] for each in known if each in names)
        for part, known in PARTS.items()
        if any(each in names for each in known)
    }
    if len(found) == 1 < len(names) and not any(map(subfolders, found.values())):
        found = {}  # it is a class of that name, among others
    return chosen_parts(root, found or {"train": Path(root)}, splits)


def chosen_parts(
    root: object, found: Mapping[str, T], splits: Sequence[str] | None
) -> dict[str, T]:
    """Return the parts in `splits`, or all. Raise DataError for a split that is not there."""
    if missing := sorted({*(splits or ())}.difference(found)):
        raise DataError(f"dataset.splits: {root} has no {missing[0]}, only {', '.join(found)}")
    return {part: each for part, each in found.items() if splits is None or part in splits}


def of_suffix(paths: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the paths with such a suffix, in any case."""
    return [path for path in paths if path.lower().endswith(suffixes)]


def left_out(paths: Iterable[str], taken: Iterable[str]) -> str:
    """Return how many of the paths are not `taken`, their suffixes, share, and first; or ""."""
    every = {*paths}
    if not (rest := sorted(every.difference(taken))):
        return ""
    suffixes = Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in rest)
    each = ", ".join(f"{suffix} {number}" for suffix, number in suffixes.most_common(8))
    fix = "; save HEIC and raw pictures as JPEG or PNG" if {*suffixes} & _UNREADABLE else ""
    first = os.path.basename(rest[0]) if os.path.isabs(rest[0]) else rest[0]
    share = f"{len(rest) / len(every):.1%} of the files, such as {first}"
    return f"{len(rest)} ({each}{fix}), {share}"


@functools.cache
def warn_once(text: str) -> None:
    """Warn, and not again for each run of a sweep."""
    warn(text)


def report_left_out(where: object, files: str, noun: str) -> None:
    """Warn of files that are left out, if there are any; see `left_out`."""
    if files:
        warn_once(f"{where}: left out what is no {noun}: {files}")


def open_picture(
    source: Any,
    mode: str | None = None,
    name: object = "",
    needed: tuple[int, int] | None = None,
    *,
    counts: bool = False,
) -> Any:
    """Return a picture as a viewer shows it, in its own mode or another.

    `source` is a path, a stream or a picture of Pillow's. It is turned by its EXIF orientation;
    with a `mode` transparent parts lie on white. Of several frames it is the first. Where less
    is `needed` than its height and width, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size; see
    `size_of`. With `counts` its `info` says how many `frames` there are. Raise DataError for
    anything else, by its path, or by the `name` of another.
    """
    with refuse_damaged(source if isinstance(source, str | Path) else name):
        if hasattr(source, "convert"):
            source.load()
            return turn(in_mode(source, mode) if mode else source)
        with Image.open(source) as file:
            frames = getattr(file, "n_frames", 1) if counts else 1
            if needed and file.format in _JPEGS:
                is_lying = orientation_of(file) >= 5
                file.info["whole"] = file.size[::-1] if is_lying else file.size
                file.draft(None, needed if is_lying else needed[::-1])
            picture = turn(in_mode(file, mode) if mode else file.copy())
        if frames > 1:
            picture.info["frames"] = frames
        return picture


def size_of(picture: Any) -> tuple[int, int]:
    """Return the width and height of a picture in its file, upright."""
    size: tuple[int, int] = picture.info.get("whole", picture.size)
    return size


def orientation_of(picture: Any) -> int:
    """Return how a picture lies by its EXIF, from 1, upright, to 8."""
    if not any(key in picture.info for key in _METADATA):
        return 1
    try:
        orientation = picture.getexif().get(ORIENTATION, 1)
    except Exception:  # as a viewer, which shows a picture whose metadata are damaged
        return 1
    return orientation if orientation in range(2, 9) else 1


def turn(picture: Any, orientation: int | None = None) -> Any:
    """Return a picture upright, by its EXIF orientation or another; see `info["turned"]`."""
    orientation = orientation or orientation_of(picture)
    if orientation == 1:
        return picture
    turned = picture.transpose(list(Image.Transpose)[(0, 3, 1, 5, 4, 6, 2)[orientation - 2]])
    kept = {key: value for key, value in picture.info.items() if key not in _METADATA}
    turned.info = {**kept, "turned": orientation}
    return turned


@contextlib.contextmanager
def refuse_damaged(name: object) -> Iterator[None]:
    """Raise DataError for an error of Pillow."""
    try:
        yield
    except (ExptError, MemoryError):
        raise
    except Exception as error:  # a decoder raises many kinds for a damaged file
        why = first_line(error)
        raise DataError(
            f"{name} cannot be read as an image ({why}); replace or remove it"
        ) from error


def in_mode(image: Any, mode: str) -> Any:
    """Return a picture in L or RGB, of 16 bits too, which Pillow's own `convert` clips at 255.

    Transparent parts lie on white; `info["transparent"]` says so. Raise ValueError for pixels of
    an unknown range.
    """
    image.load()  # before that a PNG may not know of its transparency
    info, key = image.info, image.info.get("transparency")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        pixels = np.asarray(image)
        levels = np.rint(pixels / 257).astype(np.uint8)
        if key is not None:
            levels = np.dstack([levels, np.where(pixels == key, 0, 255).astype(np.uint8)])
        image = Image.fromarray(levels)
        image.info = {key: value for key, value in info.items() if key in _METADATA}
    elif image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}; save it with 8 or 16 bits")
    elif isinstance(key, tuple) and max(key) > 255:  # of a PNG whose colours have 16 bits
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            white = Image.new("RGBA", image.size, "white")
            white.info = {**image.info, "transparent": True}
            white.alpha_composite(image)
            image = white
    return image.convert(mode)


def look(source: Any, mode: str | None, name: object = "") -> Any:
    """Return a picture like `open_picture`, whose `info` has its other `frames`, too.

    A JPEG is decoded at 1/8 of its size, which reads all of the file.
    """
    return open_picture(source, mode, name, (1, 1), counts=True)


def look_at(
    sums: Checksums,
    how: str,
    samples: Sequence[Sequence[str]],
    look: Callable[..., Any],
    threads: int,
    *,
    fitted: tuple[int, int] | None = None,
    key: Callable[[Any], str] | None = None,
) -> Counter[str]:
    """Return how many pictures have each of `FOUND` in their `info`, or a colour of its `palette`.

    `look` returns the picture of a sample's files, which is `fitted` to a height and width. It is
    called in `threads`, once for a content, which is noted with `how` it is looked at. The content
    is that of the files, unless a `key` names it. Raise DataError that names all wrong ones.
    """
    least = fitted or (0, 0)

    def key_of(sample: Sequence[str]) -> str:
        with contextlib.suppress(DataError):  # `look` raises it
            return " ".join((how, *map(str, least), *map(key or sums.of, sample)))
        return ""

    keys = [*map(key_of, samples)]
    new = [place for place, key in enumerate(keys) if not key or sums.get(key) is None]

    def note(place: int) -> None:
        picture = look(*samples[place])
        width, height = size_of(picture)
        if height < least[0] or width < least[1]:
            picture.info["enlarged"] = True
        words = [word for word in FOUND if word in picture.info]
        sums.put(keys[place], " ".join([*words, *picture.info.get("palette", ())]))
        here.done += 1

    with progress.phase("looking at pictures", len(new)) as here:
        if threads == 1:  # no pool, whose threads a command would wait for at its end
            collected(note, new)
        else:
            several = (new[at : at + _AT_A_TIME] for at in range(0, len(new), _AT_A_TIME))
            with ThreadPoolExecutor(threads) as pool:
                collected(Future.result, [pool.submit(collected, note, each) for each in several])
    return Counter(word for key in keys for word in (sums.get(key) or "").split())


def report_found(root: object, counts: Counter[str]) -> None:
    """Warn of the findings of `look_at`."""
    if found := [f"{counts[word]} {text}" for word, text in FOUND.items() if counts[word]]:
        warn_once(f"{root}: pictures: {', '.join(found)}")
    numbers = Counter(word.partition("=")[0] for word in counts if "=" in word)
    if different := sorted(number for number, colours in numbers.items() if colours > 1):
        warn_once(
            f"{root}: masks show the numbers {listed(different)} in other colours in other files;"
            " the number is the class: write them with one palette"
        )


def mask_of(dataset: Any, task: Any) -> Mask:
    """Return the feature of masks, by the number of classes of the dataset, else of the task."""
    settings = {"ignore_index": task.ignore_index} if hasattr(task, "ignore_index") else {}
    return Mask(num_classes=dataset.mask_classes() or task.num_classes, **settings)


def numbers_of_mask(mask: Any, image: Any, name: str) -> np.ndarray:
    """Return the number of each pixel, int64 [height, width].

    A mask that is as large as its image lies, and not as a viewer shows it, is turned with it.
    `info` of the image says so, or that it is not known. Raise DataError for one in colours, or of
    another size.
    """
    if mask.mode[:4] not in _OF_NUMBERS:  # I;16B too
        raise DataError(
            f"{name} is a picture of mode {mask.mode}; save its mask as a grey or palette PNG of"
            " each pixel's class, 0, 1, ... (255 is ignored: task.ignore_index)"
        )
    orientation, size = image.info.get("turned", 1), size_of(image)
    lying = size[::-1] if orientation >= 5 else size
    if orientation > 1 and mask.size == lying:
        shows = lying != size
        image.info["masks" if shows else "kept"] = True
        mask = turn(mask, orientation) if shows else mask
    if mask.size != size:
        one, other = (f"{height}x{width}" for width, height in (mask.size, size))
        raise DataError(f"{name} is {one}, and its image {other}; make them one size")
    return np.array(mask).astype(np.int64)


def look_at_pair(source: Any, mask: Any, mode: str, values: Mask | None, name: str = "") -> Any:
    """Return a picture as `look` does. Raise DataError where it or its mask is wrong."""
    its = mask if isinstance(mask, str) else f"{name}: its mask"
    reads: Any = (
        functools.partial(look, source, mode, name=name),
        functools.partial(open_picture, mask, name=its),
    )
    picture, opened = collected(lambda read: read(), reads)
    numbers = numbers_of_mask(opened, picture, its)
    if values:
        values.check_values(numbers, its)
    if opened.mode == "P":
        colours = bytes(opened.getpalette())
        used = [number for _, number in opened.getcolors()]
        picture.info["palette"] = [f"{each}={colours[3 * each :][:3].hex()}" for each in used]
    return picture


def fit(image: Any, image_size: tuple[int, int]) -> Any:
    """Scale a picture to cover height and width, then crop it at the centre.

    The bytes are those of torchvision's resize and center_crop, whose import takes a second.
    """
    height, width = image_size
    scale = max(height / image.height, width / image.width)
    covered = (
        max(height, math.floor(image.height * scale)),
        max(width, math.floor(image.width * scale)),
    )
    if covered != (image.height, image.width):
        image = image.resize(covered[::-1], Image.Resampling.BILINEAR)
    top, left = round((covered[0] - height) / 2), round((covered[1] - width) / 2)
    return image.crop((left, top, left + width, top + height))


def stretch(image: Any, image_size: tuple[int, int]) -> Any:
    """Resize a picture to height and width, whatever its shape."""
    return image.resize(image_size[::-1], Image.Resampling.BILINEAR)
