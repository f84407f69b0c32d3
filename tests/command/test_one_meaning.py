"""An override means the same in a run, a sweep, YAML and Python, or is refused."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from expt.command import invoke
from expt.command.grammar import about_run, as_dict
from expt.command.sweep import Grid
from expt.command.words import options_of
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from expt.python.arguments import words_of
from expt.runs.overrides import inherited
from tests.composing import composed, composer
from tests.facade import Capture, Patch

DRY = "hydra.launcher.dry_run=true"
FLIP, CROP = "dataset.augment={flip: true}", "dataset.augment={crop_padding: 2}"
CUSTOM = "+model={_target_: torch.nn.Linear, in_features: 1, out_features: 1}"


def typed(*words: str) -> None:
    invoke.command(options_of(words), typed_at=time.monotonic())


@pytest.mark.parametrize(
    "words",
    [
        [FLIP, CROP],
        ["dataset.augment.flip=true", CROP],
        [CROP, "dataset.augment.crop_padding=1"],
        ["seed=1", "seed=2"],
        ["early_stop={metric: loss/val, patience: 5}", "early_stop={metric: loss/val}"],
        ["~model", CUSTOM],
        ["+model.hidden=[3]", "model.hidden=[4]"],
    ],
)
def test_a_grid_of_one_run_is_that_run(words: list[str]) -> None:
    def settings(words: list[str], *, sweep: bool) -> Any:
        try:
            return composer().settings(words, sweep=sweep)
        except ConfigError as error:
            return str(error)

    ((*of_grid,),) = Grid(words, composer())
    assert settings(of_grid, sweep=True) == settings(words, sweep=True)
    assert as_dict(of_grid) == as_dict(words)


def test_a_seed_that_is_named_twice_is_one_repetition() -> None:
    assert Grid(["seed=1,1,0", "optimizer.lr=0.1,0.2"], composer()).repetitions == 2


def test_mappings_of_one_key_are_combined_and_all_count() -> None:
    axes = [f"{FLIP},{{flip: false}}", f"dataset.augment={{crop_padding: 0}},{CROP[16:]}"]
    runs = [*Grid(axes, composer())]
    found = [composer().settings(run, sweep=True)["dataset"]["augment"] for run in runs]
    assert [(each["flip"], each["crop_padding"]) for each in found] == [
        (True, 0), (True, 2), (False, 0), (False, 2),
    ]  # fmt: skip
    assert as_dict(runs[1])["dataset.augment"] == {"flip": True, "crop_padding": 2}
    assert inherited([FLIP, "seed=3"], [CROP, "seed=4"]) == [FLIP], "of a fork too"
    for words, typed in (
        (["optimizer=adamw", "optimizer.weight_decay=0.1"], "optimizer={lr: 0.01}"),
        (["checkpoint.keep_best=3"], "checkpoint={keep: 4}"),
        (["early_stop={metric: loss/val, patience: 5}"], "early_stop.patience=3"),
    ):
        assert inherited(words, [typed]) == words
    assert inherited(["optimizer={lr: 0.1}"], ["optimizer=adam"]) == []


@pytest.mark.parametrize("more", ["early_stop.threshold=0.1", "early_stop={threshold: 0.1}"])
def test_a_mapping_that_was_null_takes_further_keys(more: str) -> None:
    stop = "early_stop={metric: loss/val, patience: 5}"
    found = composer().settings([stop, more], sweep=False)["early_stop"]
    assert found == {"metric": "loss/val", "patience": 5, "threshold": 0.1}
    with pytest.raises(ConfigError, match=r"^early_stop\.patiens=1: "):
        composer().settings([stop, "early_stop.patiens=1"], sweep=False)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("-m seed=0,1 seed=5,6", "seed=0,1"),
        ("-m seed=0,1 seed=5", "seed=0,1"),
        ("-m sweep=seeds,amp_grid", "sweep=seeds,amp_grid"),
        ("sweep=seeds,amp_grid", "sweep=seeds,amp_grid"),
        ("-m experiment=plain,searches --config-dir own", "experiment=plain,searches"),
        ("-m seed=0,1 hydra.run.dir=a", "hydra.run.dir=a"),
        ("hydra.sweep.dir=a", "hydra.sweep.dir=a"),
        ("-m seed=0,1 hydra.sweep.subdir=a", "hydra.sweep.subdir=a"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("hydra.job.chdir=true", "hydra.job.chdir=true"),
        ("-m seed=0,1 hydra.job.chdir=true", "hydra.job.chdir=true"),
        ("experiment=moves --config-dir own", "hydra.job.chdir=true"),
        ("hydra.sweeper.params.seed=1", "hydra.sweeper.params.seed=1"),
    ],
)
def test_what_would_be_ignored_is_refused(words: str, key: str) -> None:
    own = Path("own/experiment")
    own.mkdir(parents=True)
    head = "# @package _global_\n"
    (own / "plain.yaml").write_text(f"{head}epochs: 1\n")
    (own / "searches.yaml").write_text(f"{head}defaults:\n  - override /search: random\n")
    (own / "moves.yaml").write_text(f"{head}hydra:\n  job:\n    chdir: true\n")
    with pytest.raises(ConfigError) as caught:
        typed(*words.split(), *([DRY] if "-m" in words else []))
    assert str(caught.value).startswith(f"{key}: ")


def test_a_run_in_this_process_is_none_of_a_sweep(capsys: Capture) -> None:
    typed("-m", "debug=false,true", DRY)
    refused = [line for line in capsys.readouterr().out.splitlines() if "be refused" in line]
    assert ["debug=true: " in line for line in refused] == [True]


def test_grids_that_only_share_a_command_are_run(capsys: Capture) -> None:
    typed("-m", "sweep=seeds", "experiment=ddp_mlp,diabetes", DRY)
    assert len(re.findall(r"seed=\d", capsys.readouterr().out)) == 10


@pytest.mark.parametrize(
    ("line", "number"),
    [("seed: 010", 8), ("batch_size: 0x40", 64), ("optimizer: {lr: 1:30.5}", 90.5)],
)
def test_a_number_that_yaml_reads_as_another_is_refused(line: str, number: float) -> None:
    (file := Path("own/experiment/here.yaml")).parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nepochs: 1_0\n{line}\n")
    with pytest.raises(ConfigError, match=rf"{file}:3: .*{number}"):
        typed("experiment=here", "--config-dir", "own")


@pytest.mark.parametrize("text", ["2024-31-12", "2024-13-01", "2024-12-31"])
def test_a_text_that_is_like_a_date_is_a_text(text: str) -> None:
    (file := Path("own/experiment/here.yaml")).parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nname: {text}\n")
    with pytest.raises(ConfigError, match=rf"^name={text}: there is no such key"):
        typed("experiment=here", "--config-dir", "own")


def test_a_file_that_another_builds_on_is_looked_at_too() -> None:
    (base := Path("own/model/base.yaml")).parent.mkdir(parents=True)
    base.write_text("defaults: [mlp, _self_]\nhidden: [010]\n")
    base.with_name("mine.yaml").write_text("defaults: [base, _self_]\n")
    words = ("model=mine", "--config-dir", "own")
    with pytest.raises(ConfigError, match=rf"{base}:2: 010: YAML reads it as 8"):
        typed(*words)


@pytest.mark.parametrize("value", [1, 1.0])
def test_a_value_is_recorded_as_its_keys_type(value: float) -> None:
    config = parse(composed(f"optimizer.lr={value}"), Machine(gpus=(), cpus=2))
    (word,) = words_of([], {"optimizer": {"lr": value}})
    for each in (word, f"optimizer.lr={value}"):
        assert repr(about_run("a", [each], config)["overrides"]) == "{'optimizer.lr': 1.0}"


def test_text_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    bad = b"caf\xe9".decode(errors="surrogateescape")
    for words in ([f"dataset.path={bad}"], [f"hydra.run.dir={bad}"], ["-m", f"seed=1,{bad}"]):
        with pytest.raises(ConfigError, match="udce9"):
            typed(*words)
    monkeypatch.setenv("BAD", bad)
    with pytest.raises(ConfigError, match=r"mlflow.experiment=.*udce9"):
        parse(composed("mlflow.experiment=${oc.env:BAD}"), Machine(gpus=(), cpus=2))
    (tmp_path / bad).mkdir()
    monkeypatch.chdir(bad)
    with pytest.raises(ConfigError, match="udce9"):
        typed("epochs=1")
