"""What saves memory changes no number of a run, whatever else it has."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import as_typed
from tests.worker.conftest import TrainTogether

RUN = (
    *as_typed("model=transformer task=language_model dataset=text dataset.context=16"),
    *as_typed("optimizer=adamw epochs=1"),
)
SMALL = (
    *as_typed("model.layers=2 model.width=16 model.heads=2 model.dropout=0.2 max_steps=4"),
    *as_typed("log_every=1"),
)
MORE = ("ema=0.9", "gradient_accumulation=2", "batch_size=16", "gradient_clip=0.1", "amp=bf16")


def test_two_workers_with_checkpointed_activations(
    train_together: TrainTogether, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 60)
    words = (*RUN, *SMALL, *MORE, f"dataset.root='{tmp_path / 'book.txt'}'")
    kept = train_together(2, *words, name="kept")
    again = train_together(2, *words, "activation_checkpointing=auto", "offload=cpu", name="again")
    assert again.points == kept.points
    assert len(kept.curve("running/loss")) == 4
