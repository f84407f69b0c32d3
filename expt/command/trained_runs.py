"""The runs that `expt predict` and `expt evaluate` use: folders of runs, or some of a sweep."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from expt.command.words import Parser, positive
from expt.config import read_yaml
from expt.config.keys import flat
from expt.errors import ConfigError
from expt.runs.found import in_newest, results, without_copies
from expt.runs.named_checkpoint import run_and_which
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import result_of_any
from expt.runs.view.text import Console, field, say, shown_path


def add_options(parser: Parser) -> None:
    """Add the options that choose runs, and the one that flips images."""
    add = parser.add_argument
    add("--best", type=positive, metavar="N", help="of a sweep: N runs of its best settings [1]")
    about = "of a sweep: only runs of such settings; as of report [all of them]"
    add("--filter", action="append", default=[], metavar="KEY=VALUE", help=about)
    add("--flips", action="store_true", help="average over each image and its mirror image, too")


def named(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the first word, and those after it that are folders of runs and sweeps; the others."""
    runs = [words[0], *itertools.takewhile(_is_run, words[1:])]
    return runs, [*words[len(runs) :]]


def _is_run(word: str) -> bool:
    folder = _folder_of(word)
    return os.path.isdir(folder) and (is_sweep(folder) or RunPaths(folder).result.exists())


def _folder_of(word: str) -> Path:
    """Return the folder of a run, written as RUN@last too."""
    return Path(word if os.path.exists(word) or "@" not in word else word.rpartition("@")[0])


def started_elsewhere(word: str, problem: str) -> str:
    """Return a line if the `problem` is a name that the folder has where a run was started.

    A word that is no run or sweep in another folder gives an empty line.
    """
    folder = _folder_of(word)
    if folder == Path() or not os.path.isdir(folder):
        return ""
    runs = map(RunPaths, (folder, *(folder.iterdir() if is_sweep(folder) else ())))
    run = next((run for run in runs if run.hydra_settings.is_file()), None)
    if run is None:
        return ""
    import yaml  # late: most commands need none

    try:
        there = Path(read_yaml(run.hydra_settings)["hydra"]["runtime"]["cwd"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # damaged
        return ""
    record = result_of_any(run)
    names = {str(value): str(value) for value in flat(record.get("config", {})).values()}
    names |= {name: each["file"] for name, each in record.get("imported", {}).items()}
    for name, path in names.items():
        is_named = re.search(rf"(?<![\w./]){re.escape(name)}(?![\w/])", problem)
        if name and is_named and not os.path.exists(path) and (there / path).exists():
            return f"{folder} was started in {there}, which has {path}: type the command there"
    return ""


def chosen(
    given: Sequence[str],
    which: str | None,
    console: Console,
    *,
    best: int | None = None,
    filters: Sequence[str] = (),
) -> list[tuple[Path, str]]:
    """Return each run with its checkpoint; of a sweep those that the options choose.

    A single one of a sweep is named on the console. Raises ConfigError where none is left;
    `trained_run` refuses other folders.
    """
    pairs = (run_and_which(each, which) for each in given)
    found: dict[tuple[Path, str], tuple[Path, str]] = {}
    for folder, at in pairs:
        runs = _chosen(folder, best, filters)
        if len(runs) == 1 and runs != [folder]:
            say(console, field("run", shown_path(runs[0])))
        for run in runs:
            found.setdefault((run.resolve(), at), (run, at))
    return [*found.values()]


def _chosen(folder: Path, best: int | None, filters: Sequence[str]) -> list[Path]:
    is_asked = best is not None or filters
    if not is_sweep(folder) and not (is_asked and folder.exists()):
        return [folder]
    if RunPaths(folder).result.exists():
        option = "--filter" if filters else f"--best {best}"
        raise ConfigError(f"{option}: is for a sweep, and {folder} is a run; leave it out")
    from expt.runs.view.settings import filtered  # late: Rich's tables
    from expt.search.conclusion import ranked_in, search_in

    runs = in_newest(folder, without_copies(results(folder))[0])[0]
    try:
        runs = filtered(runs, filters)[0]
    except ConfigError as error:
        raise ConfigError(f"--filter {error}") from None
    rows = ranked_in(search_in(folder, runs), runs)
    if not rows:
        which = f" that has {' and '.join(filters)}" if filters else ""
        raise ConfigError(
            f"{folder}: no completed run{which} has one objective and keeps all constraints; name"
            " a run"
        )
    return [run.folder for row in rows for run in row.counted][: best or (None if filters else 1)]
