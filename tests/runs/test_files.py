"""What is written is JSON for every reader."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from expt.runs.paths import dumps


def test_nan_is_null_and_infinity_is_read_as_such() -> None:
    content: dict[str, Any] = {
        "a": math.nan,
        "b": [math.inf, 1.5, "NaN", "1e999", True],
        "c": {"d": (-math.inf, 2)},
    }
    text = dumps(content)
    assert text == '{"a": null, "b": [1e999, 1.5, "NaN", "1e999", true], "c": {"d": [-1e999, 2]}}'
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found == {"a": None, "b": [math.inf, *content["b"][1:]], "c": {"d": [-math.inf, 2]}}
    assert dumps({"a": math.nan}, indent=1) == '{\n "a": null\n}'


def test_all_else_is_as_json_has_it() -> None:
    assert (
        dumps({"a": 1e30, "b": [None]}, indent=2) == '{\n  "a": 1e+30,\n  "b": [\n    null\n  ]\n}'
    )
