"""The settings of a command line: read, checked, and completed."""

from pathlib import Path

import pytest

from expt.command.command_line import read, words_to_keep
from expt.command.conf_files import checked_folders
from expt.command.grammar import about_run, readable
from expt.command.trained_runs import started_elsewhere
from expt.command.words import Options, options_of
from expt.config import conf_dir
from expt.errors import ConfigError
from expt.runs.overrides import inherited
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, create_result, update_result
from tests.facade import Capture, Patch


def leave(folder: Path, *words: str) -> Path:
    """Leave what a run that was asked for by `words` does."""
    create_result(RunPaths(folder))
    update_result(RunPaths(folder), status=COMPLETED)
    RunPaths(folder).hydra.mkdir()
    RunPaths(folder).overrides.write_text("".join(f"- {word}\n" for word in words))
    return folder


def settings(*words: str) -> list[str]:
    return read(options_of(words))[0]


def test_options_are_told_from_settings() -> None:
    found = options_of(["seed=1", "-m", "--config-dir", "my", "x=2", "--cfg", "job", "-q", "~y"])
    assert found == Options(["seed=1", "x=2", "~y"], True, True, "my", printing=("--cfg", "job"))
    assert options_of(["-cd=my"]).config_dir == "my"
    for word in ("--epochs", "--batch-size=3", "-v", "--experimental-rerun"):
        with pytest.raises(ConfigError, match=f"^{word}: there is no such option"):
            options_of([word, "5"])
    for without in (["x=1", "--config-dir"], ["-cd", "-m"], ["--config-dir="]):
        with pytest.raises(ConfigError, match=r"^(-cd|--config-dir).*: names no folder"):
            options_of(without)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("dataset.root=my data (old)", "dataset.root='my data (old)'"),
        ("dataset.root=2024_01", "dataset.root='2024_01'"),
        ("dataset.targets=1_0,4", "dataset.targets='1_0',4"),
        ("dataset.features=4", "dataset.features=4"),
        ("wandb.project=4", "wandb.project='4'"),
        ("seed=1_0,4", "seed=1_0,4"),
        ("optimizer.lr=${oc.decode:${oc.env:LR}}", "optimizer.lr='${oc.decode:${oc.env:LR}}'"),
        ("optimizer.lr=${oc.env:LR}", "optimizer.lr=${oc.env:LR}"),
        ("seed=${oc.env:A},${oc.env:B}", "seed=${oc.env:A},${oc.env:B}"),
        ("dataset.root=ünï code", "dataset.root='ünï code'"),
        ("dataset.root=a=1,b=2", "dataset.root='a=1','b=2'"),
        ("hydra.run.dir=lr=0.1,model=mlp", "hydra.run.dir='lr=0.1,model=mlp'"),
        ("hydra.sweep.dir=it's mine", "hydra.sweep.dir='it\\'s mine'"),
        ("hydra.run.dir='a b'", "hydra.run.dir='a b'"),
        ("dataset.root=~/data", "dataset.root=/home/me/data"),
        ("dataset.root='~/my data'", "dataset.root='/home/me/my data'"),
        ("hydra.run.dir=~/lr=1", "hydra.run.dir='/home/me/lr=1'"),
        ("weights=~/a,~/b", "weights=/home/me/a,/home/me/b"),
        ("+dataset.roots=[~/a, '~/b',~]", "+dataset.roots=[/home/me/a, '/home/me/b',/home/me]"),
        ("+dataset.roots=[a~/b,~c/d]", "+dataset.roots=[a~/b,~c/d]"),
        ("dataset.features=[1e3,b]", "dataset.features=['1e3',b]"),
        ("search.constraints=[loss/val<3, a]", "search.constraints=['loss/val<3',a]"),
        ("search.constraints=loss/val<3", "search.constraints='loss/val<3'"),
        ("dataset.features=['a b',c]", "dataset.features=['a b',c]"),
        (r"dataset.features=['it\'s',c]", r"dataset.features=['it\'s',c]"),
        *(
            (word, word)
            for word in ("model=mlp,convnet", "seed=range(3)", "gpus=[4,5]", "a=(1,2)", "~x.y")
        ),
        # an interpolation in another
        ("model.x=${oc.decode:${oc.env:LR}},0.1", "model.x='${oc.decode:${oc.env:LR}}',0.1"),
        ("model.x=[${oc.decode:${oc.env:LR}},0.1]", "model.x=['${oc.decode:${oc.env:LR}}',0.1]"),
        ("model.x={a:${oc.decode:${oc.env:LR}}}", "model.x={a:'${oc.decode:${oc.env:LR}}'}"),
        ('model.x="${oc.decode:${oc.env:LR}}"', 'model.x="${oc.decode:${oc.env:LR}}"'),
        ("model.x=${seed},1", "model.x=${seed},1"),
        ("model.x=a${oc.decode:${oc.env:LR}}", "model.x=a${oc.decode:${oc.env:LR}}"),
        # the names of runs that are there
        ("fork=s/lr=1,model=mlp", "fork='s/lr=1,model=mlp'"),
        ("fork=s/lr=1,s/lr=1,model=mlp@40", "fork='s/lr=1','s/lr=1,model=mlp@40'"),
        ("weights=s/lr=1,model=mlp", "weights='s/lr=1,model=mlp'"),
        ("fork=s/lr=2,model=mlp", "fork='s/lr=2','model=mlp'"),
        ("weights=null,s/lr=1,model=mlp", "weights=null,'s/lr=1,model=mlp'"),
    ],
)
def test_a_setting_needs_one_pair_of_quotes(typed: str, read: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for folder in ("s/lr=1", "s/lr=1,model=mlp"):
        Path(folder).mkdir(parents=True)
    assert readable(typed) == read


def test_a_run_is_resumed_with_the_settings_that_it_was_started_with() -> None:
    run = leave(
        Path("run"), "model=convnet", "epochs=3", "resume=elsewhere", "+model.width=2", "~model.x"
    )
    update_result(RunPaths(run), status=FAILED)
    now = [f"hydra.run.dir={run}", "resume=auto", "epochs=5", "model.width=4"]
    assert settings(*now) == ["model=convnet", "~model.x", *now]


@pytest.mark.parametrize(
    ("began", "typed", "kept"),
    [
        (("strategy=fsdp", "sharding.wrap=3", "seed=1"), ("strategy=ddp",), ("seed=1",)),
        (
            ("strategy=hsdp", "sharding.shards=4", "seed=1"),
            ("epochs=5",),
            ("strategy=hsdp", "sharding.shards=4", "seed=1"),
        ),
        (("ddp.static_graph=true", "seed=1"), ("strategy=fsdp",), ("seed=1",)),
        (("ddp.comm_hook=bf16", "seed=1"), ("strategy=fsdp",), ("seed=1",)),
        (("strategy=fsdp", "checkpoint.sharded=true", "a=1"), ("strategy=dp",), ("a=1",)),
        (("checkpoint.keep=5",), ("checkpoint={every_epochs: 2}",), ("checkpoint.keep=5",)),
        (("optimizer=adam", "optimizer.lr=0.003"), ("optimizer=adam",), ("optimizer.lr=0.003",)),
        (("model=mlp", "+model.width=3"), ("model.width=4",), ("model=mlp",)),
        (
            ("'early_stop={metric: a}'", "early_stop.patience=3", "b=1"),
            ("early_stop=null",),
            ("b=1",),
        ),
    ],
)
def test_a_resume_keeps_the_words_that_no_typed_one_or_other_strategy_replaces(
    began: tuple[str, ...], typed: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    now = [f"hydra.run.dir={leave(Path('run'), *began)}", "resume=auto", *typed]
    assert settings(*now) == [*kept, *now]
    if {"seed=1", "a=1"} & {*kept}:  # a fork has other settings of a group that is typed
        assert inherited(began, typed) == [*kept]


@pytest.mark.parametrize("auto", ["auto", "'auto'", '"auto"'])
def test_that_a_run_was_resumed_is_none_of_its_words(auto: str, tmp_path: Path) -> None:
    paths = RunPaths(leave(tmp_path / "run", "resume=elsewhere", "seed=1"))
    words = ["seed=1", f"resume={auto}"]
    assert words_to_keep(paths, words) == ["resume=elsewhere", "seed=1"]
    assert about_run("run", words)["overrides"] == {"seed": 1}


def test_a_run_that_is_resumed_finds_its_yaml_again(tmp_path: Path) -> None:
    (tmp_path / "my").mkdir()
    run = leave(tmp_path / "run", "model=mine")
    RunPaths(run).hydra_settings.write_text(f"hydra: {{searchpath: ['file://{tmp_path}/my']}}")
    now = [f"hydra.run.dir={run}", "resume=auto"]
    assert read(options_of(now))[1] == [tmp_path / "my"]
    (tmp_path / "x").mkdir()
    assert read(options_of(["--config-dir", "x", *now]))[1] == [Path("x")]


def test_the_latest_sweep_is_the_one_begun_last(tmp_path: Path) -> None:
    words = ["-m", "seed=0,1", "hydra.sweep.dir=latest"]
    with pytest.raises(ConfigError, match=r"^hydra.sweep.dir=latest: "):
        settings(*words)
    started = {"b/seed=0": 200, "b/seed=1": 300, "a/seed=0": 100, "a/seed=1": 400}
    for name, when in started.items():  # a was resumed at last
        update_result(RunPaths(leave(tmp_path / "outputs/sweeps" / name)), started=when)
    assert settings(*words) == ["seed=0,1", "hydra.sweep.dir=outputs/sweeps/b"]


def test_only_a_word_that_names_a_run_elsewhere_says_where_it_was_started(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    run = RunPaths(leave(tmp_path / "run"))
    run.hydra_settings.write_text(f"hydra: {{runtime: {{cwd: {tmp_path}}}}}")
    update_result(run, config={"dataset": {"path": "t.csv"}})
    (tmp_path / "t.csv").touch()
    problem = "dataset.path=t.csv: is not there"
    monkeypatch.chdir(run.folder)
    assert started_elsewhere("../run@last", problem).startswith("../run was started in")
    for word in ("epochs=3", "", ".", "@last", "some@where"):
        assert not started_elsewhere(word, problem), word


def test_a_new_folder_beside_resume_is_only_warned_of(capsys: Capture) -> None:
    settings("resume=auto", "hydra.run.dir=new", "epochs=2")
    assert "hydra.run.dir=new" in capsys.readouterr().err
    settings("-m", "resume=auto", "seed=1,2")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "own",
    [
        "code/a.py", "tokenizer/a", "logs/a.txt", "events.out.tfevents.1.me", "trace.json.gz",
        ".hydra/config.yaml", ".sent/mine", ".before/mine",
    ],
)  # fmt: skip
def test_a_run_begins_in_no_folder_that_holds_files_by_its_names(own: str, tmp_path: Path) -> None:
    file = tmp_path / "of mine" / own
    file.parent.mkdir(parents=True)
    file.touch()
    for more in ([], ["resume=auto"]):
        with pytest.raises(ConfigError, match=rf"of mine/{own.partition('/')[0]}: no record "):
            settings("seed=1", "epochs=2", "hydra.run.dir=of mine", *more)
    assert file.exists()


def test_of_two_values_of_a_key_the_last_counts(capsys: Capture) -> None:
    settings("-m", "epochs=1", "model=mlp", "seed=0", "+epochs=2", "seed=0")
    told = "warning: epochs=1: the key is there twice, and the last counts, +epochs=2\n"
    assert capsys.readouterr().err == told


def test_conf_in_the_current_folder_is_found() -> None:
    Path("conf/nginx").mkdir(parents=True)
    Path("conf/nginx/site.yaml").touch()
    Path("conf/checkpoint").mkdir()
    Path("conf/checkpoint/new.yaml").touch()
    for words in (["epochs=1"], ["checkpoint={keep: 1}"], ["+recipe=a", "nginx.site=1"]):
        assert read(Options(words))[1] == []  # it is of something else
    for word in ("+nginx=site", "nginx=sight", "nginx@model.opts=site", "+nginx@x=site,other"):
        assert read(Options([word]))[1] == [Path("conf")]
    Path("conf/model").mkdir()
    Path("conf/model/mine.yaml").touch()
    assert read(Options(["model=mine"]))[1] == [Path("conf")]


def test_a_choice_that_expt_has_too_is_refused() -> None:
    ours = (conf_dir() / "model/mlp.yaml").read_text()
    for text in (ours, f"{ours}\n# edited\n"):
        Path("my/model").mkdir(parents=True, exist_ok=True)
        Path("my/model/mlp.yaml").write_text(text)
        if text == ours:
            checked_folders(["my"])
        else:
            with pytest.raises(ConfigError, match=r"^my/model/mlp.yaml: "):
                settings("--config-dir", "my", "epochs=1")
