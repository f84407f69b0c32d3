"""Optimisers do what torch's own do; each schedule follows its formula."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from expt.config import groups
from expt.config import groups as schema
from expt.errors import ConfigError
from expt.training.optim import build_optimizer, scale_lr
from expt.training.optimizer_state import offload_states
from expt.training.parameter_groups import rate_of
from expt.training.patches import without_guards
from expt.training.schedules import Schedule, advance_after_evaluation, build_scheduler
from tests.facade import Capture, python
from tests.training.plain import same_weights

CASES: dict[str, tuple[Any, type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (
        schema.SGD(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ),
    "adam": (
        schema.Adam(name="adam", lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "adamw": (
        schema.Adam(name="adamw", lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        optim.AdamW,
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    ),
}  # fmt: skip
of_each = pytest.mark.parametrize(("config", "cls", "options"), CASES.values(), ids=CASES.keys())
PEAK, SPE, TOTAL = 0.2, 10, 50  # learning rate, steps per epoch, steps


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


@of_each
def test_the_same_bits_as_torchs_own(
    config: Any, cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs = net(), net()
    optimizer = build_optimizer(config, ours)
    reference = cls(theirs.parameters(), fused=True, **options)  # type: ignore[call-arg]
    assert isinstance(optimizer, cls)
    train(ours, optimizer, 5)
    train(theirs, reference, 5)
    assert same_weights(ours, theirs)
    assert not same_weights(ours, net())


@of_each
def test_a_parameter_with_gaps_in_its_memory_is_trained_as_others(
    config: Any, cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    """By another kernel: torch's fused ones are wrong then, on a CPU."""
    ours, theirs = net(), net()
    large = torch.zeros(5, 8)
    first = ours[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(large[:, :6].copy_(first.weight.detach()))
    for model in ours, theirs:
        train(model, build_optimizer(config, model), 5)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-6)
    assert torch.equal(large[:, :6], first.weight.detach()), "memory sees the new numbers"


def test_an_own_fused_optimizer_is_refused_a_parameter_with_gaps_in_its_memory() -> None:
    config = schema.TargetOptimizer(target="torch.optim.Adam", kwargs={"fused": True})
    build_optimizer(config, transposed := nn.Linear(4, 4))
    transposed.weight.data = transposed.weight.data.T
    build_optimizer(config, transposed)
    with pytest.raises(
        ConfigError,
        match=r"^optimizer\.fused=true: a parameter of the shape \[3, 4\] has gaps in its m",
    ):
        build_optimizer(config, with_one(nn.Parameter(torch.zeros(3, 8)[:, ::2])))


@of_each
def test_a_complex_parameter_is_trained_as_torch_does(
    config: Any, cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs = (with_one(nn.Parameter(torch.full((3,), 1 + 2j))) for _ in range(2))
    for model, each in (
        (ours, build_optimizer(config, ours)),
        (theirs, cls(theirs.parameters(), **options)),
    ):
        for _ in range(3):
            each.zero_grad()
            (model.own * (2 - 1j)).abs().square().sum().backward()  # type: ignore[operator, union-attr]
            each.step()
    torch.testing.assert_close(ours.own, theirs.own)


def with_one(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.register_parameter("own", parameter)
    return module


@of_each
def test_its_state_is_torchs_own(
    config: Any, cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs = net(), net()
    optimizer = build_optimizer(config, ours)
    train(ours, optimizer, 3)
    theirs.load_state_dict(ours.state_dict())
    reference = cls(theirs.parameters(), fused=True, **options)  # type: ignore[call-arg]
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading copies no tensor
    back = build_optimizer(config, again := net())
    again.load_state_dict(ours.state_dict())
    back.load_state_dict(copy.deepcopy(reference.state_dict()))
    for model, each in ((ours, optimizer), (theirs, reference), (again, back)):
        train(model, each, 2)
    assert same_weights(ours, theirs)
    assert same_weights(ours, again)


def test_an_unguarded_optimizer_takes_a_second_group() -> None:
    first, _, second = net()
    optimizer = without_guards(optim.SGD)(first.parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.3})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]


def test_an_unguarded_optimizer_drops_gradients_as_torch_does() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = without_guards(optim.SGD)([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_schedule_is_torchs_to_the_bit() -> None:
    """Check several groups, a tensor as rate, and a state that torch has saved."""
    torchs, ours = (two_groups(cls) for cls in (LambdaLR, Schedule))
    tensor = ours.optimizer.param_groups[1]["lr"]
    for _ in range(3):
        assert rates_of(ours) == rates_of(torchs)
        torchs.step()
        ours.step()
    resumed = two_groups(Schedule)
    resumed.load_state_dict(torchs.state_dict())
    for schedule in (torchs, ours, resumed):
        schedule.step()
    assert rates_of(resumed) == rates_of(ours) == rates_of(torchs)
    assert [float(rate) for rate in ours.get_last_lr()] == rates_of(ours)
    assert ours.optimizer.param_groups[1]["lr"] is tensor, "compiled code has kept it"


def two_groups(cls: type[LambdaLR]) -> LambdaLR:
    first, _, second = net()
    groups: Any = [
        {"params": first.parameters()},
        {"params": second.parameters(), "lr": torch.tensor(0.7)},
    ]
    optimizer = optim.SGD(groups, lr=0.3)
    schedule = cls(optimizer, lambda step: 1 / (step + 3))
    optimizer.step()
    return schedule


def rates_of(schedule: LambdaLR) -> list[float]:
    return [float(group["lr"]) for group in schedule.optimizer.param_groups]


def test_the_compiler_is_not_imported_for_a_step(tmp_path: Path) -> None:
    program = """
import sys, torch
from torch import nn
from expt.config import groups as schema
from expt.training.optim import build_optimizer
from expt.training.schedules import build_scheduler
model = nn.Linear(2, 2)
for name in ("adam", "adamw"):
    adam = dict(lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    build_optimizer(schema.Adam(name=name, **adam), model)
deep = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
muon = build_optimizer(schema.Muon(name="muon", momentum=0.9, nesterov=True, **adam), deep)
deep(torch.zeros(1, 2)).sum().backward()
muon.step(), muon.zero_grad(), muon.state_dict()
config = schema.SGD(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False)
optimizer = build_optimizer(config, model)
schedule = schema.Constant(name="constant", warmup_epochs=0.0)
scheduler = build_scheduler(schedule, optimizer, steps_per_epoch=1, total_steps=1)
model(torch.zeros(1, 2)).sum().backward()
optimizer.step(), scheduler.step(), optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
    done = python(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def sgd() -> optim.Optimizer:
    return optim.SGD(net().parameters(), lr=PEAK, momentum=0.9)


def scheduled(config: Any, optimizer: Any, total_steps: int = TOTAL, **more: Any) -> Any:
    return build_scheduler(config, optimizer, steps_per_epoch=SPE, total_steps=total_steps, **more)


def rates(config: Any, *, optimizer: Any = None, total_steps: int = TOTAL) -> list[float]:
    """The learning rate that each of `total_steps` steps uses."""
    optimizer = optimizer or sgd()
    scheduler = scheduled(config, optimizer, total_steps)
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def constant(warmup_epochs: float = 0.0) -> schema.Constant:
    return schema.Constant(name="constant", warmup_epochs=warmup_epochs)


def cosine(warmup_epochs: float = 0.0, min_lr: float = 0.0) -> schema.Cosine:
    return schema.Cosine(name="cosine", warmup_epochs=warmup_epochs, min_lr=min_lr)


def one_cycle(rise: float, start: float, end: float) -> schema.OneCycle:
    return schema.OneCycle(name="one_cycle", rise_fraction=rise, start_factor=start, end_factor=end)


def linear(warmup_steps: float, epochs: float | None = None) -> schema.Linear:
    return schema.Linear(name="linear", warmup_steps=warmup_steps, epochs=epochs)


def drops(every_epochs: float, warmup_epochs: float = 0.0) -> schema.Step:
    return schema.Step(
        name="step", warmup_epochs=warmup_epochs, every_epochs=every_epochs, gamma=0.5
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (constant(), dict.fromkeys((0, 1, 49), PEAK)),
        # The warm-up's 10 steps and the first at the peak are equally far apart.
        (constant(1.0), {0: PEAK / 11, 4: PEAK * 5 / 11, 9: PEAK * 10 / 11, 10: PEAK, 49: PEAK}),
        (constant(0.25), {0: PEAK / 3, 1: PEAK * 2 / 3, 2: PEAK}),
        (cosine(), {0: PEAK, 25: PEAK / 2, 49: PEAK * (1 + math.cos(math.pi * 49 / 50)) / 2}),
        (cosine(min_lr=0.04), {0: PEAK, 25: 0.12,
            49: 0.04 + 0.16 * (1 + math.cos(math.pi * 49 / 50)) / 2}),
        (cosine(1.0), {9: PEAK * 10 / 11, 10: PEAK, 30: PEAK / 2,
            49: PEAK * (1 + math.cos(math.pi * 39 / 40)) / 2}),
        # As get_linear_schedule_with_warmup of transformers.
        (linear(0), {0: PEAK, 1: PEAK * 49 / 50, 49: PEAK / 50}),
        (linear(10), {0: 0, 1: PEAK / 10, 9: PEAK * 9 / 10, 10: PEAK, 11: PEAK * 39 / 40,
            49: PEAK / 40}),
        (linear(0.05, 2.0), {0: 0, 1: PEAK, 2: PEAK * 18 / 19, 19: PEAK / 19, 20: 0, 49: 0}),
        (drops(2.0), {0: PEAK, 19: PEAK, 20: PEAK / 2, 39: PEAK / 2, 40: PEAK / 4}),
        (drops(0.1), {0: PEAK, 1: PEAK / 2, 3: PEAK / 8, 6: PEAK / 64, 7: PEAK / 128}),
        (drops(0.28), {13: PEAK / 16, 14: PEAK / 32}),  # 14 / 2.8 is a little less than 5
        (drops(1.5), {14: PEAK, 15: PEAK / 2, 29: PEAK / 2, 30: PEAK / 4, 45: PEAK / 8}),
        (drops(2.0, 1.0), {4: PEAK * 5 / 11, 10: PEAK, 19: PEAK, 20: PEAK / 2}),
    ],
    ids=["constant", "warm-up", "part of an epoch", "cosine", "cosine to min_lr",
        "cosine after warm-up", "linear", "linear after warm-up", "linear of two epochs",
         "step", "step each 0.1 epochs", "step each 0.28 epochs", "step each 1.5 epochs",
         "step after warm-up"],
)  # fmt: skip
def test_the_learning_rate_of_each_step(config: Any, expected: dict[int, float]) -> None:
    used = rates(config)
    assert {step: used[step] for step in expected} == pytest.approx(expected, rel=1e-9)


def test_the_cosine_ends_where_it_should_and_stays_there() -> None:
    optimizer = sgd()
    rates(cosine(min_lr=0.05), optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("config", [cosine(1.0), one_cycle(0.3, 0.1, 0.01)])
def test_a_group_is_trained_in_its_epochs_alone(config: Any) -> None:
    """The others are as without it."""
    parameters = schema.ParameterGroup(match="0.bias", lr_scale=0.5, epochs=1.2)
    model = net()
    chosen = schema.SGD(
        name="sgd", lr=PEAK, momentum=0.9, weight_decay=0.1, nesterov=True, groups=(parameters,)
    )
    optimizer = build_optimizer(chosen, model)
    schedule = scheduled(config, optimizer)
    expected, seen = rates(config), []
    for step in range(TOTAL):
        rate, of_group = (group["lr"] for group in optimizer.param_groups)
        assert rate == pytest.approx(expected[step])
        assert of_group == (pytest.approx(expected[step] / 2) if step < 12 else 0)
        assert rate_of(optimizer) == rate
        train(model, optimizer, 1)
        schedule.step()
        seen.append(dict(model.named_parameters())["0.bias"].detach().clone())
    assert not torch.equal(seen[10], seen[11])
    assert torch.equal(seen[11], seen[-1])


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_cycle(name: str) -> None:
    optimizer = build_optimizer(CASES[name][0], net())
    peak = optimizer.param_groups[0]["lr"]
    used = rates(one_cycle(0.3, 0.1, 4e-6), optimizer=optimizer, total_steps=100)
    assert (used[0], max(used), used[-1]) == pytest.approx((peak * 0.1, peak, peak * 4e-6))
    assert used.index(max(used)) == 29
    assert used[:30] == sorted(used[:30])
    assert used[29:] == sorted(used[29:], reverse=True)


@pytest.mark.parametrize(
    ("rise_fraction", "total_steps"), [(0.3, 1), (0.3, 2), (0.5, 2), (0.1, 10), (0.01, 100)]
)
def test_short_rise_of_one_cycle_starts_high(rise_fraction: float, total_steps: int) -> None:
    used = rates(one_cycle(rise_fraction, 0.04, 4e-6), total_steps=total_steps)
    assert used == sorted(used, reverse=True)
    assert used[0] > PEAK / 2


def scheduler(name: str, interval: Any = "epoch", **kwargs: Any) -> schema.TargetScheduler:
    """A scheduler of torch's, as a person names one."""
    return schema.TargetScheduler(
        target=f"torch.optim.lr_scheduler.{name}", interval=interval, kwargs=kwargs
    )


@pytest.mark.parametrize(("mode", "value"), [("min", {"loss": 1.0}), ("max", {"accuracy": 0.5})])
def test_a_plateau_is_of_the_number_that_is_watched(mode: str, value: dict[str, float]) -> None:
    """The other number improves in each epoch, and must not count."""
    optimizer, found = sgd(), []
    config = scheduler("ReduceLROnPlateau", mode=mode, patience=1, factor=0.5)
    watching = scheduled(config, optimizer)
    for epoch in range(1, 5):
        seen = {"loss": 1 / epoch, "accuracy": epoch / 10, **value}
        measured = {f"{name}/val": number for name, number in seen.items()}
        advance_after_evaluation(watching, measured, {"loss": "min", "accuracy": "max"}, "val")
        found.append(optimizer.param_groups[0]["lr"])
    assert found == [PEAK, PEAK, PEAK / 2, PEAK / 2]


def test_a_plateau_of_any_metric_drops_every_group_to_its_own_floor() -> None:
    """The rate of a low layer is far below torch's least difference."""
    first, _, second = net()
    groups: Any = [
        {"params": first.parameters()},
        {"params": second.parameters(), "lr": PEAK / 1e9, "lr_scale": 1e-9},
    ]
    config = schema.Plateau(
        name="plateau",
        metric="f1/train",
        factor=0.5,
        patience=1,
        min_delta=0.1,
        cooldown=0,
        min_lr=PEAK * 0.4,
    )
    optimizer = optim.SGD(groups, lr=PEAK)
    better: Any = {"loss": "min", "f1": "max"}
    watching = scheduled(config, optimizer, better=better)
    found = []
    for f1 in (0.5, 0.55, 0.6, 0.6, 0.9, 0.9, 0.9):  # 0.6 is no more than min_delta above the first
        measured = {"loss/val": -f1, "f1/train": f1, "f1/val": -f1}
        advance_after_evaluation(watching, measured, better, "val")
        found.append([group["lr"] / PEAK for group in optimizer.param_groups])
    factors = [1, 1, 0.5, 0.5, 0.5, 0.5, 0.4]
    assert found == [[pytest.approx(factor), pytest.approx(factor / 1e9)] for factor in factors]


class Told(LambdaLR):
    """Asks for one thing, and has its own idea of the other."""

    def __init__(
        self, optimizer: optim.Optimizer, steps_per_epoch: int, total_steps: int = 7
    ) -> None:
        self.told, self.total_steps = steps_per_epoch, total_steps
        super().__init__(optimizer, lambda step: 1.0)


OWN, ONE_CYCLE = f"{__name__}.Told", "torch.optim.lr_scheduler.OneCycleLR"


@pytest.mark.parametrize(
    ("target", "interval", "kwargs", "told"),
    [
        (OWN, "step", {}, {"told": SPE, "total_steps": 7}),
        (OWN, "epoch", {}, {"told": 1, "total_steps": 7}),
        (OWN, "step", {"steps_per_epoch": 3, "total_steps": 4}, {"told": 3, "total_steps": 4}),
        (ONE_CYCLE, "step", {"max_lr": 0.1}, {"total_steps": TOTAL}),
        (ONE_CYCLE, "epoch", {"max_lr": 0.1}, {"total_steps": TOTAL // SPE}),
        (ONE_CYCLE, "step", {"max_lr": 0.1, "epochs": 9}, {"total_steps": 9 * SPE}),
        (ONE_CYCLE, "epoch", {"max_lr": 0.1, "total_steps": None}, {"total_steps": TOTAL // SPE}),
        (
            ONE_CYCLE,
            "step",
            {"max_lr": 0.1, "epochs": 20, "steps_per_epoch": 70},
            {"total_steps": 1400},
        ),
    ],
)
def test_an_own_scheduler_is_told_what_it_lacks(
    target: str, interval: Any, kwargs: dict[str, Any], told: dict[str, int]
) -> None:
    config = schema.TargetScheduler(target=target, interval=interval, kwargs=kwargs)
    found = scheduled(config, sgd()).state_dict()
    assert {key: found[key] for key in told} == told


@pytest.mark.parametrize(
    ("interval", "given", "has"),
    [
        ("epoch", {"total_steps": 50}, "total_steps=50, but the run has 5 epochs;"),
        ("epoch", {"epochs": 5, "steps_per_epoch": SPE}, f"={5 * SPE}, but the run has 5 epochs;"),
        ("epoch", {"epochs": 3}, "total_steps=3, but the run has 5 epochs;"),
        ("step", {"epochs": 3}, f"total_steps={3 * SPE}, but the run has {TOTAL};"),
    ],
)
def test_a_cycle_that_cannot_be_of_the_run_is_refused(
    interval: Any, given: dict[str, int], has: str
) -> None:
    config = schema.TargetScheduler(
        target=ONE_CYCLE, interval=interval, kwargs={"max_lr": 0.1, **given}
    )
    with pytest.raises(ConfigError, match=has):
        scheduled(config, sgd())


def test_a_model_is_no_optimizer() -> None:
    with pytest.raises(
        ConfigError, match=r"refused, it is not a subclass of torch\.optim\.optimizer\.Optimizer"
    ):
        build_optimizer(schema.TargetOptimizer(target="torch.nn.Linear", kwargs={}), net())


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_batch(rule: Any, factor: float) -> None:
    groups: list[dict[str, Any]] = [
        {"params": net()[0].parameters()},
        {"params": net()[2].parameters(), "lr": 0.5},
    ]
    optimizer = optim.SGD(groups, lr=PEAK)
    scale_lr(optimizer, rule, 1024 / 256)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [PEAK * factor, 0.5 * factor]
    )
    # The warm-up rises to the new rate, and the cosine starts there.
    used = rates(cosine(1.0), optimizer=optimizer)
    assert (used[0], used[10]) == pytest.approx((PEAK * factor / 11, PEAK * factor))


def test_an_optimizer_without_guards_is_used_as_it_is(capsys: Capture) -> None:
    class Own(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError

    assert without_guards(Own) is Own
    assert "Own without the guards" in (told := capsys.readouterr().err)
    assert "has changed (its step has none)" in told


SGD = groups.SGD(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
ADAMW = groups.Adam(
    name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1,
    decay_biases_and_norms=False
)  # fmt: skip
MUON = groups.Muon(
    name="muon", lr=0.1, momentum=0.9, nesterov=True, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
)


def trained(
    config: Any, *, bytes_at_once: int | None, device: str = "cpu"
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    ).to(device)
    optimizer = build_optimizer(config, model)
    if bytes_at_once is not None:
        offload_states(optimizer, bytes_at_once=bytes_at_once)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler, losses, kept = (
        torch.amp.GradScaler(device, enabled=False),
        [],
        list(map(id, optimizer.param_groups[0]["params"])),
    )
    for step in range(4):
        loss = model(torch.ones(4, 8, device=device) * (step + 1)).square().mean()
        loss.backward()
        scaler.step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    assert list(map(id, optimizer.param_groups[0]["params"])) == kept
    return losses, optimizer.state_dict()


@pytest.mark.parametrize("config", [SGD, ADAMW, MUON], ids=["sgd", "adamw", "muon"])
@pytest.mark.parametrize("bytes_at_once", [1, 1100, 10**9])
def test_numbers_stay(config: Any, bytes_at_once: int) -> None:
    losses, state = trained(config, bytes_at_once=None)
    again, state_again = trained(config, bytes_at_once=bytes_at_once)
    assert again == losses
    assert state_again["param_groups"] == state["param_groups"]
    for number, values in state["state"].items():
        assert values.keys() == state_again["state"][number].keys()
        assert all(torch.equal(torch.as_tensor(values[key]),
            torch.as_tensor(state_again["state"][number][key]))
                   for key in values)  # fmt: skip
