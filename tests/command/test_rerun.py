"""A run from its record: what it begins with, and what is said of its numbers."""

import math
from pathlib import Path
from typing import Any

import pytest

from expt import machine
from expt.command.rerun import compare, config_at_start, main, rerun
from expt.config.identity import shown
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, create_result
from tests.composing import composed
from tests.facade import Capture


def record(metrics: dict[str, float], status: str = COMPLETED) -> Any:
    return {"status": status, "metrics": metrics}


def test_numbers_are_compared_but_for_those_of_the_machine(capsys: Capture) -> None:
    then = record({"loss/val": 0.5, "speed/epoch_s": 1.0, "memory/x": 3.0, "ranks/y": 1.0})
    compare(then, record({"loss/val": 0.5, "speed/epoch_s": 9.0}))
    assert capsys.readouterr() == ("repeated     the same numbers in all 1 metrics\n", "")
    compare(then, record({"loss/val": 0.25, "loss/test": 1.0}))
    assert capsys.readouterr() == (
        "",
        (
            "warning: the numbers differ from those of the original run: loss/test None then, 1.0"
            " now, loss/val 0.5 then, 0.25 now\n"
        ),
    )
    compare(record({"r2/val": math.nan}), record({"r2/val": math.nan}))
    assert capsys.readouterr().err == ""
    compare(record({"loss/val": 0.5}, "interrupted"), record({"loss/val": 0.1}))
    assert capsys.readouterr() == ("", ""), "of a run that had not completed nothing is said"


def test_what_holds_no_settings_is_refused_at_once(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path / "refused"), error="bad")
    for folder in (tmp_path / "refused", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=rf"^{folder}: "):
            rerun(folder, None, typed_at=0.0)
    RunPaths(tmp_path / "refused").result.write_text("{")
    with pytest.raises(ConfigError, match=r"refused/result\.json: is damaged"):
        rerun(tmp_path / "refused", None, typed_at=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["refused"]


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["epochs=1"], None),
        (["resume=auto"], None),
        (["resume='my run'"], "my run"),
        (["resume=null"], None),
    ],
)
def test_rerun_begins_as_the_run_did(words: list[str], source: str | None, tmp_path: Path) -> None:
    settings = composed("resume=auto")
    paths = RunPaths(tmp_path)
    paths.hydra.mkdir()
    paths.overrides.write_text("".join(f'- "{word}"\n' for word in words))
    then: Any = {"config": shown(parse(settings, machine.detect()))}
    assert config_at_start(then, paths).resume == source


@pytest.mark.parametrize("word", ["seed=3", "weights=runs/one"])
def test_a_setting_is_no_folder_for_a_rerun(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{word}: a rerun takes no .* is \./{word}$"):
        main([str(tmp_path), word])
    for folder in (f"./{word}", f"runs/{word}", tmp_path / "seed=3"):
        with pytest.raises(ConfigError, match="is not a folder of a run"):
            rerun(tmp_path, folder, typed_at=0.0)


def test_a_rerun_into_a_sweep_is_refused_as_a_new_run_there(tmp_path: Path) -> None:
    parsed = parse(composed(), machine.detect())
    about: Any = {"config": shown(parsed), "identity": "1f", "content": {}, "arguments": []}
    create_result(RunPaths(tmp_path / "run"), **about)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / SWEEP_RECORD).touch()
    with pytest.raises(ConfigError, match="is the folder of a sweep"):
        rerun(tmp_path / "run", tmp_path / "sweep" / "new", typed_at=0.0)
