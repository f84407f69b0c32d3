"""A trained network that computes for a task or a model, and is not trained itself."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expt.config import own_code
from expt.data.loading import leaves
from expt.errors import ConfigError, warn
from expt.inference.load import located, read, read_weights, rebuilt
from expt.models.partial_load import load_all, weights_in
from expt.runs.named_checkpoint import weights_named
from expt.runs.result import Record

_made = list["weakref.ref[Frozen]"]()


class Frozen:
    """A trained network that no step changes: a teacher, or one whose features are compared.

    An argument of a custom task or model is one in YAML, and is called like a module:

        _target_: distill.Distilled
        teacher: {_target_: expt.Frozen, weights: outputs/teacher}

    `weights` names a run (`RUN` is its best checkpoint, `RUN@last` the last) or a file, as the key
    `weights` does. A `model` of another class takes weights of those names; a file that is of no
    run needs it.

    The network is in evaluation mode, and its weights need no gradients, which reach its inputs all
    the same. It is no part of the model: no optimizer, checkpoint or other worker gets it. Their
    digest is a part of the run's identity. Training reads the weights before the first step; an
    evaluation, a prediction or `expt.load` only where the network is called.
    """

    def __init__(self, weights: str, model: nn.Module | None = None) -> None:
        if not isinstance(model, nn.Module | None):
            raise TypeError(f"model={model} is no module; give {{_target_: a.B}}")
        if model and any(one.is_meta for one in model.parameters()):
            raise NotImplementedError("weights are read into it")  # see sharding.build_empty
        self.weights, self.model = weights, model
        self._is_read = False
        _made.append(weakref.ref(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the network."""
        if not self._is_read:
            self.read(next((one.device for one in leaves((args, kwargs))), torch.device("cpu")))
        assert self.model
        return self.model(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Frozen:
        """Return the same, which nothing changes."""
        return self

    def find(self, key: str = "expt.Frozen, weights") -> tuple[Record, Path]:
        """Return the record of the run, if it is of one, and the file.

        Raises ConfigError, which names the `key` that sets the weights.
        """
        file, run = weights_named(self.weights, key)
        if self.model is not None:
            return Record(), file
        if run is None:
            model = f"{key.removesuffix('weights')}model"
            raise ConfigError(f"{key}={self.weights}: is of no run; give {model}, a _target_")
        record, file = located(run, file.stem, warns=False)
        if line := own_code.other_source(record):
            warn(f"{key}={self.weights}: {line}")
        return record, file

    def content(self, file: Path, _: object = None) -> Any:
        """Return the content of a file of its weights."""
        return read(file) if self.model is None else read_weights(file, self.weights)

    def place(self, record: Record, content: Any, device: torch.device) -> None:
        """Load the weights from the content of their file, and move them to the device."""
        if self.model is None:
            self.model = rebuilt(record, content, device).model
        else:
            found = weights_in(content, self.model.state_dict().keys())
            try:
                load_all(self.model, found[0].state if found else {})
            except ConfigError as error:
                raise ConfigError(f"expt.Frozen, weights: {self.weights}: {error}") from error
        self.model.to(device).eval().requires_grad_(False)
        self._is_read = True

    def read(self, device: torch.device) -> None:
        """Find, load and place the weights in this process alone."""
        record, file = self.find()
        self.place(record, self.content(file), device)


def unread() -> list[Frozen]:
    """Return those whose weights nobody has read, in the order in which they were made."""
    alive = [one for each in _made if (one := each()) is not None]
    return [one for one in alive if not one._is_read]
