"""The tests of runs, with cards in place of CPU workers: some files, and all of them by --slow."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import Cards
from tests.facade import environment

TESTS = Path(__file__).parents[1]
FOLDERS = ("faults", "gpu", "inference", "integration", "training", "worker")
FAST = ("training/test_collectives.py",)
"""What NCCL sends; other tests of cards train, save and resume."""
SESSION = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
QUIET = "-Wignore::pytest.PytestAssertRewriteWarning"  # its process has imported plugins already


def rest(folder: str) -> list[str]:
    """Return the files of a folder that are not FAST."""
    files = (str(path.relative_to(TESTS)) for path in (TESTS / folder).glob("test_*.py"))
    return sorted(file for file in files if file not in FAST)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(FAST, id="fast"),
        *(pytest.param(rest(each), id=each, marks=pytest.mark.slow) for each in FOLDERS),
    ],
)
def test_they_pass_on_cards(files: Sequence[str], cards: Cards, tmp_path: Path) -> None:
    words = ("-n0", "-q", QUIET, "-pno:cacheprovider", f"--basetemp={tmp_path / 'inner'}")
    env = environment(**cards(), **{warm.FOLDER: f"{warm.templates()}/{warm.CARDS}"})
    paths = (str(TESTS / file) for file in files)
    session = warm.Command([*words, *paths], TESTS.parent, env, SESSION)
    out, err = session.communicate(timeout=1480)
    assert session.returncode == 0, out[-20_000:] + err
