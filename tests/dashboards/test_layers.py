"""A model's weights and gradients, layer by layer."""

from __future__ import annotations

import torch

from expt.dashboards.tensorboard import layers, norms, parameter_table


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
    table = parameter_table(model)
    assert "| 0.weight | Linear | 4 x 3 | float32 | 12 |" in table
    assert "| 2.weight | Linear | 2 x 4 | float32 | 8 (not trained) |" in table
    assert "| **16 trained** | | | | **24** |" in table
