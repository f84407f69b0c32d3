"""The words that a command may start with, `expt report ...`; what stands after one is read by a
Parser.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple, NoReturn

from expt.errors import ConfigError


class Word(NamedTuple):
    """What `expt WORD ...` does: `main` of its module takes the rest of the words, and returns the
    exit code.
    """

    module: str
    meaning: str


WORDS = {
    "report": Word("expt.command.report", "list and compare runs; the leaderboard of a sweep"),
    "rerun": Word(
        "expt.command.rerun", "train what a run has trained once more, to the same numbers"
    ),
    "evaluate": Word(
        "expt.command.evaluate", "the metrics of a trained run on its test set, or on other data"
    ),
    "export": Word(
        "expt.command.export",
        "a trained run's model as a file for other programs: torch_export or ONNX",
    ),
    "send": Word("expt.command.send", "send runs to MLflow or W&B, or what these have missed"),
    "predict": Word(
        "expt.command.predict",
        "what a run's model says of files, of folders, or of a part of its dataset",
    ),
    "plan": Word(
        "expt.command.plan", "what a run takes of each GPU, and by which strategy, before it runs"
    ),
    "cache": Word(
        "expt.command.cache", "what decoded datasets take on the disk, and how to remove them"
    ),
    "doctor": Word(
        "expt.command.doctor",
        "whether this machine can train: torch, GPUs, memory, datasets, two workers",
    ),
}
"""All else is a run or a sweep. A module is imported when its word is typed."""


class Parser(argparse.ArgumentParser):
    """Of the words after a `Word`; ConfigError for those that it does not understand."""

    def __init__(self, word: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"python -m expt {word}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would print and exit."""
        raise ConfigError(f"{message}; see {self.prog} --help")
