"""The table of faults is true: each is held by tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.cases import CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_held_by_tests_that_exist(case: str) -> None:
    assert CASES[case]
    for test in CASES[case]:
        path, _, name = test.partition("::")
        functions = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, test
