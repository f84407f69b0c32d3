"""A loop by hand on one card, in mixed precision: textbook torch, none of expt's training code."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.data import indexing
from expt.data.kinds.originals import Digits
from expt.models.vision import MLP, ConvNet

BATCH, STEPS, SEED, LR, MOMENTUM, CLIP = 48, 30, 3, 0.05, 0.9, 0.5
MEAN, STD = 0.3053, 0.3760
DIGITS = Digits(name="digits", val_fraction=0.1, train_limit=None, mean=(MEAN,), std=(STD,))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def losses(model: str, amp: str) -> list[float]:
    """The loss of each step on the first card, and the mean loss of the held-out images at last."""
    torch.set_num_threads(1)
    card, arrays = torch.device("cuda", 0), DIGITS.load("train")
    images = (torch.from_numpy(np.array(arrays.images)).float() / 255 - MEAN) / STD
    labels = torch.from_numpy(np.array(arrays.labels)).long()
    train, val = indexing.split(len(labels), 0.1, None)
    torch.manual_seed(SEED)
    net = _net(model).to(card).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=amp == "fp16")

    def loss_of(indices: Tensor) -> Tensor:
        inputs, targets = images[indices].to(card), labels[indices].to(card)
        inputs = inputs.contiguous(memory_format=torch.channels_last)  # as channels_last=auto
        with torch.autocast("cuda", DTYPES[amp]):
            # In float32, as expt has it: torch itself rounds the logarithms to half precision
            return functional.cross_entropy(net(inputs).float(), targets)

    found, epoch = list[float](), 0
    while len(found) < STEPS:
        epoch += 1
        order = train[indexing.permutation(len(train), SEED, epoch)]
        for batch in order.split(BATCH)[: len(order) // BATCH][: STEPS - len(found)]:
            loss = loss_of(batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
    net.eval()
    with torch.no_grad():
        return [*found, loss_of(val).item()]


def _net(model: str) -> nn.Module:
    if model == "mlp":
        return MLP(channels=1, image_size=(8, 8), num_classes=10)
    return ConvNet(channels=1, image_size=(8, 8), num_classes=10, dropout=0.0)
