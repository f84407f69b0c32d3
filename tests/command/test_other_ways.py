"""Values that came by another way than the keyboard: variables, custom YAML, the axes of a file."""

from pathlib import Path

import pytest

from expt.command import invoke
from expt.command.grammar import about_run, as_dict, readable
from expt.command.hydra_part import named_axes, refuse_unheeded
from expt.command.search_space import space_of
from expt.command.sweep import Grid
from expt.command.sweep_folder import SweepFolder
from expt.command.words import options_of
from expt.config.identity import shown
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composer
from tests.facade import Capture, Patch, run

HERE = Machine(cpus=2, gpus=())
LR = "${oc.decode:${oc.env:EXPT_LR}}"


@pytest.fixture(autouse=True)
def _variables(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXPT_LR", "0.0175")
    monkeypatch.setenv("EXPT_BAD", "no-number")


def written(text: str, *, sweep: bool = False) -> Path:
    """Write a custom choice, `experiment=one`, or the axes of `sweep=one`."""
    file = Path("conf/sweep/one.yaml" if sweep else "conf/experiment/one.yaml")
    file.parent.mkdir(parents=True)
    above = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      " * sweep
    file.write_text(f"# @package _global_\n{above}{text}\n")
    return Path("conf").resolve()


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        invoke.command(options_of(words), typed_at=0)
    return str(raised.value)


def test_a_number_of_a_variable_is_recorded_as_it_is() -> None:
    words = [readable(f"optimizer.lr={LR}"), "model.hidden='${oc.decode:${oc.env:EXPT_LR}}'"]
    settings = composer().settings(words[:1], sweep=True)
    config = parse(settings, HERE)
    assert shown(config)["optimizer"]["lr"] == 0.0175
    assert about_run("x", words[:1], config)["overrides"] == {"optimizer.lr": 0.0175}


def test_a_run_by_variables_is_resumed_and_evaluated(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXPT_LR", "3")
    few = (f"optimizer.lr={LR}", f"seed={LR}", "epochs=1", "dataset.train_limit=200")
    for words in (few, ("epochs=2", "resume=auto"), ("evaluate", "run")):
        folder = () if "evaluate" in words else ("world_size=1", "hydra.run.dir=run", "-q")
        done = run(*words, *folder, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_a_choice_of_another_file_is_one_of_its_defaults() -> None:
    written("model: convnet")
    fix = "write - override /model: convnet in its defaults"
    assert refused("--config-dir=conf", "experiment=one").endswith(fix)
    two = Path("conf/experiment/two.yaml")
    two.write_text("# @package _global_\ndefaults:\n  - /experiment: one\n")
    assert "- NAME" in refused("--config-dir=conf", "experiment=two")


def test_a_run_of_a_sweep_is_named_by_the_value(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = SweepFolder(tmp_path / "sweep", composer(), HERE)
    keys = ("optimizer.lr", "mlflow.experiment")
    words = [readable(f"optimizer.lr={LR}"), "mlflow.experiment=${oc.env:EXPT_BAD}"]
    name = folder.run(words, 0, keys).job.name
    assert "lr=0.0175" in name
    assert "no-number" not in name
    assert folder.run(["optimizer.lr=${oc.env:EXPT_NONE}"], 1, keys).job.error is not None
    monkeypatch.setenv("EXPT_BAD", "adam")
    chosen = folder.run(["optimizer=${oc.env:EXPT_BAD}"], 2, ("optimizer",))
    assert chosen.job.name == "optimizer=adam"


def test_a_text_of_a_variable_stays_secret() -> None:
    words = ["mlflow.experiment=${oc.env:EXPT_BAD}", "label_smoothing=${optimizer.lr}"]
    config = parse(composer().settings(words, sweep=True), HERE)
    assert shown(config)["mlflow"]["experiment"] == "${oc.env:EXPT_BAD}"
    overrides = about_run("x", words, config)["overrides"]
    assert overrides == {
        "mlflow.experiment": "${oc.env:EXPT_BAD}",
        "label_smoothing": config.optimizer.lr,
    }


def test_a_search_takes_a_number_of_a_variable() -> None:
    words = [readable(f"optimizer.lr={LR},0.1")]
    here = composer()
    space = space_of(words, (), here, lambda tried: here.settings(tried, sweep=True), HERE)
    assert space.parameters[0].meant == (0.0175, 0.1)
    assert space.read({"optimizer.lr": 0.0175}.get) is not None
    words = ["optimizer.lr=${oc.env:EXPT_BAD},0.1"]
    with pytest.raises(ConfigError, match="it came from"):
        space_of(words, (), here, lambda tried: here.settings(tried, sweep=True), HERE)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.lr=0.1,${oc.env:EXPT_BAD}", "it came from ${oc.env:EXPT_BAD}"),
        ("optimizer.lr=0.1,${oc.env:EXPT_NONE}", "'EXPT_NONE' not found"),
        ("batch_size=32,${optimizer.lr}", "it came from ${optimizer.lr}"),
    ],
)
def test_an_interpolation_of_a_grid_is_looked_at_first(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Grid([word], composer()).check(HERE)
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{word.partition('=')[0]}=")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("optimizer: {lr: '0.1'}", "write optimizer.lr=0.1"),
        ("optimizer:\n  lr: ${oc.env:EXPT_LR}", f"is a text; write 'optimizer.lr=\"{LR}\"'"),
        ("amp: 'on'", "write amp=true"),
        ("optimizer: {lr: [0.1, 0.2]}", "for a run of each write -m optimizer.lr=0.1,0.2"),
        ("max_steps: 'null'", "write max_steps=null"),
        ("optimizer.lr: 0.1", "write lr below optimizer"),
        ("sharding: {shards.x: 1}", "write x below shards"),
    ],
)
def test_a_value_of_a_file_says_how_it_is_written(text: str, fix: str) -> None:
    written(text)
    assert fix in refused("experiment=one", "model=mlp")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("amp: [true, false]", "write -m amp=true,false"),
        ("optimizer.lr: '\"0.1\",0.2'", "write optimizer.lr=0.1"),
        ("optimizer: {lr: '0.1,0.2'}", "write optimizer.lr: 0.1,0.2"),
        ("gradient_clip: null", "is not Optional"),
        ("optimizer.betas[-1]: 0.5,0.6", "elements of a list are counted from 0"),
        ("model.hidden[7]: 5,6", "model.hidden has 1 element"),
    ],
)
def test_an_axis_of_a_file_is_advised_as_it_stands_there(text: str, fix: str) -> None:
    written(text, sweep=True)
    assert fix in refused("sweep=one", "model=mlp", "optimizer=adam")


def test_an_axis_of_a_file_may_name_an_element() -> None:
    here = composer(written("optimizer.betas[0]: 0.5,0.6", sweep=True))
    axes = named_axes(here.compose(["sweep=one", "optimizer=adam"]))
    assert axes == ["optimizer.betas.0=0.5,0.6"]
    condition = "optimizer=adam: optimizer.betas[0]=0.5,0.6"
    words = ["optimizer=adam,adamw"]
    space = space_of(words, [condition], here, lambda x: here.settings(x, sweep=True), HERE)
    assert space.parameters[-1].name == "optimizer.betas.0"


def test_a_list_of_a_file_is_an_axis_of_one_value_digits_signs_and_all() -> None:
    axes = """
      model.x: [12345678.0, 0.1, null]
      dataset.features: ["a, b", "c:d", "it's", "4"]"""
    here = composer(written(axes.lstrip(), sweep=True))
    found = as_dict(named_axes(here.compose(["sweep=one"])))
    assert found == {
        "model.x": [12345678.0, 0.1, None],
        "dataset.features": ["a, b", "c:d", "it's", "4"],
    }


def test_axes_of_a_file_without_a_sweep_are_named(capsys: Capture) -> None:
    here = composer(written("seed: 0,1\n      optimizer.lr: 0.1,0.2", sweep=True))
    for sweep in (True, False):
        refuse_unheeded(here.own, here.compose(["sweep=one"]), sweep=sweep)
        assert capsys.readouterr().err.count("seed=0,1 makes a sweep; add -m") == (not sweep)


def test_what_other_ways_give_rightly_is_silent(capsys: Capture) -> None:
    written("optimizer: {lr: &rate 1e-3, weight_decay: *rate}\namp: off\nsend: []\nmax_steps: 1")
    words = ["experiment=one", "batch_size=${optimizer.nesterov}"]
    assert "batch_size=" in refused(*words)  # and nothing else
    assert capsys.readouterr().err == ""


def test_a_text_of_any_resolver_is_decoded_as_advised() -> None:
    found = refused("seed=${now:%Y}")
    assert found.endswith("""is a text; write 'seed="${oc.decode:${now:%Y}}"'""")
    word = readable("seed=${oc.decode:${now:%Y}}")
    assert parse(composer().settings([word], sweep=False), HERE).seed > 2000
