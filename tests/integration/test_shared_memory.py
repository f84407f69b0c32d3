"""Gradients averaged in shared memory are those that gloo would give, and nothing of it stays
behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Trained

CURVE = ("max_steps=30", "log_every=1", "threads=1")


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_curve_is_gloos(world_size: int, trained: Trained) -> None:
    size = f"world_size={world_size}"
    shared = trained(*CURVE, size, name="shared").curve("running/loss")
    gloo = trained(*CURVE, size, "ddp.shared_memory=false", name="gloo").curve("running/loss")
    assert len(shared) == 30
    if world_size == 2:
        assert shared == gloo  # a sum of two does not depend on their order
    for one, other in zip(shared, gloo, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_gradients_larger_than_a_slot_travel_in_parts(trained: Trained) -> None:
    # 700,000 parameters; a slot takes 262,144.
    wide = ("model.hidden=[1500,400]", "max_steps=3", "log_every=1")
    shared = trained(*wide, name="shared").curve("running/loss")
    assert shared == trained(*wide, "ddp.shared_memory=false", name="gloo").curve("running/loss")


def test_no_name_is_left_in_shared_memory(trained: Trained) -> None:
    before = set(Path("/dev/shm").glob("expt-*"))
    trained("epochs=1")
    assert set(Path("/dev/shm").glob("expt-*")) == before
