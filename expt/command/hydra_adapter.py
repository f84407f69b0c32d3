"""The tricks played on Hydra, each with what it gains, and what goes without it where Hydra has
changed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from expt.command.completion import completed
from expt.command.conf_files import conf_dir
from expt.command.hydra_composing import composing_sooner
from expt.command.hydra_words import changed, replaced
from expt.config.parse import plain
from expt.errors import warn


def call(task: TaskFunction, arguments: Sequence[str]) -> None:
    """Let Hydra read `arguments` and call `task` for each run; whatever is raised comes through.

    Hydra has no function for that: it reads sys.argv and HYDRA_FULL_ERROR, which are put back.
    """
    prefer_own_launchers(arguments)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with (
            _without_echo(),
            _warnings_in_a_line(),
            composing_sooner(),
            _values_completed(),
            copied_sooner(),
        ):
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(
                task
            )()
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Drop the line that Hydra prints before it raises a failed run's exception: the error itself
    follows.

    Were it worded otherwise, it would be seen.
    """

    class Filter:
        def write(self, text: str) -> int:
            return (
                len(text)
                if text.startswith("Error executing job with overrides")
                else real.write(text)
            )

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real = sys.stderr
    with contextlib.redirect_stderr(cast(TextIO, Filter())):
        yield


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Tell Hydra's own warnings like expt's; and that a callback raises each time, where Python
    tells of the first.
    """
    real = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any
    ) -> None:
        if Path(filename).is_relative_to(Path(hydra.__file__).parent):
            warn(str(message).strip())
        else:
            real(message, category, filename, *more, **named)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", r"Callback .* raised")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def copied_sooner() -> Iterator[None]:
    """While entered, a copy of a whole configuration is made by pickle, in a third of the time.

    Hydra makes four of them for each run: 5 ms off its start, a seventh of a driver's time.
    """
    real = DictConfig.__deepcopy__

    def __deepcopy__(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        if memo:  # a part of what is being copied
            return real(self, memo)
        parent = self._get_parent()
        self._set_parent(None)  # which is not copied
        try:
            copied = cast(DictConfig, pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL)))
        except Exception:  # a person's own object, which only needs to be copied
            return real(self, memo)
        finally:
            self._set_parent(parent)
        copied._set_parent(parent)
        return copied

    with replaced(DictConfig, real, __deepcopy__):
        yield


@contextlib.contextmanager
def _values_completed() -> Iterator[None]:
    """Let a shell complete expt's words, and the values of a setting, of which Hydra knows the
    present one alone.
    """
    try:
        from hydra.plugins.completion_plugin import CompletionPlugin

        real = CompletionPlugin._query
    except (ImportError, AttributeError):
        changed(
            "this version of Hydra completes words in another way; of a setting it gives the"
            " present value alone"
        )
        yield
        return

    def _query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
        return completed(line, lambda settings: real(self, config_name, settings))

    with replaced(CompletionPlugin, real, _query):
        yield


def prefer_own_launchers(arguments: Sequence[str]) -> None:
    """Let `submitit_slurm` mean expt's where Hydra has a plugin of that name too: it would check
    our keys.
    """
    if not any("submitit_" in word for word in arguments):
        return
    from hydra.core.config_store import ConfigStore

    Plugins.instance()  # now they have stored what they will
    stored = getattr(ConfigStore.instance(), "repo", None)
    if not isinstance(stored, dict):
        changed(
            "this version of Hydra hides its launchers; where hydra-submitit-launcher is installed,"
            " uninstall it"
        )
        return
    for name in ("submitit_slurm", "submitit_local"):
        stored.get("hydra", {}).get("launcher", {}).pop(f"{name}.yaml", None)


def product(words: list[Override]) -> list[list[str]]:
    """The points of a grid, as Hydra's own sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (points,) = BasicSweeper.split_arguments(words, None)
    return points


def set_values(composed: DictConfig, values: list[Override], words: list[Override]) -> bool:
    """Change what Hydra composed of a point's choices into what it composes of all its `words`,
    `values` among them.

    Returns whether this Hydra can. Raises what Hydra raises for a value that cannot be set.
    """
    try:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname

        apply = ConfigLoaderImpl._apply_overrides_to_config
    except (ImportError, AttributeError):
        changed(
            "this version of Hydra sets values in another way; a sweep composes each point anew, in"
            " 0.1 s"
        )
        return False
    apply(values, composed)
    job, own = composed.hydra.job, [word for word in words if not word.is_hydra_override()]
    composed.hydra.overrides.task = [word.input_line for word in own]
    named = job.config.override_dirname
    job.override_dirname = get_overrides_dirname(
        overrides=own, kv_sep=named.kv_sep, item_sep=named.item_sep, exclude_keys=named.exclude_keys
    )
    return True


_VALUE = getattr(JobReturn, "return_value", None)


class FailedReturn(JobReturn):
    """A failed run's, whose value is nan to a sweeper; Hydra's would raise the error."""

    if isinstance(_VALUE, property):
        return_value = _VALUE.getter(lambda _: math.nan)


def fail(returned: JobReturn, error: BaseException) -> JobReturn:
    """`returned` as a failed run's: the error for Hydra's callbacks, nan for its sweepers.

    So one failure does not keep a sweep's other batches from running.
    """
    failed = returned
    if isinstance(getattr(JobReturn, "return_value", None), property):
        failed = FailedReturn(**vars(returned))
    else:
        changed(
            "this version of Hydra keeps a run's result in another way; a failed run may end a"
            " sweep of batches"
        )
    failed.status, failed.return_value = JobStatus.FAILED, error
    return failed


def parted(composed: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Copies of what a person has configured, and of Hydra's own part: pickled, in a fifth of a
    deep copy's time.
    """
    pickled = pickle.dumps(composed, pickle.HIGHEST_PROTOCOL)
    own, hydra = cast(DictConfig, pickle.loads(pickled)), cast(DictConfig, pickle.loads(pickled))
    with open_dict(own), read_write(own):
        del own["hydra"]
    with open_dict(hydra), read_write(hydra):
        for key in [key for key in hydra if key != "hydra"]:
            del hydra[key]
    return own, hydra


def is_heard(callbacks: object) -> bool:
    """Whether a person has configured callbacks; to let them see a run's configuration takes 10 ms
    each time.
    """
    return bool(getattr(callbacks, "callbacks", True))


def use_config(composed: DictConfig) -> None:
    """Let callbacks see this run's configuration through HydraConfig, as they do in a single run."""
    HydraConfig.instance().set_config(composed)


def settings_of_point(composed: DictConfig) -> dict[str, Any]:
    """What `plain` gives for a point of a sweep, whose `${hydra:...}` are read of this one's
    configuration.
    """
    use_config(composed)
    return plain(composed, sweep=True)
