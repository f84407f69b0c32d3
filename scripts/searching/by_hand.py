"""Optuna's own TPE and pruner around the hand-written script, as its tutorials have it; a line for
each value.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import optuna


def main() -> None:
    """Search for `--seconds`, with so many trials at a time as there are `--jobs`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    for name in ("seed", "seconds", "jobs", "epochs", "limit", "held-out"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        given = {
            "model": trial.suggest_categorical("model", ["mlp", "convnet"]),
            "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.99),
            "weight-decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
            "batch-size": trial.suggest_categorical("batch_size", [32, 64, 128, 256]),
            "width": trial.suggest_categorical("width", [64, 128, 256, 512]),
        }
        fixed = {
            "data": args.data,
            "epochs": args.epochs,
            "limit": args.limit,
            "held-out": args.held_out,
        }
        words = [
            word for key, value in {**given, **fixed}.items() for word in (f"--{key}", str(value))
        ]
        best, command = 0.0, [sys.executable, "-m", "scripts.searching.hand_written", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for epoch, line in enumerate(process.stdout):
                print(line.strip(), flush=True)
                best = max(best, float(line))
                trial.report(float(line), epoch)
                if trial.should_prune():
                    process.kill()
                    raise optuna.TrialPruned
        return best

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=args.seed),
        pruner=optuna.pruners.MedianPruner(),
    )
    study.optimize(objective, timeout=args.seconds, n_jobs=args.jobs)


if __name__ == "__main__":
    main()
