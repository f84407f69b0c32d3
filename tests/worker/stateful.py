"""Custom tasks and models with a state, and some that break what a task promises."""

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LambdaLR

import expt
from expt.data.loading import Batch


class Warm(expt.Task):
    """Warms the loss up by a counter, and carries what its worker has seen."""

    def __init__(self) -> None:
        self.steps, self.seen = 0, torch.zeros(())

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        self.steps += outputs.requires_grad
        if outputs.requires_grad:
            self.seen = 0.9 * self.seen + outputs.detach().mean()
        loss = functional.cross_entropy(outputs + self.seen, batch.targets, reduction="sum")
        return loss * min(1, self.steps / 30) + 0 * self.seen, len(outputs)


class Saved(Warm):
    """Saves all of it."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.seen = state["steps"], state["seen"]


class Half(Saved):
    """Saves half of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Hidden(Warm):
    """Counts in a slot, in an attribute of a function, and in defaults."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        self.count += 1
        return called(outputs), Hidden.kept(outputs)

    @staticmethod
    def kept(outputs: Tensor, lengths: list[int] = [], *, last: list[int] = [0]) -> int:  # noqa: B006
        lengths += [len(outputs)]
        last[0] += 1
        return len(outputs)


def called(outputs: Tensor) -> Tensor:
    vars(called)["times"] = vars(called).get("times", 0) + 1
    return outputs.square().sum()


class Net(nn.Module):
    """Takes pictures."""

    def __init__(self, channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(channels * image_size[0] * image_size[1], num_classes)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.flatten(1))
        return outputs


class Counting(Net):
    """Counts in an attribute, and in a buffer that is not saved."""

    total: Tensor

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.total += 1
        return super().forward(x)


class Later(Net):
    """Begins to count in its fourth step."""

    seen: Tensor
    late: int

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        if self.seen > 3:
            self.late = getattr(self, "late", 0) + self.training
        return super().forward(x)


class OnSecond(Net):
    """Counts on one of two workers only."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training and dist.get_rank() == 1
        return super().forward(x)


class Extra(Net):
    """Counts in an attribute that torch's own methods save."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Remembering(Net):
    """Keeps a tensor that grows where torch's own methods save it."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.seen = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        first = x.detach().flatten()[: self.training]
        self.seen = torch.cat((self.seen.to(first), first))
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return self.seen

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


class Listed(Net):
    """Has its layer in a sequence that is in a plain list, too."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.stages = [nn.Sequential(nn.Flatten(), self.layer)]

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.stages[0](x)
        return outputs


calls = 0


def remembering() -> Callable[[Tensor], Tensor]:
    last = torch.zeros(())

    def remember(x: Tensor) -> Tensor:
        nonlocal last
        last = last + x.detach().sum()
        return x

    return remember


class Outside(Net):
    """Counts in a global, in an attribute of the class, and in a closure of each."""

    calls_of_all = 0

    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += self.training
        Outside.calls_of_all += self.training
        return super().forward(remember(x))


remember = remembering()


class OnLayer(Net):
    """Counts in a generator, in a layer that torch prunes, and in hooks of that."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        prune.l1_unstructured(self.layer, "weight", 0.5)
        self.scales, seen = (min(1, step / 20) for step in itertools.count()), [0]
        self.layer.register_forward_hook(lambda *_: seen.append(0))
        self.layer.register_forward_pre_hook(Seen().note)
        self.layer.count = 0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.layer.count += self.training  # type: ignore[operator, assignment]
        return super().forward(x) * next(self.scales)


class Seen:
    calls = 0

    def note(self, *_: object) -> None:
        self.calls += 1


class Unfreezing(Net):
    """Trains its bias from the second step on."""

    steps: Tensor

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.register_buffer("steps", torch.zeros(()))
        self.layer.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 2:
            self.layer.bias.requires_grad_(True)
        return super().forward(x)


class Slow(torch.optim.SGD):
    """Has slow weights in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for slow, one in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(one, 0.5)


class SlowSaved(Slow):
    """Saves them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        self.slow = [one.clone() for one in state.pop("slow")]
        super().load_state_dict(state)


class SlowCleared(SlowSaved):
    """Empties its state before it loads another."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state.clear()
        super().load_state_dict(state_dict)


class Rising(LambdaLR):
    """Counts in a closure and in a slot, which torch's state_dict leaves out."""

    __slots__ = ("calls",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls, seen = 0, itertools.count()
        super().__init__(optimizer, lambda _: min(1, next(seen) / 20))

    def get_lr(self) -> Any:
        self.calls += 1
        return super().get_lr()


class Late(Net):
    """Makes a layer in its first forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(10, 10, device=x.device)
        outputs: Tensor = self.late(super().forward(x))
        return outputs


class Bank(Net):
    """Has a buffer that grows."""

    bank: Tensor

    def __init__(self, channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__(channels, image_size, num_classes)
        self.register_buffer("bank", torch.zeros(0, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.bank = torch.cat([self.bank, outputs.detach()])
        return outputs


class Replaced(Net):
    """Puts another parameter in the place of one there."""

    def __init__(self, channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__(channels, image_size, num_classes)
        self.head = nn.Linear(num_classes, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        outputs: Tensor = self.head(super().forward(x))
        return outputs


class InAList(Net):
    """Has layers that torch knows nothing of."""

    def __init__(self, channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__(channels, image_size, num_classes)
        self.more = [nn.Linear(num_classes, num_classes)]

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.more[0].to(x.device)(super().forward(x))
        return outputs


class Centred(expt.Task):
    """Has a parameter, as a centre loss has."""

    def __init__(self) -> None:
        self.centre = nn.Parameter(torch.zeros(10))

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        targets = functional.one_hot(batch.targets, 10) + self.centre.to(outputs.device)
        return (outputs - targets).square().sum(), len(outputs)


class Evaluated(expt.Task):
    """Counts what only evaluations do, and begins something after the first epoch's."""

    def __init__(self) -> None:
        self.evaluated, self.began = 0, False

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        self.evaluated += not outputs.requires_grad
        self.began = self.evaluated > 1
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)


class Epochs(expt.Callback):
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def on_epoch_end(self, view: expt.View) -> None:
        self.count += 1


class EpochsSaved(Epochs):
    """Saves it."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Peaked(expt.Task):
    """Measures numbers that are no sums; one is of the steps done."""

    reductions = {"widest": "max", "lowest": "min", "steps": "last"}

    def __init__(self) -> None:
        self.steps = 0

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        self.steps += outputs.requires_grad
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Any]:
        hits = outputs.argmax(1) == batch.targets
        peaks = {"widest": outputs.max(), "lowest": outputs.min(), "steps": self.steps}
        return {"hits": (hits.sum(), len(hits)), **peaks}

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
