"""The `.hydra` of a run: written, renewed, and gone where nothing came of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from expt.command.hydra_folder import leave_no_trace, leave_no_trace_of_a_point, renew, save
from expt.command.libyaml import as_yaml
from expt.runs.paths import RunPaths


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A folder as Hydra makes it for a run."""
    paths = RunPaths(tmp_path / "run")
    save(
        paths,
        OmegaConf.create({"epochs": 3}),
        ["epochs=3"],
        OmegaConf.create({"hydra": {"mode": "RUN"}}),
    )
    return paths


def content(run: RunPaths) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(run.hydra.iterdir())}


def test_three_files_tell_what_hydra_composed(run: RunPaths) -> None:
    assert content(run) == {
        "config.yaml": "epochs: 3\n",
        "hydra.yaml": "hydra:\n  mode: RUN\n",
        "overrides.yaml": "- epochs=3\n",
    }


def test_words_are_told_as_they_were_typed(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    now = OmegaConf.create(
        {"lr": 0.1, "hydra": {"overrides": {"task": ["decay=${lr}", "resume=auto"]}}}
    )
    monkeypatch.setattr(HydraConfig.instance(), "cfg", now)
    renew(run, OmegaConf.create({"lr": 0.1}))
    assert content(run)["overrides.yaml"] == "- decay=${lr}\n"


def test_a_run_that_goes_on_tells_what_it_is_now(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = OmegaConf.create({"hydra": {"overrides": {"task": ["epochs=5", "resume=auto"]}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", now)
    renew(run, OmegaConf.create({"epochs": 5}))
    assert content(run) == {
        "config.yaml": "epochs: 5\n",
        "hydra.yaml": "hydra:\n  mode: RUN\n",
        "overrides.yaml": "- epochs=5\n",
    }


def test_a_run_that_cannot_start_leaves_nothing(run: RunPaths) -> None:
    run.lock.touch()
    leave_no_trace(run)
    assert not run.folder.exists()


def test_a_point_of_a_sweep_that_could_not_begin_leaves_nothing(run: RunPaths) -> None:
    run.lock.touch()
    run.code.mkdir()
    (run.code / "mine.py").touch()
    leave_no_trace_of_a_point(run)
    assert not run.folder.exists()
    leave_no_trace_of_a_point(run)
    run.hydra.mkdir(parents=True)
    run.result.touch()
    leave_no_trace_of_a_point(run)
    assert run.hydra.exists(), "it has begun"


@pytest.mark.parametrize(
    "kept", ["result.json", "logs/0/0/stdout.log", "mine.txt", ".hydra/mine.yaml"]
)
def test_what_holds_something_stays(run: RunPaths, kept: str) -> None:
    path = run.folder / kept
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    leave_no_trace(run)
    assert path.exists()
    assert run.overrides.exists() == (kept in ("result.json", "logs/0/0/stdout.log")), (
        "a run's own record stays whole"
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("ab :#-'\"\n%{}[]!&*1.é😀\x85\u2028\\")
)
CONTENTS = st.recursive(
    SCALARS, lambda below: st.lists(below) | st.dictionaries(st.text("abc "), below), max_leaves=6
)


@given(st.dictionaries(st.text("abc.:é \n"), CONTENTS, max_size=3))
def test_yaml_is_the_same_text_by_either_library(content: dict[str, Any]) -> None:
    config = DictConfig(json.loads(json.dumps(content)))
    assert as_yaml(config) == OmegaConf.to_yaml(config)
