"""Errors that a person sees, and the exit code of each.

ExptError                1
+-- ConfigError          2   a key, a value, or a combination that cannot run
|   +-- DataError        2   data that is missing, truncated or malformed
|   +-- CheckpointError  2   a checkpoint that cannot be read
|   +-- FolderInUse      2   a run's folder, in which another command is at work
+-- RunFailed            1   a worker raised, was killed, or stopped too early
|   +-- SweepFailed      1   some of a sweep's runs did
|   +-- TimedOut         1   a worker waited in vain for another, or finished no step
|   +-- Killed           1   a worker was ended by a signal
|   +-- WorkersLost      1   the process that all workers are forked from was killed
|   +-- Diverged         1   the loss or the weights are no longer finite
|   +-- OutOfMemory      1   of the GPU, or of the machine
|   +-- DeviceLost       1   a GPU can't be used, or too few are left that can
|       +-- DeviceFull   1   others hold its memory
+-- Interrupted        130   Ctrl-C (143: SIGTERM, 138: SIGUSR1, 129: SIGHUP); it can continue
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


class ExptError(Exception):
    """Base of every error whose text is meant for a person, without a traceback."""

    exit_code = 1


class ConfigError(ExptError):
    """The configuration cannot run; `problems` holds a line each, and 30 of them are shown."""

    exit_code = 2
    where = "configuration"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        count = len(self.problems)
        head = "" if count == 1 else f"{count} problems in the {self.where}\n  "
        super().__init__(head + listed(self.problems, 30, "\n  "))


class DataError(ConfigError):
    """A dataset's files are missing or malformed."""

    where = "data"


def collected(function: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Return the result of a function for each item. Raise all DataErrors as one."""
    found, problems = list[Found](), list[str]()
    for item in items:
        try:
            found.append(function(item))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return found


class CheckpointError(ConfigError):
    """A checkpoint has changed since it was written, or there is no room to read it."""


class FolderInUse(ConfigError):
    """Another command is at work in the run's folder: nothing there may be touched."""


class RunFailed(ExptError):
    """A run ended without completing; the text holds the first failing rank's traceback."""

    def __init__(self, text: str = "", *, gpus: Mapping[str, str] = {}) -> None:
        """Name the `gpus` that may be to blame, since no step was done, and the fault of each."""
        super().__init__(text or "; ".join(gpus.values()))
        self.gpus = gpus


class SweepFailed(RunFailed):
    """Some runs of a sweep have failed.

    `runs` are the folders of all in the order of the grid, `completed` those that have not failed;
    `failed` has the reasons of the others.
    """

    def __init__(
        self,
        text: str,
        completed: Sequence[Path] = (),
        failed: Mapping[Path, str] | None = None,
        runs: Sequence[Path] = (),
    ) -> None:
        super().__init__(text)
        self.completed, self.failed, self.runs = completed, dict(failed or {}), runs


class TimedOut(RunFailed):
    """A worker waited in vain for another, or finished no step for too long.

    `progress` is how many collectives it had begun then, and how many steps.
    """

    def __init__(self, text: str, *, progress: Sequence[int] | None = None) -> None:
        super().__init__(text)
        self.progress = progress


class Killed(RunFailed):
    """A worker, or a process that reads for it, was ended by a signal, as where memory runs out."""


class WorkersLost(RunFailed):
    """All workers on the machine were killed at once, by no fault of this run."""


class Diverged(RunFailed):
    """The loss or the weights are not finite; a second try would end the same way."""


class OutOfMemory(RunFailed):
    """The memory of a GPU, or of the machine, did not suffice."""


class DeviceLost(RunFailed):
    """A GPU can't be used, by no fault of this run: another one may do."""


class DeviceFull(DeviceLost):
    """Others hold the memory of a GPU, which a run lacks."""


BAD_TRIALS = {kind.__name__: kind for kind in (Diverged, OutOfMemory)}
"""Errors that say something of the settings, rather than of the code or the machine, by name."""
RECORDED = BAD_TRIALS | {kind.__name__: kind for kind in (DeviceLost, DeviceFull, Killed)}
"""Errors whose class a worker's record keeps, by name; any other is a RunFailed."""


class Interrupted(ExptError):
    """A person or a scheduler stopped the run; its last checkpoint is valid."""

    exit_code = 130


INTERRUPTED_UNWRITTEN = "interrupted; nothing was written: type the command again"
INTERRUPTED_BEFORE = "interrupted before a run began; type the command again"


def refuse_undecoded(texts: Iterable[str]) -> None:
    """Raise ConfigError for one that is not UTF-8: neither YAML nor a record could hold it."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = text.encode(errors="backslashreplace").decode()
            raise ConfigError(f"{shown}: is not UTF-8; rename it (see convmv)") from None


def require(whose: str, *packages: str, extra: str) -> None:
    """Raise ConfigError where a package is not installed, with the extra of expt that has it."""
    found = {name: find_spec(name) for name in packages}
    # A folder `wandb`, which W&B leaves behind, has no origin.
    if missing := [name for name, spec in found.items() if spec is None or spec.origin is None]:
        raise ConfigError(f"{whose}: needs {', '.join(missing)}; pip install 'expt[{extra}]'")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string."""
    return "".join(f" Did you mean '{each}'?" for each in nearest(name, choices))


def absent(path: Path, thing: str = "file or folder", fix: str = "") -> str:
    """Return words on a path where there is no such `thing`: a `fix`, and a name next to it."""
    problem, near = f"there is no such {thing}", ""
    if path.is_symlink():
        problem = f"is a link to {os.readlink(path)}, where there is no {thing}"
    elif os.path.exists(path):
        problem = f"is no {thing}"
    elif path.parent.is_dir():
        names = itertools.islice((each.name for each in path.parent.iterdir()), 1000)
        found = nearest(path.name, names)
        near = f". Did you mean '{path.with_name(found[0])}'?" if found else ""
    return f"{problem}{'; ' if fix else ''}{fix}{near}"


def nearest(name: str, choices: Iterable[str]) -> list[str]:
    """Return the name that is spelt the most like this one, if any is."""
    known = sorted(set(choices))
    near = [each for each in known if each.lower() == name.lower()][:1]
    return near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)


def counted(number: int, thing: str) -> str:
    """Return a number of things in words: `1 run`, `3 runs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def listed(names: Iterable[str], most: int = 8, between: str = ", ") -> str:
    """Return the first of the names, and how many more there are."""
    found = list(names)
    more = f"{between.lstrip(',')}and {len(found) - most} more" if len(found) > most else ""
    return between.join(found[:most]) + more


def decimals(value: float) -> str:
    """Return a number with four decimals; one that is too small for them with three digits."""
    return f"{value:.3g}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def described(value: object) -> str:
    """Return the type and shape of a tensor or an array, and the class of anything else."""
    shape = getattr(value, "shape", None)
    if shape is None:
        name = "list" if isinstance(value, list) else type(value).__name__  # a batch's is PerSample
        return f"an {name}" if name[0] in "aeiou" else f"a {name}"
    return f"{type_name(value)} {list(shape)}"


def type_name(tensor: Any) -> str:
    """Return the name of a tensor's or an array's type, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its class where it has none."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


_NO_MEMORY = re.compile(
    r"\b(CUDA|HIP)\b.{0,40}\b(out of memory|calloc)|_ALLOC(ATION)?_FAILED|miopenStatusAllocFailed",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch lacked memory of a device, for a tensor or within a library.

    Only torch's allocator has a class for it: cuBLAS, cuDNN, NCCL and the driver raise others.
    """
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


@contextlib.contextmanager
def sized_by(what: str, samples: int = 0) -> Iterator[None]:
    """Note in errors of the body `what` its memory depends on: "model", "data" or a key.

    `samples` are those that the key gives it at a time, where known.
    """
    try:
        yield
    except Exception as error:
        vars(error).setdefault("sized_by", (what, samples))
        raise


MISTAKES = frozenset(
    (
        "AssertionError AttributeError IndexError KeyError NameError NotImplementedError TypeError"
        " UnboundLocalError ValueError ZeroDivisionError"
    ).split()
)
"""Errors that the same code raises again: no network, disk or memory has a part in them."""


WARNING = "warning: "
_warned: set[str] | None = None
"""The warnings of a command until now; None where each is printed."""


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Print equal warnings once while entered."""
    global _warned
    before, _warned = _warned, set()
    try:
        yield
    finally:
        _warned = before


def warn(text: str, file: TextIO | None = None) -> None:
    """Warn in a line on stderr, or in `file`."""
    if _warned is not None:
        if text in _warned:
            return
        _warned.add(text)
    print(f"{WARNING}{printable(text)}", file=file or sys.stderr, flush=True)


@functools.cache
def warn_once(text: str) -> None:
    """Warn, and not again for each run of a sweep, nor in another part of a report."""
    warn(text)


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, such as `\x1b`."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
