"""`expt lr_range`: the loss at rising learning rates, and the one to begin with."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from expt.command import terminal
from expt.command.words import Options, Parser, positive
from expt.errors import INTERRUPTED_UNWRITTEN, ConfigError, Diverged, Interrupted, RunFailed, warn
from expt.launch.launcher import refuse_in_torchrun
from expt.runs import tags
from expt.runs.metrics_file import MetricsReader
from expt.runs.overrides import key_of
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.runs.view.curves import refuse_undrawable
from expt.runs.view.text import Console, cells, plain_table, say

ABOUT = """\
Train for some steps while the learning rate rises from --from to --to, each step by the same
factor, and propose the rate at which the loss falls fastest (Smith, 2017). Nothing is kept."""
EXAMPLES = """examples
  python -m expt lr_range model=convnet dataset=mnist dataset.root=data
  python -m expt lr_range optimizer=adam --from 1e-6 --to 1 --steps 200 --output range.png
"""
SMOOTHING = 0.9
"""The share of the earlier losses in the average by which a rate is proposed."""
DIVERGED = 4.0
"""The average loss, as a multiple of its least or of how far it fell, that ends the search."""
ROWS = 12
"""The number of rates that the table shows."""


class Point(NamedTuple):
    """A step of the test."""

    lr: float
    """The value of `optimizer.lr`."""
    loss: float
    average: float
    """The loss averaged over this and earlier steps."""


def main(words: Sequence[str]) -> int:
    """Carry out the test. Raises ConfigError for settings that cannot be, and as a run."""
    parser = Parser("lr_range", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("words", nargs="*", metavar="KEY=VALUE", help="settings, as for a run")
    add("--from", type=float, default=1e-6, dest="least", metavar="LR", help="first rate [1e-6]")
    add("--to", type=float, default=10.0, dest="most", metavar="LR", help="last rate [10]")
    add("--steps", type=positive, default=100, metavar="N", help="steps, of a minute at most [100]")
    parser.add_output("--output", "draw the curve: .png, .svg, .pdf")
    add("--config-dir", metavar="DIR", help="folder of custom YAML [conf]")
    asked = parser.parse_args(words)
    if not 0 < asked.least < asked.most < math.inf:
        raise ConfigError(f"--from {asked.least:g} --to {asked.most:g}: give 0 < from < to")
    from expt.command import grammar  # late: Hydra

    overrides = grammar.parse([*map(grammar.readable, asked.words)])
    unused = {*grammar.NOT_OF_A_TRY, "preflight", *map(key_of, _settings(asked))}
    grammar.refuse_for_one_run(overrides, "a test of learning rates", unused)
    refuse_in_torchrun("expt lr_range")
    if asked.output:
        refuse_undrawable("--output", asked.output)
    points = _points(asked)
    proposed = propose(points)
    _show(points, proposed)
    if asked.output and not points:
        warn(f"--output {asked.output}: there is no finite loss to draw")
    elif asked.output:
        _draw(points, proposed, asked.output, force=asked.force)
    return 0


def _settings(asked: argparse.Namespace) -> list[str]:
    schedule = f"_target_: expt.training.schedules.RisingRate, factor: {asked.most / asked.least!r}"
    lengths = ["epochs", "max_steps"]
    if "eval_split=null" not in asked.words:
        lengths.append("eval_every_steps")
    return [
        f"optimizer.lr={asked.least!r}",
        f"scheduler={{{schedule}, interval: step}}",
        *(f"{key}={asked.steps}" for key in lengths),
        *("max_minutes=1", "log_every=1", "send=[]"),
        *(f"tensorboard.{key}=false" for key in ("images", "norms", "health")),
    ]


def _points(asked: argparse.Namespace) -> list[Point]:
    """Train while the learning rate rises; return the steps until the loss is not finite.

    Raises ConfigError or RunFailed as a run does, but for divergence.
    """
    from expt.command.invoke import command  # late: Hydra

    settings = [*asked.words, *_settings(asked)]
    with tempfile.TemporaryDirectory(prefix="expt-lr-range-") as folder:
        paths = RunPaths(Path(folder, "run"))
        options = Options([*settings, f"hydra.run.dir={paths.folder}"], quiet=True)
        options = options._replace(config_dir=asked.config_dir)
        try:
            command(options, typed_at=time.monotonic(), from_python=True)
        except Diverged:
            pass  # at a large rate, as it should
        except RunFailed as error:
            raise RunFailed(str(error).partition("\nlog: ")[0]) from error  # which is gone
        except Interrupted:
            raise Interrupted(INTERRUPTED_UNWRITTEN) from None
        record, found = read_result(paths), MetricsReader(paths).read()
    rates = [point.value for point in found if point.tag == tags.LR]
    losses = [point.value for point in found if point.tag == tags.RUNNING_LOSS]
    if len(rates) > 1 and rates[0] == rates[-1]:
        raise ConfigError("optimizer.groups: have optimizers for all parameters; leave one out")
    if record.get("ended_by") == "max_minutes":
        warn(f"the minute was over after {len(losses)} steps; use --steps {len(losses)}")
    points, average = list[Point](), 0.0
    for number, (rate, loss) in enumerate(zip(rates, losses, strict=False), 1):
        if not math.isfinite(loss):
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        lr = asked.least * rate / rates[0]
        points.append(Point(lr, loss, average / (1 - SMOOTHING**number)))
    return points


def propose(points: Sequence[Point]) -> float | None:
    """Return the rate about which the average loss falls fastest; None where it never falls.

    A fall is measured over a fifth of the steps, so that chance does not decide.
    """
    reach, least, averages = max(1, len(points) // 10), math.inf, list[float]()
    for point in points:
        least = min(least, point.average)
        size = max(abs(least), points[0].average - least)
        if point.average > least + (DIVERGED - 1) * size:
            break
        averages.append(point.average)
    falls = [
        (averages[at + reach] - averages[at - reach], at)
        for at in range(reach, len(averages) - reach)
    ]
    slope, steepest = min(falls, default=(0.0, 0))
    return points[steepest].lr if slope < 0 else None


def _show(points: Sequence[Point], proposed: float | None) -> None:
    console, every = Console(), max(1, math.ceil(len(points) / ROWS))
    table = plain_table(("optimizer.lr", "loss", "average"))
    for point in points[::every]:
        table.add_row(*cells(f"{point.lr:.2e}", f"{point.loss:.4g}", f"{point.average:.4g}"))
    console.print(table)
    terminal.put(lr_range=[point._asdict() for point in points], proposed=proposed)
    if proposed is None:
        say(console, "proposed     none: no rate lowers the loss; try other --from and --to")
    else:
        say(console, f"proposed     optimizer.lr={proposed:.1e}")


def _draw(points: Sequence[Point], proposed: float | None, file: Path, *, force: bool) -> None:
    from matplotlib.figure import Figure

    from expt.inference.writing import new_file  # late: for a drawing only

    drawing = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = drawing.subplots()
    rates = [point.lr for point in points]
    axes.semilogx(rates, [point.loss for point in points], alpha=0.3, label="loss of each step")
    axes.semilogx(rates, [point.average for point in points], label="average")
    if proposed is not None:
        axes.axvline(proposed, color="C3", linestyle=":", label=f"proposed: {proposed:.1e}")
    least, first = min(point.average for point in points), points[0].average
    fall = max(first - least, abs(first) / 10)
    axes.set(xlabel="optimizer.lr", ylabel="loss", ylim=(least - fall / 10, first + fall))
    axes.legend()
    with new_file(file, force=force) as opened:
        drawing.savefig(opened, format=file.suffix[1:])
