"""`expt send`: the parts of runs that a dashboard does not have yet, sent afterwards."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from expt import registry
from expt.command import terminal
from expt.command.words import Parser
from expt.config.schema import TRACKERS
from expt.dashboards.sender import Sender
from expt.dashboards.sending import require_package
from expt.dashboards.snapshot import snapshot
from expt.dashboards.trackers import in_a_line
from expt.errors import ConfigError, ExptError
from expt.runs.found import results_below
from expt.runs.paths import RunPaths
from expt.runs.view.text import Console, say

EXAMPLES = """examples
  python -m expt send outputs/sweeps/2026-11-21_10-00-00     send what is missing
  python -m expt send outputs --to mlflow --tracking-uri http://localhost:5000

Nothing is sent twice. The destination is in a run's configuration (send=[mlflow],
mlflow.experiment=...); options override it.
"""
OPTIONS = {
    name: [each.name for each in dataclasses.fields(settings) if each.name != "checkpoints"][:2]
    for name, settings in registry.trackers().items()
}
"""The destination in each tracker: its first two settings."""


def main(words: Sequence[str]) -> int:
    """Send the runs of `words`. Raises ConfigError, and ExptError where one can't be sent."""
    parser = Parser(
        "send", f"Send runs, or the rest of them, to a tracker: {', '.join(TRACKERS)}.", EXAMPLES
    )
    add = parser.add_argument
    about = "runs, sweeps, or folders of these"
    add("folders", nargs="+", type=Path, metavar="FOLDER", help=about)
    add("--to", choices=TRACKERS, help="[what each run's `send` names]")
    for option in dict.fromkeys(itertools.chain(*OPTIONS.values())):
        of = " and ".join(name for name, own in OPTIONS.items() if option in own)
        add(f"--{option.replace('_', '-')}", metavar="NAME", help=f"of {of} [the run's]")
    add("--checkpoints", action="store_true", help="send the best and the last too")
    asked = parser.parse_args(words)
    runs = [paths for folder in asked.folders for paths in _below(folder)]
    if asked.checkpoints and (parts := next((each for each in runs if each.parts), None)):
        raise ConfigError(f"--checkpoints: {parts.folder} has a sharded checkpoint; leave it out")
    names = [asked.to] if asked.to else TRACKERS
    chosen = {name: runs if asked.to else [each for each in runs if _names(each, name)]
              for name in names}  # fmt: skip
    if not any(chosen.values()):
        raise ConfigError(
            f"these {len(runs)} runs name no dashboard; use --to {' or '.join(TRACKERS)}"
        )
    for name, some in chosen.items():
        if some:
            require_package(name, f"--to {name}")
    for name, some in chosen.items():
        if some:
            _send(name, some, asked)
    return 0


def _below(folder: Path) -> list[RunPaths]:
    found = [run.paths for run in results_below(folder)] if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder}: holds no run to send")
    return found


def _names(paths: RunPaths, name: str) -> bool:
    run = snapshot(paths)
    return run is not None and name in (run.record.get("config") or {}).get("send", ())


def _send(name: str, runs: Sequence[RunPaths], asked: argparse.Namespace) -> None:
    settings = {key: value for key in OPTIONS[name] if (value := getattr(asked, key)) is not None}
    sender = Sender(name, settings | ({"checkpoints": True} if asked.checkpoints else {}))
    logging.disable(logging.WARNING)  # MLflow logs each run
    try:
        sender.send(runs, last=True)
        sender.end()
    except Exception as error:  # errors of these clients are of many classes
        why = in_a_line(error)
        raise ExptError(f"{name}: {why}; type it again later, nothing is sent twice") from error
    finally:
        logging.disable(logging.NOTSET)
    terminal.put(**{name: {"sent": sender.num_sent, "addresses": [*sender.addresses]}})
    console = Console()
    say(console, f"{name:<13}{sender.num_sent} of {len(runs)} runs had something new")
    for address in sender.addresses:
        say(console, f"look at it   {address}")
