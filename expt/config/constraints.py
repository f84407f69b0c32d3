"""What a value of the configuration may be, and how a group's member is chosen. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Folder = Annotated[str, AfterValidator(os.path.expanduser)]
Size = tuple[Count, Count]  # height, width
DOTTED_NAME = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
DottedName = Annotated[str, Field(pattern=DOTTED_NAME)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """A person's own class: `_target_` names it, every other key is a keyword argument."""

    name: Literal["_target_"] = "_target_"
    target: DottedName
    kwargs: dict[str, Any]


def kind(node: Any) -> str | None:
    """The member of a group that `node` chooses."""
    return (
        node.get("name")
        if type(node) is dict or isinstance(node, Mapping)
        else getattr(node, "name", None)
    )


def word(member: Any) -> str:
    """What chose the `member` of a group: its name, or the class that `_target_` names."""
    return str(member.target if member.name == "_target_" else member.name)


def group(**kinds: Any) -> Any:
    """A union whose member is chosen by the key `name`; an underscore in a kind's word stays."""
    tagged = tuple(Annotated[cls, Tag(name)] for name, cls in kinds.items())
    return Annotated[Union[tagged], Discriminator(kind)]
