"""The words of a command, before Hydra reads them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from expt.command.conf_files import groups
from expt.command.conf_files import options as options_of
from expt.command.overrides import hydra_quoted
from expt.errors import ConfigError, did_you_mean, warn
from expt.runs.paths import RunPaths
from expt.runs.result import latest_sweep

WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"}


def refuse_used_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError before Hydra writes into the folder of an earlier run."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        folder = Path(value.strip("'\""))
        used = key == "hydra.run.dir" and RunPaths(folder).result.exists() and "resume=auto" not in arguments
        if used:
            raise ConfigError(f"hydra.run.dir={folder}: holds a run already; choose another folder")


def refuse_mistyped_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError where `resume=auto` and a folder are all that is typed, and there is no such folder.

    With settings beside them a new run may be meant, which the same command resumes later: of that a warning tells.
    """
    folders = [word for word in arguments if word.startswith("hydra.run.dir=")]
    if "resume=auto" not in arguments or not folders:
        return
    folder = Path(folders[-1].partition("=")[2].strip("'\""))
    if folder.exists() or "$" in str(folder):
        return
    if len(arguments) > 2:
        warn(f"hydra.run.dir={folder}: there is no such folder; a new run begins there")
        return
    beside = [str(path) for path in folder.parent.glob("*") if path.is_dir()] if folder.parent.is_dir() else []
    raise ConfigError(
        f"hydra.run.dir={folder}: there is no such folder, so no run to resume.{did_you_mean(str(folder), beside)}"
    )


def with_earlier(arguments: Sequence[str]) -> list[str]:
    """The arguments, with those of the run that `resume=auto` goes on with before them, as far as they aren't given."""
    given = {word.partition("=")[0].lstrip("+~"): word.partition("=")[2].strip("'\"") for word in arguments}
    run_paths = RunPaths(Path(given.get("hydra.run.dir", "")))
    if given.get("resume") != "auto":
        return list(arguments)
    if "hydra.run.dir" not in given and not {"-m", "--multirun"} & {*arguments}:
        raise ConfigError("resume=auto: goes on in the folder of a run; name it, as in hydra.run.dir=FOLDER")
    if not run_paths.result.exists():  # killed before it began, or new
        return [*_earlier(run_paths, given), *arguments]
    # What Hydra wrote about the run when it was started stays.
    return [*_earlier(run_paths, given), *arguments, "hydra.output_subdir=null"]


def _earlier(run_paths: RunPaths, given: Mapping[str, str]) -> list[str]:
    """What began the run, but for `resume` and the keys that are `given`."""
    if not run_paths.overrides.exists():
        return []
    words = [str(word) for word in OmegaConf.load(run_paths.overrides)]
    return [word for word in words if (key := word.partition("=")[0].lstrip("+~")) != "resume" and key not in given]


def with_latest(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the newest sweep's folder in the place of `hydra.sweep.dir=latest`."""
    if "hydra.sweep.dir=latest" not in arguments:
        return list(arguments)
    newest = latest_sweep(Path("outputs"))
    if newest is None:
        raise ConfigError("hydra.sweep.dir=latest: there is no sweep in outputs/sweeps yet")
    return [f"hydra.sweep.dir='{newest}'" if word == "hydra.sweep.dir=latest" else word for word in arguments]


def refuse_unnamed(arguments: Sequence[str]) -> None:
    """Raise ConfigError for `=3` and for groups such as `model=null` and `model=3`: Hydra's own errors are no help."""
    for argument in arguments:
        group, _, value = argument.partition("=")
        if not group:
            raise ConfigError(f"{argument}: not of the form key=value; quote values with spaces or brackets")
        if group in groups() and re.fullmatch(r"null|true|false|[-+.\d]+|\{.*\}", value, re.IGNORECASE):
            raise ConfigError(f"{argument}: not one of {', '.join(path.stem for path in options_of(group))}.")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same words with the options in front: Hydra's parser loses what follows an option that follows a setting."""
    options, settings, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if not word.startswith("-"):
            settings.append(word)
            continue
        options.append(word)
        if word in WITH_VALUE:
            options += [value for value in [next(words, None)] if value is not None]
    return [*options, *settings]


def continue_command(folder: Path) -> str:
    """What to type to go on with the sweep of `folder`: the same command, there."""
    words = [word for word in sys.argv[1:] if not word.startswith("hydra.sweep.dir=")]
    # Hydra wants all settings side by side.
    place = max((index for index, word in enumerate(words, 1) if "=" in word and word[0] != "-"), default=len(words))
    words.insert(place, f"hydra.sweep.dir={hydra_quoted(folder)}")
    return shlex.join(["python", "-m", "expt", *words])
