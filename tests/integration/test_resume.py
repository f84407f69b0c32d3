"""A killed run resumes exactly; damaged checkpoints and other experiments are refused."""

import io
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import expt
from expt.command.report import Found, parse, report
from expt.command.rerun import config_at_start
from expt.errors import ConfigError, RunFailed
from expt.runs import checkpoint
from expt.runs.paths import RunPaths, is_held
from expt.runs.result import device_s, read_result, result_of_any
from expt.runs.view.text import Console
from scripts.stress import carried
from tests.conftest import Trained
from tests.facade import Capture, Patch, RunFolder, as_typed, same, start
from tests.faults.running import wait_until

# scripts/stress_resume asks for more, and other seeds
KILLS = int(os.environ.get("EXPT_KILLS", "3"))
SEED = int(os.environ.get("EXPT_SEED", "0"))
OFTEN = ("log_every=2", "checkpoint.every_steps=7", "threads=1")
CASES = {
    "mlp with dropout, 2 workers": "model.dropout=0.3 optimizer=adam epochs=3 world_size=2",
    "a task with state, samples from an open file, 3 workers with readers": (
        "task=warmed_up dataset=open_file dataset.folder=. dataset.num_workers=2 batch_size=48 "
        "epochs=3 world_size=3"
    ),
    "convnet with batch norm and augmentation, 1 worker": (
        "model=convnet model.dropout=0.2 epochs=3 world_size=1 dataset.augment.crop_padding=1 "
        "dataset.augment.flip=true dataset.augment.cutout=2"
    ),
    "accumulation, 2 workers": "model=convnet gradient_accumulation=2 epochs=3 world_size=2",
    "convnet with augmentation and grouped batch norm, 2 workers": (
        "model=convnet epochs=3 world_size=2 batch_norm=groups dataset.augment.crop_padding=1 "
        "dataset.augment.cutout=2"
    ),
    "mlp, 1 worker": "model.dropout=0.5 scheduler=one_cycle epochs=3 world_size=1",
}
FEW = ("epochs=3", "dataset.train_limit=640", "world_size=1", "log_every=2", "threads=1")


@pytest.fixture(scope="module")
def run_of_few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few") / "run"
    return expt.run(*FEW, f"hydra.run.dir='{folder}'").folder


@pytest.fixture
def few(run_of_few: Path, tmp_path: Path) -> RunFolder:
    """A copy of a run with these settings, in tmp_path/run."""
    return RunFolder(shutil.copytree(run_of_few, tmp_path / "run"))


def assert_equal(first: RunFolder, second: RunFolder) -> None:
    assert first.points == second.points
    for name in ("last", "best"):
        states = [run.state(name) for run in (first, second)]
        for key in ("model", "optimizer", "scheduler", "scaler", "position", "workers", "best"):
            assert same(states[0][key], states[1][key]), (name, key)


def kill_at(folder: Path, arguments: tuple[str, ...], step: int, **extra: str) -> None:
    """Begin the run in `folder`, and kill the driver with its workers at `step`."""
    process = start(*arguments, f"hydra.run.dir={folder}", cwd=folder.parent, **extra)
    metrics, last = folder / "metrics.jsonl", folder / "checkpoints/last.safetensors"
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if last.exists() and f'"step": {step},' in metrics.read_text():
            break
        time.sleep(0.005)  # the workers need the core
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not is_held(RunPaths(folder)))  # a worker may write a little longer


@pytest.mark.parametrize(
    "number", [SEED, *(pytest.param(SEED + n, marks=pytest.mark.slow) for n in range(1, KILLS))]
)
def test_a_killed_run_goes_on_to_the_same_bits(
    number: int, tmp_path: Path, trained: Trained, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    carried.write(tmp_path)
    name, words = list(CASES.items())[number % len(CASES)]
    arguments = as_typed(words)
    step = 2 * random.Random(number).randrange(4, 26)
    kill_at(tmp_path / "killed", (*arguments, *OFTEN), step)
    spent_s = device_s(result_of_any(RunPaths(tmp_path / "killed")))
    resumed = trained("resume=auto", name="killed")
    whole = trained(*arguments, *OFTEN, name="whole")
    assert resumed.result["attempts"] == 2
    assert resumed.result["resumed_from"]["step"] > 0
    assert resumed.result["device_s_before"] == spent_s
    assert_equal(resumed, whole)
    events = EventAccumulator(str(resumed.folder), size_guidance={"scalars": 0}).Reload()
    drawn = [(point.step, point.value) for point in events.Scalars("running/loss")]
    assert drawn == [(at, pytest.approx(value)) for at, value in whole.curve("running/loss")], name


def test_another_number_of_workers_follows_the_same_curve(tmp_path: Path, trained: Trained) -> None:
    settings = as_typed("model=mlp epochs=2 log_every=1 checkpoint.every_steps=3 threads=1")
    settings += ("dataset.train_limit=320",)
    half = trained(*settings, "world_size=1", "max_steps=7", name="one")
    resumed = trained(f"resume={half.folder}", *settings, "world_size=2", name="two")
    whole = trained(*settings, "world_size=1", name="whole")
    assert resumed.result["resumed_from"]["step"] == 7
    curve = resumed.curve("running/loss")
    assert len(curve) == 10
    for mine, other in zip(curve, whole.curve("running/loss"), strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("damage", ["flipped", pytest.param("garbage", marks=pytest.mark.slow)])
def test_damaged_is_skipped(damage: str, few: RunFolder, trained: Trained, capfd: Capture) -> None:
    run = few
    last, before = run.paths.last, run.points
    content = bytearray(last.read_bytes())
    weight = next(iter(checkpoint.load(last)["model"].values()))
    content[content.index(weight.numpy().tobytes())] ^= 1
    last.unlink()
    last.write_bytes(content if damage == "flipped" else b"x" * 99)
    with run.paths.metrics.open("ab") as curve:
        curve.write(b"\0" * 300)  # as after a power cut
    resumed = trained("resume=auto")
    assert f"set aside as {last}.corrupt" in capfd.readouterr().err
    assert resumed.result["resumed_from"]["checkpoint"].endswith("last-1.safetensors")
    assert resumed.points == before


def test_another_experiment_is_refused(tmp_path: Path, few: RunFolder, trained: Trained) -> None:
    before = few.result
    with pytest.raises(
        ConfigError, match=r"(?s)batch_size=32: .* has batch_size=64.*model=convnet"
    ):
        trained("resume=auto", "model=convnet", "batch_size=32")
    by = rf"hydra\.run\.dir={few.folder} resume=auto$"
    with pytest.raises(
        ConfigError, match=rf"dataset\.val_fraction.*; with its own settings .*{by}"
    ):
        trained(f"resume={few.folder}", *FEW, "dataset.val_fraction=0.2", name="new")
    with pytest.raises(ConfigError, match="no checkpoint"):
        trained(f"resume={tmp_path}", *FEW, name="newer")
    assert few.result == before


def test_a_file_is_gone_on_from_in_a_new_folder(few: RunFolder, trained: Trained) -> None:
    run = few
    source = f"{run.folder}/checkpoints/last-1.safetensors"
    resumed = trained(f"resume={source}", *FEW, name="new")
    assert_equal(resumed, run)
    tags = EventAccumulator(str(resumed.folder)).Reload().Scalars("loss/val")
    assert [point.step for point in tags] == [10, 20, 30]
    for epochs in (4, 5):  # a rerun begins from the file, too
        longer = trained("resume=auto", f"epochs={epochs}", name="new")
        assert config_at_start(read_result(longer.paths), longer.paths).resume == source


def test_a_failed_run_of_a_sweep_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    sweep = ("seed=0,1", *FEW, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    first, _ = expt.sweep(*sweep)
    last = RunPaths(first.folder).last
    shutil.copy(last.with_name("last-1.safetensors"), last)
    record = first.folder / "result.json"
    record.write_text(record.read_text().replace('"status": "completed"', '"status": "failed"'))
    whole = RunFolder(first.folder).points
    again, _ = expt.sweep(*sweep)
    assert (again.record["resumed_from"]["step"], again.record["attempts"]) == (20, 2)
    assert RunFolder(first.folder).points == whole


SHORT = as_typed(
    "dataset.train_limit=320 batch_size=32 log_every=5 tensorboard.images=false checkpoint.keep=9"
)
WORDS = (
    *SHORT,
    *as_typed(
        "optimizer=adam optimizer.lr=0.002 model.dropout=0.3 epochs=3 world_size=2 threads=1"
    ),
)


def _state(run: RunFolder) -> dict[str, object]:
    state = run.state()
    return {key: state[key] for key in ("model", "optimizer", "workers")}


@pytest.mark.slow
def test_killed_fork_of_a_deleted_parent_resumes(tmp_path: Path, trained: Trained) -> None:
    parent = trained(*WORDS, name="parent")
    fork, identity = f"fork={parent.folder}@10", parent.result["identity"]
    unchanged = trained(fork, name="unchanged")
    assert same(_state(unchanged), _state(parent)), "to the bit, its settings not typed again"
    assert not unchanged.paths.forked.exists(), "it has checkpoints of its own"
    whole = trained(fork, "optimizer.lr=0.01", "epochs=4", name="whole")
    with pytest.raises(RunFailed):
        trained(
            fork,
            *as_typed("optimizer.lr=0.01 epochs=4 +hydra.job.env_set.EXPT_FAULT='1:13:raise'"),
            name="killed",
        )
    copied = shutil.copytree(parent.folder, tmp_path / "copied")
    shutil.rmtree(parent.folder)
    killed = trained("resume=auto", name="killed")
    assert same(_state(killed), _state(whole))
    assert killed.points == whole.points
    moved = trained(f"fork={copied}@10", "optimizer.lr=0.01", "epochs=4", name="moved")
    identities = {run.result["identity"] for run in (killed, whole, moved)}
    assert len(identities) == 1, "wherever the parent lies"
    assert identities.isdisjoint({identity, unchanged.result["identity"]})
    told = killed.result["forked_from"]
    assert (told["step"], told["epoch"]) == (10, 1)
    assert told["changed"] == {"optimizer.lr": [0.002, 0.01], "epochs": [3, 4]}
    drawn = EventAccumulator(str(killed.folder)).Reload()
    assert [point.step for point in drawn.Scalars("loss/val")] == [10, 20, 30, 40], "one curve"
    again = trained(f"fork={whole.folder}@20", "optimizer.lr=0.03", name="again")
    assert again.result["config"]["epochs"] == 4
    console = Console(file=io.StringIO(), width=200)
    asked = parse([str(tmp_path)])
    report(console, asked, Found.below(asked))
    tree = console.file.getvalue().partition("forks ")[2]  # type: ignore[attr-defined]
    assert tree.lstrip().startswith(f"{tmp_path}/copied  accuracy/val"), "the parent, by identity"
    assert f"├── {tmp_path}/killed  at step 10: epochs 3 -> 4, optimizer.lr 0.002 -> 0.01" in tree
    assert f"    └── {tmp_path}/again  at step 20: optimizer.lr 0.01 -> 0.03" in tree
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        trained(fork, name="late")


def test_sweep_of_forks_is_known_without_parents(tmp_path: Path, trained: Trained) -> None:
    alone = (*SHORT, "world_size=1", "epochs=2")
    small = trained(*alone, "model.hidden=[8]", name="small").folder
    other = trained(*alone, "optimizer=adam", "optimizer.betas=[0.8,0.9]", name="adam").folder
    forks = f"fork={small}@epoch:1,{other}@10"
    sweep = (forks, "optimizer.lr=0.01,0.02", f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    found = [run.record for run in expt.sweep(*sweep)]
    configs = [record["config"] for record in found]
    assert [config["model"]["hidden"] for config in configs] == [[8], [8], [256], [256]]
    assert [config["optimizer"]["lr"] for config in configs] == [0.01, 0.02] * 2
    assert configs[2]["optimizer"]["betas"] == [0.8, 0.9], "each has its own parent's settings"
    shutil.rmtree(small)
    assert [run.record for run in expt.sweep(*sweep)] == found


def test_a_fork_that_is_resumed_shows_what_differs_now(tmp_path: Path) -> None:
    given = ("model=mlp", "world_size=1", "dataset.train_limit=128")
    parent = expt.run(*given, "epochs=1", folder=tmp_path / "parent")
    fork = (*given, f"fork='{parent.folder}'", "optimizer.lr=0.02")
    expt.run(*fork, "epochs=2", folder=tmp_path / "fork")
    longer = expt.run(*fork, "epochs=3", "resume=auto", folder=tmp_path / "fork")
    assert longer.record["forked_from"]["changed"]["epochs"] == [1, 3]
    lr = parent.config["optimizer"]["lr"]
    assert longer.record["forked_from"]["changed"]["optimizer.lr"] == [lr, 0.02]
