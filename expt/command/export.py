"""`expt export`: a trained run's model as a file for other programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from expt import machine
from expt.command import terminal
from expt.command.trained_runs import chosen
from expt.command.words import Parser, positive, refuse_taken
from expt.errors import ConfigError, require
from expt.runs.named_checkpoint import trained_run
from expt.runs.paths import RunPaths
from expt.runs.view.text import Console, elapsed, say, shown_path

ABOUT = """\
Write a trained run's model to a file that other programs load without expt: ONNX, or torch.export's
(.pt2). It takes batches of any size. A model of transformers becomes a folder for from_pretrained,
with its tokenizer. It is written only if its outputs equal the model's, on samples of the run's
dataset, or on random tokens."""
EXAMPLES = """examples
  python -m expt export RUN --format onnx
  python -m expt export RUN --format onnx --preprocess --output digits.onnx
  python -m expt export RUN --format torch_export --which last --batch-size 1
  python -m expt export RUN --format huggingface --output my-model
"""
FORMATS = ("torch_export", "onnx", "huggingface")


@machine.not_world_writable()
def main(words: Sequence[str]) -> int:
    """Carry out the command of `words`.

    Raises ConfigError for a model that cannot be exported so, RunFailed where the check fails.
    """
    parser = Parser("export", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run; of a sweep: its best")
    add("--format", required=True, choices=FORMATS, help="of the file")
    usual = " or ".join(str(RunPaths(Path("RUN")).exported(each)) for each in FORMATS)
    parser.add_output("--output", f"[{usual}]")
    add("--which", choices=("best", "last"), help="which checkpoint; RUN@last is the same [best]")
    add("--batch-size", type=positive, metavar="N", help="take batches of this size only [any]")
    about = "include normalising and encoding: take pixels in [0, 1], or rows as in the table"
    add("--preprocess", action="store_true", help=about)
    add("--adapters", action="store_true", help="write LoRA's adapters alone, for peft")
    add("--tolerance", type=float, default=1e-4, metavar="X", help="allowed difference [1e-4]")
    asked = parser.parse_intermixed_args(list(words))  # `_file` looks at the output
    console = Console()
    run, which = chosen([str(asked.run)], asked.which, console)[0]
    trained_run(run, which)
    file = _file(run, asked.format, asked.output, force=asked.force)
    if not asked.tolerance > 0:
        raise ConfigError(f"--tolerance {asked.tolerance:g}: give a number above 0")
    of_files = {"--batch-size": asked.batch_size, "--preprocess": asked.preprocess}
    others = of_files if asked.format == "huggingface" else {"--adapters": asked.adapters}
    if given := next((name for name, value in others.items() if value), None):
        raise ConfigError(f"{given}: does not go with --format {asked.format}; leave it out")
    if asked.format == "onnx":
        require("--format onnx", "onnx", "onnxscript", "onnxruntime", extra="onnx")
    began = time.monotonic()
    common = {"which": which, "tolerance": asked.tolerance}
    from expt.inference import export  # late: it imports torch

    if asked.format == "huggingface":
        checks = export.export_folder(run, file, adapters=asked.adapters, **common)
    else:
        sizes = {"batch_size": asked.batch_size, "preprocess": asked.preprocess}
        checks = export.export(run, file, asked.format, force=asked.force, **sizes, **common)
    terminal.put(exported=str(file.absolute()), checks=checks)
    files = [file, *file.rglob("*")]
    size = f"{sum(one.stat().st_size for one in files if one.is_file()) / 1e6:.1f} MB"
    say(console, f"exported     {shown_path(file)}, {size} in {elapsed(time.monotonic() - began)}")
    for name, result in checks.items():
        say(console, f"{name:<13}{result}")
    return 0


def _file(run: Path, kind: str, output: Path | None, *, force: bool) -> Path:
    file, is_folder = output or RunPaths(run).exported(kind), kind == "huggingface"
    if is_folder and (any(file.iterdir()) if file.is_dir() else file.exists()):  # somebody's files
        raise ConfigError(f"{file}: is there already; remove it, or name another by --output")
    refuse_taken("--output", file, force=force, may_be_folder=is_folder)
    return file
