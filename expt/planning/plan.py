"""The memory of a run on each device by each strategy, from one step on tensors without data.

A forward and a backward pass under torch's FakeTensorMode, which knows of a tensor its size and
type only, so a model of any size is measured in seconds on any machine.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config import constraints, groups, secrets
from expt.config.schema import RunConfig
from expt.data import build as data_build
from expt.data.loading import Batch, Shard, leaves, mapped
from expt.errors import ConfigError, ExptError
from expt.features import Features
from expt.models import build as model_build
from expt.models.blocks import blocks
from expt.models.build import freeze
from expt.tasks.task import Facts
from expt.training import optim, sharding
from expt.training.compiling import checkpoint_activations
from expt.training.parameter_groups import sparse_weights

Strategy = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The most that a device holds under one strategy, in bytes."""

    strategy: Strategy
    checkpointed: bool
    """True if the model's blocks recompute their activations."""
    parameters: float
    """Parameters, buffers, the moving average of the weights and, if sharded, gathered units."""
    gradients: float
    states: float
    """The optimiser's states."""
    activations: float
    """Tensors of a micro-batch's forward and backward pass, or of the update if they are larger."""

    @property
    def total(self) -> float:
        """The sum, as if gradients and activations were whole at the same moment."""
        return self.parameters + self.gradients + self.states + self.activations


class Sample(NamedTuple):
    """A sample of a dataset, and the facts of the data that its model and task are given."""

    features: Features
    inputs: Any
    targets: Any
    class_counts: Sequence[int]

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int | None = None) -> Sample:
        """Return one of the run's dataset, which is read only where its settings don't say it all.

        Raises ConfigError where it must be read, and can't.
        """
        dataset = config.dataset
        if known := dataset.known_features(vocabulary):
            inputs = cast(Tensor, known.inputs.drawn(1, torch.Generator()))[0]
            label = torch.zeros((), dtype=torch.int64)
            targets = inputs if known.targets.each == "token" else label
            return Sample(known, inputs, targets, (1,) * known.shapes.get("num_classes", 0))
        data = data_build.build(
            dataset,
            config.task,
            batch_size=config.world_size * config.micro_batches,
            shard=Shard(0, config.world_size),
            device=torch.device("cpu"),
            epoch_steps=1,
        )
        return Sample(data.info.features, *data.example, data.info.class_counts)

    def batch(self, size: int) -> Batch:
        """Return a batch of `size` blank samples."""
        pair = self.inputs, self.targets
        inputs, targets = mapped(lambda one: one.new_zeros(size, *one.shape), pair)
        return Batch(inputs, targets, size)


class Footprints(NamedTuple):
    """The footprint of one configuration under each strategy."""

    num_parameters: int
    num_blocks: int
    micro_batch: int
    """Samples that a device computes on at a time."""
    plans: list[Footprint]


def footprints(config: RunConfig, vocabulary: int | None = None) -> Footprints:
    """Return the memory of `config` under each strategy, with and without activation checkpointing.

    `vocabulary` is the number of tokens of a text whose tokenizer is not there. Raises ConfigError
    for a model that can't take a step on this data, or not without its numbers.
    """
    sample = Sample.of(config, vocabulary)
    micro_batch = config.batch_size // config.world_size // config.micro_batches
    with _fake(config, sample) as module:
        parameters, gradients, states, update = _whole(config, module)
        gathered = _gathered(config, module)
        num_blocks = len(blocks(module))
    ways = {False: _activations(config, sample, micro_batch, ())}
    if num_blocks or config.activation_checkpointing:
        wanted = config.activation_checkpointing or "auto"
        ways[True] = _activations(config, sample, micro_batch, wanted)
    plans = [
        Footprint(
            strategy=strategy,
            checkpointed=checkpointed,
            parameters=parameters / shards + (gathered if shards > 1 else 0),
            gradients=gradients / (1 if config.micro_batches > 1 else shards),
            states=0 if config.offload else states / shards,
            activations=max(activations, update / shards),
        )
        for strategy, shards in _shards(config).items()
        for checkpointed, activations in ways.items()
    ]
    return Footprints(sharding.num_parameters(module), num_blocks, micro_batch, plans)


def _whole(config: RunConfig, module: nn.Module) -> tuple[int, int, int, int]:
    """Return the bytes of parameters, gradients, states and the update, of an undivided model."""
    if sparse_weights(module):
        raise ConfigError("plan: counts no sparse gradients; plan it with sparse=False")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    states, update = _update(optim.build_optimizer(config.optimizer, module), trained)
    parameters = (2 if config.ema else 1) * _bytes((*module.parameters(), *module.buffers()))
    return parameters, _bytes(trained), states, update


def _gathered(config: RunConfig, module: nn.Module) -> int:
    """Return the bytes of parameters and gradients that a worker gathers of a divided model."""
    found = _bytes(module.parameters())
    if config.sharding.reshard_after_forward:
        units = sharding.own_parameters(module, sharding.choose_units(module, config.sharding.wrap))
        sizes = [_bytes(unit) for unit in units]
        # Of the units only the one in use, its gradient, and the next
        found += 3 * max(sizes, default=0) - sum(sizes)
    return found


def _shards(config: RunConfig) -> dict[Strategy, int]:
    """Return by how many devices each strategy divides parameters, gradients and states."""
    found: dict[Strategy, int] = {"ddp": 1}
    if config.world_size > 1:
        found["fsdp"] = config.world_size
        if isinstance(shards := config.sharding.shards, int) and shards < config.world_size:
            found["hsdp"] = shards
    return found


def _activations(
    config: RunConfig, sample: Sample, size: int, wanted: Sequence[str] | Literal["auto"]
) -> int:
    """Return the bytes of a step on `size` samples, without parameters and gradients."""
    with _fake(config, sample) as module:
        if wanted:
            checkpoint_activations(module, wanted, compiled=False)
        targets, counts = sample.features.targets, sample.class_counts
        facts = Facts(targets=targets, class_counts=counts, label_smoothing=config.label_smoothing)
        task = config.task.build(facts)
        for parameter in module.parameters():
            if parameter.requires_grad:  # gradients are counted elsewhere
                parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        if task.phases:
            raise ConfigError(f"plan: {type(task).__name__} has steps of several updates")
        inputs, targets = data_build.in_its_type(module, sample.batch(size)[:2])
        batch, peak = Batch(inputs, targets, size), _Peak(module.parameters())
        with peak:
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(config.amp)):
                outputs = task.forward(module, batch)
                loss, _ = task.training_loss(outputs, batch)
            (loss * 1.0).backward()  # divided while the outputs are held, as in a step
        return peak.bytes + _bytes(leaves((batch.inputs, batch.targets)))


class _Peak(TorchDispatchMode):
    """The most bytes that the storages made while it is entered hold at the same time."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self._now = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count the storages of its outputs."""
        found = func(*args, **(kwargs or {}))
        for tensor in leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return found

    def _add(self, size: int) -> None:
        self._now += size
        self.bytes = max(self.bytes, self._now)


@contextlib.contextmanager
def _fake(config: RunConfig, sample: Sample) -> Iterator[nn.Module]:
    """Build the model of tensors without data. Raise ConfigError for any error of its code."""
    if isinstance(config.model, groups.HuggingFaceModel) and config.model.lora.rank:
        raise ConfigError(
            f"model.lora.rank={config.model.lora.rank}: adapters can't be built of tensors without"
            " numbers; plan with model.lora.rank=null, which takes more"
        )
    logger = logging.getLogger(FakeTensorMode.__module__)  # logs the traceback of an error
    before, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            module = model_build.build(
                config.model,
                groups.DefaultInit(name="default"),
                sample.features,
                sample.batch(1).inputs,
                fetch=False,
            )
            freeze(module, config.freeze)
            yield module.train()
    except ExptError:
        raise
    except Exception as error:
        raise ConfigError(
            f"plan: model={constraints.word(config.model)} cannot take a step on tensors without"
            f" numbers: {secrets.said(error)[:300]}"
        ) from error
    finally:
        logger.disabled = before


def _update(optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Return the bytes of the optimiser's states, and those that its step takes for a moment."""
    if isinstance(optimizer, torch.optim.LBFGS):  # its step reads the numbers of gradients
        vectors = 2 * optimizer.param_groups[0]["history_size"] + 2
        return vectors * _bytes(trained), 2 * _bytes(trained)
    for group in optimizer.param_groups:
        if group.get("fused"):  # has no rule for fake tensors, so torch would compute with zeros
            group.update(fused=False, foreach=False)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    states = [*leaves([list(state.values()) for state in optimizer.state.values()])]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    with (peak := _Peak([*trained, *gradients, *states])):
        optimizer.step()
    return _bytes(states), peak.bytes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
