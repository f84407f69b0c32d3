"""LSUN's scenes, each of a class in a database of its own.

torchvision's class writes what it has pickled into the current folder, and reads it from there
again; and a database that is open must not be used in a process that is forked afterwards, as those
that read samples are."""

from __future__ import annotations

import bisect
import importlib
import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset


class Scenes(Dataset[tuple[Any, int]]):
    """The images of `classes`, as in ["bedroom_train", "tower_train"], below `root`.

    Raises ImportError without lmdb, OSError for what is no such database.
    """

    def __init__(self, root: Path, classes: Sequence[str]) -> None:
        self.classes = [name.rpartition("_")[0] for name in classes]
        self._folders = [root / f"{name}_lmdb" for name in classes]
        self._opened: dict[int, Any] = {}
        """In this process, by the number of the class."""
        self._process = os.getpid()
        self._keys = [self._keys_of(number) for number in range(len(classes))]
        self._ends = list(itertools.accumulate(map(len, self._keys)))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def targets(self) -> list[int]:
        """The class of each image."""
        return [number for number, keys in enumerate(self._keys) for _ in keys]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        number = bisect.bisect_right(self._ends, index)
        key = self._keys[number][index - self._ends[number]]  # from its end
        with self._database(number).begin() as reading:
            from PIL import Image  # late: of this set alone

            return Image.open(io.BytesIO(reading.get(key))).convert("RGB"), number

    def _keys_of(self, number: int) -> list[bytes]:
        with self._database(number).begin() as reading:
            return list(reading.cursor().iternext(keys=True, values=False))

    def _database(self, number: int) -> Any:
        if self._process != os.getpid():  # forked since
            self._close()
        if number not in self._opened:
            lmdb: Any = importlib.import_module("lmdb")
            how = {
                "readonly": True,
                "lock": False,
                "readahead": False,
                "meminit": False,
                "create": False,
            }
            try:
                self._opened[number] = lmdb.open(str(self._folders[number]), **how)
            except lmdb.Error as error:
                raise OSError(str(error)) from error
        return self._opened[number]

    def _close(self) -> None:
        for database in self._opened.values():
            database.close()
        self._opened.clear()
        self._process = os.getpid()
