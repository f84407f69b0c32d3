"""A fix in a message about a typed word works as it is typed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from expt.command.compose import parse_one
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composed

CUSTOM = "model={_target_: torch.nn.Identity}"


def ways_out(words: Sequence[str], text: str) -> list[list[str]]:
    """Return the words with each fix of the message in place of the last one, or with it."""
    *before, last = words
    key, _, value = last.partition("=")
    meant = re.findall(r"'([^']+)'", text.partition("Did you mean")[2])
    is_value = "one of" in text
    found = [[*before, f"{key}={name}" if is_value else f"{name}={value}"] for name in meant]
    if example := re.search(r", e\.g\. '?([^']+)'?$", text):
        found.append([*before, example[1]])
    if type_it := re.search(r"(?:type|add it with) (\S+=\S+?)(?:, or .*)?$", text):
        found.append([*before, type_it[1]])
    if choose := re.search(r"add one that has it: (\w+)=(.*)$", text):
        others = [word for word in words if not word.startswith(f"{choose[1]}=")]
        found += [[f"{choose[1]}={name}", *others] for name in choose[2].split(" or ")]
    if together := re.search(r"'([\w.]+=.*)'$", text):
        found.append([*before, together[1]])
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["model=resnet18", "model.dropout=0.1"],
        ["search.runs=3"],
        ["search={runs: 3}"],
        ["model=../model/mlp"],
        ["model=mlp.yaml"],
        ["optimizer.betas=[0.9,0.98]"],
        ["dataset.path=t.csv"],
        ["lr=0.1"],
        ["epohcs=3"],
        ["bs=64"],
        ["early_stop.patience=3"],
        ["early_stop={patience: 3}"],
        ["wandb.tags=7"],
        ["send=7"],
        [CUSTOM, "model.width=3"],
        ["scheduler=cosin"],
        ["objective=accuracy/vall"],
        ["wandb.tag=[a]"],
    ],
    ids=lambda words: words[-1],
)
def test_each_fix_works(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(composed(*words), Machine(gpus=(), cpus=2))
    (text,) = caught.value.problems
    ways = ways_out(words, text)
    assert ways, text
    for each in ways:
        assert parse_one(each[-1])
        try:
            parse(composed(*each), Machine(gpus=(), cpus=2))
        except ConfigError as error:
            later = str(error)
            assert not later.startswith(f"{words[-1].partition('=')[0]}="), (each, later)
            assert "no key" not in later, (each, later)
