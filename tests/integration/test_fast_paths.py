"""What makes a step fast does not change what it computes."""

from __future__ import annotations

from tests.conftest import Trained


def test_the_curve_is_gloos(trained: Trained) -> None:
    """A sum of two does not depend on their order."""
    words = ("world_size=2", "max_steps=20", "log_every=1", "threads=1")
    shared = trained(*words, name="shared").curve("running/loss")
    gloo = trained(*words, "ddp.shared_memory=false", name="gloo").curve("running/loss")
    assert len(shared) == 20
    assert shared == gloo
