"""Libraries that a process without arrays never needs, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class Late:
    """The module `name`, imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # who looks at all objects, such as pytest, asks for some
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found without this method from now on
        return value


if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import torch
    from PIL import Image
    from pyarrow import csv, parquet
    from torch.nn import functional
else:
    np, pa, torch, Image = map(Late, ("numpy", "pyarrow", "torch", "PIL.Image"))
    csv, parquet = map(Late, ("pyarrow.csv", "pyarrow.parquet"))
    functional = Late("torch.nn.functional")
compute: Any = Late("pyarrow.compute")  # it makes its functions when it is imported

__all__ = ["Image", "Late", "compute", "csv", "functional", "np", "pa", "parquet", "torch"]
