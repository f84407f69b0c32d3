"""Files that commands write where a user says."""

import os
import re
import sys
from pathlib import Path

import pytest

from expt.command import words as subcommands
from expt.command.words import WORDS, Parser, call
from expt.errors import ConfigError
from tests.command.test_report import leave
from tests.facade import Capture, Patch

NAMED = (
    "report --csv", "report --plot", "report --optuna", "report sweep --html", "lr_range --output",
)  # fmt: skip


@pytest.mark.parametrize("option", NAMED)
def test_an_existing_file_stays(option: str, tmp_path: Path) -> None:
    leave(tmp_path / "sweep/a", 100, 0.9)
    (tmp_path / "sweep/multirun.yaml").touch()
    (tmp_path / "mine.png").write_text("mine")
    word, *words = option.split()
    folder = ["sweep"] if word == "report" and "sweep" not in words else []
    with pytest.raises(ConfigError, match=f"^{words[-1]} mine.png: is there already; use --force"):
        call(word, [*words, "mine.png", *folder])
    assert (tmp_path / "mine.png").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"mine.png", "sweep"}
    if word == "report":
        assert call(word, [*words, "mine.png", "--force", *folder]) == 0
        assert (tmp_path / "mine.png").read_bytes() != b"mine"


@pytest.mark.parametrize("option", NAMED)
def test_folders_and_pipes_stay_before_anything_is_computed(option: str, tmp_path: Path) -> None:
    Path("folder.png").mkdir()
    Path("link.png").symlink_to("folder.png")
    os.mkfifo("pipe.png")
    word, *words = option.split()
    for name in ("folder", "link", "pipe"):
        for forced in ([], ["--force"]):
            with pytest.raises(ConfigError, match=f"^{words[-1]} {name}.png: .* is no file"):
                call(word, [*words, f"{name}.png", *forced])
    assert Path("link.png").is_symlink()


@pytest.mark.parametrize("option", [option for option in NAMED if option.startswith("report")])
def test_a_link_stays_one(option: str, tmp_path: Path) -> None:
    leave(tmp_path / "sweep/a", 100, 0.9)
    (tmp_path / "sweep/multirun.yaml").touch()
    Path("disk").mkdir()
    Path("link.png").symlink_to("disk/target")
    _, *words = option.split()
    for forced in ([], ["--force"]):
        assert (
            call("report", [*words, "link.png", *forced, *["sweep"] * ("sweep" not in words)]) == 0
        )
    assert Path("link.png").is_symlink()
    assert [path.name for path in Path("disk").iterdir()] == ["target"]


def test_curves_of_a_name_without_a_suffix_replace_no_other(tmp_path: Path) -> None:
    leave(tmp_path / "a", 100, 0.9)
    Path("curves.png").write_text("mine")
    with pytest.raises(ConfigError, match="--plot curves: "):
        call("report", ["a", "--plot", "curves"])
    assert Path("curves.png").read_text() == "mine"


@pytest.mark.parametrize("option", ["--optuna", "--html"])
def test_a_file_stays_where_the_new_one_cannot_be_made(
    option: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    leave(tmp_path / "sweep/a", 100, 0.9)
    (tmp_path / "sweep/multirun.yaml").touch()
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="optuna"):
        call("report", ["sweep", option, "mine", "--force"])
    assert (tmp_path / "mine").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "sweep"}


def test_every_option_that_names_a_file_has_force(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    of_files = set[str]()
    for word in WORDS:
        with pytest.raises(SystemExit):
            call(word, ["--help"])
        text = capsys.readouterr().out
        if re.search(r"^  --\w+ FILE", text, re.MULTILINE):
            of_files.add(word)
            assert "  --force" in text, word
    assert of_files == {"report", "export", "predict", "lr_range"}


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [("file", True), ("full", True), ("empty", False), ("new", False), ("-", False)],
)
def test_words_may_come_in_any_order_around_a_new_file(
    name: str, is_taken: bool, tmp_path: Path
) -> None:
    Path("file").touch()
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/x").touch()
    parser = Parser("one", "About.")
    parser.add_argument("folders", nargs="*")
    parser.add_output("--output", "about", may_be_folder=True)
    for forced in (["--force"], []):
        words = ["a", "--output", name, *forced, "b"]
        if is_taken and not forced:
            with pytest.raises(ConfigError, match=f"--output {name}: is there already"):
                parser.parse_args(words)
        else:
            assert parser.parse_args(words).folders == ["a", "b"]
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        subcommands.refuse_taken("--output", Path("nowhere/x"), force=True)


@pytest.mark.parametrize("name", ["run/metrics.jsonl", "run/checkpoints/best.safetensors", "link"])
def test_files_of_a_run_itself_are_no_output(name: str, tmp_path: Path) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    for each in ("result.json", "metrics.jsonl", "checkpoints/best.safetensors", "model.onnx"):
        Path("run", each).touch()
    Path("link").symlink_to("run/result.json")
    with pytest.raises(ConfigError, match=f"--output {name}: is a file of the run "):
        subcommands.refuse_taken("--output", Path(name), force=True)
    subcommands.refuse_taken("--output", Path("run/model.onnx"), force=True)
