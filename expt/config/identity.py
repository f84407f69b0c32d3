"""What makes two runs the same: a hash of all that can change their result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from expt.config import secrets
from expt.config.schema import RunConfig

# Where data lies, how fast and how patiently it is computed: none of it changes a number.
_KEPT = {f"checkpoint.{key}" for key in ("every_steps", "every_epochs", "every_minutes", "keep")}
NOT_IN_RESULT = _KEPT | {"resume", "max_restarts", "threads", "timeout_s", "debug", "profile", "print_every"}
NOT_IN_RESULT |= {"ddp.shared_memory", "onednn", "patches.unguarded", "patches.malloc"}
NOT_IN_RESULT |= {f"tensorboard.{key}" for key in ("images", "graph", "norms", "histograms", "health")}
NOT_IN_RESULT |= {"dataset.root", "dataset.download", "dataset.num_workers", "dataset.cache"}


def identity(config: RunConfig) -> str:
    """12 hexadecimal digits, equal for two configurations that give the same result."""
    settings = {key: value for key, value in flat(_settings(config)).items() if key not in NOT_IN_RESULT}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shown(config: RunConfig) -> dict[str, Any]:
    """The configuration as it is written to disk: without what came from the environment."""
    secrets.remember(config.secrets)
    settings: dict[str, Any] = secrets.hidden(_settings(config))
    return settings


def _settings(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key != "secrets"}


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """A configuration's settings, flat, with a group's choice under the group's own name: `model`, `optimizer.lr`."""
    shown: dict[str, bool | int | float | str] = {}
    for key, found in flat(settings).items():
        value = list(found) if isinstance(found, tuple) else found  # as in YAML and JSON
        shown[key.removesuffix(".name")] = value if isinstance(value, bool | int | float | str) else str(value)
    return shown


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
