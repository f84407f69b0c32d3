"""Which own optimisers are refused where each worker has a part of each tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from expt.config.groups import TargetOptimizer
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.models.mlp import MLP
from expt.training.collectives import Worker
from expt.training.precision import Precision
from expt.training.sharding import whole
from expt.worker import optimizer, random_state, sharding
from expt.worker.build import build_data, build_learner
from expt.worker.optimizer import check_optimizer
from tests.worker.sharded import Configs, together


class OfEach(Optimizer):
    """Descent by what `step_of` makes of each parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.step_of(parameter, parameter.grad))

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class ByNorm(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        ratio: Tensor = weights.norm() / (gradient.norm() + 1e-6)
        return gradient * ratio


class ByNumber(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (float(weights.norm()) / (float(gradient.norm()) + 1e-6))


class Clipped(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        norm: float = gradient.norm().item()
        return gradient * min(1.0, 1.0 / (norm + 1e-6))


class ByAlpha(OfEach):
    """Reads a sum that torch itself makes a number of."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        factor: Any = (weights * weights).sum()
        return torch.zeros_like(gradient).add_(gradient, alpha=factor)


class Asked(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (int(100 * weights.norm()) if weights.norm() > 0.1 else 1.0)


class ByPart(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        part: Any = gradient
        return gradient * float((part.to_local() if hasattr(part, "to_local") else part).norm())


class OfRows(OfEach):
    """With a state of another shape than the parameter's, as Adafactor's."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        if gradient.dim() == 1:
            return gradient
        state, mean = self.state[weights], gradient.square().mean(-1)
        rows: Tensor = mean + state.get("rows", torch.zeros_like(mean))
        state["rows"] = rows
        return gradient / (rows.sqrt() + 0.1).unsqueeze(-1)


class OfSums(OfEach):
    """With a state that is each worker's part of a sum."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[weights]
        total: Tensor = gradient.sum() + state.get("sum", 0.0)
        state["sum"] = total
        return gradient * total.sigmoid()


class OfLast(OfEach):
    """With a list of the last gradients as its state."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        last: list[Tensor] = [*self.state[weights].get("last", [])[-1:], gradient.clone()]
        self.state[weights]["last"] = last
        return torch.stack(last).sum(0)


class Forgetful(OfEach):
    """With what it remembers outside of its state."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return gradient / self.steps


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


class Noisy(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Picky(OfEach):
    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        assert len(weights) > 5, "too small for me"
        return gradient


class Largest(OfEach):
    """Looks for the largest of numbers, which there is none of where a worker has no row."""

    def step_of(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient / gradient.max()


HERE = "tests.worker.test_optimizer"
OTHER, FAILS, UNTRIED = (
    "comes to other weights where each worker",
    "fails where each worker has a part",
    "not be tried",
)
CASES = {
    f"{HERE}.OfEach": "",
    f"{HERE}.ByNorm": "",
    f"{HERE}.ByNumber": "",
    f"{HERE}.Clipped": "",
    f"{HERE}.ByAlpha": "",
    f"{HERE}.Asked": "",
    f"{HERE}.OfRows": "or once it is resumed there (RuntimeError: ",
    f"{HERE}.OfSums": (
        "its state has a sum that is of each worker's part, which no checkpoint can hold"
    ),
    f"{HERE}.OfLast": "",
    f"{HERE}.Forgetful": (
        "comes to other weights once it is resumed; let it keep what it remembers in self.state"
    ),
    f"{HERE}.Split": "",
    f"{HERE}.Counting": "",
    f"{HERE}.ByPart": OTHER,
    f"{HERE}.Noisy": UNTRIED,
    f"{HERE}.Picky": UNTRIED,
    "torch.optim.AdamW": "",
    "torch.optim.RMSprop": "",
    "torch.optim.Adafactor": FAILS,
}
MORE = dict.fromkeys(
    (f"torch.optim.{name}" for name in ("Adadelta", "Adagrad", "ASGD", "NAdam", "RAdam")), ""
)


@pytest.mark.parametrize(
    ("strategy", "size", "cases"),
    [("fsdp", 2, CASES), pytest.param("hsdp", 4, CASES | MORE, marks=pytest.mark.slow)],
)
def test_own_optimizers_are_tried(
    strategy: str, size: int, cases: dict[str, str], configs: Configs, tmp_path: Path
) -> None:
    config = configs(
        strategy, size, "model=mlp", *(["sharding.shards=2"] if strategy == "hsdp" else [])
    )
    wanted = [
        (name, decays)
        for name in cases
        for decays in ((True, False) if "AdamW" in name else (True,))
    ]

    def each(worker: Worker) -> dict[tuple[str, bool], str]:
        found, module = dict[tuple[str, bool], str](), build_module(config, worker)
        before = random_state.state_dict(worker.device)
        for name, decays in wanted:
            own = TargetOptimizer(target=name, kwargs={}, decay_biases_and_norms=decays)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    check_optimizer(dataclasses.replace(config, optimizer=own), module, worker)
                    found[name, decays] = said.getvalue()
                except ConfigError as error:
                    found[name, decays] = str(error)
            assert random_state.state_dict(worker.device) == before
        for parameter in module.parameters():  # as a schedule or a task may read it
            assert float(parameter.detach().norm()) == pytest.approx(
                float(whole(parameter.detach()).norm())
            )
            expected = whole(parameter.detach()).clone()
            expected[0] *= 0.5
            expected[expected < 0] = 0.25
            parameter.data[0] *= 0.5
            parameter.data[parameter.data < 0] = 0.25
            expected[expected > 0.2, ...] = 0.5
            parameter.data[parameter.data > 0.2, ...] = 0.5
            with pytest.raises(
                ConfigError, match=r"has no gradient .* torch\.where, or write under torch\.no_grad"
            ):
                (parameter * 1)[0] = 0.0
            assert torch.equal(whole(parameter.detach()), expected), "rows are written"
        own = TargetOptimizer(target=f"{HERE}.ByPart", kwargs={})
        refused = dataclasses.replace(config, optimizer=own)
        with pytest.raises(ConfigError, match=OTHER):
            build_learner(refused, build_data(refused, worker), worker)
        reads = dataclasses.replace(
            config, optimizer=TargetOptimizer(target=f"{HERE}.ByNumber", kwargs={"lr": 0.5})
        )
        learner = build_learner(reads, build_data(reads, worker), worker)
        starts = [whole(parameter.detach()).clone() for parameter in learner.module.parameters()]
        for parameter in learner.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.optimizer.step()
        for parameter, start in zip(learner.module.parameters(), starts, strict=True):
            moved = start - 0.5 * start.norm() / (start.numel() ** 0.5 + 1e-6)
            torch.testing.assert_close(
                whole(parameter.detach()), moved, rtol=1e-5, atol=1e-6, msg="not by all parts"
            )
        module.scale = torch.nn.Parameter(torch.tensor(1.0))
        with pytest.raises(
            ConfigError,
            match=r"parameter scale has no dimension to share out; give it the shape \[1\]",
        ):
            sharding.shard(
                config, module, worker, Precision(config.amp, worker.device), lambda tensor: tensor
            )
        return found

    for rank, found in enumerate(together(tmp_path, size, each)):
        for (name, _), said in found.items():
            told = "" if rank and cases[name] == UNTRIED else cases[name]
            assert told in said, (rank, name)
            assert bool(told) == bool(said), (rank, name, said)


def test_one_that_fails_on_some_workers_alone_keeps_nobody_waiting(
    configs: Configs, tmp_path: Path
) -> None:
    own = TargetOptimizer(target=f"{HERE}.Largest", kwargs={})
    config = dataclasses.replace(configs("fsdp", 2, "model=mlp"), optimizer=own)

    def each(worker: Worker) -> str:
        try:
            check_optimizer(config, build_module(config, worker), worker)
        except (ConfigError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "is taken"

    first, other = together(tmp_path, 2, each)
    assert re.match(
        rf"ConfigError: .*{own.target}: fails where .* \(of one with few rows some have none\)",
        other,
    )
    assert "(RuntimeError: max(): " in other
    assert first.startswith("RuntimeError: "), (
        "the driver is to tell what the other raised, and not what followed"
    )


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_small_parameters_are_shared_out_as_the_large_are(shards: int) -> None:
    def held(rows: int) -> list[int]:
        parts = torch.empty(rows).chunk(shards)
        return [len(part) for part in parts] + [0] * (shards - len(parts))

    for rows in range(1, 10 * shards):
        small = optimizer._rows(rows, shards)
        assert small <= min(rows, 2 * shards - 1)
        assert (0 in held(small)) == (0 in held(rows)), rows
        assert rows == small or len({*held(small)}) > 1, rows


def build_module(config: RunConfig, worker: Worker) -> MLP:
    """With a parameter that has fewer rows than there are workers."""
    module = MLP(channels=1, image_size=(2, 2), num_classes=1, hidden=[8])
    sharding.shard(
        config, module, worker, Precision(config.amp, worker.device), lambda tensor: tensor
    )
    return module
