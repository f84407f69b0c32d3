"""How much a search may spend: time of this command, or hours of devices of all runs in its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expt.errors import ConfigError
from expt.runs import checkpoint_file
from expt.runs.paths import RunPaths

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(gpu|core)-)?([a-z]*)\s*")


@dataclass(frozen=True)
class Budget:
    """What may be spent, in seconds."""

    text: str
    limit_s: float
    device: str
    """Of what a second counts: `gpu`, `core`, or nothing where it is one of the clock."""
    began_at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def of_devices(self) -> bool:
        """Whether a second of each device counts, and not one of the clock."""
        return bool(self.device)

    def warning(self, *, on_gpus: bool) -> str | None:
        """What to tell where it names other devices than those that the runs have; None where it
        does not.
        """
        has = "gpu" if on_gpus else "core"
        if self.device in ("", has):
            return None
        meant, what = (
            self.text.replace(f"{self.device}-", f"{has}-"),
            "GPUs" if on_gpus else "CPU cores",
        )
        return (
            f"search.budget={self.text}: its runs are on {what}, whose time counts; write {meant},"
            " or another number"
        )

    def left_s(self, spent_s: float) -> float:
        """What is left where devices have been busy for `spent_s`."""
        return self.limit_s - (spent_s if self.of_devices else self.clock() - self.began_at)


def budget_of(text: str | None, clock: Callable[[], float] = time.monotonic) -> Budget | None:
    """The budget, which begins now. Raises ConfigError for a text that is none."""
    if text is None:
        return None
    match = _BUDGET.fullmatch(text)
    if match is None or match[3] not in SECONDS or float(match[1]) <= 0:
        problem = "has no unit" if match and not match[3] else "is no budget"
        raise ConfigError(
            f"search.budget={text}: {problem}; write it as in 30min, 2h (of this command) or"
            " 20gpu-h (core-h on a CPU)"
        )
    return Budget(text, float(match[1]) * SECONDS[match[3]], match[2] or "", clock(), clock)


def in_words(seconds: float, *, of_devices: bool, gpus: bool) -> str:
    """As a budget is written."""
    unit = next(
        (unit for unit in ("d", "h", "min") if abs(seconds) >= SECONDS[unit] and unit != "d"), "s"
    )
    kind = ("gpu-" if gpus else "core-") if of_devices else ""
    return f"{seconds / SECONDS[unit]:.1f}{kind}{unit}"


def stopped_in_words(runs: Sequence[RunPaths]) -> str:
    """How many were stopped, and how many of them can go on from a checkpoint."""
    stopped, saved = len(runs), sum(bool(checkpoint_file.candidates(paths.last)) for paths in runs)
    if saved == stopped:
        return f"{stopped} stopped and saved"
    return f"{stopped} stopped, {saved or 'none'} of them with a checkpoint"
