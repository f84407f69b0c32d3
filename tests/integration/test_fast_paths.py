"""What makes a step fast does not change what it computes."""

from __future__ import annotations

import pytest

from tests.conftest import Trained, as_typed

PLAIN = as_typed("channels_last=false ddp.shared_memory=false compile=false amp=false")
FAST = ("channels_last=true", "ddp.shared_memory=true")


def test_the_loss_of_each_step_is_that_of_the_plain_path(trained: Trained) -> None:
    words = ("model=convnet", "max_steps=10", "log_every=1", "threads=1")
    fast = trained(*words, *FAST, name="fast").curve("running/loss")
    plain = trained(*words, *PLAIN, name="plain").curve("running/loss")
    assert len(plain) == 10
    for one, other in zip(fast, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_curve_is_gloos(trained: Trained) -> None:
    """A sum of two does not depend on their order."""
    words = ("world_size=2", "max_steps=20", "log_every=1", "threads=1")
    shared = trained(*words, name="shared").curve("running/loss")
    gloo = trained(*words, "ddp.shared_memory=false", name="gloo").curve("running/loss")
    assert len(shared) == 20
    assert shared == gloo
