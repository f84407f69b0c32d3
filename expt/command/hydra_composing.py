"""How Hydra composes for a command: each thing once, and nothing that an earlier command of this
process composed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from expt.command.conf_files import conf_dir
from expt.command.hydra_words import changed, parsed_once, replaced
from expt.command.libyaml import parsed_by_libyaml, written_by_libyaml

MOST_CHOICES = 100
"""Whose composition is kept; each takes 25 KB."""


@contextlib.contextmanager
def composing_sooner() -> Iterator[None]:
    """While entered, in one command, Hydra composes as it always does, in a fraction of the time."""
    kept = Kept.of_now()
    with (
        _composed_once(),
        sources_shared(),
        read_once(kept),
        parsed_once(),
        chosen_once(kept),
        written_by_libyaml(),
    ):
        yield


@dataclasses.dataclass
class Kept:
    """What was made of the YAML that expt ships by commands of this process, while its files were
    in one `state`.
    """

    state: tuple[tuple[str, int, int], ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    choices: dict[Any, bytes] = dataclasses.field(default_factory=dict)
    """The lists of what is merged, and what is composed of that, by what was chosen."""

    @classmethod
    def of_now(cls) -> Kept:
        """A new one where a file has changed; takes 0.6 ms to see."""
        global _kept
        state = tuple(_states(conf_dir()))
        if _kept is None or _kept.state != state:
            _kept = cls(state)
        return _kept


_kept: Kept | None = None


def _states(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _states(entry.path)
            else:
                about = entry.stat()
                yield entry.path, about.st_mtime_ns, about.st_size


def keep_what_is_shipped() -> list[Path]:
    """Read all YAML that expt ships and compose the usual choice, for this process's later
    commands.

    Returns the files, which may not change.
    """
    files = sorted(conf_dir().rglob("*.yaml"))
    with composing_sooner(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for words in [], ["model=mlp"]:
            compose("config", words)
        with contextlib.suppress(ImportError, AttributeError):
            from hydra._internal.core_plugins.file_config_source import FileConfigSource

            source = FileConfigSource("main", f"file://{conf_dir()}")
            for path in files:
                source.load_config(path.relative_to(conf_dir()).with_suffix("").as_posix())
    return files


@contextlib.contextmanager
def _composed_once() -> Iterator[None]:
    """Spare Hydra from composing a single run twice, the first time only to read `hydra.mode`.

    It takes 0.1 s off a command's start.
    """
    try:
        from hydra._internal.hydra import Hydra

        real = Hydra.get_mode
    except (ImportError, AttributeError):
        changed(
            "this version of Hydra reads hydra.mode in another way; a run may start a moment later"
        )
        yield
        return

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        try:
            if any(
                word.is_sweep_override()
                for word in OverridesParser.create().parse_overrides(overrides)
            ):
                return real(self, config_name, overrides)
            composed = self.config_loader.load_configuration(config_name, overrides, RunMode.RUN)
        except Exception:  # a mistake, which Hydra will come to
            return None
        mode = composed.hydra.mode
        if mode is None:  # then Hydra asks for a run
            composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.append(_AS_RUN)
            overrides = [*overrides, _AS_RUN]
        self.config_loader = cast(
            ConfigLoader, _Composed(self.config_loader, config_name, overrides, composed)
        )
        return mode

    with replaced(Hydra, real, get_mode):
        yield


_AS_RUN = "hydra.mode=RUN"
"""What Hydra adds to a command that leaves it open."""


class _Composed:
    """A config loader that has composed one run before it is asked to."""

    def __init__(
        self, loader: ConfigLoader, name: str | None, overrides: Sequence[str], composed: DictConfig
    ) -> None:
        self._loader, self._asked, self._composed = (
            loader,
            (name, [*overrides], RunMode.RUN),
            composed,
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, **more: bool
    ) -> DictConfig:
        """What is there already, where that is asked for; the next time it is composed anew."""
        if (config_name, overrides, run_mode) != self._asked:
            return self._loader.load_configuration(config_name, overrides, run_mode, **more)
        self._asked = (None, [], run_mode)
        return self._composed


@contextlib.contextmanager
def sources_shared() -> Iterator[None]:
    """Let each copy that Hydra makes of where it looks have the same sources, which never change,
    in a list of its own.

    With copies of them go copies of all settings that Hydra and its plugins have registered: half
    of the time of a composition that is not the first."""
    try:
        from hydra._internal.config_repository import ConfigRepository
    except ImportError:
        changed(
            "this version of Hydra keeps elsewhere where it looks; a run may start a moment later"
        )
        yield
        return

    def __deepcopy__(self: ConfigRepository, _: dict[int, Any]) -> ConfigRepository:
        copied = copy.copy(self)
        copied.sources = [*self.sources]
        return copied

    repository: Any = ConfigRepository
    repository.__deepcopy__ = __deepcopy__
    try:
        yield
    finally:
        del repository.__deepcopy__


@contextlib.contextmanager
def read_once(kept: Kept) -> Iterator[None]:
    """Let Hydra read each YAML file once in a command, so that one edited in mid-sweep does not
    change later points.

    It also takes a quarter off the 0.1 s in which Hydra composes a point.
    """
    # imports the plugins anew: a class imported before is not the one that reads
    Plugins.instance()
    try:
        from hydra._internal.core_plugins.file_config_source import FileConfigSource

        real = FileConfigSource.load_config
    except (ImportError, AttributeError):
        changed(
            "this version of Hydra reads files in another way; edit none while a sweep is under way"
        )
        yield
        return
    shipped, others = str(conf_dir()), dict[str, bytes]()

    def load_config(self: FileConfigSource, config_path: str) -> ConfigResult:
        # A source's other properties, as who names it, stand in what it gives.
        key = f"{self.provider} {self.path} {config_path}"
        read = kept.files if self.path == shipped else others
        if key in read:
            return cast(ConfigResult, pickle.loads(read[key]))
        with parsed_by_libyaml():
            found = real(self, config_path)
        read[key] = pickle.dumps(
            found, pickle.HIGHEST_PROTOCOL
        )  # whoever asks takes parts out of it
        return found

    with replaced(FileConfigSource, real, load_config):
        yield


@contextlib.contextmanager
def chosen_once(kept: Kept) -> Iterator[None]:
    """Let Hydra set values on a copy of what it composed for an earlier command that chose the
    same.

    It takes half off a driver's time after `expt warm`, and of a call of expt.run that is not the
    first. Where a person's own YAML is searched, all is composed each time: anything may have
    become of that."""
    try:
        from hydra._internal import config_loader_impl

        module: Any = config_loader_impl
        loader = module.ConfigLoaderImpl
        real_list, real_compose = (
            module.create_defaults_list,
            loader._compose_config_from_defaults_list,
        )
    except (ImportError, AttributeError):
        changed("this version of Hydra composes in another way; a run may start a moment later")
        yield
        return

    def create_defaults_list(
        repo: Any,
        config_name: str | None,
        overrides_list: list[Any],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> Any:
        values, choices = _parted(repo, overrides_list)
        key = (config_name, prepend_hydra, skip_missing, choices) if _is_shipped(repo) else None
        if ("composed", key) in kept.choices:
            found = pickle.loads(kept.choices["list", key])
            found.config_overrides = values
        else:
            found = real_list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
            if key and len(kept.choices) < 2 * MOST_CHOICES:
                known = SimpleNamespace(known_choices=dict(found.overrides.known_choices))
                plain = dataclasses.replace(found, config_overrides=[], overrides=cast(Any, known))
                kept.choices["list", key] = pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)
        found.defaults = _Listed(found.defaults, key)
        return found

    def _compose_config_from_defaults_list(self: Any, defaults: list[Any], repo: Any) -> Any:
        key = defaults.key if isinstance(defaults, _Listed) else None
        if ("composed", key) in kept.choices:
            copied = pickle.loads(kept.choices["composed", key])
            OmegaConf.clear_cache(copied)  # in which is what `${now:}` was
            return copied
        found = real_compose(self, defaults, repo)
        if key and len(kept.choices) < 2 * MOST_CHOICES:
            kept.choices["composed", key] = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        return found

    module.create_defaults_list = create_defaults_list
    try:
        with replaced(loader, real_compose, _compose_config_from_defaults_list):
            yield
    finally:
        module.create_defaults_list = real_list


class _Listed(list[Any]):
    """What is merged, in order, and by what it was chosen; None where that is not to be kept."""

    def __init__(self, defaults: Sequence[Any], key: object) -> None:
        super().__init__(defaults)
        self.key = key


def _parted(repo: Any, words: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """The words that set a value, and the texts of those that choose, as Hydra tells them apart."""
    values, choices = list[Any](), list[str]()
    for word in words:
        if word.is_sweep_override():
            continue
        if isinstance(word.value(), dict) or not repo.group_exists(word.key_or_group):
            values.append(word)
        else:
            choices.append(str(word.input_line))
    return values, tuple(choices)


def _is_shipped(repo: Any) -> bool:
    """Whether it looks nowhere but into the YAML that expt and Hydra ship."""
    known = {("file", str(conf_dir())), ("pkg", "hydra.conf"), ("structured", "")}
    return all((source.scheme(), source.path) in known for source in repo.get_sources())
