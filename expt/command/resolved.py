"""The settings of a composed configuration: plain containers, interpolations resolved."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from expt.command.conf_files import written_in
from expt.command.hydra_part import choices_of, resolving, typed_in
from expt.config import secrets
from expt.config.auto import fill_auto_of_a_sweep
from expt.config.explained import Origin
from expt.config.key_types import may_be_text
from expt.config.keys import varying
from expt.config.parse import Settings


def settings_of(composed: DictConfig, *, sweep: bool = False) -> Settings:
    """Return the settings of a configuration, as plain containers, interpolations resolved.

    A task that Hydra itself calls gets a configuration without Hydra's part: errors about that are
    OmegaConf's, and name no file of YAML.
    """
    if "hydra" not in composed:
        return _resolved(composed, sweep=sweep)
    with resolving(composed):
        settings, hydra = _resolved(composed, sweep=sweep), composed.hydra
        places = [str(each) for each in hydra.searchpath or ()]
        files = [each.removeprefix("file://") for each in places if each.startswith("file://")]
        folders = [Path(os.path.relpath(file)) for file in files]
        return with_files(settings, folders, choices_of(composed), typed_in(hydra))


def _resolved(composed: DictConfig, *, sweep: bool) -> Settings:
    """Return the settings of a configuration; note its variables, which may be secrets."""
    own = [str(key) for key in composed if key != "hydra"]
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    leaves = dict(secrets.leaves({key: unresolved[key] for key in own}))
    texts = {key: x for key, x in leaves.items() if isinstance(x, str) and "${" in x}
    variables = {
        key: text
        for key, text in secrets.interpolations(texts)
        if may_be_text(key) or f"{key.partition('.')[0]}._target_" in leaves
    }
    secrets.remember(variables)  # first, for an error may show them
    content = {key: _contained(composed[key]) for key in own}
    secrets.remember(variables, content)
    node = {**content, "secrets": variables}
    if texts and (following := _following(composed, texts)):
        node["following"] = following
    settings = Settings(fill_auto_of_a_sweep(node) if sweep else node)
    settings.origin = Origin(texts)
    return settings


def _contained(value: Any) -> Any:
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


def with_files(
    settings: Settings, own: Sequence[Path], choices: Any, words: Sequence[str]
) -> Settings:
    """Return the settings with the files that have set those of them that no word has."""
    file_of = functools.partial(written_in, own, choices, words)
    settings.origin = settings.origin._replace(yaml=file_of)
    return settings
