"""`expt predict`: what a run's model says of files, of folders, or of a part of its dataset."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console

from expt import machine, signals
from expt.command.words import Parser
from expt.errors import INTERRUPTED_UNWRITTEN, ConfigError, ExptError, Interrupted, warn
from expt.inference import writing
from expt.inference.plan import SPLITS, Asked, Plan, plan
from expt.runs.named_checkpoint import run_and_which
from expt.runs.view.progress import BAR, PLAIN_LINE_S, WIDE
from expt.runs.view.text import duration, say

if TYPE_CHECKING:
    from expt.inference.predict import Predictor

TOLD = 10
"""Files that could not be read and are named; of the others the number is told."""
EXAMPLES = """what may be given, by what the run was trained on
  images            pictures, folders with pictures anywhere below them, or arrays (.npy, .npz) of images
  a table           tables (.csv, .parquet, .npz, or a .npy of features): columns by their names, targets not needed
  a text            plain texts: of each line how likely it is
  your own samples  arrays of them (.npy, .npz)

what comes out
  classification  class, probability, and of every class p_NAME; with --top K the K likeliest alone
  multilabel      labels (by task.threshold), and of every label p_NAME
  regression      the targets by their names, in their own units
  segmentation    a PNG of class numbers for each picture, of its size (--output FOLDER), or masks in an .npz
  language model  tokens, loss (nats for each) and perplexity
  a task of yours what its method `predict` gives, its model's outputs if there is none
Rows come in the order of what was given, sorted within a folder; --split adds the column target. .npz has an array for
each, and the names of classes beside.

A file, or a row of a table, that cannot be read is named and left out; all others are written, and the exit code is 1.
Numbers are those of the run's evaluations, in its precision too; --amp false computes in float32.

examples
  python -m expt predict RUN cat.jpg photos --output photos.csv
  python -m expt predict RUN photos --top 3
  python -m expt predict RUN new.csv --output new_with_predictions.jsonl --which last
  python -m expt predict RUN --split test --output test.npz
"""


def main(words: Sequence[str]) -> int:
    """Predict what `words` ask for; raises ExptError where some could not be read, and see `plan`."""
    asked, output, force = parse(words)
    if machine.is_external_worker():
        raise ConfigError("expt predict cannot run inside torchrun; start it alone")
    chosen = plan(asked)
    masks = chosen.config.task.TARGETS == "mask"
    if masks and output in (None, Path("-")):
        raise ConfigError(
            "masks are no text; name a folder or an .npz for them, as in --output masks"
        )
    if output is not None and output != Path("-"):
        if os.path.abspath(output) in map(os.path.abspath, chosen.files):
            raise ConfigError(
                f"--output {output}: is one of the files that are read; give another name"
            )
        writing.check(output, masks=masks, force=force)
    try:
        with machine.not_world_writable(), signals.Heeded(), signals.heeded_at_once():
            return _predict(chosen, output, force=force)
    except KeyboardInterrupt:
        raise Interrupted(
            INTERRUPTED_UNWRITTEN if output else "interrupted; type the command again"
        ) from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python flushes at its end
        return 1


def parse(words: Sequence[str]) -> tuple[Asked, Path | None, bool]:
    """The words as what is asked, the output, and whether that may be written over."""
    parser = Parser(
        "predict",
        "What a run's model says of files, of folders, or of a part of its dataset.",
        EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="files, and folders that hold some"
    )
    parser.add_argument(
        "--split", metavar="|".join(SPLITS), help="a part of the run's dataset in place of files"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=".csv, .jsonl, .npz; - is the terminal, as CSV"
    )
    parser.add_argument("--force", action="store_true", help="write over an output that is there")
    parser.add_argument("--top", type=int, metavar="K", help="of classes the K likeliest alone")
    parser.add_argument(
        "--which", choices=("best", "last"), help="of its checkpoints, as RUN@last (best)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples at a time (what makes 40 MB, up to 1024)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:1 ... (a GPU if there is one)",
    )
    amp = ("recorded", "false", "true", "bf16", "fp16")
    parser.add_argument(
        "--amp",
        choices=amp,
        default="recorded",
        help="mixed precision (recorded: as the run had it)",
    )
    found = parser.parse_intermixed_args(list(words))
    run, which = run_and_which(found.run, found.which)
    asked = Asked(
        run=run,
        paths=tuple(found.paths),
        split=found.split,
        which=which,
        batch_size=found.batch_size,
        device=found.device,
        amp={"true": True, "false": False}.get(found.amp, found.amp),
        top=found.top,
    )
    return asked, found.output, found.force


def _predict(chosen: Plan, output: Path | None, *, force: bool) -> int:
    from expt.inference.predict import Predictor  # late: torch

    predictor = Predictor(chosen)
    to_terminal = output in (None, Path("-"))
    console = Console(stderr=to_terminal, highlight=False)
    told, began = 0, time.monotonic()
    with (
        _writer(chosen, output, force=force) as writer,
        Progress(chosen, console, live=not to_terminal) as progress,
    ):
        for answers in predictor:
            writer.write(answers, predictor.form)
            told = progress.warn_of(predictor.skipped, told)
            progress.update(predictor.seen)
        progress.warn_of(predictor.skipped, told)
        if not predictor.seen or len(predictor.skipped) == predictor.seen:
            raise ConfigError(_none_read(chosen, predictor))
    _conclude(chosen, predictor, output, time.monotonic() - began)
    return 0


@contextlib.contextmanager
def _writer(chosen: Plan, output: Path | None, *, force: bool) -> Iterator[writing.Writer]:
    if output is None:
        yield writing.Lines(lambda line: say(Console(highlight=False), line))
    elif output == Path("-"):
        with contextlib.closing(writing.CSV(sys.stdout.buffer)) as to_stdout:
            yield to_stdout
    elif output.suffix.lower() in writing.SUFFIXES:
        with writing.writer(output, force=force) as made:
            yield made
    else:
        from expt.inference.mask_pictures import MaskPictures

        with contextlib.closing(
            MaskPictures(output, chosen.files, chosen.masks_root, force=force)
        ) as masks:
            yield masks
            masks.finish()


def _none_read(chosen: Plan, predictor: Predictor) -> str:
    if not predictor.seen:
        return f"there are no {chosen.noun}s in what was given"
    return f"none of the {predictor.seen} {chosen.noun}s could be read; nothing is written"


def _conclude(chosen: Plan, predictor: Predictor, output: Path | None, seconds: float) -> None:
    left_out, noun = len(predictor.skipped), chosen.noun
    number = predictor.seen - left_out
    if output is not None and output != Path("-"):
        console, speed = Console(highlight=False), number / max(seconds, 1e-9)
        say(
            console,
            f"predicted    {number:,} {noun}s in {seconds:.1f} s on {predictor.device},"
            f" {speed:,.0f} {noun}s/s",
        )
        say(console, f"written      {output}")
    if left_out > TOLD:
        warn(f"{left_out - TOLD} more could not be read")
    if left_out:
        raise _LeftOut(
            f"{left_out} of {predictor.seen} {noun}s could not be read, and are left out"
        )


class _LeftOut(ExptError):
    """Some could not be read; all others were written."""


class Progress:
    """How far it is: a line that is redrawn in a terminal, else a new one from time to time."""

    def __init__(self, chosen: Plan, console: Console, *, live: bool) -> None:
        self._console, self._total, self._noun = console, chosen.total, chosen.noun
        self._began = self._line_at = time.monotonic()
        bar = (bars.BarColumn(bar_width=BAR),) if console.width >= WIDE else ()
        columns = (
            bars.TextColumn("{task.description}"),
            *bar,
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[text]}"),
        )
        drawn = live and console.is_terminal and not console.is_dumb_terminal
        self._bar = bars.Progress(*columns, console=console, transient=True) if drawn else None
        self._live = live
        self._task = (
            self._bar.add_task("predict", total=self._total, text="") if self._bar else None
        )

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int) -> None:
        """So many samples are done."""
        now = time.monotonic()
        speed = done / max(now - self._began, 1e-9)
        left = f"  {duration((self._total - done) / speed)} left" if self._total and speed else ""
        text = f"{speed:,.0f} {self._noun}s/s{left}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif self._live and now - self._line_at > PLAIN_LINE_S:
            self._line_at = now
            say(
                self._console,
                f"predict {done:,}{f'/{self._total:,}' if self._total else ''}  {text}",
            )

    def warn_of(self, skipped: Sequence[str], told: int) -> int:
        """Name what could not be read since `told`, the first TOLD of all; returns how many there
        are.
        """
        for line in skipped[told:TOLD]:
            if self._bar:
                self._bar.console.print(
                    f"warning: {line}", markup=False, highlight=False, soft_wrap=True
                )
            else:
                warn(line)
        return len(skipped)
