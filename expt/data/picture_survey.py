"""Look at pictures and masks before they are trained on: which are unusual, which are wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from expt import progress
from expt.data.folders import warn_once
from expt.data.pictures import Picture, numbers_of_mask, open_picture
from expt.errors import DataError, collected, listed
from expt.features import Mask

if TYPE_CHECKING:
    from expt.data.checksums import Checksums

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
