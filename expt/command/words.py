"""Subcommands such as `expt report`, and the options of `python -m expt`.

Free of Hydra and torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from expt.errors import ConfigError
from expt.runs.overrides import key_of, unquoted
from expt.runs.paths import RunPaths

WORDS = {
    "report": "list and compare runs; the leaderboard of a sweep",
    "rerun": "repeat a run with all its settings and the same numbers",
    "evaluate": "measure a trained run on its test set, or on other data",
    "export": "write a run's model for other programs: torch.export or ONNX",
    "send": "send runs, or the rest of them, to a tracker such as MLflow",
    "predict": "predict for files, folders, or a split of the dataset",
    "plan": "show the memory of each GPU that a run would need",
    "lr_range": "test rising learning rates, and propose one",
    "cache": "show the disk space of decoded datasets, or free it",
    "doctor": "test whether this machine can train: torch, GPUs, memory, data, two workers",
}
"""Subcommands, each with its purpose; all else is a run or a sweep."""


def call(word: str, arguments: Sequence[str]) -> int:
    """Carry out a subcommand, and return the exit code; its module is imported only now."""
    return int(importlib.import_module(f"expt.command.{word}").main(arguments))


class Parser(argparse.ArgumentParser):
    """Parser of the words after a subcommand; raises ConfigError for others."""

    def __init__(self, word: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"python -m expt {word}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        about = "print one JSON document to stdout, and all else to stderr"
        self.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=about)
        self._outputs = dict[str, bool]()

    def add_output(self, option: str, about: str, *, may_be_folder: bool = False) -> None:
        """Add an option for a file to write, and `--force`, without which none is overwritten."""
        self.add_argument(option, type=Path, metavar="FILE", help=about)
        if not self._outputs:
            what = "overwrite an existing file; never a folder"
            self.add_argument("--force", action="store_true", help=what)
        self._outputs[option] = may_be_folder

    def parse_args(self, words: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Read words in any order. Raise ConfigError where an output can't be written."""
        asked = self.parse_intermixed_args(list(words), namespace)
        for option, may_be_folder in self._outputs.items():
            if (file := getattr(asked, option.strip("-"))) not in (None, Path("-")):
                refuse_taken(option, file, force=asked.force, may_be_folder=may_be_folder)
        return asked

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would print and exit."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def refuse_taken(option: str, file: Path, *, force: bool, may_be_folder: bool = False) -> None:
    """Raise ConfigError where an output can't be written, before anything is computed."""
    real = Path(os.path.realpath(file))  # a link stays one
    for run in map(RunPaths, real.parents):
        if run.result.is_file() and any(map(real.is_relative_to, run.found())):
            raise ConfigError(f"{option} {file}: is a file of the run {run.folder}; name another")
    parent = real.parent
    if not parent.is_dir() or not os.access(file if file.is_dir() else parent, os.W_OK):
        raise ConfigError(f"{option} {file}: {parent} is not a folder that can be written to")
    if file.exists() and not (file.is_file() or (may_be_folder and file.is_dir())):
        raise ConfigError(f"{option} {file}: is there already, and is no file; name another")
    if not force and (any(file.iterdir()) if file.is_dir() else file.exists()):
        raise ConfigError(f"{option} {file}: is there already; use --force, or another name")


def positive(text: str) -> int:
    """Read a whole number above 0, as a `type` of argparse."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0")
    return int(text)


def last_value(settings: Sequence[str], key: str) -> str | None:
    """Return the value of a key, of several words the last."""
    found = [word.partition("=")[2] for word in settings if key_of(word) == key]
    return unquoted(found[-1]) if found else None


class Exact(str):
    """An override that is in Hydra's grammar already, and needs no quotes."""


class Options(NamedTuple):
    """The words of a command, options and settings apart."""

    settings: list[str]
    sweep: bool = False
    quiet: bool = False
    config_dir: str | None = None
    """A folder of custom YAML."""
    printing: tuple[str, ...] = ()
    """Hydra's options that print something, and start no run."""


_FLAGS = {"-m": "sweep", "--multirun": "sweep", "-q": "quiet", "--quiet": "quiet"}
_PRINTING = {"--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--shell-completion": 1, "-sc": 1}
_PRINTING |= {"--info": 1, "-i": 1, "--hydra-help": 0, "--resolve": 0}
"""Options with the number of values that follow."""


def options_of(arguments: Sequence[str]) -> Options:
    """Read the options among the words. Raises ConfigError for one that there is not."""
    settings, printing, found = list[str](), list[str](), dict[str, str | bool]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            settings.append(word)
        elif word in _FLAGS:
            found[_FLAGS[word]] = True
        elif name in ("-cd", "--config-dir"):
            folder = value if equals else next(words, "")
            if not folder or folder.startswith("-"):
                raise ConfigError(f"{word}: names no folder of custom YAML")
            found["config_dir"] = folder
        elif name in _PRINTING:
            printing.append(word)
            if _PRINTING[name] and not equals:
                printing += [each for each in [next(words, None)] if each is not None]
        else:
            key = name.lstrip("-").replace("-", "_")
            raise ConfigError(
                f"{word}: there is no such option of a training (see python -m expt --help); those"
                f" of a command follow its word, as in predict; settings have no dashes: {key}=..."
            )
    return Options(settings, printing=tuple(printing), **found)  # type: ignore[arg-type]
