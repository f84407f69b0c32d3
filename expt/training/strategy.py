"""Strategies: how one device, or several together, compute the gradients of a step.

The loop calls a `Strategy` and knows none of them; `worker/parallel` chooses one by the
configuration, once the model lies on its devices and has an optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from expt.data.indexing import local_slice
from expt.data.loading import ROWS, Batch, PerSample, leaves, mapped
from expt.errors import ConfigError, is_out_of_memory, listed, sized_by
from expt.training import collectives, random_state, sharding
from expt.training.collectives import Worker
from expt.training.parameter_groups import members
from expt.training.patches import version
from expt.training.shared_memory import SharedMemory

T = TypeVar("T")
Passes = Callable[[int], T]
"""Runs the forward and backward passes of a step in that many micro-batches."""


@dataclass
class Strategy:
    """A step on one device, or by nn.DataParallel; the base of those on several."""

    model: nn.Module
    """The model that is called in training: the bare one, or a wrapper around it."""
    world_size: int = 1
    micro_batches: int = 1
    interleaved: bool = False
    """True if statistics of micro-batches must not depend on the number of workers."""
    after_step: Sequence[Callable[[], None]] = ()
    """Collectives that make buffers equal on all workers."""
    memory: SharedMemory | None = None
    """Shared memory in which gradients are averaged."""

    shards = 1
    """The workers that share one replica of the weights."""
    repeats_steps = False
    """True if the passes of a step may begin again, and count once."""
    forward_is_collective = False
    """True if all workers must call the model together, in an evaluation too."""

    def cut(self, batch: Batch, count: int) -> list[Batch]:
        """Return this worker's micro-batches of a batch."""
        return micro_batches(batch, count, self.world_size, interleaved=self.interleaved)

    def accumulate(self, index: int, count: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's passes, which averages gradients in the last."""
        return contextlib.nullcontext()

    def gradients(self, passes: Passes[T], batch: Batch, phase: Sequence[nn.Parameter] = ()) -> T:
        """Run `passes`, of these parameters or all; every worker then has the mean gradients."""
        return passes(self.micro_batches)

    def finish_step(self) -> None:
        """Make buffers equal on all workers before the next step reads them."""
        for each in self.after_step:
            each()

    def batches(self, batches: Iterable[Batch], module: nn.Module) -> Iterable[Batch]:
        """Return an evaluation's batches, as many on each worker where `module` needs that."""
        return batches

    def whole(self, module: nn.Module) -> nn.Module:
        """Return the evaluated `module` as a callback may copy it; a collective if sharded."""
        return module

    @property
    def rehearses(self) -> bool:
        """True if a resumed run has to compute a step first, to add up in the same order."""
        return False

    @property
    def all_reduce_s(self) -> float | None:
        """Seconds that steps spent averaging gradients so far, waiting included, where known."""
        return self.memory.spent_s if self.memory else None

    def state_dict(self) -> dict[str, int]:
        """Return the state for a resumed run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint."""


@dataclass
class Averaging(Strategy):
    """Workers that average the gradients of a step, or of each phase, once its passes are done."""

    _: KW_ONLY
    optimizer: Optimizer
    sparse: frozenset[Tensor] = frozenset()
    """Parameters whose gradients have only the rows that were used."""

    def gradients(self, passes: Passes[T], batch: Batch, phase: Sequence[nn.Parameter] = ()) -> T:
        found, mean = passes(self.micro_batches), self.memory.average if self.memory else None
        collectives.average_gradients(phase or trained_by(self.optimizer), mean, self.sparse)
        return found


@dataclass
class DDP(Strategy):
    """Workers whose gradients DistributedDataParallel averages during the backward pass."""

    model: DistributedDataParallel
    _: KW_ONLY
    optimizer: Optimizer

    @property
    def rehearses(self) -> bool:
        return self.world_size > 2  # after its first step it sorts gradients into other buckets

    @contextlib.contextmanager
    def accumulate(self, index: int, count: int) -> Iterator[None]:
        """Raise ConfigError naming parameters without a gradient, for which other workers wait."""
        if index < count - 1:
            with self.model.no_sync():
                yield
            return
        may_miss = self.model.find_unused_parameters or self.model.static_graph
        trained = [] if may_miss else trained_by(self.optimizer)
        reached = set[nn.Parameter]()  # a gradient that is there may be of an earlier pass
        hooks = [p.register_post_accumulate_grad_hook(reached.add) for p in trained if index]
        yield
        for hook in hooks:
            hook.remove()
        unused = {p for p in trained if p.grad is None or (index and p not in reached)}
        refuse_unused(self.model.module, unused)


@dataclass(kw_only=True)
class Sharded(Strategy):
    """Workers that share the weights, gradients and optimizer states: FSDP and HSDP."""

    worker: Worker
    shards: int
    blank: Callable[[int], Batch]
    """Returns a batch of that many samples."""
    reduces_each: bool
    """True if gradients are averaged after each micro-batch, so that no worker ever has all."""
    unused: sharding.Unused | None
    """Drops gradients of parameters that no worker has used."""
    outline: nn.Module | None
    """The model before it was sharded, with meta parameters; None without callbacks."""

    forward_is_collective = True

    def accumulate(self, index: int, count: int) -> AbstractContextManager[None]:
        model: Any = self.model
        if count > 1 and not self.reduces_each:
            model.set_requires_gradient_sync(index == count - 1)
        return contextlib.nullcontext()

    def gradients(self, passes: Passes[T], batch: Batch, phase: Sequence[nn.Parameter] = ()) -> T:
        found = passes(self.micro_batches)
        if self.unused:
            self.unused.drop()
        return found

    def batches(self, batches: Iterable[Batch], module: nn.Module) -> Iterable[Batch]:
        return sharding.in_step(batches, module, self.blank)

    def whole(self, module: nn.Module) -> nn.Module:
        if self.outline is None:
            return module
        # which may leave some out, such as the published weights under adapters
        every = {**dict(module.named_parameters(remove_duplicate=False)), **module.state_dict()}
        state = sharding.gather_state(every, keep=self.worker.rank == 0)
        if self.worker.rank:  # its copy is of no use
            return self.outline
        whole = sharding.outline(self.outline)
        whole.load_state_dict(state, assign=True)
        return whole.to(self.worker.device)


@dataclass(kw_only=True)
class Fitting(Strategy):
    """Workers that find how many samples fit at a time, for gradient_accumulation=auto.

    If one lacks memory all halve their micro-batches and begin the step again. No collective comes
    before all are known to have their gradients.
    """

    worker: Worker
    optimizer: Optimizer
    allows_unused: bool
    sparse: frozenset[Tensor] = frozenset()
    at_a_time: int | None = None
    """The samples that a worker trains on at a time; None is its share of a batch."""

    repeats_steps = True

    def __post_init__(self) -> None:
        """Give all workers rank 0's weights; a collective."""
        is_alone, layers = self.world_size == 1, self.model.modules()
        if not is_alone and any(isinstance(one, nn.SyncBatchNorm) for one in layers):
            raise ConfigError(
                "gradient_accumulation=auto: in the model's SyncBatchNorm workers wait for one"
                " that may lack memory; give a number"
            )
        # To ask GPUs would wait for them
        self._group: Any = None if is_alone else dist.new_group(backend="gloo")
        collectives.broadcast_parameters(self.model)

    def cut(self, batch: Batch, count: int) -> list[Batch]:
        return [copied(one) for one in super().cut(batch, count)]  # a model may change its inputs

    def gradients(self, passes: Passes[T], batch: Batch, phase: Sequence[nn.Parameter] = ()) -> T:
        share, before = -(-batch.global_size // self.world_size), self.at_a_time
        trained, first = trained_by(self.optimizer), None
        while True:
            restore, size = self._noted(), min(self.at_a_time or share, share)
            found, lack = None, None
            try:
                with sized_by("batch_size", size):
                    found = passes(-(-share // size))
                collectives.reserve_bucket([one for one in trained if one not in self.sparse])
            except Exception as error:
                is_least = size == 1 or len(in_parts(batch, batch.size / 2)) == 1
                if first and not is_out_of_memory(error):  # so few don't do, as for a batch norm
                    raise first from error
                if is_least or not is_out_of_memory(error):
                    raise
                lack = copy.copy(error)  # its traceback would keep tensors alive
            (lacks,) = collectives.max_across_workers([lack is not None], self._group)
            if found is not None and not lacks:
                break
            first = next(filter(None, collectives.gather_across_workers(lack, self._group)))
            self.at_a_time = -(-size // 2)
            self.optimizer.zero_grad(set_to_none=True)
            restore()
            gc.collect()
            if self.worker.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.at_a_time != before:
            self.worker.warn(
                f"gradient_accumulation=auto: out of memory with {min(before or share, share)}"
                f" samples at a time; from this step on {self.at_a_time}"
            )
        if not self.allows_unused:
            refuse_unused(self.model, {p for p in trained if p.grad is None})
        collectives.average_gradients(trained, sparse=self.sparse)
        return found

    def _noted(self) -> Callable[[], None]:
        """Copy the state that a forward pass may change; return a function that restores it."""
        random, state = random_state.state_dict(self.worker.device), self.model.state_dict()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        written = {name: version(one) for name, one in parameters.items()}
        for name in parameters:
            state.pop(name, None)
        before = dict(self.model.named_buffers())
        others = {name: one for name, one in before.items() if name not in state}
        model, others = copy.deepcopy((state, others))  # those of others are in no state_dict

        def owner(name: str) -> tuple[nn.Module, str]:
            return self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]

        def restore() -> None:
            for name, one in self.model.named_parameters():
                if version(one) != written.get(name):
                    raise ConfigError(
                        f"gradient_accumulation=auto: the model changes {name} in a forward pass,"
                        " so that a step can't begin again; give a number"
                    )
            for name in {name for name, _ in self.model.named_buffers()} - before.keys():
                delattr(*owner(name))
            random_state.load_state_dict(random, self.worker.device)
            self.model.load_state_dict(model, strict=False)
            for name, buffer in others.items():
                setattr(*owner(name), buffer)

        return restore

    def state_dict(self) -> dict[str, int]:
        return {"micro_batch_size": self.at_a_time} if self.at_a_time else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at_a_time = state.get("micro_batch_size")


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that are not frozen; a walk through the modules would cost more."""
    return [one for one in members(optimizer.param_groups) if one.requires_grad]


def refuse_unused(module: nn.Module, unused: set[nn.Parameter]) -> None:
    """Raise ConfigError where there are `unused` parameters."""
    if unused:
        names = [name for name, p in module.named_parameters() if p in unused]
        raise ConfigError(
            f"these parameters got no gradient, they took no part in the loss: {listed(names)};"
            " use ddp.find_unused_parameters=true, or remove them from the model"
        )


def micro_batches(
    batch: Batch, count: int, world_size: int = 1, *, interleaved: bool = False
) -> list[Batch]:
    """Cut a batch into at most `count` micro-batches; as many on every worker, which meet in each.

    Where they are `interleaved`, the n-th of all workers together has the same samples of the
    global batch whatever the number of workers: each `count`-th, from the n-th on.
    A worker with fewer samples than others have micro-batches repeats its first, without weight.
    Raises ConfigError where the batch's tensors differ in length.
    """
    if count == 1:
        return [batch]
    if not can_be_cut(batch):
        raise ConfigError(
            f"gradient_accumulation={count}: the tensors of a batch have unequal lengths; use 1"
        )
    size, most = batch.size, -(-batch.global_size // world_size)
    number = min(most, count) if interleaved else len(_cut(most, count))
    cuts = [slice(at, size, number) for at in range(number)] if interleaved else _cut(size, count)
    if len(cuts) != number:
        cuts = [local_slice(size, index, number) for index in range(number)]
    repeated = part_of(batch, slice(1))._replace(weightless=True)
    return [part_of(batch, cut) if cut.start < cut.stop else repeated for cut in cuts]


def part_of(batch: Batch, cut: slice) -> Batch:
    """Return some of the samples; their tensors are views."""

    def part(rows: Tensor | PerSample) -> Tensor | PerSample:
        return rows[cut] if isinstance(rows, Tensor) else PerSample(rows[cut])

    inputs, targets = mapped(part, (batch.inputs, batch.targets), ROWS)
    return batch._replace(inputs=inputs, targets=targets)


def can_be_cut(batch: Batch) -> bool:
    """Return whether all tensors, and lists of an item for each sample, are as long as it.

    torch cuts no nested tensor.
    """
    rows = [*leaves((batch.inputs, batch.targets), ROWS)]
    are_plain = not any(isinstance(one, Tensor) and one.is_nested for one in rows)
    return are_plain and {*map(len, rows)} == {batch.size}


def _cut(size: int, count: int) -> list[slice]:
    """Return the slices of at most `count` micro-batches, as by torch.chunk."""
    step = -(-size // count)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def copied(batch: Batch) -> Batch:
    """Return a copy of a batch, whose tensors a model may change in place."""
    inputs, targets = mapped(torch.clone, (batch.inputs, batch.targets))
    return batch._replace(inputs=inputs, targets=targets)


def in_parts(batch: Batch, most: float) -> list[Batch]:
    """Cut a batch into parts of at most `most` samples, if its tensors are equally long."""
    if batch.size <= most or not can_be_cut(batch):
        return [batch]
    return micro_batches(batch._replace(global_size=batch.size), math.ceil(batch.size / most))
