"""Optimizers, schedules and tasks of a person's own, for what sharding makes of them."""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, MultiStepLR, SequentialLR

from expt.data.loading import Batch
from expt.tasks.task import Sum, Task
from expt.training.sharding import whole


class OfEach(Optimizer):
    """Descent by what `step_of` makes of each parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.step_of(parameter, parameter.grad))

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class ByNorm(OfEach):
    """As LAMB, by norms that stay tensors."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        ratio: Tensor = weights.norm() / (gradient.norm() + 1e-6)
        return gradient * ratio


class ByNumber(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (float(weights.norm()) / (float(gradient.norm()) + 1e-6))


class Clipping(OfEach):
    """Clips by the norm of a worker's rows, which has an effect on large gradients only."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient / max(1.0, float(gradient.norm()) / 5)


class OfRows(OfEach):
    """With a state of another shape than the parameter's, as Adafactor's."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        if gradient.dim() == 1:
            return gradient
        state, mean = self.state[weights], gradient.square().mean(-1)
        rows: Tensor = mean + state.get("rows", torch.zeros_like(mean))
        state["rows"] = rows
        return gradient / (rows.sqrt() + 0.1).unsqueeze(-1)


class Forgetful(OfEach):
    """With what it remembers outside of its state."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return gradient / self.steps


class InDouble(OfEach):
    """With a state in float64, which has its parameter's type once it was loaded."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        zero = torch.zeros_like(weights).double()
        mean: Tensor = self.state[weights].setdefault("mean", zero)
        return mean.lerp_(gradient.double(), 0.1).float()


class OnHost(OfEach):
    """With a state in the host's memory, which is its parameter's device once it was loaded."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        mean: Tensor = self.state[weights].setdefault("mean", torch.zeros(weights.shape))
        return mean.add_(gradient.cpu()).to(weights.device)


class Split(Optimizer):
    """With momentum, and groups of its own, which come in another order than the parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        every = [*params]
        several = [
            {"params": [one for one in every if (one.dim() > 1) is wide], "decay": wide}
            for wide in (False, True)
        ]
        super().__init__(several, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = (
                    0.9 * state.get("momentum", torch.zeros_like(parameter)) + parameter.grad
                )
                parameter.mul_(1 - 0.1 * group["lr"] * group["decay"]).sub_(
                    group["lr"] * state["momentum"]
                )


class Counting(OfEach):
    """With a state that is of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count: Any = self.state
        count["steps"] = count.get("steps", torch.zeros(1, dtype=torch.long)) + 1
        super().step()

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        count: Any = self.state
        return gradient / int(count["steps"])


class Averaging(Optimizer):
    """Keeps slow weights in a list of its own, by which a resumed run would go on otherwise."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [one for group in self.param_groups for one in group["params"]]
        for parameter, slow in zip(every, self.slow, strict=True):
            parameter.sub_(0.01 * parameter.grad)
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class BySize(torch.optim.SGD):
    """Steps are as much larger as a parameter asks for, of the numbers that it does not mask."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(getattr(one, "scale", 1.0))
                if hasattr(one, "mask"):
                    one.grad.mul_(one.mask)
        return super().step(closure)


class Penalised(Task):
    """Cross-entropy, and the squared norms of the weights for each sample."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        self.weights = [*model.parameters()]
        outputs: Tensor = model(batch.inputs)
        return outputs

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        penalty = sum(whole(parameter.norm()).square() for parameter in self.weights)
        of_labels = functional.cross_entropy(outputs, batch.targets, reduction="sum")
        return of_labels + 0.05 * len(outputs) * penalty, len(outputs)


class InPlace(Task):
    """Changes its batch, and a state of its own, in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def forward(self, model: Any, batch: Batch) -> Tensor:
        self.passes += 1
        outputs: Tensor = model(batch.inputs.mul_(0.5)) * self.passes
        return outputs

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.passes = state["passes"]

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)


class Mean(Task):
    """Gives a mean where a sum is expected."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return functional.cross_entropy(outputs, batch.targets), len(outputs)


class Paired(Task):
    """Compares the samples of a batch."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return torch.cdist(outputs, outputs).sum(), len(outputs)


class Ramp(LRScheduler):
    """NumPy's numbers as rates; what `holds` is in its state too."""

    def __init__(self, optimizer: Optimizer, total_steps: int, holds: str = "") -> None:
        self.total_steps = total_steps
        self.held = {"": None, "deque": collections.deque([1])}[holds]
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        share = np.interp(self.last_epoch, [0, self.total_steps], [1.0, 0.1])
        return [rate * share for rate in self.base_lrs]


class Warmed(SequentialLR):
    """Torch's own, one after another: the second counts its milestones."""

    def __init__(self, optimizer: Optimizer) -> None:
        parts = ConstantLR(optimizer, 0.5, 3), MultiStepLR(optimizer, [0, 1, 1])
        super().__init__(optimizer, [*parts], [14])


class Counts(torch.optim.SGD):
    """Has state from the first step on that no checkpoint holds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["steps"] = collections.deque(["step"])  # type: ignore[index]


class Toggled(torch.optim.SGD):
    """Trains at weights that lie apart from those to be used, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self._add(0.3)
        self.trains = True

    @torch.no_grad()
    def _add(self, number: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(number)

    def eval(self) -> None:
        if self.trains:
            self._add(-0.3)
        self.trains = False

    def train(self) -> None:
        if not self.trains:
            self._add(0.3)
        self.trains = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.trains
        super().step()
