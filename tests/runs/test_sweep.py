"""The index of a large sweep says what the folders say, and is made anew where it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from expt.config.identity import VERSION
from expt.runs import sweep
from expt.runs.paths import SWEEP_INDEX, RunPaths
from expt.runs.result import COMPLETED, create_result, results, update_result
from expt.runs.sweep import LEFT_OUT, results_of_sweep


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LARGE", 2)


def leave(folder: Path, value: float) -> None:
    paths = RunPaths(folder)
    create_result(
        paths, may_exist=True, identity=folder.name, git={"commit": "a", "diff": "b" * 1000}
    )
    update_result(
        paths, status=COMPLETED, metrics={"x": value}, objective={"name": "x", "value": value}
    )


def plain(found: Any) -> list[tuple[RunPaths, Any]]:
    return [
        (paths, {k: v for k, v in record.items() if k not in LEFT_OUT}) for paths, record in found
    ]


def test_an_index_says_what_the_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"a": 1.0, "b": math.nan, "c": 3.0}.items():
        leave(tmp_path / name, value)
    first = list(results_of_sweep(tmp_path))
    assert repr(first) == repr(plain(results(tmp_path)))
    monkeypatch.setattr(sweep, "result_of_any", None)  # no record is read now
    assert repr(list(results_of_sweep(tmp_path))) == repr(first), "nan among them"


def test_what_has_changed_is_read_anew(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        leave(tmp_path / name, 1.0)
    list(results_of_sweep(tmp_path))
    leave(tmp_path / "b", 2.0)
    create_result(RunPaths(tmp_path / "d"), identity="d")  # which runs, or was lost
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    found = {paths.folder.name: record for paths, record in results_of_sweep(tmp_path)}
    assert {name: record.get("metrics", {}).get("x") for name, record in found.items()} == {
        "a": 1,
        "b": 2,
        "d": None,
    }
    assert set(json.loads((tmp_path / SWEEP_INDEX).read_text())["runs"]) == {"a", "b"}, (
        "of those that have ended"
    )


def test_records_that_are_nearly_alike_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, object] = {"model": {"name": "mlp", "width": 1}, "amp": True, "lr": None}
    changed: list[dict[str, object]] = [
        {}, {"amp": 1}, {"amp": 1.0}, {"model": {"name": "mlp", "width": 1.0}},
        {"model": {"name": "mlp"}}, {"lr": 0.0},
        {"more": {}}, {"lr": math.inf},
    ]  # fmt: skip
    for number, change in enumerate(changed):
        leave(tmp_path / f"{number}", 1.0)
        update_result(
            RunPaths(tmp_path / f"{number}"), config={**config, **change}, command=f"a{number % 2}"
        )
    (tmp_path / "0" / "result.json").write_text(
        '{"amp": 1, "status": "completed", "identity": "0"}'
    )
    leave(tmp_path / "without", 1.0)
    first = repr(plain(results(tmp_path)))
    assert repr(list(results_of_sweep(tmp_path))) == first
    monkeypatch.setattr(sweep, "result_of_any", None)
    assert repr(list(results_of_sweep(tmp_path))) == first
    written = json.loads((tmp_path / SWEEP_INDEX).read_text())
    assert len(written["bases"]) < 2 * len(changed), "what they have in common is written once"
    differences = [rest for _, _, (_, rest) in written["runs"].values()]
    assert not any("command" in each for each in differences), (
        "of two commands each is written once"
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 0, "runs": {}}', f'{{"version": {VERSION}, "runs": {{"a": 1}}}}'],
)
def test_a_file_that_is_no_index_is_replaced(tmp_path: Path, text: str) -> None:
    leave(tmp_path / "a", 1.0)
    leave(tmp_path / "b", 1.0)
    (tmp_path / SWEEP_INDEX).write_text(text)
    assert repr(list(results_of_sweep(tmp_path))) == repr(plain(results(tmp_path)))
    assert json.loads((tmp_path / SWEEP_INDEX).read_text())["version"] == VERSION


def test_a_small_sweep_has_none(tmp_path: Path) -> None:
    leave(tmp_path / "a", 1.0)
    assert len(list(results_of_sweep(tmp_path))) == 1
    assert not (tmp_path / SWEEP_INDEX).exists()
