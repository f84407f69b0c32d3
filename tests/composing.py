"""What Hydra composes, in a tenth of its time: the choices once for all tests, then the values, as
for a sweep.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from expt.command.conf_files import conf_dir
from expt.command.hydra_composing import Kept, chosen_once, read_once, sources_shared
from expt.command.hydra_words import parsed_once
from expt.command.libyaml import parsed_by_libyaml
from expt.command.overrides import parsed, register_resolvers
from expt.command.point_composer import PointComposer, _Chosen
from expt.config.parse import plain

_KEPT = Kept(())
"""Of the YAML that expt ships, which nobody edits meanwhile."""


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """The settings of `python -m expt OVERRIDES`, where a person has a folder `conf`.

    Raises what Hydra raises.
    """
    found = _pieced(overrides, conf)
    if found is None:
        composer, master = _composer(conf)
        with read_once(_KEPT):
            found = composer.settings(master, overrides)
            found = plain(composer.compose(master, overrides)) if found is None else found
    copied: dict[str, Any] = pickle.loads(pickle.dumps(found))  # the next test gets it as it was
    return copied


def _pieced(overrides: Sequence[str], conf: Path | None) -> Mapping[str, Any] | None:
    """The same without Hydra: the usual choice with the files of others in its place, and values in
    theirs.

    None where a word is of any other kind, or a value is still to be given.
    """
    try:
        words = parsed(overrides)
    except HydraException:
        return None
    pieces, values = dict[str, Any](), list[Override]()
    for word in words:
        key, value = word.key_or_group, word.value()
        if (
            word.package is not None
            or word.type != OverrideType.CHANGE
            or key == "fork"
            or word.is_hydra_override()
        ):
            return None
        if key not in ALONE:
            values.append(word)
        elif isinstance(value, str) and (piece := _piece(key, value, conf)) is not None:
            pieces[key] = piece
        else:
            return None
    found = _Chosen(b"", {**_usual(), **pieces}).with_values(values)
    return None if found is None or "'???'" in repr(found) else found


ALONE = ("model", "init", "task", "dataset", "optimizer", "scheduler")
"""Groups whose files set nothing but what is below their own key."""


@functools.cache
def _piece(group: str, name: str, conf: Path | None = None) -> Any:
    folders = [conf_dir(), *([conf] if conf else [])]
    path = next(
        (path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None
    )
    if path is None or "defaults:" in path.read_text():
        return None
    with parsed_by_libyaml():
        return OmegaConf.to_container(OmegaConf.load(path))


@functools.cache
def _usual() -> dict[str, Any]:
    composer, master = _composer(None)
    return plain(composer.compose(master, []))


@contextlib.contextmanager
def hydra_at_hand() -> Iterator[None]:
    """While entered, Hydra composes from the YAML that expt ships, as in a command."""
    register_resolvers()
    at_hand = initialize_config_dir(str(conf_dir()), version_base="1.3")
    with at_hand, sources_shared(), read_once(_KEPT), parsed_once(), chosen_once(_KEPT):
        yield


@functools.cache
def _composer(conf: Path | None) -> tuple[PointComposer, DictConfig]:
    own = [f"hydra.searchpath=['file://{conf}']"] if conf else []
    with hydra_at_hand():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config(
            "config", own, run_mode=RunMode.RUN, with_log_configuration=False
        )
        return PointComposer(HydraContext(hydra.config_loader, Callbacks()), master), master
