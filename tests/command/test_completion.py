"""What a shell offers for what is being typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.command.help import completed
from expt.command.words import WORDS
from tests.facade import run


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
    done = run("-sc", "query=bash", cwd=tmp_path, COMP_LINE="expt epochs=1 eval_s")
    assert (done.returncode, done.stdout) == (0, "eval_split=\n")
    done = run("-sc", "install=bash", cwd=tmp_path)
    assert "query=bash" in done.stdout
