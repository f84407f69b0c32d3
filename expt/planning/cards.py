"""GPUs by name: what their data sheets say, without sparsity. Numbers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expt.errors import ConfigError, did_you_mean

GIB = 2**30
CUDA_BYTES = 1 * GIB
"""Of CUDA's context, its libraries' workspaces and NCCL's buffers, which no tensor shows."""
FRAGMENTS = 0.05
"""Share of a card that the allocator can't put together."""


@dataclass(frozen=True)
class Card:
    """Of one GPU; without speeds where only its memory is known."""

    name: str
    memory_bytes: float
    bf16_flops: float = 0.0
    tf32_flops: float = 0.0
    fp32_flops: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    """To the other GPUs of the node, as an all-reduce sees it."""

    @property
    def usable_bytes(self) -> float:
        """For tensors."""
        return self.memory_bytes * (1 - FRAGMENTS) - CUDA_BYTES


def _card(
    name: str,
    gib: float,
    bf16: float,
    tf32: float,
    fp32: float,
    terabytes_per_s: float,
    link: float,
) -> Card:
    return Card(
        name, gib * GIB, bf16 * 1e12, tf32 * 1e12, fp32 * 1e12, terabytes_per_s * 1e12, link * 1e9
    )


CARDS = {
    card.name: card
    for card in (
        # GiB as the driver reports them, TFLOP/s, TB/s of memory, and GB/s: NVLink's or PCIe's of
        # what they reach.
        _card("b200", 178.0, 2250, 1125, 75, 8.0, 700),
        _card("h200", 139.8, 989, 495, 67, 4.8, 360),
        _card("h100", 79.2, 989, 495, 67, 3.35, 360),
        _card("a100-80", 79.2, 312, 156, 19.5, 2.0, 230),
        _card("a100-40", 39.4, 312, 156, 19.5, 1.55, 230),
        _card("l40s", 44.4, 362, 183, 91.6, 0.86, 20),
        _card("rtx4090", 23.5, 165, 82.6, 82.6, 1.0, 20),
        _card("rtx3090", 23.5, 71, 35.6, 35.6, 0.94, 10),
        _card("l4", 22.0, 121, 60, 30.3, 0.3, 10),
        _card("v100-32", 31.7, 125, 15.7, 15.7, 0.9, 130),
        _card("v100-16", 15.8, 125, 15.7, 15.7, 0.9, 130),
        _card("t4", 14.6, 65, 8.1, 8.1, 0.32, 10),
    )
}


def card(text: str) -> Card:
    """The card of that name, or one of so much memory, as in 24GiB.

    Raises ConfigError for neither.
    """
    if found := CARDS.get(text.lower()):
        return found
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text, re.IGNORECASE):
        unit = {"gib": GIB, "gb": 1e9, "mib": 2**20, "mb": 1e6}[size[2].lower()]
        if float(size[1]) > 0:
            found = Card(text, float(size[1]) * unit)
            if found.usable_bytes > 0:
                return found
            raise ConfigError(
                f"--card {text}: {CUDA_BYTES // GIB} GiB is for CUDA and NCCL, and {FRAGMENTS:.0%}"
                " fragments, which leaves nothing for tensors; give a larger card"
            )
    sizes = [name for name in CARDS if name.startswith(f"{text.lower()}-")]
    hint = f" Did you mean {' or '.join(map(repr, sizes))}?" if sizes else did_you_mean(text, CARDS)
    raise ConfigError(
        f"--card {text}: neither a known card ({', '.join(CARDS)}) nor its memory, as in"
        f" 24GiB.{hint}"
    )
