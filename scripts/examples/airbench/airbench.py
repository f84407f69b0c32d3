"""A network that learns fast, and its optimiser (after Keller Jordan's airbench)."""

import gzip

import torch
from torch import nn
from torch.nn import functional


class Whitening(nn.Conv2d):
    """Filters of 3 by 3 pixels, which make their outputs uncorrelated; they are not trained."""

    def __init__(self, root, mean, std):
        super().__init__(1, 18, 3, padding=1, bias=False)
        with gzip.open(f"{root}/train-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        images = (pixels.view(-1, 1, 28, 28)[:5000] / 255 - mean) / std
        patches = functional.unfold(images, 3).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(9, 1, 3, 3)
        self.weight.data = torch.cat((filters, -filters))
        self.weight.requires_grad_(False)


def block(before, width):
    """Return two convolutions, of which the first halves the image."""
    first, second = (nn.Conv2d(size, width, 3, padding=1, bias=False) for size in (before, width))
    norms = (nn.BatchNorm2d(width), nn.BatchNorm2d(width))
    return first, nn.MaxPool2d(2), norms[0], nn.GELU(), second, norms[1], nn.GELU()


class Net(nn.Sequential):
    """Whitening, two blocks, and a head."""

    def __init__(self, num_classes, width, root, mean, std):
        blocks = *block(18, width), *block(width, 2 * width)
        head = nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes, bias=False)
        super().__init__(Whitening(root, mean, std), nn.GELU(), *blocks, *head)


def orthogonal(matrix):
    """Return a matrix with singular values near 1, by three steps of Newton and Schulz."""
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov's momentum, which makes the updates of filters orthogonal."""

    def __init__(self, params, lr, momentum, others):
        super().__init__(params, {"lr": lr, "momentum": momentum, "others": others})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in filter(lambda each: each.grad is not None, group["params"]):
                moving = self.state[weight].setdefault("moving", torch.zeros_like(weight))
                moving.mul_(group["momentum"]).add_(weight.grad)
                update = weight.grad + group["momentum"] * moving
                if weight.dim() == 4:
                    weight.mul_(len(weight) ** 0.5 / weight.norm())
                    update = orthogonal(update.flatten(1)).view_as(weight)
                weight.sub_(group["lr"] * (1 if weight.dim() == 4 else group["others"]) * update)
