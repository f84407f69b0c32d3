"""Mixed precision on a soft GPU: the numbers of a loop by hand on the same card."""

import json
from pathlib import Path

import pytest

from tests.cards.plain import BATCH, CLIP, LR, MOMENTUM, SEED, STEPS
from tests.cards.test_numbers import WITHIN
from tests.conftest import Cards, Trained
from tests.facade import NO_PICTURES, as_typed, python

BY_HAND = """
import json, sys
from tests.cards import plain
print(json.dumps(plain.losses(*sys.argv[1:])))
"""
WORDS = as_typed(
    f"gpus=1 batch_size={BATCH} max_steps={STEPS} seed={SEED} optimizer.lr={LR} model.dropout=0 "
    f"optimizer.momentum={MOMENTUM} gradient_clip={CLIP} log_every=1 threads=1"
)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_losses_are_those_of_a_loop_by_hand(
    model: str, amp: str, cards: Cards, trained: Trained, tmp_path: Path
) -> None:
    cards()
    done = python(BY_HAND, model, amp, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *expected, of_validation = json.loads(done.stdout)
    words = (*WORDS, NO_PICTURES, f"model={model}")
    run, exact = trained(*words, f"amp={amp}"), trained(*words, name="exact")
    found, others = ([loss for _, loss in each.curve("running/loss")] for each in (run, exact))
    off = max(abs(mine - other) for mine, other in zip(found, expected, strict=True))
    print(f"off by {off:.1e} in running/loss, of {len(found)} values")
    assert off < WITHIN
    step, loss = run.curve("loss/val")[-1]
    assert step == STEPS
    assert loss == pytest.approx(of_validation, abs=WITHIN)
    assert found != pytest.approx(others, abs=10 * WITHIN), "it was in full precision"
