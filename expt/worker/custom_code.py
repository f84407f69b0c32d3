"""Custom code in the first steps: what it makes late, and what it keeps that no checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from expt.config import constraints
from expt.config.schema import RunConfig
from expt.data import changes
from expt.data.changes import Kept, Prints, listed
from expt.data.checked_samples import in_words
from expt.errors import ConfigError, warn
from expt.tasks.task import Task
from expt.training.learner import Learner


class FirstSteps:
    """Compares a custom task and model after each of the first steps, and once later."""

    def __init__(self, config: RunConfig, learner: Learner, *, warns: bool) -> None:
        self._learner, self._warns, self._steps = learner, warns, 0
        self._names = {*learner.module.state_dict()}
        self._reported = set[str]()
        self._objects: dict[str, Any] = {}
        self._before: dict[str, Prints] = {}
        self._kept: dict[str, Kept] = {}
        if isinstance(config.task, constraints.Target):
            self._objects["task"] = learner.task
        if isinstance(config.model, constraints.Target) and not config.is_sharded:
            self._objects |= dict(_custom(learner.module))

    def step(self) -> None:
        """Look after a step: first for what it has made, then for what it has changed."""
        self._steps += 1
        if self._steps == 1:
            self._refuse_late()
            self._begin()
        elif self._steps == 2:
            self._report()

    def end(self) -> None:
        """Look a last time, at a checkpoint."""
        self._report()
        if self._steps > 2:
            self._before = {}

    def _refuse_late(self) -> None:
        """Raise ConfigError for parameters and buffers that a forward pass has made."""
        late = {*self._learner.module.state_dict()} ^ self._names
        if late:
            raise ConfigError(
                f"model: {listed(sorted(late))}: made or removed in a forward pass, so that no"
                " optimizer trains it and no checkpoint can be loaded; make it in __init__, as"
                " torch's lazy layers (such as nn.LazyLinear) where a size is not known there"
            )

    def _begin(self) -> None:
        known = self._known()
        seen = dict(known)
        for where, one in self._objects.items():
            self._before[where] = changes.prints(one, seen)
            if methods := _methods(one):
                self._kept[where] = Kept(one, *methods, known)

    def _known(self) -> dict[int, object]:
        module = self._learner.module
        found = (*module.modules(), *module.state_dict(keep_vars=True).values())
        return {id(each): each for each in found}

    def _report(self) -> None:
        """Warn once of each attribute that steps have changed and no checkpoint holds."""
        if not self._before:
            return
        lost, seen = [], self._known()
        for where, one in self._objects.items():
            names = changes.changed(self._before[where], changes.prints(one, seen))
            if names and where in self._kept:
                names = [name for name in names if name in self._lost(where, one)]
            lost += [f"{where}.{name}" for name in names]
        new = [name for name in lost if name not in self._reported]
        self._reported.update(new)
        if new and self._warns:
            warn(
                f"{listed(new)}: changes while training, and no checkpoint holds it: a resumed run"
                " begins it anew; give a task state_dict and load_state_dict, a module a buffer"
                " or get_extra_state and set_extra_state"
            )

    def _lost(self, where: str, one: object) -> list[str]:
        try:
            return self._kept[where].lost()
        except Exception as error:
            raise in_words(error, f"loading the state of {type(one).__name__}") from error


def _custom(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose class is not torch's."""
    for name, one in module.named_modules():
        if not type(one).__module__.startswith("torch."):
            yield f"model.{name}".rstrip("."), one


def _methods(one: object) -> tuple[str, str] | None:
    """Return the methods that save and load the state of an object, where it has its own."""
    if isinstance(one, nn.Module):
        own = type(one).get_extra_state is not nn.Module.get_extra_state
        return ("get_extra_state", "set_extra_state") if own else None
    own = isinstance(one, Task) and type(one).state_dict is not Task.state_dict
    return ("state_dict", "load_state_dict") if own else None
