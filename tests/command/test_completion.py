"""What a shell offers for what is being typed."""

from __future__ import annotations

import pytest

from expt.command.completion import completed
from expt.command.words import WORDS

SETTINGS = [
    "amp=",
    "dataset.",
    "dataset=",
    "dataset=digits",
    "epochs=",
    "eval_split=",
    "tensorboard.",
]


def composed(line: str) -> list[str]:
    """As Hydra, of a line of settings: those that begin as its last word."""
    assert not {*line.split()} & {*WORDS, "RUN", "split=val"}
    return [
        each
        for each in SETTINGS
        if each.startswith("" if line[-1:] == " " else line.rpartition(" ")[2])
    ]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ev", {"evaluate", "eval_split="}),
        ("epochs=2 ev", {"eval_split="}),
        ("amp=b", {"amp=bf16"}),
        ("evaluate ", set()),
        ("evaluate RU", set()),
        ("evaluate RUN s", {"split=train", "split=val", "split=test", "split=all"}),
        ("evaluate RUN split=val d", {"dataset.", "dataset=", "dataset=digits"}),
        ("evaluate RUN e", set()),
        (
            "evaluate RUN amp=",
            {"amp=", "amp=false", "amp=true", "amp=bf16", "amp=fp16"},
        ),
        ("report ", set()),
        ("report a", set()),
    ],
)
def test_words_and_what_they_take(line: str, offered: set[str]) -> None:
    assert {*completed(line, composed)} == offered


def test_an_empty_line_may_become_anything() -> None:
    assert {*completed("", composed)} == {*WORDS, *SETTINGS}
    everything = {*completed("evaluate RUN ", composed)}
    assert {"which=last", "dataset=", "amp=", "tensorboard."} <= everything
    assert "epochs=" not in everything
