"""How commands end: their exit codes, and one line for a mistake."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command import main as command
from expt.command.words import WORDS
from expt.errors import ConfigError, warn
from tests.command.test_help import help_text
from tests.conftest import Typed
from tests.facade import Capture, Patch, environment


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


def test_equal_warnings_of_a_command_are_one(typed: Typed, monkeypatch: Patch) -> None:
    def predict_by_two_runs(*_: object) -> int:
        warn("of each run")
        warn("of each run")
        return 0

    monkeypatch.setattr(command, "call", predict_by_two_runs)
    for word in ("predict", "evaluate"):
        assert typed(word).stderr == "warning: of each run\n"


REFUSED = {
    # a word that is none
    "train epochs=1": "",
    "reprot": "",
    "epochs=1 report": "",
    "run": "'rerun'",
    "epochs 3": "",
    "epochs = 3": "",
    "epochs: 3": "",
    "seed=1 epochs 3": "without spaces",
    "--epochs 5": "",
    "--resolve": "",
    "epocs=3 --cfg job": "",
    "report " + "x" * 300: "",
    "predict run " + "x" * 300: "run: is not a folder of a run",
    "rerun " + "x" * 300: "",
    "fork=" + "x" * 300: "",
    "resume=" + "x" * 300: "",
    "weights=" + "x" * 300: "",
    "dataset=image_folder dataset.root=" + "x" * 300: "",
    "hydra.run.dir=" + "x" * 300: "",
    "-m seed=1,2 hydra.sweep.dir=" + "x" * 300: "",
    "--config-dir " + "x" * 300: "",
    "model=mpl --cfg job": "",
    "-m seed=1,2 --cfg job": "",
    "seed=1,2 --cfg job": "",
    # a name that is none
    "modle=mlp": "Did you mean 'model'?",
    "modle._target_=a.B": "Did you mean 'model._target_'?",
    "model=mpl": "Did you mean 'mlp'?",
    "experiment=char_llm": "Did you mean 'char_lm'?",
    "sweep=nope": "",
    "lr=0.1": "Did you mean 'optimizer.lr'?",
    "learning_rate=3": "Did you mean 'optimizer.lr'?",
    "optimizer.learning_rate=3": "Did you mean 'optimizer.lr'?",
    "model.lr=1": "Did you mean 'optimizer.lr'?",
    "optimizer.group=1": "Did you mean 'optimizer.groups'?",
    "dataset=mnist dataset.groups=1": "Did you mean 'dataset.group'? Add"
    " dataset=huggingface or image_folder or segmentation_folder or table",
    "bs=3": "Did you mean 'batch_size'?",
    "batchsize=3": "Did you mean 'batch_size'?",
    "dataset.batch_size=1": "Did you mean 'batch_size'?",
    "retries=3": "Did you mean 'hydra.launcher.retries'?",
    "optimizer.beta=0.9": "'optimizer.betas'",
    "scheduler=cosine scheduler.T_max=10": "scheduler=cosine has scheduler.warmup",
    "dataset.num_workers=2": "dataset=digits has no key 'dataset.num_workers'",
    "model=resnet18 model.dropout=0.1": "model=resnet18 has no key 'model.dropout'",
    "optimizer.betas=[0.9,0.98]": "optimizer.betas=[0.9,0.98]: optimizer=sgd ",
    "search.runs=3": "search.runs=3: ",
    "bakend=gloo": "bakend=gloo: ",
    "=3": "=3: ",
    "~nope": "",
    # a value that is none
    "model=3": "model=3: ",
    "model=[mlp,convnet]": "",
    "optimizer={}": "",
    "+model=mlp": "",
    "hydra=foo": "",
    "epochs=x": "",
    "epochs=${nope}": "",
    "model.hidden=[layer(1),2]": "quote",
    "scheduler=cosine scheduler.epochs=1 scheduler.warmup_epochs=2": "scheduler.epochs=1: ",
    "experiment=gan task=classification": "",
    # folders
    "hydra.run.dir=": "",
    "hydra.sweep.dir=x": "",
    "resume=auto": "resume=auto: ",
    "resume=auto hydra.run.dir=nowhere": "",
    "resume=auto hydra.run.dir=.": "",
    "--config-dir nowhere": "--config-dir nowhere: ",
    "rerun": "",
    "rerun a b c": "",
    "rerun nowhere": "",
    "report --sotr x": "",
    "report nowhere": "",
    "report run/file": "is a file",
    "evaluate nowhere": "",
    "evaluate . epochs=2": "",
    "export nowhere --format onnx": "",
    "doctor gpus=2": "",
    "doctor dataset.root=": "",
    # several values
    "gpus=0,1": "; add -m, or type a list: gpus=[0,1]\n",
    "model.hidden=64,32": "; add -m, or type a list: model.hidden=[64,32]\n",
    "send=mlflow,wandb": "; add -m, or type a list: send=[mlflow,wandb]\n",
    "seed=0,1": "; add -m\n",
    "optimizer.lr=interval(0,1)": "",
    "search=tpe": "",
    "plan seed=1,2": "",
    "plan search=tpe": "",
    "plan resume=nope": "",
    "plan epocs=3": "",
    "plan --vocabulary 0": "",
    "hydra.launcher.dry_run=true": "",
    "hydra/launcher=basic": "",
    "-m seed=1,2 hydra.sweep.dir=''": "",
    "-m seed=1,2 hydra.launcher.max_concurrent=0": "",
    "-m seed=1,2 hydra.launcher.retries=-1": "",
    "-m seed=1,2 hydra.launcher.retries=x": "hydra.launcher.retries=x: ",
    "-m seed=1,2 hydra.launcher.stagger_s=nan": "",
    "-m optimizer.lr=0.1,x": "",
    "-m optimizer.lr=loguniform(0.1,1)": "Unknown function 'loguniform'",
    "-m search=tpe": "",
    "-m search=tpe,random seed=1,2": "",
    "-m search=[tpe,random] seed=1,2": "",
    "-m search=tpe model=range(1,3)": "",
    "-m search=random lr=interval(0.1,1)": "",
    "-m search=random optimizer.lr=interval(1)": "",
    "-m search=random model=mlp,convnet search.when=[model=mlp:model.hiden=[32]]": "",
    "-m search=random seed=1 model.dropout=interval(0,0.5)"
    " search.when=['model.dropout=0:optimizer.lr=0.1,0.2']": "is searched as numbers",
}
"""Commands that are no more than a mistake, and what their one line holds."""


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_one_line_and_no_file(words: str, tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").write_text("{}")
    done = typed(*words.split(" "))
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr.count("\n"), done.stderr[:7]) == (1, "error: ")
    assert REFUSED[words] in done.stderr
    assert done.stderr.rstrip().endswith(REFUSED[words]) or "Did" not in REFUSED[words]
    assert "gamma" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
    assert len(list(tmp_path.rglob("*"))) <= 4, "outputs/DATE"


@pytest.mark.parametrize("word", WORDS)
def test_each_subcommand_has_help_of_its_own(word: str, typed: Typed) -> None:
    done = typed(word, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m expt {word} ")
    assert WORDS[word] in help_text("all")


def test_deleted_folder_is_told(tmp_path: Path, monkeypatch: Patch, typed: Typed) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for word in ("epochs=1", "plan", "doctor"):
        done = typed(word)
        assert done.returncode == 2
        assert "the current folder is no longer there" in done.stderr
    assert typed("plan", "--help").returncode == 0


def test_second_ctrl_c_leaves_the_exit_code(monkeypatch: Patch, typed: Typed) -> None:
    lines = list[str]()

    def complain(error: Exception) -> None:
        lines.append(str(error))
        if len(lines) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_complain", complain)
    assert (typed("epohcs=1").returncode, lines[1:]) == (130, [command.AGAIN])


@pytest.mark.parametrize(
    "words", [["--version"], pytest.param(["--cfg", "job"], marks=pytest.mark.slow)]
)
def test_a_full_output_is_told_in_a_line(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "expt", *words],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: the output could not be written: ")
    assert done.stderr.count(b"\n") == 1


def test_lines_for_a_full_stderr_are_lost_and_nothing_else() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "expt", "--nope"], env=environment(), stderr=full
        )
    assert done.returncode == 2


NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes, opts=None, width=8):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))
"""
CONF = {
    "recipe/a.yaml": "# @package _global_\nepochs: 1\n",
    "recipe/b.yaml": "# @package _global_\nepochs: 2\n",
    "aug/a.yaml": "flip: 1\n",
    "aug/b.yaml": "flip: 2\n",
    "model/own.yaml": "defaults: [/aug@opts: a, _self_]\n_target_: own_net.Net\n",
    "experiment/e.yaml": "# @package _global_\ndefaults: [/recipe: a, _self_]\nseed: 7\n",
    "sweep/s.yaml": (
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {+recipe: 'a,b'}}}\n"
    ),
}
SMALL = ("world_size=1", "dataset.train_limit=64", "hydra.sweep.dir=sweep")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Return the current folder, with custom YAML in `conf`."""
    (tmp_path / "own_net.py").write_text(NET)
    for name, text in CONF.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    return tmp_path


def configs() -> dict[str, Any]:
    """Return those of the sweep's runs, by their folders."""
    return {
        path.parent.name: json.loads(path.read_text())["config"]
        for path in Path("sweep").glob("*/result.json")
    }


def test_a_sweep_over_custom_groups(conf: Path, capsys: Capture) -> None:
    """Also over one that a choice puts elsewhere."""
    expt.sweep("+recipe=a,b", *SMALL)
    found = {name: config["epochs"] for name, config in configs().items()}
    assert found == {"recipe=a": 1, "recipe=b": 2}
    assert "\nrecipe  accuracy/val" in capsys.readouterr().out
    expt.sweep("model=own", "aug@model.opts=a,b", "epochs=1", *SMALL[:2], folder="other")
    paths = Path("other").glob("*/result.json")
    models = {each.parent.name: json.loads(each.read_text())["config"]["model"] for each in paths}
    opts = {name: model["kwargs"]["opts"] for name, model in models.items()}
    assert opts == {"opts=a": {"flip": 1}, "opts=b": {"flip": 2}}


@pytest.mark.parametrize(
    "words",
    [("+recipe=glob(*)",), ("experiment=e", "recipe=a,b"), ("sweep=s",),
     ("model=own", "aug@model.opts=glob(*)"), ("+recipe=a,b", "search=random", "search.runs=2")],
)  # fmt: skip
def test_custom_groups_make_a_sweep(conf: Path, capsys: Capture, words: tuple[str, ...]) -> None:
    expt.sweep(*words, *SMALL, "hydra.launcher.dry_run=true")
    assert "start" in capsys.readouterr().out


def test_a_sweep_has_models_by_name_and_by_class_side_by_side(conf: Path) -> None:
    small = {"max_steps": 2, "world_size": 1, "tensorboard": {"images": False}}
    models = ["mlp", {"_target_": "own_net.Net"}, {"_target_": "own_net.Net", "width": 4}]
    found = expt.sweep({"model": models, **small}, folder="sweep", quiet=True)
    assert [each.config["model"]["name"] for each in found] == ["mlp", "_target_", "_target_"]
    assert [each.config["model"].get("kwargs") for each in found[1:]] == [{}, {"width": 4}]
    again = expt.sweep(*found[2].record["arguments"], folder="sweep", quiet=True)
    assert [each.folder for each in again] == [found[2].folder], "by the words of its record"


def test_a_search_gives_a_class_no_key_of_the_choice_that_it_replaces(conf: Path) -> None:
    net = "model={_target_: own_net.Net, width: 16}"
    few = ("epochs=1", "search=random", "search.runs=1", "optimizer.lr=0.1,0.2")
    (result,) = expt.sweep(net, *few, *SMALL).completed
    assert result.config["model"]["kwargs"] == {"width": 16}


def test_run_is_for_one_run() -> None:
    interval = {"seed": expt.interval(1, 2)}
    several: Any = (["seed=1,2"], ["-m", "seed=0,1"], ["sweep=seeds"], [interval])
    for words in several:
        with pytest.raises(ConfigError, match=r"use expt.sweep"):
            expt.run(*words)
