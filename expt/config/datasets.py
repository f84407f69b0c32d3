"""The kinds of datasets by name: each is a module of expt.data.kinds; see expt.data.kinds."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Key

CUSTOM_DATASET_KEYS = frozenset(
    "num_classes num_workers val_fraction train_limit mean std augment folds fold sampling".split()
)
"""Keys that every custom dataset has, named in its YAML or not."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    crop_padding: Annotated[int, Field(ge=0)] = 0
    padding_mode: Annotated[
        Literal["constant", "reflect"], Key(only_if={"dataset.augment.crop_padding": IS_SET})
    ] = "constant"
    flip: bool | Literal["alternate"] = False
    cutout: Annotated[int, Field(ge=0)] = 0

    @property
    def is_set(self) -> bool:
        """Whether anything is to be done."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(self))


@functools.cache
def kinds() -> dict[str, Any]:
    """Return the class of each kind by its name; those of expt first, `_target_` last.

    A kind's keys stand beside what reads its files, above this package: so they are found by name.
    """
    package, found = importlib.import_module("expt.data.kinds"), dict[str, Any]()
    for module in pkgutil.iter_modules(package.__path__):
        members = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        for cls in members.values():
            if isinstance(cls, type) and "name" in vars(cls).get("__annotations__", ()):
                found |= dict.fromkeys(get_args(get_type_hints(cls)["name"]), cls)
    return dict(sorted(found.items(), key=lambda item: item[0] == "_target_"))


def noun_of(record: Mapping[str, Any]) -> str:
    """Return what a sample is called of the dataset of a run, from its record."""
    dataset = (record.get("config") or {}).get("dataset") or {}
    cls = kinds().get(str(dataset.get("name")))
    return cls.noun(dataset) if cls else "image"
