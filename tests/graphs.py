"""What stands in for a CUDA graph on a CPU: it calls again what it has recorded.

And those that get something wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from expt.data.tree import leaves, mapped
from expt.training.cuda_graph import Graph
from expt.training.graphed_step import GraphedStep
from expt.training.learner import Learner
from expt.worker import random_state

T = TypeVar("T")
CPU = torch.device("cpu")


class StandIn:
    """As a graph does, it leaves what it computes in the tensors that the recording gave."""

    def __init__(self, device: torch.device) -> None:
        self.replays = 0

    def warm_up(self, run: functools.partial[T]) -> T:
        return run()

    def record(self, run: functools.partial[T]) -> T:
        self.run: functools.partial[Any] = run
        self.found = run()
        return self.found

    def replay(self) -> None:
        self.replays += 1
        self.take(self.run())

    def take(self, computed: Any) -> None:
        for ours, theirs in zip(leaves(self.found), leaves(computed), strict=True):
            ours.copy_(theirs)


class Idle(StandIn):
    """Leaves all as it is."""

    def replay(self) -> None:
        pass


class OldInputs(StandIn):
    """Computes on the batch, or by the gradients and the rates, that were there when it was
    recorded.
    """

    def record(self, run: functools.partial[T]) -> T:
        old = [
            mapped(Tensor.clone, given) if index in self.held else given
            for index, given in enumerate(run.args)
        ]
        found = super().record(run)
        self.run = functools.partial(run.func, *old)
        return found

    held: tuple[int, ...] = (2, 3)


class OldRates(OldInputs):
    """Has the rates of the recording, as a number would be."""

    held = (3,)


class OldWeights(StandIn):
    """Computes with the weights of the recording, as a copy in half precision that was made before
    would be.
    """

    def record(self, run: functools.partial[T]) -> T:
        self.weights = list(run.args[0].module.parameters())
        self.old = [weight.detach().clone() for weight in self.weights]
        return super().record(run)

    def replay(self) -> None:
        now = [weight.detach().clone() for weight in self.weights]
        self._set(self.old)
        super().replay()
        if hasattr(self.found, "gradients"):  # an update changes them
            self._set(now)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)


class OldRandomNumbers(StandIn):
    """Does not advance the generator."""

    def replay(self) -> None:
        before = torch.get_rng_state()
        super().replay()
        torch.set_rng_state(before)


class Adding(StandIn):
    """Adds to the gradients of the replay before."""

    def take(self, computed: Any) -> None:
        found = getattr(self.found, "gradients", {})
        before = {name: gradient.clone() for name, gradient in found.items()}
        super().take(computed)
        for name, gradient in found.items():
            gradient.add_(before[name])


class Forgetting(StandIn):
    """Does not change the statistics of batch norms."""

    def replay(self) -> None:
        buffers = list(self.run.args[0].module.buffers())
        before = [buffer.clone() for buffer in buffers]
        super().replay()
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)


class Refusing(StandIn):
    """Cannot be had, as where there is no card."""

    def __init__(self, device: torch.device) -> None:
        raise RuntimeError("no card\nand more of it")


def graphed(learner: Learner, make: Callable[[torch.device], Graph] = StandIn) -> Learner:
    """The same, with steps by these graphs."""
    return dataclasses.replace(learner, graphed=GraphedStep(CPU, random_state, make))
