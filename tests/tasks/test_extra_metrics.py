"""torchmetrics' metrics over the batches of several workers: equal to one process that has seen
them all.
"""

import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from expt.config.constraints import Target
from expt.data.loading import Batch, Progress
from expt.errors import ConfigError
from expt.features import Anything, Feature, Numbers
from expt.late import Late
from expt.tasks.classification import Classification
from expt.tasks.extra_metrics import ExtraMetrics, build
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.sums import Sums
from expt.tasks.task import Sum, Task
from expt.training.collectives import Worker, gather_across_workers
from tests.facade import Capture, Patch, as_typed, dataset, run
from tests.ranks import together

torchmetrics: Any = Late("torchmetrics")
classification: Any = Late("torchmetrics.classification")

CPU = torch.device("cpu")
CLASSES, SIZES = 4, (40, 7, 1, 23)
AUROC = "torchmetrics.classification.MulticlassAUROC"


def samples(task: Task) -> list[Batch]:
    """Batches of unequal size; their inputs are the model's outputs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in SIZES:
        if isinstance(task, Regression):
            outputs = torch.randn(size, generator=generator)
            targets = outputs + torch.randn(size, generator=generator)
        else:
            outputs = torch.randn(size, CLASSES, generator=generator)
            targets = torch.randint(CLASSES, (size,), generator=generator)
        found.append(Batch(outputs, targets, size))
    return found


def metrics(task: Task) -> ExtraMetrics:
    if isinstance(task, Regression):
        return ExtraMetrics(
            {"pearson": torchmetrics.PearsonCorrCoef(), "spearman": torchmetrics.SpearmanCorrCoef()}
        )
    f1, auroc = classification.MulticlassF1Score, classification.MulticlassAUROC
    return ExtraMetrics(
        {"auroc": auroc(CLASSES), "f1": f1(CLASSES), "highest": _highest(f1(CLASSES))}
    )


def _highest(metric: Any) -> Any:
    """A metric that is made of another."""

    class Highest(torchmetrics.MinMaxMetric):  # type: ignore[misc]
        def compute(self) -> Tensor:
            found: Tensor = super().compute()["max"]
            return found

    return Highest(metric)


def values_of(task: Task, batches: list[Batch], found: ExtraMetrics) -> dict[str, float]:
    for batch in batches:
        found.update(task, batch.inputs, batch)
    return found.compute(gather_across_workers)


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all")
@pytest.mark.parametrize(
    "task", [Classification(), Regression()], ids=lambda task: type(task).__name__
)
def test_any_number_of_workers_measures_as_one_does(task: Task, tmp_path: Path) -> None:
    """With one that has no batch, and twice: an evaluation leaves nothing to the next."""
    batches = samples(task)
    expected = values_of(task, batches, metrics(task))
    assert not values_of(task, batches, ExtraMetrics({}))
    for size, shares in ((2, ((0, 3), (3, 4))), (3, ((0, 0), (0, 1), (1, 4)))):

        def each(worker: Worker, shares: Any = shares) -> list[dict[str, float]]:
            start, stop = shares[worker.rank]
            found = metrics(task)
            return [values_of(task, batches[start:stop], found) for _ in range(2)]

        for values in together(tmp_path, size, each):
            assert values == [pytest.approx(expected, abs=1e-6)] * 2


def test_a_batch_that_counts_for_nothing_is_not_measured() -> None:
    task = Classification()
    batches = samples(task)
    expected = values_of(task, batches, metrics(task))
    assert (
        values_of(task, [*batches, batches[0]._replace(weightless=True)], metrics(task)) == expected
    )


@pytest.mark.parametrize(
    ("target", "arguments", "told"),
    [
        ("os.system", {"command": "touch called"}, "refused, it is not a subclass"),
        (AUROC, {"num_classes": 1}, "MulticlassAUROC(num_classes=1): ValueError"),
    ],
)
def test_a_metric_that_cannot_be_built_is_told(
    target: str,
    arguments: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.metrics\.auroc") as caught:
        build({"auroc": Target(target=target, kwargs=arguments)}, CPU, Anything(), warns=False)
    assert told in str(caught.value)
    assert not any(tmp_path.iterdir()), "it was not called"


def test_a_metric_that_is_not_one_number_or_takes_other_targets_is_told() -> None:
    task = Classification()
    several = ExtraMetrics({"matrix": classification.MulticlassConfusionMatrix(CLASSES)})
    with pytest.raises(ConfigError, match=r"metrics.matrix: gives int64 \[4, 4\], not one number"):
        values_of(task, samples(task), several)
    other = ExtraMetrics({"pearson": torchmetrics.PearsonCorrCoef()})
    with pytest.raises(ConfigError, match=r"task.metrics.pearson: PearsonCorrCoef of .*\w+Error: "):
        values_of(task, samples(task), other)
    first = samples(task)[1]
    with pytest.raises(ConfigError, match=r"task.metrics.pearson: PearsonCorrCoef of .*\w+Error: "):
        other.try_out(task, first.inputs, first)
    with pytest.raises(ConfigError, match=r"metrics.matrix: gives int64 \[4, 4\], not one number"):
        several.try_out(task, first.inputs, first)


class AsFloat(classification.MulticlassAccuracy):  # type: ignore[misc]
    def compute(self) -> Any:
        return np.float32(super().compute())


def test_a_metric_may_give_a_number_of_python_or_numpy() -> None:
    task = Classification()
    kinds = {"as_float": AsFloat(CLASSES), "as_tensor": classification.MulticlassAccuracy(CLASSES)}
    found = values_of(task, samples(task), ExtraMetrics(kinds))
    assert found["as_float"] == pytest.approx(found["as_tensor"])


def test_an_evaluation_of_which_no_worker_measures_a_batch_gives_nothing() -> None:
    found, task = metrics(Classification()), Classification()
    rare = Progress(left_out=("auroc", "f1", "highest"))
    later = samples(task)[0]._replace(progress=rare)
    assert values_of(task, [later], found) == values_of(task, [], found) == {}
    assert values_of(task, samples(task), found) == values_of(task, samples(task), metrics(task))


class Boxes(Task):
    def loss(self, outputs: Any, batch: Batch) -> Sum:
        return torch.zeros(()), batch.size


def test_of_several_numbers_with_names_that_of_the_metrics_own_name_is_taken() -> None:
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    found = [{"boxes": boxes, "scores": torch.ones(1), "labels": torch.ones(1).long()}]
    wanted = [{"boxes": boxes + torch.tensor([0, 0, 0, 2]), "labels": torch.ones(1).long()}]
    batch, overlap = Batch(found, wanted, 1), Late("torchmetrics.detection").IntersectionOverUnion

    def measured(name: str) -> dict[str, float]:
        extra = ExtraMetrics({name: overlap()})
        extra.update(Boxes(), found, batch)
        return extra.compute(lambda value: [value])

    assert measured("iou") == {"iou": pytest.approx(0.5)}
    with pytest.raises(ConfigError, match=r"metrics\.overlap: gives .*one of these: iou"):
        measured("overlap")


def test_one_target_of_a_table_is_measured_as_torchmetrics_takes_it() -> None:
    """[B, 1], which a rank correlation refuses, or would take for rows of one number each."""
    task = Regression()
    columns = [
        each._replace(inputs=each.inputs[:, None], targets=each.targets[:, None])
        for each in samples(task)
    ]
    found = ExtraMetrics({"kendall": torchmetrics.KendallRankCorrCoef()})
    expected = values_of(
        task, samples(task), ExtraMetrics({"kendall": torchmetrics.KendallRankCorrCoef()})
    )
    assert values_of(task, columns, found) == expected
    pair = task.predictions(torch.zeros(4, 2), Batch(None, torch.zeros(4, 2), 4))
    assert [each.shape for each in pair] == [(4, 2)] * 2, "several stay as they are"


class Squares(Task):
    """A custom task, which knows nothing of units."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return (outputs - batch.targets).square().sum(), len(outputs)


@pytest.mark.parametrize("tries", [True, False])
def test_nothing_of_a_batch_is_kept(tries: bool) -> None:
    """As a tensor of a GPU would be held until the next evaluation."""
    found = ExtraMetrics({"error": torchmetrics.MeanSquaredError()})
    batch = Batch(None, torch.zeros(2, 1), 2)
    held = weakref.ref(batch.targets)
    if tries:
        found.try_out(Squares(), torch.ones(2, 1), batch)
    else:
        found.update(Squares(), torch.ones(2, 1), batch)
        assert found.compute(lambda value: [value]) == {"error": 1.0}
    del batch
    assert held() is None


SCALES = {"price": (250_000.0, 70_000.0), "rooms": (5.0, 1.5), "year": (2000.0, 0.01)}


@pytest.mark.parametrize("names", [("price",), ("year",), ("price", "rooms", "year")])
def test_metrics_of_standardised_targets_are_in_their_own_units(names: tuple[str, ...]) -> None:
    scales = {name: SCALES[name] for name in names}
    targets = Numbers(names=names, shape=(len(names),), scales=scales)
    mean, deviation = torch.tensor([*scales.values()], dtype=torch.float64).T
    made = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, size, len(names), generator=made) for size in SIZES]
    batches = [Batch(outputs, truth, len(truth)) for outputs, truth in drawn]
    predicted, truth = (torch.cat(both) * deviation + mean for both in zip(*drawn, strict=True))
    error = truth - predicted
    deviations = deviation.tolist()
    for origin in (0.0, tuple(0.1 for _ in names)):
        task = Regression(origin=origin, deviations=deviations)
        sums = Sums(task, CPU, learns=False)
        for batch in batches:
            sums.add(task.loss(batch.inputs, batch), batch.inputs, batch)
        found = sums.averages(sums.values).values
        assert found["mae"] == pytest.approx(float(error.abs().mean()))
        assert found["rmse"] == pytest.approx(float(error.square().mean(0).sqrt().mean()))
        r2 = 1 - error.square().sum(0) / (truth - truth.mean(0)).square().sum(0)
        assert found["r2"] == pytest.approx(float(r2.mean()))
        assert found["loss"] == pytest.approx(float((error / deviation).square().mean()), rel=1e-5)
    for either in (Regression(deviations=deviations), Squares()):
        percent, share = torchmetrics.MeanAbsolutePercentageError(), torchmetrics.R2Score()
        measured = ExtraMetrics({"mape": percent, "r2": share}, targets)
        expected = {"mape": float((error / truth).abs().mean()), "r2": float(r2.mean())}
        assert values_of(either, batches, measured) == pytest.approx(expected, rel=1e-5)


def test_a_metric_in_deviations_and_one_that_is_nan_are_said_once(capfd: Capture) -> None:
    targets = Numbers(names=("price",), shape=(1,), scales={"price": (5.0, 4.0)})
    both = torch.tensor([[1.0], [-2.0]])
    log = {"msle": torchmetrics.MeanSquaredLogError()}
    found = ExtraMetrics(log, targets, warns=True)
    for _ in range(2):
        assert torch.tensor(values_of(Regression(), [Batch(both, both, 2)], found)["msle"]).isnan()
    said = capfd.readouterr().err
    assert said.count("task.metrics.msle: MeanSquaredLogError is nan") == 1
    assert "-3 to 9" in said
    large = ExtraMetrics({"cosh": torchmetrics.LogCoshError()}, targets, warns=True)
    far = Batch(both, 1e3 * both, 2)
    assert values_of(Regression(), [far], large)["cosh"] == float("inf")
    assert "task.metrics.cosh: LogCoshError is inf" in capfd.readouterr().err
    error = ExtraMetrics({"error": torchmetrics.MeanSquaredError()}, targets, warns=True)
    pairs = both.repeat(1, 2)
    as_pairs = Batch(pairs, pairs, 2)
    for _ in range(2):
        assert values_of(Squares(), [as_pairs], error) == {"error": 0.0}
    assert capfd.readouterr().err.count("measured on standardised targets") == 1


def test_metrics_that_are_nan_are_named_in_their_order(capfd: Capture) -> None:
    names, below = [*"stuvwxyz"], torch.tensor([-2.0, -3.0])
    logs = {name: torchmetrics.MeanSquaredLogError() for name in names}
    values_of(Squares(), [Batch(below, below, 2)], ExtraMetrics(logs, warns=True))
    assert re.findall(r"task\.metrics\.(\w+)", capfd.readouterr().err) == names


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all")
@pytest.mark.parametrize(
    "task", [Classification(), Regression()], ids=lambda task: type(task).__name__
)
def test_what_was_tried_out_counts_for_nothing(task: Task) -> None:
    batches = samples(task)
    found = metrics(task)
    found.try_out(
        task, batches[2].inputs, batches[2]
    )  # a single sample, which says nothing of a correlation
    assert values_of(task, batches, found) == values_of(task, batches, metrics(task))


def word(name: str, **keys: object) -> str:
    shown = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return f"+task.metrics.{name}={{{shown}}}"


@pytest.mark.slow
def test_a_run_is_chosen_by_a_metric_that_is_no_sum(tmp_path: Path) -> None:
    auroc = word("auroc", _target_=AUROC, num_classes=10, better="max")
    words = ("epochs=2", "optimizer.lr=0.5", "world_size=2", "hydra.run.dir=run")
    done = run(*words, auroc, "objective=auroc/val", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best         auroc/val 0.9" in done.stdout
    shown = next(line for line in done.stdout.splitlines() if line.startswith("test"))
    assert len(shown.split()) == 7, "loss, accuracy, auroc, and of which epoch"
    assert run("report", "run", cwd=tmp_path).returncode == 0
    again = run(
        *as_typed("hydra.run.dir=run resume=auto epochs=3"),
        auroc,
        "objective=auroc/val",
        *words[1:3],
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr


measures: Any = Late("sklearn.metrics")
datasets: Any = Late("sklearn.datasets")

CPU = torch.device("cpu")
SIZES_OF_PARTS, NUMBER, IGNORED, FAR = (40, 7, 1, 23), 4, 255, 1e6
DRAWN = torch.Generator().manual_seed(0)


class Case(NamedTuple):
    task: Task
    outputs: Tensor
    targets: Tensor
    expected: Callable[[Any, Any], Mapping[str, float]]
    """By scikit-learn, of outputs and targets as arrays"""


def normal(*size: int) -> Tensor:
    return torch.randn(sum(SIZES_OF_PARTS), *size, generator=DRAWN)


def class_numbers(*size: int, number: int = NUMBER) -> Tensor:
    return torch.randint(number, (sum(SIZES_OF_PARTS), *size), generator=DRAWN)


def without(targets: Tensor, nothing: int) -> Tensor:
    """A third counts for nothing."""
    return targets.masked_fill(torch.rand(targets.shape, generator=DRAWN) < 1 / 3, nothing)


def chances(logits: Any) -> Any:
    return torch.tensor(logits).double().softmax(1).numpy()


def of_uneven_classes(logits: Any, labels: Any) -> Mapping[str, float]:
    found = logits.argmax(1)
    return {
        "loss": measures.log_loss(labels, chances(logits), labels=range(NUMBER + 1)),
        "accuracy": measures.accuracy_score(labels, found),
        "f1": measures.f1_score(labels, found, average="macro"),
        "balanced_accuracy": measures.recall_score(labels, found, average="macro", labels=[0, 1]),
    }


def of_numbers(outputs: Any, targets: Any) -> Mapping[str, float]:
    ours, theirs = outputs.astype(float).ravel(), targets.astype(float).ravel()
    return {
        "loss": measures.mean_squared_error(theirs, ours),
        "mae": measures.mean_absolute_error(theirs, ours),
        "rmse": measures.root_mean_squared_error(theirs, ours),
        "r2": measures.r2_score(theirs, ours),
    }


def of_pixels(logits: Any, masks: Any) -> Mapping[str, float]:
    here = masks != IGNORED
    rows, right = np.moveaxis(logits, 1, -1)[here], masks[here]
    predicted = rows.argmax(1)
    return {
        "loss": measures.log_loss(right, chances(rows)),
        "mean_iou": measures.jaccard_score(right, predicted, average="macro"),
        "accuracy": measures.accuracy_score(right, predicted),
        "dice": measures.f1_score(right, predicted, average="macro"),
    }


CASES = {
    "classification by class": Case(
        Classification(
            metrics={"accuracy": "max", "f1": "max", "balanced_accuracy": "max"},
            num_classes=NUMBER + 1,
        ),
        torch.nn.functional.pad(normal(NUMBER), (0, 1), value=-9),
        class_numbers(number=2),
        of_uneven_classes,
    ),
    "regression of several targets": Case(
        Regression(origin=(0.0, FAR)),
        normal(2) + torch.tensor([0, FAR]),
        normal(2) + torch.tensor([0, FAR]),
        lambda ours, theirs: {
            **of_numbers(ours, theirs),
            "rmse": measures.root_mean_squared_error(theirs.astype(float), ours.astype(float)),
            "r2": measures.r2_score(theirs.astype(float), ours.astype(float)),
        },
    ),
    "regression of pictures": Case(Regression(), normal(2, 3, 3), normal(2, 3, 3), of_numbers),
    "regression far from 0": Case(
        Regression(origin=FAR + 1), normal(1) + FAR, normal(1) + FAR, of_numbers
    ),
    "a class that is nowhere": Case(
        Segmentation(NUMBER + 1, IGNORED),
        torch.nn.functional.pad(normal(NUMBER, 3, 5), (0, 0, 0, 0, 0, 1), value=-100),
        without(class_numbers(3, 5), IGNORED),
        lambda logits, masks: of_pixels(logits[:, :NUMBER], masks),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_scikit_learns_of_the_whole_set(name: str) -> None:
    task, outputs, targets, expected = CASES[name]
    sums = Sums(task, CPU)
    for given, wanted in zip(
        outputs.split(SIZES_OF_PARTS), targets.split(SIZES_OF_PARTS), strict=True
    ):
        batch = Batch(given, wanted, len(given))
        sums.add(task.loss(given, batch), given, batch)
    found = sums.averages(sums.values).values
    assert found == pytest.approx(expected(outputs.numpy(), targets.numpy()), abs=1e-6)


def test_the_diabetes_are_scikit_learns() -> None:
    rows = dataset("dataset=diabetes task=regression").load(None)
    table = datasets.load_diabetes(scaled=False)
    assert list(rows.feature_names) == table.feature_names
    assert np.array_equal(rows.features[:], table.data)
    assert np.array_equal(rows.targets[:][:, 0], table.target)


def test_the_digits_are_scikit_learns() -> None:
    config = dataset("dataset=digits")
    order, table = np.random.default_rng(0).permutation(1797), datasets.load_digits()
    for part, chosen in (("test", np.sort(order[:360])), ("train", np.sort(order[360:]))):
        images, labels = config.load(part)
        assert np.array_equal(images[:, 0], np.round(table.images[chosen] * 255 / 16))
        assert np.array_equal(labels, table.target[chosen])


@pytest.mark.parametrize("feature", [Anything, Numbers])
def test_targets_of_a_table_have_their_own_scales_only(feature: type[Feature]) -> None:
    scales = {"age": (40.0, 10.0), "price": (991.0, 42.5)}
    assert feature.of_columns(["price"], scales).scales == {"price": (991.0, 42.5)}
    assert not feature.of_columns(["other"], scales).scales
