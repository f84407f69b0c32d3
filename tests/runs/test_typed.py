"""What a person is told to type comes back as it was, through a shell and Hydra's grammar."""

from __future__ import annotations

import shlex

import pytest
from hydra._internal.grammar.utils import escape_special_characters
from hydra.core.override_parser.overrides_parser import OverridesParser

from expt.runs.request import joined, quoted, setting_word, unquoted

VALUES = [
    "a/b.c",
    "a b",
    "it's",
    "a,b=c",
    "a\\'b",
    "№ {7}",
    "lr=0.1",
    "[x]",
    "1e3",
    "null",
    "Nan",
    "ünï",
    "end\\",
    '"',
    "~",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back(value: str) -> None:
    (word,) = shlex.split(setting_word("key", value))
    assert OverridesParser.create().parse_override(word).value() == value
    assert unquoted(quoted(value)) == value
    assert unquoted(escape_special_characters(value)) == value, "as Hydra gives each of several"


def test_a_shell_gets_back_what_is_joined() -> None:
    words = [f"key={quoted(value)}" for value in VALUES]
    assert shlex.split(joined(words)) == words
    assert joined(["a='b=1,c=2'", "a=$b'"]) == """"a='b=1,c=2'" 'a=$b'"'"\'\'"""


def test_what_needs_no_quotes_has_none() -> None:
    assert (
        setting_word("hydra.run.dir", "outputs/2026-11-21/10-00-00")
        == "hydra.run.dir=outputs/2026-11-21/10-00-00"
    )
    assert unquoted('"a b"') == "a b"
    assert unquoted("a'b") == "a'b"
