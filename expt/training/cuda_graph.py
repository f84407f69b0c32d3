"""Work of a GPU that is recorded once and then asked for by one launch: a CUDA graph; and whether
it does the same.

A recording is made where weights, generators and inputs are others than those that it is then
compared by, so that nothing of them has stayed in it unnoticed."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from expt.data.tree import leaves

T = TypeVar("T")
NOISE = 8.0
"""How far a replay may be from what it replays, in units of what that is from itself, done twice:
mostly nothing.
"""


class Graph(Protocol):
    """What records work of a device, to have it done again.

    `run` is called by `warm_up` and by `record`.
    """

    def warm_up(self, run: functools.partial[T]) -> T:
        """What it gives, where it is recorded later."""

    def record(self, run: functools.partial[T]) -> T:
        """Tensors in which each `replay` leaves what `run` gives then."""

    def replay(self) -> None:
        """Do it again, on the numbers that are now in the tensors which `run` has read."""


class Generators(Protocol):
    """Every random number generator of the process."""

    def state_dict(self, device: torch.device) -> Mapping[str, Any]:
        """Where they are."""

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from there."""


class CudaGraph:
    """torch's, on a stream of its own; torch registers the default generator, and each replay
    advances it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    def warm_up(self, run: functools.partial[T]) -> T:
        """See Graph."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found

    def record(self, run: functools.partial[T]) -> T:
        """See Graph."""
        # Other threads write checkpoints meanwhile, and may ask the device for what a recording
        # must not.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        """See Graph."""
        self._graph.replay()


class State:
    """All that some work may change, as it was when this was made: tensors by name, and the
    generators.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], generators: Generators, device: torch.device
    ) -> None:
        self._tensors, self._saved = (
            tensors,
            {name: tensor.detach().clone() for name, tensor in tensors.items()},
        )
        self._generators, self._device = generators, device
        self._random = generators.state_dict(device)

    @torch.no_grad()
    def put_back(self) -> None:
        """Be there again."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._saved[name])
        self._generators.load_state_dict(self._random, self._device)

    @torch.no_grad()
    def disturb(self) -> None:
        """Be somewhere else."""
        for tensor in self._tensors.values():
            if tensor.is_floating_point():
                tensor.mul_(0.5)

    def left_by(self, run: Callable[[], Any]) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """Every tensor after `run`, those that it gives too, and the generators; then all is put
        back.
        """
        found = {**dict(_named(run(), "")), **self._tensors}
        values = {name: tensor.detach().clone() for name, tensor in found.items()}
        random = self._generators.state_dict(self._device)
        self.put_back()
        return values, random


def record(graph: Graph, run: functools.partial[T], state: State) -> T:
    """What `graph.replay` fills; recorded where `state` is another, and replayed there, and put
    back.
    """
    state.disturb()
    graph.warm_up(run)
    found = graph.record(run)
    graph.replay()
    for tensor in leaves(found):
        if tensor.is_floating_point():
            tensor.fill_(math.nan)  # which stays where a replay does not write
    state.put_back()
    return found


def difference(
    graph: Graph, eager: functools.partial[Any], replay: Callable[[], Any], state: State
) -> str | None:
    """What is otherwise after a replay than after `eager`, if anything is, in a few words; all is
    put back.
    """
    (once, random), (twice, _) = (state.left_by(lambda: graph.warm_up(eager)) for _ in range(2))
    replayed, random_then = state.left_by(replay)
    if random_then != random:
        return "a replay leaves the random number generators elsewhere"
    if replayed.keys() != once.keys():
        return "a replay gives more tensors, or fewer"
    noise = _noise(once, twice)
    for name, values in replayed.items():
        apart = _apart(values, once[name])
        if apart > NOISE * noise[name]:
            return f"a replay has other numbers in '{name}', by {apart:.3g}"
    return None


def _noise(once: Mapping[str, Tensor], twice: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor is from itself, done twice; where any are, at least the share of its size
    that is usual.

    For a number that is summed from others may come out alike by chance. All are zero where all
    came out alike."""
    apart = {name: _apart(values, twice[name]) for name, values in once.items()}
    sizes = {name: _apart(values, torch.zeros_like(values)) for name, values in once.items()}
    shares = [
        apart[name] / size
        for name, size in sizes.items()
        if apart[name] and once[name].is_floating_point()
    ]
    usual = statistics.median(shares) if shares and math.isfinite(sum(shares)) else 0.0
    return {
        name: max(each if math.isfinite(each) else 0.0, usual * sizes[name])
        for name, each in apart.items()
    }


def _named(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The numbers in nested containers, by where they are."""
    if isinstance(tree, Tensor | float | int):
        yield name, torch.as_tensor(tree)
    elif isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from _named(below, f"{name} {key}".strip())
    elif isinstance(tree, tuple | list):
        for key, below in zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True):
            yield from _named(below, f"{name} {key}".strip())


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; a nan has none from another. Waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.numel():
        return 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one.double() - other.double()).abs().masked_fill(same, 0.0)
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
