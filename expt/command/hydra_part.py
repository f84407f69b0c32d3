"""Hydra's part of a configuration, and `.hydra` of a run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from expt.command.conf_files import chosen_files, options
from expt.command.grammar import lock, readable
from expt.command.mistakes import unknown_key, unknown_option
from expt.config.constraints import typed
from expt.config.keys import flat
from expt.errors import ConfigError, first_line, warn
from expt.runs.overrides import key_of, unquoted

COMPOSING = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError),
    *(ValueError, AssertionError, RecursionError),
)
"""Exceptions of Hydra and OmegaConf while a configuration is composed or resolved."""
OF_SWEEPS = ("hydra.launcher.", "hydra/launcher", "hydra.sweep.")
"""Beginnings of the keys that only a sweep has."""
USED = tuple(
    "hydra.run.dir hydra.sweep.dir hydra.launcher hydra/launcher hydra.sweeper"
    " hydra/sweeper hydra.callbacks hydra/callbacks hydra.mode hydra.job.env_set".split()
)
"""Beginnings of Hydra's keys that expt reads."""
LEAST = {
    "max_concurrent": 1, "runs_per_gpu": 1, "retries": 0, "stagger_s": 0.0,
    # On a cluster:
    "nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1, "timeout_min": 1,
    "max_num_timeout": 0, "signal_delay_s": 0, "array_parallelism": 1,
}  # fmt: skip
"""The least value of each key of `hydra.launcher`; only by a float it need not be whole."""
CLUSTER_LAUNCHERS = ("submitit_slurm", "submitit_local")


def as_config_error(
    error: BaseException, words: Sequence[str], folders: Sequence[Path] = ()
) -> ConfigError:
    """Return the error for one of `COMPOSING` that words have raised, with YAML of `folders`."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = [*(error.options or ()), *options(group, *folders)]
        return ConfigError(unknown_option(group, name, known))
    if isinstance(error, RecursionError):
        fix = "in its defaults another of the same group is - NAME, without the group"
        return ConfigError(f"{' '.join(words)}: a YAML file chooses itself; {fix}")
    unknown = re.match(r"Could not override '(.*?)'", str(error))
    key = unknown[1] if unknown else str(getattr(error, "full_key", None) or "")
    word = unquoted(next((each for each in reversed(words) if key_of(each) == key), key))
    if unknown:
        return ConfigError(f"{word}: {unknown_key(word, key)}")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key}: has no value; set {key}=...")
    text = f"{word}: {first_line(error)}" if key else _without_key(error, words, folders)
    return ConfigError(text)


def _without_key(error: BaseException, words: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the text of an error that knows no key, with its cause or the words that it is about.

    It is of a file that is not UTF-8, of a choice, of a launcher, or below a key that is null.
    """
    text = " ".join(str(error).split()).removeprefix("Error merging override ")
    if isinstance(error, ValueError | AssertionError):
        where = folders if isinstance(error, UnicodeDecodeError) else words
        text = f"{' '.join(map(str, where))}: {text}"
    cause = first_line(error.__cause__ or error).removeprefix("Error merging override ")
    return text if cause in text else f"{text}: {cause}"


@contextlib.contextmanager
def resolving(composed: DictConfig) -> Iterator[None]:
    """While entered, `${hydra:...}` is read of this configuration."""
    with lock:
        known = HydraConfig.instance()
        others = known.cfg
        known.set_config(composed)
        try:
            yield
        except COMPOSING as error:
            raise as_config_error(error, typed_in(composed.hydra)) from error
        finally:
            known.cfg = others


def hydra_now() -> Any:
    """Return Hydra's part of the configuration that it has called a task with."""
    return HydraConfig.get()


def place(composed: DictConfig, folder: Path, number: int | None = None) -> None:
    """Say in Hydra's part where the run is, and which of a sweep's."""
    with open_dict(composed), read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.runtime.output_dir = str(folder.absolute())
        composed.hydra.mode = "RUN" if number is None else "MULTIRUN"
        if number is not None:
            composed.hydra.job.id = composed.hydra.job.num = number
            composed.hydra.sweep.subdir = folder.name


def typed_in(hydra: Any) -> list[str]:
    """Return the words of a run from Hydra's part of its configuration."""
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [str(word) for word in words]


def is_sweep(composed: DictConfig) -> bool:
    """Return whether the configuration itself asks for a sweep, as a named grid does."""
    return getattr(composed.hydra.mode, "name", None) == "MULTIRUN"


def named_axes(composed: DictConfig) -> list[str]:
    """Return the axes of a named grid, as words. Raises ConfigError for one that is no text."""
    found = list[str]()
    for key, value in (composed.hydra.sweeper.params or {}).items():
        if OmegaConf.is_dict(value):
            example = ", ".join(f"{key}.{name}: {below}" for name, below in value.items())
            raise ConfigError(f"hydra.sweeper.params.{key}: a key of it is dotted; write {example}")
        is_list = OmegaConf.is_list(value)
        text = typed(OmegaConf.to_container(value), exact=True) if is_list else value
        found.append(readable(f"{key}={text}"))
    return found


def of_all_runs(composed: DictConfig) -> dict[str, Any]:
    """Return the settings that a sweep has once: its grid, its search, its launcher."""
    found: Any = OmegaConf.to_container(composed)
    of_hydra = {f"hydra.{key}": value for key, value in found["hydra"].items()}
    keys = [f"hydra.{key}" for key in ("sweeper", "launcher", "callbacks", "mode", "sweep")]
    return {key: {**found, **of_hydra}.get(key) for key in (*keys, "search", "preflight")}


def refuse_unused(composed: DictConfig, typed: Sequence[str], *, sweep: bool) -> None:
    """Raise ConfigError for a key of Hydra's that has no effect on a command of this kind."""
    if composed.hydra.job.get("chdir"):
        raise ConfigError(
            "hydra.job.chdir=true: runs stay in the folder where they are typed; leave it out, and"
            " write to ${hydra:runtime.output_dir}"
        )
    for word in typed:
        key = word.partition("=")[0].lstrip("+~")
        if sweep and key == "hydra.run.dir":
            raise ConfigError(f"{word}: is for one run; a sweep has hydra.sweep.dir")
        if not sweep and key.startswith(OF_SWEEPS):
            raise ConfigError(f"{word}: is for a sweep; add -m")
        if not key.startswith(USED) and not needs_hydra(composed):
            raise ConfigError(f"{word}: has no effect on expt's own runs; leave it out")


def refuse_unheeded(folders: Sequence[Path], composed: DictConfig, *, sweep: bool) -> None:
    """Raise ConfigError where a chosen file names another launcher or sweeper than is used.

    Warn of its axes where the command is one run.
    """
    choices, axes = composed.hydra.runtime.choices, dict[Path, str]()
    for path, word in _words_in_files(folders, choices):
        key, _, value = word.partition("=")
        if sweep and key.startswith(USED) and "/" in key and str(choices.get(key)) != value:
            raise ConfigError(
                f"{path}: {word} is not heeded in a file, {key}={choices.get(key)} is; leave it"
                f" out, and type {word}"
            )
        if not sweep and key.startswith("hydra.sweeper.params."):
            axes.setdefault(path, word)
    for path, word in axes.items():
        warn(f"{path}: {word} makes a sweep; add -m, or this is one run without it")


def _words_in_files(
    folders: Iterable[str | Path], chosen: Mapping[str, str | None]
) -> Iterator[tuple[Path, str]]:
    """Yield each of Hydra's keys, with its value, that a chosen file in `folders` sets."""
    for _, file in chosen_files(folders, chosen):
        entries = (entry for entry in file.defaults if isinstance(entry, dict))
        for key, value in ((key, value) for entry in entries for key, value in entry.items()):
            if found := re.fullmatch(r"override\s+/?(hydra/\w+)(@\S*)?", str(key)):
                yield file.path, f"{found[1]}={value}"
        for key, value in flat({"hydra": file.content.get("hydra") or {}}).items():
            yield file.path, f"{key}={typed(value, text=str)}"


def folder_of(composed: DictConfig, kind: str) -> Path:
    """Return the folder of a `run` or a `sweep`; a new one is made where none was named."""
    with resolving(composed):
        folder = str(composed.hydra[kind].dir)
    if not folder:
        raise ConfigError(f"hydra.{kind}.dir=: names no folder; is a variable of the shell empty?")
    return Path(folder)


def environment_of(composed: DictConfig) -> dict[str, str]:
    """Return the variables that `hydra.job.env_set` gives to a run's workers."""
    with resolving(composed):
        return {str(key): str(value) for key, value in composed.hydra.job.env_set.items()}


def launcher_options(composed: DictConfig) -> dict[str, Any]:
    """Return the keys of `hydra.launcher`, without that of a folder, which is made at once.

    Raises ConfigError for a value by which nothing would ever start.
    """
    found: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    for key, least in LEAST.items():
        value = found.get(key)
        is_kind = isinstance(value, int | type(least))
        if value is not None and not (is_kind and value >= least):
            noun = "whole number" if type(least) is int else "number"
            fix = f"give a {noun} of at least {least:g}"
            raise ConfigError(f"hydra.launcher.{key}={value}: is not possible; {fix}")
    return {key: found[key] for key in found if key not in ("_target_", "submitit_folder")}


def needs_hydra(composed: DictConfig) -> str:
    """Return the part that needs Hydra itself: its callbacks, another sweeper or launcher."""
    choices = composed.hydra.runtime.choices
    if (sweeper := choices.get("hydra/sweeper")) not in (None, "basic"):
        return f"hydra/sweeper={sweeper}"
    if (launcher := choices.get("hydra/launcher")) not in (None, "pool", *CLUSTER_LAUNCHERS):
        return f"hydra/launcher={launcher}"
    if composed.hydra.sweeper.get("max_batch_size") is not None:
        return "hydra.sweeper.max_batch_size"
    return "hydra.callbacks" if composed.hydra.callbacks else ""


def own_folders_of(hydra_yaml: Path) -> list[str]:
    """Return the folders of custom YAML that a run was started with, or `conf` for a moved one."""
    if not hydra_yaml.exists():
        return []
    found = OmegaConf.select(OmegaConf.load(hydra_yaml), "hydra.searchpath") or ()
    folders = (str(folder).removeprefix("file://") for folder in found)
    has_conf = os.path.isdir("conf")
    return ["conf" if has_conf and not os.path.isdir(each) else each for each in folders]


def hydra_files(composed: DictConfig, words: Sequence[str]) -> dict[str, str]:
    """Return the files in `.hydra` of a run by their names, interpolations as they were written."""
    own: Any = OmegaConf.to_container(composed, resolve=False, enum_to_str=True)
    hydra = {"hydra": own.pop("hydra")}
    return {"config": _yaml(own), "hydra": _yaml(hydra), "overrides": _yaml(list(words))}


def _yaml(content: object) -> str:
    """Return YAML as OmegaConf.to_yaml does, by libyaml in a tenth of its time."""
    return str(yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


class _Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    """Quote each text that OmegaConf would read as a number."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        try:
            float(text)
        except ValueError:
            return self.represent_str(text)  # type: ignore[no-any-return]
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'")  # type: ignore[no-any-return]


_Dumper.add_representer(str, _Dumper.represent_text)
