"""Where a loss stopped being finite, and weights that are not."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import expt
from expt.data.loading import Batch
from expt.errors import DataError, Diverged
from expt.runs import checkpoint
from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.learner import Position
from expt.worker import diagnosis
from tests.conftest import Configured
from tests.facade import Capture, RunFolder, as_typed
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, stop_at

REGRESSION, UNIT = "task=regression dataset=diabetes", "dataset.standardise_targets=true"


class Numbered:
    """A loader whose batch number N of epoch E has the images 1000 E + 10 N, and so on."""

    size, is_stream, keeps_order = 100, False, True

    def __len__(self) -> int:
        return 10

    def __init__(self, **values: dict[int, float]) -> None:
        """Of the `inputs` and `targets`, by their numbers, those that are not 0."""
        self._values = values

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        for number in range(skip, 10):
            images = self.indices(epoch, number).tolist()
            inputs, targets = (
                torch.tensor([self._values.get(name, {}).get(image, 0.0) for image in images])
                for name in ("inputs", "targets")
            )
            yield Batch({"row": torch.stack([torch.zeros(3), inputs], 1)}, targets, 3)

    def evaluation(self) -> Iterator[Batch]:
        raise NotImplementedError

    def indices(self, epoch: int, number: int) -> torch.Tensor:
        return 1000 * epoch + 10 * number + torch.arange(3)


def told(
    *steps: list[float], loader: Numbered | None = None, kind: type[Exception] = Diverged
) -> str:
    """Return the message at step 17, the 7th of epoch 2, after these losses of micro-batches."""
    sums = Sums(Classification(), torch.device("cpu"))
    batch = Batch(torch.zeros(1, 2), torch.tensor([0]), 1)
    for step in steps:
        for part, loss in enumerate(step):
            sums.add((torch.tensor(loss), 1), torch.zeros(1, 2), batch, begins_step=part == 0)
    position = Position(10, 30, epoch=2, step=17, step_in_epoch=7)
    with pytest.raises(kind) as raised:
        diagnosis.stop_at_loss(sums, position, cast(Any, loader or Numbered()), ALONE)
    return str(raised.value)


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        (([1.0, 1.0], [1.0, math.nan]), 17),
        (([1.0, math.nan], [1.0, 1.0]), 16),
        (([1.0, 1.0, math.nan], [1.0, 1.0]), 16),  # an epoch's last batch may be cut into fewer
        (([1.0, 1.0, 1.0], [math.nan]), 17),
    ],
)
def test_the_parts_of_a_step_count_as_one(steps: tuple[list[float], ...], step: int) -> None:
    text = told(*steps)
    assert f"the loss was nan at step {step} (epoch 2)" in text
    assert f"training data: {2000 + 10 * (step - 11)}, " in text


def test_samples_that_are_not_finite_are_named_in_place_of_a_learning_rate() -> None:
    at = "the loss was nan at step 15 (epoch 2) on rank 0, for"
    bad = Numbered(inputs={2041: -math.inf, 2042: math.nan}, targets={2042: math.nan})
    assert (
        told([1.0], [math.nan], [1.0], [1.0], loader=bad, kind=DataError).partition(";")[0]
        == f"{at} inputs['row'], column 1, of the training samples 2041, 2042 holds -inf"
    )
    bad = Numbered(targets={2040: math.inf})
    text = told([1.0], [math.nan], [1.0], [1.0], loader=bad, kind=DataError)
    assert (
        text
        == f"{at} targets of the training sample 2040 hold inf; fix it, or leave such samples out"
    )


class Turned(Dataset[Any]):
    """Series that its collate turns around, or puts one after the other."""

    def __init__(self, train: bool, how: str) -> None:
        self.targets, self.how = torch.zeros(32, 1), how
        self.targets[5] += math.nan if train else 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3), self.targets[index]

    def collate(self, samples: list[Any]) -> Any:
        inputs, targets = map(torch.stack, zip(*samples[::-1], strict=True))
        return (inputs, targets, len(samples)) if self.how == "sized" else (inputs, targets)


@pytest.mark.parametrize("how", ["turned", "sized"])
def test_a_batch_is_named_where_its_rows_may_be_in_another_order(
    how: str, train_alone: TrainAlone, capfd: Capture
) -> None:
    words = f"dataset={{_target_:{__name__}.Turned,how:{how}}} task=regression batch_size=8"
    with pytest.raises(DataError, match="for targets, column 0, of the batch of the training sam"):
        train_alone("epochs=1", "model=mlp", *words.split())
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("samples of step")]
    every = line.partition(": ")[2].split(", ")
    assert (len(every), "5" in every) == (8, True)


def test_samples_are_not_blamed_for_what_the_batch_before_held_too() -> None:
    """As of targets that nobody knows, which the loss leaves out."""
    usual = Numbered(targets={2031: math.nan, 2040: math.nan})
    assert "try a lower optimizer.lr" in told([1.0], [math.nan], [1.0], [1.0], loader=usual)


def test_a_loss_that_nobody_remembers_is_told_all_the_same() -> None:
    assert "the loss was nan or infinite by step 17 (epoch 2)" in told([1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_that_are_not_finite_are_not_saved(dtype: torch.dtype, value: float) -> None:
    module, position = nn.Module(), Position(10, 30, epoch=1, step=4)
    diagnosis.refuse_weights(module, position)
    module.none, module.plain = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3))
    module.other = nn.Parameter(torch.full((3,), 3e38).to(dtype))
    diagnosis.refuse_weights(module, position)
    with torch.no_grad():
        module.other[2] = value
    with pytest.raises(Diverged, match=r"the weights are not finite after step 4 \(epoch 1\)"):
        diagnosis.refuse_weights(module, position)


def test_targets_far_from_1_are_told_what_to_do_about(configured: Configured) -> None:
    told_of = {
        words: diagnosis.fix_for(configured(*words.split()))
        for words in (REGRESSION, f"{REGRESSION} {UNIT}", "")
    }
    assert told_of[REGRESSION].startswith(
        "try dataset.standardise_targets=true, a lower optimizer.lr"
    )
    assert told_of[f"{REGRESSION} {UNIT}"] == told_of[""] == diagnosis.FIX


class Padding(TensorDataset):
    """Tokens: of training each second sample is one of padding, else all are."""

    vocab_size, context = 5, 4

    def __init__(self, train: bool) -> None:
        inputs = torch.randint(5, (18, 4), generator=torch.Generator().manual_seed(0))
        targets = torch.full((18, 4), -100)
        if train:
            targets[::2] = 1
        super().__init__(inputs, targets)


class Table(nn.Sequential):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(nn.Embedding(vocab_size, vocab_size))


def test_unmeasured_split_is_told(train_alone: TrainAlone, capsys: Capture) -> None:
    own: Any = (
        f"+dataset={{_target_: {__name__}.Padding, num_workers: 0}}",
        f"+model={{_target_: {__name__}.Table}}",
    )
    words = ("~dataset", "~model", *own, *as_typed("task=language_model batch_size=1 epochs=1"))
    train_alone(*words, "log_every=1", "+dataset.val_fraction=0.2")
    found = {line for line in capsys.readouterr().err.splitlines() if ": not measured" in line}
    names = ("loss", "perplexity", "bits_per_token", "accuracy")
    why = ": not measured, because every target is ignored or has no weight"
    assert found == {
        "warning: " + ", ".join(f"running/{name}" for name in names) + why,
        "warning: " + ", ".join(f"{name}/test" for name in names) + why,
    }


class Weightless(expt.Task):
    """A metric of a weight of 0, beside a loss that has one."""

    def loss(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(outputs)

    def measure(self, outputs: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"rare": (outputs.sum(), 0)}


def test_an_objective_of_nan_is_told_once(train_alone: TrainAlone, capsys: Capture) -> None:
    words = (
        "~task",
        f"+task={{_target_: {__name__}.Weightless, metrics: {{rare: max}}}}",
        "model.hidden=[4]",
    )
    train_alone(*words, "epochs=2", "dataset.train_limit=160")
    found = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("warning: objective")
    ]
    assert len(found) == 1, found
    assert found[0].startswith(
        "warning: objective rare/val is nan after epoch 1: no epoch can be the best"
    )


class Holes(TensorDataset):
    """Numbers, of which some `bad` ones of the training set are none."""

    def __init__(self, train: bool, bad: Sequence[int], size: int = 44) -> None:
        inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(int(train)))
        targets = inputs.sum(1, keepdim=True)
        if train:
            inputs[list(bad)] = math.nan
        super().__init__(inputs, targets)


def words(bad: str, *more: str) -> tuple[str, ...]:
    own = f"+dataset={{_target_: {__name__}.Holes, bad: {bad}, num_workers: 0}}"
    model = "task=regression model=mlp model.hidden=[] batch_size=8 optimizer.lr=0.01 on_nan=skip"
    model += " tensorboard={images:false,norms:false,health:false}"
    return ("~dataset", own, *as_typed(model), *more)


def numbers(run: RunFolder) -> dict[tuple[str, int], float]:
    """Those of training, by tag and step."""
    return {at: value for at, value in run.values.items() if at[0].split("/")[0] in NUMBERS}


NUMBERS = ("loss", "mae", "running", "skipped_steps")


@pytest.mark.slow
def test_it_is_the_same_on_any_number_of_workers_and_parts(train_together: TrainTogether) -> None:
    def found(size: int, parts: int) -> dict[tuple[str, int], float]:
        more = ("epochs=2", "log_every=2", f"gradient_accumulation={parts}")
        return numbers(train_together(size, *words("[3]", *more), name=f"{size}"))

    alone = found(1, 1)
    assert alone["skipped_steps", 10] == 2, "one in each epoch"
    assert ("loss/train", 10) in alone
    assert found(2, 2) == pytest.approx(alone, rel=1e-5)


def test_where_every_step_is_left_out_nothing_is_logged(train_alone: TrainAlone) -> None:
    done = train_alone(*words("[3]", "epochs=2", "log_every=1"))
    steps = [step for step, _ in done.curve("running/loss")]
    assert len(steps) == 8
    assert dict(done.curve("skipped_steps")) == {5: 1, 10: 2}
    with pytest.raises(
        Diverged,
        match=r"^no sample was counted: in every step the loss, or a gradient, was nan or ",
    ):
        train_alone(*words(str([*range(44)]), "epochs=1"), name="none")


@pytest.mark.slow
def test_they_count_on_where_a_run_resumes_within_an_epoch(train_alone: TrainAlone) -> None:
    chosen = words("[3,9,17,30]", "epochs=2", "log_every=100")
    whole = numbers(train_alone(*chosen, name="whole"))
    assert whole["skipped_steps", 10] > whole["skipped_steps", 5] > 1
    last = train_alone(*chosen, before=stop_at(9)).run.paths.last
    assert checkpoint.load(last)["skipped_steps"] > whole["skipped_steps", 5], "one in this epoch"
    assert numbers(train_alone(*chosen, source=last)) == whole
