"""The next value of a wave, at each of its places."""

import math

import torch
from torch import nn
from torch.utils.data import Dataset


class Waves(Dataset):
    """Sines with a period of 20 samples, each from a place of its own, in double precision."""

    def __init__(self, train, size, length):
        drawn = torch.Generator().manual_seed(int(train))
        start = torch.rand(size if train else 3, 1, generator=drawn, dtype=torch.float64)
        places = torch.arange(length + 1, dtype=torch.float64)
        self.waves = torch.sin(2 * math.pi * (start + places / 20))

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return self.waves[index, :-1], self.waves[index, 1:]


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.LSTM(1, width, 2, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(width, 1, dtype=torch.float64)

    def forward(self, waves):
        return self.head(self.body(waves[..., None])[0])[..., 0]

    def continued(self, waves, steps):
        """Return the waves, and as many steps after them as are asked for."""
        for _ in range(steps):
            waves = torch.cat((waves, self(waves)[:, -1:]), dim=1)
        return waves
