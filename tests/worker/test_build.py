"""Every setting that shapes a step arrives there: curves of whole runs against a loop written out
by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from expt.data import indexing
from expt.data.kinds.originals import Digits
from expt.worker import parallel
from tests.facade import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether

STEPS, SEED = 8, 3
MEAN, STD = 0.3053, 0.3760

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(lr: float = 0.05, **settings: Any) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **{"momentum": 0.9, **settings})


SGD = sgd()


def plain_loop(
    *,
    optimizer: Optimizer = SGD,
    batch: int = 64,
    clip: Callable[[Any], object] = lambda parameters: None,
    smoothing: float = 0.0,
    factor: Callable[[int], float] = lambda step: 1.0,
    amp: bool = False,
    hidden: int = 256,
    limit: int | None = None,
) -> list[float]:
    how = {"val_fraction": 0.1, "train_limit": None, "mean": (MEAN,), "std": (STD,)}
    arrays = Digits(name="digits", **how).load("train")  # type: ignore[arg-type]
    images, labels = (torch.from_numpy(np.array(array)) for array in (arrays.images, arrays.labels))
    train, _ = indexing.split(len(labels), 0.1, limit)
    order = train[indexing.permutation(len(train), SEED, 1)]
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    stepper, losses = optimizer(net.parameters()), []
    rates = [group["lr"] for group in stepper.param_groups]
    for step, part in enumerate(order.split(batch)[:STEPS]):
        for group, rate in zip(stepper.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = net((images[part].float() / 255 - MEAN) / STD)
        loss = functional.cross_entropy(logits.float(), labels[part], label_smoothing=smoothing)
        losses.append(loss.item())
        stepper.zero_grad()
        loss.backward()
        clip(net.parameters())
        stepper.step()
    return losses


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


SETTINGS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "none": ([], {}),
    "gradient_clip": (
        ["gradient_clip=0.1"],
        {"clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)},
    ),
    "gradient_clip_value": (
        ["gradient_clip_value=0.001"],
        {"clip": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001)},
    ),
    "label_smoothing": (["label_smoothing=0.2"], {"smoothing": 0.2}),
    "gradient_accumulation": (["gradient_accumulation=4"], {}),
    "sgd": (
        as_typed("optimizer.lr=0.2 optimizer.momentum=0.5 optimizer.weight_decay=0.1"),
        {"optimizer": sgd(0.2, momentum=0.5, weight_decay=0.1)},
    ),
    "nesterov": (["optimizer.nesterov=true"], {"optimizer": sgd(nesterov=True)}),
    "adamw": (
        ["optimizer=adamw", "optimizer.lr=0.01"],
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    ),
    "lr_scaling": (["lr_scaling=sqrt", "base_batch_size=16"], {"optimizer": sgd(0.1)}),
    "scheduler": (["scheduler=cosine"], {"factor": cosine}),
    "amp": (["amp=bf16"], {"amp": True}),
    "sizes": (
        as_typed("batch_size=32 model.hidden=[40] dataset.train_limit=600"),
        {"batch": 32, "hidden": 40, "limit": 600},
    ),
}


@pytest.fixture(scope="module")
def default() -> list[float]:
    return plain_loop()


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_in_curve(setting: str, default: list[float], train_alone: TrainAlone) -> None:
    words, changes = SETTINGS[setting]
    same = f"max_steps={STEPS} log_every=1 seed={SEED} eval_split=test objective=loss/test"
    done = train_alone(*words, *as_typed(same))
    expected = plain_loop(**changes)
    if setting not in ("none", "gradient_accumulation"):
        assert expected != pytest.approx(default, abs=2e-4), "the setting matters"
    found = [value for _, value in done.curve("running/loss")]
    assert found == pytest.approx(expected, abs=3e-4 if setting == "amp" else 1e-4)
    ((_, of_epoch),) = done.curve("loss/train")
    assert of_epoch == pytest.approx(np.mean(expected), abs=1e-3)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_what_a_checkpoint_lacks_is_rank_0_s_when_it_is_loaded(leaves_out: bool) -> None:
    module = torch.nn.Linear(1, 1)
    if leaves_out:  # as of frozen weights that need not be saved
        module.register_state_dict_post_hook(lambda _, state, *__: state.__delitem__("weight"))
    assert parallel.without_broadcasts(module, begins=False)["init_sync"] == leaves_out


TEXT = as_typed(
    "model=transformer task=language_model dataset=text dataset.context=16 optimizer=adamw epochs=1"
    " model.layers=2 model.width=16 model.heads=2 model.dropout=0.2 max_steps=4 log_every=1"
    " ema=0.9 gradient_accumulation=2 batch_size=16 gradient_clip=0.1 amp=bf16"
)


def test_what_saves_memory_changes_no_number(train_together: TrainTogether, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 60)
    words = (*TEXT, f"dataset.root='{tmp_path / 'book.txt'}'")
    kept = train_together(2, *words, name="kept")
    again = train_together(2, *words, "activation_checkpointing=auto", "offload=cpu", name="again")
    assert again.points == kept.points
    assert len(kept.curve("running/loss")) == 4
