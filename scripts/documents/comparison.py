"""Whether what a command has printed is what a page shows: numbers to the digit, times and dates as
patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MEASURED = (
    (r"^(\[[^]]*\] )?[\w' ]+: .* s (so far|left)$", ""),  # reported where it takes ten seconds
    (r"  +\d+:\d\d(:\d\d)? left", ""),  # told where it is over a second
    (r"\d{4}-\d\d-\d\d([/_ T]\d\d[-:]\d\d([-:]\d\d)?)?", "DATE"),
    (r"\b(\w+)/s +[\d,.]+", r"\1/s N"),
    (r"[\d,.]+ (\w+)/s", r"N \1/s"),
    (r"(?<![\w.])\d[\d,]*(\.\d+)? (s|ms|min|h)\b", "TIME"),
    (r"(?<![\w.])\d[\d,]*(\.\d+)? (B|KB|KiB|MB|MiB|GB|GiB)\b", "SIZE"),
    (r"\btfevents\.[\w.-]+", "tfevents"),
    (r"[─━═-]{3,}", "---"),
    (r"\brank \d+ of", "rank R of"),  # all of them fail alike
    (r"/logs/\d+/\d+/", "/logs/A/R/"),
    (r"\b[0-9a-f]{12}\b", "HASH"),
    (r" in all$", ""),  # of a sweep's first runs
)
"""What no two runs have in common, and what stands for it."""
RUN_OF_A_SWEEP = re.compile(r"^\[\d+/(\d+)\] ")
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?(e-?\d+)?")


def pattern(line: str, *, exact: bool = True) -> str:
    """The line without what differs from run to run, or also, if not `exact`, from machine to
    machine.
    """
    for measured, name in MEASURED:
        line = re.sub(measured, name, line)
    if not exact:
        line = re.sub(r" best$", "", NUMBER.sub("N", line))
    return " ".join(line.split())


def difference(shown: Sequence[str], printed: Sequence[str], *, exact: bool = True) -> str | None:
    """The first line that is other than the page has it; None where there is none.

    `...` is any number of lines.

    The runs of a sweep may end in any order.
    """
    left = [pattern(line, exact=exact) for line in shown]
    right = [pattern(line, exact=exact) for line in printed]
    if any(line == "..." for line in left):
        return _missing(left, right)
    expected, found = (
        sorted(filter(_of_a_sweep, lines), key=_unnumbered) for lines in (left, right)
    )
    for one, other in zip(map(_unnumbered, expected), map(_unnumbered, found), strict=False):
        if one != other:
            return f"shown    {one}\nprinted  {other}"
    rest, others = (
        [line for line in lines if line and not _of_a_sweep(line)] for lines in (left, right)
    )
    for index in range(max(len(rest), len(others))):
        one, other = (
            lines[index] if index < len(lines) else "(nothing)" for lines in (rest, others)
        )
        if one != other:
            return f"shown    {one}\nprinted  {other}"
    return None


def _missing(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """The first line that does not come, in order, among those printed; adjacent ones need not
    be.
    """
    runs = {_unnumbered(line) for line in printed if _of_a_sweep(line)}
    rest = iter([line for line in printed if not _of_a_sweep(line)])
    for line in shown:
        if line in ("...", ""):
            continue
        if not (_unnumbered(line) in runs if _of_a_sweep(line) else line in rest):
            return f"shown    {line}\nprinted  none such, or in another order:\n" + "\n".join(
                printed
            )
    return None


def _of_a_sweep(line: str) -> bool:
    return RUN_OF_A_SWEEP.match(line) is not None


def _unnumbered(line: str) -> str:
    return RUN_OF_A_SWEEP.sub(r"[/\1] ", line)
