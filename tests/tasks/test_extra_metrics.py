"""torchmetrics' metrics over the batches of several workers: equal to one process that has seen
them all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expt.config.constraints import Target
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.features import Anything, Numbers
from expt.tasks.classification import Classification
from expt.tasks.extra_metrics import ExtraMetrics, build
from expt.tasks.regression import Regression
from expt.tasks.sums import Sums
from expt.tasks.task import Sum, Task
from expt.training.collectives import Worker, gather_across_workers
from tests.conftest import Configured
from tests.facade import Capture, as_typed, run
from tests.late import Late
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

        (folder := tmp_path / str(size)).mkdir()
        for values in together(folder, size, each):
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
    monkeypatch: pytest.MonkeyPatch,
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


NAMED = word("auroc", _target_=AUROC, better="max")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((word("auroc", _target_=AUROC),), "task.metrics.auroc.better: has no value; give one"),
        ((word("auroc", _target_=AUROC, better="up"),), "task.metrics.auroc.better=up: input"),
        ((word("accuracy", _target_=AUROC, better="max"),), "task.metrics.accuracy: the task"),
        (("+task.metrics.f1=min",), "task.metrics.f1=min: task=classification has no"),
        (("experiment=diabetes", "+task.metrics.f1=max"), "task.metrics.f1=max: task=regr"),
        ((NAMED, "objective=auroc/train"), "objective=auroc/train: is not measured"),
    ],
    ids=lambda value: "",
)
def test_bad_input(arguments: tuple[str, ...], told: str, configured: Configured) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(*arguments)
    assert told in str(refused.value)
