"""One command: its configuration, and the run, the grid or the search that it asks for."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from expt import machine
from expt.command import command_line, compose, grammar, hydra_part, terminal
from expt.command.compose import Composer
from expt.command.grammar import Override
from expt.command.run import Command, train
from expt.command.words import Options, last_value
from expt.config.groups import GROUPS
from expt.config.keys import without_effect
from expt.config.parse import parse
from expt.errors import (
    INTERRUPTED_BEFORE,
    ConfigError,
    ExptError,
    Interrupted,
    RunFailed,
    warn,
)
from expt.launch.launcher import launcher, refuse_in_torchrun
from expt.runs.overrides import key_of
from expt.runs.paths import RunPaths, refuse_mixed

USE_SWEEP = "use expt.sweep, which returns a list of results"


@machine.not_world_writable()
def command(
    options: Options, *, typed_at: float, may_sweep: bool = True, from_python: bool = False
) -> list[RunPaths]:
    """Carry out a command; returns the folders of the runs that have completed or were pruned.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    how = launcher()
    if (followed := how.follow(typed_at)) is not None:
        return [followed]
    console = terminal.console(quiet=options.quiet)
    this = Command(how, typed_at, console, from_python)
    try:
        with how.deciding(), this.at_end:
            _carry_out(this, options, may_sweep=may_sweep)
    except OSError as error:
        raise _about_the_folder(error, this, options) from error
    except KeyboardInterrupt as error:
        text = "interrupted" if this.began else INTERRUPTED_BEFORE
        raise Interrupted(str(error) or text) from error
    finally:
        this.sending.close()
        if (folder := this.outcome.sweep_folder) is not None:
            from expt.command.conclude import conclude  # late: tables

            conclude(console, folder, notes=this.outcome.notes)
        this.sending.wait()
    this.outcome.raise_if_failed()
    return [*this.outcome.ended]


class _Asked:
    """The settings of a command, in Hydra's grammar."""

    def __init__(self, words: Sequence[str], own: Sequence[Path]) -> None:
        """Take the words, and folders of custom YAML."""
        self.of_hydra = [word for word in words if key_of(word).startswith(("hydra.", "hydra/"))]
        """Words about Hydra itself."""
        self.words = [word for word in words if word not in self.of_hydra]
        self.fixed, self.axes = list[str](), list[Override]()
        """The words of one run, which has the first of a group's choices; those with several."""
        self.composer = Composer(own, self.of_hydra)
        for override in grammar.parse(self.words):
            if not override.is_sweep_override():
                self.fixed.append(str(override.input_line))
                continue
            self.axes.append(override)
            if self.composer.is_group(override.key_or_group):
                self.fixed.append(grammar.words_of(override, self.composer.options)[0])


def _carry_out(this: Command, options: Options, *, may_sweep: bool) -> None:
    if options.printing and this.from_python:
        raise ConfigError(f"{options.printing[0]}: works on the command line only")
    if any(word.startswith("query=") for word in options.printing):
        from expt.command.help import print_completions  # for Hydra's shell script

        return print_completions()
    begins = not (options.printing or machine.is_external_worker())
    asked = _Asked(*command_line.read(options, begins=begins, folder=this.how.earlier_folder()))
    composed = asked.composer.compose(asked.fixed)
    if options.printing:
        return _print(asked, options)
    sweep = _is_sweep(this, options, asked, composed, may_sweep=may_sweep)
    if reason := hydra_part.needs_hydra(composed):
        if this.from_python:
            raise ConfigError(f"{reason}: works on the command line only, by python -m expt")
        _let_hydra_run(this, asked, options, composed, sweep=sweep)
    elif sweep:
        _sweep(this, asked, composed)
    else:
        _train(this, asked, composed)


def _let_hydra_run(
    this: Command, asked: _Asked, options: Options, composed: DictConfig, *, sweep: bool
) -> None:
    cluster = str(composed.hydra.runtime.choices.get("hydra/launcher"))
    if sweep and cluster in hydra_part.CLUSTER_LAUNCHERS:
        raise ConfigError(f"hydra/launcher={cluster}: runs a grid or search=... only")
    from expt.command.by_hydra import HydraTask  # late: a single run does not need it

    task = HydraTask(this, asked.composer, [*map(grammar.key_of, asked.axes)])
    compose.enter_hydra(task, _arguments(asked, options))


def _train(this: Command, asked: _Asked, composed: DictConfig) -> None:
    _refuse_overruled(composed, asked.words)
    settings = compose.settings_of(composed)
    config = parse(settings, machine.detect())
    for line in without_effect(config, map(key_of, asked.words)):
        warn(line)
    paths = RunPaths(hydra_part.folder_of(composed, "run"))
    if not paths.result.exists():
        refuse_mixed(paths.folder, "hydra.run.dir")
    hydra_part.place(composed, paths.folder)
    files = hydra_part.hydra_files(composed, command_line.words_to_keep(paths, asked.words))
    env = hydra_part.environment_of(composed)
    train(this, asked.words, config, paths, settings=settings, hydra=files, env=env)


def _is_sweep(
    this: Command, options: Options, asked: _Asked, composed: DictConfig, *, may_sweep: bool
) -> bool:
    """Return whether the command makes several runs.

    Raises ConfigError where it may not, or for settings of the other kind of command.
    """
    sweep = options.sweep or hydra_part.is_sweep(composed)
    if sweep:
        refuse_in_torchrun(f"{'-m' if options.sweep else 'sweep'}: a sweep")
        if not may_sweep:
            raise ConfigError(f"this makes several runs; {USE_SWEEP}")
        _refuse_unequal(asked, composed)
    else:
        _refuse_several(asked, composed, USE_SWEEP if this.from_python else "add -m")
    hydra_part.refuse_unused(composed, asked.of_hydra, sweep=sweep)
    hydra_part.refuse_unheeded(asked.composer.own, composed, sweep=sweep)
    return sweep


def _sweep(this: Command, asked: _Asked, composed: DictConfig) -> None:
    from expt.command.sweep import Grid, Sweep  # late: a single run does not need it

    words = [*hydra_part.named_axes(composed), *asked.words]
    of_this = Sweep(this, composed, asked.composer)
    if composed.get("search") is None:
        return of_this.run_grid(Grid(words, asked.composer))
    from expt.command.search import SearchCommand

    SearchCommand(of_this, words).run()


def _print(asked: _Asked, options: Options) -> None:
    """Let Hydra print the requested part of a run's configuration."""
    if options.sweep or asked.axes:
        raise ConfigError(
            f"{options.printing[0]}: shows one run; leave out -m, and give each key one value"
        )
    of_run = [] if "--hydra-help" in options.printing else _arguments(asked, options)
    with asked.composer.explained(options.printing):
        compose.enter_hydra(lambda _: None, [*options.printing, *of_run])


def _arguments(asked: _Asked, options: Options) -> list[str]:
    """Return the words of the command for Hydra itself."""
    folders = [f"--config-dir={folder}" for folder in asked.composer.own[:1]]
    return [*["-m"] * options.sweep, *folders, *asked.words, *asked.of_hydra]


def _refuse_overruled(composed: DictConfig, words: Sequence[str]) -> None:
    """Raise ConfigError for a typed choice whose place an experiment gives to a custom class."""
    typed = {key_of(word): word for word in words}
    for group, members in GROUPS.items():
        choice = typed.get(group, "").partition("=")[2]
        node = composed.get(group)
        is_class = isinstance(node, DictConfig) and "_target_" in node
        if choice in members and is_class and f"{group}._target_" not in typed:
            raise ConfigError(
                f"{group}={choice}: a YAML file sets {group} to {node._target_}; leave one out"
            )


def _refuse_several(asked: _Asked, composed: DictConfig, fix: str) -> None:
    """Raise ConfigError for settings of several runs where one is asked for."""
    if asked.axes:
        axis = asked.axes[0]
        word, value = str(axis.input_line), OmegaConf.select(composed, axis.key_or_group)
        key, _, typed = word.partition("=")
        if "[" not in typed and (OmegaConf.is_list(value) or key == "gpus"):
            fix += f", or type a list: {key}=[{typed}]"
        raise ConfigError(f"{word}: several values make a sweep; {fix}")
    if composed.get("search") is not None:
        raise ConfigError(f"search={composed.search.name}: makes several runs; {fix}")


def _refuse_unequal(asked: _Asked, composed: DictConfig) -> None:
    """Raise ConfigError for choices that differ in settings a sweep has once, such as its grid."""
    once, composer = hydra_part.of_all_runs(composed), asked.composer
    for axis in (each for each in asked.axes if composer.is_group(each.key_or_group)):
        first, *others = grammar.words_of(axis, composer.options)
        for other in others:
            words = [other if word == first else word for word in asked.fixed]
            with_other = composer.compose(words)
            hydra_part.refuse_unused(with_other, [], sweep=True)
            hydra_part.refuse_unheeded(composer.own, with_other, sweep=True)
            found = hydra_part.of_all_runs(with_other)
            if differing := [key for key, value in once.items() if found[key] != value]:
                raise ConfigError(
                    f"{axis.input_line}: {first} and {other} set different values of"
                    f" {differing[0]}, and a sweep can have only one; type a command for each"
                )


def _about_the_folder(error: OSError, this: Command, options: Options) -> ExptError:
    """Return the error where the driver could not write."""
    where, why = error.filename, error.strerror or str(error)
    key = "hydra.sweep.dir" if options.sweep else "hydra.run.dir"
    folder = last_value(options.settings, key) or where
    if error.errno == errno.ENAMETOOLONG:
        is_below = str(where).startswith(str(folder))
        return ConfigError(f"{f'{key}={folder}' if is_below else where}: {why}; shorten it")
    if not this.from_python and (reason := terminal.unwritten()):
        return RunFailed(f"{reason}; what was saved before is kept")
    if this.outcome.ended or (this.began and this.outcome.sweep_folder):
        return RunFailed(f"{where or 'the run'}: {why}; what was saved before is kept")
    return ConfigError(f"{key}={folder}: {why}; choose another folder, e.g. {key}=FOLDER")
