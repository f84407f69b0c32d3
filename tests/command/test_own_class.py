"""A class in the place of a group's choice, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

import expt
from expt.command.overrides import folder_names
from expt.command.own_class import folded, is_class, name_of, spelled_out

NET = "model={_target_: mine.Net, width: 16}"
MINE = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes, width=8):
        height, across = image_size
        first = nn.Linear(channels * height * across, width)
        super().__init__(nn.Flatten(), first, nn.Linear(width, num_classes))
"""


@pytest.mark.parametrize(
    ("word", "is_one"),
    [(NET, True), ("dataset={_target_: mine.Data}", True), ("model={width: 16}", False),
     ("init={_target_: a.B}", False), ("model=mlp,{_target_: mine.Net}", False),
     ("model={_target_: a.B},{_target_: a.C}", False), ("model=mlp", False)],
)  # fmt: skip
def test_a_dict_with_a_target_chooses_a_class(word: str, is_one: bool) -> None:
    assert is_class(word) == is_one


def test_a_class_is_called_as_one_of_a_file() -> None:
    assert name_of({"_target_": "mine.Data", "n": 40}) == "Data n=40"
    assert name_of("digits") == "digits"


@pytest.mark.parametrize(
    ("words", "hydras"),
    [
        (["model.width=3", NET, "epochs=2"], ["~model", f"+{NET}", "model.width=3", "epochs=2"]),
        (["model=mlp", NET], ["~model", f"+{NET}"]),
        ([NET, "model=mlp"], [NET, "model=mlp"]),
        (["model=mlp", "seed=1"], ["model=mlp", "seed=1"]),
    ],
)
def test_hydra_is_told_to_leave_the_groups_choice_out(words: list[str], hydras: list[str]) -> None:
    assert spelled_out(words) == hydras


def test_a_record_has_the_words_as_they_were_typed() -> None:
    assert folded(["~model=null", f"+{NET}", "seed=1", "~sweep", "+a={b:1}"]) == [
        NET,
        "seed=1",
        "~sweep",
        "+a={b:1}",
    ]


def test_a_runs_folder_is_called_by_the_class() -> None:
    names = folder_names([["model=mlp"], ["model={_target_:mine.Net}"], [NET.replace(" ", "")]])
    assert names[:2] == ["model=mlp", "model=Net"]
    assert names[2].startswith("model=Net_width_16_,")


def test_a_sweep_has_models_by_name_and_by_class_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    small = {"max_steps": 2, "world_size": 1, "tensorboard": {"images": False}}
    models = ["mlp", {"_target_": "mine.Net"}, {"_target_": "mine.Net", "width": 4}]
    runs = expt.sweep({"model": models, **small}, folder="sweep", quiet=True)
    assert [run.config["model"]["name"] for run in runs] == ["mlp", "_target_", "_target_"]
    assert [run.config["model"].get("kwargs") for run in runs[1:]] == [{}, {"width": 4}]
    assert runs[2].record["arguments"][0] == "model={_target_:mine.Net,width:4}"
    head, *lines = (tmp_path / "sweep/summary.md").read_text().splitlines()
    assert head.startswith("| model | model.width | accuracy/val |")
    assert sorted(line.split("|")[1].strip() for line in lines[1:]) == ["Net", "Net", "mlp"]
    again = expt.sweep(*runs[2].record["arguments"], folder="sweep", quiet=True)
    assert [run.folder for run in again] == [runs[2].folder], (
        "the same run, by the words of its record"
    )
    with pytest.raises(expt.ConfigError, match=r"^model={width: 16}: not one of convnet"):
        expt.run("model={width: 16}")


def test_a_search_gives_a_class_no_key_of_the_choice_in_whose_place_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = ("epochs=1", "world_size=1", "dataset.train_limit=64", "search=random", "search.runs=1")
    (result,) = expt.sweep(
        NET, *small, "seed=0,1", f"hydra.sweep.dir='{tmp_path / 'sweep'}'"
    ).completed
    assert result.config["model"]["kwargs"] == {"width": 16}
