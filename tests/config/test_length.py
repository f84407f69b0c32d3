"""Settings that count steps, epochs, evaluations or minutes are compared with a run's length."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expt.config import keys
from expt.config.length import beyond_the_end
from tests.conftest import Configured
from tests.facade import run

STEPS = 20
"""of an epoch"""
BEYOND = {
    "max_steps=1000": "40 steps",
    "epochs=5 max_steps=40": "2 epochs",
    "eval_every_steps=41": "40 steps",
    "eval_every_minutes=9 max_minutes=5": "5 minutes",
    "checkpoint.every_steps=41": "40 steps",
    "checkpoint.every_epochs=3": "2 epochs",
    "checkpoint.every_minutes=9 max_minutes=5": "5 minutes",
    "early_stop={metric: loss/val, patience: 2}": "2 evaluations",
    "scheduler=step scheduler.every_epochs=2.5": "2 epochs",
    "scheduler=cosine scheduler.warmup_epochs=2 epochs=4 max_steps=30": "1.5 epochs",
    "scheduler=plateau scheduler.patience=2": "2 evaluations",
    "scheduler=plateau scheduler.cooldown=2": "2 evaluations",
    "optimizer.groups=[{match: a, epochs: 3}]": "2 epochs",
    "log_every=100": "40 steps",
    "print_every=120 log_every=40": "40 steps",
    "overfit_batches=21": "20 batches an epoch",
}
REACHED = (
    *("max_steps=40", "epochs=2 max_steps=40", "eval_every_steps=40"),
    *("early_stop={metric: loss/val, patience: 1}", "scheduler=step scheduler.every_epochs=2"),
    *(
        "log_every=40",
        "scheduler=cosine scheduler.epochs=3",
        "checkpoint.every_steps=1",
        "overfit_batches=20",
        "max_minutes=1",
    ),
    *("early_stop={metric: loss/val, patience: 3} eval_every_steps=10", "scheduler=step"),
)


def words(text: str) -> list[str]:
    return re.findall(r"(?:[^ {\[]|\{[^}]*\}|\[[^]]*\])+", f"epochs=2 {text}")


@pytest.mark.parametrize("text", BEYOND)
def test_a_setting_that_is_never_reached_is_named(text: str, configured: Configured) -> None:
    line = beyond_the_end(configured(*words(text)), STEPS)
    assert line is not None
    assert f"the run has {BEYOND[text]}" in line
    key, _, value = words(text)[1].partition("=")
    assert key in line or value in line


@pytest.mark.parametrize("text", REACHED)
def test_a_setting_that_is_reached_is_not(text: str, configured: Configured) -> None:
    assert beyond_the_end(configured(*words(text)), STEPS) is None


def test_a_default_is_not(configured: Configured) -> None:
    """As in a try of a few steps."""
    assert beyond_the_end(configured("max_steps=1"), STEPS) is None


def test_a_longer_run_that_reaches_it_is_advised(configured: Configured) -> None:
    for text, fix in {
        "max_steps=1000": "epochs=50",
        "checkpoint.every_steps=50 max_steps=40": "epochs=3 max_steps=null",
        "log_every=30 max_steps=20": "max_steps=40",
        "early_stop={metric: loss/val, patience: 10}": "epochs=11",
    }.items():
        given = words(text)
        line = str(beyond_the_end(configured(*given), STEPS))
        assert line.endswith(f", or {fix}")
        assert beyond_the_end(configured(*given, *fix.split()), STEPS) is None


def test_every_key_that_counts_says_what() -> None:
    """By its name: a new one is compared with the length too."""
    named = {key for key in keys.all_keys() if re.search(r"(steps|epochs|minutes|patience)$", key)}
    shapes = {"epoch_steps", "scheduler.epochs"}  # of an epoch, and of a plan
    assert {key for key in named if keys.meaning(key).counts is None} == shapes


def test_a_sweep_says_it_once(tmp_path: Path) -> None:
    done = run("-m", "model=mlp", "epochs=1", "log_every=500", "seed=0,1", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("log_every=500") == 1
