"""A warm server in a folder of its own, for tests of commands that may use it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import (
    Process,
    RunFolder,
    alive,
    children_of,
    descendants,
    environment,
    run,
    start,
)
from tests.faults.running import LONG, wait_until, working_in

SMALL = ("dataset=synthetic", "dataset.train_limit=64", "batch_size=32", "epochs=1", "gpus=0")


class Warm:
    """It is started by `command()`; `drivers` is the process beside it, that drivers are forked
    from.
    """

    def __init__(self, runtime: Path) -> None:
        runtime.mkdir(mode=0o700)
        self.runtime = {"XDG_RUNTIME_DIR": str(runtime)}
        self.folder = runtime / "expt"

    def command(self, *words: str) -> str:
        """What `expt warm WORDS` prints."""
        done = run("warm", *words, cwd=self.folder.parent, **self.runtime)
        assert (done.returncode, done.stderr) == (0, ""), (
            done.returncode,
            done.stderr,
            done.stdout,
        )
        return done.stdout

    @property
    def pid(self) -> int:
        found = re.search(r"process (\d+)", self.command("--status"))
        assert found
        return int(found[1])

    @property
    def drivers(self) -> int:
        """The oldest: the others are forkservers, of commands."""
        return min(children_of(self.pid))

    @property
    def forkservers(self) -> set[int]:
        return children_of(self.pid) - {self.drivers}

    @property
    def num_used(self) -> int:
        found = re.search(r"by (\d+) commands", self.command("--status"))
        assert found
        return int(found[1])

    def run(self, *words: str, cwd: Path, **env: str) -> RunFolder:
        """A run that completes."""
        done = run(*SMALL, *words, "hydra.run.dir=run", cwd=cwd, **self.runtime, **env)
        assert done.returncode == 0, done.stderr
        return RunFolder(cwd / "run")

    def used_by(
        self, begin: Callable[[Path], Any], cwd: Path, end: Callable[[Any], object] = lambda _: None
    ) -> Any:
        """What `begin` gives, tried anew: a command waits 0.2 s for it, on a busy machine too.

        `end` is for what was begun without it.
        """
        for attempt in range(5):
            before, folder = self.num_used, cwd / str(attempt)
            folder.mkdir()
            found = begin(folder)
            if self.num_used == before + 1:
                return found
            end(found)
        raise AssertionError("no command has used it")

    def training(self, cwd: Path) -> tuple[Process, set[int]]:
        """As tests.faults.running.training: a long run that trains, and its processes but the
        driver.
        """

        def begin(folder: Path) -> tuple[Process, set[int]]:
            process = start(*LONG, cwd=folder, **self.runtime)
            metrics = folder / "here" / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)
            return process, self.descendants | descendants(process.pid)

        def end(found: tuple[Process, set[int]]) -> None:
            found[0].kill()
            wait_until(lambda: not alive(found[1]))

        found: tuple[Process, set[int]] = self.used_by(begin, cwd, end)
        return found

    @property
    def descendants(self) -> set[int]:
        """The processes of commands that use it."""
        return descendants(self.pid) - {self.drivers}

    def start(
        self,
        *words: str,
        cwd: Path,
        options: Sequence[str] = ("-m", "expt"),
        before: Sequence[str] = (),
        **more: Any,
    ) -> subprocess.Popen[str]:
        """`python -m expt WORDS` as a person types it: where a driver is forked for it, it is but
        its stand-in.
        """
        return subprocess.Popen(
            [*before, sys.executable, *options, *words],
            cwd=cwd,
            env=environment(**self.runtime),
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
            | more,
        )

    def driver_of(self, typed: subprocess.Popen[str], folder: Path) -> int | None:
        """The driver that was forked for what was typed in a folder where nothing else is; None
        where it is its own.
        """
        found = set[int]()

        def is_known() -> bool:
            found.update(children_of(self.drivers) & working_in(folder))
            return bool(found or children_of(typed.pid))

        wait_until(is_known, typed)
        return min(found, default=None)
