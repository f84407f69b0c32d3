"""What every measure is given: the systems, the data, the machine's devices."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks import data
from scripts.benchmarks.comparison import Comparison, interleave
from scripts.benchmarks.systems import Outcome, System, Training

MODELS = ("mlp", "convnet", "resnet18")
# Enough steps for a median, few enough for a CPU; a ratio of epochs does not depend on their
# length.
CPU_IMAGES = {"mlp": 60_000, "convnet": 9_600, "resnet18": 640}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The settings of one call of scripts/bench."""

    systems: Mapping[str, System]
    source: Path
    scratch: Path
    rounds: int
    epochs: int
    models: Sequence[str]
    images: int | None
    points: Sequence[int]
    """Of the sweeps whose driver is measured alone."""
    gpus: int
    say: Callable[[str], None]

    @property
    def workers(self) -> int:
        """One per GPU, or two on a CPU."""
        return self.gpus or 2

    def data(self, train: int = data.TRAIN_IMAGES, test: int = data.TEST_IMAGES) -> Path:
        """A folder with the first images of the set; made once."""
        folder = self.scratch / f"{train}-{test}"
        return (
            folder if folder.exists() else data.prepare(self.source, folder, train=train, test=test)
        )

    def images_for(self, model: str) -> int:
        """The training images of an epoch."""
        return self.images or (data.TRAIN_IMAGES if self.gpus else CPU_IMAGES[model])

    def compare(
        self,
        measure: str,
        case: str,
        unit: str,
        trainings: Mapping[str, Training],
        value: Callable[[Outcome], float],
        at_most: Mapping[str, float] | None = None,
    ) -> Comparison:
        """Train each system's training in turn, and take `value` of each outcome."""

        def action(name: str) -> Callable[[], float]:
            def run() -> float:
                found = value(self.systems[name].train(trainings[name]))
                self.say(f"{measure}, {case}, {name}: {found:.3f} {unit}")
                return found

            return run

        actions = {name: action(name) for name in self.systems if name in trainings}
        return Comparison(
            measure, case, unit, interleave(actions, self.rounds), dict(at_most or {})
        )


def warm_epoch_s(outcome: Outcome) -> float:
    """The median epoch; the first, which warms things up, only where there is no other."""
    return statistics.median(outcome.epoch_s[1:] or outcome.epoch_s)
