"""torch's tensors without numbers, whose module has a private name though its documentation describes them."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

NUMBERS_WANTED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What is raised for a model that decides by the numbers it computes."""

__all__ = ["NUMBERS_WANTED", "FakeTensorMode"]
