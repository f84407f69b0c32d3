"""Compose configurations: the only module that imports Hydra.

Hydra is called through its public functions, under one lock: its state, and the resolvers of
interpolations, belong to the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir, version
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    OverrideType,
    RangeSweep,
)
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from expt.command.conf_files import as_config_error, groups, refuse_misread, unknown_key
from expt.config.auto import fill_auto_of_a_sweep
from expt.config.kinds import CUSTOM_DATASET_KEYS, conf_dir
from expt.config.parse import plain, with_value
from expt.errors import ConfigError, first_line
from expt.runs.overrides import quoted, run_name
from expt.runs.paths import make_unused_folder

__all__ = ["ChoiceSweep", "IntervalSweep", "Override", "RangeSweep"]

COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)
"""Exceptions of Hydra and OmegaConf while a configuration is composed or resolved."""
VERSION_BASE = "1.3"
MAX_BASES = 1000
"""Choices of groups whose composition is kept; each takes 30 kB."""

_lock = threading.RLock()
# A process that another thread forks has Hydra's state whole, and no lock that nobody releases.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def parse(words: Sequence[str]) -> list[Override]:
    """Read overrides by Hydra's grammar. Raises ConfigError for one that has no reading."""
    return [parse_one(word) for word in words]


@functools.lru_cache(maxsize=10_000)  # a word takes 0.5 ms
def parse_one(word: str) -> Override:
    """Read one override; it is shared, so leave it unchanged."""
    with _lock:
        try:
            return _parser().parse_overrides([word])[0]
        except OverrideParseException as error:
            fix = "quote each text in it: \"key=['a (b)',c]\""
            raise ConfigError(f"{word}: {first_line(error)}; {fix}") from error


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def is_readable(word: str) -> bool:
    """Return whether Hydra's grammar has a reading for the override."""
    try:
        parse_one(word)
    except ConfigError:
        return False
    return True


def key_of(override: Override) -> str:
    """Return its key, or the group with where its choice goes, such as `aug@model.opts`."""
    at = "" if override.package is None else f"@{override.package}"
    return f"{override.key_or_group}{at}"


class Composer:
    """Compose the configurations of one command.

    Each choice of groups is composed once by Hydra, and plain values are set on a copy of that;
    whatever else a word does, such as adding or deleting a key, is composed in full.
    """

    def __init__(self, own: Sequence[str] = (), hydra_words: Sequence[str] = ()) -> None:
        """Take folders of custom YAML, and the words about Hydra itself."""
        self.own = own
        self._folders = [*map(Path, own), conf_dir()]
        is_place = ("hydra.run.", "hydra.sweep.")
        self._places = [word for word in hydra_words if word.startswith(is_place)]
        self._hydra_words = [word for word in hydra_words if word not in self._places]
        if own:
            urls = (quoted(f"file://{Path(folder).resolve()}") for folder in own)
            self._hydra_words.append(f"hydra.searchpath=[{','.join(urls)}]")
        self._bases, self._options = ({}, {}) if self._hydra_words else _OF_EXPT
        self._first: DictConfig | None = None

    def compose(self, words: Sequence[str]) -> DictConfig:
        """Return the configuration of a run, Hydra's part included.

        Raises ConfigError where it cannot be composed.
        """
        with _lock, self.explained(words):
            base, values = self._split(words)
            composed: DictConfig = pickle.loads(base.composed)
            with read_write(composed.hydra):
                composed.hydra.runtime.cwd = os.getcwd()
                composed.hydra.overrides.hydra += self._places
                for value in [*map(parse_one, self._places), *values]:
                    self._set(composed, value)
            if self._first is not None:  # `${now:}` is the same in all runs of a command
                OmegaConf.copy_cache(from_config=self._first, to_config=composed)
            self._first = self._first or composed
            with open_dict(composed), read_write(composed):
                composed.hydra.overrides.task = list(words)
                composed.hydra.job.override_dirname = ",".join(sorted(words))
            return composed

    def settings(
        self, words: Sequence[str], *, sweep: bool, folder: Path | None = None, number: int = 0
    ) -> dict[str, Any]:
        """Return the settings of a run, as plain containers, interpolations resolved.

        Raises ConfigError where it has none.
        """
        with _lock, self.explained(words):
            base, values = self._split(words)
            if (found := base.with_values(values)) is not None:
                return fill_auto_of_a_sweep(found) if sweep else found
            composed = self.compose(words)
            if folder is not None:  # `${hydra:...}` may ask for it
                place(composed, folder, number)
            return settings_of(composed, sweep=sweep)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group; nothing for a key that is none."""
        if group not in self._options:
            with _lock, self._initialized() as loader:
                self._options[group] = loader.get_group_options(
                    group, None, None, self._hydra_words
                )
        return self._options[group]

    @property
    def has_environment(self) -> bool:
        """True if `hydra.job.env_set` names variables for workers."""
        with _lock:
            return any(base.has_environment for base in self._bases.values())

    def is_group(self, key: str) -> bool:
        """Return whether `key` chooses a YAML file."""
        return bool(self.options(key.partition("@")[0]))

    def values(self, override: Override) -> list[str]:
        """Return the words for each of several values. Raises ConfigError where there is none."""
        value, key = override.value(), override.key_or_group
        if isinstance(value, IntervalSweep):
            raise ConfigError(
                f"{override.input_line}: a grid needs a list of values, and an interval has"
                " infinitely many; list some, or add search=tpe"
            )
        known = value.filter(self.options(key)) if isinstance(value, Glob) else None
        texts = known if known is not None else [*override.sweep_string_iterator()]
        if not texts:
            raise ConfigError(f"{override.input_line}: has no value")
        return [f"{override.get_key_element()}={text}" for text in texts]

    def _split(self, words: Sequence[str]) -> tuple[_Base, list[Override]]:
        """Return the composition of the words that choose, and the words that set a plain value."""
        overrides = [parse_one(word) for word in with_classes_added(words)]
        for each in overrides:
            refuse_no_choice(each)
        values = [each for each in overrides if self._sets_value(each)]
        choices = tuple(str(each.input_line) for each in overrides if each not in values)
        if choices not in self._bases:
            if len(self._bases) >= MAX_BASES:
                self._bases.pop(next(iter(self._bases)))
            with self._initialized():
                words = [*self._hydra_words, *choices]
                composed = compose("config", words, return_hydra_config=True)
            refuse_misread(self.own, composed.hydra.runtime.choices)
            self._bases[choices] = _Base(composed)
        return self._bases[choices], values

    def _sets_value(self, word: Override) -> bool:
        if word.type != OverrideType.CHANGE or word.package is not None or word.is_hydra_override():
            return False
        return isinstance(word.value(), dict) or not self.is_group(word.key_or_group)

    def _set(self, composed: DictConfig, value: Override) -> None:
        try:
            OmegaConf.update(composed, value.key_or_group, value.value(), merge=True)
        except (ConfigAttributeError, ConfigKeyError) as error:
            key = value.key_or_group
            if not _may_be_added(value, composed):
                group, inner = key.partition(".")[0], str(error.full_key or "")
                chosen = str(composed.hydra.runtime.choices.get(group) or "")
                choice = None if _is_of_a_class(composed, group) else chosen
                key = inner if inner.startswith(f"{key}.") else key
                raise ConfigError(unknown_key(str(value.input_line), key, choice)) from error
            OmegaConf.update(composed, key, value.value(), force_add=True)

    @contextlib.contextmanager
    def _initialized(self) -> Iterator[ConfigLoader]:
        """Let Hydra know where the YAML lies; whoever else uses Hydra here finds it as it was."""
        instance, runtime = GlobalHydra.instance(), JobRuntime.instance()
        others, base, job = instance.hydra, version.getbase(), runtime.get("name")
        instance.clear()
        try:
            folder = str(conf_dir().resolve())
            with initialize_config_dir(folder, job_name="expt", version_base=VERSION_BASE):
                register_resolvers()
                yield GlobalHydra.instance().config_loader()
        finally:
            GlobalHydra.instance().clear()
            runtime.set("name", job)
            if others is not None:
                GlobalHydra.instance().initialize(others)
                version.setbase(str(base))

    @contextlib.contextmanager
    def explained(self, words: Sequence[str]) -> Iterator[None]:
        """Raise ConfigError for errors of Hydra about these words."""
        try:
            yield
        except COMPOSING as error:
            raise as_config_error(error, words, self._folders) from error


class _Base:
    """The composition of a choice of groups."""

    def __init__(self, composed: DictConfig) -> None:
        self.composed = pickle.dumps(composed)  # a copy of bytes takes 1 ms, one by deepcopy 6
        self.has_environment = bool(composed.hydra.job.env_set)
        own: Any = OmegaConf.to_container(composed, resolve=False)
        del own["hydra"]
        is_plain = not any(text in repr(own) for text in ("${", "???"))
        self._settings = plain(composed) if is_plain and not self.has_environment else None

    def with_values(self, values: Sequence[Override]) -> dict[str, Any] | None:
        """Return the settings with these values; None where all has to be composed for them."""
        settings: Any = self._settings
        for each in values:
            path, value = each.key_or_group.split("."), each.value()
            if settings is None or not _is_plain(value) or not _has_value(settings, path):
                return None
            settings = with_value(settings, path, value)
        return settings  # type: ignore[no-any-return]


def _is_plain(value: object) -> bool:
    return not isinstance(value, dict) and not any(
        text in repr(value) for text in ("${", "???", "QuotedString")
    )


def _has_value(settings: Any, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return not isinstance(settings, dict)


_OF_EXPT: tuple[dict[tuple[str, ...], _Base], dict[str, list[str]]] = {}, {}
"""Bases and options of groups by expt's own YAML alone: a further `expt.run` has them at once."""


def settings_of(composed: DictConfig, *, sweep: bool = False) -> dict[str, Any]:
    """Return the settings of a configuration, as plain containers, interpolations resolved."""
    with _resolving(composed):
        return plain(composed, sweep=sweep)


def folder_of(composed: DictConfig, kind: str) -> Path:
    """Return the folder of a `run` or a `sweep`; a new one is made where none was named."""
    with _resolving(composed):
        folder = str(composed.hydra[kind].dir)
    if not folder:
        raise ConfigError(f"hydra.{kind}.dir=: names no folder; is a variable of the shell empty?")
    return Path(folder)


def environment_of(composed: DictConfig) -> dict[str, str]:
    """Return the variables that `hydra.job.env_set` gives to a run's workers."""
    with _resolving(composed):
        return {str(key): str(value) for key, value in composed.hydra.job.env_set.items()}


def launcher_folder(composed: DictConfig) -> str:
    """Return where submitit keeps its own files."""
    with _resolving(composed):
        return str(composed.hydra.launcher.submitit_folder)


def place(composed: DictConfig, folder: Path, number: int | None = None) -> None:
    """Say in Hydra's part where the run is, and which of a sweep's."""
    with open_dict(composed), read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.runtime.output_dir = str(folder.absolute())
        composed.hydra.mode = "RUN" if number is None else "MULTIRUN"
        if number is not None:
            composed.hydra.job.id = composed.hydra.job.num = number
            composed.hydra.sweep.subdir = folder.name


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


def enter_hydra(task: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Let Hydra itself run this process's command: its printing options, other sweepers."""
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_resolvers()
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base=VERSION_BASE)(task)()


def hydra_now() -> Any:
    """Return Hydra's part of the configuration that it has called a task with."""
    return HydraConfig.get()


def register_resolvers() -> None:
    """Let YAML say `${unused_folder:NAME}`, and `${run_name:OVERRIDES}`, the name of a run."""
    OmegaConf.register_new_resolver(
        "run_name",
        lambda words: run_name(dict(str(word).split("=", 1) for word in words if "=" in word)),
        replace=True,
    )
    OmegaConf.register_new_resolver(
        "unused_folder", make_unused_folder, use_cache=True, replace=True
    )


@contextlib.contextmanager
def _resolving(composed: DictConfig) -> Iterator[None]:
    """While entered, `${hydra:...}` is read of this configuration."""
    with _lock:
        known = HydraConfig.instance()
        others = known.cfg
        known.set_config(composed)
        try:
            yield
        except COMPOSING as error:
            raise as_config_error(error, typed_in(composed.hydra)) from error
        finally:
            known.cfg = others


def typed_in(hydra: Any) -> list[str]:
    """Return the words of a run from Hydra's part of its configuration."""
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [str(word) for word in words]


def with_classes_added(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra takes them: a class in place of a group's choice is added.

    `model={_target_: mine.Net, width: 16}` is `~model` and `+model={...}`.
    """
    chosen = {word.partition("=")[0]: word for word in words if _is_class(word)}
    if not chosen:
        return list(words)
    added = [each for key, word in chosen.items() for each in (f"~{key}", f"+{word}")]
    return [*added, *(word for word in words if word.partition("=")[0] not in chosen)]


def _is_class(word: str) -> bool:
    key, _, value = word.partition("=")
    if key.lstrip("+~") != key or "." in key or value[:1] != "{" or "_target_" not in value:
        return False
    override = parse_one(word)
    return not override.is_sweep_override() and isinstance(override.value(), dict)


def refuse_no_choice(word: Override) -> None:
    """Raise ConfigError for a group of expt's with neither the name of one choice nor its keys."""
    key, value = word.key_or_group, word.value()
    if key == "hydra":
        raise ConfigError(f"{word.input_line}: has keys of its own, e.g. hydra.run.dir=FOLDER")
    is_name = isinstance(value, str) and word.type == OverrideType.CHANGE
    if key not in groups() or word.package is not None or word.is_delete() or is_name:
        return
    if isinstance(value, dict) and value:
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def _may_be_added(value: Override, composed: DictConfig) -> bool:
    """Return whether it is a key that every custom dataset has, in its YAML or not."""
    group, _, key = value.key_or_group.partition(".")
    is_own = group == "dataset" and key.partition(".")[0] in CUSTOM_DATASET_KEYS
    return is_own and _is_of_a_class(composed, group)


def _is_of_a_class(composed: DictConfig, key: str) -> bool:
    """Return whether the key is an argument of a custom class."""
    above = composed.get(key.partition(".")[0])
    return isinstance(above, DictConfig) and "_target_" in above
