"""Updates part by part are one update of all. Where the states wait needs a GPU, see tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from expt.config import groups
from expt.training.optim import build_optimizer
from expt.training.optimizer_state import offload_states

SGD = groups.SGD(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
ADAMW = groups.Adam(
    name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1,
    decay_biases_and_norms=False
)  # fmt: skip
MUON = groups.Muon(
    name="muon", lr=0.1, momentum=0.9, nesterov=True, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
)


def trained(
    config: Any, *, bytes_at_once: int | None, device: str = "cpu"
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    ).to(device)
    optimizer = build_optimizer(config, model)
    if bytes_at_once is not None:
        offload_states(optimizer, bytes_at_once=bytes_at_once)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler, losses, kept = (
        torch.amp.GradScaler(device, enabled=False),
        [],
        list(map(id, optimizer.param_groups[0]["params"])),
    )
    for step in range(4):
        loss = model(torch.ones(4, 8, device=device) * (step + 1)).square().mean()
        loss.backward()
        scaler.step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    assert list(map(id, optimizer.param_groups[0]["params"])) == kept
    return losses, optimizer.state_dict()


@pytest.mark.parametrize("config", [SGD, ADAMW, MUON], ids=["sgd", "adamw", "muon"])
@pytest.mark.parametrize("bytes_at_once", [1, 1100, 10**9])
def test_numbers_stay(config: Any, bytes_at_once: int) -> None:
    losses, state = trained(config, bytes_at_once=None)
    again, state_again = trained(config, bytes_at_once=bytes_at_once)
    assert again == losses
    assert state_again["param_groups"] == state["param_groups"]
    for number, values in state["state"].items():
        assert values.keys() == state_again["state"][number].keys()
        assert all(torch.equal(torch.as_tensor(values[key]),
            torch.as_tensor(state_again["state"][number][key]))
                   for key in values)  # fmt: skip
