"""What saves memory changes no number of a run, whatever else it has."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import as_typed
from tests.worker.conftest import TrainTogether

WORDS = as_typed(
    "model=transformer task=language_model dataset=text dataset.context=16 optimizer=adamw epochs=1"
    " model.layers=2 model.width=16 model.heads=2 model.dropout=0.2 max_steps=4 log_every=1"
    " ema=0.9 gradient_accumulation=2 batch_size=16 gradient_clip=0.1 amp=bf16"
)


def test_two_workers_with_checkpointed_activations(
    train_together: TrainTogether, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 60)
    words = (*WORDS, f"dataset.root='{tmp_path / 'book.txt'}'")
    kept = train_together(2, *words, name="kept")
    again = train_together(2, *words, "activation_checkpointing=auto", "offload=cpu", name="again")
    assert again.points == kept.points
    assert len(kept.curve("running/loss")) == 4
