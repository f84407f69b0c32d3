"""`expt plan`: what a run would take of each card, how long its steps are, and which strategy to
choose.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from expt import machine
from expt.command.words import Parser
from expt.errors import ConfigError, Interrupted
from expt.runs.view.leaderboard import wide_console
from expt.runs.view.text import brief, in_bytes, say

if TYPE_CHECKING:
    from expt.config.schema import RunConfig
    from expt.planning.plan import Planned
    from expt.planning.strategies import Plan

ABOUT = """\
Say what a run would take, before it runs and without a GPU: parameters, gradients, optimiser states and activations on
each card by each strategy, with and without checkpointed activations; with --card also the largest batch that fits, how
long a step is, and which strategy to take. The model is carried out on tensors without numbers."""
EXAMPLES = """examples
  python -m expt plan experiment=gpt2_124m gpus=8 --card h200
  python -m expt plan model=resnet18 dataset=cifar10 gpus=1 batch_size=1024 --card 8GiB
  python -m expt plan experiment=gpt2_124m model.size=1b gpus=16 --card a100-40 --per-node 8
"""
GPT2_VOCABULARY = 50_257
ONE_RUN = (
    "plan looks at one run; name one value, or try a sweep out by python -m expt -m ..."
    " preflight=true"
)


class Asked(NamedTuple):
    """What is to be planned."""

    config: RunConfig
    tokens: int | None
    """Size of the vocabulary, where no file says it."""
    notes: list[str]


def main(words: Sequence[str]) -> int:
    """Print the plan. Raises ConfigError for settings that cannot be, or be measured so."""
    try:
        _print(_parsed(words))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing is written") from None
    return 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("plan", ABOUT, EXAMPLES)
    parser.usage = (
        f"{parser.prog} [KEY=VALUE ...] [--card CARD] [--per-node N] [--network-gbit-per-s X]"
    )
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for a run"
    )
    parser.add_argument(
        "--card", metavar="CARD", help="h200, h100, a100-80, ... or its memory, as 24GiB"
    )
    parser.add_argument(
        "--per-node", type=int, default=8, metavar="N", help="GPUs of a machine [8]"
    )
    parser.add_argument(
        "--network-gbit-per-s",
        type=float,
        default=100.0,
        metavar="X",
        help="between machines, of each GPU [100]",
    )
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="tokens of a tokenizer that is not here"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="of your own YAML [conf]")
    if many := {"-m", "--multirun"} & {*words}:
        raise ConfigError(f"{min(many)}: {ONE_RUN}")
    found = parser.parse_intermixed_args(list(words))
    for option in ("per_node", "network_gbit_per_s", "vocabulary"):
        value = getattr(found, option)
        if value is not None and not value > 0:
            raise ConfigError(f"--{option.replace('_', '-')} {value:g}: give a number above 0")
    return found


def _print(options: argparse.Namespace) -> None:
    from expt.planning.cards import card  # late, as below: no torch for a typing error

    known = None if options.card is None else card(options.card)
    asked = _asked(options)
    with Console(stderr=True).status("planning"):
        from expt.planning.plan import planned  # imports torch

        network = options.network_gbit_per_s * 1e9 / 8
        found = planned(
            asked.config, known, tokens=asked.tokens, per_node=options.per_node, network=network
        )
    _show(wide_console(), asked, found)


def _asked(options: argparse.Namespace) -> Asked:
    """The settings, on a machine that has the GPUs they name. Raises ConfigError."""
    from omegaconf import OmegaConf, open_dict  # late, as Hydra below

    from expt.command import experiment, overrides
    from expt.command.arguments import readable, with_own_keys
    from expt.command.composing import composed_alone
    from expt.command.hydra_errors import COMPOSING, as_config_error
    from expt.config.parse import parse, plain

    overrides.register_resolvers()
    notes, tokens = list[str](), options.vocabulary
    try:
        composed = composed_alone(with_own_keys(readable(options.words)), options.config_dir)
        with open_dict(composed):
            if OmegaConf.is_missing(composed.get("dataset") or {}, "root"):
                composed.dataset.root = "."  # where it lies is no matter
        settings = plain(composed)
    except COMPOSING as error:
        raise as_config_error(error, options.words, of_one_run=ONE_RUN) from error
    settings |= {"resume": None, "weights": None}
    tokenizer = str((settings.get("dataset") or {}).get("tokens", ""))
    if tokens is None and tokenizer.endswith(".json") and not Path(tokenizer).exists():
        tokens = GPT2_VOCABULARY
        notes.append(f"a vocabulary of {tokens:,} tokens, as GPT-2 has: there is no {tokenizer}")
    here = _with_gpus(settings.get("gpus"))
    if settings.get("strategy") == "hsdp" and len(here.gpus) > options.per_node:
        settings["sharding"] = {"shards": options.per_node, **_given(settings.get("sharding"))}
    with experiment.told(options.words, [options.config_dir or Path("conf")]):
        config = parse(settings, here)
    if config.is_sharded:
        notes.append(f"every strategy, {config.strategy} among them, with its settings of sharding")
    return Asked(dataclasses.replace(config, strategy="ddp"), tokens, notes)


def _given(sharding: Any) -> dict[str, Any]:
    """What of it is not left to be found out."""
    return {
        key: value for key, value in (sharding or {}).items() if (key, value) != ("shards", "auto")
    }


def _with_gpus(gpus: Any) -> machine.Machine:
    """This machine, or one with as many GPUs as are named."""
    number = (
        gpus
        if isinstance(gpus, int)
        else max(gpus, default=-1) + 1
        if isinstance(gpus, list)
        else None
    )
    if number is None:
        return machine.detect()
    return machine.Machine(gpus=tuple(map(str, range(number))), cpus=machine.usable_cpus())


def _show(console: Console, asked: Asked, found: Planned) -> None:
    from expt.config.constraints import word

    config, model = asked.config, found.model
    blocks = f" in {len(model.block_bytes)} blocks" if model.block_bytes else ""
    say(
        console, f"model       {word(config.model)}: {_number(model.parameters)} parameters{blocks}"
    )
    part, parts = found.part, config.gradient_accumulation
    what = "GPU" if config.num_gpus else "CPU worker"
    several = f"{config.world_size} {what}s" if config.world_size > 1 else f"a {what}"
    each = f": {part * parts} on each" if config.world_size > 1 else ""
    at_once = f", {part} at a time" if parts > 1 else ""
    flop = _number(found.flop * parts * config.world_size, "FLOP")
    say(console, f"step        {config.batch_size} samples on {several}{each}{at_once}; {flop}")
    if found.card:
        gib = in_bytes(found.card.memory_bytes)
        say(
            console,
            f"card        {found.card.name}: {gib}, {in_bytes(found.card.usable_bytes)} for"
            " tensors",
        )
    console.print()
    console.print(_table(found))
    console.print()
    if found.best is not None:
        typed = f"strategy={found.best.strategy}"
        typed += " activation_checkpointing=auto" if found.best.checkpointing else ""
        say(console, f"take        {typed}: {found.why}")
    elif found.card:
        say(console, f"take        none: {found.why}")
    else:
        say(
            console,
            "card        name one for the largest batch, the time of a step and what to take:"
            " --card h200",
        )
    for note in [*asked.notes, *found.notes]:
        say(console, f"assumed     {note}")


def _table(found: Planned) -> Table:
    largest = max(plan.total_bytes for plan in found.plans)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = ["parameters", "gradients", "states", "activations", "other", f"all [{unit}]"]
    titles += ["fit"] if found.card else []
    titles += ["step"] if any(plan.step_s for plan in found.plans) else []
    table.add_column("strategy", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for plan in found.plans:
        table.add_row(*_row(plan, size), style="bold" if plan is found.best else None)
    return table


def _row(plan: Plan, size: int) -> list[str]:
    kept = (
        plan.parameter_bytes,
        plan.gradient_bytes,
        plan.state_bytes,
        plan.activation_bytes,
        plan.other_bytes,
    )
    cells = [f"{each / size:,.2f}" for each in (*kept, plan.total_bytes)]
    fit = [] if plan.largest_part is None else [f"{plan.largest_part:,}"]
    step = [brief(plan.step_s)] if plan.step_s else []
    return [
        f"{plan.strategy}, checkpointed" if plan.checkpointing else plan.strategy,
        *cells,
        *fit,
        *step,
    ]


def _number(value: float, unit: str = "") -> str:
    steps = (
        ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
        if unit
        else ((1e9, "billion"), (1e6, "million"))
    )
    for size, word in steps:
        if value >= size:
            return f"{value / size:,.1f} {word}{unit}"
    return f"{value:,.0f}{' ' if unit else ''}{unit}"
