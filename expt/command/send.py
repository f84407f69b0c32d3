"""`expt send`: what a dashboard does not have yet of runs, sent afterwards."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from expt.command.words import Parser
from expt.config.trackers import TRACKERS, TRACKING_URI, is_installed, uri_problems
from expt.errors import ConfigError, ExptError, did_you_mean
from expt.runs.paths import RunPaths
from expt.runs.result import results_below
from expt.runs.view.text import say
from expt.tracking.sender import Sender
from expt.tracking.snapshot import snapshot
from expt.tracking.tracker import in_a_line

EXAMPLES = """examples
  python -m expt send outputs/sweeps/2026-11-21_10-00-00                what its dashboards have missed
  python -m expt send outputs --to mlflow --tracking-uri http://localhost:5000
  WANDB_MODE=offline python -m expt send RUN --to wandb --project vision

What was sent before is not sent again. A run says by its configuration (send=[mlflow], mlflow.experiment=...) where it
goes; options say otherwise.
"""
TRIES, PAUSE_S = 3, 1.0


def main(words: Sequence[str]) -> int:
    """Send what `words` ask for.

    Raises ConfigError for a word that is wrong, ExptError if it can't be sent.
    """
    asked = parse(words)
    runs = [paths for folder in asked.folders for paths in _below(folder)]
    by_tracker = {
        name: _runs_for(name, runs, asked) for name in TRACKERS if asked.to in (None, name)
    }
    if asked.checkpoints and (parted := next((paths for paths in runs if paths.parts), None)):
        raise ConfigError(
            f"--checkpoints: sends single files, and {parted.folder} has a checkpoint in parts;"
            " leave it out"
        )
    if not any(by_tracker.values()):
        raise ConfigError(f"these {len(runs)} runs name no dashboard; say which, as in --to mlflow")
    for name, of_tracker in by_tracker.items():
        if of_tracker:
            _refuse_unusable(name, asked)
    for name, of_tracker in by_tracker.items():
        if of_tracker:
            _send(name, of_tracker, _settings(name, asked))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The words as folders, to and the options of a dashboard."""
    parser = Parser(
        "send",
        "Send runs to MLflow or W&B, or what these have missed of them; twice is once.",
        EXAMPLES,
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or what holds some"
    )
    parser.add_argument(
        "--to", metavar="NAME", help=f"{' or '.join(TRACKERS)} (what each run's `send` names)"
    )
    parser.add_argument(
        "--tracking-uri", metavar="URI", help=f"of MLflow (the run's, or ${TRACKING_URI})"
    )
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        help="of MLflow (the run's, $MLFLOW_EXPERIMENT_NAME, or expt)",
    )
    parser.add_argument(
        "--project", metavar="NAME", help="of W&B (the run's, or $WANDB_PROJECT, or expt)"
    )
    parser.add_argument("--entity", metavar="NAME", help="of W&B (the run's, or $WANDB_ENTITY)")
    parser.add_argument("--checkpoints", action="store_true", help="the last and the best, too")
    asked = parser.parse_args(list(words))
    if asked.to is not None and asked.to not in TRACKERS:
        raise ConfigError(
            f"--to {asked.to}: not one of {', '.join(TRACKERS)}.{did_you_mean(asked.to, TRACKERS)}"
        )
    return asked


def _below(folder: Path) -> list[RunPaths]:
    found = [paths for paths, _ in results_below(folder)] if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder}: holds no run to send")
    return found


def _runs_for(name: str, runs: Sequence[RunPaths], asked: argparse.Namespace) -> list[RunPaths]:
    if asked.to == name:
        return list(runs)
    found = ((paths, snapshot(paths)) for paths in runs)
    return [
        paths
        for paths, run in found
        if run and name in (run.record.get("config") or {}).get("send", ())
    ]


def _refuse_unusable(name: str, asked: argparse.Namespace) -> None:
    if not is_installed(name):
        raise ConfigError(f"--to {name}: needs the package {name}; pip install 'expt[{name}]'")
    key, uri = "--tracking-uri", asked.tracking_uri
    if name == "mlflow" and uri is None:
        key, uri = TRACKING_URI, os.environ.get(TRACKING_URI)
    if name == "mlflow" and uri is not None and (problems := uri_problems(key, uri)):
        raise ConfigError(problems)


def _settings(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What the options say, in the place of what a run has recorded."""
    chosen = {"checkpoints": True} if asked.checkpoints else {}
    keys = {"mlflow": ("tracking_uri", "experiment"), "wandb": ("project", "entity")}[name]
    return chosen | {key: value for key in keys if (value := getattr(asked, key)) is not None}


def _send(name: str, runs: Sequence[RunPaths], settings: dict[str, Any]) -> None:
    """Raises ExptError where the dashboard cannot be reached, or refuses."""
    sender = Sender(name, live=False, settings=settings)
    with _quiet_libraries():
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            if sender.send(runs, last=True) and _ended(sender):
                break
    console = Console()
    if sender.error is not None:
        where = f" at {sender.where}" if sender.where else ""
        raise ExptError(
            f"{name}{where}: {in_a_line(sender.error)}; type it again later, nothing is sent twice"
        )
    say(console, f"{name:<13}{sender.num_sent} of {len(runs)} runs had something new")
    for address in sender.addresses:
        say(console, f"look at it   {address}")


def _ended(sender: Sender) -> bool:
    try:
        sender.end()
    except Exception as problem:  # what these clients raise is of many kinds
        sender.error = problem
    return sender.error is None


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without what MLflow logs of each run; warnings of expt's own are none of logging's."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        sys.stdout.flush()
