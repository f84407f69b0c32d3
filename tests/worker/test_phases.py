"""Tasks whose step is several updates equal a plain loop, on any workers and resumed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, softplus

from expt.errors import ConfigError
from expt.training.learner import parameters_of
from expt.worker import build
from tests.conftest import Configured
from tests.facade import as_typed, common
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, stopped_and_resumed
from tests.worker.own_tasks import GAN, Partial

CONTRASTIVE = {"dataset": "TwoViews", "model": "Encoder", "task": "SimCLR"}
OWN = "tests.worker.own_tasks"
WORDS = (
    *as_typed(f"~dataset ~model +dataset._target_={OWN}.Points +model._target_={OWN}.GAN"),
    *as_typed(f"~task +task._target_={OWN}.Adversarial +dataset.num_workers=0"),
    *as_typed(
        "epochs=2 batch_size=16 drop_last=false log_every=1 optimizer=adam optimizer.lr=0.02"
    ),
    "+task.metrics={generator: min, d_real: max}",
    "optimizer.groups=[{match: '^generator', lr_scale: 0.5}]",
)


@pytest.mark.slow
def test_the_numbers_of_a_plain_loop(train_alone: TrainAlone, configured: Configured) -> None:
    """Use an optimizer for each network, and resume in the second epoch."""
    weights: list[nn.Module] = []
    done = train_alone(*WORDS, before=lambda run: weights.append(copy.deepcopy(run.learner.module)))
    config, model = configured(*WORDS), weights[0]
    assert isinstance(model, GAN)
    optimizers = (
        optim.Adam(model.discriminator.parameters(), 0.02),
        optim.Adam(model.generator.parameters(), 0.01),
    )
    losses: list[list[float]] = [[], [], []]
    for epoch in (1, 2):
        for batch in build.build_data(config, ALONE).train.epoch(epoch):
            points = model.generator(batch.inputs["noise"])
            real = model.discriminator(batch.inputs["point"])
            loss = (softplus(-real) + softplus(model.discriminator(points.detach()))).mean()
            model.zero_grad()
            loss.backward()
            optimizers[0].step()
            again = softplus(-model.discriminator(points)).mean()
            model.zero_grad()
            again.backward()
            optimizers[1].step()
            found = loss.item(), again.item(), real.sigmoid().mean().item()
            for seen, value in zip(losses, found, strict=True):
                seen.append(value)
    for name, seen in zip(("loss", "generator", "d_real"), losses, strict=True):
        assert [value for _, value in done.curve(f"running/{name}")] == pytest.approx(
            seen, abs=1e-5
        )
    trained = done.state()["model"]  # the run ends with the best
    for ours, theirs in zip(trained.values(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), atol=1e-5, rtol=1e-4)
    assert all(parameter.requires_grad for parameter in done.run.learner.module.parameters())
    assert stopped_and_resumed(train_alone, *WORDS, step=9).points == done.points


@pytest.mark.slow
def test_phases_on_any_workers(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    """In the last batch of an epoch, of one sample, some have none."""
    one = train_alone(*WORDS, name="one")
    assert len(one.curve("running/loss")) == 14
    runs = [
        train_together(2, *WORDS, "gradient_accumulation=2", name="two"),
        train_together(4, *WORDS, "ddp.shared_memory=false", "epochs=1", name="four"),
    ]
    for run in runs:
        for tag in ("running/loss", "running/d_real", "loss/train", "loss/val", "generator/val"):
            curve = dict(run.curve(tag))
            expected = {step: value for step, value in one.curve(tag) if step <= max(curve)}
            assert curve == pytest.approx(expected, abs=1e-4), (run.folder, tag)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("Forgetful", [], r"^phases: generator: '\^genrator' .* Did you mean 'generator'"),
        ("Partial", [], r"^phases: no phase trains generator\.0\.weight, generator\.0\.bias,"),
        ("Adversarial", ["on_nan=skip"], r"^Adversarial\.phases: "),
        ("Adversarial", ["gradient_accumulation=auto"], r"^Adversarial\.phases: "),
    ],
)
def test_wrong_phases(train_alone: TrainAlone, name: str, more: list[str], told: str) -> None:
    task = f"+task._target_={OWN}.{name}"
    with pytest.raises(ConfigError, match=told):
        train_alone(*[word for word in WORDS if not word.startswith("+task._target_")], task, *more)


def test_what_is_frozen_need_be_in_no_phase() -> None:
    model = GAN()
    model.generator.requires_grad_(False)
    assert {*parameters_of(Partial.phases, model)["discriminator"]} == {
        *model.discriminator.parameters()
    }


@pytest.mark.filterwarnings(
    "ignore:.*functional.all_gather is deprecated:FutureWarning"
)  # what torch 2.15 has is private
def test_whole_batch_loss(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    own = [f"+{key}._target_=tests.worker.own_tasks.{name}" for key, name in CONTRASTIVE.items()]
    words = (
        *as_typed("~dataset ~model ~task epochs=2 batch_size=16 log_every=1"),
        *own,
        "+dataset.num_workers=0",
    )
    two, one = train_together(2, *words, name="two"), train_alone(*words, name="one")
    losses = dict(one.curve("running/loss"))
    assert len(losses) == 10
    assert losses[10] < losses[1] - 0.05
    for tag in ("running/loss", "loss/train", "loss/val", "loss/test"):
        assert dict(two.curve(tag)) == pytest.approx(dict(one.curve(tag)), abs=1e-5), tag


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "searching": ("line_search=strong_wolfe", {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    "fixed": ("max_iter=4", {"max_iter": 4}),
}
CLOSURES_WORDS = as_typed(
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


@pytest.mark.parametrize("name", common(SIZES, "searching"))
def test_closure_loop_numbers(
    train_alone: TrainAlone, train_together: TrainTogether, configured: Configured, name: str
) -> None:
    """And the same bits when resumed; on two workers with micro-batches, uneven in the last."""
    words = [*CLOSURES_WORDS, f"optimizer.{SIZES[name][0]}"]
    # Before this process has a GPU, which no fork of it may have then.
    two = train_together(2, *words, "gradient_accumulation=2", name="two")
    modules: list[nn.Module] = []
    done = train_alone(*words, before=lambda run: modules.append(copy.deepcopy(run.learner.module)))
    train = build.build_data(configured(*words), ALONE).train
    batches = [batch for epoch in (1, 2, 3) for batch in train.epoch(epoch)]
    expected = closure_loop(modules[0], batches, SIZES[name][1])
    assert expected[-1] < expected[0] - 0.05
    losses = [value for _, value in done.curve("running/loss")]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert stopped_and_resumed(train_alone, *words, step=5).points == done.points
    for tag in ("running/loss", "loss/val"):
        assert dict(two.curve(tag)) == pytest.approx(dict(done.curve(tag)), rel=1e-3), tag


def test_a_class_whose_step_needs_a_closure_gets_one(train_alone: TrainAlone) -> None:
    named = train_alone(*CLOSURES_WORDS, name="named")
    custom = [word for word in CLOSURES_WORDS if not word.startswith("optimizer")]
    settings = "_target_: torch.optim.LBFGS, lr: 0.5, history_size: 4, max_iter: 4"
    custom += ["~optimizer", f"+optimizer={{{settings}}}"]
    assert train_alone(*custom, name="custom").points == named.points
    with pytest.raises(ConfigError, match=r"^optimizer=torch\.optim\.LBFGS: "):
        train_alone(*custom, "on_nan=skip", name="refused")
