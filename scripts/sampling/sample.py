"""Text from the best checkpoint of a run with task=language_model and dataset=text."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from expt.config.parse import parse, settings_of
from expt.data.kinds.text import Text
from expt.machine import Machine
from expt.models.build import build
from expt.runs import checkpoint
from expt.runs.paths import RunPaths


def main() -> None:
    """Print what the model makes of the prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("--prompt", default="\n")
    parser.add_argument("--length", type=int, default=400, help="tokens to add")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="below 1 the likely becomes likelier"
    )
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    model, text = loaded(chosen.run)
    tokens = torch.tensor([text.encode(chosen.prompt)])
    tokens = continued(
        model, tokens, length=chosen.length, context=text.context, temperature=chosen.temperature
    )
    print(text.decode(tokens[0].tolist()))


def loaded(folder: Path) -> tuple[nn.Module, Text]:
    """The model of a run, with its best weights, and its text."""
    state = checkpoint.load(RunPaths(folder).best)
    settings = {**state["config"], "gpus": 0, "backend": "gloo"}  # wherever it was trained
    config = parse(settings_of(settings), Machine(gpus=(), cpus=1))
    if not isinstance(config.dataset, Text):
        raise SystemExit(
            f"error: {folder}: was trained on dataset={config.dataset.name}, not on dataset=text"
        )
    example = torch.zeros(1, 1, dtype=torch.int64)
    model = build(config.model, config.init, config.dataset.known_features(), example)
    model.load_state_dict(state["model"])
    return model.eval(), config.dataset


@torch.no_grad()
def continued(
    model: nn.Module, tokens: torch.Tensor, *, length: int, context: int, temperature: float
) -> torch.Tensor:
    """`tokens` [1, T] and `length` more, each drawn by its logit."""
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(-1), 1)], 1)
    return tokens


if __name__ == "__main__":
    main()
