"""Words as Hydra's grammar reads them, without its parser where that can be: it takes 0.5 ms for a
word.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType

from expt.errors import warn

changed = functools.cache(warn)
"""Says once that Hydra is not what it was."""

PARSED = 10_000
"""Most words whose reading is kept."""
_SIMPLE = re.compile(
    r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)="
    r"(?:(?P<int>-?(?:0|[1-9]\d{0,17}))"
    r"|(?P<float>-?(?:0|[1-9]\d{0,17})(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+))"
    r"|(?P<name>(?!(?:true|false|null|inf|nan)$)[A-Za-z_]\w*))",
    re.ASCII | re.IGNORECASE,
)


def simple(word: str) -> Override | None:
    """What Hydra reads in KEY=NUMBER and KEY=NAME, in a hundredth of the time; None for any other
    word.
    """
    return _simple(word) if _are_simple() else None


def _simple(word: str) -> Override | None:
    found = _SIMPLE.fullmatch(word)
    if found is None:
        return None
    whole, fraction, name = found["int"], found["float"], found["name"]
    value = int(whole) if whole else float(fraction) if fraction else name
    return Override(OverrideType.CHANGE, found["key"], ValueType.ELEMENT, value, None, word)


@functools.cache
def _are_simple() -> bool:
    """Whether this version of Hydra reads such words as `_simple` does."""
    try:
        parser, words = OverridesParser.create(), ["a.b=-1", "a=0.1", "a_1=1e-3", "a=b"]
        if repr([parser.parse_override(word) for word in words]) == repr(
            [_simple(word) for word in words]
        ):
            return True
    except (TypeError, AttributeError, ValueError):
        pass
    changed(
        "this version of Hydra reads words in another way; a sweep of thousands of runs starts"
        " later"
    )
    return False


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Let Hydra parse each word once in a command: a choice of 1,000 values takes 0.3 s, five
    times.
    """
    real = OverridesParser.parse_rule

    @functools.lru_cache(maxsize=PARSED)
    def parsed(word: str, rule: str) -> Any:
        return real(parser, word, rule)

    def parse_rule(self: OverridesParser, s: str, rule_name: str) -> Any:
        if self.functions.functions.keys() != known:
            return real(self, s, rule_name)
        return copy.copy(parsed(s, rule_name))  # whoever parses says of each for which loader it is

    parser = OverridesParser.create()
    known = parser.functions.functions.keys()
    with replaced(OverridesParser, real, parse_rule):
        yield


@contextlib.contextmanager
def replaced(owner: type, real: Callable[..., Any], by: Callable[..., Any]) -> Iterator[None]:
    """While entered, a class has another method in the place of its `real` one."""
    setattr(owner, real.__name__, by)
    try:
        yield
    finally:
        setattr(owner, real.__name__, real)
