"""The story of a run: what is evaluated, noted and saved when, and what is tested at the end."""

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from expt import progress
from expt.data.loading import Batch
from expt.errors import ConfigError, Diverged
from expt.runs.attempt import Rollback
from expt.training.loop import evaluate
from expt.worker import build
from expt.worker.record import Record
from expt.worker.run import Run
from tests.conftest import Configured
from tests.data.test_build import write_folder
from tests.facade import Patch, RunFolder, as_typed
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, stop_at, stopped_and_resumed
from tests.worker.sharded import Observer

TURNING = as_typed(
    "objective=loss/val dataset.train_limit=320 epochs=5 batch_size=32 optimizer.lr=0.2"
)
"""A run whose best epoch is neither its first nor its last."""


def measured(module: nn.Module, run: Any, split: str) -> tuple[float, float]:
    """Loss and accuracy of `module`, written out."""
    module = copy.deepcopy(module).eval()
    loader = run.data.val if split == "val" else run.data.test
    assert loader is not None
    batches = list(loader.evaluation())
    images, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    with torch.no_grad():
        logits = module(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return functional.cross_entropy(logits, labels).item(), accuracy


def loaded(run: Run, done: RunFolder, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, and all of it."""
    state = done.state(name)
    run.learner.module.load_state_dict(state["model"])
    return run.learner.module, state


def test_the_best_epoch_is_saved_tested_and_the_objective(train_alone: TrainAlone) -> None:
    turning = train_alone(*TURNING, "checkpoint.every_epochs=null", "checkpoint.keep=0")
    losses = dict(turning.curve("loss/val"))
    result, best = turning.result, min(losses, key=lambda step: losses[step])
    assert best not in (min(losses), max(losses)), "the run turns"
    assert result["best"] == {
        "metric": "loss/val",
        "value": losses[best],
        "epoch": list(losses).index(best) + 1,
        "step": best,
    }
    assert result["objective"] == {"name": "loss/val", "value": losses[best]}
    improved = [min(list(losses.values())[: number + 1]) for number in range(len(losses))]
    assert [value for _, value in turning.curve("best/loss/val")] == improved
    tested = dict(turning.curve("loss/test")), dict(turning.curve("accuracy/test"))
    module, state = loaded(turning.run, turning, "best")
    assert state["position"]["step"] == best, "though no epoch's checkpoint was asked for"
    assert measured(module, turning.run, "val")[0] == pytest.approx(losses[best], abs=1e-6)
    loss, accuracy = measured(module, turning.run, "test")
    expected = [[pytest.approx(loss, abs=1e-6)], [pytest.approx(accuracy)]]
    assert [list(points.values()) for points in tested] == expected
    last, state = loaded(turning.run, turning, "last")
    assert state["position"]["step"] == max(losses)
    assert measured(last, turning.run, "test")[0] != pytest.approx(loss, abs=1e-4)


def test_where_the_last_epoch_is_the_best_its_weights_are_tested(train_alone: TrainAlone) -> None:
    """They are in memory, and not read again."""
    few = as_typed("objective=loss/val dataset.train_limit=320 epochs=2 optimizer.lr=1e-3")
    done = train_alone(*few, "model=convnet", "ema=0.5")
    assert done.result["best"]["epoch"] == 2
    assert done.state("best")["position"]["epoch"] == 2
    done.run.snapshot.load_best(done.paths.best)
    loss, accuracy = measured(done.run.learner.evaluated, done.run, "test")
    metrics = done.result["metrics"]
    expected = (pytest.approx(loss, abs=1e-6), pytest.approx(accuracy))
    assert (metrics["loss/test"], metrics["accuracy/test"]) == expected


def test_slow_steps_are_seen(train_alone: TrainAlone, monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0)
    few = as_typed("dataset.train_limit=320 epochs=1 batch_size=32 max_steps=8 log_every=4")
    done = train_alone(*few)
    assert [step for step, _ in done.curve("running/loss")] == [4, 8]
    speeds = done.curve("speed/running_samples_per_s")
    assert {*range(1, 9)} == {step for step, _ in speeds}
    assert min(speed for _, speed in speeds) > 0


class Watching(Observer):
    """Notes each moment of an epoch, and who looks where."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[str] = []

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.moments.append(f"batch of {len(batch.targets)}")
            yield batch

    def before_update(self) -> None:
        self.moments.append("gradients")

    def wants_review(self) -> bool:
        return True

    def expect_evaluation(self, *, review: bool, may_end: bool = False) -> None:
        self.moments.append(f"epoch, {review}, {may_end}")

    def end_evaluation(self, split: str, *, is_last: bool = False) -> None:
        self.moments.append(f"{split}, {is_last}")

    def close(self, *, complete: bool) -> None:
        self.moments.append(f"end, {complete}")


def test_who_looks_on_is_told_of_each_moment(train_alone: TrainAlone) -> None:
    seen = Watching()
    words = ("dataset.train_limit=128", "epochs=2", "model=convnet", "model.dropout=0.2")
    done = train_alone(*words, observe=lambda *_: seen)
    step = ["batch of 64", "gradients"]
    first = [*step, *step, "epoch, True, False", "val, False"]
    last = [*step, *step, "epoch, True, True", "val, True", "test, True", "end, True"]
    assert seen.moments == [*first, *last]
    assert done.points == train_alone(*words, name="drawn").points, "no number depends on it"


def test_who_looks_on_is_told_where_early_stop_ends_a_run(train_alone: TrainAlone) -> None:
    """The evaluation that ends it is looked at: that it may be is known before."""
    seen = Watching()
    stop = "early_stop={metric: accuracy/val, patience: 2, min_delta: 0.9}"
    train_alone("dataset.train_limit=128", "epochs=9", stop, observe=lambda *_: seen)
    ends = [moment for moment in seen.moments if moment.startswith(("epoch", "val", "test"))]
    assert ends[:2] == ["epoch, True, False", "val, False"]
    assert ends[-3:] == ["epoch, True, True", "val, True", "test, True"]
    assert len(ends) < 9


def test_the_speed_is_that_of_all_epochs(train_alone: TrainAlone) -> None:
    result = train_alone(
        "dataset.train_limit=330", "drop_last=false", "epochs=2", "batch_size=64"
    ).result
    assert result["samples_per_s"] == pytest.approx(2 * 330 / sum(result["epoch_s"]))


def test_a_profile_is_a_trace_and_a_table(train_alone: TrainAlone) -> None:
    done = train_alone("profile=true", "dataset.train_limit=640", "epochs=1")
    with gzip.open(done.folder / "trace.json.gz") as trace:
        found = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"aten::addmm", "ProfilerStep#5"} <= found
    assert "aten::addmm" in (done.folder / "operators.txt").read_text()


def test_what_is_not_the_best_is_saved_where_that_is_due(train_alone: TrainAlone) -> None:
    saved: list[tuple[int, bool]] = []

    def watch(run: Run) -> None:
        write = run.checkpoints.save

        def save(state: Any, about: Any, *, bests: Any, waits: bool) -> None:
            saved.append((state["position"]["step"], bool(bests)))
            write(state, about, bests=bests)

        run.checkpoints.save = save  # type: ignore[method-assign, assignment]

    rates = "optimizer.lr=1e-30 checkpoint.every_steps=9 checkpoint.every_epochs=2"
    train_alone(*as_typed(f"epochs=4 dataset.train_limit=320 {rates}"), before=watch)
    assert saved == [(5, True), (9, False), (10, False), (18, False), (20, False)]


def test_stopped_run_resumes_to_the_same_numbers(train_alone: TrainAlone) -> None:
    words = as_typed("epochs=3 model.dropout=0.3 log_every=2 dataset.train_limit=320 on_nan=skip")
    stopped = train_alone(*words, before=stop_at(8))
    assert stopped.status == "interrupted"
    assert (stopped.result["status"], stopped.result["resumable"]) == ("interrupted", True)
    reached = stopped.result["metrics"]["accuracy/val"]
    best = {"metric": "accuracy/val", "value": reached, "epoch": 1, "step": 5}
    assert stopped.result["best"] == best
    assert (stopped.result["objective"]["value"], len(stopped.result["epoch_s"])) == (reached, 1)
    elapsed_s = stopped.state()["elapsed_s"]
    resumed = train_alone(*words, source=stopped.paths.last)
    whole = train_alone(*words, name="whole")
    assert resumed.points == whole.points
    assert [step for step, _ in resumed.curve("speed/epoch_s")] == [5, 10, 15]
    assert resumed.result["epoch_s"][1] >= elapsed_s
    assert len(resumed.result["epoch_s"]) == 3


def test_a_loss_that_is_no_number_ends_the_run_at_a_log_point(train_alone: TrainAlone) -> None:
    def spoil(run: Run) -> None:
        def forward(module: nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits * float("nan") if module.training and run.position.step == 7 else logits

        run.learner.module.register_forward_hook(forward)

    with pytest.raises(Diverged, match=r"the loss was nan at step 8 \(epoch 2\) on rank 0; "):
        train_alone("epochs=3", "dataset.train_limit=320", "log_every=3", before=spoil)


def test_missing_test_part_is_not_tested(train_alone: TrainAlone, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", test="val")
    words = (
        *as_typed("dataset=image_folder dataset.image_size=[8,8] dataset.cache=false"),
        *as_typed("dataset.num_workers=0 batch_size=4 epochs=1"),
        f"dataset.root='{root}'",
    )
    done = train_alone(*words, "dataset.val_fraction=0")
    assert done.status == "completed"
    assert dict(done.curve("loss/val")) == {
        3: pytest.approx(measured(done.run.learner.module, done.run, "val")[0])
    }
    assert done.curve("loss/test") == []
    for wrong in ("objective=accuracy/test", "eval_split=test"):
        with pytest.raises(ConfigError, match=f"^{wrong}: "):
            train_alone(*words, wrong, "objective=accuracy/test", name="wrong")
    (root / "val").rename(root / "test")
    with pytest.raises(ConfigError, match=r"^dataset\.val_fraction=0"):
        train_alone(*words, "dataset.val_fraction=0", name="wrong")


OWN_SCHEDULE = as_typed(
    "+scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=2"
    " ~scheduler.warmup_epochs"
)


def test_an_own_schedule_counts_epochs(train_alone: TrainAlone) -> None:
    done = train_alone(*OWN_SCHEDULE, "dataset.train_limit=320", "epochs=5")
    assert done.curve("lr") == [
        (5, 0.05),
        (10, 0.05),
        (15, pytest.approx(0.005)),
        (20, pytest.approx(0.005)),
        (25, pytest.approx(0.0005)),
    ]


def test_or_optimiser_steps(train_alone: TrainAlone) -> None:
    done = train_alone(*OWN_SCHEDULE, "+scheduler.interval=step", "max_steps=5", "log_every=1")
    assert [lr for _, lr in done.curve("lr")] == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005])


def test_a_plateau_gets_the_evaluations_loss(train_alone: TrainAlone) -> None:
    """One that no loss is good enough for comes to an end in each epoch."""
    plateau = "+scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"
    never = as_typed(
        "+scheduler.patience=0 +scheduler.threshold=100 +scheduler.threshold_mode=abs"
        " ~scheduler.warmup_epochs"
    )
    done = train_alone(plateau, *never, "epochs=3", "dataset.train_limit=320")
    assert [lr for _, lr in done.curve("lr")] == pytest.approx([0.05, 0.05, 0.005])
    assert done.run.learner.scheduler.state_dict()["best"] == dict(done.curve("loss/val"))[5]


def test_plateau_watches_the_evaluated_loss(configured: Configured) -> None:
    assert configured("scheduler=plateau").scheduler.metric == "loss/val"
    assert configured("scheduler=plateau", "eval_split=test").scheduler.metric == "loss/test"
    with pytest.raises(ConfigError, match=r"^scheduler\.metric=acuracy/val: .* 'accuracy/val'\?$"):
        configured("scheduler=plateau", "scheduler.metric=acuracy/val")


def test_the_first_batches_again_and_again(
    train_together: TrainTogether, train_alone: TrainAlone, configured: Configured
) -> None:
    """Those of the first epoch, also when resumed; nothing else is evaluated or tested."""
    words = (*TURNING, "optimizer.momentum=0.0", "log_every=1")
    two = train_together(2, *words, "overfit_batches=3", name="two")
    begun: list[nn.Module] = []
    train_alone(
        *words,
        *("max_steps=1", "overfit_batches=3"),
        name="begun",
        before=lambda run: begun.append(copy.deepcopy(run.learner.module)),
    )
    model, losses, evaluated = begun[0], list[float](), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    batches = [*build.build_data(configured(*words), ALONE).train.epoch(1)][:3]
    for _ in range(5):
        for batch in batches:
            loss = functional.cross_entropy(model(batch.inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            each = [functional.cross_entropy(model(one.inputs), one.targets) for one in batches]
        evaluated.append(torch.stack(each).mean().item())
    words = (*words, "overfit_batches=3")
    for done in (two, stopped_and_resumed(train_alone, *words, step=8)):
        for tag, expected in (("running/loss", losses), ("loss/val", evaluated)):
            found = [value for _, value in done.curve(tag)]
            assert found == pytest.approx(expected, rel=1e-4), tag
        assert not done.curve("loss/test")


OWN = "tests.worker.odd_optimizers"
TOGGLED = ("~optimizer", f"+optimizer={{_target_: {OWN}.Toggled, lr: 0.05}}", "epochs=3")


def test_the_weights_to_use_are_evaluated_and_saved(train_alone: TrainAlone) -> None:
    done = train_alone(*TURNING, *TOGGLED)
    run = done.run
    assert not run.learner.optimizer.trains  # type: ignore[attr-defined]
    last = done.state()["model"]
    for name, weight in run.learner.module.named_parameters():
        assert torch.equal(last[name], weight.cpu())
    assert run.data.val is not None
    found = evaluate(run.learner, run.data.val.evaluation(), ALONE.device)
    assert found.loss == pytest.approx(done.curve("loss/val")[-1][1], rel=1e-6)


EMA = (*TURNING, "ema=0.9", "model=convnet", "model.dropout=0.2")


def test_the_average_is_evaluated_saved_and_tested(train_alone: TrainAlone) -> None:
    done = train_alone(*EMA)
    learner, losses = done.run.learner, dict(done.curve("loss/val"))
    assert learner.ema
    best, last = (done.state(name) for name in ("best", "last"))
    tested = measured(learner.ema.module, done.run, "test")[0]
    for state in (best, last):
        done.run.snapshot.load_weights(state)
        step = state["position"]["step"]
        assert measured(learner.ema.module, done.run, "val")[0] == pytest.approx(
            losses[step], abs=1e-6
        )
        assert measured(learner.module, done.run, "val")[0] != pytest.approx(losses[step], abs=1e-3)
        assert int(state["ema"]["n_averaged"]) == step
    done.run.snapshot.load_weights(best)
    assert done.result["metrics"]["loss/test"] == pytest.approx(tested, abs=1e-6)
    assert tested == measured(learner.ema.module, done.run, "test")[0], "of the best"


@pytest.mark.parametrize("is_done", [True, False])
def test_a_finished_run_keeps_its_record_until_it_is_tested_again(
    is_done: bool, train_alone: TrainAlone
) -> None:
    run = train_alone("max_steps=2").run
    Rollback(run.paths).save()
    record = Record(run.paths, run.position, run.history, Observer(), writes=True, is_done=is_done)
    assert run.paths.before.exists() is is_done
    record.end("completed", {})
    assert not run.paths.before.exists()
