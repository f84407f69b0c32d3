"""What a person is told to type: a setting as Hydra's grammar and a shell take it, whatever its
value holds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

_OTHER_THAN_TEXT = {"null", "true", "false", "inf", "nan"}


def quoted(value: object) -> str:
    """`value` as Hydra's command-line grammar takes it."""
    text = str(value)
    if (
        re.fullmatch(r"[A-Za-z./][\w./+-]*", text, re.ASCII)
        and text.lower() not in _OTHER_THAN_TEXT
    ):
        return text
    return (
        "'"
        + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
        + "'"
    )


def literal(value: object) -> str:
    """A value of any kind that a record has, as that grammar takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else str(value).lower()


def unquoted(text: str) -> str:
    """The value that `text` stands for in that grammar, where it is one text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        quote = text[0]
        return re.sub(
            rf"(\\+)({quote}|$)",
            lambda found: found[1][: len(found[1]) // 2] + found[2],
            text[1:-1],
        )
    return re.sub(
        r"\\([\\()[\]{}:=, \t])", r"\1", text
    )  # what Hydra escapes in each of several values


def joined(words: Iterable[str]) -> str:
    """The words for a shell, as shlex has them; but what has quotes of its own is put between
    double ones.
    """
    return " ".join(
        f'"{word}"' if "'" in word and not _IN_QUOTES.search(word) else shlex.quote(word)
        for word in words
    )


_IN_QUOTES = re.compile(r'["$`!\\]')
"""What a shell reads between double quotes."""


def setting(key: str, value: object) -> str:
    """`key=value` for a shell."""
    return joined([f"{key}={quoted(value)}"])
