"""What makes a step fast does not change what it computes."""

from __future__ import annotations

import pytest

from tests.conftest import Trained

PLAIN = (
    "onednn=false",
    "channels_last=false",
    "ddp.shared_memory=false",
    "compile=false",
    "amp=false",
)
FAST = ("onednn=true", "channels_last=true", "ddp.shared_memory=true")


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_the_loss_of_each_step_is_that_of_the_plain_path(model: str, trained: Trained) -> None:
    words = (f"model={model}", "max_steps=10", "log_every=1", "threads=1")
    fast = trained(*words, *FAST, name="fast").curve("running/loss")
    plain = trained(*words, *PLAIN, name="plain").curve("running/loss")
    assert len(plain) == 10
    for one, other in zip(fast, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
