"""One command: its configuration, and the run, the grid or the search that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from expt import machine
from expt.command import command_line, compose, hydra_part, overrides, terminal
from expt.command.overrides import Override
from expt.command.run import Command, run_one
from expt.command.words import Options
from expt.errors import INTERRUPTED_BEFORE, ConfigError, ExptError, Interrupted, RunFailed
from expt.launch.launcher import launcher, refuse_in_torchrun
from expt.runs.paths import RunPaths
from expt.runs.request import key_of, quoted

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
    return [*this.outcome.ended]


def _carry_out(this: Command, options: Options) -> None:
    if options.printing and this.from_python:
        raise ConfigError(f"{options.printing[0]}: works on the command line only")
    if any(word.startswith("query=") for word in options.printing):
        from expt.command.completion import print_completions  # for Hydra's shell script

        return print_completions()
    begins = not (options.printing or machine.is_external_worker())
    words, own = command_line.read(options, begins=begins)
    if folder := this.how.earlier_folder():  # where torchrun has started the workers again
        words.append(f"hydra.run.dir={quoted(folder)}")
    of_hydra = [word for word in words if key_of(word).startswith(("hydra.", "hydra/"))]
    this.words = [word for word in words if word not in of_hydra]
    this.composer = compose.Composer(own, of_hydra)
    fixed, axes = _split(this)
    this.swept = [overrides.key_of(each) for each in axes]
    composed = this.composer.compose(fixed)
    if options.printing:
        if options.sweep or axes:
            raise ConfigError(
                f"{options.printing[0]}: shows one run; leave out -m, and give each key one value"
            )
        of_run = [*_hydra_options(options, own), *words]
        of_run = [] if "--hydra-help" in options.printing else of_run
        with this.composer.explained(options.printing):
            return compose.enter_hydra(lambda _: None, [*options.printing, *of_run])
    sweep = options.sweep or hydra_part.is_sweep(composed)
    if sweep:
        refuse_in_torchrun(f"{'-m' if options.sweep else 'sweep'}: a sweep")
        if not this.may_sweep:
            raise ConfigError(f"this makes several runs; {USE_SWEEP}")
        _refuse_several(this, composed, fixed, axes)
    elif axes:
        word = axes[0].input_line
        fix = USE_SWEEP if this.from_python else "add -m"
        value = OmegaConf.select(composed, axes[0].key_or_group)
        key, _, typed = str(word).partition("=")
        may_be_list = OmegaConf.is_list(value) or key == "gpus"
        if may_be_list and "[" not in typed:
            fix += f", or type a list: {key}=[{typed}]"
        raise ConfigError(f"{word}: several values make a sweep; {fix}")
    elif composed.get("search") is not None:
        raise ConfigError(f"search={composed.search.name}: makes several runs; add -m")
    hydra_part.refuse_unused(composed, of_hydra, sweep=sweep)
    if reason := hydra_part.needs_hydra(composed):
        return _by_hydra(this, words, reason, options)
    if sweep:
        return _sweep(this, composed)
    run_one(this, composed)


def _split(this: Command) -> tuple[list[str], list[Override]]:
    """Return the words of one run, and those with several values.

    Of a group with several choices the run has the first.
    """
    fixed, axes = list[str](), list[Override]()
    for override in overrides.parse(this.words):
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
            continue
        axes.append(override)
        if this.composer.is_group(override.key_or_group):
            fixed.append(this.composer.values(override)[0])
    return fixed, axes


def _refuse_several(
    this: Command, composed: DictConfig, fixed: Sequence[str], axes: Sequence[Override]
) -> None:
    """Raise ConfigError for choices that differ in settings a sweep has once, such as its grid."""
    once = hydra_part.of_all_runs(composed)
    for axis in (each for each in axes if this.composer.is_group(each.key_or_group)):
        first, *others = this.composer.values(axis)
        for other in others:
            words = [other if word == first else word for word in fixed]
            found = hydra_part.of_all_runs(this.composer.compose(words))
            if differing := [key for key, value in once.items() if found[key] != value]:
                raise ConfigError(
                    f"{axis.input_line}: {first} and {other} set different values of"
                    f" {differing[0]}, and a sweep can have only one; type a command for each"
                )


def _sweep(this: Command, composed: DictConfig) -> None:
    from expt.command.sweep import Grid, Sweep  # late: a single run does without it

    this.words = [*hydra_part.named_axes(composed), *this.words]
    sweep = Sweep(this, composed)
    if composed.get("search") is not None:
        from expt.command.search import SearchCommand  # late: a grid does without it

        return SearchCommand(sweep, this.words).run()
    sweep.run_grid(Grid(this.words, this.composer))


def _hydra_options(options: Options, own: Sequence[Path]) -> list[str]:
    found = [f"--config-dir={folder}" for folder in own[:1]]
    return ["-m", *found] if options.sweep else found


def _by_hydra(this: Command, words: Sequence[str], reason: str, options: Options) -> None:
    """Let Hydra run the command, which another sweeper, launcher or its callbacks need."""
    if this.from_python:
        raise ConfigError(f"{reason}: works on the command line only, by python -m expt")
    from expt.command.by_hydra import HydraTask

    task = HydraTask(this)
    compose.enter_hydra(task, [*_hydra_options(options, this.composer.own), *words])


def _conclude(this: Command) -> None:
    from expt.command.conclude import conclude  # late: tables
    from expt.runs.view import leaderboard

    console = this.console if this.console.quiet else leaderboard.wide_console()
    folder, outcome = this.outcome.sweep_folder, this.outcome
    assert folder is not None
    conclude(console, folder, notes=outcome.notes)


def _about_the_folder(error: OSError, this: Command, options: Options) -> ExptError:
    """Return the error where the driver could not write."""
    where, why = error.filename, error.strerror or str(error)
    if not this.from_python and (reason := terminal.unwritten()):
        return RunFailed(f"{reason}; what was saved before is kept")
    if this.outcome.ended or (this.began and this.outcome.sweep_folder):
        return RunFailed(f"{where or 'the run'}: {why}; what was saved before is kept")
    key = "hydra.sweep.dir" if options.sweep else "hydra.run.dir"
    folder = command_line.last_value(options.settings, key) or where
    return ConfigError(f"{key}={folder}: {why}; choose another folder, e.g. {key}=FOLDER")
