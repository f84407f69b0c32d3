"""Every trick played on Hydra, in one file: what a new version of it could break."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig


@contextlib.contextmanager
def called_with(arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra reads from its surroundings: the command line, and that exceptions are to come through."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _without_echo():
            yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Drop the line that Hydra prints before it raises a failed job's exception: the error itself follows."""

    class Filter:
        def write(self, text: str) -> int:
            return len(text) if text.startswith("Error executing job with overrides") else real.write(text)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real = sys.stderr
    with contextlib.redirect_stderr(cast(TextIO, Filter())):
        yield


def prefer_own_launchers(arguments: Sequence[str]) -> None:
    """Let `submitit_slurm` mean expt's where Hydra has a plugin of that name too: it would check our keys."""
    if not any("submitit_" in word for word in arguments):
        return
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # now they have stored what they will
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for name in ("submitit_slurm", "submitit_local"):
        launchers.pop(f"{name}.yaml", None)


class PointComposer:
    """Composes a sweep's points for Hydra, whose sweeper wants all of a batch composed, only to check them, at first.

    Composing takes as long as a short run: until the launch, only what no other point has shown to be right.
    """

    def __init__(self, context: HydraContext) -> None:
        self._loader = context.config_loader
        self._compose = self._loader.load_sweep_config
        self._loader.load_sweep_config = self._load  # type: ignore[method-assign]
        self._kept: dict[tuple[str, ...], DictConfig] = {}
        self._checked: set[str] = set()
        self.launching = False

    def _load(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        if self.launching:
            return self._kept.pop(tuple(sweep_overrides), None) or self._compose(master_config, sweep_overrides)
        new = set(map(self._what_to_check, sweep_overrides)) - self._checked
        if not new:
            return master_config
        self._checked |= new
        self._kept[tuple(sweep_overrides)] = composed = self._compose(master_config, sweep_overrides)
        return composed

    def _what_to_check(self, override: str) -> str:
        """Of a group every choice, of another key its name: its value is checked when the run's turn comes."""
        key = override.partition("=")[0]
        return override if self._loader.get_group_options(key.lstrip("+~").partition("@")[0]) else key


class FailedReturn(JobReturn):
    """A failed run, for sweepers: its value is nan, so that one failure does not end the other runs' batches."""

    @property
    def return_value(self) -> Any:
        """Not a number; `_return_value` holds the exception, which Hydra's own callbacks report."""
        return math.nan

    @return_value.setter
    def return_value(self, value: Any) -> None:
        """Hydra sets it; see the class."""
        self._return_value = value


def use_config(composed: DictConfig) -> None:
    """Let callbacks see this run's configuration through HydraConfig, as they do in a single run."""
    HydraConfig.instance().set_config(composed)
