"""The tests of runs, with cards in place of CPU workers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import Cards
from tests.facade import environment

TESTS = Path(__file__).parents[1]
FOLDERS = ("faults", "gpu", "inference", "integration", "training", "worker")
MANY = 12  # files of a session; two run at once, and one that fails is run again
SESSION = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
QUIET = "-Wignore::pytest.PytestAssertRewriteWarning"  # its process has imported plugins already


def parts(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the files of a folder, MANY at a time, each part with its name."""
    some = sorted(str(path.relative_to(TESTS)) for path in (TESTS / folder).glob("test_*.py"))
    for number, start in enumerate(range(0, len(some), MANY)):
        yield f"{folder}{number}", some[start : start + MANY]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "files", [pytest.param(some, id=name) for each in FOLDERS for name, some in parts(each)]
)
def test_they_pass_on_cards(files: Sequence[str], cards: Cards, tmp_path: Path) -> None:
    words = ("-n0", "-q", QUIET, "-pno:cacheprovider", f"--basetemp={tmp_path / 'inner'}")
    env = environment(**cards(), **{warm.FOLDER: f"{warm.templates()}/{warm.CARDS}"})
    paths = (str(TESTS / file) for file in files)
    session = warm.Command([*words, *paths], TESTS.parent, env, SESSION)
    out, err = session.communicate(timeout=1480)
    assert session.returncode == 0, out[-20_000:] + err
