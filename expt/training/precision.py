"""Mixed precision: autocast, GradScaler, and the order in which a step uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer

from expt.errors import sized_by
from expt.training.collectives import sum_across_workers
from expt.training.parameter_groups import members
from expt.training.patches import backward
from expt.training.sharding import is_sharded, local

Amp: TypeAlias = bool | Literal["bf16", "fp16"]
"""Values of the key `amp`."""


class Precision:
    """Autocast for the forward pass; scaling, clipping and the update for the rest of a step."""

    def __init__(
        self,
        amp: Amp,
        device: torch.device,
        *,
        gradient_clip: float | None = None,
        gradient_clip_value: float | None = None,
        skip_non_finite: bool = False,
        skips_on_device: bool = False,
        short_backward: bool = False,
    ) -> None:
        """`skips_on_device`: a fused optimizer leaves updates out by torch's `found_inf`.

        `short_backward` is that of training/patches, where nothing scales the loss.
        """
        self.dtype = autocast_dtype(amp, device)
        self._device = device
        self._gradient_clip, self._gradient_clip_value = gradient_clip, gradient_clip_value
        self._skip, self._skips_on_device = skip_non_finite, skips_on_device
        self.skipped = torch.zeros((), device=device)
        """Updates left out because a gradient was not finite, without those of float16's scale."""
        self.left_out: torch.Tensor | None = None
        """True if the last update was left out: a bool [] on the device, equal on all workers; None
        if none can be."""
        self._spoilt = torch.zeros((), device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        is_plain = not skip_non_finite and not self.scaler.is_enabled()
        self._short_backward = short_backward and is_plain

    @property
    def scale(self) -> torch.Tensor:
        """The factor of the gradients until the update, [] on the device; nothing waits."""
        return self.scaler.scale(torch.ones((), device=self._device))  # get_scale would wait

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the forward pass and the loss are computed."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def backward(
        self, loss: torch.Tensor, weight: float = 1.0, of: Sequence[torch.Tensor] = ()
    ) -> None:
        """Add the gradients of `loss` times `weight`, `of` these or all, scaled if in float16."""
        if self._short_backward:
            backward(loss, weight, of)
            return
        loss = loss * weight
        if self._skip:
            # The gradients of an infinite loss may be finite: nan reaches all workers' mean.
            loss = loss * (1 + 0 * loss.detach())
            # Gradients that are not finite may just be too large for float16.
            if self.scaler.is_enabled():
                self._spoilt += ~loss.detach().isfinite()
        self.scaler.scale(loss).backward(inputs=of or None)

    @sized_by("model")
    def update(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Clip and apply the gradients, then drop them.

        The update is left out where a gradient is not finite, in float16 and with
        `skip_non_finite`; the latter waits for the device unless `skips_on_device`.
        """
        self.left_out = bad = self._is_bad(optimizer)  # clipping hides infinity
        if bad is not None:
            self.skipped += bad
        self.clip(optimizer, parameters)
        if bad is None or self.scaler.is_enabled():
            self.scaler.step(optimizer)
            self.scaler.update()
        elif self._skips_on_device and all(group["fused"] for group in optimizer.param_groups):
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        elif not bad:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _is_bad(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Return whether the update is to be left out, a bool []; None where none ever is."""
        if not self._skip:
            return None
        if self.scaler.is_enabled():  # gradients that are too large for float16 are its own
            bad = sum_across_workers(self._spoilt) > 0
            self._spoilt.zero_()
            return bad
        grads = (one.grad for one in members(optimizer.param_groups))  # equal on all workers
        return ~is_finite(grad for grad in grads if grad is not None)

    def clip(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Clip gradients, by value, then by norm."""
        if self._gradient_clip is None and self._gradient_clip_value is None:
            return
        self.scaler.unscale_(optimizer)  # clipping scaled gradients would clip at the wrong norm
        parameters = list(parameters)
        if (most := self._gradient_clip_value) is not None:
            sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
            for each in sparse:  # which torch's takes not
                each.grad = cast(torch.Tensor, each.grad).coalesce()
                each.grad.values().clamp_(-most, most)
            dense = [p for p in parameters if p.grad is None or not p.grad.is_sparse]
            nn.utils.clip_grad_value_(dense, most, foreach=True)
        if self._gradient_clip is not None:
            nn.utils.clip_grad_norm_(parameters, self._gradient_clip, foreach=True)


def is_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether all are finite, as a bool []; a collective for sharded tensors."""
    given = list(tensors)
    parts = [one for one in map(local, given) if one.numel()]  # torch knows no largest of none
    finite = torch.isfinite(nn.utils.get_total_norm(parts, torch.inf, foreach=True))
    if not any(map(is_sharded, given)):
        return finite
    return sum_across_workers((~finite).float().to(local(given[0]).device)) == 0


def set_precision(precision: str) -> None:
    """Set the precision of float32 matrix products, and of convolutions."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


@contextlib.contextmanager
def precision_kept() -> Iterator[None]:
    """Restore the settings of `set_precision` and cuDNN's search for algorithms after the body."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    flags = cudnn.allow_tf32, cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cudnn.allow_tf32, cudnn.benchmark = flags


def autocast_dtype(amp: Amp, device: torch.device) -> torch.dtype | None:
    """Return the type of the forward pass where that is not float32."""
    if amp is False:
        return None
    if amp is True:
        native_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native_bf16 else torch.float16
    return torch.float16 if amp == "fp16" else torch.bfloat16


class Autocast(nn.Module):
    """A model whose forward pass is within the run's autocast, in the threads of copies too."""

    def __init__(
        self, module: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self.module, self._autocast = module, autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, within autocast."""
        with self._autocast():
            return self.module(*args, **kwargs)
