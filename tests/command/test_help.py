"""`--help`, whose text comes from the YAML itself."""

import itertools
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from expt.command.conf_files import lineage
from expt.command.help import COMMON, EXAMPLES, completed, keys_with_meaning, print_help
from expt.command.words import WORDS
from expt.config import conf_dir
from expt.errors import ConfigError
from expt.runs.view.text import Console
from tests.conftest import Typed
from tests.facade import run


def help_text(*arguments: str) -> str:
    out = StringIO()
    print_help(Console(file=out, width=200), arguments)
    return out.getvalue()


def keys() -> Iterator[str]:
    content = OmegaConf.load(conf_dir() / "config.yaml")
    assert isinstance(content, DictConfig)
    for key, value in content.items():
        if isinstance(value, DictConfig) and key != "hydra":
            yield from (".".join((str(key), str(below))) for below in value)
        elif key not in ("defaults", "hydra"):
            yield str(key)


def test_help_shows_every_key_and_group(tmp_path: Path) -> None:
    done = run("--help", "all", cwd=tmp_path, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    for key in keys():
        assert any(line.startswith(f"{key}=") and len(line.split()) > 2 for line in lines), key
    for folder in {path.parent for path in conf_dir().glob("*/*.yaml")}:
        options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        assert [folder.name, options] in [line.split(maxsplit=1) for line in lines]
    assert not any(tmp_path.iterdir())


def test_help_is_one_screen_of_what_most_people_use() -> None:
    out = StringIO()
    print_help(Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 50
    begun = {line.split()[0].partition("=")[0] for line in lines if line.strip()}
    assert set(COMMON) <= begun
    assert all(any(command in line for line in lines) for command, _ in EXAMPLES)


@pytest.mark.parametrize("word", ["seed", "tensorboard", "model=mlp"])
def test_help_of_keys_shows_these_only(word: str) -> None:
    rows = re.findall(r"^  (\w+)[.\w]*=", help_text(word), re.MULTILINE)
    assert set(rows) == {word.partition("=")[0]}


def test_a_choice_has_the_keys_of_that_which_it_builds_on(tmp_path: Path) -> None:
    choice = tmp_path / "conf" / "model" / "mine.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("# Mine.\ndefaults: [mlp, _self_]\ndropout: 0.5\n")
    lines = help_text("--config-dir", str(tmp_path / "conf"), "model=mine").splitlines()
    at = lines.index("model=mine  Mine.")
    rows = dict(line.split(maxsplit=1) for line in lines[at + 1 : at + 3])
    assert [*rows] == ["model.dropout=0.5", "model.hidden=[256]"]
    assert rows["model.dropout=0.5"].startswith("after each hidden layer")


def test_the_help_of_a_choice_has_conditions_and_no_words_of_forks() -> None:
    text = " ".join(help_text("dataset=table").split())
    assert "[only if dataset.folds is set]" in text
    assert "fork" not in text
    assert "kept by a fork" in " ".join(help_text("all").split())


@pytest.mark.parametrize("text", ["- 1\n- 2", "defaults: 3\nx: 1", "defaults: [other]\nx: 1", "x"])
def test_a_choice_that_no_run_can_have_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(f"{text}\n")
    (tmp_path / "model/other.yaml").write_text("defaults: [mine]\ny: 2\n")
    found = help_text("model=mine", "--config-dir", str(tmp_path))
    assert ("model.x=1" in found, "model.y=2" in found) == ("x: 1" in text, "other" in text)


def test_a_choice_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (file := tmp_path / "model/mine.yaml").write_text("x:\n\t- 1\n")
    with pytest.raises(ConfigError, match=f"^{file}: .*line 2, column 1$"):
        help_text("model=mine", "--config-dir", str(tmp_path))


def test_no_choice_repeats_what_it_builds_on() -> None:
    for path in conf_dir().glob("*/*.yaml"):
        (*above, own) = (
            keys_with_meaning(each.read_text(encoding="utf-8").splitlines(), "group.")
            for each in lineage(path)
        )
        assert not {*own} & {*itertools.chain(*above)}, path


def test_a_key_is_shown_with_its_value_and_meaning() -> None:
    lines = [" ".join(line.split()) for line in help_text("all").splitlines()]
    assert (
        "ddp.bucket_cap_mb=25 size of a communication bucket [MiB] [changes rounding only]" in lines
    )
    (memory,) = (line for line in lines if line.startswith("ddp.shared_memory=true"))
    assert memory.endswith("through gloo's sockets [changes rounding only]"), "of two lines"
    assert not any("hydra.launcher" in line for line in lines)


@pytest.mark.parametrize("group", ["model", "extra"])
def test_a_folder_of_ones_own_is_listed(tmp_path: Path, group: str) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine_alone.yaml").write_text("_target_: mine.Net\n")
    (line,) = (
        line
        for line in help_text("--config-dir", str(tmp_path)).splitlines()
        if "mine_alone" in line
    )
    assert line.split()[0] == group


def test_brackets_and_colons_are_shown_as_they_are(tmp_path: Path) -> None:
    assert "`pip install 'expt[timm]'`" in help_text("model=timm")
    (tmp_path / "model").mkdir()
    text = "Mine, of [/data] and :key: and [bold]"
    (tmp_path / "model/mine.yaml").write_text(f"# {text}\n_target_: x.Y\nwidth: 3  # [a,b] :x:\n")
    found = help_text("model=mine", "--config-dir", str(tmp_path))
    assert f"model=mine  {text}" in found
    assert "[a,b] :x:" in found


def test_the_keys_of_the_chosen_options_are_shown_with_their_meaning() -> None:
    def below(group: str, text: str) -> set[str]:
        return {*re.findall(rf"^ *({group}\.[.\w]+)=", text, re.MULTILINE)}

    text = help_text("all")
    assert {"optimizer.lr", "optimizer.momentum"} <= below("optimizer", text)
    assert "dataset.augment.flip" in below("dataset", text)
    assert below("model", help_text("model=resnet18", "--help")) == {"model.stem"}


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("seeed", "'seed'"),
        ("mlp", "'model=mlp'"),
        ("model=convnt", "'convnet'"),
        ("seeed=5", "'seed'"),
        ("modle=mlp", "'model=mlp'"),
    ],
)
def test_a_word_that_help_knows_nothing_of_is_told(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}: ") as refused:
        help_text("--help", word)
    assert str(refused.value).endswith(f"Did you mean {hint}?")


def test_groups_of_ones_own_are_shown_too(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "long.yaml").write_text("# Trains longer.\nepochs: 30  # more of them\n")
    own = ("--config-dir", str(tmp_path), "--help")
    assert "long" in help_text(*own, "recipe")
    assert "epochs=30" in help_text(*own, "recipe=long")


def test_help_takes_the_options_of_a_command() -> None:
    words = ("help", "-m", "model=resnet18,mlp", "epochs=3", "--config-dir", ".")
    text = help_text(*words)
    assert all(word in text for word in ("model=resnet18", "model=mlp", "epochs="))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *((word, "Examples") for word in ("help", "--help", "-h")),
        ("help report", "usage: python -m expt report"),
    ],
)
def test_help_has_three_names(words: str, says: str, typed: Typed) -> None:
    assert says in typed(*words.split()).stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("eval_s", {"eval_split="}),
        ("evalu", {"evaluate"}),
        ("epochs=2 eval_s", {"eval_split="}),
        ("amp=b", {"amp=bf16"}),
        ("model=m", {"model=mlp"}),
        ("evaluate ", set()),
        ("evaluate RU", set()),
        ("report ", set()),
        ("report a", set()),
    ],
)
def test_subcommands_and_their_arguments(line: str, offered: set[str]) -> None:
    assert {*completed(line)} == offered


def test_an_empty_line_may_become_anything() -> None:
    assert {*WORDS, "epochs=", "model=", "model."} <= {*completed("")}


def test_hydras_script_for_a_shell_asks_for_them(tmp_path: Path) -> None:
    for command in ("expt", "/usr/bin/python3 -m expt"):
        line = f"{command} epochs=1 eval_s"
        done = run("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line)
        assert (done.returncode, done.stdout) == (0, "eval_split=\n")
    done = run("-sc", "install=bash", cwd=tmp_path)
    assert "query=bash" in done.stdout
