"""The words of a command as they are changed, or refused, before Hydra reads them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from expt.command.arguments import (
    continue_command,
    options_first,
    readable,
    refuse_lone,
    refuse_mistyped_folder,
    refuse_several_samplers,
    refuse_unnamed,
    refuse_used_folder,
    warn_of_repeated,
    with_earlier,
    with_latest,
    with_own_keys,
)
from expt.command.overrides import as_dict
from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, create_result, update_result
from expt.runs.typed import inherited


def leave(folder: Path, *words: str) -> Path:
    """A run that was asked for by `words`, or one of a sweep."""
    create_result(RunPaths(folder))
    update_result(RunPaths(folder), status=COMPLETED)
    RunPaths(folder).hydra.mkdir()
    RunPaths(folder).overrides.write_text("".join(f"- {word}\n" for word in words))
    return folder


def test_to_resume_is_to_say_what_was_said_before_but_for_what_is_said_now(tmp_path: Path) -> None:
    run = leave(
        tmp_path / "run",
        "model=convnet",
        "epochs=3",
        "resume=elsewhere",
        "+model.width=2",
        "~model.x",
    )
    now = [f"hydra.run.dir='{run}'", "resume=auto", "epochs=5", "model.width=4"]
    assert with_earlier(now) == ["model=convnet", "~model.x", *now, "hydra.output_subdir=null"]


SHARDED = ("sharding.shards=4", "sharding.wrap=300", "checkpoint.sharded=true", "checkpoint.keep=2")


@pytest.mark.parametrize(
    ("began", "typed", "kept"),
    [
        (("strategy=fsdp", *SHARDED), ("strategy=ddp",), SHARDED[3:]),
        (("strategy=fsdp", *SHARDED), ("strategy='ddp'", "checkpoint.sharded=true"), SHARDED[3:]),
        (("strategy=fsdp", *SHARDED), ("strategy=hsdp",), SHARDED[1:]),
        (("strategy=hsdp", *SHARDED), ("strategy=fsdp",), SHARDED[1:]),
        (("strategy=hsdp", *SHARDED), ("strategy=hsdp", "world_size=8"), SHARDED),
        (("strategy=hsdp", *SHARDED), ("epochs=5",), ("strategy=hsdp", *SHARDED)),
        (
            ("ddp.static_graph=true", "ddp.bucket_cap_mb=5"),
            ("strategy=fsdp",),
            ("ddp.bucket_cap_mb=5",),
        ),
    ],
)
def test_what_goes_on_by_another_strategy_has_no_settings_of_the_former(
    began: tuple[str, ...], typed: tuple[str, ...], kept: tuple[str, ...], tmp_path: Path
) -> None:
    now = [f"hydra.run.dir={leave(tmp_path / 'run', *began)}", "resume=auto", *typed]
    assert with_earlier(now) == [*kept, *now, "hydra.output_subdir=null"]
    assert inherited(began, typed) == [*kept]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("fork=s/lr=1,model=mlp", "fork='s/lr=1,model=mlp'"),
        ("fork=s/lr=1,model=mlp@epoch:2", "fork='s/lr=1,model=mlp@epoch:2'"),
        ("fork=s/lr=1,s/lr=1,model=mlp@40", "fork='s/lr=1','s/lr=1,model=mlp@40'"),
        ("fork=s/lr=1,s/lr=1@last", "fork='s/lr=1','s/lr=1@last'"),
        ("weights=s/lr=1,model=mlp", "weights='s/lr=1,model=mlp'"),
        ("resume=s/lr=1,model=mlp/last.pt", "resume='s/lr=1,model=mlp/last.pt'"),
        ("fork=s/lr=2,model=mlp", "fork='s/lr=2','model=mlp'"),
        ("weights=null,s/lr=1,model=mlp", "weights=null,'s/lr=1,model=mlp'"),
    ],
)
def test_the_name_of_a_run_that_is_there_may_hold_commas(
    typed: str, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("s/lr=1", "s/lr=1,model=mlp"):
        Path(folder).mkdir(parents=True)
    Path("s/lr=1,model=mlp/last.pt").touch()
    assert readable([typed]) == [read]


def test_a_run_that_was_killed_before_it_began_lets_hydra_write_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunPaths(folder).hydra.mkdir(parents=True)
    RunPaths(folder).overrides.write_text("- epochs=3\n")
    now = [f"hydra.run.dir={folder}", "resume=auto"]
    assert with_earlier(now) == ["epochs=3", *now]
    assert with_earlier([f"hydra.run.dir={tmp_path / 'new'}", "resume=auto"])[1:] == ["resume=auto"]


def test_what_does_not_resume_by_itself_stays_as_it_is(tmp_path: Path) -> None:
    leave(tmp_path / "run", "epochs=3")
    for words in (
        ["epochs=1"],
        [f"hydra.run.dir={tmp_path / 'run'}", f"resume={tmp_path}"],
        ["-m", "resume=auto"],
    ):
        assert with_earlier(words) == words
    with pytest.raises(ConfigError, match=r"name it, as in hydra\.run\.dir=FOLDER"):
        with_earlier(["resume=auto"])


def test_the_latest_sweep_is_the_one_begun_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "seed=0,1", "hydra.sweep.dir=latest"]
    with pytest.raises(ConfigError, match="there is no sweep in outputs/sweeps yet"):
        with_latest(words)
    for name, started in {
        "b/seed=0": 200,
        "b/seed=1": 300,
        "a/seed=0": 100,
        "a/seed=1": 400,
    }.items():
        update_result(
            RunPaths(leave(tmp_path / "outputs/sweeps" / name)), started=started
        )  # a was resumed at last
    (tmp_path / "outputs/sweeps/a/summary.csv").touch()  # and looked at
    (tmp_path / "outputs/sweeps/empty").mkdir()
    assert with_latest(words) == ["-m", "seed=0,1", "hydra.sweep.dir=outputs/sweeps/b"]
    assert with_latest(["-m", "hydra.sweep.dir=x"]) == ["-m", "hydra.sweep.dir=x"]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["seed=1", "-m", "x=2"], ["-m", "seed=1", "x=2"]),
        (["seed=1", "--config-dir", "my", "x=2"], ["--config-dir", "my", "seed=1", "x=2"]),
        (["seed=1", "--config-dir=my"], ["--config-dir=my", "seed=1"]),
        (["seed=1", "--cfg"], ["--cfg", "seed=1"]),
        (["a=1", "b=2"], ["a=1", "b=2"]),
        (["seed=-1", "~x"], ["seed=-1", "~x"]),
    ],
)
def test_options_come_first(words: list[str], first: list[str]) -> None:
    assert options_first(words) == first


def test_a_setting_has_a_name() -> None:
    with pytest.raises(ConfigError, match="=3: not of the form key=value"):
        refuse_unnamed(["seed=1", "=3"])
    refuse_unnamed(["model=mlp", "model=mlp,convnet", "-m", "model.hidden=[3]"])


def test_a_folder_that_holds_a_run_is_taken_by_that_run_alone(tmp_path: Path) -> None:
    run = leave(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run already; choose another folder"):
        refuse_used_folder(["epochs=1", f"hydra.run.dir='{run}'"])
    update_result(RunPaths(run), status="failed")
    with pytest.raises(
        ConfigError,
        match="choose another folder, or resume that run with resume=auto beside what has",
    ):
        refuse_used_folder(["epochs=1", f"hydra.run.dir={run}"])
    refuse_used_folder([f"hydra.run.dir={run}", "resume=auto"])
    refuse_used_folder([f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={run}"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "logs"])
def test_a_folder_that_holds_what_a_run_would_write_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"holds {name} already; choose another folder"):
        refuse_used_folder([f"hydra.run.dir={tmp_path}"])
    refuse_used_folder([f"hydra.run.dir={tmp_path}", "resume=auto"])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["-m", "seed=0,1"], ["-m", "seed=0,1", "hydra.sweep.dir=s/t"]),
        (["seed=0,1", "-m"], ["seed=0,1", "hydra.sweep.dir=s/t", "-m"]),
        (["-m", "seed=0,1", "hydra.sweep.dir=latest"], ["-m", "seed=0,1", "hydra.sweep.dir=s/t"]),
        (
            ["-m", "--config-dir=my", "x='a b'"],
            ["-m", "--config-dir=my", "x='a b'", "hydra.sweep.dir=s/t"],
        ),
        (["-m"], ["-m", "hydra.sweep.dir=s/t"]),
    ],
)
def test_the_command_that_resumes_a_sweep(
    typed: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["expt", *typed])
    assert shlex.split(continue_command(Path("s/t"))) == ["python", "-m", "expt", *told]


def test_a_sweeps_folder_with_spaces_is_quoted_for_hydra_and_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["expt", "-m", "seed=0,1"])
    *_, word = shlex.split(continue_command(Path("it's my sweep")))
    assert as_dict([word]) == {"hydra.sweep.dir": "it's my sweep"}


def test_to_resume_in_a_folder_that_is_not_there_is_a_slip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_run").mkdir()
    mistyped = f"hydra.run.dir='{tmp_path / 'my_rnu'}'"
    with pytest.raises(ConfigError, match=r"no run to resume\. Did you mean '.*my_run'"):
        refuse_mistyped_folder([mistyped, "resume=auto"])
    assert capsys.readouterr().err == ""
    refuse_mistyped_folder(["epochs=3", mistyped, "resume=auto"])
    assert "there is no such folder; a new run begins there" in capsys.readouterr().err
    create_result(RunPaths(tmp_path / "my_run"))
    with pytest.raises(
        ConfigError, match=rf"={tmp_path}: it holds no run, so no run to resume. .*my_run is one\."
    ):
        refuse_mistyped_folder([f"hydra.run.dir={tmp_path}", "resume=auto"])
    refuse_mistyped_folder([f"hydra.run.dir={tmp_path / 'my_run'}", "resume=auto"])
    refuse_mistyped_folder([mistyped])
    refuse_mistyped_folder(["-m", "resume=auto"])
    assert capsys.readouterr().err == ""
    for folder, told in (("swep", "there is no such folder"), ("my_run", "it holds no sweep")):
        refuse_mistyped_folder(
            ["-m", "resume=auto", f"hydra.sweep.dir={tmp_path / folder}", "seed=1,2"]
        )
        assert f"{folder}: {told}; a new sweep begins there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("dataset.root=my data (old)", "dataset.root='my data (old)'"),
        ("dataset.root=ünï code", "dataset.root='ünï code'"),
        ("dataset.root=a=1,b=2", "dataset.root='a=1','b=2'"),
        ("hydra.run.dir=lr=0.1,model=mlp", "hydra.run.dir='lr=0.1,model=mlp'"),
        ("hydra.sweep.dir=it's mine", "hydra.sweep.dir='it\\'s mine'"),
        ("hydra.run.dir='a b'", "hydra.run.dir='a b'"),
        ("dataset.root=~/data", "dataset.root=/home/me/data"),
        ("dataset.root='~/my data'", "dataset.root='/home/me/my data'"),
        ("dataset.root=~/a,~/b", "dataset.root=/home/me/a,/home/me/b"),
        ("hydra.run.dir=~/lr=1", "hydra.run.dir='/home/me/lr=1'"),
        ("--config-dir=~/conf", "--config-dir=/home/me/conf"),
        *(
            (word, word)
            for word in (
                "model=mlp,convnet",
                "seed=range(3)",
                "gpus=[4,5]",
                "a=(1,2)",
                "a=[",
                "~x.y",
                "x",
                "=3",
            )
        ),
    ],
)
def test_what_a_person_types_needs_one_pair_of_quotes(
    typed: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert readable([typed]) == [read]


def test_every_dataset_of_ones_own_has_the_same_keys() -> None:
    words = ["dataset.val_fraction=0.2", "dataset.augment.flip=true", "dataset.size=3", "epochs=2"]
    own = [
        "++dataset.val_fraction=0.2",
        "++dataset.augment.flip=true",
        "dataset.size=3",
        "epochs=2",
    ]
    assert with_own_keys(["dataset=mine", *words]) == ["dataset=mine", *own]
    assert with_own_keys(["dataset=mnist", *words]) == ["dataset=mnist", *words]
    assert with_own_keys(words) == words


def test_to_resume_needs_no_word_about_where_the_yaml_is(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", "model=mine")
    sources = [
        {"path": "hydra.conf", "provider": "hydra"},
        {"path": "/my/conf", "provider": "command-line"},
    ]
    OmegaConf.save(
        {"hydra": {"runtime": {"config_sources": sources}}}, RunPaths(run).hydra_settings
    )
    now = [f"hydra.run.dir={run}", "resume=auto"]
    assert with_earlier(now)[:-1] == ["--config-dir=/my/conf", "model=mine", *now]
    assert with_earlier(["--config-dir", "x", *now])[:-1] == [
        "model=mine",
        "--config-dir",
        "x",
        *now,
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epochs", "5"], "--epochs: settings have no dashes; type epochs=5"),
        (["--epochs=5"], "--epochs=5: settings have no dashes; type epochs=5"),
        (
            ["--batch-size", "model=mlp"],
            "--batch-size: settings have no dashes; type batch_size=...",
        ),
        (["-v"], "-v: there is no such option; see python -m expt --help"),
        (
            ["epochs=1", "report"],
            "report: a command stands alone or first, as in python -m expt report",
        ),
    ],
)
def test_the_habits_of_other_commands_are_helped(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unnamed(words)
    assert str(caught.value) == told


def test_hydras_options_are_let_through() -> None:
    refuse_unnamed(
        [
            "-m",
            "--multirun",
            "--cfg",
            "job",
            "-cjob",
            "--config-dir=x",
            "-cd",
            "x",
            "--hydra-help",
            "--res",
        ]
    )


@pytest.mark.parametrize("word", ["hydra.run.dir=", "hydra.sweep.dir=", "hydra.run.dir=''"])
def test_a_folder_without_a_name_is_a_slip(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}: names no folder"):
        refuse_used_folder([word])


@pytest.mark.parametrize(
    "word",
    [
        "hydra.launcher.dry_run=true",
        "hydra.launcher.retries=2",
        "hydra/launcher=basic",
        "hydra.sweep.dir=latest",
    ],
)
def test_what_is_for_a_sweep_is_refused_beside_a_run(word: str) -> None:
    refuse_lone(["hydra.run.dir=x"])
    with pytest.raises(ConfigError, match=f"^{word}: is for a sweep; add -m$"):
        refuse_lone(["hydra.run.dir=x", word])


def test_of_two_values_of_a_key_one_is_told_which_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_of_repeated(
        ["-m", "epochs=1", "model=mlp", "--config-dir", "a=b", "seed=0", "+epochs=2", "seed=0"]
    )
    assert (
        capsys.readouterr().err
        == "warning: epochs=1: the key is there twice, and the last counts, +epochs=2\n"
    )


@pytest.mark.parametrize(
    "word", ["search=tpe,random", "search=[tpe,random]", "search=choice(tpe,random)"]
)
def test_a_search_has_one_sampler(word: str) -> None:
    with pytest.raises(
        ConfigError, match="a search has one sampler; type a command for each, as with search=tpe"
    ):
        refuse_several_samplers(["-m", word, "search.runs=3"])
    refuse_several_samplers(
        ["-m", "search=tpe", "search.constraints=[loss/val<3,loss/train<3]", "model=mlp,convnet"]
    )
