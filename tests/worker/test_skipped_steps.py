"""on_nan=skip: a step that is left out counts for nothing, on any number of workers and parts."""

import json
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.errors import Diverged
from expt.runs import checkpoint
from tests.facade import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether, stop_at


class Holes(Dataset[tuple[Tensor, Tensor]]):
    """Numbers, of which some `bad` ones of the training set are none."""

    def __init__(self, train: bool, bad: Sequence[int], size: int = 44) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(int(train)))
        self.targets = self.inputs.sum(1, keepdim=True)
        if train:
            self.inputs[list(bad)] = math.nan

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def words(bad: str, *more: str) -> tuple[str, ...]:
    own = f"+dataset={{_target_: {__name__}.Holes, bad: {bad}, num_workers: 0}}"
    model = "task=regression model=mlp model.hidden=[] batch_size=8 optimizer.lr=0.01 on_nan=skip"
    return ("~dataset", own, *as_typed(model), *more)


def numbers(points: Sequence[str]) -> dict[tuple[str, int], float]:
    """Those of training, by tag and step."""
    found = [json.loads(line) for line in points]
    return {
        (each["tag"], each["step"]): each["value"]
        for each in found
        if each["tag"].split("/")[0] in NUMBERS
    }


NUMBERS = ("loss", "mae", "running", "skipped_steps")


def test_it_is_the_same_on_any_number_of_workers_and_parts(train_together: TrainTogether) -> None:
    def found(size: int, parts: int) -> dict[tuple[str, int], float]:
        more = ("epochs=2", "log_every=2", f"gradient_accumulation={parts}")
        return numbers(train_together(size, *words("[3]", *more), name=f"{size}").points)

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


def test_they_count_on_where_a_run_resumes_within_an_epoch(train_alone: TrainAlone) -> None:
    chosen = words("[3,9,17,30]", "epochs=2", "log_every=100")
    whole = numbers(train_alone(*chosen, name="whole").points)
    assert whole["skipped_steps", 10] > whole["skipped_steps", 5] > 1
    last = train_alone(*chosen, before=stop_at(9)).run.paths.last
    assert checkpoint.load(last)["skipped_steps"] > whole["skipped_steps", 5], (
        "there is one in what was done of the epoch"
    )
    assert numbers(train_alone(*chosen, source=last).points) == whole
