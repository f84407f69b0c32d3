"""What a page of Markdown asks its reader to write and to type, and what it shows of the
answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|install|needs): (.+?) -->\s*\Z")
"""Above a block: why it is not run, that it installs, or the file or folder that it needs on the
machine.
"""
NAMED = re.compile(r"^(?:# @package _global_\n)?# ([\w./-]+\.\w+)\n")
"""The first line of a block that is a file; Hydra wants its own line before it."""
SHELLS = ("bash", "console", "text")


@dataclass(frozen=True)
class File:
    """A file to write."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command to type."""

    words: str
    shown: tuple[str, ...] = ()
    """The lines that the page has below it; none where it shows nothing."""
    not_run: str | None = None
    """Why nobody can run it everywhere: it needs a GPU, a network, a cluster, ..."""
    installs: bool = False
    span: tuple[int, int] = (0, 0)
    """Where those lines stand in the page's text."""


def steps(text: str) -> Iterator[File | Command]:
    """Files and commands in the order of the page: fenced blocks, and none that is indented or
    among the text.
    """
    for block in FENCE.finditer(text):
        kind, content = block.groups()
        mark = MARK.search(text, 0, block.start())
        said, about = mark.groups() if mark else ("", "")
        why = about if said == "not run" or (said == "needs" and not Path(about).exists()) else None
        installs = said == "install"
        if kind in ("python", "yaml") and (named := NAMED.match(content)):
            yield File(named[1], content)
        elif kind == "bash":
            for line in filter(None, content.splitlines()):
                yield Command(line, not_run=why, installs=installs)
        elif kind in SHELLS:
            yield from _typed(content, block.start(2), why, installs)


def _typed(content: str, begins: int, why: str | None, installs: bool) -> Iterator[Command]:
    """Commands behind a `$`, each with what is shown below it."""
    for found in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE):
        span = (begins + found.start(2), begins + found.end(2))
        yield Command(found[1], tuple(found[2].splitlines()), why, installs, span)


def commands(page: Path) -> list[Command]:
    """Those of a page, also the ones that are not run."""
    return [step for step in steps(page.read_text(encoding="utf-8")) if isinstance(step, Command)]
