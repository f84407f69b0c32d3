"""A model's memory and work, measured on tensors without numbers: a step is carried out, and
nothing is computed.

torch's FakeTensorMode knows of each tensor its size and type alone, so that a model of any size is
measured in seconds, on any machine. What it takes as CPU tensors has the sizes that it has on a
GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from expt.config import constraints, groups, lone_sample, secrets, user_code
from expt.config.schema import RunConfig
from expt.data.tree import leaves
from expt.errors import ConfigError, ExptError, first_line
from expt.models import build as model_build
from expt.models.blocks import blocks
from expt.models.freeze import freeze
from expt.planning.samples import Sample
from expt.tasks import build as task_build
from expt.tasks.phases import PhasedTask
from expt.tasks.task import Task
from expt.training import offload, optim, sharding
from expt.training.activation_checkpointing import checkpoint_activations
from expt.training.patches import fused_attention
from expt.training.patches.fake_tensors import NUMBERS_WANTED, FakeTensorMode, without_log
from expt.training.patches.live_bytes import Held, LiveBytes, bytes_of
from expt.training.shardable import Refusal, refusal

Wanted = Sequence[str] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a model takes whatever the batch, in bytes."""

    parameters: int
    """Their number."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Of the optimiser."""
    buffer_bytes: int
    average_bytes: int
    """Of the moving average of weights, where there is one."""
    update_bytes: int
    """What the optimiser takes for a moment in its step."""
    block_bytes: tuple[int, ...]
    """Of the parameters of each block; the rest is in none."""
    unit_bytes: tuple[int, ...]
    """Of the parameters of each unit of sharding, in their order; the rest is in none."""
    scalar_bytes: int
    """Of the optimiser's states: what offload=cpu leaves on the card."""
    state_bytes_at_once: int
    """Of the others: what it has there at a time."""
    against_sharding: Refusal | None
    """Why it can't be shared out, where it can't."""
    gathered_dtype: torch.dtype | None
    """That of mixed precision in which sharded parameters travel by themselves; None is that of the
    parameters.
    """


class Moment(NamedTuple):
    """Of a pass: what is held beside parameters and the gradients handed on, at most, since the one
    before.
    """

    gradient_bytes: int
    """Of the gradients that are handed on by then."""
    held: Held
    without_gradients: Held
    """Without those that are just computed, too."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and a backward pass on `samples` of one worker."""

    samples: int
    moments: tuple[Moment, ...]
    """One for each gradient, and what comes after the last."""
    flop: int

    @property
    def activation_bytes(self) -> int:
        """At the moment at which they are most, without parameters and their gradients."""
        return max(moment.held.bytes for moment in self.moments)


class Measuring:
    """Of one configuration; makes its model anew for each question."""

    def __init__(self, config: RunConfig, sample: Sample, *, on_gpus: bool = False) -> None:
        """`sample` is of the dataset; `on_gpus` is for cards that the run itself does not name."""
        self._config = config
        self._sample = sample
        self._on_gpus = on_gpus or config.num_gpus > 0

    def model(self) -> Model:
        """What it takes whatever the batch. Raises as `measure`."""
        with self._fake() as module:
            every, trained = (
                list(module.parameters()),
                [p for p in module.parameters() if p.requires_grad],
            )
            optimizer = optim.build_optimizer(self._config.optimizer, module, unguarded=False)
            if self._config.offload:
                offload.offload_states(optimizer, bytes_at_once=offload.BYTES_AT_ONCE)
            with _in_words(f"optimizer={constraints.word(self._config.optimizer)}", self._config):
                update_bytes = _update_bytes(optimizer, trained)
            states = _states(optimizer, trained)
            parameter_bytes, buffer_bytes = bytes_of(every), bytes_of(module.buffers())
            units = sharding.choose_units(module, self._config.sharding.wrap)
            averages = bool(self._config.ema)
            return Model(
                parameters=sum(parameter.numel() for parameter in every),
                parameter_bytes=parameter_bytes,
                gradient_bytes=bytes_of(trained),
                state_bytes=bytes_of(states),
                buffer_bytes=buffer_bytes,
                average_bytes=averages * (parameter_bytes + buffer_bytes),
                update_bytes=update_bytes,
                block_bytes=tuple(
                    bytes_of(block.parameters()) for block in blocks(module).values()
                ),
                unit_bytes=tuple(map(bytes_of, sharding.own_parameters(module, units))),
                scalar_bytes=bytes_of(states) - bytes_of(_with_size(states)),
                state_bytes_at_once=_bytes_at_once(optimizer) if self._config.offload else 0,
                against_sharding=refusal(module, units),
                gathered_dtype=self._gathered_dtype(module),
            )

    def _gathered_dtype(self, module: nn.Module) -> torch.dtype | None:
        wanted = self._config.sharding.param_dtype
        if not self._config.amp or wanted == "float32":
            return None
        half = torch.float16 if "fp16" in (wanted, self._config.amp) else torch.bfloat16
        return sharding.gathered_dtype(module, half)

    def has_blocks(self) -> bool:
        """Whether activation_checkpointing=auto finds any."""
        with self._fake() as module:
            return bool(blocks(module))

    def measure(self, samples: int, checkpointing: Wanted) -> Pass:
        """A forward and a backward pass on so many samples of one worker.

        Raises ConfigError for a model that decides by the numbers it computes.
        """
        with self._fake() as module:
            if checkpointing:
                checkpoint_activations(module, checkpointing, compiled=False)
            batch, task = self._sample.batch(samples), self._task()
            inside = bytes_of(leaves((batch.inputs, batch.targets)))
            live = LiveBytes(module.parameters())
            ends, done, gradients = list[int](), [0], set[int | None]()

            def note(
                parameter: torch.Tensor,
            ) -> None:  # its gradient is handed on, as to a bucket, and counted elsewhere
                assert parameter.grad is not None
                gradients.add(live.number(parameter.grad))
                parameter.grad = None
                ends.append(live.now)
                done.append(done[-1] + parameter.nbytes)

            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(note)
            with live, fused_attention.as_on_gpus() if self._on_gpus else contextlib.nullcontext():
                with self._autocast():
                    outputs = task.forward(module, batch)
                    loss, _ = task.training_loss(outputs, batch)
                (loss * 1.0).backward()  # the outputs are held until then, as in a step
            ends.append(live.now)
            held = (
                [Held(inside + each.bytes, each.cast_bytes) for each in live.peaks(ends, but)]
                for but in ((), gradients)
            )
            return Pass(samples=samples, moments=tuple(map(Moment, done, *held)), flop=live.flop)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return (
            torch.autocast("cpu", torch.bfloat16) if self._config.amp else contextlib.nullcontext()
        )

    def _task(self) -> Task:
        smoothing = self._config.label_smoothing
        task = task_build.build(
            self._config.task, self._sample.shapes, label_smoothing=smoothing, **self._sample.about
        )
        if isinstance(task, PhasedTask):
            raise ConfigError(
                f"plan: {type(task).__name__} has steps of several updates, of which it knows"
                " nothing"
            )
        return task

    @contextlib.contextmanager
    def _fake(self) -> Iterator[nn.Module]:
        default = groups.DefaultInit(name="default")  # no number is drawn
        shapes = model_build.offered(self._config, self._sample.shapes)
        model = f"model={constraints.word(self._config.model)}"
        with (
            without_log(),
            FakeTensorMode(allow_non_fake_inputs=True),
            _in_words(model, self._config),
        ):
            example = self._sample.batch(1).inputs
            module = model_build.build(self._config.model, default, shapes, example, fetch=False)
            freeze(module, self._config.freeze)
            yield module.train()


@contextlib.contextmanager
def _in_words(of: str, config: RunConfig) -> Iterator[None]:
    """Raise ConfigError for what asks for the numbers of tensors that have none, and for whatever
    else `of` raises.
    """
    try:
        yield
    except ExptError:
        raise
    except NUMBERS_WANTED as error:
        told = first_line(error)
        raise ConfigError(
            f"plan: {of} decides by numbers, and there are none here ({told})"
        ) from error
    except Exception as error:
        if isinstance(error, ValueError) and lone_sample.RAISED in str(error):
            raise ConfigError(_of_lone_sample(config)) from error
        frame = user_code.own_frame(error)
        where = f", {Path(frame.filename).name}:{frame.lineno}" if frame else ""
        told = f"{secrets.said(error)[:300]}{where}"
        raise ConfigError(
            f"plan: {of} cannot take a step on this data ({told}); mend what it raises"
        ) from error


def _of_lone_sample(config: RunConfig) -> str:
    if config.batch_norm == "sync" and config.world_size > 1:
        parts = config.world_size * config.gradient_accumulation
        return (
            "plan: batch_norm=sync is measured on the samples of one worker; use"
            f" batch_size={2 * parts} or more"
        )
    return lone_sample.refusal(config)


def _states(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    kept = [
        each for one in parameters for each in leaves(list(optimizer.state.get(one, {}).values()))
    ]
    return [each for each in kept if isinstance(each, torch.Tensor)]


def _with_size(states: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that offload=cpu takes to the host."""
    return [each for each in states if each.dim()]


def _bytes_at_once(optimizer: Optimizer) -> int:
    """Of the states that offload=cpu has on the card together."""
    parts = offload.in_parts(
        [group["params"] for group in optimizer.param_groups], offload.BYTES_AT_ONCE
    )
    return max(bytes_of(_with_size(_states(optimizer, part))) for part in parts)


def _update_bytes(optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """What the second step takes beside gradients and states, which the first has made."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    live = LiveBytes(trained)
    with live:
        optimizer.step()
    return live.peak.bytes
