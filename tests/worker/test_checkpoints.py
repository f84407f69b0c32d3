"""What is saved is what there was when it was asked for, though a thread writes it later."""

import copy
import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from expt.errors import ConfigError
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.training.precision import Precision
from expt.training.strategy import Strategy
from expt.worker.checkpoints import Checkpoints, Snapshot
from expt.worker.run import Run
from tests.facade import as_typed
from tests.training.test_loop import DEVICE, batches
from tests.worker.conftest import ALONE, TrainAlone
from tests.worker.sharded import Configs, together


@pytest.mark.parametrize("sharded", ["true", "false"], ids=["parts", "one file"])
def test_state_may_change_during_a_save(sharded: str, configs: Configs, tmp_path: Path) -> None:
    config, paths = configs("fsdp", 2, f"checkpoint.sharded={sharded}"), RunPaths(tmp_path / "run")

    def save(worker: Worker) -> None:
        epoch_s, averages = [1.0], {"loss": torch.zeros(1 << 20)}
        learner: Any = SimpleNamespace(strategy=SimpleNamespace(shards=2))
        checkpoints = Checkpoints(config, paths, learner, worker)
        state: dict[str, Any] = {"position": {"step": 1}, "weights": torch.ones(1 << 22)}
        checkpoints.save(state, lambda: {"epoch_s": epoch_s, "callbacks": averages})
        epoch_s.append(2.0)
        averages["loss"] += 1
        checkpoints.wait()

    together(tmp_path, 2, save)
    saved = checkpoint.load(paths.last)
    assert saved["epoch_s"] == [1.0]
    assert not saved["callbacks"]["loss"].any()


SHORT, ODD = "dataset.train_limit=512", "tests.worker.odd_optimizers"


@pytest.mark.parametrize(
    "schedule",
    [
        f"_target_: {ODD}.Ramp",  # numbers of NumPy
        f"_target_: {ODD}.Warmed",
        pytest.param(
            "_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [2, 14, 14]",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_schedule_is_resumed_to_the_same_bits(train_alone: TrainAlone, schedule: str) -> None:
    words = (*as_typed("epochs=2 checkpoint.every_steps=12 checkpoint.keep=9"), SHORT)
    ramp = f"scheduler={{{schedule}, interval: step}}"
    whole = train_alone(*words, ramp, name="whole")
    source = next(
        file
        for file in checkpoint_file.candidates(whole.paths.last)
        if checkpoint_file.read(file)["position"]["step"] == 12
    )
    again = train_alone(*words, ramp, name="again", source=source)
    for tag in ("loss/val", "loss/test", "lr"):
        assert again.curve(tag)[-1] == whole.curve(tag)[-1]


@pytest.mark.parametrize(
    ("word", "place"),
    [
        (f"scheduler={{_target_: {ODD}.Ramp, interval: step, holds: deque}}", "scheduler.held: "),
        (f"optimizer={{_target_: {ODD}.Counts, lr: 0.1}}", "optimizer.state.steps: "),
    ],
    ids=["schedule", "optimizer"],
)
def test_unsavable_state_is_refused_early(train_alone: TrainAlone, word: str, place: str) -> None:
    runs = list[Run]()
    with pytest.raises(ConfigError, match=f"^{place}"):
        train_alone(word, SHORT, before=runs.append)
    assert all(run.position.step <= 1 for run in runs)  # none: the optimizer is compared before


def snapshot(
    *, total: int = 20, amp: Any = False, cycle: bool = False, rank: int = 0, workers: int = 1
) -> Snapshot:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(18, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = (
        OneCycleLR(optimizer, 0.1, total_steps=total)
        if cycle
        else LambdaLR(optimizer, lambda s: 0.9**s)
    )
    learner = Learner(
        module=module,
        strategy=Strategy(module),
        optimizer=optimizer,
        scheduler=schedule,
        precision=Precision(amp, DEVICE),
        task=Classification(),
    )
    worker = dataclasses.replace(ALONE, rank=rank, world_size=workers)
    return Snapshot(learner, Position(10, total), Sums(Classification(), DEVICE), worker)


def trained(subject: Snapshot, steps: int) -> dict[str, Any]:
    """The state after so many steps more, a copy."""
    subject.position.total_steps = subject.position.step + steps
    train_epoch(subject.learner, batches(steps), subject.position, subject.sums, log_every=3)
    return copy.deepcopy(subject.state_dict())


def test_a_checkpoint_is_mapped_and_what_trains_on_is_not_in_its_file(tmp_path: Path) -> None:
    path, first, resumed = tmp_path / "last.safetensors", snapshot(), snapshot()
    checkpoint.save(path, {**trained(first, 4), "config": {}})
    state = resumed.read(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    resumed.load_state_dict(state)
    del state
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    trained(resumed, 4)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_another_number_of_workers_shares_the_sums_out(rank: int) -> None:
    """Their total is what counts; random numbers are kept by those who had some."""
    subject = snapshot(rank=rank, workers=3)
    before = torch.get_rng_state()
    state = copy.deepcopy(snapshot().state_dict())
    rng = [dict(state["workers"][0]["rng"]) for _ in range(2)]
    for number, one in enumerate(rng):
        one["torch"] = torch.Generator().manual_seed(100 + number).get_state()
    sums = [1.0 + 2**24, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]
    state["workers"] = [
        {"rng": drawn, "sums": each, "finite": each, "logged": [value / 2 for value in each]}
        for drawn, each in zip(rng, sums, strict=True)
    ]
    subject.load_state_dict(state)
    total = [11.0 + 2**24, 22.0, 33.0, 44.0, 55.0]
    assert subject.sums.state_dict() == (
        {"sums": total, "finite": total, "logged": [value / 2 for value in total]}
        if rank == 0
        else dict.fromkeys(("sums", "finite", "logged"), [0.0] * 5)
    )
    seeded = torch.Generator().manual_seed(100 + rank).get_state()
    assert torch.equal(torch.get_rng_state(), seeded if rank < 2 else before)


def test_a_run_in_bfloat16_goes_on_in_float16() -> None:
    """amp=true is each GPU's own type; bfloat16 has no scale to go on from."""
    state = trained(snapshot(amp="bf16"), 2)
    resumed = snapshot(amp="fp16")
    resumed.load_state_dict(state)
    assert (
        resumed.learner.precision.scaler.get_scale() == Precision("fp16", DEVICE).scaler.get_scale()
    )
    assert resumed.position.step == 2


def test_weights_of_another_shape_are_told_in_a_line() -> None:
    one = snapshot()
    state = one.state_dict()
    state["model"]["2.bias"] = torch.zeros(7)
    with pytest.raises(
        ConfigError,
        match=r"^model: .*\(1 of another shape: 2\.bias \[7\], the model's \[4\]\); put",
    ):
        one.load_weights(state)


def test_one_cycle_stretches_over_more_epochs() -> None:
    state = trained(snapshot(total=20, cycle=True), 4)
    longer, reference = snapshot(total=60, cycle=True), snapshot(total=60, cycle=True)
    longer.load_state_dict(state)
    rates = []
    for subject, steps in ((reference, 10), (longer, 6)):
        trained(subject, steps)
        rates.append(subject.learner.scheduler.get_last_lr())
    assert rates[0] == pytest.approx(rates[1])
    trained(longer, 45)  # 20 steps are behind it: the old length would have raised
