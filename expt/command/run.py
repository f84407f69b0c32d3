"""One command: its configuration, and the run, the grid or the search that it asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from expt import machine
from expt.command import command_line, compose, terminal
from expt.command.hydra_files import about_run, remove_unused, write_hydra_files
from expt.command.outcome import Outcome
from expt.command.words import Options
from expt.config.groups import GROUPS
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.dashboards.sending import Sending
from expt.data.fingerprint import content_of
from expt.errors import INTERRUPTED_BEFORE, ConfigError, ExptError, Interrupted, RunFailed
from expt.launch.job import Job
from expt.launch.job import Options as PoolOptions
from expt.launch.launcher import Launcher, launcher
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, PAUSED, objective_of, read_result
from expt.runs.typed import key_of, quoted

USE_SWEEP = "use expt.sweep, which returns a list of results"
OF_A_SWEEP = ("hydra.launcher.", "hydra/launcher=", "hydra.sweep.")
"""Overrides without a meaning for a single run, which would do without them."""


@dataclass
class Command:
    """What the parts of one command share."""

    how: Launcher
    typed_at: float
    console: Console
    may_sweep: bool = True
    from_python: bool = False
    """Whether it is a call of expt.run or expt.sweep: nothing of the process is its own."""
    words: list[str] = field(default_factory=list)
    """Its settings, as Hydra's grammar has them."""
    swept: list[str] = field(default_factory=list)
    """The keys that have several values."""
    composer: compose.Composer = field(init=False)
    outcome: Outcome = field(default_factory=Outcome)
    sending: Sending = field(default_factory=Sending)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    began: bool = False
    """Whether a run or a sweep has its folder."""


def command(
    options: Options, *, typed_at: float, may_sweep: bool = True, from_python: bool = False
) -> list[RunPaths]:
    """Train what is asked for; returns the folders of the runs that have completed or paused.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    how = launcher()
    if (followed := how.follow(typed_at)) is not None:
        return [followed]
    console = terminal.console(quiet=options.quiet)
    this = Command(how, typed_at, console, may_sweep, from_python)
    try:
        with how.deciding(), this.at_end:
            _carry_out(this, options)
    except OSError as error:
        raise _about_the_folder(error, this, options) from error
    except KeyboardInterrupt as error:
        text = "interrupted" if this.began else INTERRUPTED_BEFORE
        raise Interrupted(str(error) or text) from error
    finally:
        this.sending.close()
        if this.outcome.sweep_folder is not None:
            _conclude(this)
        this.sending.wait()
    this.outcome.raise_if_failed()
    return this.outcome.in_order


def _carry_out(this: Command, options: Options) -> None:
    """Compose the configuration, and run what it asks for."""
    if options.printing:
        return _printed_by_hydra(options)
    words, where = command_line.read(options, begins=this.how.starts_workers)
    if folder := this.how.earlier_folder():  # where torchrun has started the workers again
        words.append(f"hydra.run.dir={quoted(folder)}")
    of_hydra = [word for word in words if key_of(word).startswith(("hydra.", "hydra/"))]
    this.words = [word for word in words if word not in of_hydra]
    this.composer = compose.Composer(where, of_hydra)
    fixed, axes = _split(this)
    this.swept = [compose.key_of(each) for each in axes]
    composed = this.composer.compose(fixed)
    if options.sweep or compose.is_sweep(composed):
        _refuse_no_sweep(this, words, options)
        return _sweep(this, composed, words, options)
    if axes:
        word = axes[0].input_line
        fix = "add -m" if this.may_sweep and not this.from_python else USE_SWEEP
        raise ConfigError(f"{word}: several values make a sweep; {fix}")
    if alone := next((word for word in of_hydra if word.startswith(OF_A_SWEEP)), None):
        raise ConfigError(f"{alone}: is for a sweep; add -m")
    if composed.get("search") is not None:
        raise ConfigError(f"search={composed.search.name}: makes several runs; add -m")
    if reason := compose.needs_hydra(composed):
        return _by_hydra(this, words, reason, options)
    run_one(this, composed)


def _split(this: Command) -> tuple[list[str], list[compose.Override]]:
    """Return the words of one run, and those with several values.

    Of a group with several choices the run has the first.
    """
    fixed, axes = list[str](), list[compose.Override]()
    for override in compose.parse(this.words):
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
            continue
        axes.append(override)
        if this.composer.is_group(override.key_or_group):
            fixed.append(this.composer.values(override)[0])
    return fixed, axes


def _refuse_no_sweep(this: Command, words: Sequence[str], options: Options) -> None:
    this.how.refuse_sweep("-m" if options.sweep else "sweep")
    if not this.may_sweep:
        raise ConfigError(f"this makes several runs; {USE_SWEEP}")


def _sweep(this: Command, composed: DictConfig, words: Sequence[str], options: Options) -> None:
    from expt.command.grid import Grid  # late: a single run does without it
    from expt.command.sweep import Sweep

    if reason := compose.needs_hydra(composed):
        return _by_hydra(this, words, reason, options)
    this.words = [*compose.named_axes(composed), *this.words]
    sweep, this.began = Sweep(this, composed), True
    if composed.get("search") is not None:
        from expt.command.search import search  # late: a grid does without it

        return search(sweep, this.words)
    sweep.run_grid(Grid(this.words, this.composer))


def run_one(this: Command, composed: DictConfig) -> float | None:
    """Train the run of a configuration; returns the value of its objective."""
    refuse_overruled(composed, this.words)
    settings = compose.settings_of(composed)
    config = parse(settings, machine.detect())
    paths = RunPaths(compose.folder_of(composed, "run"))
    compose.place(composed, paths.folder)
    typed = [word for word in this.words if word != "resume=auto"]

    def on_start() -> None:  # now the folder is this run's
        write_hydra_files(paths, compose.hydra_files(composed, typed))

    env = compose.environment_of(composed)
    return train(this, config, settings, paths, env, on_start)


def train(
    this: Command,
    config: RunConfig,
    settings: Mapping[str, Any],
    paths: RunPaths,
    env: Mapping[str, str],
    on_start: Callable[[], None] | None = None,
) -> float | None:
    """Train one run in its folder; `on_start` is called once the folder is the run's."""
    this.began, is_there = True, paths.hydra.exists()
    try:
        request = RunRequest(
            config=config,
            settings=settings,
            content=content_of(config),
            paths=paths,
            typed_at=this.typed_at,
            about=about_run(paths.folder.name, this.words),
            env=env,
        )
        if config.preflight:
            from expt.command.preflight import preflight  # late: tables

            preflight([Job(paths, request)], machine.detect(), PoolOptions())
            remove_unused(paths)
            return None
        this.sending.follow(config, paths.folder)
        this.how.carry_out(request, on_start, this.console)
    except (ConfigError, Interrupted):
        if not is_there:  # else what is there is of before
            remove_unused(paths)
        raise
    record = read_result(paths)
    this.outcome.add(paths, PAUSED if record.get("status") == PAUSED else COMPLETED)
    return objective_of(record)


def refuse_overruled(composed: DictConfig, words: Sequence[str]) -> None:
    """Raise ConfigError where a typed choice leaves another class in place than its own.

    An experiment may have a custom class, beside which the keys of the choice would count only.
    """
    typed = {key_of(word): word for word in words}
    for group, members in GROUPS.items():
        choice = typed.get(group, "").partition("=")[2]
        node = composed.get(group)
        is_class = isinstance(node, DictConfig) and "_target_" in node
        if choice in members and is_class and f"{group}._target_" not in typed:
            raise ConfigError(
                f"{group}={choice}: another YAML puts {node._target_} in its place; leave one out"
            )


def _printed_by_hydra(options: Options) -> None:
    """Let Hydra print what its own options ask for."""
    if any(word.startswith("query=") for word in options.settings):  # of Hydra's shell script
        from expt.command.completion import print_completions

        return print_completions()
    words = [command_line.readable(word) for word in options.settings]
    where = command_line.where_of(Path(options.config_dir) if options.config_dir else None, words)
    compose.enter_hydra(
        lambda _: None, [*options.printing, *_hydra_options(options, where), *words]
    )


def _hydra_options(options: Options, where: compose.Where) -> list[str]:
    named = [("--config-dir", where.own[0] if where.own else None)]
    named += [("--config-path", options.config_path)]
    found = [f"{name}={value}" for name, value in named if value]
    name = [] if options.config_name == "config" else [f"--config-name={options.config_name}"]
    return [*(["-m"] if options.sweep else []), *found, *name]


def _by_hydra(this: Command, words: Sequence[str], reason: str, options: Options) -> None:
    """Let Hydra run the command, which another sweeper, launcher or its callbacks need."""
    if this.from_python:
        raise ConfigError(f"{reason}: works on the command line only, by python -m expt")
    from expt.command.by_hydra import HydraTask

    task = HydraTask(this)
    compose.enter_hydra(task, [*_hydra_options(options, this.composer.where), *words])


def _conclude(this: Command) -> None:
    from expt.command.conclusion import conclude  # late: tables
    from expt.runs.view import leaderboard

    console = this.console if this.console.quiet else leaderboard.wide_console()
    folder, outcome = this.outcome.sweep_folder, this.outcome
    assert folder is not None
    conclude(console, folder, failed_now=outcome.errors, notes=outcome.notes)


def _about_the_folder(error: OSError, this: Command, options: Options) -> ExptError:
    """Return the error where the driver could not write."""
    where, why = error.filename, error.strerror or str(error)
    if isinstance(error, BrokenPipeError):
        return RunFailed("nobody reads the output any more")
    if this.outcome.in_order or this.began and this.outcome.sweep_folder:
        return RunFailed(f"{f'{where}: ' if where else ''}{why}; what was saved before is kept")
    key = "hydra.sweep.dir" if options.sweep else "hydra.run.dir"
    typed = [word.partition("=")[2] for word in options.settings if key_of(word) == key]
    folder = typed[-1] if typed else where or ""
    return ConfigError(f"{key}={folder}: {why}; choose another folder, as in {key}=FOLDER")
