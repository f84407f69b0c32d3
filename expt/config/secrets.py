"""Keep values of `${oc.env:NAME}` out of records and logs: they may be secrets.

A record has the interpolation in its place, which is resolved again where the record is used. A
value that a custom resolver makes of another key with a variable is not found. Free of torch.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from expt.errors import ConfigError, first_line

MIN_LENGTH, MIN_DIGITS = 4, 8
"""Shorter texts, and shorter numbers, are in too many others to be hidden."""
_NUMBER = re.compile(r"[-+.eE\d]+")
_NAME = re.compile(r"[A-Z]?[a-z]+\d{0,2}([_/][A-Z]?[a-z]+\d{0,2})*")
"""A word, such as `loss/val` or `resnet18`, which may be in a record for other reasons."""
_texts: dict[str, str] = {}
"""From hidden texts to written ones. One for the process, since excepthooks write too."""
_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*['\"]?(\w+)")
_COMPOSED = re.compile(r"oc\.env:[^}]*\$\{")
"""The beginning of a variable whose name, or default, is another interpolation."""
_PLAIN, _DEEPEST = re.compile(r"[\w./-]+"), 10
"""A text that means the same within another interpolation; how far references are followed."""
_REFERENCE = re.compile(r"\$\{[^:{}$]*\}")


def interpolations(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of unresolved settings that may hold a variable, and their texts.

    References to other keys are replaced by the values of these, where those can be seen.
    """
    values = dict(leaves(settings))
    texts = {path: _expanded(text, values) for path, text in values.items() if type(text) is str}
    named = [x for x in texts.values() if _VARIABLE.search(x) or _COMPOSED.search(x)]
    for path, text in texts.items():
        is_set = any(name in os.environ for name in _VARIABLE.findall(text))
        if is_set or _COMPOSED.search(text) or (named and _REFERENCE.search(text)):
            yield path, text


def _expanded(text: str, values: Mapping[str, Any], depth: int = 0) -> str:
    """Return an interpolation with the plain values of the keys that it refers to."""

    def held(match: re.Match[str]) -> str:
        value = values.get(match[0][2:-1].strip())
        if isinstance(value, str) and depth < _DEEPEST:
            value = _expanded(value, values, depth + 1)
        is_plain = isinstance(value, str) and (
            match[0] == text or "$" in value or _PLAIN.fullmatch(value)
        )
        return str(value) if is_plain else match[0]

    return _REFERENCE.sub(held, text)


def remember(found: Mapping[str, str], settings: Any = None) -> None:
    """Hide from now on the variables of `interpolations`, and their values in `settings`."""
    for path, text in found.items():
        names = _VARIABLE.findall(text)
        for name in names:
            _remember(os.environ.get(name, ""), f"${{oc.env:{name}}}")
        below = ((at, leaf) for at, leaf in leaves(settings) if f"{at}.".startswith(f"{path}."))
        for at, leaf in below:
            if at == path and (_COMPOSED.search(text) or not _REFERENCE.search(text)):
                if str(leaf) not in text:  # a default is no secret
                    _remember(leaf, text)
            elif names and not _REFERENCE.search(text) and hidden(leaf) == leaf:
                _remember(leaf, f"${{oc.env:{names[0]}}}")


def _remember(value: Any, instead: str) -> None:
    text = str(value)
    if len(text) >= (MIN_DIGITS if _NUMBER.fullmatch(text) else MIN_LENGTH):
        for written in (text, repr(text)[1:-1], json.dumps(text)[1:-1]):
            _texts.setdefault(written, instead)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested settings, each with its dotted key."""
    if isinstance(node, Mapping | list | tuple):
        for key, below in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from leaves(below, _below(path, key))
    else:
        yield path, node


def _below(path: str, key: object) -> str:
    """Return the path of a key; a custom class's `kwargs` are typed directly below its name."""
    return path if key == "kwargs" else f"{path}.{key}" if path else str(key)


def hidden_text(text: str, *, names: bool = True) -> str:
    """Return a text without the values of variables; without `names`, those stay."""
    # The longest first, for one may hold another.
    found = sorted(_texts, key=len, reverse=True)
    pattern = "|".join(re.escape(x) for x in found if names or not _NAME.fullmatch(x))
    return re.sub(pattern, lambda match: _texts[match[0]], text) if pattern else text


def hidden(value: Any, found: Mapping[str, str] | None = None) -> Any:
    """Return a text, or a record, without the values of variables.

    `found` are the interpolations of settings: their texts replace whatever they gave, unless they
    refer to other keys. In other places of a record a value that is a name stays: metrics and
    datasets have such names.
    """
    if isinstance(value, str):
        return hidden_text(value)
    return _hidden(value, found or {}, "")


def _hidden(value: Any, found: Mapping[str, str], path: str, *, names: bool = False) -> Any:
    if path in found:
        if not _REFERENCE.search(found[path]):
            return found[path]
        names = True
    below = functools.partial(_hidden, found=found, names=names)
    if isinstance(value, Mapping):
        return {key: below(x, path=_below(path, key)) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(below(x, path=_below(path, i)) for i, x in enumerate(value))
    return hidden_text(value, names=names) if isinstance(value, str) else value


def said(error: BaseException) -> str:
    """Return the class of an error and its first line, from which secrets are taken."""
    lines = filter(None, map(str.strip, hidden_text(str(error)).split("\n")))
    return ": ".join([type(error).__name__, *[*lines][:1]])


def restored(value: Any, *, all_of_them: bool = True) -> Any:
    """Return hidden values, of today's environment.

    Raises ConfigError for a missing one, or leaves its text unless `all_of_them` are needed.
    """
    if isinstance(value, Mapping):
        return {key: restored(below, all_of_them=all_of_them) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restored(each, all_of_them=all_of_them) for each in value)
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    from omegaconf import OmegaConf  # late: a worker composes nothing
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create([value]), resolve=True)[0]  # type: ignore[index]
    except (OmegaConfBaseException, ValueError) as error:
        if not all_of_them:
            return value
        raise ConfigError(
            f"{value}: cannot be resolved in today's environment ({first_line(error)}); set the"
            " variable, or type the key again"
        ) from None
