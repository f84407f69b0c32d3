"""A run's callbacks: built, told and saved on rank 0, so that no number depends on them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from expt.config import secrets, user_code
from expt.config.constraints import Target
from expt.config.user_code import own_frame
from expt.errors import ExptError, RunFailed, did_you_mean, warn
from expt.runs import tags
from expt.training import batch_norm, collectives
from expt.training.callback import Callback, View
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.worker import random_state
from expt.worker.record import Record

_PLAIN = (bool, int, float, str, bytes, type(None))  # these very types: numpy's float64 is a float


class Callbacks:
    """Those of one worker: on all ranks but 0 there are none."""

    def __init__(
        self,
        targets: Sequence[Target],
        worker: Worker,
        position: Position,
        metrics: Mapping[str, str],
    ) -> None:
        """`metrics` are those of the task. Raises ConfigError for a class that is no Callback."""
        self._device, self._position = worker.device, position
        self._reserved = {*metrics, *tags.OF_EXPT}
        self._targets = targets if worker.rank == 0 else ()
        self._callbacks: list[Callback] = []
        for index, target in enumerate(self._targets):
            with self._apart(index, "__init__"):
                self._callbacks.append(
                    built := user_code.build(target.target, Callback, **target.kwargs)
                )
                self._warn_of_others(index, type(built))

    def _warn_of_others(self, index: int, cls: type[Callback]) -> None:
        """Of methods that are named as if they were to be called."""
        for name in dir(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                moments = [each for each in dir(Callback) if each.startswith("on_")]
                warn(
                    f"callbacks.{index}: {cls.__name__}.{name} is never"
                    f" called.{did_you_mean(name, moments)}"
                )

    def end_epoch(self, model: nn.Module, record: Record, split: str) -> None:
        """An epoch has been trained on and evaluated, by `model`."""
        self._tell("on_epoch_end", model, record, split)

    def end_evaluation(self, model: nn.Module, record: Record, split: str) -> None:
        """`split` has been evaluated, by `model`."""
        self._tell("on_evaluation_end", model, record, split)

    def _tell(self, moment: str, model: nn.Module, record: Record, split: str) -> None:
        for index, callback in enumerate(self._callbacks):
            with self._apart(index, moment):
                getattr(callback, moment)(self._view(model, record, split))

    def _view(self, model: nn.Module, record: Record, split: str) -> View:
        return View(
            epoch=self._position.epoch,
            step=self._position.step,
            split=split,
            metrics=MappingProxyType(record.last),
            copy_model=lambda: _copy(model),
            scalar=lambda tag, value: record.log({self._own(tag): float(value)}),
            picture=lambda tag, image: record.picture(self._own(tag), as_bytes(image)),
        )

    def _own(self, tag: str) -> str:
        if tag.partition("/")[0] in self._reserved:
            raise ValueError(
                f"the tag {tag!r} is one of expt's own; use another, as in"
                f" 'mine/{tag.partition('/')[2]}'"
            )
        return tag

    @contextlib.contextmanager
    def _apart(self, index: int, moment: str) -> Iterator[None]:
        """Let no other worker be waited for, put random numbers back as they were, and say whose an
        error is.
        """
        before = random_state.state_dict(self._device)
        try:
            with collectives.alone():
                yield
        except ExptError:
            raise
        except Exception as error:
            told = secrets.said(error)
            whose = f"callbacks.{index}: {self._targets[index].target}.{moment}"
            raise RunFailed(f"{whose} raised {told}{_place(error)}") from error
        finally:
            random_state.load_state_dict(before, self._device)

    def state_dict(self) -> list[dict[str, Any]]:
        """What each of them wants kept, with its class.

        Raises RunFailed for what a checkpoint can't hold.
        """
        states = []
        for index, callback in enumerate(self._callbacks):
            with self._apart(index, "state_dict"):
                state = callback.state_dict()
                _refuse_other_than_plain(state)
            states.append({"target": self._targets[index].target, "state": state})
        return states

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give each what `state_dict` had of the same class: the second of a class the second state
        of it.
        """
        left = list(states)
        for index, callback in enumerate(self._callbacks):
            found = next(
                (one for one in left if one["target"] == self._targets[index].target), None
            )
            if found is not None:
                left.remove(found)
                with self._apart(index, "load_state_dict"):
                    callback.load_state_dict(found["state"])


def _copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    batch_norm.part_from_workers(copied)
    return copied


def _place(error: Exception) -> str:
    """Where in the person's own code it was raised, if there."""
    own = own_frame(error)
    return f" ({own.filename}, line {own.lineno})" if own else ""


def _refuse_other_than_plain(state: Any) -> None:
    if isinstance(state, Mapping):
        for key, value in state.items():
            _refuse_other_than_plain((key, value))
    elif type(state) in (list, tuple):
        for value in state:
            _refuse_other_than_plain(value)
    elif type(state) not in _PLAIN and not isinstance(state, Tensor):
        kind = f"{type(state).__module__}.{type(state).__name__}"
        raise TypeError(
            f"a checkpoint can't hold its {kind}; give tensors, numbers, strings, lists and dicts"
        )


@torch.no_grad()
def as_bytes(image: Tensor) -> Tensor:
    """A picture as uint8 [height, width, channels] on the CPU.

    Raises ValueError for what is none.
    """
    if (
        not isinstance(image, Tensor)
        or image.dim() != 3
        or image.shape[0] not in (1, 3)
        or not image.numel()
    ):
        what = (
            f"a tensor {list(image.shape)}"
            if isinstance(image, Tensor)
            else f"a {type(image).__name__}"
        )
        raise ValueError(f"a picture is a tensor [1 or 3 channels, height, width], not {what}")
    if image.is_floating_point():
        image = (image.float().clamp(0, 1) * 255).round()
    elif image.dtype != torch.uint8:
        raise ValueError(f"a picture is of floats from 0 to 1 or of uint8, not of {image.dtype}")
    return image.to("cpu", torch.uint8).permute(1, 2, 0).contiguous()
