"""A decoder of tokens."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import DataError

INIT_STD = 0.02
"""GPT-2's, of all weight matrices; those that end in the residual stream are smaller by the root of their number."""


class Transformer(nn.Module):
    """Tokens [B, T], T at most `context`, to the logits of the tokens that follow [B, T, vocab_size].

    As GPT-2 (Radford et al., 2019): learned positions, layer norms before attention and MLP and at the end. A `tied`
    head has the weights of the token embedding.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("project.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * layers) if is_last else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class. Raises DataError for more tokens than there are positions."""
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise DataError(
                f"a sample has {length} tokens, and the model takes {context}; cut it, or let the dataset's context be "
                f"{length}"
            )
        positions = self.positions(torch.arange(length, device=tokens.device))
        features = self.blocks(self.dropout(self.tokens(tokens) + positions))
        return cast(Tensor, self.head(self.norm(features)))


class _Block(nn.Module):
    """Causal attention, then an MLP, each added to what it gets."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        attended = features + self.dropout(self.attention(self.attention_norm(features)))
        hidden = functional.gelu(self.grow(self.mlp_norm(attended)))
        return cast(Tensor, attended + self.dropout(self.shrink(hidden)))


class _Attention(nn.Module):
    """Each token attends to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self._heads, self._dropout = heads, dropout

    def forward(self, features: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        several = self.queries_keys_values(features).unflatten(
            -1, (3, self._heads, -1)
        )  # [B, T, 3, heads, width/heads]
        queries, keys, values = several.permute(2, 0, 3, 1, 4)
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.project(mixed.transpose(1, 2).flatten(2)))
