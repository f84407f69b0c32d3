"""Ratings of items, and a model with sparse gradients; each worker imports this module."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Ratings(TensorDataset):
    """75 pairs of a user and an item, each with a rating."""

    def __init__(self, train: bool = True, nan_at: int = -1) -> None:
        drawn = torch.Generator().manual_seed(int(train))
        pairs = torch.randint(40, (75, 2), generator=drawn)
        ratings = torch.randn(75, generator=drawn)
        if train and nan_at >= 0:
            ratings[nan_at] = torch.nan
        super().__init__(pairs, ratings)


class Rater(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(40, 3, sparse=sparse) for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, pairs: Tensor) -> Tensor:
        both = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        rated: Tensor = self.layers(torch.cat(both, 1))
        return rated


class Tied(Rater):
    """One whose table of users is used as a whole, too."""

    def forward(self, pairs: Tensor) -> Tensor:
        return super().forward(pairs) + 0.01 * self.users.weight.sum()


class Counting(torch.optim.SGD):
    """An optimizer whose state has an entry that torch does not know."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.steps)
        self.steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({key: x for key, x in state_dict.items() if key != "steps"})
