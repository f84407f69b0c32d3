"""A run that has ended is trained longer: it is then what it would have been at once, to the
bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

import expt
from expt.command.rerun import NOT_REPEATED
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from tests.conftest import Configured
from tests.conftest import Trained as TrainInWorkers
from tests.facade import Capture, RunFolder, as_typed, continued, same
from tests.integration.test_resume import kill_at
from tests.worker.conftest import TrainAlone, Trained

SHORT = ("dataset.train_limit=320", "log_every=2", "optimizer.lr=0.2", "batch_size=32")
ALL_AT_ONCE = (
    *as_typed("optimizer=adam model.dropout=0.3 ema=0.9 gradient_accumulation=2 mixup=0.2"),
)
AUGMENTED = (
    "dataset.augment.crop_padding=1",
    "dataset.augment.flip=true",
    "dataset.augment.cutout=2",
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
    """What TensorBoard shows of a run: each curve, the steps of pictures, and what HPARAMS tells of
    it."""
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
    told = (
        "best",
        "objective",
        "stopped_early",
        "steps",
        "total_steps",
        "identity",
        "seedless_identity",
    )
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


@pytest.mark.parametrize("name", CASES)
def test_what_is_trained_longer_is_what_it_would_have_been_at_once(
    name: str,
    train_alone: TrainAlone,
    configured: Configured,
    tmp_path: Path,
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
    stepped = (*words, "scheduler=step", "scheduler.every_epochs=1.5")
    sweep = (*stepped, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    short = expt.sweep("seed=0,1", "epochs=2", *sweep)
    before = {
        path: path.read_bytes() for run in short for path in run.folder.rglob("*") if path.is_file()
    }
    longer = expt.sweep("seed=0,1", "epochs=4", "resume=auto", *sweep)
    captured = capfd.readouterr()
    assert "grid" not in captured.err
    assert "resume" not in captured.out, "no column"
    assert {path: path.read_bytes() for path in before} == before
    assert len({run.folder for run in (*short, *longer)}) == 4
    assert [run.record["resumed_from"]["step"] for run in longer] == [20, 20]
    at_once = trained(*stepped, "seed=1", "epochs=4", name="at_once")
    _assert_same(RunFolder(longer[1].folder), at_once)
    known = expt.sweep("seed=0,1", "epochs=4", *sweep)
    assert [run.record for run in known] == [run.record for run in longer], "whatever was typed"
