"""Words that are read without Hydra's parser: as Hydra reads them."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from expt.command import hydra_words
from expt.command.hydra_words import simple

NUMBERS = [
    "0",
    "7",
    "-3",
    "-0",
    "10000",
    "123456789012345678",
    "0.1",
    "-0.05",
    "1e-3",
    "1E5",
    "2.5e+10",
    "1e-400",
    "0e0",
]
NAMES = ["adam", "_x", "a1", "e5", "E", "infinity", "nano", "truefalse", "None", "x_y"]
OTHERS = [
    "", "true", "TRUE", "false", "null", "Null", "nan", "NaN", "inf", "-inf", "+1", "1.", ".5", "1_000", "01", "1e",
    "1,2", "range(3)", "[1,2]", "{a: 1}", "'a'", '"1"', "a b", " a", "a ", "a-b", "a.b", "a/b", "${seed}", "1x", "-x",
    "1.5.2", "0x10", "\u0661", "\u00e9", "a=b", "1e5.0", "9" * 30, "a\n", "1\n", "???", "a:b", "\\,",
]  # fmt: skip
KEYS = [
    "seed",
    "optimizer.lr",
    "a_1._b.C2",
    "+x",
    "++x",
    "~x",
    "a/b",
    "a@b",
    "a/b@c",
    "a.0.b",
    "$x",
    "a-b",
    "",
    "a..b",
    "a.",
]


def by_hydra(word: str) -> str:
    try:
        return repr(OverridesParser.create().parse_override(word))
    except HydraException as error:
        return f"refused: {type(error)}"


@pytest.mark.parametrize("value", [*NUMBERS, *NAMES, *OTHERS])
def test_a_value_is_what_hydra_reads(value: str) -> None:
    found = simple(f"a.b={value}")
    assert (found is not None) == (value in (*NUMBERS, *NAMES)), "others are left to Hydra"
    assert found is None or repr(found) == by_hydra(f"a.b={value}"), (
        "with its type: 1 is no 1.0, and True no 1"
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_what_hydra_reads(key: str) -> None:
    found = simple(f"{key}=1")
    assert (found is not None) == (key in KEYS[:3])
    assert found is None or repr(found) == by_hydra(f"{key}=1")
    assert simple(key) is None


def test_another_hydra_reads_every_word_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(Override):
        """As one with another field."""

    monkeypatch.setattr(hydra_words, "Override", Other)
    for cached in (hydra_words._are_simple, hydra_words.changed):
        cached.cache_clear()
    assert simple("a=1") is None
    assert simple("a=2") is None
    assert capsys.readouterr().err.count("reads words in another way") == 1
    hydra_words._are_simple.cache_clear()
