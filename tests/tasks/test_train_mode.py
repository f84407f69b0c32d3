"""A model that computes in an evaluation as in training, for outputs that it gives there only."""

import torch
from torch import nn

import expt


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
