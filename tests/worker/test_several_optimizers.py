"""Runs with several optimizers and sparse gradients: as a loop, on any workers, resumed."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import mse_loss, softplus

from expt.worker import build
from tests.conftest import Configured, Trained, Typed
from tests.facade import Patch, RunFolder, as_typed, same
from tests.integration.test_resume import kill_at
from tests.worker.conftest import (
    ALONE,
    TrainAlone,
    TrainTogether,
    assert_same,
    stopped_and_resumed,
)

OWN = "tests.worker.ratings"
WORDS = (
    *as_typed(f"~dataset ~model +dataset._target_={OWN}.Ratings +model._target_={OWN}.Rater"),
    *as_typed("+dataset.num_workers=0 task=regression epochs=2 batch_size=16 log_every=1"),
    *as_typed("optimizer=adamw optimizer.lr=0.01 gradient_clip=0.5 scheduler=cosine"),
)
SPARSE = "{_target_: torch.optim.SparseAdam, lr: 0.05}"
ROWS = f"optimizer.groups=[{{match: users|items, optimizer: {SPARSE}}}]"
OTHER = ROWS.replace("SparseAdam", "Adagrad")
not_soft = pytest.mark.real_gpu("soft GPUs have no sparse tensors")


@not_soft
def test_the_numbers_of_a_loop_with_two_optimizers(
    train_alone: TrainAlone, configured: Configured
) -> None:
    """To the bit, clipped together; the learning rate of each is logged."""
    models: list[Any] = []
    done = train_alone(
        *WORDS, ROWS, before=lambda run: models.append(copy.deepcopy(run.learner.module))
    )
    (model,) = models
    tables = [model.users.weight, model.items.weight]
    optimizers = (
        optim.AdamW(model.layers.parameters(), 0.01, fused=True),
        optim.SparseAdam(tables, 0.05),
    )
    schedules = [optim.lr_scheduler.CosineAnnealingLR(one, 8) for one in optimizers]
    losses, rates = list[float](), list[list[float]]()
    for epoch in (1, 2):
        for batch in build.build_data(configured(*WORDS, ROWS), ALONE).train.epoch(epoch):
            loss = mse_loss(model(batch.inputs), batch.targets[:, None], reduction="sum") * (1 / 16)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            rates.append([float(one.get_last_lr()[0]) for one in schedules])
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            losses.append(loss.item())
    assert [value for _, value in done.curve("running/loss")] == pytest.approx(losses, rel=1e-6)
    for tag, expected in zip(("lr", "lr/groups.0"), zip(*rates, strict=True), strict=True):
        assert [value for _, value in done.curve(tag)] == pytest.approx(expected, rel=1e-6)
    trained = done.state()["model"]
    for ours, theirs in zip(trained.values(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().cpu())


@not_soft
@pytest.mark.parametrize(
    "more",
    [
        "ddp.shared_memory=false drop_last=false",
        "gradient_accumulation=2 ema=0.9 gradient_clip_value=0.01",
        pytest.param("gradient_accumulation=auto gradient_clip=null", marks=pytest.mark.slow),
        pytest.param("optimizer=sgd optimizer.lr=0.1 scheduler=one_cycle", marks=pytest.mark.slow),
    ],
)
def test_the_same_on_two_workers(more: str, train_together: TrainTogether) -> None:
    """Some rows are of one worker's samples alone, others of both."""
    words = (*WORDS, ROWS, *as_typed(more))
    one, two = (train_together(size, *words, name=f"{size}") for size in (1, 2))
    assert two.values == pytest.approx(one.values, rel=1e-5, abs=1e-6)
    ours, theirs = two.state()["model"], one.state()["model"]
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)


@not_soft
def test_a_table_that_is_also_used_as_a_whole(train_together: TrainTogether) -> None:
    """Its gradients are dense on any number of workers."""
    more = f"model._target_={OWN}.Tied optimizer=sgd optimizer.momentum=0 optimizer.lr=0.1"
    words = (*WORDS, *as_typed(f"{more} max_steps=4"))
    one, two = (train_together(size, *words, name=f"{size}") for size in (1, 2))
    assert two.values == pytest.approx(one.values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.slow
def test_a_fork_has_all_of_a_custom_optimizer_s_state(alone: bool, train_alone: TrainAlone) -> None:
    """So that one without changes ends as its parent."""
    cls = f"{{_target_: {OWN}.Counting, lr: 0.1}}"
    own = ("~optimizer", f"+optimizer={cls}")
    if not alone:
        own = ("optimizer=adamw", f"optimizer.groups=[{{match: layers, optimizer: {cls}}}]")
    plain = [word for word in WORDS if not word.startswith("optimizer")]
    words = (*plain, "+model.sparse=false", *own, *as_typed("checkpoint.every_steps=2"))
    whole = train_alone(*words, "checkpoint.keep=9", name="whole")
    forked = train_alone(*words, f"fork={whole.folder}@6", name="forked")
    assert same(forked.state()["model"], whole.state()["model"])


@not_soft
@pytest.mark.parametrize(
    "own", [ROWS, pytest.param(OTHER, marks=pytest.mark.slow)], ids=["SparseAdam", "Adagrad"]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_stopped_run_goes_on_to_the_same_bits(own: str, train_alone: TrainAlone) -> None:
    words = (*WORDS, own, "ema=0.9")
    assert_same(stopped_and_resumed(train_alone, *words, step=5), train_alone(*words, name="whole"))


@not_soft
@pytest.mark.slow
def test_two_workers_that_are_killed(tmp_path: Any, trained: Trained) -> None:
    words = (*WORDS, ROWS, *as_typed("world_size=2 epochs=4 checkpoint.every_steps=2 threads=1"))
    kill_at(tmp_path / "killed", words, 6, EXPT_FAULT="1:8:hang")
    resumed, whole = trained("resume=auto", name="killed"), trained(*words, name="whole")
    assert resumed.result["attempts"] == 2
    assert_same(resumed, whole)


@not_soft
def test_a_step_with_nan_is_left_out(train_alone: TrainAlone) -> None:
    words = (
        *WORDS,
        ROWS,
        *as_typed("on_nan=skip +dataset.nan_at=3 max_steps=4 scheduler=constant"),
    )
    done = train_alone(*words)
    assert done.run.learner.precision.skipped.item() == 1
    assert all(one.isfinite().all() for one in done.state()["model"].values())
    steps = {one["step"] for one in done.state()["optimizer"]["state"].values() if "step" in one}
    assert {int(step) for step in steps} == {3}


def test_each_phase_may_have_an_optimizer(train_alone: TrainAlone, configured: Configured) -> None:
    """And leave the other's parameters as they are."""
    gan = "tests.worker.own_tasks"
    words = (
        *as_typed(f"~dataset ~model +dataset._target_={gan}.Points +model._target_={gan}.GAN"),
        *as_typed(f"~task +task._target_={gan}.Adversarial +dataset.num_workers=0 epochs=1"),
        *as_typed("batch_size=16 log_every=1 optimizer=adam optimizer.lr=0.02"),
        "+task.metrics={generator: min, d_real: max}",
        "optimizer.groups=[{match: '^generator', optimizer: {name: sgd, lr: 0.1, momentum: 0.5}}]",
    )
    models: list[Any] = []
    done = train_alone(*words, before=lambda run: models.append(copy.deepcopy(run.learner.module)))
    (model,) = models
    first = optim.Adam(model.discriminator.parameters(), 0.02, fused=True)
    second = optim.SGD(model.generator.parameters(), 0.1, 0.5, fused=True)
    for batch in build.build_data(configured(*words), ALONE).train.epoch(1):
        points = model.generator(batch.inputs["noise"])
        fake = model.discriminator(points.detach())
        (softplus(-model.discriminator(batch.inputs["point"])) + softplus(fake)).mean().backward()
        first.step()
        model.zero_grad()
        softplus(-model.discriminator(points)).mean().backward()
        second.step()
        model.zero_grad()
    for ours, theirs in zip(done.state()["model"].values(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach().cpu(), rtol=1e-5, atol=1e-6)


@not_soft
@pytest.mark.slow
def test_another_optimizer_is_another_run(
    typed: Typed, trained: Trained, tmp_path: Any, monkeypatch: Patch
) -> None:
    """Which is no resumed one, and as a fork begins without its state."""
    monkeypatch.chdir(tmp_path)
    done = trained(*WORDS, ROWS, "max_steps=2", "world_size=1")
    words = (*WORDS, "max_steps=3", "world_size=1", f"resume={done.folder}")
    refused = typed(*words, OTHER, "hydra.run.dir=other")
    assert refused.returncode == 2
    assert "optimizer.groups=" in refused.stderr
    other = ROWS.replace(SPARSE, "{name: sgd, lr: 0.1}")
    forked = typed(
        *WORDS, "world_size=1", f"fork={done.folder}", other, "max_steps=3", "hydra.run.dir=f"
    )
    assert (forked.returncode, "starts fresh" in forked.stderr) == (0, True)


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("{name: adamw, lrr: 0.1}", "optimizer.groups.0.optimizer.lrr=0.1"),
        ("{name: adamv}", "optimizer.groups.0.optimizer.name=adamv"),
        ("{_target_: torch.optim.SparseAdam, lrr: 0.1}", "optimizer.groups.0.optimizer._target_="),
        ("adamw", "optimizer.groups.0.optimizer=adamw"),
    ],
)
def test_mistakes_are_named(own: str, key: str, typed: Typed, tmp_path: Any) -> None:
    words = *WORDS, f"optimizer.groups=[{{match: users, optimizer: {own}}}]"
    done = typed(*words, "world_size=1", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 2
    assert key in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [pytest.param("ddp.comm_hook=fp16", marks=pytest.mark.slow), "strategy=fsdp"]
)
def test_what_takes_no_sparse_gradients_says_so(words: str, typed: Typed, tmp_path: Any) -> None:
    done = typed(*WORDS, ROWS, "world_size=2", words, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 2
    assert f"{words}: " in done.stderr
    assert "users.weight, items.weight" in done.stderr


@not_soft
def test_torch_says_which_optimizers_take_none(typed: Typed, tmp_path: Any) -> None:
    done = typed(*WORDS, "world_size=1", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 2
    assert re.search("^error: optimizer=[^\n]*SparseAdam", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr
    assert not RunFolder(tmp_path / "run").paths.last.exists()


@pytest.mark.slow
def test_sharded_ones_are_as_whole_ones_and_resumed(trained: Trained) -> None:
    own = "optimizer.groups=[{match: '^3', optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}]"
    short = as_typed("dataset.train_limit=128 batch_size=32 log_every=1 world_size=2 threads=1")
    words = (*short, "optimizer=adamw", own)
    whole = trained(*words, "strategy=ddp", "epochs=2", name="ddp")
    sharded = trained(*words, "strategy=fsdp", "epochs=2", name="fsdp")
    assert sharded.values == pytest.approx(whole.values, abs=1e-4)
    trained(*words, "strategy=fsdp", "epochs=1", name="parts")
    assert_same(trained("resume=auto", "epochs=2", name="parts"), sharded)
