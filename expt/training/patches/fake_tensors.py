"""torch's tensors without numbers, whose module has a private name though its documentation
describes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

NUMBERS_WANTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What is raised for a model that decides by the numbers it computes."""

__all__ = ["NUMBERS_WANTED", "FakeTensorMode", "without_log"]


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Within it torch doesn't log the traceback of what an operation raises, which is told
    otherwise.
    """
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
