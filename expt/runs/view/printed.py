"""What a run's workers print, as it comes into their logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from expt.runs.paths import RunPaths

MAX_BYTES, MAX_LAST_BYTES = 32 * 1024, 128 * 1024
"""Of a worker's log that are read at a time, and at the end: who prints without end must not hold up the rest."""


class Printed:
    """The lines that are new since the last look; what the logs hold at first is none of them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read = {log: log.stat().st_size for log in self._logs()}

    def _logs(self) -> list[Path]:
        return sorted(self._paths.stdout(0, 0).parents[2].glob(f"*/*/{self._paths.stdout(0, 0).name}"))

    def new(self, *, last: bool = False) -> Iterator[tuple[int, str]]:
        """Rank and line of each; one that is still being written is left for later, unless this is the `last` look."""
        for log in self._logs():
            read = self._read.get(log, 0)
            try:
                if (size := log.stat().st_size) <= read:
                    continue
                with log.open("rb") as file:
                    file.seek(read)
                    text = file.read(MAX_LAST_BYTES if last else MAX_BYTES)
            except OSError:  # removed meanwhile
                continue
            whole = text if last or len(text) == MAX_BYTES else text[: text.rfind(b"\n") + 1]
            self._read[log] = read + len(whole)
            rank = int(log.parent.name)
            for line in whole.decode(errors="replace").splitlines():
                yield rank, line
            if last and read + len(whole) < size:
                yield rank, f"... more in {log}"
