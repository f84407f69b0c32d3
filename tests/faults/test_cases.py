"""The table of faults is true: each is held by tests that exist."""

import ast
from pathlib import Path

from tests.faults.cases import CASES, TESTS

ROOT = Path(__file__).parents[2]


def test_each_case_is_held_by_tests_that_exist() -> None:
    assert all(CASES.values())
    paths = {test.partition("::")[0] for test in TESTS}
    there = {
        f"{path}::{node.name}"
        for path in paths
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert not TESTS - there
