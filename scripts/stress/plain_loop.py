"""The plain loop that random configurations are held against: textbook torch, none of expt's
training code.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from expt.data import indexing
from expt.data.kinds.originals import Split
from expt.models.vision import MLP, ConvNet
from scripts.stress.carried import DIGITS, MEAN, STD, size_in_step

ROUNDING = 1e-7
Settings = dict[str, Any]


@dataclass
class Curves:
    """What a training came to: a value for each step, and for each epoch."""

    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    train: list[tuple[float, float]] = field(default_factory=list)
    val: list[tuple[float, float]] = field(default_factory=list)
    """loss and accuracy"""
    best_epoch: int = 0
    test: tuple[float, float] = (math.nan, math.nan)


def train(settings: Settings, *, blurred: int = 0) -> Curves:
    """Train on digits, on one thread of this process; `blurred` seeds errors of the size of
    float32's rounding.
    """
    torch.set_num_threads(1)
    (images, labels), (test_images, test_labels) = _data("train"), _data("test")
    if blurred:
        images = images * (
            1
            + ROUNDING * torch.randn(images.shape, generator=torch.Generator().manual_seed(blurred))
        )
    train, val = indexing.split(
        len(labels), settings["dataset.val_fraction"], settings.get("dataset.train_limit")
    )
    torch.manual_seed(settings["seed"])
    net = _net(settings)
    optimizer = _optimizer(settings, net)
    batch, whole = settings["batch_size"], settings["drop_last"]
    per_epoch = len(train) // batch if whole else math.ceil(len(train) / batch)
    total = settings["epochs"] * per_epoch
    found, best = Curves(), copy.deepcopy(net.state_dict())
    peak = optimizer.param_groups[0]["lr"]
    schedule = (
        None
        if settings["scheduler"] != "one_cycle"
        else _one_cycle(optimizer, peak, total, settings)
    )
    for epoch in range(1, settings["epochs"] + 1):
        order = train[indexing.permutation(len(train), settings["seed"], epoch)]
        net.train()
        sums = torch.zeros(3, dtype=torch.float64)
        for indices in order.split(batch)[:per_epoch]:
            if schedule is None:
                optimizer.param_groups[0]["lr"] = peak * _factor(
                    len(found.losses), per_epoch, total, peak, settings
                )
            found.lrs.append(optimizer.param_groups[0]["lr"])
            logits = net(images[indices])
            loss = functional.cross_entropy(
                logits, labels[indices], label_smoothing=settings.get("label_smoothing", 0.0)
            )
            if settings["task"] == "warmed_up":
                loss = loss * size_in_step(len(found.losses) + 1)
            correct = int((logits.argmax(1) == labels[indices]).sum())
            sums += torch.tensor([loss.item() * len(indices), correct, len(indices)])
            optimizer.zero_grad()
            loss.backward()
            if settings["gradient_clip"]:
                nn.utils.clip_grad_norm_(net.parameters(), settings["gradient_clip"])
            optimizer.step()
            if schedule is not None:
                schedule.step()
            found.losses.append(loss.item())
        found.train.append((float(sums[0] / sums[2]), float(sums[1] / sums[2])))
        found.val.append(_evaluated(net, images[val], labels[val]))
        if found.val[-1][1] > max((accuracy for _, accuracy in found.val[:-1]), default=-1.0):
            found.best_epoch, best = epoch, copy.deepcopy(net.state_dict())
    net.load_state_dict(best)
    found.test = _evaluated(net, test_images, test_labels)
    return found


def _data(split: Split) -> tuple[Tensor, Tensor]:
    arrays = DIGITS.load(split)
    images = torch.from_numpy(np.array(arrays.images)).float() / 255
    return (images - MEAN) / STD, torch.from_numpy(np.array(arrays.labels)).long()


def _net(settings: Settings) -> nn.Module:
    shape: dict[str, Any] = {"channels": 1, "image_size": (8, 8), "num_classes": 10}
    if settings["model"] == "mlp":
        net: nn.Module = MLP(hidden=tuple(settings["model.hidden"]), **shape)
    else:
        net = ConvNet(
            **shape,
            widths=(6, 8), kernels=(3, 3), strides=(1, 2), paddings=("same", "same"),
            batch_norm=False, pool=1,
            global_average=True, hidden=16, dropout=0.0,
        )  # fmt: skip
    if settings["init"] == "kaiming":
        for layer in net.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    return net


def _optimizer(settings: Settings, net: nn.Module) -> optim.Optimizer:
    lr, decay = settings["optimizer.lr"], settings["optimizer.weight_decay"]
    ratio = settings["batch_size"] / settings["base_batch_size"]
    lr *= {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings["lr_scaling"]]
    if settings["optimizer"] == "sgd":
        momentum = settings["optimizer.momentum"]
        return optim.SGD(
            net.parameters(),
            lr,
            momentum,
            weight_decay=decay,
            nesterov=settings["optimizer.nesterov"],
            foreach=False,
        )
    cls = optim.Adam if settings["optimizer"] == "adam" else optim.AdamW
    return cls(net.parameters(), lr, weight_decay=decay, foreach=False)


def _factor(step: int, per_epoch: int, total: int, peak: float, settings: Settings) -> float:
    warmup: int = round(settings["scheduler.warmup_epochs"] * per_epoch)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings["scheduler"] == "cosine":
        progress = (step - warmup) / max(1, total - warmup)
        return (1 + math.cos(math.pi * progress)) / 2
    if settings["scheduler"] == "step":
        drops = step // (settings["scheduler.every_epochs"] * per_epoch)
        return float(settings["scheduler.gamma"] ** drops)
    return 1.0


def _one_cycle(
    optimizer: optim.Optimizer, peak: float, total: int, settings: Settings
) -> optim.lr_scheduler.OneCycleLR:
    momentum = settings["optimizer"] != "sgd" or settings["optimizer.momentum"] > 0
    return optim.lr_scheduler.OneCycleLR(
        optimizer,
        peak,
        total,
        pct_start=0.3,
        div_factor=25,
        final_div_factor=1e4,
        cycle_momentum=momentum,
    )


@torch.no_grad()
def _evaluated(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    net.eval()
    logits = net(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return functional.cross_entropy(logits, labels).item(), accuracy
