"""Folders of images: root/train/CLASS/*.jpg, or root/train/{images,masks}; and so in val and test.

Without a folder train, val or test the root itself is train. Images of classes that fit in memory
are decoded once, into the cache, by the first epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Folder, Key, Name, Size
from expt.data import cache, folders, kinds, picture_tables, pictures
from expt.data.checksums import Checksums, of_content, of_files, sampled
from expt.data.folders import left_out, parts_there
from expt.data.kinds.table import names_of, problems_of_columns
from expt.data.pictures import look, look_at, look_at_pair, report_found
from expt.data.plain_text import composed
from expt.data.rows import differ_in_case
from expt.errors import DataError, collected, listed, warn_once
from expt.features import Classes, Features, Labels, Mask, Numbers
from expt.late import torch
from expt.machine import available_memory, usable_cpus

if TYPE_CHECKING:
    from expt.data.overlap import Digests
    from expt.data.source import Source

SMALL = 1 << 24  # bytes of pictures that are read before the first epoch, which takes a second
_SHARE = 0.25  # of the free memory and disk, that `auto` takes
_KINDS = ("images", "masks")  # folders of a segmentation_folder's part


Files: TypeAlias = Mapping[str, Sequence[str]]
"""The pictures of each part."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Folder(kinds.OfPictures):
    """Pictures in a folder, which has train, val and test, or is train itself."""

    root: kinds.Place
    image_size: Size
    channels: Literal[1, 3] = 3
    draft: bool = True
    num_workers: kinds.Readers
    splits: kinds.Splits = None
    group: Annotated[
        Folder | None, Key(result="none", varies="split", only_if={"dataset.group": IS_SET})
    ] = None  # its content is part of the identity

    def _samples(self) -> Mapping[str, Sequence[tuple[str, ...]]]:
        """Return the files of each sample of the parts. Raise DataError for all that is wrong."""
        raise NotImplementedError

    def _names(self, samples: Iterable[tuple[str, ...]]) -> list[str]:
        """Return the files of samples by their paths below the root, sorted."""
        below = functools.cache(functools.partial(os.path.relpath, start=self.root))
        files = map(os.path.split, itertools.chain.from_iterable(samples))
        return sorted(
            os.path.join(below(folder), name).removeprefix("./") for folder, name in files
        )

    def _read(self, samples: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
        """Return the samples that are read beforehand, as for the fingerprint; see `sampled`."""
        names = self._names(samples)
        if len(read := {*sampled(names)}) == len(names):
            return samples
        return [each for each in samples if os.path.relpath(each[0], self.root) in read]

    def _checked(
        self, how: str, samples: Sequence[tuple[str, ...]], look: Callable[..., Any]
    ) -> kinds.Check | None:
        """Look at every picture if they are few, else return a function that does; see `look_at`.

        It raises DataError that names all pictures that cannot be read or used.
        """

        def check(threads: int) -> None:
            with Checksums.below(Path(self.root)) as sums:
                found = look_at(sums, how, samples, look, threads, fitted=self.image_size)
            report_found(self.root, found, self.image_size)

        sizes = (os.path.getsize(x) for x in itertools.chain(*samples) if os.path.exists(x))
        if any(size > SMALL for size in itertools.accumulate(sizes)):
            return check
        check(usable_cpus())
        return None

    def may_validate(self) -> bool:
        return True

    def parts(self) -> Collection[str]:
        return parts_there(self.root, self.splits)

    def fingerprint(self) -> str:
        samples = itertools.chain.from_iterable(self._samples().values())
        found = of_files(Path(self.root), self._names(samples))
        files = [Path(file) for file in self._tables() if os.path.isfile(file)]
        return cache.digest([found, of_content(files)]) if files else found

    def _tables(self) -> list[str]:
        """Return the tables about the pictures, which count by their content."""
        return [] if self.group is None else [self.group]

    def _groups(self, files: Files, *, learns: bool) -> tuple[dict[str, list[int]], list[str]]:
        """Return the groups of the parts that have some, and notes; see `groups_of`."""
        if self.group is None:
            return {}, []
        return picture_tables.groups_of(self.group, self.root, files, learns=learns)

    def _with_groups(self, found: Source, files: Files, how: kinds.Opening) -> Source:
        """Return the pictures with their groups and digests."""
        from expt.data.overlap import digests_of_files

        def digests(part: str) -> Digests:
            with Checksums.below(Path(self.root)) as sums:
                return digests_of_files(files[part], sums)

        groups, notes = self._groups(files, learns=how.trained_on is None)
        tensors = {part: torch.tensor(each) for part, each in groups.items()}
        return dataclasses.replace(found, groups=tensors, digests=digests, notes=notes)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the paths of a split's pictures; of val those of train, if it is held out."""
        samples = self._samples()
        chosen = samples[split if split in samples else "train"]
        return lambda index: {"path": chosen[index][0]}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageFolder(_Folder, kinds.Images):
    """Images in a folder for each class."""

    name: Literal["image_folder"]
    labels: Annotated[
        Folder | None, Key(result="none", varies="source", only_if={"dataset.labels": IS_SET})
    ] = None  # its content is part of the identity
    target: Annotated[
        Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None,
        Key(only_if={"dataset.target": IS_SET}),
    ] = None
    standardise_targets: Annotated[
        bool, Key(evaluate=True, only_if={"dataset.standardise_targets": True})
    ] = False
    cache: Annotated[Literal["auto"] | bool, Key(result="none")] = "auto"
    eval_transforms: Annotated[
        tuple[dict[str, Any], ...] | None,
        Key(
            evaluate=True,
            only_if={"dataset.eval_transforms": IS_SET},
            example="'dataset.eval_transforms=[{_target_: torchvision.transforms.v2.CenterCrop,"
            " size: 224}]'",
        ),
    ] = None

    OFFERS = (Classes, Labels, Numbers)

    def problems(self, task: Any) -> list[str]:
        problems = problems_of_columns("target", self.target or (), self.standardise_targets, task)
        if self.transforms and self.cache is True:
            fault = "dataset.transforms read each image as it is; use auto"
            problems.append(f"dataset.cache=true: {fault}")
        if self.labels is None and (self.target or task.takes in (Labels, Numbers)):
            key = f"dataset.target={self.target}" if self.target else f"task={task.name}"
            problems.append(f"{key}: needs a list of labels, e.g. dataset.labels=train.csv")
        return problems

    def _samples(self) -> Mapping[str, list[tuple[str, ...]]]:
        if self.labels is not None:
            return {part: [(file,) for file in x] for part, x in self._listed().parts.items()}
        found = list_parts(self.root, self.splits)
        return {part: [(file,) for file in each.files] for part, each in found.items()}

    def parts(self) -> Collection[str]:
        return super().parts() if self.labels is None else self._listed().parts

    def _tables(self) -> list[str]:
        own = [] if self.labels is None else [str(picture_tables.path_of(self.labels, self.root))]
        return [*super()._tables(), *own]

    def _listed(self) -> picture_tables.Listed:
        assert self.labels is not None
        return picture_tables.match(self.labels, self.root, self.splits)

    def described(self, task: Any) -> str:
        if self.labels is None:
            return ""
        first, found = next(iter(self._listings(task).values())), self._listed()
        kind = f"{len(first.classes)} classes" if first.classes else "numbers"
        number = sum(map(len, found.parts.values()))
        name, columns = found.table.path.name, listed(first.columns)
        return f"{name}: {number:,} pictures by {found.column}; target {columns} ({kind})"

    def _listings(
        self, task: Any, trained_on: Features | None = None, *, learns: bool = False
    ) -> dict[str, Listing]:
        """Return the parts, labelled by their folders, or by the list as a `task` takes it."""
        if self.labels is None:
            return list_parts(self.root, self.splits, self.group)
        found, takes = self._listed(), getattr(task, "takes", Classes)
        names = names_of(self.target or ())
        rows = found.answers(names, takes, trained_on, learns=learns)
        targets, folders = iter(rows.targets[:].tolist()), parts_there(self.root)
        listings = dict[str, Listing]()
        for part, files in found.parts.items():
            labels = [*itertools.islice(targets, len(files))]
            labels = labels if rows.class_names else [*map(tuple, labels)]
            folder, names, columns = folders[part], rows.class_names, rows.target_names
            listings[part] = Listing(folder, [*files], labels, names, columns=columns)
        return listings

    def prepare(self, task: Any = None, *, learns: bool = True) -> kinds.Check | None:
        """Make room for the images in the cache, unless it is false or too small.

        For transforms none are decoded. Raise DataError where cache=true and the cache cannot be
        written.
        """
        listings = self._listings(task, learns=learns)
        self._warn(listings, learns=learns)
        samples: Sequence[tuple[str, ...]] = [
            (file,) for listing in listings.values() for file in listing.files
        ]
        if self._takes_cache(len(samples)):
            with Checksums.below(Path(self.root)) as sums:
                for listing in listings.values():
                    self._make_room(listing, sums)
        else:
            samples = self._read(samples)
        mode = pictures.MODES[self.channels]
        return self._checked(f"look {mode}", samples, functools.partial(look, mode=mode))

    def _warn(self, listings: Mapping[str, Listing], *, learns: bool) -> None:
        """Warn of odd files, labels and groups. Raise DataError for groups that are wrong."""
        if self.labels is None:
            folders.warn_of_others(self.root)
            self._look_for_list(listings, learns=learns)
        self._groups(_files_of(listings), learns=learns)
        for note in () if self.labels is None else self._listed().notes:
            warn_once(note)
        for part, listing in listings.items():
            listing.report(part)
            for note in differ_in_case("classes", listing.classes or listing.columns):
                warn_once(note)

    def _takes_cache(self, number: int) -> bool:
        """Return whether a `number` of images are decoded into the cache."""
        num_bytes = number * self.channels * math.prod(self.image_size)
        there = next(filter(Path.exists, (cache.cache_dir(), *cache.cache_dir().parents)))
        room = min(available_memory(), shutil.disk_usage(there).free)
        fits = self.cache == "auto" and num_bytes <= _SHARE * room
        return (fits or self.cache is True) and not self.transforms

    def _look_for_list(self, listings: Mapping[str, Listing], *, learns: bool) -> None:
        """Warn of a list that labels pictures otherwise than their folders.

        Raise DataError to learn from where all that it names are of one of these classes.
        """
        of_file = dict[str, int]()
        for each in listings.values():
            of_file.update(zip(map(os.path.normpath, each.files), each.labels, strict=True))
        found = picture_tables.proposed(self.root, of_file, self.group)
        if found and found.is_one and learns:
            fix = "if the folders are the classes, move the list elsewhere"
            fault = f"a list labels pictures that lie in one folder: {found.words}; {fix}"
            raise DataError(f"dataset.root={self.root}: {fault}")
        if found:
            note = f"a list labels these pictures otherwise than their folders: {found.words}"
            warn_once(f"{self.root}: {note}")

    def _make_room(self, listing: Listing, sums: Checksums) -> None:
        """Make room for images in the cache, which their readers fill; a full one is sealed.

        Files that can't be read are found when they are looked at.
        """
        number, shape = len(listing.files), (self.channels, *self.image_size)
        try:
            with contextlib.suppress(DataError):
                name = _entry(listing, self, sums.of) or ""
                write = functools.partial(cache.new_images, number=number, shape=shape)
                cache.fill_entry(name, write, cache.CachedImages)
                if images := cache.read_entry(name, cache.CachedImages):
                    images.seal()
        except (OSError, NotImplementedError) as error:  # a full disk, one without locks
            if self.cache is True:
                fix = "set EXPT_CACHE to a folder with room, or use dataset.cache=false"
                fault = f"{cache.cache_dir()} cannot be written ({error}); {fix}"
                raise DataError(f"dataset.cache=true: {fault}") from error

    def open(self, how: kinds.Opening) -> Source:
        """Read pictures one by one until they are in the cache, and then from there."""
        from expt.data.images import of_targets, pictures_of

        listings = self._listings(how.task, how.trained_on)
        pairs = {part: [(file, None) for file in each.files] for part, each in listings.items()}
        targets = {part: torch.tensor(each.labels) for part, each in listings.items()}
        with Checksums.below(Path(self.root)) as sums:
            parts = pictures_of(self, pairs, targets, sums)
            for part, each in listings.items():
                name = None if self.cache is False else _entry(each, self, sums.of_unchanged)
                cached = cache.read_entry(name, cache.CachedImages) if name else None
                parts[part] = dataclasses.replace(parts[part], cached=cached)
        first = next(iter(listings.values()))
        found = of_targets(self, parts, first.classes, first.columns, how)
        return self._with_groups(found, _files_of(listings), how)


class Listing(NamedTuple):
    """The images of one part, class by class."""

    folder: Path
    """root/train, root/val or root/test, or the root"""
    files: list[str]
    labels: list[Any]
    """the places of classes, or tuples of numbers"""
    classes: tuple[str, ...]
    left_out: str = ""
    """The number of other files, and of each suffix."""
    columns: tuple[str, ...] = ()
    """the targets in a list of labels"""

    def report(self, part: str) -> None:
        """Warn of files that are left out, and of classes without an image."""
        folders.report_left_out(self.folder, self.left_out, "picture in a class folder")
        if lacking := sorted({*range(len(self.classes))} - {*self.labels}):
            names = listed(self.classes[label] for label in lacking)
            warn_once(f"{self.folder}: {part} has no image of {names}")


def _files_of(listings: Mapping[str, Listing]) -> Files:
    return {part: listing.files for part, listing in listings.items()}


def list_parts(
    root: str | Path, splits: Sequence[str] | None = None, groups: str | None = None
) -> dict[str, Listing]:
    """Return the images of each part that is there, in the order of torchvision's ImageFolder.

    Classes are the folders of train, or of all parts without train. The file `groups` may lie among
    the images. Raise DataError for a folder that is missing or has no images, a class that train
    has none of, and files that are none.
    """
    parts = parts_there(root, splits)
    named = [parts["train"]] if "train" in parts else [*parts.values()]
    classes = tuple(
        sorted({composed(name) for folder in named for name in folders.subfolders(folder)})
    )
    if not classes or (parts.get("train") == Path(root) and len(classes) == 1):
        missing = "no class folders in" if Path(root).is_dir() else "no folder"
        found = picture_tables.proposed(str(root), {}, groups)
        fix = f"; a list labels these pictures: {found.words}" if found else ""
        raise DataError(
            f"dataset.root={root}: {missing} {named[0]}: expected {root}/train/CLASS/IMAGE, and so"
            f" in val and test, or {root}/CLASS/IMAGE of several classes{fix}"
        )
    listings, problems = dict[str, Listing](), list[str]()
    for part, folder in parts.items():
        start = len(str(folder)) + 1
        every = folders.files_below(folder)
        images: dict[str, list[str]] = {name: [] for name in classes}
        for file in folders.of_suffix(every, pictures.picture_suffixes()):
            name, inside, _ = file[start:].partition(os.sep)
            if inside:
                images.setdefault(composed(name), []).append(file)
        files = [file for several in images.values() for file in several]
        rest = left_out(every, [*files, os.path.abspath(groups or "")])
        problems += _problems(part, folder, images, len(classes), rest)
        labels = [label for label, several in enumerate(images.values()) for _ in several]
        listings[part] = Listing(folder, files, labels, classes, rest)
    if problems:
        raise DataError(problems)
    return listings


def _problems(
    part: str, folder: Path, images: dict[str, list[str]], known: int, rest: str
) -> Iterator[str]:
    """Yield the errors in a part; its first `known` classes are those of train."""
    if unknown := [*images][known:]:
        fix = "add it, or remove the folder here"
        yield f"{folder}: train has no class {', '.join(unknown)}; {fix}"
    empty = [str(folder / name) for name, files in images.items() if not files]
    if (part == "train" and empty) or len(empty) == known:
        fix = f"add some, or remove the folder, or leave {part} out by dataset.splits"
        other = f"other files in {part}: {rest or 'none'}"
        yield f"no images in the class folder {listed(empty)}; {fix} ({other})"


def _entry(
    listing: Listing, dataset: ImageFolder, checksum: Callable[[str], str | None]
) -> str | None:
    """Return the cache's entry: another for another content; None where a file was not read yet."""
    shape = dataset.channels, *dataset.image_size
    how = [str(listing.folder.resolve()), *map(str, shape), *(["draft"] if dataset.draft else [])]
    where = cache.digest(how)
    words, start = list[str](), len(str(listing.folder)) + 1
    for file, label in zip(listing.files, listing.labels, strict=True):
        if (content := checksum(file)) is None:
            return None
        words += (file[start:], str(label) if listing.classes else "", content)
    return f"image_folder-{listing.folder.name}-{where}.{cache.digest(words)}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationFolder(_Folder):
    """Images and masks by the same names."""

    name: Literal["segmentation_folder"]
    num_classes: Annotated[int, Field(ge=2)]

    OFFERS = (Mask,)

    def mask_classes(self) -> int:
        return self.num_classes

    def problems(self, task: Any) -> list[str]:
        return self.problems_of_masks(task)

    def _samples(self) -> dict[str, list[tuple[str, ...]]]:
        parts = parts_there(self.root, self.splits)
        return dict(zip(parts, collected(list_pairs, parts.values()), strict=True))

    def prepare(self, task: Any = None, *, learns: bool = True) -> kinds.Check | None:
        folders.warn_of_others(self.root)
        pairs = self._samples()
        self._groups(_images_of(pairs), learns=learns)
        for part, folder in parts_there(self.root, self.splits).items():
            every = [x for kind in _KINDS for x in folders.files_below(folder / kind)]
            taken = itertools.chain(*pairs[part], [os.path.abspath(self.group or "")])
            rest = left_out(every, taken)
            folders.report_left_out(folder, rest, "picture in images or masks")
        samples = [*itertools.chain.from_iterable(pairs.values())]
        values = self.mask(task) if task else None
        mode = pictures.MODES[self.channels]
        look = functools.partial(look_at_pair, mode=mode, values=values)
        return self._checked(f"image and mask {mode} {values}", self._read(samples), look)

    def open(self, how: kinds.Opening) -> Source:
        from expt.data.images import of_masks

        pairs = self._samples()
        with Checksums.below(Path(self.root)) as sums:
            found = of_masks(self, pairs, how, sums)
        return self._with_groups(found, _images_of(pairs), how)


def _images_of(pairs: Mapping[str, Sequence[tuple[str, ...]]]) -> Files:
    return {part: [image for image, _ in several] for part, several in pairs.items()}


def list_pairs(folder: Path) -> list[tuple[str, ...]]:
    """Return the image and the mask of each sample of a part, sorted by their path in `images`.

    Raise DataError for a missing folder, and for every image or mask without the other.
    """
    images, masks = (_by_stem(folder / kind) for kind in _KINDS)
    problems = [
        f"{images[stem]} has no mask {folder / 'masks' / stem}.png"
        if stem in images
        else f"{masks[stem]} has no image in {folder / 'images'}"
        for stem in sorted(images.keys() ^ masks.keys())
    ]
    if problems:
        raise DataError(problems)
    return [(image, masks[stem]) for stem, image in images.items()]


def _by_stem(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in folders.files_below(folder, pictures.picture_suffixes()):
        stem = composed(os.path.splitext(os.path.relpath(file, folder))[0])
        if stem in found:
            raise DataError(f"{found[stem]} and {file} have one name; rename or remove one of them")
        found[stem] = file
    if not found:
        names = "NAME.jpg in images and NAME.png in masks"
        where = "of train, val and test, or of dataset.root itself"
        raise DataError(f"no pictures in {folder}: expected {names}, {where}")
    return found
