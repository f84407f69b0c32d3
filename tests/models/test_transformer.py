"""The decoder: what a token may see, and what its keys change."""

from typing import Any

import pytest
import torch

from expt.config import groups
from expt.errors import ConfigError, DataError
from expt.models.build import build
from expt.models.transformer import Transformer, rotate, rotations
from tests import models as features

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
    assert torch.allclose(model(tokens[:, :3]), logits[:, :3], atol=1e-6), (
        "a shorter sample is the longer one's start"
    )


LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "bias": False}


def test_a_decoder_as_llama_is() -> None:
    model, tokens = small(**LLAMA), torch.tensor([[1, 2, 3, 4, 5]])
    logits = model(tokens)
    changed = model(tokens.index_fill(1, torch.tensor([3]), 6))
    assert torch.allclose(changed[:, :3], logits[:, :3], atol=1e-6), (
        "it sees what comes before alone"
    )
    assert not torch.allclose(changed[:, 3:], logits[:, 3:], atol=1e-3)
    assert model(torch.zeros(1, 99, dtype=torch.int64)).shape == (1, 99, 7), (
        "its positions have no end"
    )
    names = set(model.state_dict())
    assert not any("bias" in name or name.startswith("positions") for name in names)
    assert names.isdisjoint(model._buffers), "DistributedDataParallel would send them in each step"
    gelu, gated = (sum(p.numel() for p in Transformer(vocab_size=7, context=6, width=192, mlp=mlp,
        bias=False)
                       .parameters()) for mlp in ("gelu", "swiglu"))  # fmt: skip
    assert gelu == gated


def test_rotary_positions_are_a_matter_of_distance() -> None:
    rotation = rotations(9, 8, torch.device("cpu"))
    query, key = torch.randn(2, 8)
    queries, keys = (rotate(each.expand(1, 9, 8), rotation)[0] for each in (query, key))
    scores = queries @ keys.T
    assert torch.allclose(scores[5, 3], scores[8, 6], atol=1e-5)
    assert not torch.allclose(scores[5, 3], scores[5, 2], atol=1e-3)
    assert torch.allclose(queries.norm(dim=1), query.norm().expand(9)), "turned, not stretched"
    assert torch.equal(rotate(query.expand(1, 9, 8), rotation)[0, 0], query), (
        "the first is where it was"
    )
    assert rotate(torch.zeros(1, 9, 8, dtype=torch.bfloat16), rotation).dtype == torch.bfloat16


@pytest.mark.parametrize(("size", "vocab_size", "millions"), [
    ("400k", 256, 0.446), ("1m", 256, 1.04), ("10m", 256, 10.8), ("124m", 50257, 124.4), ("350m",
        50257, 354.8),
    ("1b", 50257, 1011.4),
])  # fmt: skip
def test_a_size_is_what_it_is_called(size: str, vocab_size: int, millions: float) -> None:
    context = 1024 if vocab_size > 256 else 128
    settings: dict[str, Any] = {**groups.TRANSFORMER_SIZES[size]}
    with torch.device("meta"):
        model = Transformer(vocab_size=vocab_size, context=context, **settings)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.005
    )


def test_the_numbers_are_those_of_before_there_was_a_choice() -> None:
    torch.manual_seed(0)
    model = Transformer(vocab_size=50, context=16, layers=2, heads=2, width=32, dropout=0.1)
    drawn = model(torch.arange(48).view(3, 16)).double()
    assert (drawn.sum().item(), drawn.square().sum().item()) == pytest.approx(SUMS, rel=1e-5)
    expected = ["tokens.weight", "positions.weight", "blocks.0.attention_norm.weight"]
    assert list(model.state_dict())[:3] == expected


SUMS = (18.408584, 38.454398)
"""Of logits, by the version before `norm`, `positions`, `mlp` and `bias`."""


def test_a_tied_head_has_the_embeddings_weights() -> None:
    tied, own = small(), small(tied=False)
    assert tied.head.weight is tied.tokens.weight
    assert own.head.weight is not own.tokens.weight
    assert (
        sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in tied.parameters())
        == 7 * 8
    )


def test_dropout_is_for_training_alone() -> None:
    model, tokens = small(dropout=0.5), torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(DataError, match="a sample has 7 tokens, and the model takes 6; cut"):
        small()(torch.zeros(1, 7, dtype=torch.int64))


def test_a_model_and_data_that_do_not_fit_are_named() -> None:
    decoder = groups.Transformer(
        name="transformer", layers=1, heads=1, width=4, dropout=0.0, tied=True
    )
    tokens, image = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 1, 8, 8)
    built = build(decoder, DEFAULT, features.tokens(7, 6), tokens)
    assert built(tokens).shape == (1, 6, 7)
    with pytest.raises(ConfigError, match="model=transformer: needs vocab_size, context"):
        build(decoder, DEFAULT, features.images(1, (8, 8), 10), image)
    mlp = groups.MLP(name="mlp", hidden=(4,), dropout=0.0)
    with pytest.raises(ConfigError, match="model=mlp: needs channels, image_size, num_classes"):
        build(mlp, DEFAULT, features.tokens(7, 6), tokens)
