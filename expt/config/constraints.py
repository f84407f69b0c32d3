"""Types of settings, the meaning of a key, the choice of a group. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _as_typed(value: Any) -> Any:
    return str(value) if type(value) is int else value


Name = Annotated[str, BeforeValidator(_as_typed)]
"""A text that YAML may take for an integer, such as a column 4."""
Folder = Annotated[Name, AfterValidator(os.path.expanduser)]


def _compiled(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


Regex = Annotated[str, AfterValidator(_compiled)]
DOTTED_NAME = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
DottedName = Annotated[str, Field(pattern=DOTTED_NAME)]


IS_SET = "is set"
"""A condition of `Key.only_if`: the other key is neither null, false, 0 nor empty."""
IS_GIVEN = "is given"
"""A condition of `Key.only_if`: the key is not null, and may be 0."""


Unit = Literal["steps", "further steps", "epochs", "evaluations", "own evaluations", "minutes"]
"""`further` counts from where the run is continued, `own` from where it was forked."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Key:
    """The meaning of a setting, as an annotation at its field; expt.config.keys reads it.

    A field that is None is as for the key above, or else as said here.
    """

    result: Literal["changes", "rounding", "none"] | None = None
    """The effect on a run's numbers: changes them (the default), only in their last
    digits, or not at all."""
    resume: bool | Literal["ahead"] | None = None
    """True if it may change when the run is resumed; by default only where it changes no
    number. "ahead": only where it `counts`, and no run has got to its values yet."""
    fork: bool | Literal["epoch"] | None = None
    """True if it may change in a fork (the default); "epoch": only at the end of an epoch."""
    evaluate: bool | None = None
    """True if an evaluation may have another value; by default only where it changes no
    number."""
    evaluated_as: str | None = None
    """The value that it has in an evaluation, in YAML, where that is not the run's."""
    only_if: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values of keys (one, a tuple, IS_SET, IS_GIVEN) without which it has no effect."""
    varies: Literal["repetition", "length", "split", "source"] | None = None
    """The difference of two runs that differ by this key alone: the same measured again, trained
    longer, with other samples held out, or begun elsewhere."""
    cost: bool | None = None
    """True (the default) if it changes a step's time or memory."""
    counts: Unit | None = None
    """The unit in which it counts from the start of a run, or of an epoch; see config.length."""
    at: Callable[[Any], float] | None = None
    """The count at which it acts, by the dataclass that has it; by default its value."""
    later: bool = False
    """True if it changes only steps after that count, and nothing in a run that ends there."""
    own_machine: bool = False
    """True if each of several machines has a value of its own."""
    example: str | None = None
    """A value, as it is typed, where a list or a mapping is expected."""


Size = Annotated[tuple[Count, Count], Key(example="dataset.image_size=[224,224]")]
"""A height and a width."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """A custom class: `_target_` names it, every other key is a keyword argument."""

    name: Literal["_target_"] = "_target_"
    target: DottedName
    kwargs: dict[str, Any]


def kind(node: Any) -> str | None:
    """Return the name of the member that `node` chooses of a group."""
    is_mapping = type(node) is dict or isinstance(node, Mapping)
    return node.get("name") if is_mapping else getattr(node, "name", None)


def word(member: Any) -> str:
    """Return the word that chose the `member` of a group: its name, or the class of `_target_`."""
    return str(member.target if member.name == "_target_" else member.name)


def group(**kinds: Any) -> Any:
    """Return a union whose member is chosen by the key `name`."""
    tagged = tuple(Annotated[cls, Tag(name)] for name, cls in kinds.items())
    return Annotated[Union[tagged], Discriminator(kind)]


SCALARS = {str, int, float, bool, type(None)}


def plain(value: Any) -> Any:
    """Return any value as dataclasses.asdict does, in a fifth of its time."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if hasattr(type(value), "__dataclass_fields__"):
        kind: Any = type(value)
        return {name: plain(getattr(value, name)) for name in names_of(kind)}
    return value


@functools.cache
def names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(field.name for field in dataclasses.fields(kind))


def typed(value: Any, *, exact: bool = False, text: Callable[[str], str] | None = None) -> str:
    """Return a value as it is typed on the command line: null, true, [1,2], {a:1}, 'a b'.

    Unless it is to be `exact`, 1.0 is written as 1; a text is written by `text`, or `quoted`.
    """
    below = functools.partial(typed, exact=exact, text=text)
    if isinstance(value, str):
        return (text or quoted)(value)
    if isinstance(value, float) and not exact:
        return str(value).removesuffix(".0")
    if isinstance(value, list | tuple):
        return f"[{','.join(map(below, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{below(each)}' for key, each in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


_OTHER_THAN_TEXT = {"null", "true", "false", "inf", "nan"}


def quoted(value: object) -> str:
    """Return a text as Hydra's command-line grammar takes it."""
    text = str(value)
    if (
        re.fullmatch(r"[A-Za-z./][\w./+-]*", text, re.ASCII)
        and text.lower() not in _OTHER_THAN_TEXT
    ):
        return text
    # a\'b as 'a\\\'b': a quote is escaped, and backslashes before one or the end are doubled.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"


def in_a_shell(word: str) -> str:
    """Return a word in quotes, if a shell would read it otherwise; brackets it leaves alone."""
    return in_quotes(word) if re.search(r"[^\w\[\]{}.,:=+@%/~-]|\{.*,", word) else word


def in_quotes(word: str) -> str:
    """Return a word for any shell, in double quotes if it has single ones of its own."""
    if "'" in word and not re.search(r'["$`!\\]', word):  # which a shell reads in double quotes
        return f'"{word}"'
    return shlex.quote(word)
