"""Every trick played on Hydra, in one file: each says what it gains, and goes without where Hydra has changed."""

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
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from expt.command.completion import completed
from expt.command.conf_files import conf_dir
from expt.command.hydra_words import changed, parsed_once, replaced
from expt.command.libyaml import parsed_by_libyaml
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
        with _without_echo(), _warnings_in_a_line(), _composed_once(), _read_once(), parsed_once(), _values_completed():
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Drop the line that Hydra prints before it raises a failed run's exception: the error itself follows.

    Were it worded otherwise, it would be seen.
    """

    class Filter:
        def write(self, text: str) -> int:
            return len(text) if text.startswith("Error executing job with overrides") else real.write(text)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real = sys.stderr
    with contextlib.redirect_stderr(cast(TextIO, Filter())):
        yield


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Tell Hydra's own warnings like expt's; and that a callback raises each time, where Python tells of the first."""
    real = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if Path(filename).is_relative_to(Path(hydra.__file__).parent):
            warn(str(message).strip())
        else:
            real(message, category, filename, *more, **named)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", r"Callback .* raised")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _composed_once() -> Iterator[None]:
    """Spare Hydra from composing a single run twice, the first time only to read `hydra.mode`.

    It takes 0.1 s off a command's start.
    """
    try:
        from hydra._internal.hydra import Hydra

        real = Hydra.get_mode
    except (ImportError, AttributeError):
        changed("this version of Hydra reads hydra.mode in another way; a run may start a moment later")
        yield
        return

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        try:
            if any(word.is_sweep_override() for word in OverridesParser.create().parse_overrides(overrides)):
                return real(self, config_name, overrides)
            composed = self.config_loader.load_configuration(config_name, overrides, RunMode.RUN)
        except Exception:  # a mistake, which Hydra will come to
            return None
        mode = composed.hydra.mode
        if mode is None:  # then Hydra asks for a run
            composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.append(_AS_RUN)
            overrides = [*overrides, _AS_RUN]
        self.config_loader = cast(ConfigLoader, _Composed(self.config_loader, config_name, overrides, composed))
        return mode

    with replaced(Hydra, real, get_mode):
        yield


@contextlib.contextmanager
def _values_completed() -> Iterator[None]:
    """Let a shell complete expt's words, and the values of a setting, of which Hydra knows the present one alone."""
    try:
        from hydra.plugins.completion_plugin import CompletionPlugin

        real = CompletionPlugin._query
    except (ImportError, AttributeError):
        changed("this version of Hydra completes words in another way; of a setting it gives the present value alone")
        yield
        return

    def _query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
        return completed(line, lambda settings: real(self, config_name, settings))

    with replaced(CompletionPlugin, real, _query):
        yield


_kept: dict[tuple[str, str], bytes] = {}


def keep_what_is_shipped() -> list[Path]:
    """Read all YAML that expt ships, for this process's later commands; returns the files, which may not change."""
    files = sorted(conf_dir().rglob("*.yaml"))
    with contextlib.suppress(ImportError, AttributeError), _read_once(_kept):
        from hydra._internal.core_plugins.file_config_source import FileConfigSource

        source = FileConfigSource("main", f"file://{conf_dir()}")
        for path in files:
            source.load_config(path.relative_to(conf_dir()).with_suffix("").as_posix())
    return files


@contextlib.contextmanager
def _read_once(read: dict[tuple[str, str], bytes] | None = None) -> Iterator[None]:
    """Let Hydra read each YAML file once in a command, so that one edited in mid-sweep does not change later points.

    It also takes a quarter off the 0.1 s in which Hydra composes a point.
    `read` has what was read before, and gets the rest.
    """
    read = {**_kept} if read is None else read
    Plugins.instance()  # imports the plugins anew: a class imported before is not the one that reads
    try:
        from hydra._internal.core_plugins.file_config_source import FileConfigSource

        real = FileConfigSource.load_config
    except (ImportError, AttributeError):
        changed("this version of Hydra reads files in another way; edit none while a sweep is under way")
        yield
        return

    def load_config(self: FileConfigSource, config_path: str) -> ConfigResult:
        key = (self.path, config_path)
        if key in read:
            return cast(ConfigResult, pickle.loads(read[key]))
        with parsed_by_libyaml():
            found = real(self, config_path)
        read[key] = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)  # whoever asks takes parts out of it
        return found

    with replaced(FileConfigSource, real, load_config):
        yield


_AS_RUN = "hydra.mode=RUN"
"""What Hydra adds to a command that leaves it open."""


class _Composed:
    """A config loader that has composed one run before it is asked to."""

    def __init__(self, loader: ConfigLoader, name: str | None, overrides: Sequence[str], composed: DictConfig) -> None:
        self._loader, self._asked, self._composed = loader, (name, [*overrides], RunMode.RUN), composed

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


def prefer_own_launchers(arguments: Sequence[str]) -> None:
    """Let `submitit_slurm` mean expt's where Hydra has a plugin of that name too: it would check our keys."""
    if not any("submitit_" in word for word in arguments):
        return
    from hydra.core.config_store import ConfigStore

    Plugins.instance()  # now they have stored what they will
    stored = getattr(ConfigStore.instance(), "repo", None)
    if not isinstance(stored, dict):
        changed("this version of Hydra hides its launchers; where hydra-submitit-launcher is installed, uninstall it")
        return
    for name in ("submitit_slurm", "submitit_local"):
        stored.get("hydra", {}).get("launcher", {}).pop(f"{name}.yaml", None)


def product(words: list[Override]) -> list[list[str]]:
    """The points of a grid, as Hydra's own sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (points,) = BasicSweeper.split_arguments(words, None)
    return points


def set_values(composed: DictConfig, values: list[Override], words: list[Override]) -> bool:
    """Change what Hydra composed of a point's choices into what it composes of all its `words`, `values` among them.

    Returns whether this Hydra can. Raises what Hydra raises for a value that cannot be set.
    """
    try:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname

        apply = ConfigLoaderImpl._apply_overrides_to_config
    except (ImportError, AttributeError):
        changed("this version of Hydra sets values in another way; a sweep composes each point anew, in 0.1 s")
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
        changed("this version of Hydra keeps a run's result in another way; a failed run may end a sweep of batches")
    failed.status, failed.return_value = JobStatus.FAILED, error
    return failed


def parted(composed: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Copies of what a person has configured, and of Hydra's own part: pickled, in a fifth of a deep copy's time."""
    pickled = pickle.dumps(composed, pickle.HIGHEST_PROTOCOL)
    own, hydra = cast(DictConfig, pickle.loads(pickled)), cast(DictConfig, pickle.loads(pickled))
    with open_dict(own), read_write(own):
        del own["hydra"]
    with open_dict(hydra), read_write(hydra):
        for key in [key for key in hydra if key != "hydra"]:
            del hydra[key]
    return own, hydra


def is_heard(callbacks: object) -> bool:
    """Whether a person has configured callbacks; to let them see a run's configuration takes 10 ms each time."""
    return bool(getattr(callbacks, "callbacks", True))


def use_config(composed: DictConfig) -> None:
    """Let callbacks see this run's configuration through HydraConfig, as they do in a single run."""
    HydraConfig.instance().set_config(composed)
