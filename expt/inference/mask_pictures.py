"""Predicted masks as pictures in a folder: class numbers, with a palette to look at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.errors import ConfigError
from expt.inference.writing import Writer

if TYPE_CHECKING:
    import numpy as np

    from expt.inference.answers import Answers, Form


class MaskPictures(Writer):
    """A PNG for each sample, of its picture's size, and named as it is below the folder that holds
    them all.
    """

    def __init__(self, folder: Path, paths: Sequence[str], root: str, *, force: bool) -> None:
        """The `paths`, and others that come, lie below `root`.

        Raises ConfigError where two pictures would have one mask, or a mask its picture's place.
        """
        self._folder, self._force = folder, force
        self._beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        """Where they wait for the others."""
        self._root = root
        names: dict[Path, str] = {}
        for path in paths:
            mask = self._named(path)
            if mask in names and names[mask] != path:
                raise ConfigError(
                    f"{names[mask]} and {path} would have one mask {mask}; rename one of them"
                )
            if os.path.abspath(folder / mask) == os.path.abspath(path):
                raise ConfigError(
                    f"--output {folder}: the mask of {path} would take its place; choose another"
                    " folder"
                )
            names[mask] = path

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for place, about in enumerate(answers.about):
            size = answers.sizes[place] if answers.sizes else None
            path = self._beside / self._name(about)
            path.parent.mkdir(parents=True, exist_ok=True)
            _picture(answers.arrays["masks"][place], size).save(path, format="PNG")

    def finish(self) -> None:
        """Give all their names at once; in a folder that holds others, one by one."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()
        if not self._folder.exists():
            self._beside.rename(self._folder)
            return
        for path in sorted(self._beside.rglob("*.png")):
            place = self._folder / path.relative_to(self._beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists() and not self._force:
                raise ConfigError(
                    f"{place}: is there since this command was begun; use --force, or another"
                    " folder"
                )
            path.replace(place)

    def close(self) -> None:
        """See Writer."""
        shutil.rmtree(self._beside, ignore_errors=True)

    def _name(self, about: Any) -> Path:
        if "index" not in about:
            return self._named(about["path"])
        stem = f"{Path(about['path']).stem}_" if "path" in about else ""
        return Path(f"{stem}{about['index']:06d}.png")

    def _named(self, path: str) -> Path:
        below = os.path.relpath(os.path.abspath(path), self._root)
        assert not below.startswith(os.pardir), (path, self._root)
        return Path(below).with_suffix(".png")


def _picture(mask: np.ndarray, size: tuple[int, int] | None) -> Any:
    from PIL import Image

    picture: Any = Image.fromarray(mask)
    if size is not None and picture.size != size[::-1]:
        picture = picture.resize(size[::-1], Image.Resampling.NEAREST)
    if picture.mode == "L":
        picture.putpalette(list(_palette()))  # the numbers stay what they are
    return picture


def _palette() -> Iterator[int]:
    """Pascal VOC's: neighbours differ, and 0 is black."""
    for number in range(256):
        red = green = blue = 0
        for bit in range(8):
            red |= (number >> 3 * bit & 1) << 7 - bit
            green |= (number >> 3 * bit + 1 & 1) << 7 - bit
            blue |= (number >> 3 * bit + 2 & 1) << 7 - bit
        yield from (red, green, blue)
