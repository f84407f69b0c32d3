"""A run's model again, from the settings and the weights in its folder, and what it takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow
import torch
from torch import Tensor, nn

from expt.config import groups, kept_code, own_code
from expt.config.own_code import targets
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.data.checked_samples import Transformed, build_transforms
from expt.data.columns import read_as_known, text_of, unknown_texts
from expt.data.image_files import MODES, fit, open_picture, size_of, stretch
from expt.data.kinds import DatasetConfig
from expt.data.loading import Finish, LoaderOptions
from expt.data.memory import Encoder
from expt.errors import ConfigError, warn
from expt.features import Classes, Columns, Features, Image, Tokens
from expt.models import build as model_build
from expt.models.partial_load import load_all, weights_in
from expt.runs import checkpoint, checkpoint_file
from expt.runs.named_checkpoint import found, run_and_which
from expt.runs.paths import RunPaths
from expt.runs.result import FAILED, Record
from expt.training.precision import Precision

Amp: TypeAlias = bool | Literal["recorded", "bf16", "fp16"]
"""Values of the key `amp`; `recorded` is the run's own."""
Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""
OF_MODEL = ("model", "ema", "config", "position", "workers", "last", "evaluated_at", "data")
"""Keys of a checkpoint that are not of the optimizer."""


class Preprocess:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` return a batch on the model's device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They come out as float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, come out standardised, [N, 1, 1, F]; where it has
    texts or gaps, give lists of them (None is a gap) or a DataFrame, which are encoded as in
    training. A text comes out as its tokens, int64 [1, length]. Other samples must be tensors or
    arrays, one or a batch, and are only moved.

    Raise ConfigError for what is not a sample, DataError for a damaged picture.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        features: Features,
        device: torch.device,
    ) -> None:
        self._dataset, self._inputs, self._device = dataset, features.inputs, device
        self._transforms = build_transforms(getattr(dataset, "eval_transforms", None) or ())
        self._resize = stretch if features.targets.each == "pixel" else fit
        if isinstance(inputs := features.inputs, Columns):
            self._encode = Encoder(inputs.names, inputs.encoded, inputs.scales)
        elif isinstance(inputs, Image):
            how = LoaderOptions(batch_size=1, device=device, mean=dataset.mean, std=dataset.std)
            self._normalise = Finish(how, inputs.channels)

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        inputs, are_several = self._inputs, isinstance(samples, list | tuple)
        if isinstance(inputs, Tokens):
            return self._tokens(samples)
        if isinstance(inputs, Columns):
            if inputs.encoded and not _are_arrays(samples):
                samples = self._coded(samples, inputs)
            elif are_several and any(hasattr(sample, "dtype") for sample in samples):
                return torch.cat([self(sample) for sample in samples])
            return self._rows(samples, inputs.names)
        if are_several:
            return torch.cat([self(sample) for sample in samples])
        if isinstance(inputs, Image):
            return self._images(samples, inputs.channels)
        return self._as_is(_tensor(samples), getattr(inputs, "shape", ()))

    def _images(self, given: Any, channels: int) -> Tensor:
        is_array = isinstance(given, Tensor | np.ndarray)
        images = _tensor(given) if is_array else self.picture(given)[0]
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] != channels:
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        return self._normalise(images.to(self._device, copy=True))

    def _as_is(self, given: Tensor, shape: Sequence[int]) -> Tensor:
        """Return samples of a custom dataset; one gets a batch's dimension."""
        if shape and given.dim() not in (len(shape), len(shape) + 1):
            raise ConfigError(
                f"samples of shape {list(given.shape)}: those of training are {[*shape]}; give one,"
                " or a batch"
            )
        return (given[None] if given.dim() == len(shape) else given).to(self._device)

    def picture(self, given: Any, name: str = "the picture") -> tuple[Tensor, tuple[int, int]]:
        """Return a picture, or that of a path, as uint8 [C, H, W] of the model's size.

        And the width and height that it had. Raise DataError for a damaged one, by its path or
        `name`.
        """
        channels, (height, width) = self._inputs.shapes.values()
        if channels not in MODES:
            raise ConfigError(f"a picture: the model takes {channels} channels; give a tensor")
        needed = None if self._transforms else self._dataset.needed
        picture = open_picture(given, MODES[channels], name, needed)
        if self._transforms:
            shape = channels, height, width
            made = Transformed([(picture, 0)], self._transforms, shape, "dataset.eval_transforms")
            return made[0][0], size_of(picture)
        pixels = torch.from_numpy(np.array(self._resize(picture, (height, width))))
        return pixels.reshape(height, width, -1).permute(2, 0, 1), size_of(picture)

    def _rows(self, given: Any, names: Sequence[str]) -> Tensor:
        try:
            is_list = isinstance(given, list | tuple)
            rows = torch.tensor(given, dtype=torch.float64) if is_list else _tensor(given).double()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows: {error}; give lists of numbers, as many in each") from error
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        if rows.dim() != 2 or rows.shape[1] != len(names):
            raise ConfigError(f"rows of shape {list(rows.shape)}: give [N, {len(names)}]")
        return self._encode(rows.cpu()).float()[:, None, None].to(self._device)

    def _coded(self, given: Any, inputs: Columns) -> Tensor:
        """Return rows of numbers, texts and None as Encoder takes them, float64 [N, F]."""
        if hasattr(given, "columns"):  # of pandas, by their names
            given = given[[*inputs.names]].to_numpy(object)
        rows = np.array(given, object)
        rows = rows.reshape(-1, rows.shape[-1])
        if rows.shape[1] != len(inputs.names):
            raise ConfigError(f"rows of {rows.shape[1]} cells: give {', '.join(inputs.names)}")
        cells = (pyarrow.array([*map(text_of, each)], pyarrow.string()) for each in rows.T)
        columns = dict(zip(inputs.names, cells, strict=True))
        values, wrong, unknown = read_as_known(columns, inputs.encoded)
        for row, why in wrong.items():
            raise ConfigError(f"row {row + 1}: {why}; correct it")
        for name, texts in unknown.items():
            warn(unknown_texts(name, texts, texts.total()))
        return torch.from_numpy(values)

    def _tokens(self, given: Any) -> Tensor:
        if isinstance(given, str):
            given = torch.tensor([self._dataset.encode(given)])
        elif isinstance(given, bytes):
            given = torch.tensor([list(given)])
        return _tensor(given).long().to(self._device)


def _are_arrays(given: Any) -> bool:
    """Return whether samples are numbers already: a tensor, an array, or several."""
    if isinstance(given, list | tuple):
        return any(map(_are_arrays, given))
    return isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype.kind != "O")


def _tensor(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(f"a {type(given).__name__}: give a tensor or an array")


class TrainedModel(nn.Module):
    """A run's model as its evaluations have it; what it is called with goes to `model`."""

    def __init__(
        self,
        model: nn.Module,
        features: Features,
        config: Mapping[str, Any],
        preprocess: Preprocess,
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
        """Return what the model gives."""
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
    run: str | Path, which: str | None = None, *, trust_code: bool = False
) -> tuple[Record, Path]:
    """Return the record of a run, and the file of its best or last checkpoint.

    Warn and raise as `load` does.
    """
    folder, which = run_and_which(run, which)
    record, file = found(folder, which)
    if record.get("status") == FAILED:
        warn(f"{folder}: the run failed; its {which} checkpoint was saved before that")
    kept_code.find_kept(RunPaths(folder).code, trust=trust_code)
    _warn_of_other_code(checkpoint_file.read(file)["config"], record)
    return record, file


def read(file: Path) -> dict[str, Any]:
    """Return what a checkpoint has of the model and its place in training; weights stay mapped.

    Raises CheckpointError for a damaged one.
    """

    def checked(file: Path) -> dict[str, Any]:
        checkpoint_file.check(file)
        return checkpoint.load(file, only=OF_MODEL)

    return checkpoint_file.read_steady(file, checked)


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
        model = _built(config, features)
    averaged = weights_in(state, model.state_dict().keys())[0].state
    load_all(model, {**state["model"], **averaged})
    layout = torch.channels_last if config.channels_last and not plain else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    computed = config.amp if amp == "recorded" else amp
    precision = Precision(computed, device)
    preprocess = Preprocess(config.dataset, features, device)
    trained = TrainedModel(model, features, state["config"], preprocess, precision.autocast)
    trained.workers = state.get("workers", ())
    return trained.eval()


def _built(config: RunConfig, features: Features) -> nn.Module:
    """Return the model with weights to be replaced; leave torch's random numbers as they are."""
    shapes, example = features.shapes, None
    if "image_size" in shapes:
        example = torch.zeros(1, shapes["channels"], *shapes["image_size"])
    with torch.random.fork_rng(devices=[]):
        return model_build.build(
            config.model, groups.DefaultInit(name="default"), features, example, fetch=False
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
    names = targets({"model": config["model"]})
    others = targets({**config, "model": {}})
    if own_code.is_imported(record):
        return
    if old := own_code.older_here(targets(config), record):
        warn(f"{', '.join(old)}: changed since its import here; the run's classes are the file's")
    if names and not others and own_code.has_other_source(record):
        warn(
            f"model._target_={names[0]}: its source has changed since the run; its outputs may be"
            " others"
        )
