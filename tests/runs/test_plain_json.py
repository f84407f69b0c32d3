"""What is written is JSON for every reader."""

from __future__ import annotations

import math

from expt.runs import plain_json


def test_what_has_no_word_in_json_is_null() -> None:
    content = {"a": math.nan, "b": [math.inf, 1.5, "NaN", True], "c": {"d": (-math.inf, 2)}}
    assert plain_json.dumps(content) == '{"a": null, "b": [null, 1.5, "NaN", true], "c": {"d": [null, 2]}}'
    assert plain_json.dumps({"a": math.nan}, indent=1) == '{\n "a": null\n}'


def test_all_else_is_as_json_has_it() -> None:
    assert plain_json.dumps({"a": 1e30, "b": [None]}, indent=2) == '{\n  "a": 1e+30,\n  "b": [\n    null\n  ]\n}'
