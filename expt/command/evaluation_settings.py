"""The settings of `expt evaluate RUN ...`, from the run's record and the overrides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from expt import machine
from expt.command.command_line import check_repeated
from expt.command.compose import Composer
from expt.command.conf_files import own_folders
from expt.command.grammar import Override, parse, readable
from expt.command.mistakes import refuse_wrong_choice
from expt.config import kept_code, own_code, rules, secrets
from expt.config.constraints import names_of
from expt.config.identity import Content, Identity, differing, shown
from expt.config.keys import all_keys, flat, meaning, varying
from expt.config.parse import as_typed, recorded, settings_of, with_value
from expt.config.parse import parse as parsed
from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.errors import ConfigError, did_you_mean, warn
from expt.features import Features
from expt.inference.plan import refuse_flips, refuse_unlike
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation, Trained
from expt.runs.result import Record

HOW = tuple(x for x, key in all_keys().items() if key.evaluate and not x.startswith("dataset"))
"""Settings of how it is measured, which may differ from the run's."""
TYPED = ("dataset", "task.metrics", "split", "which", *HOW)
CHOICES = {"which": ("best", "last"), "split": ("train", "val", "test", "all")}
_LONGEST = 60
"""Characters of a dataset's name in that of a folder."""
_VARYING = varying("split", "repetition")
HELD_OUT = [key.removeprefix("dataset.") for key in _VARYING if key.startswith("dataset.")]


class Asked(NamedTuple):
    """The overrides of an evaluation."""

    which: str
    values: dict[str, Any]
    """Values by key; `dataset` is the name of another one, or of its class."""
    words: list[str]
    """The overrides of the dataset."""
    config_dir: Path | None
    """The folder of custom YAML, if not conf."""
    flips: bool = False
    """True if the mean is also over mirror images."""

    @property
    def dataset(self) -> dict[str, Any]:
        """The values of the dataset's keys."""
        parts = ((key.partition("dataset."), value) for key, value in self.values.items())
        return {key: value for (before, _, key), value in parts if key and not before}


class Settings(NamedTuple):
    """The evaluation to carry out."""

    config: RunConfig
    identity: Identity
    evaluation: Evaluation
    name: str
    """The name of the folder for its numbers."""


def read(words: Sequence[str], config_dir: Path | None = None, *, flips: bool = False) -> Asked:
    """Return the evaluation that the overrides ask for.

    Raises ConfigError for a setting that an evaluation does not take.
    """
    typed = list(map(readable, words))
    overrides = parse(typed)
    for override in overrides:
        _refuse(override)
    check_repeated(overrides)
    values = {str(override.key_or_group): _value(override) for override in overrides}
    for key, choices in CHOICES.items():
        if values.get(key, choices[0]) not in choices:
            raise ConfigError(f"{key}={values[key]}: not one of {', '.join(choices)}")
    if isinstance(chosen := values.get("dataset"), dict):  # a class in braces
        name = str(chosen.pop("_target_", "")).rpartition(".")[2]
        values = {**{f"dataset.{key}": chosen[key] for key in chosen}, **values, "dataset": name}
    words = [word for word in typed if word.lstrip("+~").startswith("dataset")]
    return Asked(str(values.get("which", "best")), values, words, config_dir, flips)


def _refuse(override: Override) -> None:
    key, text = str(override.key_or_group), override.input_line
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(f"{text}: an evaluation takes one value; evaluate one after the other")
    if key == "dataset":
        refuse_wrong_choice(override)
        if isinstance(value := override.value(), dict) and "_target_" not in value:
            raise ConfigError(f"{text}: names no dataset; type dataset.KEY=VALUE for keys")
    if key in TYPED or key.startswith("task.metrics."):
        return
    if key.startswith("dataset."):
        meant = meaning(key)
        if meant.evaluate and not meant.varies and key != "dataset.features":
            raise ConfigError(f"{text}: samples are prepared as in training; leave it out")
        return
    takes = f"an evaluation takes {', '.join(TYPED)}, and keeps all else of the run"
    raise ConfigError(f"{text}: {takes}; leave it out.{did_you_mean(key, TYPED)}")


def _value(override: Override) -> Any:
    value = override.value()
    if not isinstance(value, str | list | dict):
        return value
    secrets.remember(dict(secrets.interpolations({"value": value})))
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]  # type: ignore[index,call-overload]


def evaluation_values() -> dict[str, Any]:
    """Return the settings that an evaluation has in place of the run's."""
    values = {name: meaning(name).evaluated_as for name in names_of(RunConfig)}
    return {name: yaml.safe_load(value) for name, value in values.items() if value is not None}


def settings(run: Path, record: Record, asked: Asked) -> Settings:
    """Return the settings to measure a run with. Raise ConfigError where it can't be done here."""
    kept_code.find_kept(RunPaths(run).code)
    then = as_typed(settings_of(record["config"], trains=False))
    dataset = _dataset(then["dataset"], Features.read(record["data"]), asked)
    node = {**then, **evaluation_values(), "dataset": dataset}
    for key, value in asked.values.items():
        if key in HOW or key.startswith("task."):
            node = with_value(node, key.split("."), value)
    config = parsed(node, machine.detect(), problems_of=rules.unmeasurable)
    content = content_of(config, begins=False)
    own = _is_of_run(record, config, content)
    if own:
        _refuse_leak(then["dataset"], asked)
    elif not any(key.startswith("dataset") for key in asked.values):
        warn("the dataset's files have changed; what is measured may hold training samples")
    elif asked.dataset and "group" in vars(config.dataset) and "group" not in asked.dataset:
        # The groups of the run's samples say nothing of others.
        ungrouped = dataclasses.replace(config.dataset, group=None)
        config = dataclasses.replace(config, dataset=ungrouped)
    _warn_of_custom_classes(record, config)
    split = _split(asked, record, config, own=own)
    names, other = [split], None
    if not own:
        chosen = asked.values.get("dataset")
        title = config.dataset.title(chosen and str(chosen), asked.dataset)
        other = secrets.hidden_text(title)
        names.insert(0, re.sub(r"[^\w.,=+-]+", "-", other)[:_LONGEST])
    if asked.which != "best":
        names.append(asked.which)
    trained = Trained(run.absolute(), asked.which, config, record)
    if asked.flips:
        names.append("flips")
        refuse_flips(trained)
    evaluation = Evaluation(
        runs=[trained], split=split, own_data=own, dataset=other, flips=asked.flips
    )
    return Settings(config, Identity.of(config, content), evaluation, "-".join(names))


def mean_of(measured: Sequence[Settings]) -> list[Settings]:
    """Return the settings to measure the mean of runs, if they are several.

    Raise ConfigError where they are unlike.
    """
    first, runs = measured[0], [run for each in measured for run in each.evaluation.runs]
    refuse_unlike(runs, first.evaluation.split if first.evaluation.own_data else None)
    evaluation = dataclasses.replace(first.evaluation, runs=runs)
    mean = first._replace(evaluation=evaluation, name=f"{first.name}-mean-of-{len(runs)}")
    return [mean] if len(runs) > 1 else []


def _split(asked: Asked, record: Record, config: RunConfig, *, own: bool) -> Any:
    """Return the split to measure; warn of one that holds samples of the training."""
    split = asked.values.get("split")
    if split is None and own and record["data"].get("test_size", 0) == 0:
        warn("the run's dataset has no test set: val is measured")
        return "val"
    split = split or ("test" if own else config.dataset.measured())
    if own and split in ("train", "all"):
        warn(f"split={split}: the run was trained on these samples, or on some of them")
    return split


def _dataset(then: Mapping[str, Any], features: Features, asked: Asked) -> dict[str, Any]:
    """Return the settings of the run's dataset, or of another, opened with the run's features.

    These fill the keys that nobody has typed: all of another dataset's, and those of the run's own
    that are left open, where other files of it are measured.
    """
    own = None if "_target_" in then else then["name"]
    known = {**features.inputs.settings}
    is_other = asked.values.get("dataset") not in (None, own)
    if is_other:
        known |= features.targets.settings
        composer = Composer(own_folders(asked.config_dir, asked.words))
        node = composer.settings(asked.words, sweep=False)["dataset"]
        known |= {key: then.get(key) for key in ("mean", "std")}
        node = {"mean": None, "std": None, **node} if "_target_" in node else node
    else:
        node = dict(then)
        for key, value in asked.dataset.items():
            node = with_value(node, key.split("."), value)
    is_open = known.keys() & node.keys() - asked.dataset.keys() if is_other or asked.dataset else ()
    return {**node, **{key: known[key] for key in is_open if is_other or node[key] is None}}


def _is_of_run(record: Record, config: RunConfig, content: Content) -> bool:
    """Return whether the samples are the run's, wherever they lie now."""
    made = record.get("content")
    if made is not None and made.get("data") != content["data"]:
        return False
    then, now = record["config"]["dataset"], shown(config)["dataset"]
    return not differing(flat({"dataset": then}), flat({"dataset": now}), "evaluate")


def _refuse_leak(then: Mapping[str, Any], asked: Asked) -> None:
    """Raise ConfigError where other samples would be held out than in the run."""
    for key in HELD_OUT:
        if key in asked.dataset and asked.dataset[key] != then.get(key):
            raise ConfigError(
                f"dataset.{key}={asked.dataset[key]}: the run held out its samples with"
                f" {key}={then.get(key)}; another value would measure samples that it was trained"
                " on; leave it out, or use split=all"
            )


def _warn_of_custom_classes(record: Record, config: RunConfig) -> None:
    """Warn where a custom class may prepare samples otherwise than in training."""
    trained, measured = recorded(record["config"]).dataset, config.dataset
    if trained.label != measured.label:
        notes = trained.note("to train"), measured.note("to evaluate")
        for note in filter(None, notes):
            warn(f"dataset: {note}")
    if line := own_code.other_source(record):
        warn(line)
