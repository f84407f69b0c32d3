"""What is told of an error is of use."""

from __future__ import annotations

import re

import pytest

from expt.errors import OutOfMemory
from expt.worker.diagnosis import in_words
from tests.conftest import Configured


@pytest.mark.parametrize(
    ("batch_size", "world_size", "parts", "fits"), [(66, 2, 1, None), (66, 2, 1, 10), (100, 1, 1, 30), (54, 1, 3, 7)]
)
def test_what_is_to_be_tried_where_memory_is_short_is_accepted(
    batch_size: int, world_size: int, parts: int, fits: int | None, configured: Configured
) -> None:
    now = [f"batch_size={batch_size}", f"world_size={world_size}", f"gradient_accumulation={parts}"]
    told = str(in_words(OutOfMemory("no memory", fits=fits), configured(*now)))
    suggested = re.findall(r"(?:try|or) (\w+=\d+)", told)
    assert len(suggested) == 2
    for word in suggested:
        config = configured(*now, word)
        at_a_time = config.batch_size / config.world_size / config.gradient_accumulation
        assert at_a_time <= (fits or batch_size / world_size / parts / 2)
