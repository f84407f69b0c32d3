"""The parts of scripts/first_card: each is a process that prints a line of JSON for each figure."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import data, gpu
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS
from scripts.benchmarks.systems import ROOT, environment, start


class Row(NamedTuple):
    """A figure: what was tried, what came of it, and what it is to be compared with."""

    case: str
    found: str
    compared: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    steps: int = 40
    rounds: int = 5
    vision: str = "resnet18"
    """The model of images."""
    images: int = 20_000
    side: int = 28
    batch_size: int = 512
    matrix: int = 8192
    transformer: tuple[str, ...] = ("model.size=124m", "dataset.context=1024", "batch_size=16")
    photos: tuple[int, int, int] = (100, 1200, 1600)
    photo_names: int = 20
    """Names of each photo: all of them are read in an epoch."""
    photo_size: int = 224
    runs: int = 8
    tests: str = "not compiled"
    """Those of tests/gpu that run, as for pytest's -k."""


SMALL = Sizes(
    steps=2,
    rounds=1,
    vision="convnet",
    images=40,
    side=8,
    batch_size=4,
    matrix=128,
    transformer=("model.size=400k", "dataset.context=32", "batch_size=4"),
    photos=(20, 64, 80),
    photo_names=1,
    photo_size=16,
    runs=2,
    tests="uuid or one_gpu",
)


def machine(_: Sizes, __: Path) -> Iterator[Row]:
    """The card and the software, which every other figure depends on."""
    import torch  # late: the command that starts the parts does without

    card, version = torch.cuda.get_device_properties(0), torch.cuda.nccl.version()
    parts = [card.name, f"{card.total_memory / 2**30:.0f} GiB", f"torch {torch.__version__}"]
    parts += [f"cuDNN {torch.backends.cudnn.version()}", f"NCCL {'.'.join(map(str, version))}"]
    parts += [f"Python {sys.version.split()[0]}", f"{len(os.sched_getaffinity(0))} cores"]
    yield Row("the card", parts[0], ", ".join(parts[1:]))


def one(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """A run on the card, whose losses are held to those of the CPU."""
    words = ["model=convnet", "model.dropout=0", f"max_steps={sizes.steps}", "log_every=1"]
    here = _trained(scratch / "one", *words, "gpus=1")
    first_s = here.result["first_step_s"]
    yield Row("a convnet on the digits: from the command to the first step", f"{first_s:.2f} s")
    cpu = _trained(scratch / "cpu", *words, "gpus=0", "world_size=1")
    yield _off(
        "the same, float32: largest difference from the CPU's losses", here, cpu, at_most=1e-3
    )


def run_tests(sizes: Sizes, scratch: Path, chosen: str | None = None) -> Iterator[Row]:
    """tests/gpu, with a row for each test that fails."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-v", "--timeout=100"]
    command += ["-k", chosen or sizes.tests, f"--basetemp={scratch / 'tests'}", "tests/gpu"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    counts = dict.fromkeys(("PASSED", "FAILED", "SKIPPED"), 0)
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        name, _, rest = line.partition(" ")
        if name.startswith("tests/gpu/") and (word := rest.split(" ")[0].strip()) in counts:
            counts[word] += 1
            if word == "FAILED":
                yield Row(name, "failed")
    count = ", ".join(f"{number} {word.lower()}" for word, number in counts.items())
    yield Row(f"pytest -m gpu -k '{chosen or sizes.tests}' tests/gpu", count)
    if not counts["PASSED"] or process.wait():
        sys.exit("pytest failed, see above")


def gloo(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """Two workers by gloo on the one card, whose losses are held to those of one worker."""
    words = ["gpus=1", "backend=gloo", "log_every=1", f"max_steps={sizes.steps}"]
    alone, both = (
        _trained(scratch / f"gloo{count}", *words, f"world_size={count}") for count in (1, 2)
    )
    yield _off(
        "mlp, two workers on the one card: largest difference from one worker's losses",
        both,
        alone,
        1e-3,
    )


def amp(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """An epoch in each precision, and the loss at its end."""
    for kind in ("bf16", "fp16", "false"):
        run = _trained(
            scratch / f"amp-{kind}", *_images(sizes, sizes.images), f"amp={kind}", "epochs=3"
        )
        epoch_s = statistics.median(run.result["epoch_s"][1:])
        case = f"{sizes.vision}, batch {sizes.batch_size}, {sizes.images:,} images, amp={kind}"
        loss, mib = (run.result["metrics"][tag] for tag in ("loss/val", "memory/gpu_mib"))
        yield Row(
            f"{case}: an epoch",
            f"{epoch_s:.3g} s",
            f"loss/val {loss:.4f}, {mib:,.0f} MiB of the card",
        )


def step(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """A step's share of the card's rate of matrix products, beside a bare loop's."""
    rate = gpu.matrix_rate(sizes.matrix)
    yield Row(f"bf16 matrix product, {sizes.matrix} cubed", f"{rate:.3g} TFLOP/s")
    for model, words in _models(sizes, scratch).items():
        yield _step(model, [*words, "amp=bf16"], sizes, rate)


def compiled(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """The same step compiled, and the tests of what is compiled."""
    rate = gpu.matrix_rate(sizes.matrix)
    for model, words in _models(sizes, scratch).items():
        yield _step(f"{model}, compile=true", [*words, "amp=bf16", "compile=true"], sizes, rate)
    yield from run_tests(sizes, scratch, "compiled")


def photos(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """Photos from files to a model on the card, beside a loader by hand."""
    from scripts.baselines import pictures  # late: it imports torch

    (number, height, width), size = sizes.photos, sizes.photo_size
    pictures.write(folder := scratch / "photos", number, height, width)
    for photo in [*folder.rglob("*.jpg")]:
        for name in range(1, sizes.photo_names):
            photo.with_stem(f"{photo.stem}-{name}").hardlink_to(photo)
    number *= sizes.photo_names
    words = ["dataset=image_folder", f"dataset.root={folder}", f"model={sizes.vision}", "gpus=1"]
    words += [f"dataset.image_size=[{size},{size}]", "dataset.cache=false", "batch_size=16"]
    run = _trained(scratch / "photos-run", *words, "amp=bf16", "epochs=3")
    train_size = int(run.result["data"]["train_size"])
    ours = train_size / statistics.median(run.result["epoch_s"][1:])
    readers = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "scripts.baselines.pictures", str(folder), "--epochs=3"]
    text = start([*command, f"--size={size}", f"--readers={readers}"]).text
    by_hand = number / statistics.median(json.loads(text)["epoch_s"][1:])
    case = f"{number} photos of {width}x{height} to {size}x{size}, {sizes.vision}, nothing cached"
    yield Row(
        case, f"{ours:,.0f} photos/s", f"{by_hand:,.0f}/s by hand, {readers} readers, loading alone"
    )


def memory(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """The card's memory at its peak, beside what `expt plan` says."""
    for model, words in _models(sizes, scratch).items():
        words = [*words, "amp=bf16"]
        run = _trained(scratch / f"memory-{model}", *words, f"max_steps={sizes.steps}")
        plan = start([sys.executable, "-m", "expt", "plan", "--json", *words]).text
        planned = json.loads(plan.splitlines()[-1])["plan"]["plans"][0]["total"] / 2**20
        peak = run.result["metrics"]["memory/gpu_mib"]
        yield Row(f"{model}, bf16: peak", f"{peak:,.0f} MiB", f"planned {planned:,.0f} MiB")


def packed(sizes: Sizes, scratch: Path) -> Iterator[Row]:
    """Several runs on the one card at once, beside one after another."""
    source = data.made_up(scratch / "made-up", sizes.images, 256)
    bench = Bench(
        systems={}, source=source, scratch=scratch, rounds=1, epochs=5, models=(),
        images=sizes.images, points=(), gpus=1, say=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    for found in gpu.packed(bench, sizes.runs):
        in_a_row = found.median("in a row")
        yield Row(found.case, f"{found.median(OURS):.3g} s", f"{in_a_row:.3g} s one after another")


class Part(NamedTuple):
    """A part, and the seconds that it may take."""

    measure: Callable[[Sizes, Path], Iterator[Row]]
    limit_s: int
    on_software: bool = True
    """Whether soft GPUs can show it."""


PARTS = {
    "machine": Part(machine, 30),
    "one": Part(one, 60),
    "tests": Part(run_tests, 200),
    "gloo": Part(gloo, 45),
    "amp": Part(amp, 75),
    "step": Part(step, 75),
    "compile": Part(compiled, 120, on_software=False),
    "photos": Part(photos, 75),
    "memory": Part(memory, 60),
    "packed": Part(packed, 90),
}
"""In the order in which they are tried."""


class _Run(NamedTuple):
    result: dict[str, Any]
    losses: list[float]


def _trained(folder: Path, *words: str) -> _Run:
    """Train by the command."""
    quiet = ("tensorboard.images=false", f"hydra.run.dir='{folder}'")
    start([sys.executable, "-m", "expt", *words, *quiet])
    points = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [point["value"] for point in points if point["tag"] == "running/loss"]
    return _Run(json.loads((folder / "result.json").read_text()), losses)


def _off(case: str, mine: _Run, other: _Run, at_most: float) -> Row:
    off = max(abs(a - b) for a, b in zip(mine.losses, other.losses, strict=True))
    word = "met" if off <= at_most else "MISSED"
    return Row(f"{case}, {len(mine.losses)} steps", f"{off:.1e}", f"{at_most:g}: {word}")


def _images(sizes: Sizes, number: int) -> list[str]:
    words = [f"model={sizes.vision}", "dataset=synthetic", f"dataset.train_size={number}", "gpus=1"]
    words += [f"dataset.image_size=[{sizes.side},{sizes.side}]", "optimizer.lr=0.01"]
    return [*words, f"dataset.test_size={number // 10}", f"batch_size={sizes.batch_size}"]


def _models(sizes: Sizes, scratch: Path) -> dict[str, list[str]]:
    """The words of a model of images and of one of text, which is written."""
    (text := scratch / "text.txt").write_bytes(os.urandom(2**20).hex().encode())
    transformer = ["model=transformer", "task=language_model", "dataset=text", "optimizer=adamw"]
    transformer += [f"dataset.root={text}", "dataset.train_limit=2000", "gpus=1"]
    return {
        sizes.vision: _images(sizes, 10 * sizes.batch_size),
        "transformer": [*transformer, *sizes.transformer],
    }


def _step(case: str, words: list[str], sizes: Sizes, rate: float) -> Row:
    """Return the time of a step on batches that are ready, by scripts/cards/step.py."""
    command = [sys.executable, "-m", "scripts.cards.step", f"--steps={sizes.steps}"]
    command += [f"--rounds={sizes.rounds}", *words]
    found = json.loads(start(command).text.splitlines()[-1])
    ours, bare = (statistics.median(found[name]) for name in (OURS, "bare"))
    reached = [found["flops"] / seconds / 1e12 / rate for seconds in (ours, bare)]
    batch = next(word for word in reversed(words) if word.startswith("batch_size="))
    what = f"{case}, {batch}, bf16: a step; its share of that rate; its first step"
    here = f"{1e3 * ours:.3g} ms; {reached[0]:.0%}; {found['first_s']:.3g} s"
    return Row(what, here, f"{1e3 * bare:.3g} ms; {reached[1]:.0%} (bare loop, not compiled)")


def main() -> None:
    """Print the rows of a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    os.chdir(tempfile.mkdtemp(dir=args.scratch))  # what runs leave by default
    try:
        for row in PARTS[args.part].measure(SMALL if args.small else Sizes(), args.scratch):
            print(json.dumps(row), flush=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd}\nexit code {error.returncode}\n{(error.stderr or '').strip()}")


if __name__ == "__main__":
    main()
