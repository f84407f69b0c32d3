"""`expt predict`: a run's model on files, folders, or a split of its dataset."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from expt import machine, signals
from expt.command import terminal, trained_runs
from expt.command.words import Parser
from expt.data.table_files import SUFFIXES
from expt.errors import ConfigError, ExptError, listed, warn
from expt.inference import writing
from expt.inference.plan import Plan
from expt.inference.template import Template, to_template
from expt.launch.launcher import refuse_in_torchrun
from expt.progress import phase
from expt.runs.tags import SPLITS
from expt.runs.view.text import Console, say

REPORTED = 10
"""Files that could not be read and are named; of the others the number is reported."""
EXAMPLES = f"""what you can give, depending on the run's dataset
  images            pictures, folders with pictures below them, or arrays (.npy, .npz) of images
  a table           {", ".join(SUFFIXES)}, or a .npy of features: columns by name, no targets
  a text            plain texts: how likely each line is
  texts             tables with the columns of texts, or --text "..."
  custom samples    arrays of samples (.npy, .npz)

what is written
  classification  class, probability, and p_NAME of every class; with --top K only the K likeliest
  multilabel      labels (by task.threshold), and p_NAME of every label
  regression      the targets by name, in their units
  segmentation    a PNG of class numbers for each picture (--output FOLDER), or an .npz of masks
  language model  tokens, loss (nats for each) and perplexity
  a custom task   what its method `predict` returns, else its model's outputs
With --template these are filled into its columns, its rows found by their ids (file names, or a
table's column), a class as a name or number as in its examples; ids without a match are named.
Rows are in the order of the arguments, sorted within a folder; --split adds the column target.
An .npz has an array for each of these, and the names of classes.

Files, or rows of a table, that can't be read are reported and left out; the others are written, and
the exit code is 1. Predictions use the precision of the run's evaluations; --amp false computes in
float32.

Of several runs, or of a sweep with --best or --filter, it is the mean of their probabilities or
values. --split val of runs with several folds predicts each sample by those that held it out.

examples
  python -m expt predict RUN cat.jpg photos --output photos.csv
  python -m expt predict RUN photos --top 3
  python -m expt predict RUN new.csv --output new_with_predictions.jsonl --which last
  python -m expt predict RUN --split test --output test.npz
  python -m expt predict SWEEP --best 5 photos --flips --output photos.csv
  python -m expt predict RUN test_images --template sample_submission.csv --output submission.csv
"""


def main(words: Sequence[str]) -> int:
    """Carry out the command of `words`.

    Raise ExptError where some samples could not be read, and the errors of `Plan`.
    """
    asked = parse(words)
    output, force, template = asked.pop("output"), asked.pop("force"), asked.pop("template")
    refuse_in_torchrun("expt predict")
    chosen, to_file = Plan(**asked), output is not None and output != Path("-")
    filled = Template(template, chosen) if template else None
    if filled and (output is None or output.suffix.lower() != ".csv"):
        raise ConfigError(
            f"--template {template}: name the file to write, e.g. --output filled.csv"
        )
    masks = chosen.form.each == "pixel"
    if masks and not to_file:
        raise ConfigError("masks are not text; name a folder or an .npz, e.g. --output masks")
    if output is not None and to_file:
        read = [*chosen.inputs.files, *([template] if template else [])]
        if os.path.realpath(output) in map(os.path.realpath, read):
            raise ConfigError(f"--output {output}: is one of the files that are read")
        allowed = ("", ".npz") if masks else tuple(writing.FILES)
        is_other = output.exists() and output.is_file() != bool(output.suffix)
        if output.suffix.lower() not in allowed or is_other:
            wanted = "a folder (of PNGs) or an .npz" if masks else f"a file: {', '.join(allowed)}"
            raise ConfigError(f"--output {output}: name {wanted}")
    with machine.not_world_writable(), signals.Heeded(), signals.heeded_at_once():
        return _predict(chosen, output, filled, to_file=to_file, force=force)


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `Plan`, `output`, and `force`, by which that is written over."""
    parser = Parser(
        "predict", "Predict with a run's model for files, or for a split of its dataset.", EXAMPLES
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's folder; several, or a sweep: their mean")
    add("paths", nargs="*", metavar="PATH", help="files or folders")
    add("--split", metavar="|".join(SPLITS), help="a split of the run's dataset instead of files")
    add("--text", action="append", default=[], dest="texts", help="a text instead of files")
    about = ".csv, .jsonl, .npz; - is the terminal, as CSV"
    parser.add_output("--output", about, may_be_folder=True)
    add(
        "--template", type=Path, metavar="CSV", help="fill its columns, in its order, into --output"
    )
    add("--top", type=int, metavar="K", help="only the K likeliest classes")
    trained_runs.add_options(parser)
    add("--which", choices=("best", "last"), help="which checkpoint; RUN@last is the same [best]")
    add("--batch-size", type=int, metavar="N", help="samples at a time [40 MB, up to 1024]")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... [auto]")
    amp = ("recorded", "false", "true", "bf16", "fp16")
    add("--amp", choices=amp, default="recorded", help="mixed precision [as the run had it]")
    found: dict[str, Any] = vars(parser.parse_args(words))
    runs, paths = trained_runs.named([found.pop("run"), *found["paths"]])
    if setting := next((each for each in paths if "=" in each and not os.path.lexists(each)), ""):
        raise ConfigError(f"{setting}: a prediction takes files, and no settings; leave it out")
    options = {"best": found.pop("best"), "filters": found.pop("filter")}
    console = Console(stderr=True)
    found["runs"] = trained_runs.chosen(runs, found.pop("which"), console, **options)
    found["paths"] = [*map(Path, paths)]
    found["amp"] = {"true": True, "false": False}.get(found["amp"], found["amp"])
    return found


def _predict(
    chosen: Plan, output: Path | None, filled: Template | None, *, to_file: bool, force: bool
) -> int:
    from expt.inference.predict import Predictor  # late: it imports torch

    predictor, console, began = Predictor(chosen), Console(stderr=not to_file), time.monotonic()
    skipped, noun = predictor.skipped, chosen.noun
    with (
        _output(chosen, output, filled, force=force) as write,
        phase("predicting", chosen.total or 0) as here,
    ):
        for answers in predictor:
            write(answers, predictor.form)
            here.done = predictor.seen
        terminal.put(
            skipped=skipped,
            written=str(output.absolute()) if output and to_file else None,
            mean_of=[run.label for run in chosen.runs],
        )
        for line in skipped[:REPORTED]:
            warn(line)
        if len(skipped) == predictor.seen:
            raise ConfigError(f"none of {predictor.seen} {noun}s could be read; nothing is written")
    number, seconds = predictor.seen - len(skipped), time.monotonic() - began
    if to_file:
        speed = f"{number / max(seconds, 1e-9):,.0f} {noun}s/s"
        on = f"in {seconds:.1f} s on {predictor.device}"
        say(console, f"predicted    {number:,} {noun}s {on}, {speed}")
        if len(chosen.runs) > 1:
            names = listed(Path(run.label).name for run in chosen.runs)
            say(console, f"mean of      {len(chosen.runs)} runs: {names}")
        if filled:
            others = (each for each in filled.filled.items() if each[0] != filled.id)
            by = listed(f"{name} by {fill.words}" for name, fill in others)
            say(console, f"filled       {by}")
        say(console, f"written      {output}")
    if skipped:
        count = f"{len(skipped)} of {predictor.seen} {noun}s"
        raise ExptError(f"{count} could not be read, and are left out")
    return 0


@contextlib.contextmanager
def _output(
    chosen: Plan, output: Path | None, filled: Template | None, *, force: bool
) -> Iterator[writing.Write]:
    found = list[Any]()
    if output in (None, Path("-")) and terminal.put(predictions=found):
        yield lambda answers, form: found.extend(form.answers(answers))
        return
    if output is None:
        yield writing.to_terminal(lambda line: say(Console(highlight=False), line))
        return
    if filled is not None:
        opened = to_template(filled, output, force=force)
    elif output == Path("-"):
        opened = writing.to_csv(sys.stdout.buffer)
    elif output.suffix.lower() in writing.FILES:
        opened = writing.to_file(output, force=force)
    else:
        opened = writing.to_masks(output, chosen.inputs.files, chosen.masks_root, force=force)
    with opened as write:
        yield write
