"""What a worker process runs: its surroundings, the training, and a word about its end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import Store, TCPStore

from expt import signals
from expt.config import secrets
from expt.config.constraints import plain
from expt.config.schema import RunConfig
from expt.errors import ConfigError, TimedOut, first_line
from expt.machine import is_simulated
from expt.runs.attempt import write_error
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation, Meeting, Preflight
from expt.training import collectives, patches
from expt.training.collectives import Worker
from expt.worker import evaluation, watchdog
from expt.worker.diagnosis import in_words
from expt.worker.run import Run


def main(
    config: RunConfig,
    paths: RunPaths,
    started: float,
    source: Path | None = None,
    meeting: Meeting | Store | None = None,
    instead: Evaluation | Preflight | None = None,
    until_epoch: int | None = None,
    tell: Callable[[Exception], None] = lambda error: None,
) -> str:
    """What a worker process runs; `started` is when the command was typed [by time.monotonic].

    `source` is the checkpoint that it goes on from, see expt.runs.resume. The workers find one
    another at the `meeting`. `tell` hears of what ends this worker, before it does. Nothing is
    trained where something is done `instead`. The run pauses after `until_epoch`.

    Returns "completed", "paused", or "interrupted" when it was asked to stop: a process that ends
    without has failed."""
    signals.heed_in_worker()
    secrets.remember(config.secrets, plain(config))
    watchdog.answer_dumps(when_asked=signals.is_driven())
    try:
        guard: watchdog.Watchdog = watchdog.Watchdog(
            _patience_s(config), lambda: _give_up(config, guard.beats, tell)
        )
        worker = worker_of_environment(config)
        return run_as(
            worker, config, paths, started, source, meeting, guard.beat, instead, until_epoch
        )
    except Exception as error:
        _fail(in_words(error, config), tell)


def _patience_s(config: RunConfig) -> float:
    """Longer than `timeout_s` where there are others: who waits for one that is stuck is to say so
    first.

    Under NCCL nobody can: it would end the process.
    """
    return config.timeout_s + (5 if config.world_size > 1 and config.backend == "gloo" else 0)


def _give_up(config: RunConfig, beats: int, tell: Callable[[Exception], None]) -> NoReturn:
    """End this process, whose main thread is stuck."""
    faulthandler.dump_traceback(all_threads=True)
    where = watchdog.main_stack().rstrip()
    text = f"finished no step within {config.timeout_s:g} s (timeout_s); it was here\n\n{where}\n"
    _fail(TimedOut(text, beats=beats), tell)


def _fail(error: Exception, tell: Callable[[Exception], None]) -> NoReturn:
    """Leave `error` for the driver and in the log, and end this process."""
    # At once and without leaving the group: the peers' errors, which follow from that, then bear a
    # later time.
    with contextlib.suppress(OSError):  # a full disk, maybe
        _record_error(error)
    with contextlib.suppress(OSError):
        print(secrets.hidden("".join(traceback.format_exception(error))), file=sys.stderr)
        tell(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(getattr(error, "exit_code", 1))


def worker_of_environment(config: RunConfig) -> Worker:
    """The worker that RANK and its companions in the environment describe."""
    # expt's driver has named the run's GPUs in CUDA_VISIBLE_DEVICES; another launcher shows all of
    # the machine's.
    gpus = range(config.num_gpus) if signals.is_driven() else config.gpu_indices
    return collectives.worker_from(os.environ, gpus=() if is_simulated() else gpus)


def require(gpus: Sequence[int]) -> None:
    """Raise ConfigError where torch can't use one of these `gpus`: the run is not to train on the
    CPU instead.
    """
    os.environ.setdefault(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
    )  # nvidia-smi's, and not the fastest first
    shown = f"gpus=[{','.join(map(str, gpus))}]"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter where it is built without CUDA
        reason = first_line(error).rstrip(".")
        mend = "`expt doctor` says more; mend that, or train with gpus=0"
        raise ConfigError(f"{shown}: torch cannot use CUDA here: {reason}; {mend}") from error
    have = torch.cuda.device_count()
    if max(gpus) >= have:
        raise ConfigError(
            f"{shown}: CUDA shows this process {have} of them, counted from 0; use gpus={have}"
        )


def run_as(
    worker: Worker,
    config: RunConfig,
    paths: RunPaths,
    started: float,
    source: Path | None = None,
    meeting: Meeting | Store | None = None,
    beat: Callable[[], None] = lambda: None,
    instead: Evaluation | Preflight | None = None,
    until_epoch: int | None = None,
) -> str:
    """Train or evaluate as `worker`, in this process; returns what became of it.

    Calls `beat` with each batch.
    """
    if config.patches.malloc and worker.device.type == "cpu":
        # What fsdp gathers is of many sizes: kept when freed, it would fill the memory that the
        # sharding saves.
        patches.give_back_freed() if config.is_sharded else patches.keep_freed()
    torch.set_num_threads(config.threads)
    if worker.gpus:
        require(worker.gpus)
    set_precision(config.matmul_precision)
    store = connect(meeting, config.timeout_s) if isinstance(meeting, Meeting) else meeting
    with collectives.process_group(
        worker,
        backend=config.backend,
        timeout_s=config.timeout_s,
        store=store,
        ends_with_process=signals.is_driven(),
    ):
        beat()
        if isinstance(instead, Evaluation):
            return evaluation.measure_weights(instead, config, paths, worker, beat)
        if isinstance(instead, Preflight):
            return evaluation.time_steps(
                instead, config, paths, worker, typed_at=started, beat=beat
            )
        goes_on = source is not None
        run = Run(
            config,
            paths,
            worker,
            typed_at=started,
            beat=beat,
            until_epoch=until_epoch,
            goes_on=goes_on,
        )
        return run.train(source)


def connect(meeting: Meeting, timeout_s: float) -> Store:
    """Return the store at which the workers meet; the one that has the listener serves it."""
    return TCPStore(
        "127.0.0.1",
        meeting.port,
        is_master=meeting.listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Given only an address, it would listen on all of them.
        master_listen_fd=meeting.listener.detach() if meeting.listener else None,
    )


def set_precision(products: str) -> None:
    """How float32 products are computed, those of convolutions too, which torch keeps apart."""
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = products != "highest"


def _record_error(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_error(Path(path), error, getattr(error, "exit_code", 1))
