"""Of all tests of data: a cache of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from expt.config.schema import RunConfig
from tests.conftest import Configured
from tests.facade import Patch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of what is decoded and downloaded, which is not there yet."""
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def chosen(tmp_path: Path, configured: Configured) -> Callable[..., RunConfig]:
    """`chosen("task=regression")`: on the Hugging Face dataset in the folder `set`."""

    def configure(*words: str) -> RunConfig:
        where = (f"dataset.path={tmp_path / 'set'}", "dataset.num_workers=0", "batch_size=4")
        return configured("dataset=huggingface", *where, *words)

    return configure
