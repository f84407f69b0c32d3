"""The shorter backward pass, against torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.training.patches import backward
from expt.training.precision import Precision
from tests import on_cards
from tests.facade import Patch

DEVICE = on_cards.device_of(0)
pytestmark = pytest.mark.usefixtures("tensors_there")


def gradients(run: Any, weight: float) -> list[Tensor]:
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(7, 6)
    run(functional.cross_entropy(model(images), torch.arange(7) % 3, reduction="sum"), weight)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("weight", [1.0, 1 / 3, 2 / 7, 1e-30])
def test_the_gradients_are_torchs_to_the_bit(weight: float) -> None:
    expected = gradients(lambda loss, weight: (loss * weight).backward(), weight)
    for _ in range(2):  # the weight is kept for the next time
        found = gradients(backward, weight)
        assert len(found) == 4
        assert all(torch.equal(mine, torchs) for mine, torchs in zip(found, expected, strict=True))


def test_another_kind_of_tensor_goes_torchs_way() -> None:
    seen = list[str]()

    class Own(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    leaf = torch.ones(3, requires_grad=True)
    backward(leaf.as_subclass(Own).sum(), 2.0)
    assert "backward" in seen
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("settings", "short"),
    [
        ({"amp": False}, True),
        ({"amp": "bf16"}, True),
        ({"amp": "fp16"}, False),
        ({"amp": False, "skip": True}, False),
    ],
    ids=["float32", "bfloat16", "float16", "skip"],
)
def test_scaled_loss_by_torch(settings: dict[str, Any], short: bool, monkeypatch: Patch) -> None:
    found = list[float]()
    monkeypatch.setattr(
        "expt.training.precision.backward", lambda _, weight, of: found.append(weight)
    )
    for wanted in (False, True):
        precision = Precision(
            settings["amp"],
            DEVICE,
            skip_non_finite=settings.get("skip", False),
            short_backward=wanted,
        )
        weight = nn.Parameter(torch.ones(()))
        precision.backward(weight * 3, 0.5)
        if not (wanted and short):
            assert weight.grad is not None
            assert weight.grad.item() == 1.5 * precision.scaler.get_scale()
    assert found == [0.5] * short
