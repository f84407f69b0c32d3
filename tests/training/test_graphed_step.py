"""Steps by graphs, where a stand-in calls again what a card would launch again: tests/gpu has the
card's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.cuda_graph import CudaGraph
from expt.training.graphed_step import GraphedStep, graphed_step
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.training.patches.unguarded import optimizer as without_guards
from expt.training.precision import Precision
from expt.worker import random_state
from tests import graphs
from tests.graphs import CPU, StandIn, graphed
from tests.training.test_loop import batches, model

EXACT = 0.125
"""A rate that is a float32."""


def a_learner(optimizer: type[optim.Optimizer] = optim.SGD, **settings: Any) -> Learner:
    """With dropout, batch norm, clipping, and a rate that halves after each step."""
    module = model()
    unguarded: Any = without_guards(optimizer)
    update = unguarded(module.parameters(), lr=EXACT, fused=True, **settings)
    return Learner(
        module=module,
        parallel=module,
        optimizer=update,
        scheduler=optim.lr_scheduler.LambdaLR(update, lambda step: 0.5**step),
        precision=Precision(False, CPU, gradient_clip=0.5),
        task=Classification(),
        world_size=1,
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def left_by(made: Learner, steps: int = 5) -> list[Tensor]:
    """All numbers after so many steps, and one of a smaller batch."""
    torch.manual_seed(3)
    sums, looked = Sums(made.task, CPU), list[Tensor]()

    def look() -> None:
        looked.extend(
            parameter.grad.clone()
            for parameter in made.module.parameters()
            if parameter.grad is not None
        )

    for size, count in ((6, steps), (4, 1), (6, 1)):
        train_epoch(
            made, batches(count, size), Position(99, 99), sums, log_every=99, on_gradients=look
        )
    states = [value for state in made.optimizer.state.values() for value in state.values()]
    assert all(parameter.grad is None for parameter in made.module.parameters())
    return [
        *made.module.state_dict().values(),
        *states,
        *looked,
        sums.values,
        torch.get_rng_state(),
    ]


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def steps_of(made: Learner) -> GraphedStep:
    assert isinstance(made.graphed, GraphedStep)
    return made.graphed


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, optim.AdamW])
def test_every_number_is_that_of_eager_steps(
    optimizer: type[optim.Optimizer], capsys: pytest.CaptureFixture[str]
) -> None:
    made = graphed(a_learner(optimizer))
    assert are_equal(left_by(made), left_by(a_learner(optimizer)))
    assert steps_of(made).replayed == 4 + 1, "all but the first, and the smaller one"
    assert not capsys.readouterr().err


WRONG = {
    graphs.Idle: ("step", "a replay leaves the random number generators elsewhere"),
    graphs.OldInputs: ("step", "a replay has other numbers in 'parts 0 loss', by "),
    graphs.OldWeights: ("step", "a replay has other numbers in 'parts 0 loss', by "),
    graphs.OldRandomNumbers: ("step", "a replay leaves the random number generators elsewhere"),
    graphs.Adding: ("step", "a replay has other numbers in 'gradients 0.weight', by "),
    graphs.Forgetting: ("step", "a replay has other numbers in '1.running_mean', by "),
    graphs.Refusing: ("step", "RuntimeError: no card\n"),
    graphs.OldRates: ("update", "a replay has other numbers in '0.weight', by "),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_graph_that_does_otherwise_is_found_out(
    wrong: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    what, why = WRONG[wrong]
    made = graphed(a_learner(optim.SGD, momentum=0.9), wrong)
    assert are_equal(left_by(made), left_by(a_learner(optim.SGD, momentum=0.9)))
    assert steps_of(made).replayed == 0
    (told,) = capsys.readouterr().err.splitlines(keepends=True)
    assert told.startswith(f"warning: cuda_graph=true: every {what} is eager: {why}")


@pytest.mark.parametrize(
    "wrong", [graphs.Idle, graphs.OldInputs, graphs.OldWeights], ids=lambda wrong: wrong.__name__
)
def test_an_update_that_is_another_is_found_out(
    wrong: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = iter((StandIn, wrong))
    ours = graphed(a_learner(), lambda device: next(kinds)(device))
    assert are_equal(left_by(ours), left_by(a_learner()))
    assert steps_of(ours).replayed == 0
    assert capsys.readouterr().err.startswith(
        "warning: cuda_graph=true: every update is eager: a replay has other "
    )


def test_what_two_eager_steps_differ_by_is_no_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As kernels do that add in no order; the noise is of no generator that is put back."""
    own = torch.Generator().manual_seed(0)

    class Noisy(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images + 1e-6 * torch.randn(images.shape, generator=own)

    for wrong, told in (
        (StandIn, ""),
        (graphs.OldInputs, "warning: cuda_graph=true: every step is eager: "),
    ):
        ours = a_learner()
        noisy = nn.Sequential(Noisy(), ours.module)
        left_by(graphed(dataclasses.replace(ours, module=noisy, parallel=noisy), wrong))
        assert capsys.readouterr().err[: len(told) or None] == told


def test_a_hook_keeps_steps_eager(capsys: pytest.CaptureFixture[str]) -> None:
    made, seen = graphed(a_learner()), list[int]()
    made.module[2].register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index]
    left_by(made)
    assert len(seen) == 7
    assert (
        "every step is eager: 2 has a hook, which a replay would not call\n"
        in capsys.readouterr().err
    )


def test_rates_are_those_of_a_float32_in_every_step() -> None:
    """Or it would matter which steps are replayed: a card reads them as one of both."""
    ours = graphed(a_learner(), graphs.Refusing)
    ours.optimizer.param_groups[0]["lr"] = 0.1
    train_epoch(ours, batches(1), Position(99, 99), Sums(ours.task, CPU), log_every=99)
    ours = dataclasses.replace(ours, scheduler_interval="epoch")
    ours.optimizer.param_groups[0]["lr"] = 0.1
    train_epoch(ours, batches(1), Position(99, 99), Sums(ours.task, CPU), log_every=99)
    assert ours.optimizer.param_groups[0]["lr"] == torch.tensor(0.1).item() != 0.1


def test_settings_that_change_are_not_those_that_were_recorded() -> None:
    """As the momentum of one_cycle."""
    ours, plain = graphed(a_learner(optim.SGD, momentum=0.9)), a_learner(optim.SGD, momentum=0.9)
    for each in (ours, plain):
        left_by(each)
        each.optimizer.param_groups[0]["momentum"] = 0.5
    before = steps_of(ours).replayed
    assert are_equal(left_by(ours), left_by(plain))
    assert steps_of(ours).replayed == before


class Stream:
    """Notes who waits for whom."""

    def __init__(self, *device: object, name: str = "aside", notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


def test_a_card_records_aside_and_is_asked_for_what_torch_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes, known = list[str](), inspect.signature(torch.cuda.graph)

    @contextlib.contextmanager
    def recording(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = known.bind(*args, **kwargs).arguments
        notes.append(
            f"records {given['cuda_graph']} {given['stream'].name}, errors"
            f" {given['capture_error_mode']}"
        )
        yield

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        notes.append(f"on {stream.name}")
        yield
        notes.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(torch.cuda, "Stream", functools.partial(Stream, notes=notes))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: Stream(name="the step", notes=notes)
    )
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    graph = CudaGraph(torch.device("cuda", 0))
    assert graph.warm_up(functools.partial(len, "abc")) == 3
    assert notes == [
        "aside waits for the step",
        "on aside",
        "off aside",
        "the step waits for aside",
    ]
    notes.clear()
    assert graph.record(functools.partial(len, "abc")) == 3
    assert notes == ["records a graph aside, errors thread_local"]


def test_without_a_gpu_there_is_nothing_to_record() -> None:
    assert graphed_step(True, CPU, random_state) is None
    assert graphed_step(False, torch.device("cuda"), random_state) is None
    assert graphed_step(True, torch.device("cuda"), random_state) is not None
