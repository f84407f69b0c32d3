"""What is saved is what there was when it was asked for, though a thread writes it later."""

import copy
import dataclasses
import gc
import json
import math
from collections.abc import Callable
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
from expt.runs.result import read_result
from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.training.precision import Precision
from expt.training.strategy import Strategy
from expt.worker.checkpoints import Checkpoints, Snapshot, _total
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed, begun, common, same
from tests.ranks import together
from tests.training.test_loop import DEVICE, batches
from tests.worker.conftest import ALONE, TrainAlone, Trained
from tests.worker.sharded import Configs, Observer


@pytest.mark.parametrize("sharded", ["true", "false"], ids=["parts", "one file"])
def test_state_may_change_during_a_save(sharded: str, configs: Configs, tmp_path: Path) -> None:
    config, paths = configs("fsdp", 2, f"checkpoint.sharded={sharded}"), RunPaths(tmp_path / "run")

    paths.folder.mkdir()

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


FORKED = (
    *as_typed("dataset.train_limit=320 log_every=2 optimizer.lr=0.2 batch_size=32"),
    *as_typed("checkpoint.keep=9"),
)
Forking = Callable[..., Trained]


@pytest.fixture
def forking(
    train_alone: TrainAlone, configured: Configured, tmp_path: Path, monkeypatch: Patch
) -> Forking:
    """Carries a run out in tmp_path/NAME as its driver would."""
    monkeypatch.chdir(tmp_path)

    def carry_out(*words: str, name: str) -> Trained:
        source = begun(configured(*words), tmp_path / name)
        return train_alone(*words, name=name, source=source, observe=lambda *_: Observer())

    return carry_out


UNCHANGED: dict[str, tuple[tuple[str, ...], str]] = {
    "adam, with all that draws and averages": (
        ("optimizer=adam", "model.dropout=0.3", "ema=0.9", "gradient_accumulation=2", "mixup=0.2",
         "dataset.augment.crop_padding=1"), "@20"),
    "cosine, by the epoch": (("scheduler=cosine", "model.dropout=0.3"), "@epoch:2"),
    "one cycle": (("scheduler=one_cycle", "scheduler.rise_fraction=0.6"), "@20"),
    "a plateau that has lowered it": (
        ("scheduler=plateau", "scheduler.patience=0", "scheduler.min_delta=0.5", "optimizer=adamw"),
        "@30"),
    "groups, layer by layer": (
        ("optimizer=adamw", "optimizer.layer_decay=0.8", "optimizer.decay_biases_and_norms=false"),
        "@10"),
    "an own schedule": (
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.7}",
            "lr_scaling=linear",
         "base_batch_size=64"), "@20"),
    "within an epoch": (("checkpoint.every_steps=7", "model.dropout=0.2", "scheduler=step"), "@14"),
}  # fmt: skip


@pytest.mark.parametrize("name", common(UNCHANGED, "adam", "within"))
def test_a_fork_with_nothing_changed_comes_to_the_same_bits(name: str, forking: Forking) -> None:
    words, which = (*FORKED, *UNCHANGED[name][0], "epochs=4"), UNCHANGED[name][1]
    parent = forking(*words, name="parent")
    fork = forking(*words, f"fork=parent{which}", name="fork")
    states = [each.state() for each in (parent, fork)]
    assert states[0]["position"]["step"] == 40
    assert fork.result["forked_from"]["changed"] == {}
    for state in states:
        state["scheduler"].pop("_step_count", 0)  # torch's, for a warning
        state["position"] = {
            key: state["position"][key] for key in ("epoch", "step", "step_in_epoch")
        }
    for key in states[0].keys() & {"model", "ema", "optimizer", "scheduler", "position", "workers"}:
        assert same(*(each[key] for each in states)), key
    curves = [
        [point for point in each.points if '"best/' not in point and '/test"' not in point]
        for each in (parent, fork)
    ]  # what it is best at is its own, from the fork on
    assert curves[0] == curves[1], "the parent's until the fork, and its own"


PLAIN = (
    *FORKED,
    *as_typed("model=mlp model.hidden=[8] optimizer.momentum=0 epochs=4 checkpoint.every_steps=1"),
)


def _weights(run: Trained, name: str = "last") -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in run.state(name)["model"].values()])


def test_the_first_step_uses_the_changed_learning_rate_and_momentum(forking: Forking) -> None:
    parent = forking(
        *PLAIN, "scheduler=cosine", "checkpoint.every_steps=1", "max_steps=22", name="parent"
    )
    at = _weights(parent, "last-2")
    moved = {}
    for lr in ("0.2", "0.02"):
        fork = forking(
            *PLAIN, "scheduler=cosine", "max_steps=21", "fork=parent@20", f"optimizer.lr={lr}",
            "optimizer.weight_decay=0.01", name=lr
        )  # fmt: skip
        moved[lr] = _weights(fork) - at
        assert fork.result["forked_from"]["changed"]["optimizer.weight_decay"] == [0.0, 0.01]
    torch.testing.assert_close(moved["0.2"], 10 * moved["0.02"], rtol=1e-4, atol=1e-6)
    assert moved["0.02"].abs().max() > 0


REFUSED: dict[str, tuple[str, str]] = {
    "a step without a checkpoint": ("fork=parent@41", "fork=parent@41: "),
    "no checkpoint's name": ("fork=parent@lst", "fork=parent@lst: "),
    "no run": ("fork=parant@20", "Did you mean 'parent'"),
    "its end": ("fork=parent", r"epochs=3: .* give epochs=4 or more \(fork=parent epochs=4\)"),
    "another model": ("fork=parent@20 model.hidden=[9]", r"model.hidden=\[9\]: .* must keep"),
    "other data": (
        "fork=parent@20 dataset.folds=5 dataset.fold=0",
        "dataset.folds=5: .* must keep",
    ),
    "another start": ("fork=parent@20 init=kaiming", "init=kaiming: .* must keep"),
    "weights": ("fork=parent@20 weights=parent", "weights=parent: "),
    "a seed within an epoch": ("fork=parent@15 seed=1", "seed=1: .* cannot change within an epoch"),
    "steps of another length": ("fork=parent@20 batch_size=16 max_steps=99", "max_steps=99: "),
}


def test_what_cannot_be_is_refused_in_a_line(
    forking: Forking, configured: Configured, tmp_path: Path, capsys: Capture
) -> None:
    words = (
        *FORKED,
        *as_typed("model.hidden=[8] epochs=3 checkpoint.every_steps=15 objective=loss/val"),
    )
    forking(*words, "optimizer.lr=0.01", name="parent")
    (tmp_path / "parent/checkpoints/best.safetensors").unlink()
    for what, (more, told) in REFUSED.items():
        with pytest.raises(ConfigError, match=told):
            begun(configured(*words, *more.split()), tmp_path / "fork")
        assert not (tmp_path / "fork").exists(), what


def test_another_batch_goes_on_by_epochs_and_is_resumed(
    forking: Forking, configured: Configured, tmp_path: Path, train_alone: TrainAlone
) -> None:
    words = (*FORKED, "model.hidden=[8]", "scheduler=cosine", "epochs=4")
    forking(*words, name="parent")
    more = (
        *words,
        *as_typed("fork=parent@20 batch_size=64 seed=3 ema=0.9 amp=bf16 checkpoint.keep=9"),
    )
    fork = forking(*more, name="fork")
    assert (fork.result["steps"], fork.result["total_steps"], len(fork.result["epoch_s"])) == (
        30,
        30,
        2,
    )
    rates = {
        json.loads(line)["step"]: json.loads(line)["value"]
        for line in fork.points
        if '"tag": "lr"' in line
    }
    assert rates[24] == pytest.approx(0.2 * 0.5 * (1 + math.cos(math.pi * 13 / 20))), "in step 14"
    for path in (fork.folder / "checkpoints").glob("*.safetensors*"):
        if not path.name.startswith("last-1."):
            path.unlink()
    whole = fork.state("last-1")["position"]
    assert (whole["step"], whole["epoch"], whole["began_at"]) == (25, 3, 20)
    before = fork.points
    source = begun(configured(*more), tmp_path / "fork", may_have_run=True)
    assert source == tmp_path / "fork/checkpoints/last-1.safetensors"
    resumed = train_alone(*more, name="fork", source=source, observe=lambda *_: Observer())
    assert resumed.points == before, "as if it had not been stopped"
    assert resumed.result["forked_from"]["step"] == 20
    assert resumed.result["identity"] == fork.result["identity"]


def test_killed_fork_is_still_a_fork(
    forking: Forking, configured: Configured, tmp_path: Path
) -> None:
    words = (*FORKED, "model.hidden=[8]", "epochs=2")
    forking(*words, name="parent")
    more = (*words, "fork=parent@10", "optimizer.lr=0.3")
    source = begun(configured(*more), tmp_path / "fork")
    assert source == tmp_path / "fork/checkpoints/fork.safetensors"
    source.with_name(".last.safetensors.tmp").touch()
    (tmp_path / "parent/checkpoints").rename(tmp_path / "away")
    assert begun(configured(*more, "resume=auto"), tmp_path / "fork", may_have_run=True) == source
    record = read_result(RunPaths(tmp_path / "fork"))
    assert record["forked_from"]["changed"] == {"optimizer.lr": [0.2, 0.3]}


def test_a_fork_measures_rare_metrics_where_its_parent_does(forking: Forking) -> None:
    metrics = "{cheap: max, dear: {better: max, every: 3}}"
    task = f"+task={{_target_: tests.worker.own_tasks.Dear, metrics: {metrics}}}"
    words = ("~task", task, *as_typed("objective=loss/val epochs=5"))
    words += as_typed("dataset.train_limit=64 batch_size=32 checkpoint.keep=9")
    parent = forking(*words, name="parent")
    fork = forking(*words, "fork=parent@4", name="fork")
    assert [step for step, _ in parent.curve("dear/val")] == [6]
    assert fork.curve("dear/val") == parent.curve("dear/val")


def test_another_optimizer_begins_anew_and_rank_0_says_so(
    forking: Forking, capsys: Capture
) -> None:
    words = (*FORKED, "model.hidden=[8]", "epochs=4")
    forking(*words, name="parent")
    fork = forking(*words, "optimizer=adam", "optimizer.lr=0.007", "fork=parent@20", name="fork")
    assert "fork=parent@20: was trained by " in capsys.readouterr().err
    changed = fork.result["forked_from"]["changed"]  # also the rate, which both have
    assert [changed[f"optimizer.{key}"][1] for key in ("name", "lr")] == ["adam", 0.007]


def test_a_number_that_is_none_stays_one_in_a_total_of_workers() -> None:
    sums = {"sums": [1.0], "finite": [1.0], "logged": [0.0]}
    workers = [{**sums, "peaks": peaks} for peaks in ([2.0, 1.0], [math.nan, 3.0], [5.0, 2.0])]
    total = _total(workers)
    assert math.isnan(total["peaks"][0])
    assert (total["peaks"][1], total["sums"]) == (3.0, [3.0])
