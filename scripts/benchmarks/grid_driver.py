"""A sweep on simulated GPUs whose workers end at once: what is left is what the driver takes.

Prints it in JSON.

Its words: the number of points, a folder, and when it was typed [by time.monotonic].
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from expt.command import main as command
from expt.command import sweep
from expt.command.sweep_folder import SweepFolder
from expt.launch.job import Observer
from expt.launch.pool import Pool, PoolOptions
from expt.machine import Machine
from expt.runs.attempt import Attempt
from expt.runs.result import Objective, update_result

MACHINE = Machine(gpus=tuple(map(str, range(8))), cpus=16, simulated=True)


class Ended:
    """A worker that has completed as soon as it is looked at."""

    sentinels: Sequence[int] = ()

    def poll(self) -> bool:
        """It has."""
        return True

    def ask_to_stop(self) -> None:
        """Nothing is left to stop."""

    stop = close = ask_to_stop


def main(points: int, folder: str, typed_at: float) -> None:
    """Run a grid of so many points in `folder`; the command was typed at `typed_at` [by
    time.monotonic].
    """
    first, files = list[float](), 0

    def start(attempt: Attempt) -> Ended:
        nonlocal files
        first.append(time.monotonic() - typed_at)
        files = max(files, len(os.listdir("/proc/self/fd")))
        attempt.begin()
        paths = attempt.paths
        paths.stdout(attempt.number, 0).parent.mkdir(parents=True)
        paths.metrics.write_text('{"step": 1, "epoch": 1, "tag": "accuracy/val", "value": 0.5}\n')
        metrics = {"accuracy/val": 0.5, "loss/train": 1.0, "loss/val": 0.5}
        objective = Objective(name="accuracy/val", value=0.5)
        update_result(
            paths, status="completed", metrics=metrics, objective=objective, epoch_s=[0.1] * 10
        )
        return Ended()

    def pool(observer: Observer) -> Pool:
        return Pool(MACHINE, PoolOptions(), observer, start=cast(Any, start))

    class Simulated(sweep.Sweep):
        def open(self) -> SweepFolder:
            self.machine, cast(Any, self._launcher).runner = MACHINE, pool
            return super().open()

    sweep.Sweep = Simulated  # type: ignore[misc]
    command.main(["-m", f"seed=range({points})", "gpus=1", f"hydra.sweep.dir={folder}/sweep", "-q"])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "cpu_s": time.process_time(),
        "first_s": first[0] if first else 0.0,
        "mebibytes": usage.ru_maxrss / 1024,
        "files": files,
    }
    print(json.dumps(found), file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
