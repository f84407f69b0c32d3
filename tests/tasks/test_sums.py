"""Sums over samples, and the averages they make, against numpy."""

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.errors import ConfigError, DataError, Diverged
from expt.models.vision import UNet
from expt.tasks.classification import Classification
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.sums import MAX_KEPT, Sums, check_loss, loss_is_finite, refuse_weightless
from expt.tasks.task import PhasedTask, Sum, Task
from tests.facade import Patch
from tests.operators import Operators

CPU = torch.device("cpu")


def of_classes(**settings: Any) -> Sums:
    return Sums(Classification(), CPU, **settings)


def add(
    sums: Sums,
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss: torch.Tensor,
    *,
    weightless: bool = False,
) -> None:
    sums.add((loss, len(labels)), logits, Batch(logits, labels, len(labels), weightless))


def saved(sums: list[float], logged: list[float]) -> dict[str, list[float]]:
    return {"sums": sums, "finite": sums, "logged": logged}


def seen(sums: Sums) -> tuple[float, float, int]:
    """Loss, accuracy and samples."""
    found = sums.averages(sums.values)
    return found.values["loss"], found.values["accuracy"], found.samples


def test_sums_may_be_plain_numbers() -> None:
    class Counts(Classification):
        def measure(self, outputs: Tensor, batch: Batch) -> Any:
            return {"accuracy": (int((outputs.argmax(1) == batch.targets).sum()), len(outputs))}

    logits, labels = torch.eye(4)[[0, 1, 2, 2]], torch.arange(4)
    found = Sums(Counts(), CPU)
    add(found, logits, labels, torch.ones(()))
    assert seen(found) == (0.25, 0.75, 4)


def test_averages_of_unequal_batches() -> None:
    rng = np.random.default_rng(0)
    sums = of_classes()
    losses, hits = [], []
    for size in (64, 64, 7):
        logits, labels, loss = (
            rng.normal(size=(size, 10)),
            rng.integers(0, 10, size),
            rng.random(size),
        )
        add(sums, torch.from_numpy(logits), torch.from_numpy(labels), torch.tensor(loss.sum()))
        losses.append(loss)
        hits.append(logits.argmax(1) == labels)
    loss_mean, accuracy, samples = seen(sums)
    assert loss_mean == pytest.approx(np.concatenate(losses).mean())
    assert (accuracy, samples) == (np.concatenate(hits).mean(), 135)


def test_a_batch_without_weight_counts_for_nothing() -> None:
    sums = of_classes()
    add(sums, torch.eye(2), torch.tensor([0, 0]), torch.tensor(6.0))
    add(sums, torch.eye(2), torch.tensor([0, 1]), torch.tensor(9.0), weightless=True)
    assert seen(sums) == (3.0, 0.5, 2)


def test_a_large_set_loses_no_sample() -> None:
    sums = of_classes()
    sums.load_state_dict(saved([2.0**24] * 5, [0.0] * 5))
    add(sums, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor(1.0))
    assert seen(sums) == (1.0, 1.0, 2**24 + 1)


@pytest.mark.parametrize("labels", [[], [0, 1]], ids=["no batch", "without weight"])
def test_nothing_counted_has_no_average(labels: list[int]) -> None:
    sums = of_classes()
    if labels:
        add(
            sums,
            torch.zeros(len(labels), 3),
            torch.tensor(labels),
            torch.tensor(0.0),
            weightless=True,
        )
    with pytest.raises(Diverged, match="no sample was counted"):
        seen(sums)


def test_reset_starts_again() -> None:
    sums = of_classes()
    add(sums, torch.eye(2), torch.tensor([0, 0]), torch.tensor(8.0))
    sums.reset()
    add(sums, torch.eye(2), torch.tensor([0, 1]), torch.tensor(1.0))
    assert seen(sums) == (0.5, 1.0, 2)


def test_sums_are_those_of_single_additions_to_the_bit() -> None:
    """However many batches are counted together, and whenever somebody looks."""
    generator = torch.Generator().manual_seed(0)
    sums, watched, expected = of_classes(), of_classes(), torch.zeros(5).double()
    for _ in range(2 * MAX_KEPT + 3):
        logits, labels = (
            torch.randn(5, 4, generator=generator),
            torch.randint(4, (5,), generator=generator),
        )
        loss = torch.rand((), generator=generator) * 10 ** torch.randint(
            -9, 9, (), generator=generator
        )
        for each in (sums, watched):
            add(each, logits, labels, loss)
        expected[1] += loss.double()
        expected[[0, 2, 3, 4]] += torch.tensor([5, 5, int((logits.argmax(1) == labels).sum()), 5])
        assert torch.equal(watched.values, expected)
    assert torch.equal(sums.values, expected)


@pytest.mark.parametrize(
    "task", [Regression("mae"), Classification(class_weights=[0.3, 0.7, 1.1])], ids=["mae", "mixed"]
)
def test_sums_of_rounded_numbers_are_the_same_to_the_bit_whenever_they_are_counted(
    task: Task,
) -> None:
    """As a checkpoint does between two log points: squared errors, shares of mixed labels, weights
    of classes."""
    generator = torch.Generator().manual_seed(0)
    sums, watched = Sums(task, CPU), Sums(task, CPU)
    for step in range(2 * MAX_KEPT + 3):
        size = 5 + step % 3
        outputs = torch.randn(size, 3, generator=generator) * 10 ** torch.randn(
            (), generator=generator
        )
        targets = torch.rand(size, 3, generator=generator)
        batch = Batch(outputs, targets / targets.sum(1, keepdim=True), size)
        for each in (sums, watched):
            each.add(task.training_loss(outputs, batch), outputs, batch)
        if step % 7 == 0:
            assert watched.values[0] > 0, "looked at"
    assert sums.values.tolist() == watched.values.tolist()


def test_a_batch_that_may_be_overwritten_is_counted_before() -> None:
    sums, logits, loss = of_classes(), torch.eye(2), torch.tensor(1.0)
    add(sums, logits, torch.tensor([0, 1]), loss)
    logits.zero_()
    assert seen(sums) == (0.5, 1.0, 2)


@pytest.mark.parametrize("count", [1, 2, MAX_KEPT, 3 * MAX_KEPT + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_losses_are_added_in_their_order_to_the_bit_by_few_kernels(
    count: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(count)
    losses = (
        torch.randn(count, generator=generator) * 10 ** torch.randn(count, generator=generator)
    ).to(dtype)
    sums, total, logits, labels = of_classes(), 0.0, torch.eye(2), torch.tensor([0, 1])
    with Operators() as found:
        for loss in losses:
            add(sums, logits, labels, loss)
        row = sums.values
    for loss in losses.tolist():
        total += loss
    assert row[1].item() == total
    # A few for all that was kept together; argmax, comparison and sum of each batch,
    # and its two numbers.
    assert found.launched.total() <= 25 * (count // MAX_KEPT + 1) + 5 * count, found.launched


@pytest.mark.parametrize("task", [Classification(), Regression()], ids=["classes", "numbers"])
@pytest.mark.parametrize("learns", [False, True], ids=["evaluation", "training"])
def test_no_tensor_of_a_batch_stays(task: Task, learns: bool) -> None:
    """A small one that stays splits the memory that a batch frees, so that the next needs more."""
    sums = Sums(task, CPU, learns=learns)
    held = []
    for _ in range(2 * MAX_KEPT + 1):
        outputs = torch.rand(4, 3)
        targets = torch.rand(4, 3)
        batch = Batch(outputs, targets, 4)
        loss = task.loss(outputs, batch)
        sums.add(loss, outputs, batch)
        held += [weakref.ref(tensor) for tensor in (outputs, targets, loss[0])]
    del outputs, targets, batch, loss
    assert not [tensor for tensor in held if tensor() is not None]
    kept = [each for row in sums._kept for each in row] + [*sums._recent]
    assert not [each for each in kept if isinstance(each, torch.Tensor)]
    assert learns or not sums._recent


@pytest.mark.parametrize("told", [None, torch.tensor(False)])
def test_a_loss_that_is_not_finite_is_left_out_with_its_batch(told: torch.Tensor | None) -> None:
    sums = of_classes(finite_only=True)
    for loss in (1.0, math.nan, math.inf, 3.0):
        add(sums, torch.eye(2), torch.tensor([0, 0]), torch.tensor(loss))
        sums.end_step(told)
    assert seen(sums) == (1.0, 0.5, 4)
    add(sums, torch.eye(2), torch.tensor([0, 0]), torch.tensor(9.0))
    sums.end_step(torch.tensor(True))
    assert seen(sums) == (1.0, 0.5, 4), "another worker's loss, or a gradient, was not"
    assert sums.first_not_finite() is not None


def test_what_is_kept_is_forgotten_where_another_state_is_loaded() -> None:
    sums = of_classes()
    add(sums, torch.eye(2), torch.tensor([0, 1]), torch.tensor(1.0))
    sums.load_state_dict(saved([2.0, 4.0, 2.0, 1.0, 2.0], [0.0] * 5))
    assert seen(sums) == (2.0, 0.5, 2)


class Plain(Task):
    """A task without metrics."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Sum:
        return outputs.sum(), 2.0 * len(outputs)


def test_the_loss_of_saved_sums_is_looked_at_and_no_metric() -> None:
    assert loss_is_finite([2.0, 1.0, 2.0, math.inf, 1.0])
    assert not loss_is_finite([2.0, math.nan, 2.0, 1.0, 1.0])
    assert not loss_is_finite([2.0, 1.0, math.inf])


class Counted(Task):
    """Tokens of unequal number, and a histogram."""

    metrics = {"mean": "min", "share": "max"}
    sums = {"mean": 1, "bins": 3}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Sum:
        return outputs.sum(), (outputs > 0).sum()

    def measure(self, outputs: torch.Tensor, batch: Batch) -> dict[str, Sum]:
        return {"mean": (outputs.sum(), outputs.numel()), "bins": (outputs.histc(3, 0, 3), 1)}

    def derive(self, means: Any) -> dict[str, float]:
        return {"share": means["bins"][0] / sum(means["bins"])}


@pytest.mark.parametrize("finite_only", [False, True])
def test_a_tasks_own_sums_with_weights_of_their_own(finite_only: bool, monkeypatch: Patch) -> None:
    sums = Sums(Counted(), CPU, finite_only=finite_only)
    for row in ([0.5, 2.5, 0.0], [0.0, 1.5], *([[math.nan]] * finite_only)):
        outputs = torch.tensor(row)
        batch = Batch(outputs, None, len(row))
        sums.add(sums._task.loss(outputs, batch), outputs, batch)
        sums.end_step()
    found = sums.averages(sums.values)
    assert found.values == pytest.approx({"loss": 4.5 / 3, "mean": 4.5 / 5, "share": 3 / 5})
    assert found.samples == 5
    assert sums.values.dtype == torch.float64
    monkeypatch.setattr(Counted, "derive", lambda *_: None)
    with pytest.raises(ConfigError, match=r"task\.metrics names share"):
        sums.averages(sums.values)


BINS = torch.zeros(3), 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "measure gives nothing, and task.metrics names mean, bins"),
        (
            {"right": (torch.zeros(()), 1)},
            r"be the same, such as metrics: {right: max} in its YAML",
        ),
        ({"mean": (torch.zeros(2), 1), "bins": BINS}, r"mean is float32 \[2\]"),
        ({"mean": (torch.zeros(()), "3"), "bins": BINS}, "mean has the weight '3'"),
        ({"mean": (torch.zeros(()), torch.tensor(1j)), "bins": BINS}, "mean has the weight"),
        ({"mean": (torch.tensor(2 + 1j), 1), "bins": BINS}, "mean is complex64"),
    ],
)
def test_what_is_not_a_sum_is_refused(given: dict[str, Any], text: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Counted, "measure", lambda *_: given)
    with pytest.raises(ConfigError, match=text):
        Sums(Counted(), CPU).add(
            (torch.tensor(1.0), 1), torch.zeros(1), Batch(torch.zeros(1), None, 1)
        )


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ((torch.tensor(3), torch.tensor(-1)), "the weights of loss add up to -inf"),
        ((3.0, torch.tensor(-1.0)), "the weights of loss add up to -inf, or one is below 0"),
        ((torch.tensor(1.0), torch.tensor(math.nan)), "add up to nan"),
        ((1, math.nan), "add up to nan"),
        ((math.inf, 1.0), "add up to inf"),
    ],
)
def test_a_weight_by_which_nothing_can_be_divided_is_refused(
    weights: tuple[Any, Any], told: str
) -> None:
    """One below 0 hides in a sum."""
    sums, outputs = Sums(Plain(), CPU), torch.ones(2)
    for weight in weights:
        sums.add((torch.tensor(1.0), weight), outputs, Batch(outputs, None, 2))
    with pytest.raises(ConfigError, match=f"^Plain.loss: .*{told}"):
        sums.averages(sums.values)


def counted(*weights: Any) -> Sums:
    """With a metric of such weights."""
    task, outputs = Counted(), torch.ones(2)
    sums, batch = Sums(task, CPU), Batch(outputs, None, 2)
    for weight in weights:
        task.measure = lambda *_, weight=weight: {"mean": (outputs.sum(), weight), "bins": BINS}  # type: ignore
        sums.add((torch.tensor(1.0), 1), outputs, batch)
    return sums


def test_a_metrics_weight_below_0_or_not_finite_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Counted.measure: mean has the weight -1; give"):
        counted(3, -1)
    sums = counted(3, torch.tensor(-1))
    with pytest.raises(ConfigError, match=r"^Counted.measure: the weights of mean add up to -inf"):
        sums.averages(sums.values)
    sums = counted(3, math.nan)
    with pytest.raises(ConfigError, match=r"^Counted\.measure: the weights of mean add up to nan"):
        sums.averages(sums.values)


class Own(Plain):
    """Whose loss is as it should be."""

    def training_loss(self, outputs: torch.Tensor, batch: Batch) -> Sum:
        return outputs.sum(), math.nan


class Phased(PhasedTask):
    phases = {"one": "."}

    def phase(self, name: str, model: Any, batch: Batch, outputs: Any) -> Sum:
        return model(batch.inputs).sum(), math.nan


def test_the_method_is_named_that_gave_a_weight() -> None:
    outputs = torch.ones(2, requires_grad=True)
    for task, learns, method in (
        (Own(), True, "Own.training_loss"),
        (Own(), False, "Own.loss"),
        (Phased(), True, "Phased.phase"),
    ):
        sums = Sums(task, CPU, learns=learns)
        sums.add((torch.tensor(1.0), math.nan), outputs, Batch(outputs, None, 2))
        with pytest.raises(ConfigError, match=f"^{method}: the weights of loss add up to nan"):
            sums.averages(sums.values)
        with pytest.raises(ConfigError, match=f"^{method} has the weight -2; give"):
            check_loss((outputs.sum(), -2), task, learns=learns)


def test_a_stretch_that_is_not_finite_leaves_no_trace_in_the_next() -> None:
    """Nor where it is resumed; the epoch's sum keeps it."""
    task, finite = Regression(), torch.tensor([[1.0], [3.0]])
    sums = Sums(task, CPU)

    def add(outputs: torch.Tensor, to: Sums) -> None:
        to.add((torch.tensor(2.0), 2), outputs, Batch(outputs, torch.zeros(2, 1), 2))

    add(finite, sums)
    add(finite * math.inf, sums)
    assert sums.averages(sums.since_logged).values["mae"] == math.inf
    sums.mark_logged()
    add(finite, sums)
    resumed = Sums(task, CPU)
    resumed.load_state_dict(sums.state_dict())
    for each in (sums, resumed):
        assert each.averages(each.since_logged).values["mae"] == 2
        each.mark_logged()
        add(finite * 2, each)
        assert each.averages(each.since_logged).values["mae"] == 4
        assert each.averages(each.values).values["mae"] == math.inf
        assert each.averages(each.values).samples == 8


def test_where_the_loss_is_nan_it_is_told_of_and_not_the_weight() -> None:
    sums, outputs = Sums(Plain(), CPU), torch.ones(2)
    sums.add((torch.tensor(math.nan), torch.tensor(math.nan)), outputs, Batch(outputs, None, 2))
    assert math.isnan(sums.averages(sums.values).loss)


def test_an_epoch_without_any_weight_is_refused() -> None:
    sums, outputs = Sums(Plain(), CPU), torch.ones(2)
    for weight in (0, torch.tensor(0.0)):
        sums.add((torch.tensor(0.0), weight), outputs, Batch(outputs, None, 2))
    nothing = sums.averages(sums.values)
    assert not nothing.has_weight
    with pytest.raises(ConfigError, match=r"^Plain.loss: its weights add up to 0 in epoch 3"):
        refuse_weightless(nothing, Plain(), 3)
    sums.add((torch.tensor(0.0), 0.5), outputs, Batch(outputs, None, 2))
    refuse_weightless(sums.averages(sums.values), Plain(), 3)


class Peaks(Plain):
    metrics = {"high": "max", "now": "max"}
    reductions = {"high": "max", "now": "last"}

    def measure(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return {"high": outputs if len(outputs) > 2 else outputs.max(), "now": float(outputs[0])}


def test_numbers_that_are_no_sums_of_steps_that_count() -> None:
    """Of a step that is left out there is none; a stretch has its own, and so when resumed."""
    sums, loss = Sums(Peaks(), CPU, finite_only=True), (torch.tensor(1.0), 1)
    for value, left_out in ((3.0, False), (1.0, False), (9.0, True)):
        outputs = torch.tensor([value, 0.0])
        sums.add(loss, outputs, Batch(outputs, None, 1))
        sums.end_step(torch.tensor(left_out))
    assert sums.since_logged[-2:].tolist() == [3, 1]
    sums.mark_logged()
    resumed = Sums(Peaks(), CPU)
    resumed.load_state_dict(sums.state_dict())
    outputs = torch.tensor([2.0, -1.0])
    resumed.add(loss, outputs, Batch(outputs, None, 1))
    assert (resumed.since_logged[-2:].tolist(), resumed.values[-2:].tolist()) == ([2, 2], [3, 2])
    resumed.reset()
    with pytest.raises(ConfigError, match=r"^Peaks\.measure: high is "):
        resumed.add(loss, torch.ones(3), Batch(outputs, None, 1))


CPU = torch.device("cpu")
IGNORED = 255


def averages_of(task: Segmentation, found: list[tuple[Tensor, Batch]]) -> dict[str, float]:
    sums = Sums(task, CPU)
    for logits, batch in found:
        sums.add(task.loss(logits, batch), logits, batch)
    return dict(sums.averages(sums.values).values)


def test_samples_of_which_nothing_counts_are_no_divergence() -> None:
    task = Segmentation(2, IGNORED)
    logits, masks = torch.randn(1, 2, 3, 3), torch.full((1, 3, 3), IGNORED)
    values = averages_of(task, [(logits, Batch(logits, masks, 1))])
    assert values["loss"] != values["loss"], "not 0, which would be the best"
    assert values["mean_iou"] != values["mean_iou"]
    with pytest.raises(Diverged):
        averages_of(task, [])


@pytest.mark.parametrize(
    ("outputs", "masks", "told"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, 4).long(), r"gives float32 \[2, 3\] where \[2, 3, 4"),
        (torch.zeros(2, 3, 2, 2), torch.zeros(2, 4, 4).long(), r"gives float32 \[2, 3, 2, 2\]"),
        ({"out": torch.zeros(2, 3, 4, 4)}, torch.zeros(2, 4, 4).long(), "gives a dict where"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), "target is torch.float32"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "let it be a mask of class numbers"),
    ],
)
def test_outputs_and_targets_of_another_shape_are_refused(
    outputs: Any, masks: Tensor, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Segmentation(3).loss(outputs, Batch(None, masks, 2))


@pytest.mark.parametrize("size", [(28, 28), (13, 9), (4, 7)])
def test_a_unet_takes_any_size(size: tuple[int, int]) -> None:
    model = UNet(channels=2, image_size=size, num_classes=5, widths=(4, 6, 8))
    logits = model(torch.randn(2, 2, *size))
    assert logits.shape == (2, 5, *size)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_unet_of_more_levels_than_an_image_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 levels need images of 4x4 or more, and these are 8x3"):
        UNet(channels=2, image_size=(8, 3), num_classes=5)


def test_numbers_are_compared_with_those_of_their_place() -> None:
    """A row of a model's outputs is taken for a sample's targets, and no other order of them."""
    outputs, task = torch.arange(12.0), Regression()
    batch = Batch(None, outputs.view(2, 3, 2), 2)
    for shape in ((2, 6), (2, 3, 2), (2, 1, 3, 2)):
        assert task.loss(outputs.view(shape), batch)[0] == 0
    assert task.loss(outputs.view(2, 3, 2).mT.contiguous().mT, batch)[0] == 0
    rows = Batch(None, outputs.view(2, 6), 2)
    assert task.loss(outputs.view(2, 2, 3).mT.contiguous().mT, rows)[0] == 0, "not contiguous"
    for other in ((2, 2, 3), (12,), (2, 1, 5)):
        with pytest.raises(DataError):
            task.loss(outputs[: math.prod(other)].view(other), batch)
