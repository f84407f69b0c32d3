"""A run in this process, as `debug=true` has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import expt
from expt.config.constraints import Target
from expt.config.identity import Content
from expt.errors import ConfigError, RunFailed
from expt.launch import one_run
from expt.runs import checkpoint
from expt.runs.attempt import RAISED
from expt.runs.result import create_result, update_result
from tests.requests import request

OWN = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
        print("{word}")
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_debug_trains_what_the_source_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    said = []
    for word in ("first", "second time"):
        (tmp_path / "own_net.py").write_text(OWN.format(word=word))
        (tmp_path / word).mkdir()
        asked = request(
            tmp_path / word, debug=True, epochs=2, model=Target(target="own_net.Net", kwargs={})
        )
        patches = dataclasses.replace(asked.config.patches, malloc=False)  # of the whole process
        one_run.run(
            dataclasses.replace(asked, config=dataclasses.replace(asked.config, patches=patches))
        )
        said.append(
            [
                line
                for line in capsys.readouterr().out.splitlines()
                if line[:5] in ("first", "secon", "epoch")
            ]
        )
    assert [lines[0] for lines in said] == ["first", "second time"]
    assert [line.partition("  loss")[0] for line in said[1][1:]] == [
        "epoch 1/2  step 20/40",
        "epoch 2/2  step 40/40",
    ]


@pytest.mark.parametrize("mine", [None, "notes.txt", "logs/mine.txt"])
def test_a_refused_run_leaves_a_new_folder_empty_and_a_persons_files_alone(
    mine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("+model._target_=wide_net.Net", "~model.hidden", "~model.dropout")
    (tmp_path / "wide_net.py").write_text(
        OWN.format(word="wide").replace("(64, num_classes", "(64, num_classes - 1")
    )
    folder = tmp_path / "run"
    folder.mkdir()
    if mine:
        (folder / mine).parent.mkdir(exist_ok=True)
        (folder / mine).touch()
    with pytest.raises(ConfigError):
        expt.run(*words, "world_size=1", f"hydra.run.dir={folder}")
    assert (folder / mine).exists() if mine else not folder.exists()


@pytest.mark.parametrize("code", [None, "its"])
@pytest.mark.parametrize("step", [20, 200])
def test_after_a_bug_in_own_code_the_way_on_is_not_that_of_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, step: int
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(tmp_path / "run", epochs=10)
    asked = dataclasses.replace(asked, content=Content(code=code))
    checkpoint.save(
        asked.paths.last,
        {
            "position": {"epoch": step // 20, "step": step, "step_in_epoch": 20},
            "steps_per_epoch": 20,
        },
    )
    create_result(asked.paths, steps_per_epoch=20)
    update_result(asked.paths, status="failed", error="sample 3: no")
    first = "python -m expt hydra.run.dir=run resume=auto"
    other = "evaluate run; " if step == 200 else "resume=run and without hydra.run.dir; "
    raised, refused = RunFailed(f"rank 0 of 2{RAISED}Traceback"), ConfigError("sample 3: no")
    for error in (raised, refused):
        way = one_run.way_on(asked, error)
        assert first in way
        assert (other in way, "rerun run" in way) == (code is not None, code is not None)
    killed = RunFailed("rank 0 of 2 was killed by SIGKILL (out of memory?)")
    assert one_run.way_on(asked, killed) == f"\nto continue from its last checkpoint: {first}"
    assert one_run.way_on(asked, ConfigError("another refusal")) == ""
