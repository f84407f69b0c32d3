"""What is started through multiprocessing knows nothing of how this process began."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator

import pytest

from expt.signals import without_main


@pytest.fixture(params=["spawn", None])
def method(request: pytest.FixtureRequest) -> Iterator[str | None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


def test_neither_the_script_nor_the_way_of_starting_others(method: str | None) -> None:
    """Joblib has a way of its own, which nobody else knows."""
    main = sys.modules["__main__"]
    with without_main():
        assert not hasattr(sys.modules["__main__"], "__file__")
        assert multiprocessing.get_start_method() == "forkserver"
    assert sys.modules["__main__"] is main
    assert multiprocessing.get_start_method(allow_none=True) == method
