"""The tasks, kinds of datasets, and trackers: a module for each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, get_args, get_type_hints

from expt.config import conf_dir
from expt.dashboards import trackers as of_runs
from expt.data import kinds


def groups() -> dict[str, dict[str, Any]]:
    """Return the members of the groups `task` and `dataset`."""
    return {"task": _tasks(), "dataset": _datasets()}


def trackers() -> dict[str, Any]:
    """Return the class of each tracker's settings by its name."""
    names = [module.name for module in pkgutil.iter_modules(of_runs.__path__)]
    return {name: importlib.import_module(f"{of_runs.__name__}.{name}").Config for name in names}


def _tasks() -> dict[str, Any]:
    """Return the configuration class of each task by its name, `_target_` last."""
    names = {file.stem: file.stem for file in sorted((conf_dir() / "task").glob("*.yaml"))}
    modules = {**names, "_target_": "custom"}
    return {
        name: importlib.import_module(f"expt.tasks.{module}").Config
        for name, module in modules.items()
    }


def _datasets() -> dict[str, Any]:
    """Return the class of each kind of dataset by its name, `_target_` last."""
    found = dict[str, Any]()
    for module in pkgutil.iter_modules(kinds.__path__):
        members = vars(importlib.import_module(f"{kinds.__name__}.{module.name}"))
        for cls in members.values():
            if isinstance(cls, type) and "name" in vars(cls).get("__annotations__", ()):
                found |= dict.fromkeys(get_args(get_type_hints(cls)["name"]), cls)
    return dict(sorted(found.items(), key=lambda item: item[0] == "_target_"))
