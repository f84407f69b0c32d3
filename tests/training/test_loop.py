"""A step, an epoch, an evaluation and the average of weights, against the same by hand."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.data.indexing import local_slice
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.tasks.classification import Classification
from expt.tasks.sums import Averages, Sums
from expt.training.learner import Learner, Position, ema_of
from expt.training.loop import evaluate, rehearse, train_epoch
from expt.training.precision import Precision
from expt.training.strategy import DDP, Strategy, micro_batches
from expt.worker import build
from tests import on_cards
from tests.conftest import Configured
from tests.facade import Patch
from tests.operators import Operators
from tests.ranks import worker_of

DEVICE = on_cards.device_of(0)
SHAPE, CLASSES = (2, 3, 3), 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Dropout(0.5), nn.Linear(5, CLASSES)
    ).to(DEVICE)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(18, CLASSES)).to(DEVICE)


def learner(
    module: nn.Module, *, clip: float | None = None, label_smoothing: float = 0.0, **settings: Any
) -> Learner:
    """With SGD, and a learning rate that falls by a tenth each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Learner(
        module=module,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda step: 0.9**step),
        **{
            "task": Classification(label_smoothing),
            "strategy": Strategy(module),
            "precision": Precision(False, DEVICE, gradient_clip=clip),
            **settings,
        },
    )


def sums() -> Sums:
    return Sums(Classification(), DEVICE)


def batches(count: int, size: int = 6) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(size, *SHAPE, generator=generator)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        yield Batch(images.to(DEVICE), labels.to(DEVICE), size)


def train(
    subject: Learner, count: int, position: Position | None = None, **options: Any
) -> Position:
    """Train an epoch of so many batches, logged at the ninth step; returns where it has come to."""
    position = position or Position(count, count)
    summed = options.pop("summed", None) or sums()
    train_epoch(subject, batches(count), position, summed, **{"log_every": 9, **options})
    return position


def test_an_evaluation_is_of_the_model_at_rest_and_changes_nothing() -> None:
    """Dropout leaves nothing out, batch norm uses what it has learned, labels are not smoothed."""
    module = model()
    module.train()
    before = copy.deepcopy(module.state_dict())
    subject = learner(module, label_smoothing=0.3)
    random = torch.get_rng_state()
    first, second = (evaluate(subject, batches(3), DEVICE) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    whole = [
        torch.cat(parts) for parts in zip(*((b.inputs, b.targets) for b in batches(3)), strict=True)
    ]
    with torch.no_grad():
        logits = copy.deepcopy(module).eval()(whole[0])
    assert first.loss == pytest.approx(functional.cross_entropy(logits, whole[1]).item(), rel=1e-6)
    assert first.values["accuracy"] == pytest.approx(
        (logits.argmax(1) == whole[1]).float().mean().item()
    )
    assert first.samples == 18


@pytest.mark.parametrize("fits", [6, 5, 2, 1])
def test_an_evaluation_is_in_halves_where_memory_does_not_suffice(fits: int) -> None:
    tried = list[int]()
    subject = learner(model())

    def forward(_: nn.Module, images: tuple[torch.Tensor]) -> None:
        tried.append(len(images[0]))
        if tried[-1] > fits:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    expected = evaluate(subject, batches(3), DEVICE)
    subject.module.register_forward_pre_hook(forward)
    found, seen = None, list[torch.Tensor]()
    found = evaluate(subject, batches(3), DEVICE, lambda batch, _: seen.append(batch.targets))
    assert found.values == pytest.approx(expected.values)
    assert (found.samples, found.values["accuracy"]) == (18, expected.values["accuracy"])
    assert torch.equal(torch.cat(seen), torch.cat([each.targets for each in batches(3)]))
    assert sum(size > fits for size in tried) < 5, "what was too much is not tried each time"


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    subject = learner(model())

    def forward(*_: object) -> None:
        raise torch.OutOfMemoryError("more were asked for")

    subject.module.register_forward_pre_hook(forward)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(subject, batches(1), DEVICE)


def test_a_model_may_give_the_same_memory_again() -> None:
    """CUDA graphs do: what was there is counted before."""

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.memory = model(), torch.zeros(6, CLASSES, device=DEVICE)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(images)
            return logits if self.training else self.memory.copy_(logits)

    expected = evaluate(learner(model()), batches(3), DEVICE)
    assert evaluate(learner(Reusing()), batches(3), DEVICE) == expected


def test_a_batch_without_weight_moves_nothing() -> None:
    subject = learner(plain())
    before = subject.module[1].weight.clone()  # type: ignore[index]
    (batch,) = batches(1)
    train_epoch(subject, [batch._replace(weightless=True)], Position(1, 1), sums(), log_every=9)
    assert torch.equal(subject.module[1].weight, before)  # type: ignore[index]


def test_each_moment_of_a_step_comes_in_its_order() -> None:
    subject = learner(plain())
    weight = subject.module[1].weight  # type: ignore[index]
    position, lr, seen = Position(3, 3), subject.optimizer.param_groups[0], []

    def on_gradients() -> None:
        assert weight.grad is not None
        seen.append(("gradients", position.step, weight[0, 0].item()))

    def on_step() -> None:
        assert weight.grad is None
        seen.append(("step", position.step, lr["lr"]))

    def on_log(values: Averages, samples_per_s: float) -> None:
        seen.append(("log", position.step, values.samples))

    def between_steps() -> bool:
        seen.append(("between", position.step, lr["lr"]))
        return False

    moments = {"on_gradients": on_gradients, "on_step": on_step, "on_log": on_log}
    train(subject, 2, position, log_every=2, between_steps=between_steps, **moments)
    assert [moment[:2] for moment in seen] == [
        ("gradients", 0), ("step", 1), ("between", 1), ("gradients", 1), ("step", 2), ("log", 2),
        ("between", 2),
    ]  # fmt: skip
    assert seen[0][2] != seen[3][2], "an update lies between"
    assert [seen[1][2], seen[4][2]] == pytest.approx([0.1, 0.09]), "the rate that the step has used"
    assert [seen[2][2], seen[6][2]] == pytest.approx([0.09, 0.081]), "that of the step to come"
    assert seen[5][2] == 12


def test_a_log_point_averages_since_the_one_before() -> None:
    def logged(log_every: int) -> list[float]:
        found = list[float]()
        train(learner(plain()), 4, log_every=log_every, on_log=lambda v, _: found.append(v.loss))
        return found

    each = logged(1)
    assert logged(2) == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2])


def test_the_speed_is_that_of_the_images_trained_since(monkeypatch: Patch) -> None:
    """Count images since the log point, also after a resume and with a smaller last batch."""
    now = iter([100.0, 102.0, 106.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    found, before = list[float](), sums()
    before.values.add_(1000.0)
    several = itertools.chain(batches(3), batches(1, size=2))
    how: Any = {"log_every": 2, "on_log": lambda _, speed: found.append(speed)}
    train_epoch(learner(plain()), several, Position(9, 9), before, **how)
    assert found == [12 / 2.0, 8 / 4.0]


class Unaveraged(DDP):
    accumulate = Strategy.accumulate  # type: ignore[assignment]


@pytest.mark.parametrize(("world_size", "sizes"), [(2, []), (3, [8, 8])])
def test_rehearsal_leaves_no_gradient(world_size: int, sizes: list[int]) -> None:
    module, seen = plain(), list[int]()
    module.register_forward_hook(lambda _, images, __: seen.append(len(images[0])))
    before = copy.deepcopy(module.state_dict())
    optimizer, parallel = (
        torch.optim.SGD(module.parameters()),
        cast(DistributedDataParallel, module),
    )
    strategy = Unaveraged(parallel, world_size, micro_batches=2, optimizer=optimizer)
    subject = learner(module, strategy=strategy)
    rehearse(subject, lambda size: next(batches(1, size)), 48, DEVICE)
    assert seen == sizes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("samples", [3, 5, 64])
def test_workers_have_equally_many_parts(count: int, world_size: int, samples: int) -> None:
    """Of theirs each sample is in one, and no part counts that has none."""
    whole = next(batches(1, samples))
    every = []
    for rank in range(world_size):
        mine = local_slice(samples, rank, world_size)
        batch = Batch(whole.inputs[mine], whole.targets[mine], samples)
        parts = micro_batches(batch, count, world_size)
        assert torch.equal(
            torch.cat([part.targets for part in parts if not part.weightless]), batch.targets
        )
        assert not parts[0].weightless
        every.append(len(parts))
    assert {*every} == {len(torch.arange(-(-samples // world_size)).chunk(count))}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("samples", [16, 64])
def test_interleaved_parts_are_the_same_on_any_workers(count: int, samples: int) -> None:
    """So what is computed of all workers' parts, as of a batch norm, is the same."""
    whole = next(batches(1, samples))

    def everyones(world_size: int) -> list[set[int]]:
        found = [set[int]() for _ in range(count)]
        for rank in range(world_size):
            mine = local_slice(samples, rank, world_size)
            batch = Batch(torch.arange(samples)[mine], whole.targets[mine], samples)
            parts = micro_batches(batch, count, world_size, interleaved=True)
            for index, part in enumerate(parts):
                found[index] |= {*part.inputs.tolist()}
        return found

    assert everyones(1) == everyones(2) == everyones(4)
    assert sum(map(len, everyones(4))) == samples


def test_interleaved_parts_of_a_small_batch_are_as_many_on_each_worker() -> None:
    whole = next(batches(1, 5))
    mine = [Batch(whole.inputs[at], whole.targets[at], 5) for at in (slice(3), slice(3, 5))]
    parts = [micro_batches(batch, 3, 2, interleaved=True) for batch in mine]
    assert [len(one) for one in parts] == [3, 3]
    assert [part.weightless for part in parts[1]] == [False, False, True]


ALONE = worker_of()


def a_step(configured: Configured, *words: str) -> Operators:
    """The operators of a run's third step: forward, backward, update and schedule."""
    config = configured("batch_size=8", *words)
    data = build.build_data(config, ALONE)
    learner = build.build_learner(config, data, ALONE)
    batches, sums = data.train.epoch(1), Sums(learner.task, ALONE.device)
    position = Position(1 << 60, 1 << 60)

    def steps(number: int) -> None:
        ready = [next(batches) for _ in range(number)]
        train_epoch(learner, ready, position, sums, log_every=1 << 60)

    steps(2)
    found = Operators()
    with found:
        steps(1)
    return found


# Today's; with views 38, 89 and 292. A change that takes more is to say why, one that takes fewer
# lowers it.
BUDGET = {"mlp": 17, "convnet": 45, "resnet18": 164}


@pytest.mark.parametrize("model", BUDGET)
def test_kernels_within_budget(model: str, configured: Configured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sums, "_known", lambda _, values: values)  # as on a GPU
    found = a_step(configured, f"model={model}")
    assert not found.waits
    assert found.launched.total() <= BUDGET[model], found.launched


def test_what_asks_for_a_value_is_found_out(configured: Configured) -> None:
    """As momentum of Muon, or float16 on a CPU; else the test above shows nothing."""
    assert a_step(configured, "model=mlp", "on_nan=skip").waits


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
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(18), nn.Linear(18, 4)).to(DEVICE)
    skipping = Precision(False, DEVICE, skip_non_finite=True)
    subject = learner(module, precision=skipping, ema=ema_of(module, 0.75))
    assert subject.ema
    train(subject, 3, summed=Sums(Classification(), DEVICE, finite_only=True))
    before = copy.deepcopy(subject.ema.state_dict())

    def spoil() -> None:
        gradient = next(subject.module.parameters()).grad
        assert gradient is not None
        gradient.fill_(torch.inf)

    finite = Sums(Classification(), DEVICE, finite_only=True)
    train(subject, 2, summed=finite, on_gradients=spoil)
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
