"""What a person, a run or a file's name says, on its way to a terminal or a table: shown as it is,
never obeyed.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

from expt.errors import printable


def cells(*values: object) -> list[Text]:
    """Cells of a rich table: what looks like markup, an emoji's name or an escape sequence is text
    like any other.
    """
    return [Text(printable(str(value))) for value in values]


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line, whatever it holds; a long one is left to the terminal, so that a path in it can
    be copied.
    """
    console.print(Text(printable(text), style), soft_wrap=True)


def setting(value: Any) -> str:
    """A setting as a person writes it: `1e12`, `0.05` and `null`."""
    if value is None:
        return "null"
    if not isinstance(value, float):
        return str(value)
    return re.sub(r"e([+-])0*", lambda found: f"e{found[1].strip('+')}", f"{value:.12g}")


def in_csv(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: a text that begins as one gets an apostrophe."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
