"""`expt plan`: the memory that a run would take on each device."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt import machine, progress
from expt.command import terminal
from expt.command.words import Parser, positive
from expt.config.constraints import word
from expt.errors import counted
from expt.runs.view.text import Console, cells, plain_table, say

if TYPE_CHECKING:
    from expt.config.schema import RunConfig
    from expt.planning.plan import Footprints

ABOUT = """\
Show the memory that a run would need on each device, before it runs and without a GPU: parameters,
gradients, optimiser states and activations for each strategy, with and without activation
checkpointing. The model takes one step on tensors without data. preflight=true measures times."""
EXAMPLES = """examples
  python -m expt plan experiment=gpt2_124m gpus=8
  python -m expt plan model=resnet18 dataset=cifar10 gpus=1 batch_size=1024
"""
GPT2_VOCABULARY = 50_257
"""The tokens of GPT-2's tokenizer, which a plan assumes where the file of another is not here."""


@progress.phase("planning")
def main(words: Sequence[str]) -> int:
    """Print the plan. Raises ConfigError for settings that cannot be, or be measured so."""
    parser = Parser("plan", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("words", nargs="*", metavar="KEY=VALUE", help="settings, as for a run")
    add(
        "--vocabulary", type=positive, metavar="N", help="number of tokens, if no tokenizer is here"
    )
    add("--config-dir", type=Path, metavar="DIR", help="folder of custom YAML [conf]")
    options = parser.parse_args(words)
    config, vocabulary = _configured(options)
    from expt.planning.plan import footprints  # late: it imports torch

    found = footprints(config, vocabulary)
    plans = [dataclasses.asdict(plan) | {"total": plan.total} for plan in found.plans]
    terminal.put(plan={**found._asdict(), "plans": plans, "workers": config.world_size})
    _show(Console(), config, found)
    return 0


def _configured(options: argparse.Namespace) -> tuple[RunConfig, int | None]:
    """Return the configuration on a machine that has the GPUs it names, and the vocabulary."""
    from omegaconf import OmegaConf, open_dict  # late, as Hydra below

    from expt.command import compose, grammar
    from expt.command.conf_files import own_folders
    from expt.config.parse import parse

    words = list(map(grammar.readable, options.words))
    grammar.refuse_for_one_run(grammar.parse(words), "a plan", grammar.NOT_OF_A_TRY)
    composed = compose.Composer(own_folders(options.config_dir, words)).compose(words)
    with open_dict(composed):
        if OmegaConf.is_missing(composed.get("dataset") or {}, "root"):
            composed.dataset.root = "."  # a plan reads files only for facts that its settings lack
    settings = compose.settings_of(composed) | {"weights": None}
    config = parse(settings, _machine_with(settings.get("gpus")))
    # All strategies are planned, from one step of a model that none has divided.
    config = dataclasses.replace(config, strategy="ddp")
    return config, options.vocabulary or _vocabulary(settings)


def _vocabulary(settings: Mapping[str, Any]) -> int | None:
    """Return a usual number of tokens where the tokenizer's file is not here."""
    tokenizer = str((settings.get("dataset") or {}).get("tokens"))
    is_missing = tokenizer.endswith(".json") and not Path(tokenizer).exists()
    return GPT2_VOCABULARY if is_missing else None


def _machine_with(gpus: Any) -> machine.Machine:
    """Return a machine with the GPUs that a plan names; this one where it names none."""
    if isinstance(gpus, list):
        gpus = max((each for each in gpus if isinstance(each, int)), default=-1) + 1
    if not isinstance(gpus, int):
        return machine.detect()
    return machine.Machine(gpus=tuple(map(str, range(gpus))), cpus=machine.usable_cpus())


def _show(console: Console, config: RunConfig, found: Footprints) -> None:
    blocks = f" in {found.num_blocks} blocks" if found.num_blocks else ""
    say(console, f"model   {word(config.model)}: {found.num_parameters:,} parameters{blocks}")
    what = "GPU" if config.num_gpus else "CPU worker"
    samples = f"{config.batch_size} samples on {counted(config.world_size, what)}"
    say(console, f"step    {samples}, {found.micro_batch} at a time on each")
    largest = max(plan.total for plan in found.plans)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    parts = ("parameters", "gradients", "states", "activations")
    table = plain_table(("strategy", *parts, f"all [{unit}]"), left=["strategy"])
    for plan in found.plans:
        held = (f"{getattr(plan, part) / size:,.2f}" for part in (*parts, "total"))
        name = f"{plan.strategy}{', checkpointed' * plan.checkpointed}"
        table.add_row(*cells(name, *held))
    console.print()
    console.print(table)
