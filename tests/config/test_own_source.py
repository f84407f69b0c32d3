"""What runs of a person's own module is the source by which the run is known."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.config import own_source
from expt.config.user_class import resolve
from expt.config.user_code import fingerprint, import_anew

NAME = "twice_written.parts.Part"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a package whose module imports another."""
    package = tmp_path / "twice_written"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(
        "from twice_written.width import WIDTH\nclass Part:\n    width = WIDTH\n"
    )
    _write(package, 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield package
    import_anew([NAME])


def _write(package: Path, width: int) -> Path:
    """The module that is imported, always of one size and one time."""
    (file := package / "width.py").write_text(f"WIDTH = {width}\n")
    os.utime(file, (1, 1))
    return file


def _width() -> int:
    import_anew([NAME])
    found: Any = resolve(NAME, object)
    return int(found.width)


def test_a_file_of_the_same_size_and_time_is_read_anew(own: Path) -> None:
    code = fingerprint([NAME])
    assert _width() == 1
    _write(own, 2)
    assert fingerprint([NAME]) != code
    assert _width() == 2


def test_a_cache_that_python_has_written_is_not_taken(own: Path) -> None:
    command = [sys.executable, "-c", "from twice_written.parts import Part; print(Part.width)"]

    def by_python() -> int:
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        return int(
            subprocess.run(command, cwd=own.parent, env=env, capture_output=True, check=True).stdout
        )

    assert by_python() == 1
    _write(own, 2)
    assert by_python() == 1, "which takes one for the other"
    assert _width() == 2
    assert by_python() == 2, "it reads what is cached here"


def test_a_source_is_compiled_once(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _width() == 1
    monkeypatch.setattr(own_source._FromSource, "source_to_code", None)
    assert _width() == 1


def test_who_may_not_read_the_source_may_not_read_what_is_cached(own: Path) -> None:
    (file := own / "width.py").chmod(0o600)
    _width()
    cached = Path(importlib.util.cache_from_source(str(file)))
    assert (cached.stat().st_mode & 0o777, (own / "parts.py").stat().st_mode & 0o044 > 0) == (
        0o600,
        True,
    )


def test_a_folder_may_get_another_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _width() == 1
    import_anew([NAME])
    elsewhere = own.parent / "elsewhere"
    elsewhere.mkdir()
    own.rename(elsewhere / own.name)
    monkeypatch.syspath_prepend(str(elsewhere))
    found: Any = importlib.import_module("twice_written.width")
    assert found.__spec__.loader.get_code(found.__name__).co_filename == str(
        elsewhere / own.name / "width.py"
    )


def test_nothing_is_cached_where_python_is_to_write_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert _width() == 1
    assert not (own / "__pycache__").exists()


def test_what_is_installed_is_imported_as_ever() -> None:
    own_source.install()
    own_source.install()
    assert sys.meta_path.count(own_source._FINDER) == 1
    for name in "colorsys", "expt.report":
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert not isinstance(spec.loader, own_source._FromSource)
