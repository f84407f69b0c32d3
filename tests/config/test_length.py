"""Settings that count steps, epochs, evaluations or minutes are compared with a run's length."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from expt.config import keys
from expt.config.constraints import plain
from expt.config.kinds import every_of
from expt.config.length import Length, beyond_the_end, effective
from expt.config.schema import RunConfig
from expt.training import schedules
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
    # a choice that does nothing with its own defaults
    "scheduler=step": "2 epochs",
    "scheduler=plateau": "2 evaluations",
    "scheduler=plateau scheduler.cooldown=2": "2 evaluations",
    "optimizer.groups=[{match: a, epochs: 3}]": "2 epochs",
    "optimizer.groups=[{match: a}, {match: b, scheduler: {name: step, warmup_epochs: 0,"
    " every_epochs: 3, gamma: 0.1}}]": "2 epochs",
    "log_every=100": "40 steps",
    "print_every=120 log_every=40": "40 steps",
    # changes only what comes after
    "early_stop={metric: loss/val, patience: 1}": "2 evaluations",
    "early_stop={metric: loss/val, patience: 3} epochs=4": "4 evaluations",
    "early_stop={metric: loss/val, patience: 5} eval_every_minutes=1 max_minutes=6": "6 eval",
    "scheduler=step scheduler.every_epochs=2": "2 epochs",
    "scheduler=plateau scheduler.patience=0": "2 evaluations",
    "scheduler=plateau scheduler.patience=2 epochs=4": "4 evaluations",
    "scheduler=plateau scheduler.cooldown=1 scheduler.patience=0 epochs=3": "3 evaluations",
    "optimizer.groups=[{match: a, epochs: 2}]": "2 epochs",
    "profile=true max_steps=4 epochs=10": "4 further steps",
    "ddp.comm_hook=powersgd max_steps=10 epochs=1": "10 further steps",
}
REACHED = (
    "max_steps=40",
    "epochs=2 max_steps=40",
    "epochs=2 max_steps=39",
    "epochs=2 max_steps=21",
    "eval_every_steps=40",
    "checkpoint.every_epochs=2",
    "early_stop={metric: loss/val, patience: 2} epochs=4",
    "early_stop={metric: loss/val, patience: 4} eval_every_minutes=1 max_minutes=6",
    "early_stop={metric: loss/val, threshold: 0.1}",
    "scheduler=step scheduler.every_epochs=1.9",
    "scheduler=plateau scheduler.patience=1 epochs=4",
    "scheduler=plateau scheduler.cooldown=1 scheduler.patience=0 epochs=4",
    "scheduler=plateau scheduler.cooldown=0 scheduler.patience=0 epochs=3",
    "optimizer.groups=[{match: a, epochs: 1.9}]",
    "profile=true max_steps=5 epochs=10",
    "profile=false max_steps=1 epochs=10",
    "log_every=40",
    "scheduler=cosine scheduler.epochs=3",
    "checkpoint.every_steps=1",
    "max_minutes=1",
    "early_stop={metric: loss/val, patience: 2} eval_every_steps=10",
    "scheduler=step epochs=6",
    "scheduler=plateau epochs=13",
    "scheduler=one_cycle",
)


def beyond(config: RunConfig) -> str | None:
    return beyond_the_end(config, Length.of(config, STEPS))


def words(text: str) -> list[str]:
    return re.findall(r"(?:[^ {\[]|\{[^}]*\}|\[[^]]*\])+", f"epochs=2 {text}")


@pytest.mark.parametrize("text", BEYOND)
def test_a_setting_that_is_never_reached_is_named(text: str, configured: Configured) -> None:
    line = beyond(configured(*words(text)))
    assert line is not None
    assert f"the run has {BEYOND[text]}" in line
    key, _, value = words(text)[1].partition("=")
    assert key in line or value in line


@pytest.mark.parametrize("text", REACHED)
def test_a_setting_that_is_reached_is_not(text: str, configured: Configured) -> None:
    assert beyond(configured(*words(text))) is None


def test_a_default_is_not(configured: Configured) -> None:
    """As in a try of a few steps."""
    assert beyond(configured("max_steps=1")) is None


def test_a_longer_run_that_reaches_it_is_advised(configured: Configured) -> None:
    for text, fix in {
        "max_steps=1000": "epochs=50",
        "checkpoint.every_steps=50 max_steps=40": "epochs=3 max_steps=null",
        "log_every=30 max_steps=20": "max_steps=30",
        "early_stop={metric: loss/val, patience: 10}": "epochs=12",
        "scheduler=step scheduler.every_epochs=2": "epochs=3",
        "scheduler=plateau scheduler.patience=2": "epochs=5",
        "early_stop={metric: loss/val, patience: 4} eval_every_steps=10": "epochs=3",
        "profile=true max_steps=4 epochs=10": "max_steps=5",
    }.items():
        given = words(text)
        line = str(beyond(configured(*given)))
        assert line.endswith(f", or {fix}")
        assert beyond(configured(*given, *fix.split())) is None


def test_a_profile_counts_the_steps_that_are_left(configured: Configured) -> None:
    config = configured("epochs=2", "profile=true")
    assert "2 further steps" in str(beyond_the_end(config, Length.of(config, STEPS, done=38)))


def test_a_fork_counts_its_own_evaluations(configured: Configured) -> None:
    stop = "early_stop={metric: loss/val, patience: 2}"
    for epochs, line in (4, "1 evaluation, "), (6, "3 evaluations, "), (7, ""):
        length = Length.of(config := configured(f"epochs={epochs}", stop), STEPS, forked=60)
        found = beyond_the_end(config, length) or ""
        assert line in found
        assert bool(found) == bool(line)
        assert found.endswith("epochs=7" * bool(line))


def test_a_fork_counts_the_epochs_of_its_present_length(configured: Configured) -> None:
    """After 3 epochs of 10 steps a fork has 20 in each: its epoch 4 ends at step 50."""
    config = configured("epochs=6", "scheduler=step", "scheduler.every_epochs=4")
    length = Length.of(config, 20, offset=-30)
    assert (length.steps, length.has("epochs")) == (90, 6)
    for step, acts in ((50, True), (49, False)):
        found = effective(config, 20, step, -30)["scheduler.every_epochs"]
        assert math.isfinite(found) == acts


def test_a_step_is_compared_with_the_evaluations_until_then(configured: Configured) -> None:
    config = configured("epochs=9", "early_stop={metric: loss/val, patience: 3}")
    for step, acts in ((3 * STEPS, True), (2 * STEPS, False)):
        assert math.isfinite(effective(config, STEPS, step)["early_stop.patience"]) == acts


SCHEDULES = {
    "MultiStepLR, milestones: [3, 8]": ["scheduler.milestones=[8]"],
    "MultiStepLR, milestones: [3, 5]": ["scheduler.milestones=[5]"],  # at the end
    "MultiStepLR, milestones: [6, 8]": ["scheduler.milestones=[6, 8]"],
    "MultiStepLR, milestones: [3, 4]": [],
    "StepLR, step_size: 5": ["scheduler.step_size=5"],
    "StepLR, step_size: 4": [],
    "StepLR, step_size: 30, interval: step": [],
    "CosineAnnealingLR, T_max: 50": [],
    "ReduceLROnPlateau, patience: 3": ["scheduler.patience=3"],
    "ReduceLROnPlateau, patience: 2": [],
    "LinearLR, total_iters: 9": [],
    "OneCycleLR, max_lr: 1, total_steps: 9, pct_start: 0.1": [],
}


@pytest.mark.parametrize("text", SCHEDULES)
def test_numbers_of_a_schedule_of_torch_s_are_compared(text: str, configured: Configured) -> None:
    named = f"scheduler={{_target_: torch.optim.lr_scheduler.{text}}}"
    config = configured("epochs=5", named)
    found = schedules.beyond_the_end(config.scheduler, Length.of(config, STEPS))
    assert [f"{key}={value}" for key, (_, value) in found.items()] == SCHEDULES[text]


EQUAL = (
    "eval_every_steps=50 eval_every_steps=1000",
    "early_stop={metric: loss/val, patience: 3} early_stop={metric: loss/val, patience: 9}",
    "scheduler=step,scheduler.every_epochs=2.1 scheduler=step,scheduler.every_epochs=9",
)
UNEQUAL = (
    *("eval_every_steps=39 eval_every_steps=40", "eval_every_steps=40 eval_every_steps=null"),
    "eval_every_steps=40 eval_every_steps=50",  # a longer run has another state there
    "eval_every_minutes=9 eval_every_minutes=null",
    "scheduler=step,scheduler.every_epochs=1 scheduler=step,scheduler.every_epochs=9",
    "early_stop={metric: loss/val, patience: 2} early_stop={metric: loss/val, patience: 3}",
)


@pytest.mark.parametrize("text", EQUAL + UNEQUAL)
def test_settings_that_are_never_reached_are_equal(text: str, configured: Configured) -> None:
    both = (word.split(",s") for word in words(text)[1:])
    one, other = (
        effective(configured("epochs=2", first, *(f"s{word}" for word in more)), STEPS)
        for first, *more in both
    )
    assert (one == other) == (text in EQUAL)


def test_every_key_that_counts_says_what() -> None:
    """By its name: a new one is compared with the length too."""
    named = {key for key in keys.all_keys() if re.search(r"(steps|epochs|minutes|patience)$", key)}
    plans = {"scheduler.epochs", "optimizer.groups.scheduler.epochs"}
    assert {key for key in named if keys.meaning(key).counts is None} == {"epoch_steps", *plans}


def test_a_sweep_says_it_once(tmp_path: Path) -> None:
    done = run("-m", "world_size=1", "epochs=1", "log_every=500", "seed=0,1", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("log_every=500") == 1


def test_a_metric_may_be_called_metrics(configured: Configured) -> None:
    metric = "{_target_: torchmetrics.classification.MulticlassAUROC, better: max, every: 5}"
    task = configured(f"+task.metrics={{metrics: {metric}, f1: max}}").task
    assert every_of(task) == every_of(plain(task)) == {"metrics": 5}
