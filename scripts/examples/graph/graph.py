"""Classes of a graph's nodes by graph convolutions (Kipf and Welling 2017)."""

import torch
from torch import nn
from torch.utils.data import Dataset


def blocks(nodes, classes, features):
    """Return a stochastic block graph: its edges [2, E], and its nodes' features and classes.

    Two nodes are joined with a probability of 2 % in a class, and of 0.5 % across classes.
    """
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (nodes,), generator=drawn)
    likely = torch.where(labels[:, None] == labels, 0.02, 0.005)
    joined = (torch.rand(nodes, nodes, generator=drawn) < likely).triu(1)
    edges = torch.nonzero(joined | joined.T | torch.eye(nodes, dtype=torch.bool)).T
    centres = torch.randn(classes, features, generator=drawn)
    noise = 4 * torch.randn(nodes, features, generator=drawn)
    return edges, centres[labels] + noise, labels


class Nodes(Dataset):
    """A sample is a node's number, and its class; one in `every` nodes is trained on."""

    def __init__(self, train, nodes, classes, features, every):
        self.classes_of_nodes = blocks(nodes, classes, features)[2]
        self.chosen = [node for node in range(nodes) if (node % every == 0) == train]

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, index):
        node = self.chosen[index]
        return torch.tensor(node), int(self.classes_of_nodes[node])


class GCN(nn.Module):
    """Two convolutions over the whole graph; it returns the outputs of the nodes in the batch."""

    def __init__(self, nodes, num_classes, features, width):
        super().__init__()
        edges, inputs, _ = blocks(nodes, num_classes, features)
        for name, buffer in (("edges", edges), ("inputs", inputs)):
            self.register_buffer(name, buffer, persistent=False)
        degrees = torch.bincount(edges[0])
        self.register_buffer("scale", degrees[edges].prod(0).rsqrt()[:, None], persistent=False)
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, num_classes)

    def spread(self, x):
        to, origin = self.edges
        return torch.zeros_like(x).index_add(0, to, self.scale * x[origin])

    def forward(self, chosen):
        hidden = self.spread(self.first(self.inputs)).relu()
        return self.spread(self.second(hidden))[chosen]
