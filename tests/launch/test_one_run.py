"""A run in this process, as `debug=true` has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import expt
from expt.config.constraints import Target
from expt.errors import ConfigError
from expt.launch import one_run
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
        asked = request(tmp_path / word, debug=True, epochs=2, model=Target(target="own_net.Net", kwargs={}))
        patches = dataclasses.replace(asked.config.patches, malloc=False)  # of the whole process
        one_run.run(dataclasses.replace(asked, config=dataclasses.replace(asked.config, patches=patches)))
        said.append([line for line in capsys.readouterr().out.splitlines() if line[:5] in ("first", "secon", "epoch")])
    assert [lines[0] for lines in said] == ["first", "second time"]
    assert [line.partition("  loss")[0] for line in said[1][1:]] == ["epoch 1/2  step 20/40", "epoch 2/2  step 40/40"]


@pytest.mark.parametrize("mine", [None, "notes.txt", "logs/mine.txt"])
def test_a_refused_run_leaves_a_new_folder_empty_and_a_persons_files_alone(
    mine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("+model._target_=wide_net.Net", "~model.hidden", "~model.dropout")
    (tmp_path / "wide_net.py").write_text(OWN.format(word="wide").replace("(64, num_classes", "(64, num_classes - 1"))
    folder = tmp_path / "run"
    folder.mkdir()
    if mine:
        (folder / mine).parent.mkdir(exist_ok=True)
        (folder / mine).touch()
    with pytest.raises(ConfigError):
        expt.run(*words, "world_size=1", f"hydra.run.dir={folder}")
    assert (folder / mine).exists() if mine else not folder.exists()
