"""Mixed precision: the types, and the order of unscaling and clipping."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from expt.training.optim import build_optimizer
from expt.training.patches import backward, without_guards
from expt.training.precision import Precision, autocast_dtype
from tests import on_cards
from tests.conftest import Configured
from tests.facade import Patch

DEVICE = on_cards.device_of(0)
pytestmark = pytest.mark.usefixtures("tensors_there")
OPTIMIZERS = {
    "torch's": lambda p: optim.SGD(p, lr=1.0),
    "unguarded and fused": lambda p: without_guards(optim.SGD)(p, lr=1.0, fused=True),
}


def update(
    amp: Any, make: Any, clip: float | None, factor: float = 1.0
) -> tuple[torch.Tensor, Precision]:
    """What one step of SGD with lr=1 takes from the weights: the gradient that was applied."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    precision = Precision(amp, DEVICE, gradient_clip=clip)
    optimizer = make(model.parameters())
    precision.backward(model(torch.ones(3, 5)).square().sum() * factor)
    precision.update(optimizer, model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    return before - nn.utils.parameters_to_vector(model.parameters()).detach(), precision


@pytest.mark.parametrize(
    ("amp", "expected"),
    [
        (False, torch.float32),
        (True, torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_the_type_that_autocast_computes_in(amp: Any, expected: torch.dtype) -> None:
    precision = Precision(amp, DEVICE)
    with precision.autocast():
        logits = nn.Linear(4, 3)(torch.ones(2, 4))
    assert logits.dtype == expected
    assert precision.dtype == (None if amp is False else expected)
    assert precision.scaler.is_enabled() == (amp == "fp16")


def test_devices_that_are_no_cuda_compute_in_bfloat16() -> None:
    assert autocast_dtype(True, torch.device("mps")) == torch.bfloat16


@pytest.mark.parametrize("clip", [None, 0.5, 1e6], ids=["unclipped", "clipped", "below the limit"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_scaling_changes_no_gradient(make: Any, clip: float | None) -> None:
    plain, _ = update(False, make, clip)
    scaled, precision = update("fp16", make, clip)
    assert precision.scaler.is_enabled()
    torch.testing.assert_close(scaled, plain)
    if clip == 0.5:
        assert plain.norm().item() == pytest.approx(0.5, rel=1e-4)
    else:
        assert plain.norm().item() > 1


@pytest.mark.parametrize("amp", [False, "fp16"])
def test_clipping_by_value_comes_after_unscaling_and_before_the_norm(amp: Any) -> None:
    def taken(**clip: Any) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(3))
        precision = Precision(amp, DEVICE, **clip)
        precision.backward((weight * torch.tensor([0.25, -2.0, 3.0])).sum())
        precision.update(optim.SGD([weight], lr=1.0), [weight])
        return -weight.detach()

    assert taken(gradient_clip_value=0.5).tolist() == [0.25, -0.5, 0.5]
    clipped = torch.tensor([0.25, -0.5, 0.5])  # its norm is 0.75
    torch.testing.assert_close(
        taken(gradient_clip_value=0.5, gradient_clip=0.375), clipped / 2, rtol=1e-4, atol=0.0
    )


def test_an_infinite_gradient_is_not_clipped_to_a_finite_one() -> None:
    weight = nn.Parameter(torch.zeros(1))
    precision = Precision(False, DEVICE, skip_non_finite=True, gradient_clip_value=0.5)
    for gradient, moves in ((torch.inf, False), (2.0, True)):
        weight.grad = torch.tensor([gradient])
        precision.update(optim.SGD([weight], lr=1.0), [weight])
        assert precision.left_out is not None
        assert precision.left_out.item() != moves
    assert (precision.skipped.item(), weight.item()) == (1, -0.5)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_with_infinite_gradients_is_skipped(make: Any, clip: float | None) -> None:
    scale = Precision("fp16", DEVICE).scaler.get_scale()
    taken, precision = update("fp16", make, clip, factor=float("inf"))
    assert not taken.any()
    assert precision.scaler.get_scale() == scale / 2


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_step_whose_loss_is_not_finite_can_be_left_out(kind: str, loss: float) -> None:
    def train(losses: list[float]) -> tuple[list[torch.Tensor], float]:
        weight = nn.Parameter(torch.ones(3))
        make: Any = {
            "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: optim.Adam(p, lr=0.1),
        }[kind]
        precision, optimizer = Precision(False, DEVICE, skip_non_finite=True), make([weight])
        for extra in losses:
            precision.backward(
                weight.square().sum() + extra
            )  # the gradient of an infinite loss is finite here
            precision.update(optimizer, [weight])
        return [weight.detach(), *optimizer.state[weight].values()], precision.skipped.item()

    (left_out, skipped), (never_there, none) = train([0.0, loss, 0.0]), train([0.0, 0.0])
    assert all(torch.equal(mine, other) for mine, other in zip(left_out, never_there, strict=True))
    assert (skipped, none) == (1, 0)


@pytest.mark.parametrize("amp", [False, "fp16"])
def test_whether_a_step_was_left_out_for_its_loss_is_known(amp: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    precision, optimizer, seen = (
        Precision(amp, DEVICE, skip_non_finite=True),
        torch.optim.SGD([weight], lr=0.1),
        [],
    )
    for loss in (0.0, torch.nan, 0.0):
        for part in (loss, 0.0):
            precision.backward(weight.square() + part)
        precision.update(optimizer, [weight])
        assert precision.left_out is not None
        seen.append(bool(precision.left_out))
    assert seen == [False, True, False]
    assert precision.skipped.item() == 1
    never = Precision(amp, DEVICE)
    never.backward(weight.square())
    never.update(optimizer, [weight])
    assert never.left_out is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bad", [0, 1], ids=["the first step", "a later one"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_fused_update_leaves_itself_out(
    optimizer: str, bad: int, clip: float | None, configured: Configured
) -> None:
    """Momentum, moments and counters are those of a run without that step."""

    def train(losses: list[float]) -> tuple[list[torch.Tensor], Precision]:
        weight = nn.Parameter(torch.ones(3))
        config = configured(f"optimizer={optimizer}").optimizer
        precision = Precision(
            False, DEVICE, gradient_clip=clip, skip_non_finite=True, skips_on_device=True
        )
        update = build_optimizer(config, nn.ParameterList([weight]))
        steps = dict[str, int]()
        update.register_step_post_hook(lambda *_: steps.update(taken=steps.get("taken", 0) + 1))
        for extra in losses:
            precision.backward(weight.square().sum() + extra)
            precision.update(update, [weight])
        assert steps["taken"] == len(losses), "it is not asked whether to"
        return [weight.detach(), *update.state[weight].values()], precision

    losses = [0.0, 0.0]
    losses.insert(bad, float("nan"))
    (skipped, precision), (never_there, _) = train(losses), train([0.0, 0.0])
    assert precision.skipped == 1
    assert all(torch.equal(mine, other) for mine, other in zip(skipped, never_there, strict=True))


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
