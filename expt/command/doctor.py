"""`python -m expt doctor`: what a run needs of this machine, tried out one by one, each with the
mend.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expt import machine
from expt.command.words import Parser
from expt.errors import ConfigError, ExptError, RunFailed, first_line
from expt.launch import forkserver, processes
from expt.runs import provenance
from expt.runs.result import read_result

if TYPE_CHECKING:
    from expt.data.kinds.originals import Downloaded

GIB = 2**30
ENOUGH_MEMORY = 2 * GIB
ENOUGH_DISK = GIB
ENOUGH_SHARED_MEMORY = 64 * 2**20
_DOWNLOADED: tuple[Literal["mnist", "fashion_mnist", "cifar10", "cifar100"], ...]
_DOWNLOADED = ("mnist", "fashion_mnist", "cifar10", "cifar100")
_QUICK = (
    *("world_size=2", "epochs=1", "max_steps=2", "dataset.train_limit=256", "timeout_s=60"),
    *("tensorboard.images=false", "tensorboard.graph=false", "tensorboard.norms=false"),
)
_REINSTALL = (
    "install both from one index, their builds must match: pip install --force-reinstall torch"
    " torchvision"
)
_STYLES = {"pass": "green", "fail": "bold red", "note": "dim"}


@dataclass(frozen=True)
class Finding:
    """What became of one check; a `note` is about what no run must have."""

    outcome: Literal["pass", "fail", "note"]
    what: str
    found: str
    mend: str = ""


def main(words: Sequence[str]) -> int:
    """Print every finding as it comes; 0 if nothing failed, else 1."""
    parser = Parser(
        "doctor",
        "Try what a run needs of this machine, piece by piece, and name the mend of what fails.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="dataset.root=FOLDER", help="where to look for data"
    )
    found = parser.parse_args(list(words)).words
    unknown = [word for word in found if not word.startswith("dataset.root=")]
    if unknown:
        raise ConfigError(f"doctor {unknown[0]}: takes no such word; it takes dataset.root=FOLDER")
    forkserver.warm(forkserver.SWEEP_MODULES)
    root = found[-1].partition("=")[2] if found else None
    console, failed = Console(), 0
    for finding in _findings(root):
        failed += finding.outcome == "fail"
        _show(console, finding)
    console.print(
        f"\n{failed} failed" if failed else "\nthis machine can train",
        style="bold",
        highlight=False,
    )
    return 1 if failed else 0


def _show(console: Console, finding: Finding) -> None:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=4)
    line.add_column(width=13)
    line.add_column(overflow="fold")
    line.add_row(Text(finding.outcome, _STYLES[finding.outcome]), finding.what, Text(finding.found))
    if finding.mend:
        line.add_row("", "", Text(f"mend: {finding.mend}", "yellow"))
    console.print(line)


def _findings(root: str | None) -> Iterator[Finding]:
    versions = provenance.versions()
    yield Finding("pass", "python", f"{versions['python']}, expt {versions['expt']}")
    yield _memory()
    yield _shared_memory()
    yield _disk(Path("outputs") if Path("outputs").is_dir() else Path.cwd())
    told = _told_by_another_process()
    torch = next(told)
    yield torch
    if torch.outcome == "fail":
        return  # all that follows needs it
    trained = [two_workers("gpus=0")]  # while that process imports torchvision
    if len(machine.visible_gpus()) > 1:
        trained.append(two_workers("gpus=2"))
    yield from told
    yield from _datasets(root)
    yield from trained


def _told_by_another_process() -> Iterator[Finding]:
    """What needs torch: found by a child of the forkserver, which has imported it, where this
    process need not.
    """
    try:
        (found,) = processes.call_each("expt.command.doctor:_of_torch", [()])
    except RunFailed as error:  # torch's import, or its use, has ended the process
        yield Finding("fail", "torch", str(error), _REINSTALL)
    else:
        yield from found


def _of_torch() -> list[Finding]:
    torch = _package("torch")
    return [torch] if torch.outcome == "fail" else [torch, *_gpus(), _package("torchvision")]


def _package(name: str) -> Finding:
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises
        return Finding("fail", name, f"{type(error).__name__}: {error}", _REINSTALL)
    return Finding("pass", name, metadata.version(name))


def _memory() -> Finding:
    free = machine.available_memory()
    found = f"{machine.usable_cpus()} cores, {free / GIB:.1f} GiB of memory free"
    if free < ENOUGH_MEMORY:
        return Finding(
            "fail", "CPU", found, "end other programs; torch and two workers take about 1 GiB"
        )
    return Finding("pass", "CPU", found)


def _shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    what = str(folder)
    if not os.access(folder, os.W_OK):
        return Finding(
            "fail", what, "cannot be written to", f"mount it: mount -t tmpfs shm {folder}"
        )
    free = shutil.disk_usage(folder).free
    if free < ENOUGH_SHARED_MEMORY:
        return Finding(
            "fail",
            what,
            f"{free / 2**20:.0f} MiB free",
            "enlarge it, as in docker run --shm-size=1g",
        )
    return Finding("pass", what, f"{free / GIB:.1f} GiB free")


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding(
            "fail",
            "disk",
            f"{folder.absolute()} cannot be written to",
            "cd to a folder of your own",
        )
    if free < ENOUGH_DISK:
        mend = "make room: remove runs below outputs, or their checkpoints"
        return Finding("fail", "disk", f"{free / GIB:.1f} GiB free below {folder.absolute()}", mend)
    return Finding("pass", "disk", f"{free / GIB:.0f} GiB free below {folder.absolute()}")


def _gpus() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    backends = [
        name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)
    ]
    found, mend = (
        ", ".join(backends) or "none",
        "install another build of torch: this one has no gloo",
    )
    yield (
        Finding("pass", "backends", found)
        if "gloo" in backends
        else Finding("fail", "backends", found, mend)
    )
    seen = machine.visible_gpus()
    if not seen:
        yield Finding("note", "GPUs", "none; runs use the CPU")
    elif not torch.cuda.is_available():
        built = (
            f"this torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "this torch has no CUDA"
        )
        mend = "install the torch of your driver's CUDA (nvidia-smi names it), or train with gpus=0"
        yield Finding("fail", "GPUs", f"{len(seen)} in the machine, but {built}", mend)
    else:
        yield from map(_gpu, range(torch.cuda.device_count()))
        yield _mps()


def _mps() -> Finding:
    """What becomes of several runs on one GPU."""
    if machine.mps_runs():
        return Finding(
            "pass",
            "MPS",
            "its daemon runs: runs that share a GPU (runs_per_gpu) compute at the same time",
        )
    found = "no daemon is seen: runs that share a GPU (runs_per_gpu) take turns"
    return Finding("note", "MPS", found, f"if that is to change: {machine.MPS_DAEMON} -d")


def _gpu(index: int) -> Finding:
    import torch

    what = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # CUDA's first call on this device
        return Finding(
            "fail", what, first_line(error), "see nvidia-smi; take others, as in 'gpus=[1]'"
        )
    found = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    if free < total / 2:
        return Finding(
            "note",
            what,
            found,
            "another program holds the rest, see nvidia-smi; or take others: gpus=[1]",
        )
    return Finding("pass", what, found)


def _datasets(root: str | None) -> Iterator[Finding]:
    from expt.data.kinds.originals import Downloaded

    yield Finding("pass", "digits", "come with expt")
    missing = []
    for name in _DOWNLOADED:
        plain = Downloaded(
            name=name,
            root=root,
            download=False,
            val_fraction=0.0,
            train_limit=None,
            mean=None,
            std=None,
        )
        folder = plain.folder()
        if folder is None:
            missing.append(name)
        else:
            yield _checked(plain, folder)
    if missing:
        how = "downloaded when first used; or say where they are: dataset.root=FOLDER"
        yield Finding("note", "datasets", f"not here: {', '.join(missing)}; {how}")


def _checked(dataset: Downloaded, folder: Path) -> Finding:
    try:
        dataset.fingerprint()
    except ConfigError as error:
        return Finding(
            "fail", dataset.name, str(error), "say where its own files are: dataset.root=FOLDER"
        )
    return Finding("pass", dataset.name, str(folder))


def two_workers(*words: str) -> Finding:
    """Let them train for a moment, on the devices that `words` ask for."""
    from expt.command.invoke import command  # late: Hydra
    from expt.command.words import Options

    what = "workers"
    with tempfile.TemporaryDirectory() as folder:
        settings = [*words, *_QUICK, f"hydra.run.dir={folder}/run"]
        try:
            (paths,) = command(
                Options(settings, quiet=True), typed_at=time.monotonic(), may_sweep=False
            )
            result = read_result(paths)
        except ExptError as error:
            mend = (
                "read the error; if they waited in vain: may programs here talk to each other over"
                " 127.0.0.1?"
            )
            return Finding("fail", what, f"two cannot train together: {error}", mend)
    backend, seconds = result["backend"], result["first_step_s"]
    return Finding(
        "pass", what, f"two trained together over {backend}, {seconds:.1f} s to their first step"
    )
