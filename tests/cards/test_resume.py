"""A run on soft GPUs that was killed goes on to the same bits, with dropout and in float16."""

from pathlib import Path

import pytest

from tests.cards.test_numbers import raced
from tests.conftest import Cards, Trained
from tests.facade import NO_PICTURES, as_typed
from tests.integration.test_resume import assert_equal, kill_at

WORDS = as_typed(
    "model=convnet model.dropout=0.3 optimizer=adam epochs=3 dataset.train_limit=480 log_every=1 "
    "checkpoint.every_steps=3 threads=1"
)
CASES = {
    "fp16, one card": "gpus=1 amp=fp16",
    "fp16, ddp": "gpus=2 amp=fp16",
    "fp16, fsdp": "gpus=2 amp=fp16 strategy=fsdp",
    "fsdp, sharded checkpoints": "gpus=2 strategy=fsdp checkpoint.sharded=true",
    "bf16, hsdp": "gpus=4 amp=bf16 strategy=hsdp sharding.shards=2",
    "dp": "gpus=2 strategy=dp",
    "average, states on the host": "gpus=2 ema=0.9 offload=cpu",
}
FAST = ("fp16, ddp",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_killed_run_is_exact(name: str, cards: Cards, trained: Trained, tmp_path: Path) -> None:
    words = (*WORDS, NO_PICTURES, *as_typed(CASES[name]))
    cards(poison=True, late=True)
    kill_at(tmp_path / "killed", words, step=9)
    resumed = trained("resume=auto", name="killed")
    whole = trained(*words, name="whole")
    assert resumed.result["attempts"] == 2
    assert resumed.result["resumed_from"]["step"] > 0
    assert_equal(resumed, whole)
    assert not raced(whole)
    assert not raced(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_new_memory_late_copies_are_harmless(name: str, cards: Cards, trained: Trained) -> None:
    words = (*WORDS, *as_typed(CASES[name]), "tensorboard.images=true", "epochs=2")
    cards()
    plain = trained(*words, name="plain")
    cards(poison=True, late=True)
    staged = trained(*words, name="staged")
    assert not raced(staged)
    assert_equal(plain, staged)
