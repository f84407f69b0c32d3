"""The entry point of a worker process: set up torch, train, and report how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import Store, TCPStore

from expt import progress, signals
from expt.config import secrets
from expt.config.constraints import plain
from expt.config.schema import RunConfig
from expt.errors import TimedOut
from expt.gpus import is_simulated
from expt.runs.failure import write_error
from expt.runs.request import Evaluation, Meeting, RunRequest
from expt.training import collectives, devices, patches, random_state
from expt.training.collectives import Worker
from expt.training.precision import precision_kept, set_precision
from expt.worker import evaluation, timing, watchdog
from expt.worker.diagnosis import in_words, where_stuck
from expt.worker.run import Run


def main(
    request: RunRequest,
    source: Path | None = None,
    meeting: Meeting | Store | None = None,
    report: Callable[[Exception], None] = lambda error: None,
) -> str:
    """Run a worker, and return "completed", "pruned" or "interrupted".

    `source` is the checkpoint to begin from. A process that ends without returning has failed;
    `report` gets the error before.
    """
    config = request.config
    signals.heed_in_worker()
    secrets.remember(config.secrets, plain(config))
    watchdog.answer_dumps(when_asked=signals.is_driven())
    try:
        guard: watchdog.Watchdog = watchdog.Watchdog(
            _patience_s(config), lambda: _give_up(config, guard.beats, report)
        )
        worker = dataclasses.replace(worker_of_environment(config), beat=guard.beat)
        with progress.reported(print) if worker.rank == 0 else contextlib.nullcontext():
            return run_as(worker, request, source, meeting)
    except Exception as error:
        trains = not isinstance(request.instead, Evaluation)
        _fail(in_words(error, config, trains=trains), report)


def _patience_s(config: RunConfig) -> float:
    # With gloo a worker that waits for a stuck one should fail first. NCCL would end the process.
    return config.timeout_s + (5 if config.world_size > 1 and config.backend == "gloo" else 0)


def _give_up(config: RunConfig, beats: int, report: Callable[[Exception], None]) -> NoReturn:
    """End this process, because its main thread is stuck."""
    faulthandler.dump_traceback(all_threads=True)
    where = where_stuck(config)
    text = f"finished no step within {config.timeout_s:g} s (timeout_s); it was here\n\n{where}\n"
    _fail(TimedOut(text, progress=(patches.collectives_begun(), beats)), report)


def _fail(error: Exception, report: Callable[[Exception], None]) -> NoReturn:
    """Leave `error` for the driver and in the log, and end this process."""
    # Without leaving the process group: the peers' errors, which follow, then have a later time.
    with contextlib.suppress(OSError):  # a full disk, maybe
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            write_error(Path(path), error)
    with contextlib.suppress(OSError):
        print(secrets.hidden("".join(traceback.format_exception(error))), file=sys.stderr)
        report(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(getattr(error, "exit_code", 1))


def worker_of_environment(config: RunConfig) -> Worker:
    """Return the worker that RANK, WORLD_SIZE and so on describe."""
    # expt's driver sets CUDA_VISIBLE_DEVICES; another launcher shows all GPUs of the machine.
    gpus = range(config.num_gpus) if signals.is_driven() else config.gpu_indices
    return collectives.worker_from(os.environ, gpus=() if is_simulated() else gpus)


def run_as(
    worker: Worker,
    request: RunRequest,
    source: Path | None = None,
    meeting: Meeting | Store | None = None,
) -> str:
    """Train or evaluate as `worker`, and return the status."""
    config = request.config
    if config.patches.malloc and worker.device.type == "cpu":
        # FSDP gathers tensors of many sizes: kept when freed, they would fill memory.
        patches.give_back_freed() if config.is_sharded else patches.keep_freed()
    torch.set_num_threads(config.threads)
    gpus = worker.gpus
    if gpus and config.strategy != "dp":
        gpus = (worker.device.index,)
    set_precision(config.matmul_precision)
    store = connect(meeting, config.timeout_s) if isinstance(meeting, Meeting) else meeting
    group = collectives.process_group(
        worker,
        backend=config.backend,
        timeout_s=config.timeout_s,
        store=store,
        ends_with_process=signals.is_driven(),
    )
    anomalies = config.detect_anomaly or torch.is_anomaly_enabled()
    run: Run | None = None
    used = devices.in_use(gpus, lambda: run is not None and run.steps.first_s is not None)
    with used, group, torch.autograd.set_detect_anomaly(anomalies):
        worker.beat()
        if isinstance(request.instead, Evaluation):
            return evaluation.measure_weights(request.instead, request, worker)
        if request.instead == "preflight":
            return timing.time_steps(request, worker)
        run = Run(request, worker, resumes=source is not None)
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


@contextlib.contextmanager
def torch_kept(device: torch.device) -> Iterator[None]:
    """Restore torch's state and random numbers after the body, in a caller's process."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    try:
        with random_state.kept(device), precision_kept():
            yield
    finally:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(gpu)
        if deterministic != torch.get_deterministic_debug_mode():
            torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == 1)
