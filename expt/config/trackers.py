"""Dashboards other than TensorBoard, which get a copy of what runs measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, get_args

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT

TrackerName = Literal["mlflow", "wandb"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)


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


def problems(mlflow: MLflow, read: dict[str, str]) -> Sequence[str]:
    """Return what is wrong with where copies go; `read` are the keys read from variables."""
    uri = mlflow.tracking_uri
    if uri is None or without_password(uri) == uri or "mlflow.tracking_uri" in read:
        return ()
    return (
        f"mlflow.tracking_uri={without_password(uri)}: a password would be written into the run's"
        " folder; set MLFLOW_TRACKING_URI, or give ${oc.env:NAME}",
    )


def without_password(uri: str) -> str:
    """Return the address without what is between `://` and `@`, and what follows a `?`."""
    return re.sub(r"(://)[^/@]*@|\?.*", lambda found: found[1] or "", uri)


def is_installed(name: str) -> bool:
    """Return whether the package is; a folder `wandb`, which W&B leaves behind, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
