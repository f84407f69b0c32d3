"""Compose configurations by Hydra, which is called through its public functions alone."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import compose, initialize_config_dir, version
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from expt.command import hydra_part, mistakes
from expt.command.conf_files import refuse_misread
from expt.command.grammar import lock, parse, parse_one, with_classes_added
from expt.config import conf_dir, secrets
from expt.config.auto import fill_auto_of_a_sweep
from expt.config.constraints import quoted
from expt.config.keys import may_be_text, varying
from expt.config.parse import Settings, with_value
from expt.runs.overrides import run_name
from expt.runs.paths import make_unused_folder

VERSION_BASE = "1.3"
MAX_BASES = 1000
"""Choices of groups whose composition is kept; each takes 30 kB."""


class Kept(NamedTuple):
    """The bases that Hydra has composed, and the options of groups."""

    bases: dict[tuple[str, ...], _Base]
    options: dict[str, list[str]]


_OF_EXPT = Kept({}, {})
"""Those of expt's own YAML alone: a further `expt.run` has them at once."""


class Composer:
    """Compose the configurations of one command.

    Hydra composes each choice of groups once, as a base. Words that give a key a value update it;
    those that do anything else, such as adding or deleting a key, are part of the choice.
    """

    def __init__(self, own: Sequence[Path] = (), hydra_words: Sequence[str] = ()) -> None:
        """Take folders of custom YAML, and the words of the command about Hydra itself."""
        self.own = own
        self._folders = [*own, conf_dir()]
        is_place = ("hydra.run.", "hydra.sweep.")
        self._places = [word for word in hydra_words if word.startswith(is_place)]
        self._of_hydra = [word for word in hydra_words if word not in self._places]
        urls = ",".join(quoted(f"file://{folder.resolve()}") for folder in own)
        self._hydra_words = [*self._of_hydra, *([f"hydra.searchpath=[{urls}]"] if own else [])]
        self._kept = Kept({}, {}) if self._hydra_words else _OF_EXPT
        self._first: DictConfig | None = None

    def compose(self, words: Sequence[str]) -> DictConfig:
        """Return the configuration of a run, Hydra's part included.

        Raises ConfigError where it cannot be composed.
        """
        with lock, self.explained(words):
            base, own = self._updated(words)
            composed: DictConfig = pickle.loads(base.composed)
            for key, value in own.items():
                if value is not base.own[key]:
                    composed[key] = value
            with read_write(composed.hydra):
                composed.hydra.runtime.cwd = os.getcwd()
                composed.hydra.overrides.hydra += self._places
                for word in map(parse_one, self._places):
                    OmegaConf.update(composed, word.key_or_group, word.value())
            if self._first is not None:  # `${now:}` is the same in all runs of a command
                OmegaConf.copy_cache(from_config=self._first, to_config=composed)
            self._first = self._first or composed
            with open_dict(composed), read_write(composed):
                composed.hydra.overrides.task = list(words)
                composed.hydra.job.override_dirname = ",".join(sorted(words))
            return composed

    def settings(
        self, words: Sequence[str], *, sweep: bool, folder: Path | None = None, number: int = 0
    ) -> Settings:
        """Return the settings of a run, as plain containers, interpolations resolved.

        Raises ConfigError where it has none.
        """
        with lock, self.explained(words):
            _, own = self._updated(words)
            if not re.search(r"\$\{|\?\?\?", repr(own)):  # as it is written
                node = {**own, "secrets": {}}
                return Settings(fill_auto_of_a_sweep(node) if sweep else node)
            composed = self.compose(words)
            if folder is not None:  # `${hydra:...}` may ask for it
                hydra_part.place(composed, folder, number)
            return settings_of(composed, sweep=sweep)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group; nothing for a key that is none."""
        if group not in self._kept.options:
            with lock, self._initialized() as loader:
                found = loader.get_group_options(group, None, None, self._hydra_words)
                self._kept.options[group] = found
        return self._kept.options[group]

    def environment(self, words: Sequence[str]) -> dict[str, str]:
        """Return the variables that `hydra.job.env_set` gives to a run's workers."""
        with lock:
            has_any = any(base.has_environment for base in self._kept.bases.values())
            return hydra_part.environment_of(self.compose(words)) if has_any else {}

    def is_group(self, key: str) -> bool:
        """Return whether `key` chooses a YAML file."""
        return bool(self.options(key.partition("@")[0]))

    def _updated(self, words: Sequence[str]) -> tuple[_Base, dict[str, Any]]:
        """Return the base of the words that choose, and its settings with the values of others."""
        every = parse(with_classes_added(words))
        for word in every:
            mistakes.refuse_wrong_choice(word)
        values = [word for word in every if self._only_sets(word)]
        others = [word for word in every if word not in values]
        elements = [word for word in others if re.search(r"\.\d+(\.|$)", word.key_or_group)]
        choices = [word for word in others if word not in elements]
        base, own = self._with_values(choices, values)
        for word in elements:
            mistakes.refuse_wrong_element(own, word)
        # Hydra adds and deletes keys, also numbers of a mapping, but no elements of lists.
        of_lists = [word for word in elements if mistakes.Place(own, word.key_or_group).of_list]
        if of_mappings := [word for word in elements if word not in of_lists]:
            base, own = self._with_values([*choices, *of_mappings], values)
        return base, functools.reduce(base.with_value, of_lists, own)

    def _with_values(
        self, choices: Sequence[Override], values: Sequence[Override]
    ) -> tuple[_Base, dict[str, Any]]:
        """Return the base of these choices, and its settings with other values."""
        base = self._base(*(str(each.input_line) for each in choices))
        return base, functools.reduce(base.with_value, values, base.own)

    def _base(self, *choices: str) -> _Base:
        if choices not in self._kept.bases:
            if len(self._kept.bases) >= MAX_BASES:
                self._kept.bases.pop(next(iter(self._kept.bases)))
            with self._initialized():
                words = [*self._hydra_words, *choices]
                composed = compose("config", words, return_hydra_config=True)
            refuse_misread(self.own, composed.hydra.runtime.choices)
            self._kept.bases[choices] = _Base(composed)
        return self._kept.bases[choices]

    def _only_sets(self, word: Override) -> bool:
        """Return whether a word changes only the value of a key, which needs no Hydra."""
        changes = word.type == OverrideType.CHANGE and word.package is None
        is_value = isinstance(word.value(), dict) or not self.is_group(word.key_or_group)
        return changes and is_value and not word.is_hydra_override()

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
        except hydra_part.COMPOSING as error:
            every = [*self._of_hydra, *words]
            raise hydra_part.as_config_error(error, every, self._folders) from error


class _Base:
    """The composition of a choice of groups."""

    def __init__(self, composed: DictConfig) -> None:
        self.composed = pickle.dumps(composed)  # a copy of bytes takes 1 ms, one by deepcopy 6
        own: Any = OmegaConf.to_container(composed, resolve=False)
        self.own: dict[str, Any] = {key: own[key] for key in own if key != "hydra"}
        """The settings, interpolations as they are written."""
        self.has_environment = bool(composed.hydra.job.env_set)
        self.choices = dict(composed.hydra.runtime.choices)

    def with_value(self, own: dict[str, Any], word: Override) -> Any:
        """Return settings with the value of an override. Raises ConfigError for a wrong one."""
        mistakes.refuse_wrong_key(own, word, self.choices)
        return with_value(own, word.key_or_group.split("."), word.value(), merge=True)


def settings_of(composed: DictConfig, *, sweep: bool = False) -> Settings:
    """Return the settings of a configuration, as plain containers, interpolations resolved.

    A task that Hydra itself calls gets a configuration without Hydra's part: errors about that are
    OmegaConf's, and name no file of YAML.
    """
    if "hydra" not in composed:
        return _resolved(composed, sweep=sweep)
    with hydra_part.resolving(composed):
        return _resolved(composed, sweep=sweep)


def _resolved(composed: DictConfig, *, sweep: bool) -> Settings:
    """Return the settings of a configuration; note its variables, which may be secrets."""
    own = [str(key) for key in composed if key != "hydra"]
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    leaves = dict(secrets.leaves({key: unresolved[key] for key in own}))
    texts = {key: x for key, x in leaves.items() if isinstance(x, str) and "${" in x}
    variables = {
        key: text
        for key, text in secrets.interpolations(leaves if texts else {})
        if may_be_text(key) or f"{key.partition('.')[0]}._target_" in leaves
    }
    secrets.remember(variables)  # first, for an error may show them
    content = {key: contained(composed[key]) for key in own}
    secrets.remember(variables, content)
    node = {**content, "secrets": variables}
    if texts and (following := _following(composed, texts)):
        node["following"] = following
    settings = Settings(fill_auto_of_a_sweep(node) if sweep else node)
    settings.texts = texts
    return settings


def contained(value: Any) -> Any:
    """Return one of a configuration's values; a copy of all with Hydra's would take four times."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def _following(composed: DictConfig, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the interpolations whose values another seed or fold would change."""
    repeated = {key: OmegaConf.select(composed, key) for key in varying("repetition")}
    repeated = {key: value for key, value in repeated.items() if isinstance(value, int)}
    found = {key: _text(composed, key) for key in texts}
    with flag_override(composed, ["struct", "readonly"], [False, False]):
        try:
            for key, value in repeated.items():
                OmegaConf.update(composed, key, value + 1)
            others = {key: _text(composed, key) for key in texts}
        finally:
            for key, value in repeated.items():
                OmegaConf.update(composed, key, texts.get(key, value))
    moved = {key for key in texts if others[key] != found[key]} - repeated.keys()
    return {key: texts[key] for key in texts if key in moved}


def _text(composed: DictConfig, key: str) -> str | None:
    """Return the value of a key as a text; None for one that has none with this seed."""
    with contextlib.suppress(Exception):  # of a custom resolver, too
        return str(OmegaConf.select(composed, key))
    return None


def enter_hydra(task: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Let Hydra itself run this process's command: its printing options, other sweepers."""
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_resolvers()
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base=VERSION_BASE)(task)()


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
