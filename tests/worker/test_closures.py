"""Optimizers whose step computes the loss itself: torch's own closure loop, on any number of
workers, and when resumed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from expt.errors import ConfigError
from expt.worker import build
from tests.conftest import Configured
from tests.facade import as_typed
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, stopped_and_resumed
from tests.worker.test_run import values

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "searching": ("line_search=strong_wolfe", {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    "fixed": ("max_iter=4", {"max_iter": 4}),
}
WORDS = as_typed(
    "model=mlp model.dropout=0 optimizer=lbfgs optimizer.lr=0.5 optimizer.history_size=4"
    " optimizer.max_iter=4 epochs=3 drop_last=false batch_size=600 log_every=1 gradient_clip=3"
    " checkpoint.every_steps=5"
)


def closure_loop(module: nn.Module, batches: Any, settings: dict[str, Any]) -> list[float]:
    """Train as torch's documentation does; return the losses before each step."""
    optimizer = optim.LBFGS(module.parameters(), lr=0.5, history_size=4, **settings)
    seen = []
    for batch in batches:

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(module(batch.inputs), batch.targets)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 3)
            return loss.detach()

        seen.append(float(optimizer.step(closure)))
    return seen


@pytest.mark.parametrize("name", SIZES)
def test_closure_loop_numbers(train_alone: TrainAlone, configured: Configured, name: str) -> None:
    """And the same bits when resumed."""
    words = [*WORDS, f"optimizer.{SIZES[name][0]}"]
    modules: list[nn.Module] = []
    done = train_alone(*words, before=lambda run: modules.append(copy.deepcopy(run.learner.module)))
    train = build.build_data(configured(*words), ALONE).train
    batches = [batch for epoch in (1, 2, 3) for batch in train.epoch(epoch)]
    expected = closure_loop(modules[0], batches, SIZES[name][1])
    assert expected[-1] < expected[0] - 0.05
    losses = [value for _, value in done.curve("running/loss")]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert values(stopped_and_resumed(train_alone, *words, step=5)) == values(done)


def test_the_same_on_two_workers(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    """With micro-batches, too; the last batch of an epoch is smaller."""
    words = [*WORDS, "optimizer.line_search=strong_wolfe"]
    two = train_together(2, *words, "gradient_accumulation=2", name="two")
    one = train_alone(*words, name="one")
    for tag in ("running/loss", "loss/val"):
        assert dict(two.curve(tag)) == pytest.approx(dict(one.curve(tag)), rel=1e-3), tag


def test_a_class_whose_step_needs_a_closure_gets_one(train_alone: TrainAlone) -> None:
    named = train_alone(*WORDS, name="named")
    custom = [word for word in WORDS if not word.startswith("optimizer")]
    settings = "_target_: torch.optim.LBFGS, lr: 0.5, history_size: 4, max_iter: 4"
    custom += ["~optimizer", f"+optimizer={{{settings}}}"]
    assert values(train_alone(*custom, name="custom")) == values(named)
    with pytest.raises(ConfigError, match=r"^optimizer=torch\.optim\.LBFGS: "):
        train_alone(*custom, "on_nan=skip", name="refused")


@pytest.mark.parametrize(
    "word", ["amp=fp16", "on_nan=skip", "strategy=fsdp", "strategy=hsdp", "offload=cpu"]
)
def test_what_a_closure_cannot_do_is_refused_by_its_key(configured: Configured, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word}: optimizer=lbfgs"):
        configured(*WORDS, word)
