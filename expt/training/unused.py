"""Parameters of a sharded model that some workers use in a step, and others do not, as experts of a
mixture.

FSDP averages the gradients that a worker has: where another has none of a parameter, it would be
averaged with that of another one. So a worker that has not used a parameter gives zeros, and what
no worker has used has no gradient, as with DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expt.errors import ConfigError
from expt.training.patches.gradient_hooks import has_hooks
from expt.training.sharding import is_sharded, units_of


class Unused:
    """One worker's knowledge of what a step has used, of a model that is sharded already."""

    def __init__(self, module: nn.Module, device: torch.device, *, compiled: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._device, self._is_first = device, True
        self._parameters = {
            name: one for name, one in module.named_parameters() if one.requires_grad
        }
        self._used, self._watched = set[str](), set[str]()
        self._gives_zeros = hasattr(
            FSDPModule, "set_reduce_scatter_unused_params"
        )  # not in torch 2.10
        for name, unit in units_of(module).items():
            if self._gives_zeros:
                unit.set_reduce_scatter_unused_params(True, recurse=False)
            watch = functools.partial(self._watch, name)
            unit.register_forward_pre_hook(torch.compiler.disable(watch) if compiled else watch)

    def _watch(self, prefix: str, unit: nn.Module, _: Any) -> None:
        """Note of each parameter that `unit` has gathered when it gets its gradient: it is one
        tensor for good.
        """
        for name, parameter in unit.named_parameters(prefix):
            if name in self._parameters and name not in self._watched and not is_sharded(parameter):
                self._watched.add(name)
                parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))

    def _note(self, name: str, _: Tensor) -> None:
        self._used.add(name)

    @torch.no_grad()
    def drop(self) -> None:
        """Leave those without a gradient that no worker has used since the last call; a collective.

        Who has used all of them does not wait for it. Raises ConfigError where torch cannot do
        without some workers', and at the first call where a part has got a hook by then."""
        if self._is_first:
            self._refuse_hooks()
        used = [name in self._used for name in self._parameters]
        self._used.clear()
        by_any = torch.tensor(used, dtype=torch.float32, device=self._device)
        dist.all_reduce(by_any, dist.ReduceOp.MAX)
        if all(used):
            return
        for (name, parameter), here, somewhere in zip(
            self._parameters.items(), used, by_any.tolist(), strict=True
        ):
            if not somewhere:
                parameter.grad = None
            elif not here and not self._gives_zeros:
                raise ConfigError(
                    f"the parameter {name} was used by some workers alone in a step, which torch"
                    f" {torch.__version__} cannot do with strategy=fsdp or hsdp; use a newer torch,"
                    " or strategy=ddp with ddp.find_unused_parameters=true"
                )

    def _refuse_hooks(self) -> None:
        self._is_first = False
        if hooked := next((name for name, one in self._parameters.items() if has_hooks(one)), None):
            raise ConfigError(
                f"the parameter {hooked} has got a hook for its gradient, which its parts do not"
                " have; leave the hook out, or use strategy=ddp"
            )
