"""Several optimizers in one are each as it is alone: updates, schedules, states."""

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from expt.config import groups
from expt.config.constraints import Target
from expt.errors import ConfigError
from expt.training.optim import Combined, build_optimizer
from expt.training.optimizer_state import in_use, switch
from expt.training.parameter_groups import rate_of
from expt.training.schedules import Plateau, RisingRate, build_scheduler, lr_factor
from tests.conftest import Configured
from tests.training.plain import same_weights
from tests.worker.ratings import Counting

ADAM: Any = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SGD = groups.SGDRule(name="sgd", lr=0.2, momentum=0.9, weight_decay=0.0, nesterov=False)
ADAMW = groups.AdamRule(name="adamw", lr=0.05, **ADAM)
SPARSE = Target(target="torch.optim.SparseAdam", kwargs={"lr": 0.02})
COSINE = groups.Cosine(name="cosine", warmup_epochs=0.5, min_lr=0.01)
CONSTANT = groups.Constant(name="constant", warmup_epochs=0.0)
LENGTH: Any = {"steps_per_epoch": 4, "total_steps": 12}


class Rated(nn.Module):
    """A large table of which a batch uses few rows, and layers above it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(1000, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        rated: torch.Tensor = self.layers(self.table(chosen))
        return rated


def batches(steps: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1000, (8,), generator=generator) for _ in range(steps)]


def several(*own: tuple[str, Any], scheduler: Any = None, **more: Any) -> groups.Adam:
    """An AdamW with groups that have these optimizers, and maybe a schedule."""
    each = (groups.ParameterGroup(match=m, optimizer=one, scheduler=scheduler) for m, one in own)
    return groups.Adam(name="adamw", lr=0.01, **ADAM, groups=tuple(each), **more)


def step(model: nn.Module, batch: torch.Tensor, *optimizers: Any) -> None:
    model(batch).square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


def trained(module: nn.Module, config: Any, schedule: Any, *, again: bool = False) -> Any:
    """Train; with `again` by an optimizer and a schedule that are loaded within."""

    def built() -> tuple[Any, Any]:
        optimizer = build_optimizer(config, module)
        return optimizer, build_scheduler(schedule, optimizer, own=config.groups, **LENGTH)

    optimizer, scheduler = built()
    for number, batch in enumerate(batches()):
        if again and number == 5:
            states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            for one, state in zip((new := built()), states, strict=True):
                one.load_state_dict(state)
            optimizer, scheduler = new
        step(module, batch, optimizer)
        scheduler.step()
    return optimizer


CASES: dict[str, tuple[str, Any, Callable[[Any], optim.Optimizer]]] = {
    "adamw": (r"^layers\.2", ADAMW, lambda own: optim.AdamW(own, 0.05, **ADAM, fused=True)),
    "momentum": (r"^layers\.[02]", SGD, lambda own: optim.SGD(own, 0.2, 0.9, fused=True)),
    "sparse": ("table", SPARSE, lambda own: optim.SparseAdam(own, 0.02)),
    "sgd": ("table", replace(SGD, momentum=0.0), lambda own: optim.SGD(own, 0.2)),
    "adagrad": ("table", Target(target="torch.optim.Adagrad", kwargs={"lr": 0.1}),
                lambda own: optim.Adagrad(own, 0.1)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("schedule", [CONSTANT, COSINE], ids=["constant", "cosine"])
@pytest.mark.parametrize(("match", "own", "build"), CASES.values(), ids=CASES.keys())
def test_as_two_optimizers_in_a_loop(
    match: str, own: Any, build: Any, schedule: Any, again: bool
) -> None:
    """To the bit, each from a rate of its own."""
    ours, theirs = Rated(), Rated()
    ours.table.sparse = theirs.table.sparse = match == "table"
    trained(ours, several((match, own)), schedule, again=again)
    mine = [one for name, one in theirs.named_parameters() if re.search(match, name)]
    rest = [one for name, one in theirs.named_parameters() if not re.search(match, name)]
    optimizers = optim.AdamW(rest, 0.01, **ADAM, fused=True), build(mine)
    factor = lr_factor(schedule, 0.01, **LENGTH)
    schedules = [LambdaLR(one, factor) for one in optimizers]
    for batch in batches():
        step(theirs, batch, *optimizers)
        for one in schedules:
            one.step()
    assert same_weights(ours, theirs)


def test_a_group_may_have_a_schedule_of_its_own() -> None:
    """With an optimizer or without; layers' and groups' shares of the rate are of it."""
    down = groups.Step(name="step", warmup_epochs=0.0, every_epochs=1.0, gamma=0.5)
    with_both = groups.ParameterGroup(match="table", optimizer=SPARSE, scheduler=down, lr_scale=0.5)
    alone = groups.ParameterGroup(match="bias", scheduler=down)
    ended = groups.ParameterGroup(match=r"layers\.0", optimizer=SGD, epochs=1.0)
    config = groups.Adam(name="adamw", lr=0.01, **ADAM, groups=(with_both, alone, ended))
    optimizer = build_optimizer(config, Rated())
    scheduler = build_scheduler(COSINE, optimizer, own=config.groups, **LENGTH)
    seen = []
    for _ in range(12):
        seen.append([rate_of(optimizer, number) for number in (None, 0, 1, 2)])
        optimizer.step()
        scheduler.step()
    factor = lr_factor(COSINE, 0.01, **LENGTH)
    for at, (main, table, bias, first) in enumerate(seen):
        assert main == pytest.approx(0.01 * factor(at))
        assert table == pytest.approx(0.02 * 0.5 ** (at // 4))
        assert bias == pytest.approx(0.01 * 0.5 ** (at // 4))
        assert first == pytest.approx(0.2 * factor(at) * (at < 4))
    assert {group["lr"] for group in optimizer.param_groups if group.get("own") == 0} == {0.00125}


def test_a_group_may_fall_in_a_line_of_its_own(configured: Configured) -> None:
    """As transformers' schedule does, each to the end of its own plan."""
    own = "{match: table, scheduler: {name: linear, warmup_steps: 1, epochs: 1.5}}"
    words = ("optimizer=adamw", "scheduler=linear", "scheduler.warmup_steps=3")
    config = configured(*words, "optimizer.lr=0.01", f"optimizer.groups=[{own}]")
    optimizer = build_optimizer(config.optimizer, Rated())
    scheduler = build_scheduler(config.scheduler, optimizer, own=config.optimizer.groups, **LENGTH)
    seen = []
    for _ in range(12):
        seen.append([100 * rate_of(optimizer, number) for number in (None, 0)])
        optimizer.step()
        scheduler.step()
    lines = [[0, 1 / 3, 2 / 3, *(left / 9 for left in range(9, 0, -1))]]
    lines.append([0, *(left / 5 for left in range(5, 0, -1)), *[0] * 6])
    assert seen == [pytest.approx(pair) for pair in zip(*lines, strict=True)]


def test_layers_decay_in_each_optimizer() -> None:
    model = Rated()
    config = several(("table", SPARSE), (r"layers\.0", SGD), layer_decay=0.5)
    names = {one: name for name, one in model.named_parameters()}
    rates = {
        names[one]: group["lr"]
        for group in build_optimizer(config, model).param_groups
        for one in group["params"]
    }
    expected = {"table.weight": 0.02 / 8, "layers.0.bias": 0.2 / 4, "layers.3.bias": 0.01}
    assert {name: rates[name] for name in expected} == pytest.approx(expected)


def moments(optimizer: optim.Optimizer) -> list[Any]:
    return [group.get("betas", group.get("momentum")) for group in optimizer.param_groups]


@pytest.mark.parametrize("own", [ADAMW, SGD], ids=["momentum of all", "momentum of some"])
def test_one_cycle_moves_momentum_where_all_have_it(own: Any) -> None:
    config = several(("table", own))
    optimizer = build_optimizer(config, Rated())
    cycle = groups.OneCycle(name="one_cycle", rise_fraction=0.5, start_factor=0.1, end_factor=0.01)
    scheduler = build_scheduler(cycle, optimizer, own=config.groups, **LENGTH)
    ends, first = [(rate_of(optimizer), rate_of(optimizer, 0))], moments(optimizer)
    moved = set[int]()
    for _ in range(11):
        optimizer.step()
        scheduler.step()
        ends.append((rate_of(optimizer), rate_of(optimizer, 0)))
        moved |= {at for at, now in enumerate(moments(optimizer)) if now != first[at]}
    assert ends[0] == pytest.approx((0.001, 0.1 * own.lr))
    assert ends[-1] == pytest.approx((0.0001, 0.01 * own.lr))
    assert moved == ({0, 1} if own is ADAMW else set())


def test_a_plateau_lowers_every_rate() -> None:
    optimizer = build_optimizer(several(("table", SPARSE)), Rated())
    config = groups.Plateau(
        name="plateau", metric="loss/val", factor=0.1, patience=0, min_delta=0.0, cooldown=0,
        min_lr=0.0005,
    )  # fmt: skip
    plateau = Plateau(config, optimizer, "min")
    for _ in range(4):
        plateau.step(1.0)
    assert (rate_of(optimizer), rate_of(optimizer, 0)) == pytest.approx((0.0005, 0.001))


def test_a_test_of_rates_leaves_those_of_others() -> None:
    optimizer = build_optimizer(several(("table", SPARSE)), Rated())
    schedule = RisingRate(optimizer, 100.0, 3)
    optimizer.step()
    schedule.step()
    assert (rate_of(optimizer), rate_of(optimizer, 0)) == pytest.approx((0.1, 0.02))


class Switched(Counting):
    """With state that is in no `state`, and weights to evaluate at."""

    at = "eval"

    def train(self) -> None:
        self.at = "train"

    def eval(self) -> None:
        self.at = "eval"


def test_a_custom_one_keeps_its_own_state_and_is_switched() -> None:
    own = Target(target=f"{__name__}.Switched", kwargs={"lr": 0.1})
    whole, parts = Rated(), Rated()
    whole.table.sparse = parts.table.sparse = False
    trained(whole, several((r"layers", own)), CONSTANT)
    optimizer = trained(parts, several((r"layers", own)), CONSTANT, again=True)
    assert same_weights(whole, parts)
    assert isinstance(optimizer, Combined)
    switched = optimizer.parts[1]
    assert isinstance(switched, Switched)
    switch(optimizer, "train")
    assert (switched.steps, switched.at) == (12, "train")
    with in_use(optimizer):
        assert switched.at == "eval"
    assert switched.at == "train"


def test_muon_of_a_group_has_its_matrices() -> None:
    muon = groups.MuonRule(name="muon", lr=0.1, momentum=0.9, nesterov=True, **ADAM)
    optimizer = build_optimizer(several((r"layers\.[02]", muon), ("table", SPARSE)), Rated())
    assert isinstance(optimizer, Combined)
    kinds = [type(part).__name__ for part in optimizer.parts]
    assert kinds == ["AdamW", "Muon", "AdamW", "SparseAdam"]
    shapes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    assert shapes == [[(1, 6), (1,)], [(6, 4), (6, 6)], [(6,), (6,)], [(1000, 4)]]


def test_all_parameters_may_be_of_groups() -> None:
    optimizer = build_optimizer(several(("table", SPARSE), ("layers", SGD)), Rated())
    assert isinstance(optimizer, Combined)
    assert [type(part).__name__ for part in optimizer.parts] == ["SparseAdam", "SGD"]
    one = build_optimizer(several(("", SGD)), nn.Linear(1, 1))
    assert isinstance(one, optim.SGD), "which needs no other around it"


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (Target(target="torch.optim.LBFGS", kwargs={}), "LBFGS"),
        (Target(target="torch.optim.SparseAdam", kwargs={"lrr": 1}),
         r"^optimizer\.groups\.0\.optimizer\._target_=torch\.optim\.SparseAdam: .*'lr'"),
        (groups.MuonRule(name="muon", lr=0.1, momentum=0.9, nesterov=True, **ADAM),
         r"^optimizer\.groups\.0\.optimizer=muon: "),
    ],
    ids=["closure", "argument", "no matrix"],
)  # fmt: skip
def test_refused(own: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_optimizer(several(("table", own)), Rated())


def test_states_are_of_their_own_parameters() -> None:
    """As they are numbered in a checkpoint: those of each group in its turn."""
    model = Rated()
    optimizer = trained(model, several(("table", SPARSE), (r"layers\.0", SGD)), CONSTANT)
    state = optimizer.state_dict()
    numbers = [*itertools.chain(*(group["params"] for group in state["param_groups"]))]
    assert numbers == [*range(7)]
    keys = [{*state["state"][number]} for number in numbers]
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert keys == [adam] * 5 + [{"momentum_buffer"}] * 2
