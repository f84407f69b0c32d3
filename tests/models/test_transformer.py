"""The decoder: what a token may see, and what its keys change."""

from __future__ import annotations

import pytest
import torch

from expt.config import groups
from expt.errors import ConfigError, DataError
from expt.models.build import build
from expt.models.transformer import Transformer

DEFAULT = groups.DefaultInit(name="default")


def small(**settings: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(vocab_size=7, context=6, layers=2, heads=2, width=8, **settings)  # type: ignore[arg-type]


def test_a_token_sees_itself_and_those_before_it() -> None:
    model, tokens = small(), torch.tensor([[1, 2, 3, 4, 5]])
    logits = model(tokens)
    assert logits.shape == (1, 5, 7)
    changed = model(tokens.index_fill(1, torch.tensor([3]), 6))
    assert torch.allclose(changed[:, :3], logits[:, :3], atol=1e-6)
    assert not torch.allclose(changed[:, 3], logits[:, 3], atol=1e-3)
    assert not torch.allclose(changed[:, 4], logits[:, 4], atol=1e-6)
    assert torch.allclose(model(tokens[:, :3]), logits[:, :3], atol=1e-6), "a shorter sample is the longer one's start"


def test_the_same_token_elsewhere_is_another() -> None:
    logits = small()(torch.tensor([[1, 1, 1]]))
    assert not torch.allclose(logits[:, 0], logits[:, 1], atol=1e-6)


def test_a_tied_head_has_the_embeddings_weights() -> None:
    tied, own = small(), small(tied=False)
    assert tied.head.weight is tied.tokens.weight
    assert own.head.weight is not own.tokens.weight
    assert sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in tied.parameters()) == 7 * 8


def test_dropout_is_for_training_alone() -> None:
    model, tokens = small(dropout=0.5), torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(DataError, match="a sample has 7 tokens, and the model takes 6; cut it, or let the dataset's"):
        small()(torch.zeros(1, 7, dtype=torch.int64))


def test_a_model_and_data_that_do_not_fit_are_named() -> None:
    decoder = groups.Transformer(name="transformer", layers=1, heads=1, width=4, dropout=0.0, tied=True)
    tokens, image = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 1, 8, 8)
    built = build(decoder, DEFAULT, {"vocab_size": 7, "context": 6, "num_classes": 3}, tokens)
    assert built(tokens).shape == (1, 6, 7)
    with pytest.raises(ConfigError, match="model=transformer: needs vocab_size, context, and the dataset has not; let"):
        build(decoder, DEFAULT, {"channels": 1, "image_size": (8, 8), "num_classes": 10}, image)
    mlp = groups.MLP(name="mlp", hidden=(4,), dropout=0.0)
    with pytest.raises(ConfigError, match="model=mlp: needs channels, image_size, num_classes, and the dataset gives"):
        build(mlp, DEFAULT, {"vocab_size": 7, "context": 6}, tokens)
