"""A small GPT, from torch's own layers."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """Attention to what came before, then two layers; each added to what it is given."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.layers = nn.Sequential(*layers)

    def attention(self, x):
        all_three = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        query, key, value = all_three.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.layers(self.before_layers(x))


class GPT(nn.Module):
    """A decoder; the embeddings are also the head."""

    def __init__(self, vocab_size, context, width, heads, blocks):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = (2 * blocks) ** -0.5 if name.endswith(("out.weight", "2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return self.norm(x) @ self.tokens.weight.T
