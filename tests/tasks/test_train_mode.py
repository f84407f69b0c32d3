"""A model that computes in an evaluation as in training, for outputs that it gives there only."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import expt


class Counting(nn.Linear):
    """Puts another tensor in place of its buffer in each forward pass of training."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1
        return super().forward(inputs) * self.steps


def _instance_norm() -> nn.Module:
    return nn.InstanceNorm1d(4, track_running_stats=True)


def _spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


@pytest.mark.parametrize("build", [_spectral_norm, _instance_norm, Counting])
def test_no_buffer_changes(build: Callable[[], nn.Module]) -> None:
    """Training, and the next batch of the evaluation, would be others."""
    layer, inputs = build().eval(), torch.randn(3, 4, 4)
    before = {name: one.clone() for name, one in layer.named_buffers()}
    losses = list[torch.Tensor]()
    for _ in range(2):
        with expt.train_mode(layer):
            losses.append(layer(inputs).sum())
    assert torch.equal(*losses)
    assert all(torch.equal(one, before[name]) for name, one in layer.named_buffers())


def test_a_model_is_set_to_training_but_for_norms_and_dropouts_and_back() -> None:
    class Inner(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert self.training
            return super().forward(inputs) + torch.rand(())

    frozen = Inner(2, 2)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), frozen).eval()
    inputs, norm = torch.randn(4, 2), {**model[0].state_dict()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with expt.train_mode(model):
        first = model(inputs)
    torch.manual_seed(2)
    with expt.train_mode(model):
        second = model(inputs)
    assert torch.equal(first, second), "what is drawn within depends on nothing outside"
    torch.manual_seed(1)
    with expt.train_mode(model):
        model(inputs)
    assert torch.equal(torch.rand(3), expected), "nor the other way round"
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(model[0].state_dict()[name], one) for name, one in norm.items())
