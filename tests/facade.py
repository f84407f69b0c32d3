"""The façade of the tests: settings, commands, requests, and what a run leaves behind."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expt.command.rerun import NOT_REPEATED
from expt.config.identity import VERSION, Content, Identity, shown
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.machine import Machine
from expt.runs import continuing, lineage
from expt.runs.attempt import Attempt
from expt.runs.may_continue import Source
from expt.runs.metrics_file import MetricsWriter
from expt.runs.named_checkpoint import read
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from tests import warm
from tests.composing import composed

if TYPE_CHECKING:
    from expt.data.build import Data


Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
TIMEOUT_S = 100

OF_TESTS = ("PYTEST_CURRENT_TEST", warm.FOLDER)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command under test, with one terminal width."""
    kept = {key: value for key, value in os.environ.items() if key not in OF_TESTS}
    return {**kept, "COLUMNS": "100", **extra}


Process = warm.Command | subprocess.Popen[str]


def as_typed(words: str) -> tuple[str, ...]:
    """Return the words of a command, none of which has a space in it."""
    return tuple(words.split())


def start(*arguments: str, cwd: Path, **extra: str) -> Process:
    """Start `python -m expt ARGUMENTS` in its own session, forked with its imports."""
    return warm.Command(arguments, cwd, environment(**extra))


def start_cold(*arguments: str, cwd: Path, **extra: str) -> Process:
    """`python -m expt ARGUMENTS` as a person starts it, which takes three seconds more."""
    return subprocess.Popen(
        [sys.executable, "-m", "expt", *arguments],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """As `start`, to its end."""
    return ended(start(*arguments, cwd=cwd, **extra))


def python(
    program: str, *arguments: str, cwd: Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`python -c PROGRAM ARGUMENTS` in a process that has torch and expt imported already."""
    return ended(warm.Command(arguments, cwd, environment(**extra), program))


def ended(process: Process) -> subprocess.CompletedProcess[str]:
    """What came of the command, which may take no longer than TIMEOUT_S from now."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def own_model(folder: Path, forward: str = "", name: str = "mine", **given: object) -> list[str]:
    """Write a linear model of the digits whose forward pass begins so; return words that choose it.

    What is given are its further arguments, and attributes."""
    names = "".join(f", {key}" for key in given)
    kept = "".join(f"        self.{key} = {key}\n" for key in given)
    (folder / f"{name}.py").write_text(
        "import os, pathlib, time, torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    steps = 0\n"
        f"    def __init__(self, num_classes{names}):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
        f"{kept}"
        "    def forward(self, images):\n"
        "        self.steps += self.training\n"
        f"{textwrap.indent(textwrap.dedent(forward), ' ' * 8)}\n"
        "        return super().forward(images)\n"
    )
    more = [f"+model.{key}={value}" for key, value in given.items()]
    return [f"+model._target_={name}.Net", "~model.hidden", "~model.dropout", *more]


class RunFolder:
    """What a run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder)

    def state(self, which: str = "last") -> dict[str, Any]:
        """Of a checkpoint."""
        from expt.runs import checkpoint  # which imports torch

        return checkpoint.load(self.paths.checkpoint(which))

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return content

    def curve(self, tag: str) -> list[tuple[int, float]]:
        """(step, value) of every point of `tag` in metrics.jsonl."""
        points = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return [(point["step"], point["value"]) for point in points if point["tag"] == tag]

    @property
    def points(self) -> list[str]:
        """The lines of metrics.jsonl, but for those that tell of the machine."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in lines if not json.loads(line)["tag"].startswith(NOT_REPEATED)]

    @property
    def values(self) -> dict[tuple[str, int], float]:
        """The last value of each of these points, by tag and step."""
        points = map(json.loads, self.points)
        return {(point["tag"], point["step"]): point["value"] for point in points}


def usual(words: Sequence[str]) -> tuple[str, ...]:
    """`words`, of a run on the digits without pictures, which take half as long as a short run.

    A test of what is drawn says `tensorboard.images=auto`, the default. What other data is drawn as
    is always drawn."""
    others = ("dataset=", "dataset._target_", "task", "experiment=", "tensorboard.images=")
    return (
        tuple(words)
        if any(other in word for word in words for other in others)
        else (NO_PICTURES, *words)
    )


NO_PICTURES = "tensorboard.images=false"


def children_of(pid: int) -> set[int]:
    """The processes that `pid` has started."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.add(int(path.parent.name))
    return found


def descendants(pid: int) -> set[int]:
    """The processes that `pid` has started, and those that they have."""
    return {found for child in children_of(pid) for found in {child, *descendants(child)}}


def state(pid: int) -> str:
    """As in /proc: R runs, S sleeps, T is stopped, Z is a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; a zombie does not."""

    def runs(pid: int) -> bool:
        try:
            return state(pid) != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return {pid for pid in pids if runs(pid)}


def machine(gpus: int = 0, **facts: Any) -> Machine:
    """A machine with this number of GPUs and, unless `facts` say otherwise, 8 cores."""
    return Machine(gpus=tuple(map(str, range(gpus))), **{"cpus": 8, **facts})


@functools.cache
def settings() -> dict[str, Any]:
    """The shipped configuration, composed once."""
    return composed()


@functools.cache
def _config() -> RunConfig:
    return parse(settings(), Machine(cpus=8))


def request_of(
    config: RunConfig, folder: Path, content: Content | None = None, **more: Any
) -> RunRequest:
    """A request for a run of this configuration in `folder`."""
    words: Any = {"name": folder.name, "overrides": {"seed": 0}, "arguments": ["seed=0"]}
    known: Any = {"about": words, "typed_at": 0.0, **more}
    identity = Identity.of(config, content or {})
    return RunRequest(config=config, identity=identity, paths=RunPaths(folder), **known)


def request(
    folder: Path,
    *,
    may_have_run: bool = False,
    typed_at: float | None = None,
    content: Content | None = None,
    **config: Any,
) -> RunRequest:
    """A request for a run in `folder`, of one CPU worker where `config` says nothing else."""
    more = {"typed_at": typed_at, "may_have_run": may_have_run, "env": {"COLOUR": "green"}}
    given = dataclasses.replace(_config(), **{"world_size": 1, "threads": 1, **config})
    return request_of(given, folder, content, settings=copy.deepcopy(settings()), **more)


@functools.cache
def _of_words(words: str) -> RunConfig:
    return parse(composed(*words.split()), Machine(cpus=8))


def dataset(words: str, **changes: Any) -> Any:
    """The dataset of a command with these words, and what is other than in its YAML."""
    return part("dataset", words, **changes)


def part(key: str, words: str, **changes: Any) -> Any:
    """As `dataset`, the `model`, `optimizer`, `init` or another part of the configuration."""
    return dataclasses.replace(getattr(_of_words(words), key), **changes)


def built(dataset: Any, task: Any = None, **options: Any) -> "Data":
    """The loaders of a dataset, of one CPU worker where `options` say nothing else."""
    import torch  # late: see conftest.py

    from expt.data.build import build

    return build(dataset, task, **{"batch_size": 4, "device": torch.device("cpu"), **options})


def checkpoint_state(config: RunConfig, step: int, **more: Any) -> dict[str, Any]:
    """What a checkpoint of a run's first epoch says after `step` steps, without tensors."""
    return {
        "version": VERSION,
        "model": {},
        "workers": [],
        "config": shown(config),
        "position": {"epoch": 1, "step": step, "step_in_epoch": step},
        "steps_per_epoch": 9,
        "plan": None,
        "metrics_bytes": 0,
        "best": None,
        "bests": [],
        "evaluated": None,
        "evaluated_at": step,
        **more,
    }


def record_points(paths: RunPaths, *points: tuple[int, int, dict[str, float]]) -> None:
    """Leave numbers in a run's metrics.jsonl: step, epoch and tag to value of each point."""
    with contextlib.closing(MetricsWriter(paths)) as writer:
        for point in points:
            writer.write(*point)


def continued(
    config: RunConfig, paths: RunPaths, *, content: Content | None = None, resumes: bool = True
) -> Path | None:
    """Find what a run begins from and bring it into its folder, as its driver does."""
    asked = request_of(config, paths.folder, content, may_have_run=resumes)
    source = continuing.find(asked)
    return continuing.take(source, paths) if source else None


def begun(config: RunConfig, folder: Path, *, may_have_run: bool = False) -> Path | None:
    """Make the folder of a run, as its driver does; return the checkpoint that it begins from."""
    content = lineage.fork_content(config, lineage.record_to_continue(config, RunPaths(folder)))
    asked = request_of(config, folder, content, may_have_run=may_have_run)
    return Attempt(request=asked, devices=()).begin()


def resumed(file: Path, folder: Path) -> Path:
    """Bring a checkpoint into a new folder that resumes it."""
    return continuing.take(Source("resume", read(file)), RunPaths(folder))


def common(cases: Iterable[str], *begins: str) -> list[Any]:
    """Parametrize a test by the names of cases, of which those that begin otherwise are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name.startswith(begins) else slow) for name in cases]


def same(found: Any, expected: Any) -> bool:
    """Types, order of keys, strides and bits; an OrderedDict is a dict."""
    from torch import Tensor  # late: see conftest.py

    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and _raw(found) == _raw(expected)
    if isinstance(expected, dict) and isinstance(found, dict):
        return [*found] == [*expected] and all(map(same, found.values(), expected.values()))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected)  # nan and -0.0, too


def _raw(tensor: Any) -> Any:
    from torch import uint8

    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = plain.contiguous().reshape(-1).view(uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.numel() else (), bits


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """The keys whose values are not the same."""
    return {key for key in expected.keys() | found if not same(found.get(key), expected.get(key))}
