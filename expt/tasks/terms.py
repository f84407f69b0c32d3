"""The sums that a task gives of a batch, checked: a person's own task may give anything."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.tasks.phases import PhasedTask
from expt.tasks.task import Sum, Task

_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def terms_of(task: Task, outputs: Any, batch: Batch) -> Mapping[str, Sum]:
    """What `task.measure` gives.

    Raises ConfigError where these are not the real sums and weights that it says.
    """
    terms, expected, name_of = task.measure(outputs, batch), task.sums, type(task).__name__
    if not isinstance(terms, Mapping):
        raise ConfigError(
            f"{name_of}.measure gives a {type(terms).__name__}; return a dict of name: (sum,"
            " weight)"
        )
    if terms.keys() != expected.keys():
        named = ", ".join(expected) or "none"
        mend = "let them be the same"
        if type(task).derive is not Task.derive:
            sums = ", ".join(f"{name!r}: 1" for name in terms)
            mend += (
                f", or say of what `derive` makes them: {name_of}.sums = {{{sums}}}, with the"
                " number of values of each"
            )
        raise ConfigError(
            f"{name_of}.measure gives {', '.join(terms) or 'nothing'}, and task.metrics names"
            f" {named}; {mend}"
        )
    for name, term in terms.items():
        if not isinstance(term, tuple | list) or len(term) != 2:
            raise ConfigError(
                f"{name_of}.measure: {name} is a {type(term).__name__}; give its sum and its weight"
            )
        total, weight = term
        if not isinstance(total, Tensor) or total.numel() != expected[name]:
            what = (
                f"has the shape {list(total.shape)}"
                if isinstance(total, Tensor)
                else f"is {total!r}"
            )
            raise ConfigError(f"{name_of}.measure: {name} {what}; give its sum, a tensor []")
        if total.is_complex():
            raise ConfigError(
                f"{name_of}.measure: {name} is a complex number; give a real one, as by .abs()"
            )
        if isinstance(weight, Tensor) and weight.numel() != 1:
            raise ConfigError(
                f"{name_of}.measure: the weight of {name} has the shape {list(weight.shape)};"
                " sum it"
            )
        if wrong := no_weight(weight):
            raise ConfigError(
                f"{name_of}.measure: the weight of {name} is {wrong}, as len(outputs)"
            )
    return terms


def check_loss(loss: object, task: Task, *, learns: bool = True) -> None:
    """Raise ConfigError where that is not a real sum with a gradient, if it `learns`, and a real
    weight.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        total, weight = loss
        # Nearly every task's: a small model feels each question, and these take a third of what
        # `_check_closely` does.
        plain = type(weight) is int and weight >= 0 and type(total) is Tensor
        if (
            plain
            and total.dtype in _REAL
            and not total.dim()
            and (total.requires_grad or not learns)
        ):
            return
    _check_closely(loss, task, learns=learns)


def _check_closely(loss: object, task: Task, *, learns: bool) -> None:
    if isinstance(loss, tuple) and len(loss) == 2:
        total, weight = loss
        alone = (
            weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
        )
        if isinstance(total, Tensor) and not total.dim() and alone:
            if wrong := _no_loss(total, weight, learns=learns):
                raise ConfigError(loss_method(task, learns=learns) + wrong)
            return
        given, by = (
            list(each.shape) if isinstance(each, Tensor) else repr(each) for each in (total, weight)
        )
        shown = f"{given} and the weight {by}"
    else:
        shown = f"a {type(loss).__name__}"
    method = loss_method(task, learns=learns)
    raise ConfigError(
        f"{method} gives {shown}; return the summed loss, a tensor [], and its weight"
    )


def _no_loss(total: Tensor, weight: Tensor | float, *, learns: bool) -> str:
    """What is wrong with a number and its weight, in words; empty where nothing is."""
    if total.is_complex():
        return " gives a complex number; return a real one, as by .abs()"
    if wrong := no_weight(weight):
        return f": its weight is {wrong}, as len(outputs)"
    if learns and not total.requires_grad:
        return (
            " gives a number without a gradient; compute it from the model's outputs, without"
            " detach, item or argmax"
        )
    return ""


def no_weight(weight: object) -> str:
    """What a weight is that is none, and what to give, in words; empty where it is one, or that is
    not known yet.
    """
    if isinstance(weight, Tensor):
        return f"complex ({weight.dtype}); give a real number" if weight.is_complex() else ""
    if not isinstance(weight, int | float | Real):  # asking Real itself takes longest
        return f"{weight!r}; give a real number"
    return f"{weight}; give a number that is not below 0" if weight < 0 else ""


def loss_method(task: Task, *, learns: bool = True) -> str:
    """The method that gives the loss, as an error names it."""
    kind = type(task)
    if isinstance(task, PhasedTask):
        method = "phase" if learns or kind.loss is PhasedTask.loss else "loss"
    else:
        method = (
            "training_loss" if learns and kind.training_loss is not Task.training_loss else "loss"
        )
    return f"{kind.__name__}.{method}"


def measure_method(task: Task) -> str:
    """The method that gives the metrics, as an error names it."""
    kind = type(task)
    method = (
        "phase"
        if isinstance(task, PhasedTask) and kind.measure is PhasedTask.measure
        else "measure"
    )
    return f"{kind.__name__}.{method}"
