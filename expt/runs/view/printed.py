"""What a run's workers print, as it comes into their logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console

from expt.errors import WARNING, warn
from expt.runs.paths import RunPaths
from expt.runs.view.cells import say

MAX_BYTES, MAX_LAST_BYTES = 32 * 1024, 128 * 1024
"""Of a worker's log that are read at a time, and at the end: who prints without end must not hold
up the rest.
"""


class Printed:
    """The lines that are new since the last look; what the logs hold at first is none of them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read = {log: log.stat().st_size for log in self._logs()}
        self._warned: set[str] = set()

    def _logs(self) -> list[Path]:
        names = (self._paths.stdout(0, 0).name, self._paths.stderr(0, 0).name)
        return sorted(
            log for name in names for log in self._paths.stdout(0, 0).parents[2].glob(f"*/*/{name}")
        )

    def new(self, *, last: bool = False) -> Iterator[tuple[int, str]]:
        """Rank and line of each; one that is still being written is left for later, unless this is
        the `last` look.

        Of what goes to stderr expt's own warnings alone, each once.
        """
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
            printed = log.name == self._paths.stdout(0, 0).name
            for line in whole.decode(errors="replace").splitlines():
                if printed or self._is_new_warning(line):
                    yield rank, line
            if printed and last and read + len(whole) < size:
                yield rank, f"... more in {log}"

    def _is_new_warning(self, line: str) -> bool:
        if not line.startswith(WARNING) or line in self._warned:
            return False
        self._warned.add(line)
        return True


def show_printed(
    console: Console, lines: Iterable[tuple[str, str]], errors: TextIO | None = None
) -> None:
    """Show lines, each with who has printed it; warnings go where a command's own go, or to
    `errors`.
    """
    told = list(lines)
    if plain := [f"[{who}] {line}" for who, line in told if not line.startswith(WARNING)]:
        say(
            console, "\n".join(plain)
        )  # at once: after each, a terminal's live lines are drawn anew
    for who, line in told:
        if line.startswith(WARNING):
            warn(f"[{who}] {line.removeprefix(WARNING)}", errors)
