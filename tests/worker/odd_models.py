"""Models that do something in a way of their own, for what sharding makes of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """Three layers; subclasses do something else with the second."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList([self.layer(width)])

    def layer(self, width: int) -> nn.Module:
        return nn.Linear(width, width)

    def forward(self, images: Tensor) -> Tensor:
        inside = self.blocks[0](self.first(images.flatten(1)).relu())
        return self.last(self.more(inside).relu())  # type: ignore[no-any-return]

    def more(self, inside: Tensor) -> Tensor:
        return inside


class Double(Net):
    """Computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Rows(Dataset[tuple[Tensor, int]]):
    """Samples in float64."""

    def __init__(self, train: bool) -> None:
        self.rows = torch.randn(64, 64, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % 10


class Sequence(Net):
    """Several ordinary layers."""

    def layer(self, width: int) -> nn.Module:
        norm = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        return nn.Sequential(norm, nn.GroupNorm(2, width), nn.BatchNorm1d(width), nn.Dropout(0.3))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(16, 16))
        self.blocks[1].weight = self.blocks[0].weight

    def more(self, inside: Tensor) -> Tensor:
        return self.blocks[1](inside)  # type: ignore[no-any-return]


class Plain(Net):
    """Keeps a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = {"all": torch.linspace(0.5, 1, 16)}

    def more(self, inside: Tensor) -> Tensor:
        return inside * self.scale["all"]


class Unsaved(Net):
    """With a buffer that is not saved, drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(16), persistent=False)

    def more(self, inside: Tensor) -> Tensor:
        return inside * self.scale


class Lost(Net):
    """With a buffer that is not saved, and counts training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def more(self, inside: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return inside * self.count


class Listed(Net):
    """Computes with a weight in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = [self.blocks[0].weight]

    def more(self, inside: Tensor) -> Tensor:
        return inside + self.kept[0].mean()  # type: ignore[no-any-return]


class Viewed(Net):
    """Computes with a view of a weight, in evaluations only."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.blocks[0].weight.detach()[1:]  # type: ignore[operator]

    def more(self, inside: Tensor) -> Tensor:
        return inside if self.training else inside + self.kept.mean()


class Aliased(Net):
    """With a buffer that is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.get_parameter("blocks.0.weight").detach())


class ClampedLinear(nn.Linear):
    """Its weights are kept small, where they are used."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(inputs)


class Clamped(Net):
    def layer(self, width: int) -> nn.Module:
        return ClampedLinear(width, width)


class WithParameter(Net):
    """With one more parameter, which it adds up."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {
            "scalar": torch.tensor(1.0),
            "double": torch.ones(3, dtype=torch.float64),
            "few": torch.ones(1),
        }
        self.own = nn.Parameter(made[kind])

    def more(self, inside: Tensor) -> Tensor:
        return inside * (1 + self.own.sum()).float()


class Marked(nn.Module):
    """What its weights say of themselves its own optimiser reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, 10)])
        self.bias = nn.Parameter(torch.ones(10))
        for parameter, scale in zip(self.parameters(), (2.0, 3.0, 1.0, 0.5, 1.0), strict=True):
            vars(parameter).update(
                scale=scale, mask=torch.arange(parameter.numel()).view_as(parameter) % 3 > 0
            )

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](images.flatten(1)).relu()) + self.bias  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each sample goes to one of them; the last one is never used."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, inside: Tensor) -> Tensor:
        shares = self.gate(inside)[:, :-1].softmax(-1)
        chosen = shares.argmax(-1)
        for number, expert in enumerate(self.experts):
            if len(rows := (chosen == number).nonzero()[:, 0]):
                inside = inside.index_add(
                    0, rows, expert(inside[rows]) * shares[rows, number, None]
                )
        return inside


class Mixture(nn.Module):
    """Two blocks of experts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Experts(width, 3) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        inside = self.first(images.flatten(1))
        for block in self.blocks:
            inside = block(inside)
        return self.last(inside)  # type: ignore[no-any-return]


class Apart(Mixture):
    """Each worker calls a block of its own."""

    def forward(self, images: Tensor) -> Tensor:
        inside: Tensor = self.blocks[dist.get_rank()](self.first(images.flatten(1)))
        return self.last(inside)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Takes off a running mean, in training as in evaluations."""

    mean: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(flat.detach().mean(0), alpha=0.1)
        return self.head(self.body(flat - self.mean).relu())  # type: ignore[no-any-return]


class OddMemory(nn.Module):
    """Has an expanded view as buffer, and a slice of a larger tensor as parameter."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1, 1).expand(3, 64))
        self.weight = nn.Parameter(
            torch.linspace(-0.2, 0.2, 65 * num_classes).view(num_classes, 65)[:, :64]
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(images.flatten(1) * self.scale[0], self.weight)


class Hungry(Net):
    """Has memory for so many samples in training, `where` it lacks it, from a step on."""

    steps: Tensor

    def __init__(self, most: int, rank: int = -1, where: str = "forward", begin: int = 1) -> None:
        super().__init__()
        self.most, self.rank, self.where, self.begin = most, rank, where, begin
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def more(self, inside: Tensor) -> Tensor:
        if not self.training:
            return inside
        self.steps += 1
        if self.where == "forward":
            self.allocate(inside)
        else:
            inside.register_hook(self.allocate)
        return inside

    def allocate(self, inside: Tensor) -> None:
        here = self.rank in (-1, dist.get_rank() if dist.is_initialized() else 0)
        if here and len(inside) > self.most and self.steps >= self.begin:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED, on purpose")


class HungrySequence(Hungry):
    """With statistics and random numbers, which a forward pass without memory has changed."""

    def layer(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3))


class Spoiling(Hungry):
    """Changes its inputs, and a buffer that no state_dict has, before it lacks memory."""

    mean: Tensor
    late: Tensor

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        images.div_(2)
        if self.training:
            self.mean = 0.9 * self.mean + images.mean()
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(()), persistent=False)
            self.late += 0.1
        return super().forward(images - self.mean - self.late)


class Clipping(Hungry):
    """Changes a weight in a forward pass."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return super().forward(images)


class Undefined(Net):
    """Has a gradient that is nan."""

    def more(self, inside: Tensor) -> Tensor:
        return inside + 0 * (inside - inside.detach()).sqrt()
