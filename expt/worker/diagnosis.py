"""Explain errors of torch, such as a lack of memory, and where a loss stopped being finite."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch import distributed as dist

from expt.config.constraints import word
from expt.config.schema import RunConfig
from expt.data.checked_samples import WITHOUT_GPU
from expt.data.loader import Loader
from expt.data.loading import Batch, named_leaves
from expt.errors import (
    ConfigError,
    DataError,
    Diverged,
    ExptError,
    Killed,
    OutOfMemory,
    RunFailed,
    TimedOut,
    counted,
    described,
    first_line,
    is_out_of_memory,
    listed,
)
from expt.runs.failure import LOST, NOTE
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.devices import held_by_others
from expt.training.learner import Position
from expt.training.precision import is_finite
from expt.worker import watchdog

HAVE_BLOCKS = ("transformer", "resnet18", "unet")
SHOWN_INDICES = 3
FIX = "try a lower optimizer.lr or gradient_clip=1.0; on_nan=skip leaves such a step out"
_CPU_MEMORY = re.compile(
    r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+)"
)


def in_words(error: Exception, config: RunConfig, *, trains: bool = True) -> Exception:
    """Return the ExptError that explains `error`, or `error` itself where none is known."""
    known = error if isinstance(error, ExptError) else _explain(error, str(error), config, trains)
    if known is None:
        _note_batch(error, config)
        return error
    if known is not error:
        known.__cause__ = error
    return known


def _note_batch(error: Exception, config: RunConfig) -> None:
    """Add the batch, the model and the task to an error of torch."""
    batch = _batch_in(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if batch is None or not hasattr(error, "add_note"):  # Python 3.10
        return
    given = (f"{name} {described(tensor)}" for name, tensor in _named_tensors(batch))
    model, task = (getattr(one, "target", one.name) for one in (config.model, config.task))
    note = f"{NOTE}{model}, task={task}, given {', '.join(given)}"
    if fix := _if_unequal(batch, config):
        note += f"; {fix}"
    error.add_note(note)


def _batch_in(frames: Iterable[FrameType]) -> Batch | None:
    """Return the first batch among the variables of calls."""
    values = (value for frame in frames for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, Batch)), None)


def _if_unequal(batch: Batch | None, config: RunConfig) -> str:
    """Return a fix where workers have unequal shares of a batch, which they might exchange."""
    size = config.world_size
    if batch is None or batch.global_size in (batch.size * size, batch.size):
        return ""
    shares = f"{batch.global_size} samples are unequal shares of {size} workers"
    return f"{shares}; if a model or a loss gathers them, use drop_last=true"


def where_stuck(config: RunConfig) -> str:
    """Return the last calls of the main thread, and a fix where it may wait for equal shares."""
    outer_first = [frame for frame, _ in traceback.walk_stack(watchdog.main_frame())][::-1]
    fix = _if_unequal(_batch_in(outer_first), config)
    return f"{watchdog.main_stack().rstrip()}\n{fix}".rstrip()


def _named_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    return [*named_leaves(batch.inputs, "inputs"), *named_leaves(batch.targets, "targets")]


def _explain(error: Exception, text: str, config: RunConfig, trains: bool) -> ExptError | None:
    if lack := _lack_of_memory(error, text):
        held = held_by_others() if is_out_of_memory(error) else ""
        return OutOfMemory(f"{lack}\n{held or _to_need_less(error, config, trains)}")
    if _is_lack_of_shared_memory(error):
        of_nccl = re.search(r".*/dev/shm.*", text)  # the last of its lines
        why = of_nccl[0] if of_nccl else getattr(error, "strerror", None) or first_line(error)
        return RunFailed(
            f"/dev/shm: {why[:200].strip()}; mount it, make it larger (such as by docker run"
            " --shm-size), or do without: dataset.num_workers=0, or NCCL_SHM_DISABLE=1 for NCCL"
        )
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:
        fix = "use drop_last=true, or a larger batch_size"
        return ConfigError(f"batch_size={config.batch_size}: {first_line(error)}; {fix}")
    if found := re.search(r"DataParallel' object has no attribute '(\w+)'", text):
        return ConfigError(
            f"model.{found[1]}: several workers average gradients of model(...) only; let its"
            " forward do this too, such as by one more argument, or use world_size=1"
        )
    if not isinstance(error, RuntimeError):
        return None
    if "not support sparse gradients" in text:
        fix = "give them SparseAdam by optimizer.groups, or leave sparse=True out of the embedding"
        return ConfigError(f"optimizer={word(config.optimizer)}: {first_line(error)}; {fix}")
    if re.match(r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal)", text):
        return Killed(
            f"a process that reads samples was killed (out of memory?): {first_line(error)}; a"
            " smaller dataset.num_workers needs less memory"
        )
    if found := re.search(r"DataLoader worker process(?s:.*)^\S*Error: (.*CUDA.*)", text, re.M):
        return RunFailed(f"dataset: {found[1]}; {WITHOUT_GPU}")
    is_distributed = isinstance(error, dist.DistError)
    if "Timed out waiting" in text or (is_distributed and re.search(r"(?i)time[d ]*out", text)):
        text = f"waited {config.timeout_s:g} s (timeout_s) for another worker, which did not come"
        if config.is_sharded:
            text += f"; with strategy={config.strategy} all must call the same layers in each step"
        return TimedOut(text)
    return None


def _lack_of_memory(error: Exception, text: str) -> str:
    """Return the lack of memory, of a device or the host, in words; "" for another error."""
    if is_out_of_memory(error):
        return _first_sentences(text) or "out of memory"
    if isinstance(error, MemoryError):
        return f"out of memory{f': {text}' if text else ''}"
    size = _CPU_MEMORY.search(text) if isinstance(error, RuntimeError) else None
    return f"out of memory: {int(size[1]) / 1e9:.1f} GB more were asked for" if size else ""


def _is_lack_of_shared_memory(error: Exception) -> bool:
    """Return whether torch's loader processes, their locks, or NCCL found no room in /dev/shm."""
    if isinstance(error, OSError):
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and Path(frames[-1].filename).match("multiprocessing/synchronize.py")
    # A GPU's cores have a shared memory, too: a kernel that is too large for it is another case.
    of_files = r"shared memory (object|file|segment|limit)|\bshm\b"
    return isinstance(error, RuntimeError) and bool(re.search(of_files, str(error)))


def _first_sentences(text: str) -> str:
    # The rest of CUDA's message is about the allocator.
    lines = text.splitlines()
    line = next((line for line in lines if re.search("(?i)memory|alloc", line)), text)
    return ". ".join(line.split(". ")[:3])[:400].rstrip(".")


def _to_need_less(error: Exception, config: RunConfig, trains: bool) -> str:
    """Return the settings that need less memory, by the cause of its size; see sized_by."""
    what, samples = getattr(error, "sized_by", ("batch_size", 0))
    now, ways = "", list[str]()
    if what == "data":
        return "this was while the dataset was read; try fewer samples, by dataset.train_limit"
    if what == "model":
        now = "the model takes it, whatever batch_size is"
    elif what == "eval_batch_size":
        now = f"an evaluation has {counted(samples, 'sample')} at a time (eval_batch_size)"
        if samples > 1:
            ways = [f"eval_batch_size={samples // 2}"]
    else:
        now, ways = _with_fewer_samples(config, samples)
    if what != "model" and config.amp is False:
        ways += ["amp=true"]
    if trains and config.strategy == "ddp" and config.world_size > 1:
        ways += ["strategy=fsdp (workers share weights, gradients and optimizer states)"]
    has_blocks = config.model.name in HAVE_BLOCKS and config.strategy != "dp"
    if what == "batch_size" and has_blocks and not config.activation_checkpointing:
        ways += ["activation_checkpointing=auto"]
    if not trains and config.num_gpus:
        ways += ["gpus=0"]
    if trains and (what == "model" or not ways):
        ways += ["a smaller model"]
    return f"{now}; try {', or '.join(ways)}" if ways else now


def _with_fewer_samples(config: RunConfig, samples: int) -> tuple[str, list[str]]:
    """Return the samples that a step has at a time, in words, and ways to have fewer."""
    size, name, shares = config.world_size, "workers", 1
    if config.strategy == "dp":  # one worker shares its batch out among GPUs, maybe unequally
        size, name, shares = config.num_gpus, "GPUs", config.num_gpus
    parts, fits_itself = config.micro_batches, config.gradient_accumulation == "auto"
    each = math.ceil(config.batch_size / size)
    part = samples or math.ceil(config.batch_size / parts / size)
    now = f"batch_size={config.batch_size} is {each} samples on each of {size} {name}"
    if part != each:
        now += f", {part} at a time"
    if part == 1 or (fits_itself and part < each):
        return now, []
    few = part // 2
    share = config.batch_size // config.world_size
    equal = next(n for n in range(1, share + 1) if share % n == 0 and share / n <= few * shares)
    ways = [f"batch_size={few * parts * size}"]
    if not fits_itself:
        or_auto = " (or auto)" if config.strategy == "ddp" else ""
        ways = [f"gradient_accumulation={equal}{or_auto}", *ways]
    return now, ways


def lost_peers(error: BaseException, worker: Worker) -> str | None:
    """Return a message where a collective failed because other workers are gone; else None."""
    cause = error.__cause__ or error  # in_words may have explained it
    # torch raises a RuntimeError with the text of gloo or nccl.
    if not (isinstance(cause, RuntimeError) and any(text in str(cause) for text in LOST)):
        return None
    who = f"rank {worker.rank} of {worker.world_size} on {socket.gethostname()}"
    why = str(cause).strip().splitlines()[0]
    return f"{who} has lost the other workers: one has died, or the network is cut. ({why})"


def fix_for(config: RunConfig) -> str:
    """Return the fix; targets of a table may be too large for any usual learning rate."""
    in_units = not getattr(config.dataset, "standardise_targets", True)
    is_large = in_units and config.task.takes.has_unit
    return FIX.replace("try ", "try dataset.standardise_targets=true, ") if is_large else FIX


def stop_at_loss(
    sums: Sums, position: Position, loader: Loader, worker: Worker, fix: str = FIX
) -> None:
    """Raise Diverged, or DataError, where a loss was not finite first; a collective."""
    found = sums.first_not_finite()
    mine: tuple[int, int, float, list[int], str] | None = None
    if found is not None:
        ago = found[0]
        number = position.step_in_epoch - ago - 1
        indices = loader.indices(position.epoch, number).tolist()
        bad = _bad_samples(loader, position.epoch, number)
        mine = (position.step - ago, worker.rank, found[1], indices, bad)
    everyones = [theirs for theirs in collectives.gather_across_workers(mine) if theirs is not None]
    epoch = f"(epoch {position.epoch})"
    if not everyones:
        raise Diverged(f"the loss was nan or infinite by step {position.step} {epoch}; {fix}")
    step, rank, loss, indices, bad = min(everyones)
    where = f"the loss was {loss} at step {step} {epoch} on rank {rank}"
    if rank == worker.rank:
        every = ", ".join(map(str, indices))
        print(f"samples of step {step}, rank {rank}: {every}", file=sys.stderr)
    if bad:
        raise DataError(f"{where}, for {bad}; fix it, or leave such samples out")
    raise Diverged(
        f"{where}; {fix}\nthe samples there, all of them in its log, by their place in the"
        f" training data: {listed(map(str, indices), SHOWN_INDICES)}"
    )


def _bad_samples(loader: Loader, epoch: int, number: int) -> str:
    """Return which of this worker's samples in a batch are not finite, and where.

    Empty where the batch before has some, too: the model may expect them, such as unknown targets.
    """
    if loader.is_stream:  # it would be read from its begin
        return ""
    with contextlib.suppress(Exception):  # reading once more may fail, and only says more
        usual = _not_finite(loader, epoch, number - 1) if number else {}
        found = _not_finite(loader, epoch, number)
        return next((where for name, where in found.items() if name not in usual), "")
    return ""


@torch.no_grad()
def _not_finite(loader: Loader, epoch: int, number: int) -> dict[str, str]:
    """Return the tensors of a batch that are not finite by name, with a message where."""
    batch = next(loader.epoch(epoch, skip=number))
    indices = loader.indices(epoch, number).tolist()
    found = {}
    for name, tensor in _named_tensors(batch):
        if tensor.dtype.is_floating_point and len(bad := (~tensor.isfinite()).nonzero()):
            rows, batch_of = indices, "batch of the "
            if loader.keeps_order:
                rows, batch_of = [indices[row] for row in bad[:, 0].unique().tolist()], ""
            column = f", column {int(bad[0, 1])}," if tensor.dim() == 2 else ""
            places = listed(map(str, rows), SHOWN_INDICES)
            samples = f"{batch_of}training {'samples' if len(rows) > 1 else 'sample'} {places}"
            value = tensor[tuple(bad[0])].item()
            holds = "holds" if column else "hold"
            found[name] = f"{name}{column} of the {samples} {holds} {value}"
    return found


@torch.no_grad()
def refuse_weights(module: nn.Module, position: Position, fix: str = FIX) -> None:
    """Raise Diverged if a parameter is not finite; waits for the device."""
    if not is_finite(p for p in module.parameters() if p.is_floating_point() or p.is_complex()):
        where = f"after step {position.step} (epoch {position.epoch})"
        raise Diverged(f"the weights are not finite {where}; {fix}")
