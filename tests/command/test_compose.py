"""What is composed, compared with Hydra alone; and what is said of a mistake."""

import math
import pickle
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expt.command import compose
from expt.command.by_hydra import HydraTask, _value
from expt.command.compose import Composer, settings_of
from expt.command.grammar import parse, readable, replaces, with_classes_added
from expt.command.hydra_part import hydra_files, own_folders_of, place
from expt.command.run import Command
from expt.command.terminal import console
from expt.config import conf_dir
from expt.errors import ConfigError
from expt.launch.job import QUEUED, Job
from expt.launch.launcher import launcher
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, Objective
from tests.composing import composer
from tests.conftest import Typed
from tests.facade import Patch, as_typed, run

WORDS = (
    *as_typed("model=mlp model=convnet optimizer=adamw optimizer.lr=0.3"),
    *as_typed("model.hidden=[3,4] seed=7 amp=bf16"),
    "tensorboard={images: false}",
    *as_typed("tensorboard.norms=false max_steps=null ++model.extra=1"),
    "+model.more={a: [1]}",
    *as_typed("~scheduler experiment=char_lm weights='${seed}.pt' dataset.augment.flip=true"),
)


@pytest.fixture
def _by_hydra() -> Iterator[None]:
    """Not as tests share it, and nothing that was composed before."""
    composer.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "compose", hydra_compose)
        patch.setattr(compose, "_OF_EXPT", compose.Kept({}, {}))
        yield
    composer.cache_clear()


by_hydra = pytest.mark.usefixtures("_by_hydra")


def of_hydra_alone(words: Sequence[str]) -> dict[str, Any]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return settings_of(hydra_compose("config", with_classes_added(words)))


@by_hydra
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(WORDS), max_size=6, unique_by=lambda word: word.partition("=")[0]))
def test_settings_are_those_that_hydra_composes(words: list[str]) -> None:
    try:
        expected = of_hydra_alone(words)
    except Exception:
        with pytest.raises(ConfigError):
            composer().settings(words, sweep=False)
        return
    assert composer().settings(words, sweep=False) == expected
    assert settings_of(composer().compose(words)) == expected


def test_a_class_stands_in_the_place_of_a_choice() -> None:
    net = "model={_target_: mine.Net, width: 16}"
    assert with_classes_added(["model.width=3", net, "epochs=2"]) == [
        *("~model", f"+{net}", "model.width=3", "epochs=2")
    ]
    assert with_classes_added(["model=mlp", "init={_target_: a.B}"])[0] == "~init"
    for word in ("model={width: 16}", "model=mlp,{_target_: mine.Net}", "tensorboard={images: 1}"):
        assert with_classes_added([word]) == [word]
    found = composer().settings([net, "model.width=8"], sweep=False)["model"]
    assert found == {"_target_": "mine.Net", "width": 8}


def test_a_value_may_be_one_of_a_list() -> None:
    watch = "callbacks=[{_target_: mine.Watch, every: 1}]"
    found = composer().settings([watch, "callbacks.0.every=2"], sweep=False)["callbacks"]
    assert found == [{"_target_": "mine.Watch", "every": 2}]
    with pytest.raises(ConfigError, match=r"^callbacks.1.every=2: "):
        composer().settings([watch, "callbacks.1.every=2"], sweep=False)


def test_every_custom_dataset_has_the_same_keys() -> None:
    own = "dataset={_target_: mine.Data}"
    found = composer().settings([own, "dataset.val_fraction=0.2"], sweep=False)
    assert found["dataset"]["val_fraction"] == 0.2
    with pytest.raises(ConfigError, match=r"^dataset.size=3: "):
        composer().settings([own, "dataset.size=3"], sweep=False)


@by_hydra
def test_what_hydra_says_of_itself_is_that_of_the_run(tmp_path: Path) -> None:
    words = ["seed=3", "mlflow.experiment='${hydra:job.num} ${hydra:runtime.output_dir}'"]
    composed = composer().compose(words)
    place(composed, tmp_path / "seed=3", 7)
    assert settings_of(composed)["mlflow"]["experiment"] == f"7 {tmp_path}/seed=3"
    files = hydra_files(composed, words)
    config, own, overrides = map(yaml.safe_load, files.values())
    assert config["seed"] == 3
    assert "${hydra:job.num}" in files["config"], "as it was typed"
    assert "hydra" not in config
    assert own["hydra"]["overrides"]["task"] == overrides == words
    assert own["hydra"]["job"]["num"] == 7


def test_now_is_the_same_in_all_runs_of_a_command() -> None:
    this = Composer()
    words = [["seed=1", "wandb.group='${now:%f}'"], ["seed=2", "wandb.group='${now:%f}'"]]
    found = {settings_of(this.compose(each))["wandb"]["group"] for each in words}
    assert len(found) == 1


@by_hydra
def test_whoever_else_uses_hydra_here_finds_it_as_it_was() -> None:
    with initialize_config_dir(str(conf_dir() / "model"), job_name="own", version_base="1.2"):
        theirs = hydra_compose("mlp", [])
        before, of_run = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        Composer([], ["hydra.verbose=false"]).compose(["seed=1"])  # none that is kept
        assert GlobalHydra.instance().hydra is before
        assert JobRuntime.instance().get("name") == "own"
        assert HydraConfig.instance().cfg is of_run
        assert hydra_compose("mlp", []) == theirs


@by_hydra
def test_threads_compose_at_once() -> None:
    def composed_seed(seed: int) -> int:
        this = Composer()
        for _ in range(2):
            this.compose([f"seed={seed}"])
        return int(settings_of(this.compose([f"seed={seed}", "model=convnet"]))["seed"])

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(composed_seed, range(4))] == [*range(4)]


@by_hydra
def test_custom_yaml_is_found_in_several_folders(tmp_path: Path) -> None:
    for folder, name in (("a", "net"), ("b", "other")):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / f"{name}.yaml").write_text(f"_target_: mine.{name}\n")
    this = Composer([tmp_path / "a", tmp_path / "b"])
    assert {"net", "other", "mlp"} <= {*this.options("model")}
    for name in ("net", "other"):
        assert this.settings([f"model={name}"], sweep=False)["model"]["_target_"] == f"mine.{name}"
    files = hydra_files(this.compose(["model=net"]), ["model=net"])
    (tmp_path / "hydra.yaml").write_text(files["hydra"])
    folders = [f"{tmp_path}/{name}" for name in "ab"]
    assert own_folders_of(tmp_path / "hydra.yaml") == folders


@pytest.mark.parametrize(
    ("word", "part"),
    [
        *((word, "quote") for word in ("a=b=c", "a=[", "x y=3", "a=[é,'b,c']", "a=[wing (mm),b]")),
        ("model.widths=[3]", "model=mlp has no key .* model=convnet or"),
        ("seed=${seeds}", "'seeds' not found$"),
        ("seed='${oc.decode:\"1,2\"}'", r"expecting <EOF>$"),
        ("epochs.x=3", r"write epochs=3$"),
        ("optimizer.lr.x=3", r"write optimizer\.lr=3$"),
        ("max_steps.0.x=3", r"write max_steps=3$"),
        ("gpus.first=3", r"write gpus=\[3\]$"),
        ("+epochs=3", "epochs"),
        ("~epohcs", "epohcs"),
        ("seed=${sede}", "sede"),
        ("recipe=a", "recipe"),
        ("early_stop.patience=3", r"e\.g\. 'early_stop={.*}'$"),
        ("optimizer.name=adam", "write optimizer=adam$"),
        ("checkpoint.foo.bar=1", r"checkpoint has checkpoint\.every_steps, "),
        ("optimizer.foo.bar=1", r"optimizer=sgd has optimizer\.lr, "),
        ("model='mlp", "quote"),
        ("following=null", "there is no key .following.\\.$"),
        ("tensorboard={imagez: true}", "Did you mean 'tensorboard.images'\\?$"),
        ("model=transformer model.widht=3", "Did you mean 'model.width'\\?$"),
        ("dataset=table dataset.target=y", r"mean 'dataset\.targets'\?$"),
        ("search.run=3", r"mean 'search\.runs'\? Add search=cmaes or "),
    ],
)
def test_a_mistake_is_told_in_a_line(word: str, part: str) -> None:
    words = re.split(r" (?=model\.|dataset\.)", word)
    with pytest.raises(ConfigError, match=part) as caught:
        composer().settings(words, sweep=False)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_of_another_choice_comes_with_the_choices_that_have_it() -> None:
    for word, hint in {
        "rooot": "Did you mean 'dataset.root'. A",
        "root": "; a",
    }.items():
        with pytest.raises(ConfigError, match=rf"{hint}dd dataset=.*image_folder or"):
            composer().compose([f"dataset.{word}=x"])


def test_a_key_of_ones_own_is_added_with_a_plus() -> None:
    assert composer().settings(["+recipe=a"], sweep=False)["recipe"] == "a"


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("model.sizes.1=3", [8, 3]),
        ("model.other.0=3", r"write the whole list, \+model\.other=\[3\]"),
        ("+model.other.0=3", r"write the whole list, \+model\.other=\[3\]"),
        ("+model.opts.a.0=3", r"\+model\.opts\.a=\[3\]"),
        ("model.sizes.0.1=3", r"write model\.sizes\.0=3$"),
        ("model.sizes.2=3", r"model\.sizes=\[8,9,3\]"),
        ("model.none.0=3", r"model\.none=\[3\]"),
        ("model.named.5=3", "model.named.5"),
        ("+model.named.6=3", {5: 2, "6": 3}),
    ],
)
def test_an_element_of_a_custom_argument(tmp_path: Path, word: str, right: object) -> None:
    (tmp_path / "model").mkdir()
    content = "_target_: mine.Net\nsizes: [8, 9]\nnone: null\nnamed: {5: 2}\n"
    (tmp_path / "model/net.yaml").write_text(content)
    this, words = Composer([tmp_path]), ["model=net", word]
    if isinstance(right, str):
        with pytest.raises(ConfigError, match=right):
            this.settings(words, sweep=False)
    else:
        key = word.split(".")[1]
        assert this.settings(words, sweep=False)["model"][key] == right


def test_an_argument_of_a_custom_class_is_added_with_a_plus(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/net.yaml").write_text("_target_: mine.Net\nheight: 3\n")
    this = Composer([tmp_path])
    with pytest.raises(ConfigError, match=r"type \+model.breadth=3"):
        this.compose(["model=net", "model.breadth=3"])
    with pytest.raises(
        ConfigError, match=r"type \+model.heigth=3 if .* Did you mean 'model.height'\?$"
    ):
        this.compose(["model=net", "model.heigth=3"])
    with pytest.raises(ConfigError, match=r"Did you mean 'dataset.val_fraction'\?"):
        this.compose(["dataset={_target_: mine.Data}", "dataset.valfraction=0.1"])
    found = this.settings(["model=net", "+model.breadth=3", "model.height=4"], sweep=False)
    assert found["model"] == {"_target_": "mine.Net", "height": 4, "breadth": 3}


@by_hydra
def test_what_is_cached_belongs_to_the_current_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    def folder() -> str:
        return str(Composer().compose(["model=mlp"]).hydra.runtime.cwd)

    assert folder() == str(tmp_path)
    (other := tmp_path / "other").mkdir()
    monkeypatch.chdir(other)
    assert folder() == str(other)


def test_a_launcher_in_another_process_gets_a_task_of_its_own() -> None:
    known = Command(launcher(), 0.0, console(quiet=True))
    task: Any = pickle.loads(pickle.dumps(HydraTask(known, composer(), [])))
    assert task._command is None


def test_a_run_that_came_to_nothing_is_nan_to_a_sweeper() -> None:
    objective = Objective(name="accuracy/val", value=0.5)
    for status, value in ((FAILED, None), (INTERRUPTED, None), (QUEUED, None), (COMPLETED, 0.5)):
        found = _value(Job(RunPaths(Path("a")), None, status, None, objective if value else None))
        assert found == value or (value is None and found is not None and math.isnan(found))


def test_a_single_run_has_callbacks_too(tmp_path: Path) -> None:
    (tmp_path / "recorder.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Recorder(Callback):\n"
        "    def on_run_start(self, config, **kwargs): print('callback', config.seed)\n"
    )
    (tmp_path / "conf/hydra/callbacks").mkdir(parents=True)
    (tmp_path / "conf/hydra/callbacks/mine.yaml").write_text("it:\n  _target_: recorder.Recorder\n")
    words = ("hydra/callbacks=mine", "seed=3", "epochs=1", "world_size=1", "hydra.run.dir=run")
    done = run("--config-dir", "conf", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("callback 3\n")
    assert (tmp_path / "run/.hydra/overrides.yaml").exists()
    assert (tmp_path / "run/result.json").exists()


ELEMENTS = {
    "model.hidden[1]=16": [64, 16],
    "'model.hidden[1]=16'": [64, 16],
    '"model.hidden[1]"=16': [64, 16],
    "model.hidden.0=16": [16, 64],
    "++model.hidden.0=16": [16, 64],
    "model.hidden.2=16": r"model\.hidden=\[64,64,16\]",
    "+model.hidden[2]=16": r"model\.hidden=\[64,64,16\]",
    "model.hidden.first=16": r"model\.hidden=\[64,64,16\]",
    "~model.hidden[0]": "is in a list; write the list that is left$",
    "model.hidden[-1]=16": "counted from 0",
    "send.0=mlflow": r"send=\[mlflow\]",
    "seed[0]=3": r"seed has one value, 0; write seed=3$",
    "+seed.0=3": r"write seed=3$",
    "optimizer.lr.1=3": r"write optimizer\.lr=3$",
    "max_steps.0=3": r"null; write max_steps=3$",
    "early_stop.0=3": "write 'early_stop={metric: loss/val, patience: 5}'$",
    "optimizer.groups.0={match: a, epochs: 2}": r"'optimizer\.groups=\[\{match:a,epochs:2\}\]'$",
    "model.0=convnet": r"write model=convnet$",
    "gpus.0=1": r"write gpus=\[1\]$",
    "model.hidden.0.1=3": r"write model\.hidden\.0=3$",
}


@pytest.mark.parametrize("word", ELEMENTS)
def test_an_element_of_a_list_is_set_or_the_whole_list_is_named(word: str) -> None:
    right = ELEMENTS[word]
    if not isinstance(right, str):
        found = composer().settings(["model.hidden=[64,64]", readable(word)], sweep=False)
        assert found["model"]["hidden"] == right
        return
    with pytest.raises(ConfigError, match=right):
        composer().compose(["model.hidden=[64,64]", readable(word)])


def test_a_key_of_an_element_may_be_missing_in_it() -> None:
    words = ["optimizer.groups=[{match: a},{match: b}]", readable("optimizer.groups[1].lr_scale=2")]
    found = composer().settings(words, sweep=False)["optimizer"]["groups"]
    assert found == [{"match": "a"}, {"match": "b", "lr_scale": 2}]
    whole = [words[0], "optimizer.groups.1={lr_scale: 2}"]
    assert composer().settings(whole, sweep=False)["optimizer"]["groups"] == found
    with pytest.raises(ConfigError, match=r"mean 'optimizer\.groups\.1\.lr_scale'"):
        composer().compose([words[0], "optimizer.groups.1.lrscale=2"])
    with pytest.raises(ConfigError, match=r"optimizer\.groups=\[{lr_scale:2}\]"):
        composer().compose(["optimizer.groups.0.lr_scale=2"])
    with pytest.raises(ConfigError, match=r"write the list that is left$"):
        composer().compose([*words, "~optimizer.groups.1.match"])


def test_an_element_is_set_next_to_a_number_that_is_a_key() -> None:
    words = ["+recipe={a: 1}", "++model.hidden.0=16", "+recipe.5=2"]
    found = composer().settings(words, sweep=False)
    assert (found["model"]["hidden"], found["recipe"]) == ([16], {"a": 1, "5": 2})


def test_a_whole_list_replaces_an_element_typed_before() -> None:
    element, whole = parse(["model.hidden.0=16", "model.hidden=[64,64]"])
    assert replaces(whole, element)
    assert not replaces(element, whole)
    assert not replaces(*parse(["model.hid=3", "model.hidden.0=16"]))


CHOICES = {
    "far": "defaults:\n  - override /hydra/launcher: submitit_local\n",
    "near": "epochs: 1\n",
    "folder": "hydra: {sweep: {dir: mine}}\n",
    "run": "hydra: {run: {dir: mine}, job: {env_set: {A: b}}}\n",
    "moves": "hydra: {job: {chdir: true}}\n",
}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("-m experiment=near,far", 2, "and type hydra/launcher=submitit_local"),
        ("-m experiment=far,near", 2, "and type hydra/launcher=submitit_local"),
        ("-m experiment=near,folder", 2, "different values of hydra.sweep,"),
        ("-m experiment=near,moves", 2, "hydra.job.chdir=true"),
        ("-m experiment=run", 0, ""),
        ("-m experiment=folder", 0, ""),
        ("experiment=far", 0, ""),
    ],
)
def test_keys_of_hydra_in_files_of_a_sweep(
    words: str, code: int, says: str, tmp_path: Path, typed: Typed
) -> None:
    for name, text in CHOICES.items():
        file = tmp_path / "conf" / "experiment" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{text}")
    is_sweep = words.startswith("-m")
    trains = "hydra.launcher.dry_run=true" if is_sweep else "hydra.run.dir=r"
    done = typed(*words.split(), trains, "epochs=1", "world_size=1", "dataset.train_limit=64")
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert code or ("warning" in done.stderr) == bool(says)
