"""What torch raises, in a person's words: another worker that did not come, memory that did not
suffice.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from expt.config.schema import RunConfig
from expt.data.iterable import IterableLoader
from expt.data.loading import Loader
from expt.data.tree import named_leaves
from expt.errors import (
    ConfigError,
    DataError,
    Diverged,
    ExptError,
    OutOfMemory,
    RunFailed,
    TimedOut,
    first_line,
)
from expt.runs.attempt import LOST
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.precision import is_finite

_CPU_MEMORY = re.compile(
    r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+)"
)


def in_words(error: Exception, config: RunConfig) -> Exception:
    """The ExptError that says what `error` means; `error` itself where nothing better is known."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory):
        fits = getattr(error, "fits", None)
        return _explained(
            error, OutOfMemory(f"{_first_sentences(error)}\n{_to_need_less(config, fits)}")
        )
    if isinstance(error, ExptError):
        return error
    if isinstance(error, RuntimeError) and (asked := _CPU_MEMORY.search(text)):
        size = f"{int(asked[1]) / 1e9:.1f} GB"
        return _explained(
            error,
            OutOfMemory(f"out of memory: {size} more were asked for\n{_to_need_less(config)}"),
        )
    if isinstance(error, MemoryError):
        return _explained(error, OutOfMemory(f"out of memory {text}\n{_to_need_less(config)}"))
    if isinstance(error, RuntimeError) and (
        "Timed out waiting" in text or _is_store_timeout(error)
    ):
        return _explained(
            error,
            TimedOut(f"waited for another worker, in vain, for {config.timeout_s:g} s (timeout_s)"),
        )
    if isinstance(error, dist.DistError) and re.search(r"shared memory|/dev/shm", text):
        reason = next(
            line for line in text.splitlines() if re.search(r"shared memory|/dev/shm", line)
        )[:200]
        mend = (
            "make it larger (as docker run --shm-size does), or set NCCL_SHM_DISABLE=1, which is"
            " slower"
        )
        return _explained(
            error, RunFailed(f"/dev/shm: NCCL has no room there ({reason.strip()}); {mend}")
        )
    if _is_lack_of_shared_memory(error):
        mend = (
            "mount it, or make it larger (as docker run --shm-size does), or use"
            " dataset.num_workers=0"
        )
        return _explained(
            error,
            RunFailed(
                f"/dev/shm: {_reason(error)}; the processes that read images need it; {mend}"
            ),
        )
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in text:
        why = (
            "the optimizer takes a tensor that each worker has whole beside a parameter of which it"
            " has a part; make it an attribute of the parameter, of its shape, or use strategy=ddp"
            if _is_of_optimizer(error)
            else (
                "a parameter is used outside of the module that it is sharded with; call modules,"
                " and not functions of their weights, or name a larger module in sharding.wrap"
            )
        )
        return _explained(error, ConfigError(f"strategy={config.strategy}: {why}"))
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:
        return _explained(error, ConfigError(_of_one_sample(config)))
    if isinstance(error, RuntimeError) and "Address already in use" in text:
        return _explained(
            error,
            RunFailed("no port is free for the workers to meet at; end other runs, or start fewer"),
        )
    return error


def _of_one_sample(config: RunConfig) -> str:
    """Return what is wrong where a batch norm got one sample, of which it would take the mean."""
    parts = config.world_size * config.gradient_accumulation
    fix = f"drop_last=true, or a batch_size that leaves more than one of {config.batch_size} over"
    if config.batch_size // parts == 1 or config.drop_last:
        fix = f"batch_size={2 * parts} or more"
    return (
        f"batch_size={config.batch_size}: a batch norm of the model can't train on one sample by"
        f" itself; use {fix}"
    )


def _is_of_optimizer(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in frames)


def _is_lack_of_shared_memory(error: Exception) -> bool:
    """Whether torch's loader processes, or their locks, found no room in /dev/shm."""
    if isinstance(error, OSError):
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).match("multiprocessing/synchronize.py")
    return (
        isinstance(error, RuntimeError)
        and re.search(r"shared memory|\bshm\b", str(error)) is not None
    )


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)[:200]


def _is_store_timeout(error: RuntimeError) -> bool:
    return (
        isinstance(error, dist.DistError)
        and re.search(r"time[d ]*out", str(error), re.IGNORECASE) is not None
    )


def _explained(cause: Exception, error: ExptError) -> ExptError:
    error.__cause__ = cause
    return error


def _first_sentences(error: Exception) -> str:
    """What was asked for and what there was; the rest of CUDA's message is about the allocator."""
    return ". ".join(first_line(error).split(". ")[:3])[:400].rstrip(".")


HAVE_BLOCKS = ("transformer", "resnet18", "unet")


def _to_need_less(config: RunConfig, fits: int | None = None) -> str:
    """What to set, for a run that needed too much memory; `fits` samples at a time were seen to do."""
    dp = config.strategy == "dp"  # one worker shares its part out among GPUs
    size, name = (config.num_gpus, "GPUs") if dp else (config.world_size, "workers")
    each = config.batch_size // size
    parts = config.gradient_accumulation
    part = each // parts
    now = f"batch_size={config.batch_size} is {each} samples on each of {size} {name}"
    if part != each:
        now += f", {part} at a time"
    ways = []
    if fits is not None and fits < part:
        now += f"; {fits} at a time fit, it was tried"
    if part > 1:
        few = part // 2 if fits is None or fits >= part else fits
        equal = next(
            number for number in range(1, each + 1) if each % number == 0 and each // number <= few
        )
        ways = [f"gradient_accumulation={equal}", f"batch_size={few * parts * size}"]
    if config.amp is False:
        ways += ["amp=true"]
    if config.strategy == "ddp" and config.world_size > 1:
        ways += [
            "strategy=fsdp (each worker keeps a part of weights, gradients and optimiser states,"
            " not all)"
        ]
    if config.model.name in HAVE_BLOCKS and not config.activation_checkpointing and not dp:
        ways += ["activation_checkpointing=auto"]
    return f"{now}; try {', or '.join(ways) or 'a smaller model'}"


def lost_peers(error: BaseException, worker: Worker) -> str | None:
    """What to tell a person where a collective failed because other workers are gone; else None.

    torch raises a RuntimeError for it, whose text comes from gloo or nccl.
    """
    cause = error.__cause__ or error  # expt.diagnosis may have put it in other words
    first = str(cause).strip().splitlines()[:1]
    if (
        not isinstance(cause, RuntimeError)
        or not first
        or not any(text in str(cause) for text in LOST)
    ):
        return None
    who = f"rank {worker.rank} of {worker.world_size} on {socket.gethostname()}"
    return f"{who} has lost the other workers: one has died, or the network is cut. ({first[0]})"


SHOWN_INDICES = 3
MEND = "try a lower optimizer.lr or gradient_clip=1.0; on_nan=skip leaves such a step out"


def mend_of(config: RunConfig) -> str:
    """What to try; numbers of a table that are predicted as they are may be far too large for any
    usual rate.
    """
    dataset = config.dataset
    large = (
        dataset.has_rows and not dataset.standardise_targets and config.task.TARGETS == "numbers"
    )
    return MEND.replace("try ", "try dataset.standardise_targets=true, ") if large else MEND


def stop_at_loss(
    sums: Sums, position: Position, loader: Loader, worker: Worker, mend: str = MEND
) -> None:
    """Raise Diverged with the first step, rank and samples whose loss was not finite since the last
    log point.

    DataError where it is the samples that are not. A collective, which every worker must join.
    """
    found = sums.first_not_finite()
    mine: tuple[int, int, float, list[int], str] | None = None
    if found is not None:
        ago = found[0]
        number = position.step_in_epoch - ago - 1
        indices = loader.indices(position.epoch, number).tolist()
        mine = (
            position.step - ago,
            worker.rank,
            found[1],
            indices,
            _bad_samples(loader, position.epoch, number),
        )
    everyones = [theirs for theirs in collectives.gather_across_workers(mine) if theirs is not None]
    if not everyones:
        raise Diverged(
            f"the loss was nan or infinite by step {position.step} (epoch {position.epoch}); {mend}"
        )
    step, rank, loss, indices, bad = min(everyones)
    if bad:
        raise DataError(
            f"the loss was {loss} at step {step} (epoch {position.epoch}) on rank {rank}, for"
            f" {bad}; mend it, or leave such samples out"
        )
    if rank == worker.rank:
        print(
            f"samples of step {step}, rank {rank}: {_listed(indices, len(indices))}",
            file=sys.stderr,
        )
    raise Diverged(
        f"the loss was {loss} at step {step} (epoch {position.epoch}) on rank {rank}; {mend}\n"
        f"the samples there, by their place in the training data: {_listed(indices, SHOWN_INDICES)}"
    )


def _bad_samples(loader: Loader, epoch: int, number: int) -> str:
    """Which of this worker's samples in an epoch's batch are not finite, and where; empty where
    that is no news.

    A model may know what to make of nan, as of a target that nobody knows: then the batch before
    has some, too."""
    if isinstance(loader, IterableLoader):  # which would have to be read from its beginning
        return ""
    with contextlib.suppress(Exception):  # what is read once more, only to say more
        usual = _not_finite(loader, epoch, number - 1) if number else {}
        found = _not_finite(loader, epoch, number)
        return next((told for name, told in found.items() if name not in usual), "")
    return ""


@torch.no_grad()
def _not_finite(loader: Loader, epoch: int, number: int) -> dict[str, str]:
    """By its name each tensor of the batch that holds what is not finite, and in words where it
    does.
    """
    batch, indices = next(loader.epoch(epoch, skip=number)), loader.indices(epoch, number)
    told = {}
    for name, tensor in (
        *named_leaves(batch.inputs, "inputs"),
        *named_leaves(batch.targets, "targets"),
    ):
        if tensor.dtype.is_floating_point and len(bad := (~tensor.isfinite()).nonzero()):
            rows = [int(indices[row]) for row in bad[:, 0].unique().tolist()]
            column = f", column {int(bad[0, 1])}," if tensor.dim() == 2 else ""
            samples = (
                f"the training sample{'s' if len(rows) > 1 else ''}"
                f" {_listed(rows, SHOWN_INDICES, '')}"
            )
            told[name] = (
                f"{name}{column} of {samples} hold{'s' * bool(column)}"
                f" {tensor[tuple(bad[0])].item()}"
            )
    return told


@torch.no_grad()
def refuse_weights(module: nn.Module, position: Position, mend: str = MEND) -> None:
    """Raise Diverged if a parameter is not finite. Waits for the device; alike on all workers."""
    if not is_finite(p for p in module.parameters() if p.is_floating_point() or p.is_complex()):
        raise Diverged(
            f"the weights are not finite after step {position.step} (epoch {position.epoch});"
            f" {mend}"
        )


def _listed(indices: Sequence[int], most: int, where: str = ", in its log") -> str:
    more = f" and {len(indices) - most} more{where}" if len(indices) > most else ""
    return ", ".join(map(str, indices[:most])) + more
