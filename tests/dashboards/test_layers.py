"""A model's weights and gradients, layer by layer."""

from __future__ import annotations

import torch

from expt.dashboards.tensorboard import layers, norms


def test_norms_of_layers() -> None:
    frozen = torch.nn.Linear(4, 2, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), frozen)
    model.empty = torch.nn.Parameter(torch.zeros(0, 3))
    found = layers(model)
    assert {layer: [name for name, _ in own] for layer, own in found.items()} == {
        "0": ["0.weight", "0.bias"]
    }
    both = [[p.detach() for p in model[0].parameters()], [frozen.weight]]
    expected = [
        torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in group]))
        for group in both
    ]
    assert torch.allclose(norms(both), torch.stack(expected))
