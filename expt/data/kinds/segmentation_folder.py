"""A folder of images with masks of class numbers: root/{train,val,test}/{images,masks}."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Size
from expt.data.checksums import of_files
from expt.data.image_files import EXTENSIONS, files_below, names_of_parts, parts_there
from expt.data.kind import DatasetConfig, Place, Readers, problems_of_masks
from expt.errors import DataError

if TYPE_CHECKING:
    import torch

    from expt.data.source import Source


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationFolder(DatasetConfig):
    """Images and masks by the same names."""

    name: Literal["segmentation_folder"]
    root: Place
    num_classes: Annotated[int, Field(ge=2)]
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Readers

    TASKS = ("segmentation",)
    may_have_val = True

    def has_masks(self, segments: bool) -> bool:
        """See DatasetConfig."""
        return True

    def mask_classes(self) -> int:
        """See DatasetConfig."""
        return self.num_classes

    def problems(self, task: Any) -> list[str]:
        """See DatasetConfig."""
        return problems_of_masks(self, task)

    def parts(self) -> Collection[str]:
        """See DatasetConfig."""
        return parts_there(self.root)

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig."""
        for part in parts_there(self.root):
            list_pairs(Path(self.root), part)

    def fingerprint(self) -> str:
        """See DatasetConfig."""
        self.prepare()
        return of_files(Path(self.root), names_of_parts(self.root))

    def open(
        self, task: Any, device: torch.device, num_workers: int, trained_on: Any = None
    ) -> Source:
        """See DatasetConfig."""
        from expt.data import masks

        values, root = masks.values_of(self, task), Path(self.root)
        folders = {
            part: masks.MaskFolder(list_pairs(root, part), self.image_size, values, self.channels)
            for part in parts_there(root)
        }
        shape = self.channels, *self.image_size
        return masks.of_masks(folders, shape, self.num_classes, num_workers)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the paths of a split's images; of val those of train, if it is held out."""
        there = "train" if split == "val" and "val" not in parts_there(self.root) else split
        paths = [pair.image for pair in list_pairs(Path(self.root), there)]
        return lambda index: {"path": paths[index]}


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    image: str
    mask: str


def list_pairs(root: Path, part: str) -> list[Pair]:
    """Return the pairs of one part, sorted by their path below `images`.

    Raise DataError for a missing folder, and for an image or a mask without the other.
    """
    images, masks = (_by_stem(root, root / part / kind) for kind in ("images", "masks"))
    for stem in sorted(images.keys() ^ masks.keys()):
        if stem in images:
            raise DataError(f"{images[stem]} has no mask {root / part / 'masks' / stem}.png")
        raise DataError(f"{masks[stem]} has no image in {root / part / 'images'}")
    return [Pair(image, masks[stem]) for stem, image in images.items()]


def _by_stem(root: Path, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files_below(folder, EXTENSIONS):
        stem = os.path.splitext(os.path.relpath(file, folder))[0]
        if stem in found:
            raise DataError(f"{found[stem]} and {file} have one name; rename or remove one of them")
        found[stem] = file
    if not found:
        raise DataError(
            f"dataset.root={root}: no pictures in {folder}: expected {root}/train/images/NAME.jpg"
            f" and {root}/train/masks/NAME.png, and so in val and test ({', '.join(EXTENSIONS)})"
        )
    return found
