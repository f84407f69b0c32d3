"""A folder of YAML of one's own, with groups of one's own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command import command_line
from expt.command.conf_files import conf_dir
from expt.command.own_conf import refuse_hidden, refuse_no_names, with_conf_here
from expt.errors import ConfigError, ExptError
from tests.conftest import run

NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes, opts):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
"""
CONF = {
    "recipe/a.yaml": "# @package _global_\nepochs: 1\n",
    "recipe/b.yaml": "# @package _global_\nepochs: 2\n",
    "aug/a.yaml": "flip: 1\n",
    "aug/b.yaml": "flip: 2\n",
}
OF_BOTH = {
    "model/own.yaml": "defaults: [/aug@opts: a, _self_]\n_target_: own_net.Net\n",
    "experiment/e.yaml": "# @package _global_\ndefaults: [/recipe: a, _self_]\nseed: 7\n",
    "sweep/s.yaml": (
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {+recipe: 'a,b'}}}\n"
    ),
}
SMALL = ("world_size=1", "dataset.train_limit=64", "hydra.sweep.dir=sweep")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a `conf` that has groups of its own alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_net.py").write_text(NET)
    written(CONF)
    return tmp_path


def written(files: dict[str, str]) -> None:
    for name, text in files.items():
        (Path("conf") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("conf") / name).write_text(text)


def configs() -> dict[str, Any]:
    """Those of the sweep's runs, by their folders."""
    return {
        path.parent.name: json.loads(path.read_text())["config"]
        for path in Path("sweep").glob("*/result.json")
    }


def test_a_sweep_over_a_group_of_ones_own(here: Path) -> None:
    done = run("-m", "+recipe=a,b", *SMALL, cwd=here)
    assert done.returncode == 0, done.stderr
    assert {name: config["epochs"] for name, config in configs().items()} == {
        "recipe=a": 1,
        "recipe=b": 2,
    }
    assert "\nrecipe  accuracy/val" in done.stdout


def test_a_sweep_over_what_a_group_puts_elsewhere(here: Path) -> None:
    written(OF_BOTH)
    expt.sweep("model=own", "aug@model.opts=a,b", "epochs=1", *SMALL)
    opts = {name: config["model"]["kwargs"]["opts"] for name, config in configs().items()}
    assert opts == {"opts=a": {"flip": 1}, "opts=b": {"flip": 2}}


@pytest.mark.parametrize(
    "words",
    [("+recipe=a", "seed=0,1"), ("+recipe=glob(*)",), ("experiment=e", "recipe=a,b"), ("sweep=s",),
     ("model=own", "aug@model.opts=glob(*)"), ("+recipe=a,b", "search=random", "search.runs=2")],
)  # fmt: skip
def test_each_way_to_name_one_makes_a_sweep(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    written(OF_BOTH)
    expt.sweep(*words, *SMALL, "hydra.launcher.dry_run=true")
    assert "start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["+recipe=zz"], "recipe=zz: not one of a, b."),
        (["+recipe=3"], "+recipe=3: not one of a, b."),
        (["recipe=a"], "recipe=a: nothing chooses recipe yet; type +recipe=a"),
        (["+recipe=a", "~aug"], "~aug: nothing chooses aug."),
        (
            ["aug@model.opts=b"],
            "aug@model.opts=b: nothing chooses aug@model.opts yet; type +aug@model.opts=b",
        ),
        (
            ["agu@model.opts=b"],
            (
                "agu@model.opts=b: there is no group agu; a group of your own has its YAML in"
                " conf/agu here, or in FOLDER/agu with --config-dir FOLDER"
            ),
        ),
        (
            ["+recipy=a"],
            (
                "recipy='a': there is no such key; a group of your own has its YAML in conf/recipy"
                " here, or in FOLDER/recipy with --config-dir FOLDER"
            ),
        ),
    ],
)
def test_a_mistake_in_a_group_of_ones_own(here: Path, words: list[str], told: str) -> None:
    for command in (expt.run, expt.sweep) if "~aug" not in words else (expt.run,):
        with pytest.raises(ExptError) as caught:
            command(*words)
        assert str(caught.value) == told


@pytest.mark.parametrize(
    "value", ["null", "true", "3", "-0.5", "+1", "{a:1}", "NULL", "{lr:1},mlp", "mlp,null"]
)
def test_a_group_is_chosen_by_name(value: str) -> None:
    with pytest.raises(
        ConfigError, match="not one of convnet, mlp, paddle_convnet, resnet18, timm"
    ):
        refuse_no_names([f"model={value}"])
    refuse_no_names([f"epochs={value}", "model={_target_: a.B, x: 1},mlp", "~model=null"])


@pytest.mark.parametrize(
    ("word", "mend"),
    [
        ("model=range(1,3)", "a model has a name, and no number; give several, as in model=A,B"),
        ("model=range(1,3),5", "a model has a name, and no number; give several, as in model=A,B"),
        (
            "optimizer=shuffle(range(1,3))",
            "an optimizer has a name, and no number; give several, as in optimizer=A,B",
        ),
        (
            "+recipe=range(1,3)",
            "a recipe has a name, and no number; give several, as in +recipe=A,B",
        ),
        (
            "+recipe=sort(range(1,3))",
            "a recipe has a name, and no number; give several, as in +recipe=A,B",
        ),
        (
            "+aug@model=range(1,3)",
            "an aug has a name, and no number; give several, as in +aug@model=A,B",
        ),
        (
            "+recipe=interval(1,3)",
            "a recipe has a name, and no number; give several, as in +recipe=A,B",
        ),
    ],
)
def test_a_group_is_no_range(here: Path, word: str, mend: str) -> None:
    for command, more in (expt.run, ()), (expt.sweep, ()), (expt.sweep, ("search=tpe",)):
        with pytest.raises(ConfigError) as caught:
            command(word, *more)
        assert str(caught.value) == f"{word}: {mend}"


@pytest.mark.parametrize("more", [(), ("search=random",)])
def test_a_named_grid_has_no_range_of_a_group_either(here: Path, more: tuple[str, ...]) -> None:
    for key, value in ("model", "range(1,3)"), ("+recipe", "interval(1,3)"):
        of_grid = f"hydra: {{mode: MULTIRUN, sweeper: {{params: {{{key}: '{value}'}}}}}}"
        written({"sweep/s.yaml": f"# @package _global_\n{of_grid}\n"})
        told = re.escape(
            f"{key}={value}: a {key.lstrip('+')} has a name, and no number; give several, as in"
            f" {key}=A,B"
        )
        with pytest.raises(ConfigError, match=told):
            expt.sweep("sweep=s", *more, *SMALL)


def test_several_of_a_group_may_be_named_by_a_pattern() -> None:
    """Which Hydra looks up."""
    refuse_no_names(["model=glob([mlp,conv*])", "optimizer=glob(*,exclude=[m*])"])


def test_conf_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/nginx").mkdir(parents=True)
    (tmp_path / "conf/nginx/site.yaml").touch()
    for words in (["epochs=1"], ["checkpoint={keep: 1}"], ["+recipe=a", "nginx.site=1"]):
        (tmp_path / "conf/checkpoint").mkdir(exist_ok=True)
        (tmp_path / "conf/checkpoint/new.yaml").touch()
        assert with_conf_here(words) == words  # of something else
    for word in ("+nginx=site", "nginx=sight", "nginx@model.opts=site", "+nginx@x=site,other"):
        assert with_conf_here([word]) == ["--config-dir", "conf", word]
    (tmp_path / "conf/model").mkdir()
    (tmp_path / "conf/model/mine.yaml").touch()
    assert with_conf_here(["model=mine"]) == ["--config-dir", "conf", "model=mine"]
    for named in (["--config-dir", "x"], ["-cd=x"]):
        assert with_conf_here(named) == named


@pytest.mark.parametrize(
    "words",
    [
        ["model=mlp", "epochs=1"],
        ["-m", "seed=1,2"],
        ["--help", "model=mlp"],
        ["plan"],
        ["--config-dir", "conf", "epochs=1"],
        ["--config-dir", "other", "hydra.searchpath=[file://conf]"],
    ],
)
def test_a_choice_that_expt_has_too_is_refused(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    written({"model/mlp.yaml": "_target_: own_net.Net\n"})
    (here / "other").mkdir()
    with pytest.raises(SystemExit) as caught:
        command_line.main(words)
    told = " ".join(capsys.readouterr().err.split())
    assert caught.value.code == 2
    assert (
        "conf/model/mlp.yaml: expt has a model=mlp of its own, which would be taken; give the file"
        " another" in told
    )
    assert not Path("outputs").exists()


def test_a_copy_of_a_choice_of_expts_is_none_of_ones_own(here: Path) -> None:
    shutil.copytree(conf_dir(), "copied")
    refuse_hidden([Path("copied"), Path("conf")])
    for name in ("scheduler/cosine.yaml", "experiment/char_lm.yaml"):
        shutil.copytree(conf_dir(), "edited", dirs_exist_ok=True)
        with Path("edited", name).open("a") as file:
            file.write("# edited\n")
        with pytest.raises(ConfigError, match=f"^edited/{name}: expt has a"):
            refuse_hidden([Path("edited")])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "defaults: [/model: net]",
            (
                "model: some YAML chooses net, and it is chosen already; write override /model: net"
                " there"
            ),
        ),
        (
            "defaults: [override model: net]",
            "model: recipe/n.yaml looks for it in recipe/; write override /model there",
        ),
        (
            "defaults: [/recipe/model@model: net]",
            "model=net: recipe/n.yaml looks for it in recipe/; write override /model: net there",
        ),
        (
            "defaults: [model: net]",
            "model=net: recipe/n.yaml looks for it in recipe/; write override /model: net there",
        ),
        (
            "defaults: [override /mdl: net]",
            "mdl: recipe/n.yaml overrides it, and there is no such group. Did you mean 'model'?",
        ),
        (
            "defaults: [override /aug: a]",
            (
                "aug: recipe/n.yaml overrides it, and nothing chooses it; write /aug there, without"
                " override"
            ),
        ),
        (
            "model: mlp",
            "model=mlp: is text; in YAML a choice stands in 'defaults: [override /model: mlp]'",
        ),
    ],
)
def test_a_slip_in_the_defaults_of_a_recipe(here: Path, text: str, told: str) -> None:
    written(
        {
            "model/net.yaml": "_target_: own_net.Net\n",
            "recipe/n.yaml": f"# @package _global_\n{text}\n",
        }
    )
    with pytest.raises(ConfigError) as caught:
        expt.run("+recipe=n")
    assert str(caught.value) == told


def test_a_named_grid_without_the_plus(here: Path) -> None:
    written({"sweep/s.yaml": OF_BOTH["sweep/s.yaml"].replace("+recipe", "recipe")})
    told = (
        r"^recipe=a: the named grid has it, and nothing chooses recipe yet; write \+recipe there$"
    )
    with pytest.raises(ConfigError, match=told):
        expt.sweep("sweep=s", *SMALL)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["++recipe=a"], "++recipe=a: a choice is not forced; type +recipe=a"),
        (["++model=mlp"], "++model=mlp: a choice is not forced; type model=mlp"),
        (["+model=convnet"], "+model=convnet: model is chosen already; type model=convnet"),
        (
            ["+recipe=a", "+recipe=b"],
            (
                "+recipe=a +recipe=b: recipe is there twice; name it once, as in +recipe=a, or"
                " +recipe=[a,b] for both"
            ),
        ),
        (
            ["+recipe=a,b", "recipe=a"],
            "+recipe=a,b recipe=a: recipe is there twice; name it once, as in +recipe=a,b",
        ),
    ],
)
def test_a_plus_too_many(
    here: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        expt.sweep(*words, *SMALL)
    assert str(caught.value) == told
    assert "warning" not in capsys.readouterr().err


def test_what_was_meant_by_the_name_of_an_own_choice(here: Path) -> None:
    recipe = "# @package _global_\ndefaults: [override /model: net]\n"
    written(
        {
            "model/net.yaml": "_target_: own_net.Net\n",
            "recipe/n.yaml": recipe,
            "recipe/empty.yaml": "",
        }
    )
    written({"recipe/old.yml": recipe, "recipe/sub/one.yaml": recipe})
    for words, told in {
        ("+recipe=old",): f"recipe=old: is {here}/conf/recipe/old.yml; its name must end in .yaml",
        ("+recipe=sub",): "recipe=sub: is a group itself, recipe/sub; type +recipe/sub=NAME",
        ("+recipe=sub/zz",): "recipe/sub=zz: not one of one.",
        (
            "+recipe=empty",
        ): "recipe: its YAML is empty; begin it with # @package _global_, and what it sets",
        (
            "+recipe=n",
            "model.act=tanh",
        ): "model.act=tanh: the YAML has no key 'model.act'; add it there, or type +model.act=tanh",
    }.items():
        with pytest.raises(ConfigError) as caught:
            expt.run(*words)
        assert str(caught.value) == told
