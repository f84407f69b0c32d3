"""A decoder of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import DataError

INIT_STD = 0.02
"""GPT-2's, for matrices; those that end in the residual stream have it by their number's root."""
ROTARY_BASE = 10_000.0
"""The base of rotary positions (Su et al., 2021): the longest wavelength is 2 pi times it."""
NORM_EPS = 1e-5

Norm = Literal["layer", "rms"]
MLP = Literal["gelu", "swiglu"]


class Transformer(nn.Module):
    """Logits [B, T, vocab_size] of the tokens that follow each of [B, T], T at most `context`.

    By default GPT-2 (Radford et al., 2019): learned positions, layer norms before attention and MLP
    and at the end. With norm="rms", positions="rotary", mlp="swiglu" and bias=False, Llama (Touvron
    et al., 2023); rotary positions have no end, so T may be larger there. A `tied` head has the
    weights of the token embedding.
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
        norm: Norm = "layer",
        positions: Literal["learned", "rotary"] = "learned",
        mlp: MLP = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, norm=norm, mlp=mlp, bias=bias) for _ in range(layers)
        )
        self.norm = _norm(norm, width, bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._head_width = width // heads
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("project.weight", "shrink.weight"))
                std = INIT_STD / math.sqrt(2 * layers) if is_last else INIT_STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """See the class. Raises DataError for more tokens than there are learned positions.

        Of texts that end with padding the mask is not needed: no token sees a later one.
        """
        tokens = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
        length, features, rotation = tokens.shape[1], self.tokens(tokens), None
        if self.positions is None:
            rotation = rotations(length, self._head_width, tokens.device)
        else:
            if length > (context := self.positions.num_embeddings):
                raise DataError(
                    f"a sample has {length} tokens, and the model takes {context}; cut it, or let"
                    f" the dataset's context be {length}"
                )
            features = features + self.positions(torch.arange(length, device=tokens.device))
        features = self.dropout(features)
        for block in self.blocks:
            features = block(features, rotation)
        return cast(Tensor, self.head(self.norm(features)))


class Block(nn.Module):
    """Causal attention, then an MLP, each with a residual connection."""

    def __init__(
        self, width: int, heads: int, dropout: float, *, norm: Norm, mlp: MLP, bias: bool
    ) -> None:
        super().__init__()
        hidden = 4 * width
        if mlp == "swiglu":  # its three matrices have as many weights as GELU's two, in 64s
            hidden = -(-8 * width // 3 // 64) * 64
        self.attention_norm = _norm(norm, width, bias)
        self.attention = _Attention(width, heads, dropout, bias)
        self.mlp_norm = _norm(norm, width, bias)
        self.grow = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if mlp == "swiglu" else None
        self.shrink = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, rotation: Tensor | None = None) -> Tensor:
        """[B, T, width] to the same; `rotation` as `rotations` gives it."""
        attended = features + self.dropout(self.attention(self.attention_norm(features), rotation))
        normed = self.mlp_norm(attended)
        if self.gate is None:
            hidden = functional.gelu(self.grow(normed))
        else:
            hidden = functional.silu(self.gate(normed)) * self.grow(normed)
        return cast(Tensor, attended + self.dropout(self.shrink(hidden)))


class _Attention(nn.Module):
    """Each token attends to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self._heads, self._dropout = heads, dropout

    def forward(self, features: Tensor, rotation: Tensor | None) -> Tensor:
        """[B, T, width] to the same."""
        # [B, T, 3, heads, width/heads]
        several = self.queries_keys_values(features).unflatten(-1, (3, self._heads, -1))
        queries, keys, values = several.permute(2, 0, 3, 1, 4)
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        return cast(Tensor, self.project(mixed.transpose(1, 2).flatten(2)))


def rotations(length: int, width: int, device: torch.device) -> Tensor:
    """Return cosines and sines [2, T, width/2] of the angles by which positions turn channels.

    It is computed in each forward pass: a buffer would be sent to all workers in every step.
    """
    wavelengths = ROTARY_BASE ** (
        torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    )
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] / wavelengths
    return torch.stack((angles.cos(), angles.sin()))


def rotate(channels: Tensor, rotation: Tensor) -> Tensor:
    """Turn channel i of [..., T, width] with channel i + width/2, in float32; keep the type."""
    first, second = channels.float().chunk(2, -1)
    cosines, sines = rotation
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(channels.dtype)


def _norm(kind: Norm, width: int, bias: bool) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(width, eps=NORM_EPS)
    return nn.LayerNorm(width, eps=NORM_EPS, bias=bias)
