"""Tests of runs pass with cards in place of CPU workers: some files here, all of them by --slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.conftest import Cards, environment

TESTS = Path(__file__).parents[1]
FOLDERS = ("faults", "gpu", "inference", "integration", "training", "worker")
FAST = {"worker/test_snapshot.py"}
SESSION = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
QUIET = "ignore::pytest.PytestAssertRewriteWarning"  # the process has imported plugins already


def _files() -> list[object]:
    found = (path for folder in FOLDERS for path in sorted((TESTS / folder).glob("test_*.py")))
    names = (str(path.relative_to(TESTS)) for path in found)
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name)
        for name in names
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", _files())
def test_a_file_passes_on_cards(file: str, cards: Cards, tmp_path: Path) -> None:
    words = (
        "-n",
        "0",
        "-q",
        "-W",
        QUIET,
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'inner'}",
    )
    env = environment(**cards(), **{warm.FOLDER: f"{warm.templates()}/{warm.CARDS}"})
    session = warm.Command([*words, str(TESTS / file)], TESTS.parent, env, SESSION)
    out, err = session.communicate(timeout=880)
    assert session.returncode == 0, out[-20_000:] + err
