"""Lookahead (Zhang et al., 2019): slow weights, to which those that are trained go back every few
steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Lookahead:
    """The slow weights of a model; its buffers of floating-point numbers have slow values too.

    Every `every_steps` they keep a share of themselves and take the rest from the model, which then
    has theirs: the share `keep` times the `power` of how much of the run is done. At an epoch's end
    the model has them as they are, so that they are evaluated. There are none in the first
    `start_epochs`."""

    def __init__(
        self, module: nn.Module, *, every_steps: int, keep: float, power: float, start_epochs: int
    ) -> None:
        self._module = module
        self._every_steps, self._start_epochs = every_steps, start_epochs
        self._keep, self._power = keep, power
        self._slow: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_step(self, *, epoch: int, step: int, total_steps: int) -> None:
        """The run's `step` is done, in the `epoch`, both counted from 1. Waits for nothing."""
        if epoch <= self._start_epochs or step % self._every_steps:
            return
        values = self._values()
        if not self._slow:
            self._slow = {name: _wide(value).clone() for name, value in values.items()}
            return
        kept = self._keep * (step / total_steps) ** self._power
        slow = [self._slow[name] for name in values]
        get_ema_multi_avg_fn(kept)(slow, [_wide(value) for value in values.values()], None)
        self.end_epoch()

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Let the model have the slow weights, where there are any."""
        if self._slow:
            for name, value in self._values().items():
                value.copy_(self._slow[name])

    def _values(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in self._module.state_dict().items()
            if value.is_floating_point()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The slow weights; empty where there are none yet."""
        return dict(self._slow)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` gave."""
        values = self._values()
        self._slow = {
            name: value.to(values[name].device, copy=True) for name, value in state.items()
        }


def _wide(value: Tensor) -> Tensor:
    """In float32 at least: half precision would round small movements away."""
    return value.detach().float() if value.itemsize < 4 else value.detach()
