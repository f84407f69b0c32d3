"""The size of a transformer by one word."""

import pytest

from expt.config.identity import digest
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composed

TOKENS = ("model=transformer", "dataset=text", "dataset.root=a.txt", "task=language_model")


@pytest.mark.parametrize(("words", "is_so"), [
    ((), (4, 4, 128)), (("model.size=124m",), (12, 12, 768)), (("model.size=124m",
        "model.layers=3"), (3, 12, 768)),
    (("model.width=64",), (4, 4, 64)),
])  # fmt: skip
def test_a_size_says_what_is_not_given(words: tuple[str, ...], is_so: tuple[int, int, int]) -> None:
    model = parse(composed(*TOKENS, *words), Machine(cpus=8)).model
    assert (model.layers, model.heads, model.width) == is_so


def test_a_size_is_a_name_for_what_counts() -> None:
    named, given = (
        digest(parse(composed(*TOKENS, *words), Machine(cpus=8)), {})
        for words in (["model.size=1m"], ["model.layers=5", "model.width=128"])
    )
    assert named == given != digest(parse(composed(*TOKENS), Machine(cpus=8)), {})


@pytest.mark.parametrize("size", ["5m", "[1m]"])
def test_an_unknown_size_is_told(size: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.size=.*: input should be '400k', '1m', "):
        parse(composed(*TOKENS, f"model.size={size}"), Machine(cpus=8))
