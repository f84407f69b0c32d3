"""A run's folder: a name that nobody else has, and what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.runs.paths import RunPaths, make_unused_folder, remove_empty


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    name = str(tmp_path / "day" / "noon")
    assert [make_unused_folder(name) for _ in range(3)] == [name, f"{name}_2", f"{name}_3"]


def test_empty_folders_go_up_to_the_first_that_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/day/noon", "outputs/night", "elsewhere/run"):
        Path(name).mkdir(parents=True)
    remove_empty(Path("elsewhere/run"))
    assert Path("elsewhere").exists(), "it is no folder of expt's"
    with pytest.raises(OSError, match="not empty"):
        remove_empty(Path("outputs/day/noon"))
    assert [path.name for path in Path("outputs").iterdir()] == ["night"]


def test_what_a_folder_holds(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert paths.is_new()
    paths.hydra.mkdir(parents=True)
    paths.lock.touch()
    assert paths.is_new()
    assert not paths.holds_refusal_alone(), "Hydra has begun it"
    paths.hydra.rmdir()
    paths.result.touch()
    assert paths.holds_refusal_alone()
    assert not paths.is_new()
    paths.metrics.touch()
    assert not paths.has_trained(), "no number yet"
    paths.metrics.write_text("{}")
    assert paths.has_trained()
    assert not paths.holds_refusal_alone()


def test_a_refused_run_takes_its_own_files_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs(0).mkdir(parents=True)
    for path in (paths.result, paths.metrics, tmp_path / "notes.txt"):
        path.touch()
    paths.remove_refused()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_attempts_are_counted_by_their_logs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in range(2):
        assert paths.next_attempt() == number
        paths.logs(number).mkdir(parents=True)
    paths.logs(0).rmdir()
    (paths.logs(0).parent / "notes").mkdir()
    assert paths.next_attempt() == 2, "the older logs were removed to save room"
    assert paths.attempts() == [1]
