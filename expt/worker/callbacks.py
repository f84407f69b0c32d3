"""The callbacks of a run: built, called and saved on rank 0; no number depends on them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from expt.config import secrets, user_class
from expt.config.constraints import Target
from expt.config.length import Unreached
from expt.config.own_code import place_of
from expt.errors import ConfigError, ExptError, RunFailed, did_you_mean, warn
from expt.inference import frozen
from expt.runs import checkpoint, tags
from expt.training import batch_norm, collectives, random_state
from expt.training.callback import Callback, View
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.worker.record import Record


class Callbacks:
    """The callbacks of one worker; ranks other than 0 have none."""

    def __init__(
        self,
        targets: Sequence[Target],
        worker: Worker,
        position: Position,
        metrics: Mapping[str, str],
    ) -> None:
        self._device, self._position = worker.device, position
        self._reserved = {*metrics, *tags.OF_EXPT}
        self._targets = targets if worker.rank == 0 else ()
        self.built: list[Callback] = []
        for index, target in enumerate(self._targets):
            with self._apart(index, "__init__"):
                built = user_class.build(target.target, Callback, **target.kwargs)
                self._warn_of_unknown(index, type(built))
                self.built.append(built)
                for network in frozen.unread():
                    network.read(self._device)
        mine = [self._step_interval(index, each) for index, each in enumerate(self.built)]
        # All know it: of a sharded model they gather the copy that a callback gets
        self._every: list[int] = collectives.from_rank_0(mine) if targets else mine

    def _step_interval(self, index: int, callback: Callback) -> int:
        """Return the number of steps between its calls; 0 for none."""
        every, has_method = callback.every_steps, type(callback).on_step_end != Callback.on_step_end
        if (type(every) is int and every > 0) or (every is None and not has_method):
            return every or 0
        raise ConfigError(
            f"callbacks.{index}: {type(callback).__name__}.every_steps={every!r}: on_step_end needs"
            " a whole number of steps from 1; give every_steps one, in the class or in __init__"
        )

    def beyond(self, total_steps: int) -> Unreached:
        """Return the intervals of callbacks that are called after no step of so short a run."""
        every = enumerate(self._every)
        return {f"callbacks.{at}.every_steps": ("steps", n) for at, n in every if n > total_steps}

    @property
    def are_due(self) -> bool:
        """True if a callback is called after the last step."""
        return any(map(self._is_due, self._every))

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._position.step % every == 0

    def _warn_of_unknown(self, index: int, cls: type[Callback]) -> None:
        """Warn of methods on_... that are never called."""
        known = [name for name in dir(Callback) if name.startswith("on_")]
        for name in sorted({name for name in dir(cls) if name.startswith("on_")} - {*known}):
            where, hint = f"callbacks.{index}: {cls.__name__}.{name}", did_you_mean(name, known)
            warn(f"{where} is never called.{hint}")

    def call(self, moment: str, model: nn.Module, record: Record, split: str) -> None:
        """Call the method `moment` of each callback: after a step, an epoch or an evaluation."""
        for index, callback in enumerate(self.built):
            if moment == "on_step_end" and not self._is_due(self._every[index]):
                continue
            with self._apart(index, moment):
                view = View(
                    epoch=self._position.epoch,
                    step=self._position.step,
                    split=split,
                    metrics=MappingProxyType(record.last),
                    copy_model=lambda: _copy(model),
                    scalar=lambda tag, value: record.log({self._checked(tag): float(value)}),
                    picture=lambda tag, image: record.picture(self._checked(tag), as_bytes(image)),
                )
                getattr(callback, moment)(view)

    def _checked(self, tag: str) -> str:
        """Return the tag; raise ValueError for one of expt's."""
        if tag.partition("/")[0] in self._reserved:
            raise ValueError(
                f"the tag {tag!r} is reserved; use another, such as 'mine/{tag.partition('/')[2]}'"
            )
        return tag

    @contextlib.contextmanager
    def _apart(self, index: int, moment: str) -> Iterator[None]:
        """Forbid collectives, restore random numbers, and name the callback in its errors."""
        try:
            with collectives.alone(), random_state.kept(self._device):
                yield
        except ExptError:
            raise
        except Exception as error:
            whose = f"{self._targets[index].target}.{moment}"
            what = f"{whose} raised {secrets.said(error)}{place_of(error)}"
            raise RunFailed(f"callbacks.{index}: {what}") from error

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each with its class; raise ConfigError if it can't be saved."""
        states = []
        for index, callback in enumerate(self.built):
            with self._apart(index, "state_dict"):
                state = callback.state_dict()
                checkpoint.refuse_unreadable(state, f"callbacks.{index}")
            states.append({"target": self._targets[index].target, "state": state})
        return states

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load into each callback the next state of its class."""
        left = list(states)
        for index, callback in enumerate(self.built):
            target = self._targets[index].target
            found = next((one for one in left if one["target"] == target), None)
            if found is not None:
                left.remove(found)
                with self._apart(index, "load_state_dict"):
                    callback.load_state_dict(found["state"])


def _copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    batch_norm.part_from_workers(copied)
    return copied


@torch.no_grad()
def as_bytes(image: Tensor) -> Tensor:
    """Return a picture as uint8 [height, width, channels] on the CPU, or raise ValueError."""
    shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
    if not (isinstance(shape, list) and len(shape) == 3 and shape[0] in (1, 3) and image.numel()):
        raise ValueError(f"a picture is a tensor [1 or 3 channels, height, width], not {shape}")
    if image.is_floating_point():
        image = (image.float().clamp(0, 1) * 255).round()
    elif image.dtype != torch.uint8:
        raise ValueError(f"a picture is of floats from 0 to 1 or of uint8, not of {image.dtype}")
    return image.to("cpu", torch.uint8).permute(1, 2, 0).contiguous()
