"""Several optimizers behind one, for a loop that has one step, one state and one schedule."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from expt.training.parameter_groups import members


class Combined(Optimizer):
    """Several optimizers as one: the groups and the states of all, saved and loaded together."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        first, *others = (part.defaults for part in parts)
        shared = {key: first[key] for key in first if all(key in other for other in others)}
        super().__init__([group for part in parts for group in part.param_groups], shared)
        self._collect()

    def _collect(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self.parts:
            part.step()
        self._collect()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all; `parts` has further entries of custom ones."""
        found: dict[str, Any] = inspect.unwrap(Optimizer.state_dict)(self)
        own = [part.state_dict() if _saves_more(part) else {} for part in self.parts]
        more = [{key: one[key] for key in one.keys() - found.keys()} for one in own]
        return {**found, "parts": more} if any(more) else found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        groups, state = iter(state_dict["param_groups"]), state_dict["state"]
        more = state_dict.get("parts", [{} for _ in self.parts])
        for part, own in zip(self.parts, more, strict=True):
            its = [*itertools.islice(groups, len(part.param_groups))]
            known = {key: state[key] for key in members(its) if key in state}
            part.load_state_dict({"state": known, "param_groups": its, **own})
        self._collect()


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that it combines, or itself."""
    return optimizer.parts if isinstance(optimizer, Combined) else (optimizer,)


def _saves_more(part: Optimizer) -> bool:
    return inspect.unwrap(type(part).state_dict) is not inspect.unwrap(Optimizer.state_dict)
