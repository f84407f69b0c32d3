"""Tests of what the texts of errors are made of."""

import pytest

from expt.errors import ConfigError, first_line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("\n  the header is cut off  \nat byte 7"), "the header is cut off"),
        (MemoryError(), "MemoryError"),  # what has no text is told of all the same
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_errors_first_line_is_never_empty(error: Exception, told: str) -> None:
    assert first_line(error) == told


def test_of_many_problems_a_few_are_shown() -> None:
    error = ConfigError([f"mask {number}" for number in range(60)])
    assert (len(error.problems), len(str(error).splitlines())) == (60, 32)
    assert str(error).endswith("\n  mask 29\n  and 30 more")
