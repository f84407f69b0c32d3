"""Other dashboards than TensorBoard, which get a copy of what runs measure.

Free of torch, and of their packages.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import urlsplit

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT
from expt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from expt.config.schema import RunConfig

TrackerName = Literal["mlflow", "wandb"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)
_SCHEMES = {
    "http",
    "https",
    "file",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
    "databricks-uc",
    "uc",
}
TRACKING_URI = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLflow:
    """Where MLflow's copy goes; None is what MLflow's own variables say."""

    tracking_uri: str | None = None
    experiment: str | None = None
    tags: dict[str, str] | None = None
    checkpoints: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wandb:
    """Where W&B's copy goes; None is what W&B's own variables say."""

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    checkpoints: bool = False


def of_trackers(config: RunConfig) -> list[str]:
    """What is wrong with where the copies are to go, one line each, with the mend."""
    if len(set(config.send)) < len(config.send):
        return [f"send=[{','.join(config.send)}]: names a dashboard twice"]
    uri = config.mlflow.tracking_uri
    return [] if uri is None else uri_problems("mlflow.tracking_uri", uri, config.secrets)


def uri_problems(key: str, uri: str, read: dict[str, str] | None = None) -> list[str]:
    """What is wrong with MLflow's `uri`, which `key` gave; `read` are variables of the environment
    that may hold it.
    """
    scheme, colon, _ = uri.partition("://")
    shown = without_password(uri)
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        return [f"{key}={shown}: has no scheme; use http://{shown}"]
    if not uri.strip() or (not colon and re.match(r"https?:", uri)):
        return [
            f"{key}={shown}: is no address; write it as in http://HOST:5000, sqlite:///FILE or a"
            " folder"
        ]
    if not colon:
        return []  # a folder, or one of Databricks' names
    name = scheme.partition("+")[0]  # as in mysql+pymysql
    if name not in _SCHEMES and name not in {
        entry.name for entry in metadata.entry_points(group=_PLUGINS)
    }:
        return [f"{key}={shown}: MLflow knows no {scheme}://.{did_you_mean(name, _SCHEMES)}"]
    try:
        parts = urlsplit(uri)
        missing = name in ("http", "https") and not parts.hostname
        _ = parts.port
    except ValueError as error:
        return [f"{key}={shown}: is no address ({error}); write it as in http://HOST:5000"]
    if missing:
        return [f"{key}={shown}: names no host; write it as in http://HOST:5000"]
    if read is not None and key not in read and shown != uri:
        return [
            f"{key}={shown}: a password would be written into the run's folder; leave this key out"
            f" and set {TRACKING_URI}, or give ${{oc.env:NAME}}"
        ]
    return []


_PLUGINS = "mlflow.tracking_store"


def without_password(uri: str) -> str:
    """The address without what is between `://` and `@`, and without what follows a `?`: both may
    be secret.
    """
    return re.sub(r"(://)[^/@]*@|\?.*", lambda found: found[1] or "", uri)


def is_installed(name: str) -> bool:
    """Whether the package of that name is; a folder `wandb`, which W&B leaves behind, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def refuse_unusable(config: RunConfig) -> None:
    """Raise ConfigError where a dashboard's package is missing, or what the environment says of it
    is wrong.
    """
    for name in config.send:
        if not is_installed(name):
            raise ConfigError(f"send={name}: needs the package {name}; pip install 'expt[{name}]'")
        uri = (
            os.environ.get(TRACKING_URI)
            if name == "mlflow" and config.mlflow.tracking_uri is None
            else None
        )
        if uri and (problems := uri_problems(TRACKING_URI, uri)):
            raise ConfigError(problems)
