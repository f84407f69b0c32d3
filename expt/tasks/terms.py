"""The sums that a task returns of a batch, checked: a custom task may return anything."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.tasks.task import PhasedTask, Sum, Task

_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def terms_of(task: Task, outputs: Any, batch: Batch) -> Mapping[str, Sum]:
    """Return what `task.measure` does.

    Raises ConfigError where these are not the real sums and weights that it says.
    """
    terms, expected, method = task.measure(outputs, batch), task.sums, measure_method(task)
    if not isinstance(terms, Mapping):
        raise ConfigError(
            f"{method} gives a {type(terms).__name__}; return a dict of name: (sum, weight)"
        )
    if terms.keys() != expected.keys():
        named = ", ".join(expected) or "none"
        raise ConfigError(
            f"{method} gives {', '.join(terms) or 'nothing'}, and task.metrics names {named}; let"
            " them be the same, or say in `sums` of what `derive` makes metrics, as in"
            ' {"hits": 1}, with the number of values of each'
        )
    for name, term in terms.items():
        _check(f"{method}: {name}", term, expected[name])
    return terms


def check_loss(loss: object, task: Task, *, learns: bool = True) -> None:
    """Raise ConfigError where that is not a real sum with a gradient, if it `learns`, and a real
    weight.
    """
    if type(loss) is tuple and len(loss) == 2 and type(loss[1]) is int and type(loss[0]) is Tensor:
        total, weight = loss  # nearly every task's: a small model feels each question
        if total.dtype in _REAL and not total.dim() and weight >= 0:
            if total.requires_grad or not learns:
                return
    method = loss_method(task, learns=learns)
    total = _check(method, loss, None)
    if learns and not total.requires_grad:
        raise ConfigError(
            f"{method} gives a number without a gradient; compute it from the model's outputs,"
            " without detach, item or argmax"
        )


def _check(what: str, term: object, size: int | None) -> Tensor:
    """Return the sum of a term: of `size` values, or where that is None one, a tensor []."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        raise ConfigError(f"{what} is a {type(term).__name__}; give its sum and its weight")
    total, weight = term
    fits = isinstance(total, Tensor) and not total.is_complex()
    if not fits or (total.dim() if size is None else total.numel() != size):
        many = "one real number" if size in (None, 1) else f"{size} real numbers"
        raise ConfigError(f"{what} is {_shown(total)}; give its sum, a tensor of {many}")
    fits = (
        weight.numel() == 1 and not weight.is_complex()
        if isinstance(weight, Tensor)
        else isinstance(weight, int | float | Real) and not weight < 0
    )
    if not fits:
        raise ConfigError(
            f"{what} has the weight {_shown(weight)}; give a real number that is not below 0, such"
            " as len(outputs)"
        )
    found: Tensor = total
    return found


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of the shape {list(value.shape)} and {value.dtype}"
    return repr(value)


def loss_method(task: Task, *, learns: bool = True) -> str:
    """Return the method that gives the loss, as an error names it."""
    kind = type(task)
    if isinstance(task, PhasedTask):
        method = "phase" if learns or kind.loss is PhasedTask.loss else "loss"
    else:
        own = learns and kind.training_loss is not Task.training_loss
        method = "training_loss" if own else "loss"
    return f"{kind.__name__}.{method}"


def measure_method(task: Task) -> str:
    """Return the method that gives the metrics, as an error names it."""
    kind = type(task)
    phased = isinstance(task, PhasedTask) and kind.measure is PhasedTask.measure
    return f"{kind.__name__}.{'phase' if phased else 'measure'}"
