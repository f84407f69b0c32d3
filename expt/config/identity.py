"""What makes two runs the same: a hash of all that can change their result: settings, data and
code.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from expt.config import secrets
from expt.config.schema import RunConfig
from expt.config.tasks import in_evaluations_alone

# Where data lies, what is kept and shown, how patiently it is waited for: none of it changes a
# number.
NOT_IN_RESULT = {
    "resume",
    "max_restarts",
    "timeout_s",
    "debug",
    "profile",
    "preflight",
    "print_every",
}
NOT_IN_RESULT |= {
    f"checkpoint.{key}"
    for key in ("every_steps", "every_epochs", "every_minutes", "keep", "sharded")
}
NOT_IN_RESULT |= {
    f"tensorboard.{key}" for key in ("images", "graph", "norms", "histograms", "health")
}
NOT_IN_RESULT |= {"dataset.root", "dataset.download", "dataset.num_workers", "dataset.cache"}
NOT_IN_RESULT |= {"dataset.path"}  # of a table, whose content counts
NOT_IN_RESULT |= {"patches.unguarded", "patches.backward", "patches.malloc"}
NOT_IN_RESULT |= {"model.size"}  # a name for its layers, heads and width, which count
NOT_IN_RESULT |= {
    "activation_checkpointing",
    "offload",
}  # where numbers wait, and which are computed again
# How the same sums are computed. They may be added up in another order, as on another processor: a
# loss can then differ in its last digits (the tests allow 1e-5), which is not another experiment.
NOT_IN_RESULT |= {"threads", "onednn", "ddp.shared_memory"}
NOT_IN_RESULT |= {
    f"sharding.{key}" for key in ("wrap", "shards", "reshard_after_forward", "reduce_each_part")
}
# What was done before there was a choice: not in the hash, so that a run of then is found.
AT_FIRST: dict[str, object] = {
    "task.name": "classification",
    "scheduler.interval": "step",
    "batch_norm": "per_worker",
    "batch_norm_group": 32,
    "dataset.folds": None,
    "dataset.fold": None,
    "dataset.sampling": None,
    "dataset.transforms": None,
    "dataset.augment.padding_mode": "constant",
    "task.class_weights": None,
}
AT_FIRST |= {"scheduler.epochs": None, "gradient_clip_value": None, "ema": None, "early_stop": None}
AT_FIRST |= {
    "optimizer.groups": (),
    "optimizer.decay_biases_and_norms": True,
    "optimizer.layer_decay": None,
}
AT_FIRST |= {
    "weights": None,
    "fork": None,
    "freeze": (),
    "mixup": None,
    "cutmix": None,
    "callbacks": (),
}
AT_FIRST |= {"sharding.param_dtype": "auto", "sharding.reduce_dtype": "float32"}
AT_FIRST |= {
    "model.norm": "layer",
    "model.positions": "learned",
    "model.mlp": "gelu",
    "model.bias": True,
}
_BEFORE: dict[str, dict[str, object]] = {
    "huggingface": {
        "dataset.standardise": True,
        "dataset.standardise_targets": False,
        "dataset.channels": None,
    },
    "torchvision": {
        "dataset.channels": None,
        "dataset.options": None,
        "dataset.standardise_targets": False,
    },
    "image_folder": {"dataset.channels": 3},
    "segmentation_folder": {"dataset.channels": 3},
}
"""The same of some datasets alone."""
OF_TRACKERS = {"send", "mlflow", "wandb"}
"""Where copies of the numbers go, with all keys below: no part of a run, and no hyperparameter."""
REPEATED = ("seed", "dataset.fold")
"""What runs that measure the same thing again differ by."""


class Content(NamedTuple):
    """What a run is made of beside its settings, each a few digits; None where the settings say it
    all.
    """

    data: str | None = None
    """The dataset's files, see expt.data.fingerprint."""
    code: str | None = None
    """The source of the person's own classes, see expt.config.user_code."""
    weights: str | None = None
    """The file that the first weights come from."""
    continues: bool = False
    """Whether what `resume` names is this very run, only shorter."""
    fork: str | None = None
    """The checkpoint that the run is a fork of: its run's identity, and the step."""
    seedless_fork: str | None = None
    """The same by that run's identity without its seed."""


def identity(
    config: RunConfig,
    content: Content | None = None,
    *,
    but: Collection[str] = (),
    by_paths: bool = False,
) -> str:
    """12 hexadecimal digits, equal for two runs whose results are the same but for rounding.

    Without `content` it is that of the settings alone, by which an older version knew its runs;
    `by_paths` as one did for which the places of first weights and of what is resumed counted. The
    keys `but` don't count."""
    left_out = {*NOT_IN_RESULT, *but}
    if content is not None and content.weights and not by_paths:  # wherever they lie
        left_out.add("weights")
    if content is not None and content.fork:
        left_out.add("fork")
    settings = _flat_settings(config)
    for key in left_out:
        settings.pop(key, None)
    for key, at_first in AT_FIRST.items():
        if key in settings and settings[key] == at_first:
            del settings[key]
    settings["ddp.sync_batchnorm"] = config.batch_norm == "sync"  # as this was once called
    if config.batch_norm == "sync":
        del settings["batch_norm"]
    if config.dataset.train_limit and config.dataset.name in ("image_folder", "_target_"):
        settings["dataset.train_limit"] = (
            f"{config.dataset.train_limit} of all classes"  # once the first ones
        )
    if config.dataset.name == "text" and config.dataset.tokens != "bytes":
        settings["dataset.tokens"] = (
            "tokenizer"  # what the file holds is in the content, wherever it lies
        )
    if groups := settings.get("optimizer.groups"):
        settings["optimizer.groups"] = [_without_end(group) for group in groups]
    for key, before in _BEFORE.get(config.dataset.name, {}).items():
        if key in settings and settings[key] == before:
            del settings[key]
    if content is not None:
        digits = {"data": content.data, "code": content.code, "weights": content.weights}
        digits["fork"] = content.seedless_fork if {*REPEATED} <= {*but} else content.fork
        settings |= {f"content.{part}": found for part, found in digits.items() if found}
        continues = content.continues and not by_paths
        if config.resume not in (None, "auto") and not continues:  # where it starts
            settings["resume"] = config.resume
    settings |= _ambiguous(config)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_end(group: Any) -> Any:
    """A group of parameters that is trained to the end, as it was before there was a choice."""
    if isinstance(group, dict) and group.get("epochs") is None:
        return {key: value for key, value in group.items() if key != "epochs"}
    return group


def _ambiguous(config: RunConfig) -> dict[str, Any]:
    """The arguments of a person's own classes of which the flat settings do not tell all, as they
    are.
    """
    found = {}
    holders = {
        name: getattr(config, name)
        for name in ("model", "task", "dataset", "optimizer", "scheduler")
    }
    metrics = {
        f"task.metrics.{name}": metric for name, metric in in_evaluations_alone(config.task).items()
    }
    for name, holder in {**holders, **metrics}.items():
        for field in ("kwargs", "train", "test"):
            arguments = getattr(holder, field, None)
            if isinstance(arguments, dict) and not _is_flat(plain := _plain(arguments)):
                found[f"{name}.{field} as they are"] = plain
    return found


def _is_flat(arguments: Mapping[str, Any]) -> bool:
    """Whether no dict in it is empty, which the flat settings would leave out, and no key has a
    dot.
    """
    return all(
        "." not in str(key) and (not isinstance(value, dict) or (bool(value) and _is_flat(value)))
        for key, value in arguments.items()
    )


def shown(config: RunConfig) -> dict[str, Any]:
    """The configuration as it is written to disk: without what came from the environment."""
    settings: dict[str, Any] = secrets.hidden_settings(_settings(config), config.secrets)
    return settings


def _settings(config: RunConfig) -> dict[str, Any]:
    return {name: _plain(getattr(config, name)) for name in _names(config) if name != "secrets"}


def _flat_settings(config: RunConfig) -> dict[str, Any]:
    """`flat(_settings(config))`, in half the time: a large sweep asks for each of its points."""
    found: dict[str, Any] = {}
    _flatten_fields(config, "", found)
    return found


def _flatten_fields(holder: Any, prefix: str, found: dict[str, Any]) -> None:
    kind: Any = type(holder)
    values = vars(holder)
    for name, key in _keys_of(kind, prefix):
        value = values[name]
        if type(value) in _SCALARS:
            found[key] = value
        elif hasattr(type(value), "__dataclass_fields__"):
            _flatten_fields(value, f"{key}.", found)
        elif isinstance(plain := _plain(value), dict):
            _flatten(plain, f"{key}.", found)
        else:
            found[key] = plain


@functools.cache
def _keys_of(kind: Any, prefix: str) -> tuple[tuple[str, str], ...]:
    """The names of a class's fields that are settings, and their keys, in the order in which
    `identity` writes them.
    """
    left_out = set() if prefix else {"secrets", *OF_TRACKERS}
    return tuple((name, prefix + name) for name in sorted(_names_of(kind)) if name not in left_out)


_SCALARS = {str, int, float, bool, type(None)}


def _plain(value: Any) -> Any:
    """As dataclasses.asdict, in a fifth of its time."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if hasattr(type(value), "__dataclass_fields__"):
        fields = ((name, getattr(value, name)) for name in _names(value))
        return {name: below if type(below) in _SCALARS else _plain(below) for name, below in fields}
    return value


def _names(holder: Any) -> tuple[str, ...]:
    kind: Any = type(holder)
    return _names_of(kind)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """A configuration's settings, flat, with a group's choice under the group's own name: `model`,
    `optimizer.lr`.
    """
    shown: dict[str, bool | int | float | str] = {}
    for key, found in flat(
        {key: settings[key] for key in settings if key not in OF_TRACKERS}
    ).items():
        value = list(found) if isinstance(found, tuple) else found  # as in YAML and JSON
        shown[key.removesuffix(".name")] = value if isinstance(value, _SHOWN) else str(value)
    return shown


_SHOWN = (bool, int, float, str)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    found: dict[str, Any] = {}
    _flatten(settings, prefix, found)
    return found


def _flatten(settings: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{key}.", found)
        else:
            found[f"{prefix}{key}"] = value
