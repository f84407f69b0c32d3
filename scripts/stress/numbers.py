"""Random configurations on digits, each trained by expt and by a plain loop: no number may
differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path

import expt
from scripts.stress import carried
from scripts.stress.plain_loop import Curves, Settings, train

TOLERANCE = 2e-4
"""Of a loss; gradients are added up in another order by another number of workers."""
ROUNDINGS = 8
"""Plain loops that round differently, one of which has to give the numbers."""


def draw(chance: random.Random) -> Settings:
    """A configuration; keys as on the command line."""
    pick = chance.choice
    found: Settings = {
        "model": pick(["mlp", "convnet"]), "init": pick(["default", "kaiming"]),
        "optimizer": pick(["sgd", "adam", "adamw"]), "scheduler": pick(["constant", "cosine",
            "step", "one_cycle"]),
        "batch_size": pick([24, 48, 72, 120]), "epochs": pick([2, 3]),
        "seed": chance.randrange(1000),
        "drop_last": pick([True, False]),
        "gradient_clip": pick([None, 0.5, 5.0]),
        "lr_scaling": pick(["none", "linear", "sqrt"]), "base_batch_size": 64,
        "dataset": pick(["digits", "digits", "open_file"]),
        "task": pick(["classification", "classification", "warmed_up"]),
        "dataset.val_fraction": pick([0.1, 0.25]),
        "optimizer.weight_decay": pick([0.0, 0.01]),
    }  # fmt: skip
    if found["dataset"] == "digits":
        found["dataset.train_limit"] = pick([None, 333, 500])
    if found["task"] == "classification":
        found["label_smoothing"] = pick([0.0, 0.1])
    found["optimizer.lr"] = (
        pick([0.02, 0.05]) if found["optimizer"] == "sgd" else pick([0.001, 0.003])
    )
    if found["optimizer"] == "sgd":
        found["optimizer.momentum"] = pick([0.0, 0.9])
        found["optimizer.nesterov"] = found["optimizer.momentum"] > 0 and pick([True, False])
    if found["scheduler"] != "one_cycle":
        found["scheduler.warmup_epochs"] = pick([0.0, 0.5])
    if found["scheduler"] == "step":
        found |= {"scheduler.every_epochs": 1.0, "scheduler.gamma": 0.5}
    if found["model"] == "mlp":
        found["model.hidden"] = pick([[16], [32, 16], []])
    return found


def ours(settings: Settings, chance: random.Random, folder: Path) -> expt.Result:
    """Train by expt, on a random number of workers and parts."""
    words = [
        f"{key}={'null' if value is None else json.dumps(value)}" for key, value in settings.items()
    ]
    if settings["model"] == "convnet":
        words += [
            "model.widths=[6,8]",
            "model.kernels=[3,3]",
            "model.strides=[1,2]",
            "model.paddings=[same,same]",
        ]
        words += ["model.batch_norm=false", "model.hidden=16", "model.dropout=0"]
    # The task counts losses, which are steps where these are whole
    parts = 1 if settings["task"] == "warmed_up" else chance.choice([1, 1, 2])
    workers = chance.choice([1, 2, 3, 4])
    if settings["dataset"] == "open_file":
        words += [f"dataset.folder='{Path.cwd()}'", f"dataset.num_workers={chance.choice([0, 2])}"]
    words += [
        f"world_size={workers}",
        f"gradient_accumulation={parts}",
        "threads=1",
        "log_every=1",
        "gpus=0",
    ]
    words += [f"ddp.shared_memory={chance.choice(['true', 'false'])}", f"hydra.run.dir='{folder}'"]
    print("  " + " ".join(words[:-1]))
    with contextlib.redirect_stdout(io.StringIO()):
        return expt.run(*words)


def differences(plain: Curves, result: expt.Result) -> list[str]:
    """A line for each number that is not the plain loop's."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]

    def curve(tag: str) -> dict[int, float]:
        return {point["step"]: point["value"] for point in points if point["tag"] == tag}

    found = []
    if result.record["steps"] != len(plain.losses):
        found.append(f"{result.record['steps']} steps, not {len(plain.losses)}")
    lrs, losses = curve("lr"), curve("running/loss")
    for step, (lr, loss) in enumerate(zip(plain.lrs, plain.losses, strict=True), start=1):
        if not math.isclose(lrs[step], lr, rel_tol=1e-6, abs_tol=1e-12):
            found.append(f"lr of step {step}: {lrs[step]}, not {lr}")
        if abs(losses[step] - loss) > TOLERANCE * max(1, abs(loss)):
            found.append(f"loss of step {step}: {losses[step]}, not {loss}")
    for split, expected in (("train", plain.train), ("val", plain.val)):
        points_of = zip(
            curve(f"loss/{split}").items(),
            curve(f"accuracy/{split}").items(),
            expected,
            strict=True,
        )
        for (step, loss), (_, accuracy), (plain_loss, plain_accuracy) in points_of:
            if (
                abs(loss - plain_loss) > TOLERANCE * max(1, plain_loss)
                or abs(accuracy - plain_accuracy) > 0.004
            ):
                found.append(
                    f"{split} after step {step}: {loss}, {accuracy}, not {plain_loss},"
                    f" {plain_accuracy}"
                )
    metrics = result.metrics
    best = result.record["best"]
    if (
        best
        and best["epoch"] == plain.best_epoch
        and (abs(metrics["loss/test"] - plain.test[0]) > TOLERANCE * max(1, plain.test[0]))
    ):
        found.append(f"test: {metrics['loss/test']}, not {plain.test[0]}")
    return found


def _differs(settings: Settings, result: expt.Result) -> list[str]:
    """The differences to the plain loop, unless rounding decides: a ReLU's input is next to 0, or
    two epochs tie.
    """
    wrong: list[str] = []
    for blurred in range(ROUNDINGS):
        found = differences(train(settings, blurred=blurred), result)
        if not found:
            return []
        wrong = wrong or found
    return wrong


def main() -> None:
    """Compare as many configurations as were asked for; exit 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first configuration; the next has the next seed"
    )
    asked = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        carried.write(Path(scratch))
        for seed in range(asked.seed, asked.seed + asked.count):
            print(f"seed {seed}")
            chance = random.Random(seed)
            settings = draw(chance)
            result = ours(settings, chance, Path(scratch) / str(seed))
            wrong = _differs(settings, result)
            failed += bool(wrong)
            for line in wrong[:5]:
                print(f"  DIFFERS  {line}", flush=True)
    print(
        f"{asked.count - failed} of {asked.count} configurations have the numbers of the plain loop"
    )
    sys.exit(bool(failed))
