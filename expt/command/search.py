"""A search as a command: its trials are run as those of a grid."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from expt.command import compose
from expt.command.compose import Composer, Override, key_of, parse, parse_one
from expt.command.hydra_files import last_of_each
from expt.command.sweep import Runner, Sweep, SweepObserver
from expt.command.sweep_display import show_dry_run
from expt.command.sweep_folder import SweepRun
from expt.config import keys, own_code
from expt.config.identity import shown
from expt.config.kinds import metrics_of
from expt.config.parse import parse_search, wrong_values
from expt.config.schema import RunConfig
from expt.errors import ConfigError, Diverged, OutOfMemory, did_you_mean, warn
from expt.launch.job import Job
from expt.launch.pool import Pool
from expt.launch.submitit_jobs import Queue
from expt.machine import Machine
from expt.runs.overrides import unquoted
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PRUNED, OfSearch, Record
from expt.runs.view import leaderboard
from expt.runs.view.text import say
from expt.search import sampler
from expt.search.rungs import rungs_of
from expt.search.search import Budget, Search
from expt.search.space import Parameter, Space, Values
from expt.search.trial import Reader, goals_of, limits_of

BATCH = 8
"""Trials that are chosen together where another launcher than the pool starts the runs."""
NEAR = 32
"""How far the integers of a trial are moved to those with which a run can be."""


class SearchCommand:
    """One command's search, from its overrides to its runs."""

    def __init__(self, sweep: Sweep, words: Sequence[str]) -> None:
        self._sweep, self._config = sweep, sweep.config
        self._settings = parse_search(_plain(sweep.config.search))
        self._budget = None if self._settings.budget is None else Budget(self._settings.budget)
        self._fixed, self._axes = self._parted(words)

    def run(self) -> None:
        """Search until there are as many trials as were asked for.

        Raises ConfigError, Interrupted.
        """
        sweep = self._sweep
        search = self._search()
        if sweep.is_preflight:
            corners = (self._run(*each) for each in enumerate(self._space.corners()))
            return sweep.try_out(corners, search.num_left)
        if sweep.is_dry_run:
            return self._dry_run(search)
        total = max(self._settings.runs, search.count)
        display = SweepObserver(sweep.console, total=total, folder=sweep.folder, what="search")
        display.note = lambda job: "  best so far" if search.is_new_best(job.paths) else ""
        try:
            sweep.carry_out(
                lambda *each: self._rounds(search, *each), display, (Diverged, OutOfMemory)
            )
        finally:
            sweep.outcome.notes += self._at_end(search)
            if not {COMPLETED, PRUNED} & {*sweep.outcome.ended.values()}:
                for trial in search.trials:  # those of earlier commands that were bad
                    if trial.folder and RunPaths(trial.folder) not in sweep.outcome.ended:
                        sweep.outcome.add(RunPaths(trial.folder), trial.status)

    def _dry_run(self, search: Search) -> None:
        """Show the next trial; those after it depend on its result."""
        found = search.suggest() if search.count < self._settings.runs else None
        if found is not None:
            show_dry_run([self._run(*found)])
        what = "no further trial" if found is None else f"trial {search.count + 1}"
        before = f"; {len(search.unfinished)} continue first" if search.unfinished else ""
        say(leaderboard.wide_console(), f"{what} of {self._settings.runs}{before}")

    def _parted(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the overrides that all trials share, and the axes."""
        own = [
            each for each in last_of_each(words) if each.key_or_group.partition(".")[0] != "search"
        ]
        several = [each for each in own if each.is_sweep_override()]
        if any(each.key_or_group == "objective" for each in several):
            raise ConfigError(
                "objective: give several in brackets, such as 'objective=[accuracy/val,loss/val]'"
            )
        fixed = [str(each.input_line) for each in own if each not in several]
        if OmegaConf.is_list(self._config.objective):
            fixed = [word for word in fixed if not word.startswith("objective=")]
        return fixed, [str(each.input_line) for each in several]

    def _search(self) -> Search:
        """Return the search as its folder has it. Raises ConfigError for impossible settings."""
        sweep, settings = self._sweep, self._settings
        objective = _plain(self._config.objective)
        if isinstance(objective, list):
            self._fixed += _objective_of_runs(objective, self._settings_of(()))
        self._space = space = space_of(
            self._axes, settings.when, sweep.composer, self._settings_of, sweep.machine
        )
        self._keys = [*dict.fromkeys(parameter.name for parameter in space.parameters)]
        sweep.open()
        config = self._checked()
        goals, limits = goals_of(objective, config), limits_of(settings.constraints, config)
        sampler.check(settings.name, space, goals, limited=bool(limits))
        rungs = rungs_of(settings, config, goals)
        reader = Reader(space=space, goals=goals, limits=limits, differences=self._differences)
        found = Search(sweep.folder, settings, reader, rungs, self._budget)
        self._warn_of_others(found.others)
        found.nearest = self._nearest
        return found

    def _settings_of(self, words: Sequence[str]) -> dict[str, Any]:
        return self._sweep.composer.settings([*self._fixed, *words], sweep=True)

    def _config_of(self, values: Values) -> RunConfig:
        return self._sweep.open().config_of([*self._fixed, *self._space.words(values)])

    def _checked(self) -> RunConfig:
        """Return the configuration of one trial, after a look at each choice and each end.

        Raises ConfigError where no such trial can begin, or where rungs could not compare them.
        """
        found, errors = list[RunConfig](), list[ConfigError]()
        for values in self._space.corners():
            try:
                found.append(self._config_of(self._nearest(values)))
            except ConfigError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        self._sweep.open().identity_of(found[0])
        if self._settings.rungs and len({(each.epochs, each.max_steps) for each in found}) > 1:
            raise ConfigError(
                f"search.rungs={self._settings.rungs}: compares runs of equal length; search"
                " neither epochs nor max_steps, or leave rungs out"
            )
        return found[0]

    def _is_valid(self, values: Values) -> bool:
        try:
            self._config_of(values)
        except ConfigError:
            return False
        return True

    def _nearest(self, values: Values, tried: Sequence[Values] = ()) -> Values:
        """Return the values, or those with the nearest integer with which a run can be.

        Where workers must share a batch equally, say. Rather one that was not `tried`.
        """
        whole = [p for p in self._space.parameters if p.kind == "int" and p.is_active(values)]
        if not whole or self._is_valid(values):
            return values
        valid = list[Values]()
        for distance, each, way in itertools.product(range(1, NEAR + 1), whole, (-1, 1)):
            near = int(values[each.name]) + way * distance * int(each.step or 1)
            trial = {**values, each.name: near}
            if each.low <= near <= each.high and self._is_valid(trial):
                valid.append(trial)
                if trial not in tried:
                    return trial
        return valid[0] if valid else values

    def _differences(self, values: Values, record: Record) -> list[str]:
        """Return the settings in which a run of these values differs from this command's."""
        if "identity" not in record:  # refused before it had settings
            return []
        try:
            config = self._config_of(values)
            known = self._sweep.open().identity_of(config)
        except ConfigError:
            return []
        if record["identity"] == known.digest and not own_code.changed(record):
            return []
        then, now = keys.flat(record.get("config", {})), keys.flat(shown(config))
        differing = keys.differing(then, now, "result")
        return [key.removesuffix(".name") for key in differing] or ["its data or code"]

    def _warn_of_others(self, others: Mapping[str, Sequence[str]]) -> None:
        if others:
            names = dict.fromkeys(key for differing in others.values() for key in differing)
            warn(
                f"hydra.sweep.dir={self._sweep.folder}: has {len(others)} runs of other settings"
                f" ({', '.join(names) or 'outside the space'}), which are not trials of this search"
            )

    def _run(self, number: int, values: Values) -> SweepRun:
        words = [*self._fixed, *self._space.words(values)]
        of_search = OfSearch(number=number)
        run = self._sweep.open().run(words, number, self._keys, search=of_search)
        self._sweep.send_along(run)
        return run

    def _rounds(
        self, search: Search, display: SweepObserver, runner: Runner
    ) -> Iterator[Iterator[Job | None]]:
        """Yield the search once to the pool, and to a cluster as often as it has a batch."""

        def make(number: int, values: Values) -> Job | None:
            run = self._run(number, values)
            if run.job not in display.runs and search.is_of_another(number, run.job.paths):
                display.repeated(run.job)
                return None
            return display.take(run)

        unfinished = search.unfinished
        for trial in search.trials:
            if trial.folder is None or trial in unfinished:
                continue
            if trial.number is not None:
                display.known(trial.folder if trial.status == PRUNED else None)
            if trial.status in (COMPLETED, PRUNED):
                self._sweep.outcome.add(RunPaths(trial.folder), trial.status)
        has_room = runner.has_room if isinstance(runner, Pool) else None
        batch = self._settings.batch or (None if has_room else BATCH)
        search.begin(make, has_room=has_room, finish=runner.finish, batch=batch)
        if isinstance(runner, Queue):
            runner.look_on = search.has_spent_all
        while not (search.is_over or (isinstance(runner, Pool) and runner.is_closed)):
            yield search

    def _at_end(self, search: Search) -> Iterator[str]:
        if search.is_exhausted:
            yield f"search       ends after {search.count} trials: the space has no further one"
        if (budget := self._budget) is not None:
            left_s = max(0.0, budget.left_s(search.spent_s))
            begun = f"{search.count} of {self._settings.runs} trials have begun"
            yield f"budget       {left_s:.0f} s of {budget.text} are left; {begun}"


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _objective_of_runs(tags: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the override of the objective by which each run chooses its checkpoint.

    It is the first of several goals that an evaluation measures.
    """
    known = metrics_of(settings.get("task"))
    for tag in tags:
        name, _, split = tag.partition("/")
        if name in known and split in ("val", "test"):
            return [f"objective={tag}"]
    return []


SettingsOf = Callable[[Sequence[str]], Mapping[str, Any]]
"""Return the settings of a run with these overrides."""
_WHOLE = r"interval\((?:\w+=)?\s*[-+]?\d+\s*,\s*(?:\w+=)?\s*[-+]?\d+\s*\)"


def space_of(
    words: Sequence[str],
    when: Sequence[str],
    composer: Composer,
    settings_of: SettingsOf,
    machine: Machine,
) -> Space:
    """Return the space of the axes among `words`, and of those that conditions of `when` give.

    Raises ConfigError for an axis that can't be searched.
    """
    axes = [_parameter(each, composer) for each in parse(words) if each.is_sweep_override()]
    first = [each.word(each.choices[0]) for each in axes if each.choices]

    def typed(each: Parameter, words: Sequence[str]) -> Parameter:
        is_choice = composer.is_group(each.name)
        return each if is_choice else _typed(each, words, settings_of, machine)

    space = Space(tuple(typed(each, first) for each in axes))
    for condition in _in_order(map(_condition, when)):
        parameter = _parameter(condition.axis, composer)
        if any(each.choices for each in space.parameters if each.name == condition.name):
            parameter = replace(parameter, when=(condition.name, condition.among(space)))
        elif not _is_fixed(condition, settings_of(first), composer, space):
            continue
        chosen = space.requires(parameter)
        others = [each for each in first if each.partition("=")[0] not in chosen]
        choosing = [each for each in space.parameters if chosen.get(each.name) in each.choices]
        words = [*others, *(each.word(chosen[each.name]) for each in choosing)]
        space = Space((*space.parameters, typed(parameter, words)))
    if not space.parameters:
        raise ConfigError(
            "search: nothing to search; type an axis, such as"
            " 'optimizer.lr=tag(log,interval(1e-4,1))'"
        )
    _refuse_twice(space)
    return space


def _refuse_twice(space: Space) -> None:
    for one, other in itertools.combinations(space.parameters, 2):
        by, of_other = space.requires(one), space.requires(other)
        if one.name == other.name and all(by[key] == of_other[key] for key in by.keys() & of_other):
            raise ConfigError(
                f"{one.name}: is searched twice in one trial; name it once, or for different"
                " choices of one key, by search.when"
            )


class Condition(NamedTuple):
    """A text of `search.when`: an axis of those trials in which a key has the choice."""

    key: str
    """The setting with the text, for errors."""
    name: str
    choice: str
    axis: Override

    def among(self, space: Space) -> str:
        """Return the choice as it is typed in the space. Raises ConfigError where it is none."""
        several = [each for p in space.parameters if p.name == self.name for each in p.choices]
        for each in several:
            if unquoted(each) == unquoted(self.choice):
                return each
        hint, known = did_you_mean(self.choice, several), ",".join(several)
        raise ConfigError(f"{self.key}: {self.choice} is none of {self.name}={known}.{hint}")


def _condition(text: str) -> Condition:
    key, (condition, colon, word) = f"search.when={text}", text.partition(":")
    name, equals, choice = condition.strip().partition("=")
    if not colon or not equals:
        example = "'model=mlp: model.hidden=[32],[64]'"
        raise ConfigError(f"{key}: write 'KEY=CHOICE: AXIS', such as {example}")
    if not (axis := parse_one(word.strip())).is_sweep_override():
        raise ConfigError(f"{key}: {word.strip()} has only one value; give several, or an interval")
    return Condition(key, name, choice.strip(), axis)


def _in_order(conditions: Iterable[Condition]) -> Iterator[Condition]:
    """Yield each condition after those that give values to its key; else in the order typed."""
    left = list(conditions)
    while left:
        given = {key_of(each.axis) for each in left}
        free = next((each for each in left if each.name not in given), None)
        if free is None:
            raise ConfigError(f"{left[0].key}: {key_of(left[0].axis)} would depend on itself")
        left.remove(free)
        yield free


def _is_fixed(condition: Condition, settings: Any, composer: Composer, space: Space) -> bool:
    """Return whether all trials have that choice of a key that is not searched.

    So one list of conditions serves a search of any of the choices.
    """
    key, name, choice, _ = condition
    if not _has(settings, name):
        hint = did_you_mean(name, [each.name for each in space.parameters if each.choices])
        raise ConfigError(f"{key}: {name} has no choices in this search.{hint}")
    for part in name.split("."):
        settings = settings[part]
    options = composer.options(name)
    value = settings.get("name") if options and isinstance(settings, Mapping) else settings
    if options and choice not in (*options, value):
        raise ConfigError(f"{key}: {choice} is no {name}.{did_you_mean(choice, options)}")
    return bool(_listed(parse_one(f"{name}={choice}").value()) == _listed(value))


def _parameter(override: Override, composer: Composer) -> Parameter:
    """Return an axis as it was typed; an interval may still turn out to be of integers."""
    override = copy.deepcopy(override)  # it is shared
    sweep, name, typed = override.value(), key_of(override), override.get_key_element()
    word = override.input_line
    log = "log" in getattr(sweep, "tags", ())
    if isinstance(sweep, compose.IntervalSweep | compose.RangeSweep):
        if composer.is_group(override.key_or_group):
            raise ConfigError(f"{word}: {name} is chosen by name; give several, e.g. {name}=A,B")
        read = _interval if isinstance(sweep, compose.IntervalSweep) else _range
        found = read(name, str(word), sweep, log, typed)
        if not (math.isfinite(found.low) and math.isfinite(found.high)):
            raise ConfigError(f"{word}: needs two finite ends")
        if found.low > found.high or (found.step is None and found.low == found.high):
            raise ConfigError(f"{word}: is empty; the first end must be below the second")
        if log and found.low <= 0:
            raise ConfigError(f"{word}: a logarithmic scale begins above 0, such as at 1e-5")
        return found
    if log:
        raise ConfigError(f"{word}: choices have no scale; leave tag(log, ...) out")
    if isinstance(sweep, compose.ChoiceSweep):
        sweep.shuffle = False  # the order of the choices decides which trials a seed gives
    words = dict.fromkeys(composer.values(override))
    texts = [each.partition("=")[2] for each in words]
    meant = [_listed(parse_one(f"{name}={text}").value()) for text in texts]
    return Parameter(name, "categorical", choices=tuple(texts), meant=tuple(meant), typed=typed)


def _interval(name: str, word: str, sweep: Any, log: bool, typed: str) -> Parameter:
    low, high = sweep.start, sweep.end
    is_int = isinstance(low, int) and isinstance(high, int)  # by int(interval(1,8))
    if re.search(_WHOLE, word):  # whole numbers, which Hydra reads as floats
        low, high = int(low), int(high)
    return Parameter(name, "int" if is_int else "float", low, high, log, typed=typed)


def _range(name: str, word: str, sweep: Any, log: bool, typed: str) -> Parameter:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    count = math.ceil((stop - start) / step - 1e-9)
    if count < 1:
        raise ConfigError(f"{word}: the range is empty; its end is exclusive")
    is_int = all(isinstance(each, int) for each in (start, stop, step))
    low, high = sorted((start, start + (count - 1) * step))
    if not is_int:  # as typed: 0.7 + 2 * 0.1 is a little less than 0.9
        low, high = float(f"{low:.12g}"), float(f"{high:.12g}")
    if log and not (is_int and abs(step) == 1):
        raise ConfigError(f"{word}: tag(log, range(...)) needs a step of 1; use an interval")
    scale = None if log else abs(step)
    return Parameter(name, "int" if is_int else "float", low, high, log, scale, typed=typed)


def _typed(
    parameter: Parameter, words: Sequence[str], settings_of: SettingsOf, machine: Machine
) -> Parameter:
    """Return the parameter, of integers where its key takes no other number.

    So it is for an argument of a custom class that has an integer, with whole ends. Raises
    ConfigError for values that the key can't have, and Hydra's error where there is no such key.
    """
    settings = settings_of(words)
    if not _has(settings, parameter.name):
        settings_of([*words, parameter.word(parameter.at(0))])

    def wrong(*values: Any) -> list[str]:
        return wrong_values(settings, {parameter.name: values}, machine)

    if parameter.kind == "float" and parameter.step is None:
        between = parameter.low + (parameter.high - parameter.low) * 0.41421
        low, high = math.ceil(parameter.low), math.floor(parameter.high)
        is_whole = wrong(between) and not wrong(max(low, round(between)))
        if low <= high and (is_whole or _is_integer_of_custom(parameter, settings)):
            parameter = replace(parameter, kind="int", low=low, high=high)
        else:
            parameter = replace(parameter, low=float(parameter.low), high=float(parameter.high))
    values = parameter.meant if parameter.choices else (parameter.low, parameter.high)
    if problems := wrong(*values):
        raise ConfigError(list(dict.fromkeys(problems)))
    return parameter


def _is_integer_of_custom(parameter: Parameter, settings: Any) -> bool:
    known, ends = keys.flat(settings), {type(parameter.low), type(parameter.high)}
    is_of_custom = f"{parameter.name.partition('.')[0]}._target_" in known
    return is_of_custom and ends == {int} == {type(known.get(parameter.name))}


def _has(settings: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return True


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
