"""`expt doctor`: try the parts of this machine that a run needs, and name fixes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from expt import gpus, machine
from expt.command import terminal
from expt.command.words import Parser
from expt.config.groups import GROUPS
from expt.errors import ConfigError, ExptError, RunFailed, first_line
from expt.launch import forkserver, processes
from expt.runs import provenance
from expt.runs.result import read_result
from expt.runs.view.text import Console

GIB = 2**30
ENOUGH_MEMORY = 2 * GIB
ENOUGH_DISK = GIB
ENOUGH_SHARED_MEMORY = 64 * 2**20
SLOW_THREADS = 1.5
_QUICK = (
    *("world_size=2", "max_steps=2", "dataset.train_limit=256", "timeout_s=60"),
    *("tensorboard.images=false", "tensorboard.norms=false"),
)
_REINSTALL = (
    "install both from one index, their builds must match: pip install --force-reinstall torch"
    " torchvision"
)
_STYLES = {"pass": "green", "fail": "bold red", "note": "dim"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; a `note` is about a part that no run needs."""

    outcome: Literal["pass", "fail", "note"]
    what: str
    found: str
    fix: str = ""


def main(words: Sequence[str]) -> int:
    """Print each finding as it comes; return 0 if nothing failed, else 1."""
    about = "Test what a run needs of this machine, and name the fix for what fails."
    parser, root = Parser("doctor", about), "dataset.root=FOLDER"
    parser.add_argument("words", nargs="*", metavar=root, help="where to look for data")
    found = parser.parse_args(words).words
    if unknown := [word for word in found if not word.startswith("dataset.root=")]:
        raise ConfigError(f"doctor {unknown[0]}: no such option; use dataset.root=FOLDER")
    roots = [os.path.expanduser(word.partition("=")[2]) for word in found]
    if missing := [root for root in roots if not os.path.isdir(root)]:
        raise ConfigError(f"dataset.root={missing[0]}: there is no such folder")
    forkserver.warm(forkserver.SWEEP_MODULES)
    console, failed, findings = Console(wraps=True), 0, list[dict[str, str]]()
    for finding in _findings(roots[-1] if roots else None):
        failed += finding.outcome == "fail"
        findings.append(dataclasses.asdict(finding))
        terminal.put(findings=findings)
        _show(console, finding)
    text = f"{failed} failed" if failed else "this machine can train"
    console.print(f"\n{text}", style="bold", highlight=False)
    return 1 if failed else 0


def _show(console: Console, finding: Finding) -> None:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=4)
    line.add_column(width=13)
    line.add_column(overflow="fold")
    line.add_row(Text(finding.outcome, _STYLES[finding.outcome]), finding.what, Text(finding.found))
    if finding.fix:
        line.add_row("", "", Text(f"fix: {finding.fix}", "yellow"))
    console.print(line)


def _findings(root: str | None) -> Iterator[Finding]:
    versions = provenance.versions()
    yield Finding("pass", "python", f"{versions['python']}, expt {versions['expt']}")
    free = machine.available_memory()
    found = f"{machine.usable_cpus()} cores, {free / GIB:.1f} GiB of memory free"
    if machine.slow_in_bfloat16():
        found += "; no arithmetic in bfloat16, so amp=true is slow"
    fix = "end other programs; torch and two workers take about 1 GiB"
    yield _pass_or_fail("CPU", free >= ENOUGH_MEMORY, found, fix)
    fix = "mount a larger one, e.g. docker run --shm-size=1g"
    yield _room("/dev/shm", Path("/dev/shm"), ENOUGH_SHARED_MEMORY, fix)
    outputs = Path("outputs") if Path("outputs").is_dir() else Path.cwd()
    fix = "remove runs below outputs, or their checkpoints; or cd to another folder"
    yield _room("disk", outputs.absolute(), ENOUGH_DISK, fix)
    of_torch = _in_another_process()
    torch = next(of_torch)
    yield torch
    if torch.outcome == "fail":
        return  # all that follows needs it
    yield from of_torch
    yield from _datasets(root)
    yield two_workers("gpus=0")
    if len(gpus.visible().gpus) > 1:
        yield two_workers("gpus=2")


def _in_another_process() -> Iterator[Finding]:
    """Yield the findings of torch, which the forkserver has imported and this process need not."""
    try:
        (found,) = processes.call_each("expt.command.doctor:_of_torch", [()])
    except RunFailed as error:  # torch's import, or its use, has ended the process
        yield Finding("fail", "torch", str(error), _REINSTALL)
    else:
        yield from found


def _of_torch() -> list[Finding]:
    torch = _package("torch")
    if torch.outcome == "fail":
        return [torch]
    return [torch, _threads(), *_gpus(), _package("torchvision")]


def _threads() -> Finding:
    """Compare small operations on all cores with those on one, on which nothing has to meet."""
    import torch

    cores = machine.usable_cpus()
    inputs, weights, seconds = torch.ones(64, 512), torch.ones(512, 512), dict[int, float]()
    for number in (1, cores, 1, cores):  # the first of each warms up
        torch.set_num_threads(number)
        began = time.perf_counter()
        for _ in range(200):
            torch.relu(inputs @ weights)
        seconds[number] = time.perf_counter() - began
    ratio = seconds[cores] / seconds[1]
    found = f"small operations take {ratio:.2f} times as long on {cores} threads as on one"
    if ratio < SLOW_THREADS:
        return Finding("pass", "threads", found)
    fix = "other programs take the cores: end them, or train small models with threads=1"
    return Finding("note", "threads", found, fix)


def _package(name: str) -> Finding:
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises
        return Finding("fail", name, f"{type(error).__name__}: {error}", _REINSTALL)
    return Finding("pass", name, metadata.version(name))


def _pass_or_fail(what: str, passes: bool, found: str, fix: str) -> Finding:
    return Finding("pass" if passes else "fail", what, found, "" if passes else fix)


def _room(what: str, folder: Path, enough: int, fix: str) -> Finding:
    if not os.access(folder, os.W_OK):
        return Finding("fail", what, f"{folder} cannot be written to", fix)
    free = shutil.disk_usage(folder).free
    return _pass_or_fail(what, free >= enough, f"{free / GIB:.1f} GiB free in {folder}", fix)


def _gpus() -> Iterator[Finding]:
    import torch

    if not (seen := gpus.visible().gpus):
        yield Finding("note", "GPUs", f"{machine.detect().hidden or 'none'}; runs use the CPU")
        return
    if not torch.cuda.is_available():
        found = f"{len(seen)} in the machine, but this torch is built for CUDA {torch.version.cuda}"
        fix = "install the torch of your driver's CUDA (nvidia-smi names it), or train with gpus=0"
        yield Finding("fail", "GPUs", found, fix)
        return
    yield from _each_gpu(seen)
    yield _mps()


def _mps() -> Finding:
    if gpus.mps_runs():
        return Finding("pass", "MPS", "its daemon runs: runs_per_gpu runs compute at once")
    found = "no daemon is seen: runs that share a GPU (runs_per_gpu) take turns"
    return Finding("note", "MPS", found, f"to let them run at the same time: {gpus.MPS_DAEMON} -d")


def _each_gpu(seen: Sequence[str]) -> Iterator[Finding]:
    import torch

    faults, rooms = dict[int, str](), dict[int, tuple[int, int]]()
    for index in range(len(seen)):
        try:
            rooms[index] = torch.cuda.mem_get_info(index)
        except RuntimeError as error:  # CUDA's first call on this device
            faults[index] = first_line(error)
    usable = [index for index, (free, total) in rooms.items() if free >= total / 2]
    fix = f"see nvidia-smi; take others: {gpus.setting(usable)}"
    for index, name in enumerate(seen):
        what, uuid = f"GPU {index}", gpus.gpu_uuid(name)
        if index in faults:
            yield Finding("fail", what, f"{uuid}: {faults[index]}", fix)
            continue
        room = "{:.0f} of {:.0f} GiB".format(*(size / GIB for size in rooms[index]))
        found = f"{uuid}: {torch.cuda.get_device_name(index)}, {room} free"
        if index in usable:
            yield Finding("pass", what, found)
        else:
            yield Finding("note", what, found, f"another program holds the rest, {fix}")


def _datasets(root: str | None) -> Iterator[Finding]:
    from expt.data.kinds.originals import Downloaded

    missing = []
    of_all: Any = {"root": root, "download": False, "val_fraction": 0.0}
    of_all |= dict.fromkeys(("train_limit", "mean", "std"))
    for name, kind in GROUPS["dataset"].items():
        if kind is not Downloaded:
            continue
        dataset = kind(**{**of_all, "name": name})
        if (folder := dataset.folder()) is None:
            missing.append(name)
            continue
        try:
            dataset.fingerprint()
        except ConfigError as error:
            fix = "name the folder of its own files: dataset.root=FOLDER"
            yield Finding("fail", name, str(error), fix)
        else:
            yield Finding("pass", name, str(folder))
    if missing:
        how = "downloaded when first used; or name their folder: dataset.root=FOLDER"
        yield Finding("note", "datasets", f"not here: {', '.join(missing)}; {how}")


def two_workers(*words: str) -> Finding:
    """Train two workers for a moment, on the devices that `words` ask for."""
    from expt.command.invoke import command  # late: Hydra
    from expt.command.words import Options

    with tempfile.TemporaryDirectory() as folder:
        options = Options([*words, *_QUICK, f"hydra.run.dir={folder}/run"], quiet=True)
        try:
            (paths,) = command(
                options, typed_at=time.monotonic(), may_sweep=False, from_python=True
            )
            result = read_result(paths)
        except ExptError as error:
            fix = "read the error; if they waited in vain: is 127.0.0.1 closed to programs here?"
            return Finding("fail", "workers", f"two cannot train together: {error}", fix)
    seconds = f"{result['first_step_s']:.1f} s to their first step"
    found = f"two trained together over {result['backend']}, {seconds}"
    return Finding("pass", "workers", found)
