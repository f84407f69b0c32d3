"""A class as a configuration names it: by the module that each worker, and a later rerun, imports
it from.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from expt.errors import ConfigError
from expt.python import main_module

BASES = {
    "model": ("torch.nn", "Module"),
    "dataset": ("torch.utils.data", "Dataset"),
    "optimizer": ("torch.optim", "Optimizer"),
    "scheduler": ("torch.optim.lr_scheduler", "LRScheduler"),
    "task": ("expt.tasks.task", "Task"),
    "callbacks": ("expt.training.callback", "Callback"),
}
"""What a group builds; whoever has made a class of it has imported its module."""
_KINDS = {
    "Module": "a module",
    "Dataset": "a dataset",
    "Optimizer": "an optimiser",
    "LRScheduler": "a scheduler",
}


def dotted(key: str, cls: Any, group: str | None) -> str:
    """The name of `cls`, as in `mine.Net`; `group` says what it is to be a subclass of.

    Raises ConfigError for what a worker could not import: a function, a class within another or
    within a function, and one of `__main__` of which the source is not known."""
    if not isinstance(cls, type):
        what = "a function" if inspect.isroutine(cls) else f"an object ({type(cls).__name__})"
        raise ConfigError(f"{key}={getattr(cls, '__name__', cls)!s}: is {what}; give a class")
    if group in BASES and not _is_subclass(cls, *BASES[group]):
        raise ConfigError(
            f"{key}={cls.__name__}: refused, it is not a subclass of {'.'.join(BASES[group])}"
        )
    if "." in cls.__qualname__:
        where = (
            "a function" if "<locals>" in cls.__qualname__ else cls.__qualname__.rpartition(".")[0]
        )
        mend = "define it at the top of a module or a cell"
        raise ConfigError(
            f"{key}={cls.__name__}: is defined inside {where}, where no worker finds it; {mend}"
        )
    if cls.__module__ == "__main__":
        return main_module.dotted(key, cls)
    there: object = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
    if there is not cls:
        raise ConfigError(
            f"{key}={cls.__name__}: {cls.__module__} has no such class now, or another; import it"
            " from there anew"
        )
    return f"{cls.__module__}.{cls.__name__}"


def instance_of(value: object) -> str:
    """What `value` is, as in `a module`, where it is what a group builds; else an empty text."""
    return next(
        (
            _KINDS.get(name, f"a {name}")
            for module, name in BASES.values()
            if _is_a(value, module, name)
        ),
        "",
    )


def _is_a(value: object, module: str, name: str) -> bool:
    return not isinstance(value, type) and _is_subclass(type(value), module, name)


def _is_subclass(cls: type, module: str, name: str) -> bool:
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(cls, base)
