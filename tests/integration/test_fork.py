"""`fork=RUN@STEP` as a person types it: with the settings of the other run, also where that is gone
later."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import expt
from expt.command.report import parse, report
from expt.errors import ConfigError, RunFailed
from expt.runs.view.text import Console
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, same

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
            "optimizer.lr=0.01",
            "epochs=4",
            "+hydra.job.env_set.EXPT_FAULT='1:13:raise'",
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
    report(console, parse([str(tmp_path)]))
    tree = console.file.getvalue().partition("forks ")[2]  # type: ignore[attr-defined]
    assert tree.lstrip().startswith(f"{tmp_path}/copied  accuracy/val"), (
        "the parent, by its identity"
    )
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
