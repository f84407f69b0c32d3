"""A recommender of two towers (Yi et al. 2019): users lie close to the items that they choose."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import expt


class Choices(Dataset):
    """A sample is a user, with an item that this user has chosen by a hidden taste."""

    def __init__(self, train, users, items, each, tastes=4):
        drawn = torch.Generator().manual_seed(0)
        likes, has = (torch.randn(many, tastes, generator=drawn) for many in (users, items))
        chosen = torch.multinomial((likes @ has.T).softmax(1), each, generator=drawn)
        self.items = chosen[:, each // 5 :] if train else chosen[:, : each // 5]

    def __len__(self):
        return self.items.numel()

    def __getitem__(self, index):
        user, choice = divmod(index, self.items.shape[1])
        return torch.tensor(user), int(self.items[user, choice])


class Towers(nn.Module):
    """A table and two layers each; a step changes only those rows of a table that it uses."""

    def __init__(self, users, items, width):
        super().__init__()
        self.tables, self.towers = nn.ModuleList(), nn.ModuleList()
        for many in (users, items):
            layers = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            self.tables.append(nn.Embedding(many, width, sparse=True))
            nn.init.normal_(self.tables[-1].weight, std=0.1)
            self.towers.append(nn.Sequential(*layers))

    def embed(self, tower, numbers):
        return functional.normalize(self.towers[tower](self.tables[tower](numbers)), dim=1)

    def forward(self, users, among):
        """Return scores of all items, -inf but for those `among` which is chosen."""
        scores = 10 * self.embed(0, users) @ self.embed(1, among).T
        none = scores.new_full((len(users), self.tables[1].num_embeddings), -torch.inf)
        return none.index_copy(1, among, scores)


class Retrieve(expt.Task):
    """Find each user's item: in training among those of the batch, then among all."""

    def forward(self, model, batch):
        among = torch.arange(model.tables[1].num_embeddings, device=batch.inputs.device)
        if model.training:
            everyones = [batch.targets]
            if dist.is_initialized():  # the numbers of all workers' items, which need no gradient
                everyones = [torch.empty_like(batch.targets) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, batch.targets)
            among = torch.cat(everyones).unique()
        return model(batch.inputs, among)

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def measure(self, outputs, batch):
        hits = outputs.topk(10).indices == batch.targets[:, None]
        return {"hits": (hits.sum(), len(hits))}
