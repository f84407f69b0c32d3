"""A run's model again, from the settings and the weights in its folder, and its inputs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from expt.config import groups, kept_code, own_code
from expt.config.own_code import targets
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.data.fingerprint import other_frozen, published
from expt.errors import CheckpointError, ConfigError, warn
from expt.features import Classes, Features
from expt.inference.inputs import Inputs
from expt.inference.tables import inputs_of
from expt.models import build as model_build
from expt.models.partial_load import load_all, weights_in
from expt.runs import checkpoint, checkpoint_file, safetensors
from expt.runs.named_checkpoint import run_and_which, trained_run
from expt.runs.paths import RunPaths
from expt.runs.result import FAILED, Record
from expt.training.precision import Precision

Amp: TypeAlias = bool | Literal["recorded", "bf16", "fp16"]
"""Values of the key `amp`; `recorded` is the run's own."""
OF_MODEL = ("model", "ema", "config", "position", "workers", "last", "evaluated_at", "data")
"""Keys of a checkpoint that are not of the optimizer."""


SAVE = "save it by torch.save(model.state_dict(), FILE)"


class TrainedModel(nn.Module):
    """A run's model as its evaluations have it; a call goes to `model`."""

    def __init__(
        self,
        model: nn.Module,
        features: Features,
        config: Mapping[str, Any],
        preprocess: Inputs,
        autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        """The context in which the forward pass is computed; see `amp` of `load`."""
        self.features = features
        """The descriptions of the samples: `inputs` and `targets`."""
        targets = features.targets
        self.class_names = targets.names if isinstance(targets, Classes) else ()
        """Empty where there are no classes."""
        self.preprocess = preprocess
        self.config = config
        """All settings of the run, as result.json has them."""
        self.workers: Sequence[Mapping[str, Any]] = ()
        """The state that each worker had saved, such as that of a custom task."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model."""
        with self.autocast():
            return self.model(*args, **kwargs)


def load(
    run: str | Path,
    which: str | None = None,
    *,
    device: str | torch.device = "cpu",
    amp: Amp = False,
    trust_code: bool = False,
) -> TrainedModel:
    """Return the model of a run in eval mode, with the weights of its best checkpoint.

    `which`, or `RUN@last`, chooses the last, `RUN@40` that of a step. Of a run with `ema` they are
    the averaged weights. The dataset is not read. A custom class must be importable as it was for
    the run, from the current folder too. The model computes in float32; with `amp="recorded"` as in
    the run's evaluations, and with true, bf16 or fp16 in mixed precision. torch.compile is not
    applied.

    The folder of a run is code: classes of a notebook or a script are in its `code/`, and are
    imported. With `trust_code` that of another user or machine is, too. Raise ConfigError where it
    is not trusted, and for a folder without that checkpoint, or where it is damaged.
    """
    record, file = located(run, which, trust_code=trust_code)
    return rebuilt(record, read(file), torch.device(device), amp=amp)


def located(
    run: str | Path, which: str | None = None, *, trust_code: bool = False, warns: bool = True
) -> tuple[Record, Path]:
    """Return the record of a run, and the file of its best or last checkpoint.

    Warn and raise as `load` does; of other source of its classes only if it `warns`.
    """
    folder, which = run_and_which(run, which)
    record, file = trained_run(folder, which)
    if record.get("status") == FAILED:
        warn(f"{folder}: the run failed; its {which} checkpoint was saved before that")
    kept_code.find_kept(RunPaths(folder).code, trust=trust_code)
    if line := other_frozen(record):
        warn(f"{folder}: {line}")
    if warns:
        _warn_of_other_code(checkpoint_file.read(file)["config"], record)
    return record, file


def read(file: Path) -> dict[str, Any]:
    """Return the model of a checkpoint and its place in training; weights stay mapped.

    Raises CheckpointError for a damaged one.
    """

    def checked(file: Path) -> dict[str, Any]:
        checkpoint_file.check(file)
        return checkpoint.load(file, only=OF_MODEL)

    return checkpoint_file.read_steady(file, checked)


def read_weights(file: Path, given: str) -> Any:
    """Return the content of a file of weights: a checkpoint, or a file of another program."""
    try:
        with file.open("rb") as opened:
            is_pickled = file.suffix != ".safetensors" and opened.read(9)[8:] != b"{"
        if is_pickled:
            return _read_pickled(file)
        if (content := safetensors.File(file)).is_ours:
            return read(file)
        return {name: checkpoint.tensor_of(one) for name, one in content.tensors.items()}
    except CheckpointError as error:
        raise ConfigError(f"weights={given}: {error}") from error
    except Exception as error:  # many classes: damaged, or with code in it
        what = "is damaged, or holds more than tensors"
        if found := re.search(r"GLOBAL (\S+)|TorchScript", str(error)):
            what = f"holds {found[1] or found[0]}, and not only tensors"
        why = f"{file} can't be read as weights ({type(error).__name__}: it {what})"
        raise ConfigError(f"weights={given}: {why}; {SAVE}") from error


def _read_pickled(file: Path) -> Any:
    """Return the content of a file of torch.save, whose checksums torch does not compare."""
    if is_zip := zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as entries:
            has_sums = any(entry.CRC for entry in entries.infolist())  # torch may write none
            if has_sums and (bad := entries.testzip()):
                raise CheckpointError(f"{file}: {bad} in it is damaged")
    # A Namespace, a mere record, is in the files of torchvision's scripts.
    with torch.serialization.safe_globals([argparse.Namespace]):
        # Given explicitly: the environment can turn the default off.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)


def rebuilt(
    record: Record,
    state: Mapping[str, Any],
    device: torch.device,
    *,
    amp: Amp = False,
    plain: bool = False,
) -> TrainedModel:
    """Return the model of a checkpoint's `state`; `plain` in torch's own memory format."""
    with importable_from_here(record):
        config, features = recorded(state["config"]), Features.read(record["data"])
        model = _built(config, features, record)
    averaged = weights_in(state, model.state_dict().keys())[0].state
    load_all(model, {**state["model"], **averaged})
    layout = torch.channels_last if config.channels_last and not plain else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    computed = config.amp if amp == "recorded" else amp
    precision = Precision(computed, device)
    preprocess = inputs_of(config.dataset, features, device)
    trained = TrainedModel(model, features, state["config"], preprocess, precision.autocast)
    trained.workers = state.get("workers", ())
    return trained.eval()


def _built(config: RunConfig, features: Features, record: Record) -> nn.Module:
    """Return the model with weights to be replaced; leave torch's random numbers as they are.

    Those that no checkpoint holds are the published ones. Raise ConfigError where these are others.
    """
    model, base = config.model, record.get("base", {})
    needs_base = getattr(model, "needs_base", False)
    if isinstance(model, groups.HuggingFaceModel) and needs_base:
        if Path(base.get("folder", "")).is_dir():  # a relative path may mean another from here
            model = dataclasses.replace(model, path=base["folder"], revision=None)
        try:
            files = published(model)
        except ConfigError as error:
            there = f"the run began from {base.get('folder')}, and has saved adapters only"
            raise ConfigError(f"{error}; {there}: put it back there, or a link to it") from error
        if files != record.get("content", {}).get("base"):
            raise ConfigError(
                f"model.path={model.path}: its files are not those that the run began from, and the"
                " run has saved adapters only; put them back"
            )
    example = features.inputs.unscaled.drawn(1, torch.Generator())
    with torch.random.fork_rng(devices=[]):
        init = groups.DefaultInit(name="default")
        return model_build.build(
            model, init, features, example, fetch=needs_base, base=base or None
        )


@contextlib.contextmanager
def importable_from_here(record: Record) -> Iterator[None]:
    """Let a run's classes be imported from the current folder, as in `python -m expt`.

    If this process has older source of them, they are imported again.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        old = own_code.older_here(targets(record.get("config", {})), record)
        with own_code.as_on_disk() if old else contextlib.nullcontext():
            yield
    finally:
        sys.path.remove(here)


def _warn_of_other_code(config: Mapping[str, Any], record: Record) -> None:
    if own_code.is_imported(record):
        return
    if old := own_code.older_here(targets(config), record):
        warn(f"{', '.join(old)}: changed since its import here; the run's classes are the file's")
    if line := own_code.other_source(record):
        warn(line)
