"""compile=blocks, really compiled: same numbers and names, and runs can be resumed."""

import shutil
from pathlib import Path

import pytest
import torch

import expt
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("gcc")), reason="inductor needs a compiler"
    ),
]
MODEL = ("model=transformer", "model.layers=3", "model.width=16", "model.heads=2")
DATA = as_typed("task=language_model dataset=text dataset.context=8 batch_size=64 drop_last=false")
LENGTH = ("log_every=1", "threads=1", "optimizer=adamw", "ema=0.9")


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """Of a run of some steps, of which the last of an epoch has fewer samples."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 90)
    return (*MODEL, *DATA, *LENGTH, f"dataset.root='{tmp_path / 'text.txt'}'")


@pytest.mark.parametrize("recomputes", ["[]", "auto"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_blocks_that_are_compiled_train_as_others_do(
    strategy: str, recomputes: str, words: tuple[str, ...], trained: Trained
) -> None:
    how = f"strategy={strategy} activation_checkpointing={recomputes} world_size=2"
    words = (*words, *as_typed(how))
    plain = trained(*words, "epochs=2", name="plain")
    compiled = trained(*words, "epochs=2", "compile=blocks", name="compiled")
    for tag in ("running/loss", "loss/train", "loss/val", "loss/test"):
        points, others = compiled.curve(tag), plain.curve(tag)
        assert len(points) == len(others) > 0
        for mine, other in zip(points, others, strict=True):
            assert mine == pytest.approx(other, abs=1e-4)
    states = [run.state() for run in (compiled, plain)]
    assert states[0]["model"].keys() == states[1]["model"].keys()
    assert states[0]["ema"].keys() == states[1]["ema"].keys()
    _goes_on(compiled, words, trained)
    tokens = torch.randint(64, (1, 8))
    mine, other = (expt.load(run.folder)(tokens) for run in (compiled, plain))
    assert torch.allclose(mine, other, atol=1e-3)


def _goes_on(whole: RunFolder, words: tuple[str, ...], trained: Trained) -> None:
    """The run of one epoch, resumed for another with blocks compiled anew, is the whole one."""
    words = (*words, "compile=blocks")
    trained(*words, "epochs=1", name="resumed")
    resumed = trained(*words, "epochs=2", "resume=auto", name="resumed")
    points, others = resumed.curve("running/loss"), whole.curve("running/loss")
    assert len(points) == len(others)
    for mine, other in zip(points, others, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
