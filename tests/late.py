"""A library that few tests need and that takes seconds to import: imported at first use."""

import importlib
from typing import Any


class Late:
    """The module `name`, imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every global of a test's module for some
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
