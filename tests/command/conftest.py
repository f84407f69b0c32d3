"""Of all tests of commands: an empty current folder."""

from pathlib import Path

import pytest

from tests.facade import Patch


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
