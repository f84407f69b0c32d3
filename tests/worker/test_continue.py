"""A run that goes on equals, to the bit, one that was so long at once, also within epochs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from torch import nn

import expt
from expt import signals
from expt.command.rerun import NOT_REPEATED
from expt.runs import checkpoint
from expt.runs.checkpoint_file import candidates
from expt.runs.named_checkpoint import checkpoint_named
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.worker import run as worker_run
from expt.worker.run import Run
from tests import on_cards
from tests.conftest import Configured
from tests.conftest import Trained as TrainInWorkers
from tests.facade import Capture, Patch, RunFolder, as_typed, common, continued, same
from tests.integration.test_resume import assert_equal, kill_at
from tests.worker.conftest import (
    TrainAlone,
    Trained,
    TrainTogether,
    assert_same,
    stopped_and_resumed,
)
from tests.worker.test_callbacks import words as with_callbacks
from tests.worker.test_run import TOGGLED

SHORT = ("dataset.train_limit=320", "log_every=2", "optimizer.lr=0.2", "batch_size=32")
ALL_AT_ONCE = (
    *as_typed("optimizer=adam model.dropout=0.3 ema=0.9 gradient_accumulation=2 mixup=0.2"),
)
AUGMENTED = as_typed(
    "dataset.augment.crop_padding=1 dataset.augment.flip=true dataset.augment.cutout=2"
)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # the words of the run, and the ends that it gets one after another
    "constant, with all that draws and averages": (
        (*ALL_AT_ONCE, *AUGMENTED, "model=convnet", "checkpoint.every_epochs=2",
            "tensorboard.images=auto"),
        ("epochs=1", "epochs=3"),
    ),
    "step, twice": (
        ("scheduler=step", "scheduler.every_epochs=2.5", "scheduler.warmup_epochs=1.5",
            "model.dropout=0.2"),
        ("epochs=2", "epochs=4", "epochs=6"),
    ),
    "cosine, beyond its plan": (
        ("scheduler=cosine", "scheduler.min_lr=0.01"), ("epochs=2", "epochs=3 scheduler.epochs=2")
    ),
    "one cycle, towards its end": (("scheduler=one_cycle", "scheduler.epochs=5"), ("epochs=3",
        "epochs=5")),
    "steps that end within an epoch": (
        ("model.dropout=0.2", "objective=loss/val", "scheduler=plateau", "scheduler.patience=0",
            "ema=0.8"),
        ("max_steps=5", "max_steps=5", "max_steps=13", "max_steps=27"),
    ),
    "steps, then epochs": (("drop_last=false", "dataset.train_limit=300"), ("max_steps=14",
        "epochs=2")),
    "an early stop": (
        ("early_stop={metric: loss/val, patience: 1}", "optimizer.lr=3"),
        ("epochs=2", "epochs=9", "epochs=12")
    ),
    "evaluations within epochs, ended at and between them, at epochs' ends and within": (
        ("eval_every_steps=4", "scheduler=plateau", "scheduler.patience=0", "optimizer.lr=0.5",
            "checkpoint.keep_best=2", "model.dropout=0.2"),
        ("max_steps=8", "epochs=1", "max_steps=15", "epochs=3"),
    ),
    "an early stop within an epoch, and a result that is good enough": (
        ("eval_every_steps=3",),
        ("early_stop={metric:loss/val,patience:1,min_delta:0.4}",
            "early_stop={metric:accuracy/val,threshold:0.9}", "epochs=3"),
    ),
}  # fmt: skip


def _longer(
    train_alone: TrainAlone, configured: Configured, paths: RunPaths, *words: str
) -> Trained:
    """Train the run of `paths` to its next end, as its driver would have it."""
    source = continued(configured(*words), paths)
    assert source is not None
    return train_alone(*words, name=paths.folder.name, source=source)


def _drawn(folder: Path) -> dict[str, Any]:
    """Return what TensorBoard shows of a run: curves, steps of pictures, HPARAMS."""
    drawn = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    found = drawn.Tags()
    start = drawn.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    scalars = [tag for tag in found["scalars"] if not tag.startswith(NOT_REPEATED)]
    return {
        **{tag: [(point.step, point.value) for point in drawn.Scalars(tag)] for tag in scalars},
        **{tag: [picture.step for picture in drawn.Images(tag)] for tag in found["images"]},
        "hparams": {
            k: str(v)
            for k, v in metadata.parse_session_start_info_plugin_data(start).hparams.items()
        },
        "others": sorted(found["tensors"]),
    }


def _assert_same(longer: RunFolder, at_once: RunFolder) -> None:
    assert longer.points == at_once.points
    for name in ("last", "best"):
        states = [run.state(name) for run in (longer, at_once)]
        for key in states[1].keys() - {
            "epoch_s",
            "eval_s",
            "elapsed_s",
            "evaluated_s",
            "metrics_bytes",
            "provenance",
            "last",
            "config",
        }:
            assert same(*(each[key] for each in states)), (name, key)
    told = as_typed("best objective stopped_early steps total_steps identity seedless_identity")
    for key in told:
        assert longer.result.get(key) == at_once.result.get(key), key
    metrics = (run.result["metrics"].items() for run in (longer, at_once))
    ours, theirs = (
        {tag: value for tag, value in found if not tag.startswith(NOT_REPEATED)}
        for found in metrics
    )
    assert ours == theirs
    assert len(longer.result["epoch_s"]) == len(at_once.result["epoch_s"])
    assert _drawn(longer.folder) == _drawn(at_once.folder)


@pytest.mark.parametrize("name", common(CASES, "constant", "evaluations"))
def test_what_is_trained_longer_is_what_it_would_have_been_at_once(
    name: str, train_alone: TrainAlone, configured: Configured, tmp_path: Path
) -> None:
    words, (first, *ends) = (*SHORT, *CASES[name][0]), CASES[name][1]
    for folder in ("longer", "at_once"):
        create_result(RunPaths(tmp_path / folder))
    train_alone(*words, first, name="longer")
    for end in ends:
        longer = _longer(
            train_alone, configured, RunPaths(tmp_path / "longer"), *words, *end.split()
        )
    _assert_same(longer, train_alone(*words, *ends[-1].split(), name="at_once"))


WORKERS = (
    *as_typed("world_size=2 model.dropout=0.3 optimizer=adam optimizer.lr=0.01 ema=0.9"),
    *as_typed("gradient_accumulation=2 threads=1"),
)


@pytest.mark.slow
def test_two_workers_that_are_killed_on_their_way_and_a_new_folder(trained: TrainInWorkers) -> None:
    words = (*SHORT, *WORKERS, "dataset.augment.crop_padding=1")
    short = trained(*words, "epochs=3", name="short")
    before = {path: path.read_bytes() for path in short.folder.rglob("*") if path.is_file()}
    at_once = trained(*words, "epochs=6", name="at_once")
    elsewhere = trained(*words, "epochs=6", f"resume={short.folder}", name="elsewhere")
    assert {path: path.read_bytes() for path in short.folder.rglob("*") if path.is_file()} == before
    kill_at(short.folder, ("resume=auto", "epochs=6"), 42, EXPT_FAULT="1:44:hang")
    longer = trained("resume=auto", name="short")
    assert longer.result["attempts"] == 3
    _assert_same(longer, at_once)
    assert _drawn(elsewhere.folder) == _drawn(at_once.folder)
    assert elsewhere.result["identity"] == at_once.result["identity"]
    assert elsewhere.points == at_once.points


def test_longer_sweep_continues(tmp_path: Path, trained: TrainInWorkers, capfd: Capture) -> None:
    words = (*SHORT, "world_size=1", "threads=1", "model.dropout=0.3", "tensorboard.images=false")
    stepped = (*words, "scheduler=step", "scheduler.every_epochs=0.75")
    sweep = (*stepped, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    short = expt.sweep("seed=0,1", "epochs=1", *sweep)
    before = {
        path: path.read_bytes() for run in short for path in run.folder.rglob("*") if path.is_file()
    }
    longer = expt.sweep("seed=0,1", "epochs=2", "resume=auto", *sweep)
    captured = capfd.readouterr()
    assert "grid" not in captured.err
    assert "resume" not in captured.out, "no column"
    assert {path: path.read_bytes() for path in before} == before
    assert len({run.folder for run in (*short, *longer)}) == 4
    assert [run.record["resumed_from"]["step"] for run in longer] == [10, 10]
    at_once = trained(*stepped, "seed=1", "epochs=2", name="at_once")
    _assert_same(RunFolder(longer[1].folder), at_once)
    known = expt.sweep("seed=0,1", "epochs=2", *sweep)
    assert [run.record for run in known] == [run.record for run in longer], "whatever was typed"


PAUSE_CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    # the words of the run, and the epochs after which it pauses
    "all that draws and averages, by a cosine that sees all epochs": (
        (*ALL_AT_ONCE, "scheduler=cosine",
            "scheduler.warmup_epochs=1.5", "epochs=3",
         "checkpoint.every_epochs=null", "tensorboard.images=false", with_callbacks("Busy")),
        (1, 2),
    ),
    "a plateau, an early stop, and half precision": (
        ("scheduler=plateau", "scheduler.patience=0", "early_stop={metric: loss/val, patience: 2}",
            "optimizer.lr=3",
         "amp=bf16", "objective=loss/val", "checkpoint.every_epochs=null", "epochs=9",
         "tensorboard.images=false"),
        (1, 2, 3),
    ),
}  # fmt: skip


def pruned_after(
    epoch: int, train_alone: TrainAlone, *words: str, source: Path | None = None
) -> Trained:
    def until(run: Run) -> None:
        run.until_epoch = epoch

    return train_alone(*words, name="pruned", source=source, before=until)


@pytest.mark.parametrize("name", common(PAUSE_CASES, "all"))
def test_a_run_that_has_paused_goes_on_to_the_same_bits(
    name: str, train_alone: TrainAlone, configured: Configured, tmp_path: Path
) -> None:
    words, pauses = (*SHORT, *PAUSE_CASES[name][0]), PAUSE_CASES[name][1]
    for folder in ("pruned", "at_once"):
        create_result(RunPaths(tmp_path / folder))
    paths, source = RunPaths(tmp_path / "pruned"), None
    for epoch in pauses:
        pruned = pruned_after(epoch, train_alone, *words, source=source)
        assert pruned.status == pruned.result["status"] == "pruned"
        assert len(pruned.result["epoch_s"]) == epoch == len(pruned.curve("loss/val"))
        assert pruned.result["objective"]["value"] is not None
        assert (pruned.result["stopped_early"], pruned.curve("loss/test")) == (None, [])
        source = continued(configured(*words), paths)
        assert source is not None
        assert checkpoint.load(source)["position"]["epoch"] == epoch
    done = train_alone(*words, name="pruned", source=source)
    assert done.status == "completed"
    _assert_same(done, train_alone(*words, name="at_once"))


def test_a_run_that_ends_before_completes(train_alone: TrainAlone) -> None:
    early = ("early_stop={metric: loss/val, patience: 1}", "optimizer.lr=3", "epochs=9")
    for words in (("epochs=2",), ("max_steps=15",), early):
        ended = pruned_after(9 if words == early else 2, train_alone, *SHORT, *words)
        assert ended.status == "completed"
        assert ended.curve("loss/test")


def test_asked_for_an_epoch_that_is_behind_it_pauses_where_it_is(train_alone: TrainAlone) -> None:
    first = pruned_after(2, train_alone, *SHORT, "epochs=3")
    again = pruned_after(1, train_alone, *SHORT, "epochs=3", source=first.paths.last)
    assert (again.status, len(again.result["epoch_s"])) == ("pruned", 2)
    assert again.result["metrics"] == first.result["metrics"]


def test_what_is_stopped_within_the_epoch_is_interrupted(train_alone: TrainAlone) -> None:
    def stop(run: Run) -> None:
        run.until_epoch = 2
        run.agreement._asked_to_stop = lambda: run.position.step >= 15

    assert train_alone(*SHORT, "epochs=3", before=stop).status == "interrupted"


FEW = ("dataset.train_limit=384", "tensorboard.images=false", "log_every=2")
MIXTURES = {
    "mixup, average, parts, groups, plateau, early stop, class weights, a fold": (
        *as_typed("mixup=0.4 ema=0.8 gradient_accumulation=2 model.hidden=[32] model.dropout=0.2"),
        *as_typed("dataset.folds=3 dataset.fold=1 epochs=9 seed=7 task.class_weights=balanced"),
        *as_typed("scheduler=plateau scheduler.patience=0 scheduler.min_delta=0.05"),
        "scheduler.metric=accuracy/val",
        "early_stop={metric: accuracy/val, patience: 2, min_delta: 0.03}",
        "optimizer.groups=[{match: '^3', lr_scale: 0.1, weight_decay: 0.1}]",
    ),
    "cutmix, parts, transforms, balanced sampling, a callback": (
        *as_typed("cutmix=1.0 gradient_accumulation=2 dataset.sampling=balanced drop_last=false"),
        *as_typed("epochs=2 threads=1 model.hidden=[32]"),
        "dataset.transforms=[{_target_: torchvision.transforms.v2.RandAugment, num_ops: 1}]",
        with_callbacks("Busy"),
    ),
    "a task with a state, an optimizer that trains at other weights": (
        *as_typed("~task +task._target_=tests.worker.stateful.Saved objective=loss/val epochs=3"),
        "model.hidden=[32]",
        "~optimizer",
        "+optimizer={_target_: tests.worker.odd_optimizers.Toggled, lr: 0.05}",
    ),
    "muon, a schedule of one's own, both clips, frozen parameters": (
        *as_typed("optimizer=muon optimizer.lr=0.01 model.hidden=[16,16] model.dropout=0.2"),
        *as_typed("gradient_clip=1.0 gradient_clip_value=0.05 epochs=3 freeze=['1.bias']"),
        "scheduler={_target_: torch.optim.lr_scheduler.PolynomialLR, total_iters: 9,"
        " interval: step}",
    ),
}


@pytest.mark.parametrize("name", common(MIXTURES, "mixup"))
def test_a_mixture_goes_on_to_the_same_bits(name: str, train_alone: TrainAlone) -> None:
    settings = (*FEW, *MIXTURES[name])
    whole = train_alone(*settings, name="whole")
    step = whole.run.position.steps_per_epoch + 2
    again = stopped_and_resumed(train_alone, *settings, step=step)
    assert_same(again, whole)
    assert again.result["stopped_early"] == whole.result["stopped_early"]
    assert on_cards.ON or bool(whole.result["stopped_early"]) == ("early stop" in name)


THREES = ("dataset.train_limit=320", "batch_size=32", "log_every=3")


def _draws(run: Run) -> None:
    """Let each evaluation draw random numbers, as a custom model or metric may."""

    def draw(module: nn.Module, *_: object) -> None:
        if not module.training:
            torch.rand(1)

    run.learner.module.register_forward_hook(draw)


@pytest.mark.parametrize(
    "words",
    [as_typed("model=convnet model.dropout=0.3 ema=0.9 epochs=2"), (*TOGGLED, "epochs=2")],
    ids=["batch norm, dropout and an average", "an optimizer that trains at other weights"],
)
def test_evaluation_leaves_training_alone(words: tuple[str, ...], train_alone: TrainAlone) -> None:
    often, never = (
        train_alone(*THREES, *words, f"eval_every_steps={steps}", name=f"{steps}", before=_draws)
        for steps in (4, 99)
    )
    assert [step for step, _ in often.curve("loss/val")] == [4, 8, 12, 16, 20]
    assert [step for step, _ in never.curve("loss/val")] == [20]
    for tag in ("loss/train", "accuracy/train", "lr"):
        assert often.curve(tag) == never.curve(tag)
    assert {*never.curve("running/loss")} < {*often.curve("running/loss")}
    states = [done.state() for done in (often, never)]
    for key in ("model", "optimizer", "workers"):
        assert same(*(state[key] for state in states)), key
    assert often.curve("loss/val")[-1] == never.curve("loss/val")[-1]


def test_any_number_of_workers_evaluates_the_same(train_together: TrainTogether) -> None:
    words = (*THREES, *as_typed("epochs=2 eval_every_steps=3 scheduler=plateau"))
    words = (*words, *as_typed("scheduler.patience=0 scheduler.min_delta=0.4 scheduler.cooldown=1"))
    one, two = (train_together(size, *words, name=f"{size}") for size in (1, 2))
    for tag in ("accuracy/val", "loss/val", "lr", "loss/train"):
        steps, values = zip(*one.curve(tag), strict=True)
        assert tuple(step for step, _ in two.curve(tag)) == steps
        assert [value for _, value in two.curve(tag)] == pytest.approx(values, abs=1e-3), tag
    rates = [0.05] * 5 + [0.005] * 2 + [0.0005]
    assert [lr for _, lr in one.curve("lr")] == pytest.approx(rates), "it counts evaluations"


def _ticking(run: Run) -> None:
    """Let each step take ten seconds, by the clock of training."""
    seconds, note = [0.0], run._note_step

    def tick() -> None:
        seconds[0] += 10
        note()

    run.history._clock = lambda: seconds[0]
    run._note_step = tick  # type: ignore[method-assign]


def test_minutes_decide(train_alone: TrainAlone, configured: Configured, tmp_path: Path) -> None:
    """The end comes within an epoch, or with one, where no evaluation is due."""
    words = (*SHORT, *as_typed("epochs=9 eval_every_minutes=0.45 model.dropout=0.2"))
    at_once = train_alone(*words, "max_steps=26", name="at_once", before=_ticking)
    for minutes, steps in (("1.95", [3, 6, 9, 12]), ("1.6", [3, 6, 9, 10])):
        end, paths = f"max_minutes={minutes}", RunPaths(tmp_path / minutes)
        short = train_alone(*words, end, name=minutes, before=_ticking)
        assert [step for step, _ in short.curve("loss/val")] == steps
        assert (short.status, short.result["steps"]) == ("completed", steps[-1])
        assert short.result["ended_by"] == "max_minutes"
        assert len(short.curve("loss/test")) == 1
        points, epoch_s = short.points, short.result["epoch_s"]
        again = _longer(train_alone, configured, paths, *words, end)
        assert (again.status, again.points) == ("completed", points), "nothing is left to train"
        assert again.result["epoch_s"] == epoch_s
        longer = _longer(train_alone, configured, paths, *words, "max_steps=26")
        states = [run.state() for run in (longer, at_once)]
        for key in ("model", "optimizer", "workers", "position"):
            assert same(*(state[key] for state in states)), key
        assert longer.curve("loss/train") == at_once.curve("loss/train")


def test_no_step_left(train_alone: TrainAlone, configured: Configured, tmp_path: Path) -> None:
    words = (*SHORT, *as_typed("epochs=2 eval_every_steps=2 log_every=99"))
    enough = "early_stop={metric: loss/val, threshold: 9}"
    rates = train_alone(*words, enough, name="run").curve("lr")
    again = _longer(
        train_alone, configured, RunPaths(tmp_path / "run"), *words, enough.replace("9", "8")
    )
    assert rates == again.curve("lr")
    assert rates[0][1] > 0


def test_the_best_evaluations_keep_their_checkpoints(train_alone: TrainAlone) -> None:
    words = (*THREES, *as_typed("epochs=2 eval_every_steps=2 checkpoint.keep_best=3"))
    done = train_alone(*words, "objective=loss/val", "optimizer.lr=0.6")
    losses = dict(done.curve("loss/val"))
    best, *others = sorted(losses, key=lambda step: losses[step])[:3]
    assert done.result["best"]["step"] == best
    names = {path.name for path in done.run.paths.checkpoints.glob("best*.safetensors")}
    assert names == {"best.safetensors", *(f"best-{step}.safetensors" for step in others)}
    for step in (best, *others):
        found = checkpoint_named("weights", "RUN", done.folder, f"{step}").state
        assert (found["position"]["step"], found["evaluated"]["value"]) == (step, losses[step])


KILLED = (
    *as_typed("epochs=3 dataset.train_limit=640 model.dropout=0.3 log_every=1 threads=1"),
    *as_typed("eval_every_steps=7 scheduler=plateau scheduler.patience=0 optimizer.lr=0.3"),
    *as_typed("checkpoint.every_steps=6 checkpoint.every_epochs=null checkpoint.keep_best=2"),
    "early_stop={metric: loss/val, patience: 5, min_delta: 0.2}",
)


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_after_an_evaluation_goes_on_to_the_same_bits(
    workers: int, tmp_path: Path, trained: TrainInWorkers, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*KILLED, f"world_size={workers}")
    kill_at(tmp_path / "killed", words, 14, EXPT_FAULT="0:15:hang")
    resumed, whole_run = trained("resume=auto", name="killed"), trained(*words, name="whole")
    assert resumed.result["resumed_from"]["step"] % 10
    assert_equal(resumed, whole_run)
    _assert_same(resumed, whole_run)
    assert resumed.result["best"]["step"] % 10, "it is within an epoch"
    measured = expt.evaluate(resumed.folder, split="val", world_size=1)
    best = resumed.result["best"]
    assert measured["accuracy/val"] == best["value"]
    (record,) = resumed.folder.glob("evaluations/*/result.json")
    assert json.loads(record.read_text())["evaluation_of"]["step"] == best["step"]


@pytest.mark.parametrize(
    "more",
    [
        ("scheduler=plateau", "scheduler.patience=0", "epochs=3"),
        ("eval_every_steps=4", "model.dropout=0.2", "epochs=2"),
        ("epochs=1", "model.dropout=0.2"),
        ("max_steps=7", "eval_every_steps=7"),
        ("max_steps=7",),
    ],
    ids=["epochs", "steps", "last epoch", "last step", "end"],
)
def test_an_evaluation_that_fails_costs_no_training(
    more: tuple[str, ...], train_alone: TrainAlone, configured: Configured, monkeypatch: Patch
) -> None:
    """The first of an attempt: later ones run the same code."""
    monkeypatch.setattr(worker_run, "LONG_S", -1.0)
    words = (*SHORT, *more)

    def fail(module: nn.Module, _: object) -> None:
        if not module.training:
            raise ValueError("an error in code that only evaluates")

    def failing(run: Run) -> None:
        run.learner.module.register_forward_pre_hook(fail)

    whole = train_alone(*words, name="whole")
    with pytest.raises(ValueError, match="only evaluates"):
        train_alone(*words, name="failed", before=failing)
    paths = RunPaths(whole.folder.with_name("failed"))
    create_result(paths, may_exist=True)
    assert checkpoint.load(paths.last)["position"]["step"] == whole.curve("loss/val")[0][0]
    assert_same(_longer(train_alone, configured, paths, *words), whole)


def test_a_long_evaluation_that_is_killed_costs_no_training(
    train_alone: TrainAlone, configured: Configured, monkeypatch: Patch
) -> None:
    """Also a later one of an attempt; of each step one checkpoint is kept."""
    monkeypatch.setattr(worker_run, "LONG_S", -1.0)
    monkeypatch.setattr(signals, "IMPATIENT_S", -1.0)
    words = (*SHORT, "eval_every_steps=4", "epochs=2", "checkpoint.keep=2")
    whole = train_alone(*words, name="whole")
    kept = candidates(RunPaths(whole.folder).last)
    assert len({checkpoint.load(file)["position"]["step"] for file in kept}) == len(kept) == 3

    def failing(run: Run) -> None:
        def fail(module: nn.Module, _: object) -> None:
            if not module.training and run.history.evaluations == 2:
                raise KeyboardInterrupt

        run.learner.module.register_forward_pre_hook(fail)

    with pytest.raises(KeyboardInterrupt):
        train_alone(*words, name="killed", before=failing)
    paths = RunPaths(whole.folder.with_name("killed"))
    create_result(paths, may_exist=True)
    assert checkpoint.load(paths.last)["position"]["step"] == whole.curve("loss/val")[1][0]
    assert_same(_longer(train_alone, configured, paths, *words), whole)
