"""A step by two CUDA graphs: the forward and backward pass, and the update.

Who looks at gradients is in between.

Metrics, moving averages and the schedule go on as in every step. torch's fused updates read a rate
that is a tensor as float32, and one that is a number as float64: here all rates are rounded to
float32, in eager steps too, so that it matters to no number which steps are replayed."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from expt.config import secrets
from expt.data.loading import Batch, to_device
from expt.data.tree import leaves, mapped
from expt.errors import warn
from expt.training import cuda_graph
from expt.training.cuda_graph import CudaGraph, Generators, Graph, State
from expt.training.learner import Add, Learner
from expt.training.loop import accumulate_gradients, parts_of, update

T = TypeVar("T")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Part(NamedTuple):
    """What a part of a batch gives; `weight` is what to divide the summed loss by."""

    loss: Tensor
    weight: Tensor | float
    outputs: Any


class _Passes(NamedTuple):
    """What a forward and backward pass gives."""

    parts: list[_Part]
    gradients: dict[str, Tensor]


class _RecordedPasses(NamedTuple):
    graph: Graph
    batch: Batch
    """whose tensors a replay reads"""
    found: _Passes
    """whose tensors it writes"""
    parameters: dict[str, nn.Parameter]

    def replay(self, batch: Batch) -> _Passes:
        """On the numbers of `batch`."""
        mine, given = ((each.inputs, each.targets) for each in (self.batch, batch))
        for tensor, values in zip(leaves(mine), leaves(given), strict=True):
            tensor.copy_(values, non_blocking=True)
        self.graph.replay()
        return self.found


class _RecordedUpdate(NamedTuple):
    graph: Graph
    rates: Tensor
    """of each group of parameters, which a replay reads"""
    settings: object
    """of the groups, which it repeats"""
    last: list[float]
    """of the rates"""

    def replay(self, rates: list[float]) -> None:
        """With these rates."""
        if rates != self.last:
            self.last[:] = rates
            if len({*rates}) == 1:
                self.rates.fill_(rates[0])
            else:
                self.rates.copy_(
                    to_device(torch.tensor(rates), self.rates.device), non_blocking=True
                )
        self.graph.replay()


def graphed_step(wanted: bool, device: torch.device, generators: Generators) -> GraphedStep | None:
    """What computes the steps, where it is `wanted` and there is a GPU; see GraphedStep."""
    return GraphedStep(device, generators) if wanted and device.type == "cuda" else None


class GraphedStep:
    """How a learner computes steps: from the second of two batches that are alike on, those like
    them are replayed.

    All others are eager, as an epoch's smaller last one. Where a replay does not leave what an
    eager step does, or nothing can be recorded, every step is: that is warned of, with the reason.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Generators,
        make: Callable[[torch.device], Graph] = CudaGraph,
    ) -> None:
        self._device, self._generators, self._make = device, generators, make
        self._kind: object = None
        """Of the batches that are replayed; before there are any, of the last batch."""
        self._may_record = True
        self._passes: _RecordedPasses | None = None
        self._update: _RecordedUpdate | None = None
        self._are_replayed = False
        """Whether the step's gradients are those of a replay."""
        self.replayed = 0
        """Steps so far, of which both parts were."""

    def gradients(self, learner: Learner, batch: Batch, add: Add) -> None:
        """Forward and backward on a batch; see `loop.accumulate_gradients`."""
        recorded = self._fitting(learner, batch)
        self._are_replayed = recorded is not None
        if recorded is None:
            accumulate_gradients(learner, batch, add)
            return
        found = recorded.replay(batch)
        _give(recorded.parameters, found.gradients)
        parts = parts_of(batch, learner.gradient_accumulation, learner.world_size)
        for index, (part, (loss, weight, outputs)) in enumerate(
            zip(parts, found.parts, strict=True)
        ):
            # The next replay overwrites them; the outputs of other tasks are measured at once.
            kept = mapped(Tensor.clone, outputs) if learner.task.measures_jointly else outputs
            add(mapped(Tensor.clone, (loss, weight)), kept, part, index == 0)

    def update(self, learner: Learner) -> bool:
        """Use the step's gradients, and drop them; see `loop.update`."""
        rates, recorded = _round_rates(learner.optimizer), self._update
        if (
            not self._are_replayed
            or recorded is None
            or recorded.settings != _settings(learner.optimizer)
        ):
            return update(learner)
        recorded.replay(rates)
        learner.optimizer.zero_grad(set_to_none=True)
        self.replayed += 1
        return True

    def _fitting(self, learner: Learner, batch: Batch) -> _RecordedPasses | None:
        """What a replay of this batch would be of, which may be recorded now."""
        kind = _kind(batch)
        if self._may_record:
            before, self._kind = self._kind, kind
            if kind == before:
                self._may_record = False
                self._record(learner, batch)
        return self._passes if kind == self._kind else None

    def _record(self, learner: Learner, batch: Batch) -> None:
        hooked = [
            name or "the model" for name, part in learner.module.named_modules() if _has_hook(part)
        ]
        if hooked:
            warn(
                f"cuda_graph=true: every step is eager: {hooked[0]} has a hook, which a replay"
                " would not call"
            )
            return
        self._passes = _checked("step", functools.partial(self._record_passes, learner, batch))
        if self._passes and _has_fused_update(learner):  # of others it is eager, as is documented
            self._update = _checked(
                "update", functools.partial(self._record_update, learner, self._passes)
            )

    def _record_passes(self, learner: Learner, batch: Batch) -> tuple[_RecordedPasses, str | None]:
        module, graph = learner.module, self._make(self._device)
        parameters = dict(module.named_parameters())
        inputs, targets = mapped(torch.zeros_like, (batch.inputs, batch.targets))
        blank = batch._replace(inputs=inputs, targets=targets)
        with self._unchanged({**parameters, **dict(module.named_buffers())}, parameters) as state:
            found = cuda_graph.record(
                graph, functools.partial(_compute, learner, parameters, blank), state
            )
            recorded = _RecordedPasses(graph, blank, found, parameters)
            eager = functools.partial(_compute, learner, parameters, batch)
            return recorded, cuda_graph.difference(
                graph, eager, functools.partial(recorded.replay, batch), state
            )

    def _record_update(
        self, learner: Learner, passes: _RecordedPasses
    ) -> tuple[_RecordedUpdate, str | None]:
        """Of the gradients that a replay leaves."""
        graph, parameters, gradients = (
            self._make(self._device),
            passes.parameters,
            passes.found.gradients,
        )
        states = {
            f"{kind} of {name}": value
            for name, kind, value in _states(learner.optimizer, parameters)
        }
        given = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        wanted = _round_rates(learner.optimizer)
        rates = torch.tensor(wanted, device=self._device) / 2
        with self._unchanged({**parameters, **states, **given}, parameters) as state:
            cuda_graph.record(
                graph, functools.partial(_use, learner, parameters, gradients, rates), state
            )
            recorded = _RecordedUpdate(graph, rates, _settings(learner.optimizer), last=[])
            eager = functools.partial(_use, learner, parameters, gradients, None)
            return recorded, cuda_graph.difference(
                graph, eager, functools.partial(recorded.replay, wanted), state
            )

    @contextlib.contextmanager
    def _unchanged(
        self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[State]:
        """Afterwards all is as it was, without gradients."""
        state = State(tensors, self._generators, self._device)
        try:
            yield state
        finally:
            state.put_back()
            _give(parameters, {})


def _checked(what: str, record: Callable[[], tuple[T, str | None]]) -> T | None:
    """What is recorded, if it does what it should."""
    try:
        recorded, problem = record()
    except Exception as error:  # of CUDA, torch, the model: what can't be recorded can be trained
        problem = secrets.said(error)
    if problem is None:
        return recorded
    warn(f"cuda_graph=true: every {what} is eager: {problem}")
    return None


def _kind(batch: Batch) -> object:
    """What of a batch is recorded with the kernels: all but the numbers in its tensors."""
    tensors = (batch.inputs, batch.targets)
    return mapped(lambda tensor: (tensor.shape, tensor.stride(), tensor.dtype), tensors), batch[2:]


def _has_hook(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in HOOKS)


def _give(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name)


def _compute(learner: Learner, parameters: Mapping[str, nn.Parameter], batch: Batch) -> _Passes:
    """A forward and backward pass; its gradients are taken away from the parameters."""
    parts: list[_Part] = []
    accumulate_gradients(
        learner,
        batch,
        lambda loss, outputs, *_: parts.append(_Part(*mapped(Tensor.detach, (*loss, outputs)))),
    )
    gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
    _give(parameters, {})
    return _Passes(parts, gradients)


def _use(
    learner: Learner,
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
    rates: Tensor | None,
) -> None:
    """An update by these gradients, with these rates of the groups, or with those that stand there."""
    _give(parameters, gradients)
    groups = learner.optimizer.param_groups
    before = [dict(group) for group in groups]
    for group, rate in zip(groups, () if rates is None else rates, strict=False):
        group["lr"] = rate
        if "capturable" in group:  # Adam asks for it, and has it where it is fused
            group["capturable"] = True
    try:
        update(learner)
    finally:
        for group, settings in zip(groups, before, strict=True):
            group.update(settings)


def _has_fused_update(learner: Learner) -> bool:
    """Whether one kernel updates a group by a rate that it reads on the device, always, and all it
    needs is there.
    """
    optimizer = learner.optimizer
    fused = isinstance(optimizer, optim.SGD | optim.Adam) and all(
        group["fused"] for group in optimizer.param_groups
    )
    values = [(one, value) for one, state in optimizer.state.items() for value in state.values()]
    there = all(isinstance(value, Tensor) and value.device == one.device for one, value in values)
    return fused and there and learner.precision.always_updates


def _states(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield name, kind, value


def _settings(optimizer: Optimizer) -> object:
    """What an update depends on beside rates, gradients and states."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def _round_rates(optimizer: Optimizer) -> list[float]:
    """Have every rate be a float32, as a number; returns them."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = struct.unpack("f", struct.pack("f", group["lr"]))[0]
    return [group["lr"] for group in optimizer.param_groups]
