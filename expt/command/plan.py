"""Plan runs: `expt plan` shows the memory that one would take, `preflight=true` measures steps."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from expt import machine, progress
from expt.command import terminal
from expt.command.words import Parser
from expt.config.constraints import word
from expt.errors import ConfigError
from expt.runs.view.leaderboard import wide_console
from expt.runs.view.text import Console, say

if TYPE_CHECKING:
    from expt.config.schema import RunConfig
    from expt.planning.plan import Planned
import itertools
import time

from expt.config.identity import digest, shown
from expt.config.keys import flat, meaning_in
from expt.config.schema import RunConfig
from expt.errors import INTERRUPTED_UNWRITTEN, Interrupted, RunFailed
from expt.launch.job import Job, Options, request_of
from expt.launch.one_run import Tried, together_s, try_out
from expt.machine import Machine
from expt.runs.failure import in_one_line
from expt.runs.result import COMPLETED
from expt.runs.view.text import about, brief, cells, mebibytes, plain_table

ABOUT = """\
Show the memory that a run would need on each device, before it runs and without a GPU: parameters,
gradients, optimiser states and activations for each strategy, with and without activation
checkpointing. The model takes one step on tensors without data. preflight=true measures times."""
EXAMPLES = """examples
  python -m expt plan experiment=gpt2_124m gpus=8
  python -m expt plan model=resnet18 dataset=cifar10 gpus=1 batch_size=1024
"""
GPT2_VOCABULARY = 50_257


@progress.phase("planning")
def main(words: Sequence[str]) -> int:
    """Print the plan. Raises ConfigError for settings that cannot be, or be measured so."""
    parser = Parser("plan", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("words", nargs="*", metavar="KEY=VALUE", help="settings, as for a run")
    add("--vocabulary", type=int, metavar="N", help="number of tokens, if the tokenizer is missing")
    add("--config-dir", type=Path, metavar="DIR", help="folder of custom YAML [conf]")
    options = parser.parse_intermixed_args(list(words))
    config, vocabulary = _asked(options)
    from expt.planning.plan import planned  # late: it imports torch

    found = planned(config, vocabulary)
    plans = [dataclasses.asdict(plan) | {"total": plan.total} for plan in found.plans]
    terminal.put(plan={**found._asdict(), "plans": plans, "workers": config.world_size})
    _show(wide_console(), config, found)
    return 0


def _asked(options: argparse.Namespace) -> tuple[RunConfig, int | None]:
    """Return the configuration on a machine that has the GPUs it names, and the vocabulary."""
    from omegaconf import OmegaConf, open_dict  # late, as Hydra below

    from expt.command import compose, overrides
    from expt.command.command_line import own_folders
    from expt.config.parse import parse

    words = list(map(overrides.readable, options.words))
    for each in overrides.parse(words):
        if each.is_sweep_override():
            raise ConfigError(f"{each.input_line}: plan looks at one run; name one value")
        group = re.split("[./]", each.key_or_group)[0]
        if group in ("fork", "hydra", "resume", "search", "sweep"):
            raise ConfigError(f"{each.input_line}: has no effect on a plan; leave it out")
    composed = compose.Composer(own_folders(options.config_dir, words)).compose(words)
    with open_dict(composed):
        if OmegaConf.is_missing(composed.get("dataset") or {}, "root"):
            composed.dataset.root = "."  # a plan reads files only for facts that its settings lack
    settings = compose.settings_of(composed) | {"weights": None}
    vocabulary, tokenizer = options.vocabulary, str((settings.get("dataset") or {}).get("tokens"))
    if vocabulary is None and tokenizer.endswith(".json") and not Path(tokenizer).exists():
        vocabulary = GPT2_VOCABULARY
    if vocabulary is not None and vocabulary < 1:
        raise ConfigError(f"--vocabulary {vocabulary}: give a number above 0")
    config = parse(settings, _with_gpus(settings.get("gpus")))
    return dataclasses.replace(config, strategy="ddp"), vocabulary


def _with_gpus(gpus: Any) -> machine.Machine:
    number = max(gpus, default=-1) + 1 if isinstance(gpus, list) else gpus
    if not isinstance(number, int):
        return machine.detect()
    return machine.Machine(gpus=tuple(map(str, range(number))), cpus=machine.usable_cpus())


def _show(console: Console, config: RunConfig, found: Planned) -> None:
    blocks = f" in {found.num_blocks} blocks" if found.num_blocks else ""
    say(console, f"model   {word(config.model)}: {found.num_parameters:,} parameters{blocks}")
    what = "GPU" if config.num_gpus else "CPU worker"
    samples = f"{config.batch_size} samples on {config.world_size} {what}s"
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


def preflight(
    jobs: Sequence[Job], machine: Machine, options: Options, total: int | None = None
) -> None:
    """Try out a run of each kind among those that are not complete, and print their costs.

    With a `total` they are samples of a search with that many trials left. Raises
    ConfigError where some can't run by their settings, RunFailed where one can't for another
    reason, and Interrupted on Ctrl-C; nothing is written.
    """
    kinds: dict[str, list[Job]] = {}
    for job in jobs:
        if job.request is not None and job.status != COMPLETED:
            kinds.setdefault(_kind(job.request.config), []).append(job)
    requests = [request_of(equal[0]) for equal in kinds.values()]
    try:
        found = try_out(requests, machine, options, Console(stderr=True))
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    tried = [*zip(kinds.values(), found, strict=True)]
    refused = {job: job.error for job in jobs if job.error}
    refused |= {job: each.error for equal, each in tried if each.error for job in equal}
    if len(jobs) == 1 and refused:
        raise refused[jobs[0]]
    console = wide_console()
    if rows := [(equal, each) for equal, each in tried if not each.error]:
        count = "runs" if total is None else "tried"
        console.print(_table(rows, of_sweep=len(jobs) > 1, count=count))
    able = [(request_of(job), each) for equal, each in rows for job in equal]
    lengths = [(request.config, each.seconds(request)) for request, each in able]
    named = [{"run": request.paths.folder.name, **each.record["metrics"]} for request, each in able]
    seconds = ({"seconds": length} for _, length in lengths)
    terminal.put(preflight=[a | b for a, b in zip(named, seconds, strict=True)])
    _print_total(console, lengths, machine, options, total)
    for job, why in refused.items():
        say(console, f"cannot run   {job.name}: {in_one_line(str(why), with_log=False)}")
    if refused:
        by_settings = all(isinstance(why, ConfigError) for why in refused.values())
        text = f"{len(refused)} of {len(jobs)} runs cannot run as they are"
        raise ConfigError(text) if by_settings else RunFailed(text)


def _kind(config: RunConfig) -> str:
    """Return a text that is equal for runs that cost the same."""
    settings = flat(shown(config))
    free = [key for key in settings if not meaning_in(settings, key).cost]
    return f"{digest(config, {}, but=free)} {config.threads}"


def _table(rows: Sequence[tuple[Sequence[Job], Tried]], *, of_sweep: bool, count: str) -> Table:
    needed = ("each needs", "memory of a worker", "a step", "an evaluation", "a run")
    table = plain_table(("runs like", count, *needed), left=["runs like"])
    for equal, tried in rows:
        config, found = request_of(equal[0]).config, tried.record["metrics"]
        cores = f"{config.world_size * config.threads} cores"
        needs = f"{config.num_gpus} GPU" if config.num_gpus else cores
        memory = mebibytes(found["memory/worker_mib"])
        if "memory/gpu_mib" in found:
            memory = f"{mebibytes(found['memory/gpu_mib'])} of the GPU, {memory}"
        lengths = sorted(tried.seconds(request_of(job)) for job in equal)
        a_run = " to ".join(dict.fromkeys(about(length) for length in (lengths[0], lengths[-1])))
        step, evaluation = brief(found["step_s"]), brief(found["eval_s"])
        name = equal[0].name if of_sweep else f"{word(config.model)} on {word(config.dataset)}"
        table.add_row(*cells(name, len(equal), needs, memory, step, evaluation, a_run))
    return table


def _print_total(
    console: Console,
    lengths: Sequence[tuple[RunConfig, float]],
    machine: Machine,
    options: Options,
    total: int | None,
) -> None:
    by = "" if total is None else f", judged by the {len(lengths)} tried"
    if total is not None:
        lengths = [*itertools.islice(itertools.cycle(lengths), total)]
    if not lengths:
        return
    seconds = together_s(lengths, machine, options)
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    what = "1 run takes" if len(lengths) == 1 else f"{len(lengths)} runs take"
    where = f"{len(machine.gpus)} GPUs" if lengths[0][0].num_gpus else f"{machine.cpus} cores"
    say(console, f"{what} about {about(seconds)} on {where}{by}: until {end}, if started now")
