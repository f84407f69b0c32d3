"""Check the values of a task's methods: real sums, and weights that can divide them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from expt.data.loading import Batch
from expt.errors import ConfigError, described
from expt.tasks.task import PhasedTask, Task


def terms_of(task: Task, outputs: Any, batch: Batch, expected: Mapping[str, int]) -> Any:
    """Return the sums of `task.measure`, each with the `expected` number of values.

    Raises ConfigError where these are not the real sums and weights that it says.
    """
    terms = task.measure(outputs, batch)
    if not isinstance(terms, Mapping):
        raise refusal(
            task, "measure", f" gives {described(terms)}; return a dict of name: (sum, weight)"
        )
    names = [name for name in (*expected, *task.reductions) if batch.progress.measures(name)]
    if terms.keys() - {*batch.progress.left_out} != {*names}:
        given, named = ", ".join(terms) or "nothing", ", ".join(names) or "none"
        further = [f"{name}: max" for name in terms if name not in names]
        same = f"such as metrics: {{{further[0]}}} in its YAML, " if further else ""
        raise refusal(
            task,
            "measure",
            f" gives {given}, and task.metrics names {named}; let them be the same, {same}name in"
            ' `sums` what `derive` needs, e.g. {"hits": 1}, with the number of values of each, or'
            " have one measured in evaluations only: {better: max, train: false}",
        )
    for name, term in terms.items():
        if name in task.reductions and not isinstance(term, Real) and _problem((term, 1), 1):
            raise refusal(task, "measure", f": {name} is {described(term)}; give one real number")
        if name in expected and (problem := _problem(term, expected[name])):
            raise refusal(task, "measure", f": {name} {problem}")
    return terms


def check_loss(loss: Any, task: Task, *, learns: bool = True) -> None:
    """Raise ConfigError unless it is a real sum and weight, with a gradient if it `learns`."""
    problem = _problem(loss, None)
    if not problem and learns and not loss[0].requires_grad:
        problem = (
            "gives a number without a gradient; compute it from the model's outputs, without"
            " detach, item or argmax"
        )
    if problem:
        raise refusal(task, "training_loss" if learns else "loss", f" {problem}")


def refusal(task: Task, method: str, problem: str) -> ConfigError:
    """Return the error of a task whose `method` has a problem."""
    return ConfigError(f"{method_of(task, method)}{problem}")


def _problem(term: object, size: int | None) -> str:
    """Return the problem of a sum of `size` values, or of a tensor [] if `size` is None."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        return f"is {described(term)}; give its sum and its weight"
    total, weight = term
    fits = isinstance(total, Tensor) and not total.is_complex()
    fits = fits and not (total.dim() if size is None else total.numel() != size)
    if not fits and not (size == 1 and isinstance(total, Real)):
        many = "one real number" if size in (None, 1) else f"{size} real numbers"
        return f"is {described(total)}; give its sum, a tensor of {many}"
    if isinstance(weight, Tensor):
        fits, shown = weight.numel() == 1 and not weight.is_complex(), described(weight)
    else:
        fits, shown = isinstance(weight, Real) and not weight < 0, repr(weight)
    fix = "give a real number that is not below 0, such as len(outputs)"
    return "" if fits else f"has the weight {shown}; {fix}"


def method_of(task: Task, name: str) -> str:
    """Return the method that gives the `loss`, `training_loss` or `measure`, for an error."""
    kind = type(task)
    if isinstance(task, PhasedTask):
        is_phases = name == "training_loss" or getattr(kind, name) is getattr(PhasedTask, name)
        name = "phase" if is_phases else name
    elif name == "training_loss" and kind.training_loss is Task.training_loss:
        name = "loss"
    return f"{kind.__name__}.{name}"
