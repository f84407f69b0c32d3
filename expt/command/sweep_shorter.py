"""Runs of a sweep's folder that are those of a new grid but shorter: what `resume=auto` goes on
from.
"""

from __future__ import annotations

from pathlib import Path

from expt.config.identity import Content, identity
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import RUNNING, Record
from expt.runs.sweep import results_of_sweep

LENGTH = ("epochs", "max_steps", "scheduler.epochs", "scheduler.kwargs.total_steps")


class ShorterRuns:
    """Those of the sweep in `folder`, read when the first is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, list[tuple[RunPaths, Record]]] | None = None

    def of(self, config: RunConfig, content: Content) -> RunPaths | None:
        """The longest that has a checkpoint and is no longer than `config`; None where there is
        none.
        """
        if self._found is None:
            self._found = self._read()
        fitting = [
            each
            for each in self._found.get(identity(config, content, but=LENGTH), ())
            if _fits(each[1], config)
        ]
        return max(fitting, key=lambda each: _steps(each[1]), default=(None, None))[0]

    def _read(self) -> dict[str, list[tuple[RunPaths, Record]]]:
        found: dict[str, list[tuple[RunPaths, Record]]] = {}
        for paths, record in results_of_sweep(self._folder):
            if not (record.get("content") and "config" in record) or record["status"] == RUNNING:
                continue
            if not paths.last.is_file():
                continue
            try:
                key = identity(recorded(record["config"]), Content(**record["content"]), but=LENGTH)
            except (ConfigError, KeyError):  # of another version
                continue
            found.setdefault(key, []).append((paths, record))
        return found


def _fits(record: Record, config: RunConfig) -> bool:
    """Whether it has not been trained beyond the end of `config`, as far as its record says."""
    per_epoch, steps = record.get("steps_per_epoch"), _steps(record)
    if not per_epoch or not steps:
        return False
    return steps <= min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)


def _steps(record: Record) -> int:
    before = record["forked_from"]["step"] if "forked_from" in record else 0
    done: int = record.get("steps") or before + len(record.get("epoch_s") or ()) * record.get(
        "steps_per_epoch", 0
    )
    return done
