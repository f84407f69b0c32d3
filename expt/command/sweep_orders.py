"""`expt sweep`: orders to a sweep that is under way, from another terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from expt.command.words import Parser
from expt.errors import ConfigError
from expt.runs import orders
from expt.runs.sweep import latest_sweep
from expt.runs.view.text import say

ABOUT = (
    "Tell a sweep or a search that is under way, from another terminal, to run more, less, later,"
    " or elsewhere."
)
EXAMPLES = """\
orders
  add KEY=VALUE ...    further points: the grid that was typed, with these values in place of those for the same keys
  drop RUN ...         end runs, or don't start them; what they have come to is kept
  pause [RUN ...]      let running ones save and end, and waiting ones wait; without a name all of them
  resume [RUN ...]     let paused ones go on, from where they were, to the same numbers
  gpus 0,1|all         use these GPUs alone; runs on others pause, and go on as soon as one of these is free
RUN is the name of a run's folder (* stands for anything), or settings (model=mlp 'lr<0.01' 'hidden!=[64]') that
all of them have; runs of a grid that are still to come are meant too. Orders last as long as the sweep's command:
typed again, it knows of no drops and pauses before.

examples
  python -m expt sweep pause outputs/sweeps/2026-11-22_10-00-00
  python -m expt sweep drop latest model=convnet
  python -m expt sweep add latest optimizer.lr=0.3,0.03
  python -m expt sweep gpus latest 0,1
"""
WORDS = ("add", "drop", "pause", "resume", "gpus")


def main(words: Sequence[str]) -> int:
    """Give the order, and print what has become of it.

    Raises ConfigError where it can't be carried out.
    """
    parser = Parser("sweep", ABOUT, EXAMPLES)
    parser.usage = f"{parser.prog} {{{','.join(WORDS)}}} FOLDER [ABOUT ...]"
    parser.add_argument("order", metavar="ORDER", help="see below")
    parser.add_argument("folder", metavar="FOLDER", help="that of the sweep, or latest")
    parser.add_argument("about", nargs="*", default=[], metavar="ABOUT", help="see below")
    asked = parser.parse_args(list(words))
    if asked.order not in WORDS:
        raise ConfigError(f"{asked.order}: is no order; use one of {', '.join(WORDS)}")
    if not asked.about and asked.order in ("add", "drop", "gpus"):
        raise ConfigError(f"{asked.order}: say what, see {parser.prog} --help")
    for line in orders.give(_folder(asked.folder), asked.order, tuple(asked.about)):
        say(Console(), line)
    return 0


def _folder(given: str) -> Path:
    folder = latest_sweep(Path("outputs")) if given == "latest" else Path(given)
    if folder is None:
        raise ConfigError("latest: there is no sweep in outputs/sweeps yet")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name that of a sweep")
    return folder
