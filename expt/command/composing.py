"""What Hydra composes of words for a command that is no run: `expt evaluate`, `expt plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from expt.command.conf_files import conf_dir
from expt.command.hydra_composing import composing_sooner
from expt.command.own_class import spelled_out
from expt.command.own_conf import conf_here, refuse_hidden
from expt.errors import ConfigError
from expt.runs.typed import quoted


def composed_alone(words: Sequence[str], config_dir: Path | None) -> DictConfig:
    """The settings of a run with these words, by a person's YAML in `config_dir` too, or else in
    `conf`.

    Raises ConfigError where there is no such folder, and what Hydra raises.
    """
    if config_dir and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    own = config_dir or conf_here(words)
    refuse_hidden([own] if own else [])
    searched = [f"hydra.searchpath=[{quoted(f'file://{own.resolve()}')}]"] if own else []
    with composing_sooner(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", [*searched, *spelled_out(words)])
