"""A run's model again, from the configuration and the weights that are in its folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from expt.config import groups, user_code
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.config.user_code import fingerprint, targets
from expt.data.build import shapes_told
from expt.errors import warn
from expt.inference.preprocess import Preprocess
from expt.models import build as model_build
from expt.models.partial_load import load_all, plain_weights
from expt.runs import checkpoint, checkpoint_file
from expt.runs.named_checkpoint import Which, found, run_and_which
from expt.runs.paths import RunPaths
from expt.runs.result import Record
from expt.training.precision import Precision

Amp: TypeAlias = bool | Literal["recorded", "bf16", "fp16"]
"""As the key `amp`; `recorded` is what that was for the run."""


class TrainedModel(nn.Module):
    """A run's model as its evaluations have it; what it is called with goes to `model`."""

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        config: Mapping[str, Any],
        preprocess: Preprocess,
        autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        """The context in which the forward pass is computed; see `amp` of `load`."""
        self.class_names: tuple[str, ...] = tuple(record["data"].get("class_names", ()))
        """Empty where there are no classes, or the run is of a version that did not record them."""
        self.preprocess = preprocess
        self.config = config
        """All settings of the run, as result.json has them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model gives."""
        with self.autocast():
            return self.model(*args, **kwargs)


def load(
    run: str | Path,
    which: Which | None = None,
    *,
    device: str | torch.device = "cpu",
    amp: Amp = False,
) -> TrainedModel:
    """Return the model of a run in eval mode, with the weights of its best checkpoint.

    `which`, or `RUN@last`, chooses the last. Of a run with `ema` they are the averaged weights. The
    dataset is not read. A custom class must be importable as it was for the run, from the current
    folder too. The model computes in float32; with `amp="recorded"` as in the run's evaluations,
    and with true, bf16 or fp16 in mixed precision. torch.compile is not applied. Raise ConfigError
    for a folder without that checkpoint, and CheckpointError for a damaged one.
    """
    record, state = saved(run, which)
    return rebuilt(record, state, torch.device(device), amp=amp)


def saved(run: str | Path, which: str | None = None) -> tuple[Record, dict[str, Any]]:
    """Return the record of the run, and what its best or last checkpoint has of the model.

    Warn and raise as `load` does.
    """
    folder, which = run_and_which(run, which)
    record, file = found(folder, which)

    def read() -> dict[str, Any]:
        checkpoint_file.check(file)
        return checkpoint.load(file, without=("optimizer",))

    state = checkpoint_file.read_steady(file, read)
    user_code.find_kept(RunPaths(folder).code)
    _warn_of_other_code(state["config"], record)
    return record, state


def rebuilt(
    record: Record,
    state: Mapping[str, Any],
    device: torch.device,
    *,
    amp: Amp = False,
    plain: bool = False,
) -> TrainedModel:
    """Return the model of a checkpoint's `state`; `plain` in torch's own memory format."""
    with importable_from_here():
        config = recorded(state["config"])
        model = _built(config, record)
    load_all(model, plain_weights(state, model.state_dict().keys()))
    layout = torch.channels_last if config.channels_last and not plain else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    computed = config.amp if amp == "recorded" else amp
    precision = Precision(computed, device)
    preprocess = Preprocess(
        config.dataset, record["data"], device, segments=config.task.TARGETS == "mask"
    )
    return TrainedModel(model, record, state["config"], preprocess, precision.autocast).eval()


def _built(config: RunConfig, record: Record) -> nn.Module:
    """Return the model with weights to be replaced; leave torch's random numbers as they are."""
    shapes = dict(model_build.offered(config, shapes_told(record["data"])))
    example: Tensor | None = None
    if "image_size" in shapes:
        shapes["image_size"] = tuple(shapes["image_size"])
        example = torch.zeros(1, shapes["channels"], *shapes["image_size"])
    with torch.random.fork_rng(devices=[]):
        return model_build.build(
            config.model, groups.DefaultInit(name="default"), shapes, example, fetch=False
        )


@contextlib.contextmanager
def importable_from_here() -> Iterator[None]:
    """Let custom classes be imported from the current folder, as in `python -m expt`."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _warn_of_other_code(config: Mapping[str, Any], record: Record) -> None:
    names = targets({"model": config["model"]})
    others = targets({**config, "model": {}})
    code = record.get("content", {}).get("code")
    if names and not others and code is not None and fingerprint(names) not in (None, code):
        warn(
            f"model._target_={names[0]}: its source has changed since the run; its outputs may be"
            " others"
        )
