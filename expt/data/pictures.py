"""Pictures and masks as a viewer shows them, and a look at all of them. Free of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt import progress
from expt.errors import DataError, ExptError, collected, first_line, listed, warn_once
from expt.features import Mask
from expt.late import Image, np

if TYPE_CHECKING:
    from expt.data.checksums import Checksums

MODES = {1: "L", 3: "RGB"}
"""Pillow's, by channels"""
ORIENTATION = 0x0112  # the EXIF tag
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""Keys in which Pillow keeps metadata with an orientation."""
_JPEGS = ("JPEG", "MPO")
_OF_NUMBERS = ("1", "L", "P", "I", "I;16")  # modes with one number for each pixel
FOUND = {
    "turned": "turned upright by EXIF",
    "masks": "with masks that were turned with them",
    "kept": "with masks left as they are, whose size does not show whether to turn them",
    "transparent": "with transparency laid on white",
    "frames": "of several frames, of which the first is taken",
    "enlarged": "smaller than dataset.image_size{size}, and enlarged to it",
}
"""Notes of pictures; a colour of a mask's palette is another, such as `3=00ff00`."""
_AT_A_TIME = 32  # files that a thread looks at


@dataclass(frozen=True)
class Picture:
    """A picture as a viewer shows it, and how it lies in its file."""

    image: Image.Image
    size: tuple[int, int]
    """the width and height in its file, upright"""
    orientation: int = 1
    """how it lies there, from 1, upright, to 8"""
    notes: frozenset[str] = frozenset()
    """those of FOUND that it has"""


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


def open_picture(
    source: Any,
    mode: str | None = None,
    name: object = "",
    needed: tuple[int, int] | None = None,
    *,
    counts: bool = False,
) -> Picture:
    """Return a picture in its own mode or another.

    `source` is a path, a stream, a picture of Pillow's, or one that was opened. It is turned by its
    EXIF orientation; with a `mode` transparent parts lie on white. Of several frames it is the
    first. Where less is `needed` than its height and width, a JPEG is decoded at 1/2, 1/4 or 1/8 of
    its size. With `counts` its notes say whether there are several frames. Raise DataError for
    anything else, by its path, or by the `name` of another.
    """
    with refuse_damaged(source if isinstance(source, str | Path) else name):
        if isinstance(source, Picture):
            found = _shown(source.image, mode)
            notes = source.notes | found.notes
            return dataclasses.replace(source, image=found.image, notes=notes)
        if hasattr(source, "convert"):
            return _shown(source, mode)
        with Image.open(source) as file:
            frames, size = getattr(file, "n_frames", 1) if counts else 1, None
            if needed and file.format in _JPEGS:
                is_lying = orientation_of(file) >= 5
                size = file.size[::-1] if is_lying else file.size
                file.draft(None, needed if is_lying else needed[::-1])
            found = _shown(file, mode)
        notes = found.notes | {"frames"} if frames > 1 else found.notes
        return dataclasses.replace(found, size=size or found.size, notes=notes)


def _shown(image: Image.Image, mode: str | None) -> Picture:
    """Return a picture of Pillow's upright, and in another mode on white."""
    notes = set[str]()
    if mode is None:
        image = image.copy()
    else:
        image, is_transparent = _on_white(_of_8_bits(image))
        image = image.convert(mode)
        notes |= {"transparent"} if is_transparent else set()
    orientation = orientation_of(image)
    image = turned(image, orientation)
    notes |= {"turned"} if orientation > 1 else set()
    return Picture(image, image.size, orientation, frozenset(notes))


def orientation_of(image: Image.Image) -> int:
    """Return how a picture lies by its EXIF, from 1, upright, to 8."""
    if not any(key in image.info for key in _METADATA):
        return 1
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # as a viewer, which shows a picture whose metadata are damaged
        return 1
    return orientation if orientation in range(2, 9) else 1


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return a picture upright that lies by this orientation of EXIF."""
    if orientation == 1:
        return image
    found = image.transpose(list(Image.Transpose)[(0, 3, 1, 5, 4, 6, 2)[orientation - 2]])
    found.info = {key: value for key, value in image.info.items() if key not in _METADATA}
    return found


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


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return a picture in L or RGB, with transparent parts on white; `image` stays as it is.

    Raise ValueError for pixels of an unknown range.
    """
    return _on_white(_of_8_bits(image))[0].convert(mode)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return a picture of 8 bits; Pillow's own `convert` clips 16 bits at 255."""
    image.load()  # before that a PNG may not know of its transparency
    key = image.info.get("transparency")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        pixels = np.asarray(image)
        levels = np.rint(pixels / 257).astype(np.uint8)
        if key is not None:
            levels = np.dstack([levels, np.where(pixels == key, 0, 255).astype(np.uint8)])
        found = Image.fromarray(levels)
        found.info = {key: value for key, value in image.info.items() if key in _METADATA}
        return found
    if image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}; save it with 8 or 16 bits")
    if isinstance(key, tuple) and max(key) > 255:  # of a PNG whose colours have 16 bits
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


def _on_white(image: Image.Image) -> tuple[Image.Image, bool]:
    """Return a picture with its transparent parts on white, and whether there are some."""
    if not image.has_transparency_data:
        return image, False
    image = image.convert("RGBA")
    is_transparent = any(image.getchannel("A").histogram()[:255])
    if is_transparent:
        white = Image.new("RGBA", image.size, "white")
        white.info = image.info
        white.alpha_composite(image)
        image = white
    return image, is_transparent


def numbers_of_mask(mask: Picture, picture: Picture, name: str) -> tuple[np.ndarray, set[str]]:
    """Return the number of each pixel, int64 [height, width], and a note where the picture lies.

    A mask that is as large as the picture in its file, and not as a viewer shows it, is turned with
    it; the note says so, or that it is not known. Raise DataError for a mask in colours, or of
    another size.
    """
    image, notes = mask.image, set[str]()
    if image.mode[:4] not in _OF_NUMBERS:  # I;16B too
        raise DataError(
            f"{name} is a picture of mode {image.mode}; save its mask as a grey or palette PNG of"
            " each pixel's class, 0, 1, ... (255 is ignored: task.ignore_index)"
        )
    lying = picture.size[::-1] if picture.orientation >= 5 else picture.size
    if picture.orientation > 1 and image.size == lying:
        notes.add("kept" if lying == picture.size else "masks")
        if lying != picture.size:
            image = turned(image, picture.orientation)
    if image.size != picture.size:
        one, other = (f"{height}x{width}" for width, height in (image.size, picture.size))
        raise DataError(f"{name} is {one}, and its image {other}; make them one size")
    return np.array(image).astype(np.int64), notes


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


def look(source: Any, mode: str | None, name: object = "") -> Picture:
    """Return a picture whose notes have its other `frames`, too.

    A JPEG is decoded at 1/8 of its size, which reads all of the file.
    """
    return open_picture(source, mode, name, (1, 1), counts=True)


def look_at_pair(source: Any, mask: Any, mode: str, values: Mask | None, name: str = "") -> Picture:
    """Return a picture as `look` does. Raise DataError where it or its mask is wrong."""
    its = mask if isinstance(mask, str) else f"{name}: its mask"
    reads: Any = (
        functools.partial(look, source, mode, name=name),
        functools.partial(open_picture, mask, name=its),
    )
    picture: Picture
    picture, opened = collected(lambda read: read(), reads)
    numbers, notes = numbers_of_mask(opened, picture, its)
    if values:
        values.check_values(numbers, its)
    if opened.image.mode == "P":
        colours = bytes(opened.image.getpalette() or ())
        used = [number for number, count in enumerate(opened.image.histogram()) if count]
        notes |= {f"{each}={colours[3 * each :][:3].hex()}" for each in used}
    return dataclasses.replace(picture, notes=picture.notes | notes)


def look_at(
    sums: Checksums,
    how: str,
    samples: Sequence[Sequence[str]],
    look: Callable[..., Picture],
    threads: int,
    *,
    fitted: tuple[int, int] | None = None,
    key: Callable[[str], str] | None = None,
) -> Counter[str]:
    """Return how many pictures have each note of `FOUND`, or a colour of a mask's palette.

    `look` returns the picture of a sample's files, which is `fitted` to a height and width. It is
    called in `threads`, once for a content, which is noted with `how` it is looked at. The content
    is that of the files, unless a `key` names it. Raise DataError that names all wrong ones.
    """
    least = fitted or (0, 0)

    def key_of(sample: Sequence[str]) -> str | None:
        try:
            return " ".join((how, *map(str, least), *map(key or sums.of, sample)))
        except DataError:
            return None  # `look` raises it

    keys = [*map(key_of, samples)]
    known = {place: sums.get(each) for place, each in enumerate(keys) if each}
    found = {place: text for place, text in known.items() if text is not None}
    new = [place for place in range(len(keys)) if place not in found]

    def note(place: int) -> None:
        picture = look(*samples[place])
        width, height = picture.size
        is_enlarged = height < least[0] or width < least[1]
        notes = picture.notes | {"enlarged"} if is_enlarged else picture.notes
        found[place] = " ".join(sorted(notes))
        if each := keys[place]:
            sums.put(each, found[place])
        here.done += 1

    with progress.phase("looking at pictures", len(new)) as here:
        if threads == 1:  # no pool, whose threads a command would wait for at its end
            collected(note, new)
        else:
            several = (new[at : at + _AT_A_TIME] for at in range(0, len(new), _AT_A_TIME))
            with ThreadPoolExecutor(threads) as pool:
                collected(Future.result, [pool.submit(collected, note, each) for each in several])
    return Counter(word for text in found.values() for word in text.split())


def report_found(root: object, counts: Counter[str], fitted: Sequence[int] | None = None) -> None:
    """Warn of the findings of `look_at`."""
    if found := [f"{counts[word]} {text}" for word, text in FOUND.items() if counts[word]]:
        size = f"=[{','.join(map(str, fitted))}]" if fitted else ""
        warn_once(f"{root}: pictures: {', '.join(found).format(size=size)}")
    numbers = Counter(word.partition("=")[0] for word in counts if "=" in word)
    if different := sorted(number for number, colours in numbers.items() if colours > 1):
        warn_once(
            f"{root}: masks show the numbers {listed(different)} in other colours in other files;"
            " the number is the class: write them with one palette"
        )
