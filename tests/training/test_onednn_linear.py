"""Linear layers by oneDNN give what torch's own give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from expt.training.patches import onednn_linear

SIZES = [(1, 3, 2), (32, 784, 256), (257, 65, 33)]


def _pair(in_features: int, out_features: int, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(in_features, out_features, bias=bias)
    model = nn.Sequential(copy.deepcopy(plain))
    onednn_linear.use_for_linear(model)
    (fast,) = model
    assert isinstance(fast, onednn_linear.Linear)
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "in_features", "out_features"), SIZES)
def test_outputs_and_gradients(batch: int, in_features: int, out_features: int, bias: bool) -> None:
    plain, fast = _pair(in_features, out_features, bias=bias)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    images, weights = torch.randn(batch, in_features), torch.randn(batch, out_features)
    found = []
    for layer in (plain, fast):
        batch_of_mine = images.clone().requires_grad_()
        output = layer(batch_of_mine)
        (output * weights).sum().backward()
        found.append((output, batch_of_mine.grad))
    torch.testing.assert_close(found[1], found[0])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            fast.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4
        )


def test_gradients_that_nobody_wants_are_left_out() -> None:
    _, fast = _pair(4, 3)
    fast.weight.requires_grad_(False)
    fast(torch.randn(2, 4)).sum().backward()
    assert fast.weight.grad is None
    assert fast.bias.grad is not None


@pytest.mark.parametrize("shape", [(4,), (2, 5, 4)])
def test_other_shapes_go_torchs_way(shape: tuple[int, ...]) -> None:
    plain, fast = _pair(4, 3)
    images = torch.randn(shape)
    assert torch.equal(fast(images), plain(images))


def test_autocast_goes_torchs_way() -> None:
    plain, fast = _pair(64, 32)
    images = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(images), plain(images))
        assert fast(images).dtype == torch.bfloat16


def test_a_subclass_of_linear_is_left_alone() -> None:
    model = nn.Sequential(type("Mine", (nn.Linear,), {})(2, 2))
    onednn_linear.use_for_linear(model)
    assert type(model[0]).__name__ == "Mine"


def test_a_wrong_size_is_told_in_torchs_words() -> None:
    _, fast = _pair(65, 10)
    with pytest.raises(
        RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(32x64 and 65x10\)"
    ):
        fast(torch.randn(32, 64))
