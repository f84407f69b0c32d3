"""Pictures by the names that a table gives them: ends of paths, with suffix or without."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Mapping, Sequence

from expt.data.plain_text import composed
from expt.errors import DataError


class Pictures:
    """Pictures below a folder, found by the names that a table may give them."""

    def __init__(self, root: str, files: Sequence[str]) -> None:
        below = functools.cache(functools.partial(os.path.relpath, start=root))
        parts = map(os.path.split, files)
        paths = [os.path.join(below(folder or "."), name) for folder, name in parts]
        self.files, self.paths = files, [composed(path.removeprefix("./")) for path in paths]
        self._places = collections.defaultdict[str, list[int]](list)
        for place, path in enumerate(self.paths):
            for name in {os.path.basename(path), os.path.splitext(os.path.basename(path))[0]}:
                self._places[name].append(place)

    def find(self, name: str) -> list[int]:
        """Return the places of the pictures that `name` may mean, with its suffix or without.

        It may be a path from the root, from a folder below it or from one above it.
        """
        wanted = composed(os.path.normpath(name.strip().replace("\\", "/")))
        found = list[tuple[bool, int]]()
        for place in self._places.get(os.path.basename(wanted), ()):
            path = self.paths[place]
            if os.path.basename(path) != os.path.basename(wanted):
                path = os.path.splitext(path)[0]
            if f"/{path}".endswith(f"/{wanted}") or f"/{wanted}".endswith(f"/{path}"):
                found.append((path == wanted, place))
        exact = any(is_exact for is_exact, _ in found)
        return [place for is_exact, place in found if is_exact or not exact]

    def rows_of(self, names: Sequence[str], at: str) -> tuple[dict[int, int], list[str]]:
        """Return the row of each place whose picture is named, and the names of no picture.

        Raise DataError where a name is that of several pictures, or two rows name one picture.
        """
        row_of, missing = dict[int, int](), list[str]()
        for row, name in enumerate(names):
            if (place := self.place(name, f"{at}: row {row + 1}")) is None:
                missing.append(name or "an empty cell")
            elif row_of.setdefault(place, row) != row:
                twice = f"rows {row_of[place] + 1} and {row + 1}"
                raise DataError(f"{at}: {twice} both name {self.paths[place]}; keep one")
        return row_of, missing

    def place(self, name: str, at: str) -> int | None:
        """Return the place of the picture, or None. Raise DataError where it may be several."""
        places = self.find(name) if name else []
        if len(places) > 1:
            several = " and ".join(self.paths[place] for place in places[:2])
            fix = "name the folder of one by dataset.root, or write its path into the table"
            raise DataError(f"{at}: {name} may be {several}; {fix}")
        return places[0] if places else None

    def column_in(self, head: Mapping[str, Sequence[str]], at: str) -> str | None:
        """Return the column whose first texts name most pictures; with suffixes, if one has them.

        Each picture counts once: else a column of classes 0 to 9 would count each row for one of
        ten. Raise DataError where another column, such as one that counts the rows, may be it.
        """
        names, found = {*map(os.path.basename, self.paths)}, dict[str, tuple[bool, int]]()
        rows = dict[str, list[tuple[int, ...]]]()
        for column, texts in head.items():
            there = {text: tuple(self.find(text)) for text in {*texts} - {""}}
            wholes = (text.replace("\\", "/") for text, places in there.items() if places)
            is_whole = any(os.path.basename(text) in names for text in wholes)
            found[column] = is_whole, len({*there.values()} - {()})
            rows[column] = [there.get(text, ()) for text in texts]
        best = max(found, key=found.__getitem__, default="")
        if not best or not found[best][1]:
            return None
        for column, (is_whole, number) in found.items():
            differs = any(x and y and x != y for x, y in zip(rows[column], rows[best], strict=True))
            are_ids = sum(map(bool, rows[column])) == number > max(1, len(rows[column]) / 2)
            if differs and are_ids and is_whole == found[best][0]:
                fault = f"columns {best} and {column} both name pictures, each in other rows"
                raise DataError(f"{at}: {fault}; remove one, or write names with their suffix")
        return best
