"""A mistake on the command line: exit code 2, one line that names it and its mend, and nothing left
behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException

import expt
from expt.command import command_line
from expt.command.hydra_errors import as_config_error
from expt.command.words import WORDS
from expt.errors import ConfigError
from expt.launch import forkserver
from tests.composing import hydra_at_hand

MISTAKES = {
    "modle=mlp": "modle=mlp: there is no key 'modle'. Did you mean 'model'?",
    "bakend=gloo": "bakend=gloo: there is no key 'bakend'. Did you mean 'backend'?",
    "early_stop.patience=3": (
        "early_stop.patience=3: there is no key 'early_stop.patience'. Type its keys together, as"
        " in 'early_stop={metric: loss/val, patience: 5}'"
    ),
    "early_stop.patienc=3": (
        "early_stop.patienc=3: there is no key 'early_stop.patienc'. Did you mean 'patience'? Type"
        " its keys together, as in 'early_stop={metric: loss/val, patience: 5}'"
    ),
    "optimizer.groups=[{matches:head}]": (
        "optimizer.groups.0.matches='head': there is no such key. Did you mean 'match'?"
    ),
    "experiment=char_lm model.hiden=3": (
        "model.hiden=3: there is no key 'model.hiden'. Did you mean 'model.hidden', which another"
        " model=... has?"
    ),
    "model=transformer model.widht=3": (
        "model.widht=3: there is no key 'model.widht'. Did you mean 'model.width'?"
    ),
    "experiment=gan task=classification": (
        "experiment=gan task=classification: the experiment has a task of its own,"
        " expt.tasks.gan.Adversarial, and all else of it goes with that; leave out"
        " task=classification, or experiment=gan"
    ),
    "experiment=char_lm dataset.root=. model=mlp": (
        "experiment=char_lm model=mlp: the experiment sets model.size, which model=mlp has not;"
        " leave out model=mlp, or add ~model.size"
    ),
    "optimizer.lrr=1": (
        "optimizer.lrr=1: there is no key 'optimizer.lrr'. Did you mean 'optimizer.lr'?"
    ),
    "model=resnet19": (
        "model=resnet19: not one of convnet, mlp, paddle_convnet, resnet18, timm,"
        " torchvision, transformer, unet. Did you mean 'resnet18'?"
    ),
    "x": f"x: neither a command ({', '.join(WORDS)}) nor of the form key=value.",
    "reprot": (
        f"reprot: neither a command ({', '.join(WORDS)}) nor of the form key=value. Did you mean"
        " 'report'?"
    ),
    "seed=1 x": "x: not of the form key=value; quote values with spaces or brackets",
    "model=mlp,convnet": (
        "model=mlp,convnet: several values make a sweep; add -m, as in python -m expt -m"
        " model=mlp,convnet"
    ),
    "weights='s/lr=1','model=mlp'": "weights=s/lr=1,model=mlp: there is no such file or folder.",
    "-m search=tpe model.hidden=[interval(1,64)],[3]": (
        "model.hidden=[interval(1,64)],[3]: interval(...) can't stand in a list; name whole ones,"
        " as in model.hidden=[32],[64]"
    ),
    "-m search=tpe optimizer.lr=interval(0.1,1) search.when=['model=mlp:model.hidden=[range(3)],[3]']": (
        "search.when=['model=mlp:model.hidden=[range(3)],[3]']: range(...) can't stand in a list;"
        " name whole ones, as in model.hidden=[32],[64]"
    ),
    "-m model.hidden=[choice(1,2)],[3]": (
        "model.hidden=[choice(1,2)],[3]: choice(...) can't stand in a list; name whole ones, as in "
        "model.hidden=[32],[64]"
    ),
    "-m optimizer.lr=range(1,3),5": (
        "optimizer.lr=range(1,3),5: range(...) can't stand among other values; type each value, as"
        " in optimizer.lr=A,B,C, or range(...) alone"
    ),
    "-m search=tpe seed=0,1 search.when=['seed=1:batch_size=8,interval(1,3)']": (
        "search.when=['seed=1:batch_size=8,interval(1,3)']: interval(...) can't stand among other"
        " values; type each value, as in batch_size=A,B,C, or interval(...) alone"
    ),
    "-m seed=tag(log,interval(1,3)),choice(4,5)": (
        "seed=tag(log,interval(1,3)),choice(4,5): interval(...) can't stand among other values;"
        " type each value, as in seed=A,B,C, or interval(...) alone"
    ),
    "-m optimizer.lr=0.1,0.2 model.dropout=0.5,shuffle(0.1,0.2)": (
        "model.dropout=0.5,shuffle(0.1,0.2): shuffle(...) can't stand among other values; type each"
        " value, as in model.dropout=A,B,C, or shuffle(...) alone"
    ),
    "dataset=image_folder": "dataset.root: has no value; give one, as in dataset.root=...",
    "gpus=4": "gpus=4: this machine has no GPUs; use gpus=0 to run on the CPU",
    "world_size=3": "batch_size=64: is the global batch and must divide by 3 workers; use 63 or 66",
    "dry_run=true": (
        "dry_run=true: there is no key 'dry_run'. Did you mean 'hydra.launcher.dry_run'?"
    ),
    "retries=1": "retries=1: there is no key 'retries'. Did you mean 'hydra.launcher.retries'?",
    "lr=0.1": "lr=0.1: there is no key 'lr'. Did you mean 'optimizer.lr'?",
    "lrr=0.1": "lrr=0.1: there is no key 'lrr'. Did you mean 'optimizer.lr'?",
    "learning_rate=0.1": (
        "learning_rate=0.1: there is no key 'learning_rate'. Did you mean 'optimizer.lr'?"
    ),
    "optimizer.learning_rate=1": (
        "optimizer.learning_rate=1: there is no key 'optimizer.learning_rate'. Did you mean"
        " 'optimizer.lr'?"
    ),
    "~model": (
        "model: names none of mlp, convnet, paddle_convnet, resnet18, torchvision, timm, transformer,"
        " unet; its YAML needs a name: or a _target_:"
    ),
    "optimizer=adam ~optimizer.nesterov": (
        "~optimizer.nesterov: the chosen optimizer has no key 'optimizer.nesterov'; another"
        " optimizer=... has"
    ),
    "tensorboard={imagez:true}": (
        "tensorboard={imagez:true}: there is no key 'tensorboard.imagez'. Did you mean"
        " 'tensorboard.images'?"
    ),
    "~model.hiden": "~model.hiden: there is no key 'model.hiden'. Did you mean 'model.hidden'?",
    "metrics=f1": "metrics=f1: there is no key 'metrics'. Did you mean 'task.metrics'?",
    "seed=range(3)": (
        "seed=range(3): several values make a sweep; add -m, as in python -m expt -m"
        " 'seed=range(3)'"
    ),
    "eval_split=test objective=accuracy/val": (
        "objective=accuracy/val: eval_split=test has no val; use objective=accuracy/test"
    ),
    "optimizer.nesterov=true optimizer.momentum=0": (
        "optimizer.nesterov=true: needs a momentum, as in optimizer.momentum=0.9"
    ),
    "optimizer=null": "optimizer=null: not one of adam, adamw, muon, plain_sgd, sgd.",
}
COMPOSING = {
    "sweep=sedes": "sweep=sedes: not one of amp_grid, models_by_lr, seeds. Did you mean 'seeds'?",
    "experiment=ddp_mpl": (
        "experiment=ddp_mpl: not one of amp_sweep, char_lm, d2l_resnet18, ddp_mlp,"
        " diabetes, gan, gpt2_124m, keras_convnet, paddle_mnist. Did you mean 'ddp_mlp'?"
    ),
    "model.hidden=[": (
        "model.hidden=[: not of the form key=value; quote values with spaces or brackets"
    ),
    "dataset.seeed=1": (
        "dataset.seeed=1: there is no key 'dataset.seeed'. Did you mean 'dataset.seed', which"
        " another dataset=... has?"
    ),
    "callbacks={_target_: a.B}": (
        "callbacks={_target_: a.B}: is a list; put brackets around it, as in 'callbacks=[{_target_:"
        " a.B}]'"
    ),
    "+seed=3": "+seed=3: with + a key must be new, and there is 'seed' already; type seed=3",
    "model.hidden=[interval(1,64)]": (
        "model.hidden=[interval(1,64)]: interval(...) can't stand in a list; name whole ones, as in"
        " model.hidden=[32],[64]"
    ),
    "dataset.augment={cutout:range(1,3)}": (
        "dataset.augment={cutout:range(1,3)}: range(...) can't stand in a mapping; give the key in"
        " it, as in dataset.augment.KEY=..."
    ),
    "model._target_=a.B": (
        "model._target_=a.B: the chosen model is no class of your own; write conf/model/NAME.yaml,"
        " or type +model._target_=a.B"
    ),
    "ddp.static=true": (
        "ddp.static=true: there is no key 'ddp.static'. Did you mean 'ddp.static_graph'?"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_command_line(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "kill", lambda: None)  # this session's is used again
    with pytest.raises(SystemExit) as ended:
        command_line.main(mistake.split())
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {MISTAKES[mistake]}\n")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert len(list(tmp_path.rglob("*"))) <= 2  # outputs/DATE


@pytest.mark.parametrize("override", COMPOSING)
def test_what_hydra_raises_is_put_in_words(override: str) -> None:
    with hydra_at_hand(), pytest.raises(HydraException) as caught:
        compose("config", overrides=[override])
    assert str(as_config_error(caught.value, [override])) == COMPOSING[override]


def test_a_script_is_told_of_expt_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"seed=1,2: several values make a sweep; use expt\.sweep"
    ):
        expt.run("seed=1,2")


OWN = {
    "model/nameless.yaml": "width: 3\n",
    "model/linear.yaml": "_target_: own_linear.Linear\nheight: 3\nblock: {depth: 1}\n",
    "experiment/lost.yaml": "epochs: 3\nseed: 1\n",
}
OF_OWN = {
    "model=nameless": "model: names none of mlp, convnet, paddle_convnet, resnet18, torchvision, timm,"
    " transformer, unet; its YAML needs a name: or a _target_:",
    "experiment=lost": (
        "experiment: there is no such key; a group's own YAML begins with # @package _global_"
    ),
    "model=linear model.breadth=3": (
        "model.breadth=3: the YAML has no key 'model.breadth'; add it there, or type"
        " +model.breadth=3"
    ),
    "model=linear model.heigth=3": (
        "model.heigth=3: the YAML has no key 'model.heigth'. Did you mean 'model.height'? "
        "If not, add it there, or type +model.heigth=3"
    ),
    "model=linear model.block.deth=3": (
        "model.block.deth=3: the YAML has no key 'model.block.deth'. Did you mean"
        " 'model.block.depth'? If not, add it there, or type +model.block.deth=3"
    ),
    "model=linear +model.height=8": (
        "+model.height=8: with + a key must be new, and there is 'model.height' already; type"
        " model.height=8"
    ),
    "-m model=linear,mlp +model.height=8": (
        "+model.height=8: with + a key must be new, and one of model=linear,mlp has 'model.height'"
        " already; type model.height=8; where another has not, sweep each model by itself"
    ),
}


@pytest.mark.parametrize("mistake", OF_OWN)
def test_a_mistake_in_yaml_of_ones_own(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in OWN.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "kill", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command_line.main(mistake.split())
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {OF_OWN[mistake]}\n")
