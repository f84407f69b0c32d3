"""Callbacks of a person's own; a module without pytest, which each worker imports."""

import collections
import contextlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import expt


class Busy(expt.Callback):
    """Draws random numbers, trains the model that it gets, and remembers what it has drawn."""

    def __init__(self, first: float = 0.0) -> None:
        torch.rand(3)
        self.drawn = [first]

    def on_epoch_end(self, view: expt.View) -> None:
        self.drawn.append(torch.rand(()).item() + random.random() + float(np.random.rand()))
        images = torch.rand(4, 1, 8, 8).to(next(view.model.parameters()).device)
        view.model.train().requires_grad_()(images).sum().backward()
        with torch.no_grad():
            for tensor in (*view.model.parameters(), *view.model.buffers()):
                tensor.zero_()
        view.scalar("mine/sum", sum(self.drawn))
        view.picture("mine/square", torch.ones(3, 4, 4))

    def state_dict(self) -> Mapping[str, Any]:
        torch.rand(3)
        return {"drawn": self.drawn, "more": (None, {1: torch.ones(2)})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        random.random()
        assert state["more"][1][1].tolist() == [1.0, 1.0]
        self.drawn = state["drawn"]


class Noting(expt.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, expt.View]] = []

    def on_epoch_end(self, view: expt.View) -> None:
        self.seen.append(("epoch", view))

    def on_evaluation_end(self, view: expt.View) -> None:
        self.seen.append((view.split, view))
        assert not view.model.training  # a copy, kept


class Stepping(expt.Callback):
    """Sums up losses at every few steps, and keeps its number of calls."""

    def __init__(self, every: Any = 3) -> None:
        self.every_steps, self.calls = every, 0

    def on_step_end(self, view: expt.View) -> None:
        torch.rand(3)
        self.calls += 1
        assert not view.model.training
        view.scalar("mine/calls", self.calls + view.metrics["running/loss"])

    def state_dict(self) -> Mapping[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


class Mistyped(expt.Callback):
    def on_epoch_ends(self, view: expt.View) -> None:
        """Whatever."""


class Raising(expt.Callback):
    def on_evaluation_end(self, view: expt.View) -> None:
        view.scalar("loss/val", 0.0)


class Unkept(expt.Callback):
    def state_dict(self) -> Mapping[str, Any]:
        return {"mean": [collections.deque([1.0])]}


class Lonely(Busy):
    """On one rank of two: to it there is no other."""

    def on_evaluation_end(self, view: expt.View) -> None:
        assert not dist.is_initialized()
        with contextlib.suppress(ValueError):
            dist.all_reduce(torch.ones(3))
            raise AssertionError(
                "it would have waited for the other rank, or got another's numbers"
            )
