"""Every page does what it says: its commands run, and print what it shows."""

import subprocess
from pathlib import Path

import pytest

from scripts.documents.following import ROOT, environment, follow, printed_here

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def followed(page: Path, folder: Path) -> None:
    exact = printed_here()
    (folder / "work").mkdir()
    wrong = {
        answer.command.words: said
        for answer in follow(page.read_text(), folder / "work", environment(folder), timeout_s=280)
        if (said := answer.wrong(exact=exact))
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    followed(page, tmp_path)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = ["sphinx-build", "-W", "--keep-going", "-q", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    front = (tmp_path / "index.html").read_text()
    assert 'href="docs/tutorial.html"' in front
    assert "Samples per optimiser step" in (tmp_path / "docs/settings.html").read_text()
    assert "class_names" in (tmp_path / "docs/python.html").read_text()
