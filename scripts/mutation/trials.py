"""Tests run on changed modules: each in a copy of the tree, in a process forked from one that has
torch and pytest.
"""

from __future__ import annotations

import compileall
import importlib
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.mutation.belonging import tests_of
from scripts.mutation.changes import ROOT, Change

COPIED = ("expt", "hydra_plugins", "conf", "tests", "scripts", "pyproject.toml", "README.md",
    "CONTRIBUTING.md",
          "CHANGELOG.md", "docs", "BENCHMARKS.md")  # fmt: skip
SURVIVED, NOTICED, TIMED_OUT = "survived", "noticed", "timed out"
FOREIGN = 99
"""The exit code where another tree's expt was tested; pytest has none above 5."""


Told = Callable[[Change, str, float, str], None]


@dataclass
class Trial:
    """Tests under way on one change, in a copy of the tree that nobody else uses meanwhile."""

    change: Change
    tree: Path
    pid: int
    ends_at: float


class Copies:
    """Some copies of the working tree, gone at the end."""

    def __init__(self, number: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="expt-mutate-"))
        self.free = [self._folder / str(index) for index in range(number)]
        for tree in self.free:
            tree.mkdir()
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__")
                    )
                elif (ROOT / name).exists():
                    shutil.copy(ROOT / name, tree / name)
            # By its hash: a changed file as old and as large as the one before is never taken for
            # it.
            by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(tree / "expt", quiet=2, invalidation_mode=by_hash)

    def remove(self) -> None:
        """Delete them."""
        shutil.rmtree(self._folder, ignore_errors=True)


def warm() -> None:
    """Import what tests import and no change touches; expt itself is new in each trial."""
    for name in (
        "hydra.main",
        "numpy",
        "PIL.Image",
        "pydantic",
        "pytest",
        "rich.live",
        "torch",
        "torch.utils.tensorboard",
        "tensorboard.backend.event_processing.event_accumulator",
    ):
        importlib.import_module(name)


def start(change: Change, tree: Path, limit_s: float) -> Trial:
    """Run the tests that belong to the changed module, and return at once."""
    path = tree / change.path
    path.write_text(change.after)
    sys.stdout.flush()
    if pid := os.fork():
        return Trial(change, tree, pid, time.monotonic() + limit_s)
    code = 3
    try:
        code = _test(tree, tests_of(change.path))
    finally:
        os._exit(code)


def _test(tree: Path, tests: Sequence[str]) -> int:
    import pytest

    os.setsid()
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]
    with (tree / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    options = (
        "-x",
        "-q",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tree.with_name(f'tmp-{tree.name}')}",
    )
    code = int(pytest.main([*options, *tests]))
    import expt

    if not Path(expt.__file__).is_relative_to(tree):
        return FOREIGN
    return code


def outcome(trial: Trial) -> str | None:
    """What became of it; None while it is under way."""
    pid, status = os.waitpid(trial.pid, os.WNOHANG)
    if not pid and time.monotonic() < trial.ends_at:
        return None
    for child in [*_family(trial.pid), *(() if pid else (trial.pid,))]:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if not pid:
        os.waitpid(trial.pid, 0)
    (trial.tree / trial.change.path).write_text(trial.change.before)
    if not pid:
        return TIMED_OUT
    if (code := os.waitstatus_to_exitcode(status)) == FOREIGN:
        sys.exit(f"the tests could not be run:\n{(trial.tree / 'said').read_text()[-2000:]}")
    return SURVIVED if code in (0, 5) else NOTICED


def _said(trial: Trial) -> str:
    said = trial.tree / "said"
    return said.read_text(errors="replace")[-2000:] if said.exists() else ""


def _family(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield from _family(child)
            yield child


def run(
    changes: Sequence[Change],
    jobs: int,
    limit_s: Callable[[str], float],
    told: Callable[[Change, str, float, str], None],
) -> None:
    """Try every change, `jobs` at a time; `told` hears of each as it ends."""
    copies, left, running = Copies(jobs), list(reversed(changes)), list[Trial]()
    began: dict[str, float] = {}
    try:
        while left or running:
            while left and copies.free:
                change = left.pop()
                began[change.key] = time.monotonic()
                running.append(start(change, copies.free.pop(), limit_s(change.path)))
            for trial in list(running):
                if (found := outcome(trial)) is not None:
                    running.remove(trial)
                    copies.free.append(trial.tree)
                    told(
                        trial.change,
                        found,
                        time.monotonic() - began[trial.change.key],
                        _said(trial),
                    )
            time.sleep(0.02)
    finally:
        for trial in running:
            trial.ends_at = 0.0
            with suppress(ChildProcessError):  # it ended, and could not be judged
                outcome(trial)
        copies.remove()
