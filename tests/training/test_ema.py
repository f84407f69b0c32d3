"""The moving average of the weights follows its formula, and leaves out what is not a step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.errors import ConfigError
from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.learner import Learner, Position, ema_of
from expt.training.loop import train_epoch
from expt.training.precision import Precision
from expt.training.strategy import Strategy
from tests.training.test_loop import DEVICE, batches

DECAY = 0.75


def learner(*, skip: bool = False) -> Learner:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(18), nn.Linear(18, 4)).to(DEVICE)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    return Learner(
        module=module,
        strategy=Strategy(module),
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda _: 1.0),
        precision=Precision(False, DEVICE, skip_non_finite=skip),
        task=Classification(),
        ema=ema_of(module, DECAY),
    )


def trained(subject: Learner, steps: int, **hooks: Any) -> None:
    train_epoch(
        subject,
        batches(steps),
        Position(steps, steps),
        Sums(Classification(), DEVICE, finite_only=True),
        log_every=100,
        **hooks,
    )


class Odd(nn.Module):
    """Parameters of several types, one of which is not trained, and a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for kind in ("float32", "float64", "bfloat16", "complex64", "int64"):
            values = torch.arange(3).to(getattr(torch, kind))
            self.register_parameter(f"of_{kind}", nn.Parameter(values, requires_grad=False))
        self.register_buffer("count", torch.tensor(0))

    def move(self) -> None:
        for parameter in self.parameters():
            parameter.add_((torch.randn(3) * 9).to(parameter.dtype))
        self.count += 1


def test_it_is_that_of_torch_to_the_bit_and_loads_its_state() -> None:
    model = Odd()
    ours, theirs = ema_of(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(4):
        model.move()
        ours.update_parameters(model)
        theirs.update_parameters(model)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, mine in ours.state_dict().items():
            assert torch.equal(mine, theirs.state_dict()[name]), name
    loaded = ema_of(model, 0.9)
    loaded.load_state_dict(theirs.state_dict())
    model.move()
    loaded.update_parameters(model)
    theirs.update_parameters(model)
    assert torch.equal(*(each.module.get_parameter("of_float32") for each in (loaded, theirs)))


def test_a_step_that_was_skipped_counts_not() -> None:
    subject = learner(skip=True)
    assert subject.ema
    trained(subject, 3)
    before = copy.deepcopy(subject.ema.state_dict())

    def spoil() -> None:
        gradient = next(subject.module.parameters()).grad
        assert gradient is not None
        gradient.fill_(torch.inf)

    trained(subject, 2, on_gradients=spoil)
    after = subject.ema.state_dict()
    assert subject.precision.skipped == 2
    assert after["n_averaged"] == before["n_averaged"] == 3
    assert all(
        torch.equal(after[name], before[name])
        for name in before
        if name.endswith(("weight", "bias"))
    )


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    module: Any = nn.Linear(2, 2)
    module.lines = (line for line in "ab")
    with pytest.raises(
        ConfigError, match=r"^ema=0\.5: the model can't be copied \(TypeError: cannot pickle "
    ):
        ema_of(module, 0.5)
