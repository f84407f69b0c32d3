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
from expt.data.build import shapes_told
from expt.data.checked_samples import Transformed, build_transforms
from expt.data.columns import read_as_known, text_of, unknown_texts
from expt.data.image_files import MODES, fit, open_picture, size_of, stretch
from expt.data.kinds import DatasetConfig
from expt.data.loading import Finish, LoaderOptions
from expt.data.memory import Encoder
from expt.errors import ConfigError, warn
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
Scales: TypeAlias = Mapping[str, tuple[float, float]]
"""The mean and the deviation that columns were standardised by, if they were."""

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
        data: Mapping[str, Any],
        device: torch.device,
        *,
        segments: bool = False,
    ) -> None:
        self._dataset, self._data, self._device = dataset, data, device
        self._transforms = build_transforms(getattr(dataset, "eval_transforms", None) or ())
        self._resize = stretch if dataset.has_masks(segments) else fit
        self._names, encoded = [*data.get("feature_names", ())], data.get("encoded", {})
        known, features = data.get("standardised", {}), {*self._names} if dataset.has_rows else {}
        self.features: Scales = {x: each for x, each in known.items() if x in features}
        self.targets: Scales = {x: each for x, each in known.items() if x not in features}
        self.encoded: Mapping[str, Mapping[str, Any]] = encoded
        self._encode = Encoder(self._names, encoded, self.features)
        self._shape: list[int] = [*data.get("sample", {}).get("shape", ())]
        self._normalise: Finish | None = None
        if dataset.has_pixels(data):
            how = LoaderOptions(batch_size=1, device=device, mean=dataset.mean, std=dataset.std)
            self._normalise = Finish(how, data["channels"])

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        if "vocab_size" in self._data:
            return self._tokens(samples)
        if self.encoded and not _are_arrays(samples):
            samples = self._coded(samples)
        has_rows, are_several = self._dataset.has_rows, isinstance(samples, list | tuple)
        if are_several and (not has_rows or any(hasattr(sample, "dtype") for sample in samples)):
            return torch.cat([self(sample) for sample in samples])
        if has_rows:
            return self._rows(samples)
        if self._normalise is None:
            return self._as_is(_tensor(samples))
        is_array = isinstance(samples, Tensor | np.ndarray)
        images = _tensor(samples) if is_array else self.picture(samples)[0]
        images = images.unsqueeze(0) if images.dim() == 3 else images
        channels = self._data["channels"]
        if images.dim() != 4 or images.shape[1] != channels:
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        return self._normalise(images.to(self._device, copy=True))

    def _as_is(self, given: Tensor) -> Tensor:
        """Return samples of a custom dataset; one gets a batch's dimension."""
        if self._shape and given.dim() not in (len(self._shape), len(self._shape) + 1):
            raise ConfigError(
                f"samples of shape {list(given.shape)}: those of training are {self._shape}; give"
                " one, or a batch"
            )
        return (given[None] if given.dim() == len(self._shape) else given).to(self._device)

    def picture(self, given: Any, name: str = "the picture") -> tuple[Tensor, tuple[int, int]]:
        """Return a picture, or that of a path, as uint8 [C, H, W] of the model's size.

        And the width and height that it had. Raise DataError for a damaged one, by its path or
        `name`.
        """
        channels, (height, width) = self._data["channels"], self._data["image_size"]
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

    def _rows(self, given: Any) -> Tensor:
        try:
            is_list = isinstance(given, list | tuple)
            rows = torch.tensor(given, dtype=torch.float64) if is_list else _tensor(given).double()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows: {error}; give lists of numbers, as many in each") from error
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        if rows.dim() != 2 or rows.shape[1] != len(self._names):
            raise ConfigError(f"rows of shape {list(rows.shape)}: give [N, {len(self._names)}]")
        return self._encode(rows.cpu()).float()[:, None, None].to(self._device)

    def _coded(self, given: Any) -> Tensor:
        """Return rows of numbers, texts and None as Encoder takes them, float64 [N, F]."""
        if hasattr(given, "columns"):  # of pandas, by their names
            given = given[self._names].to_numpy(object)
        rows = np.array(given, object)
        rows = rows.reshape(-1, rows.shape[-1])
        if rows.shape[1] != len(self._names):
            raise ConfigError(f"rows of {rows.shape[1]} cells: give {', '.join(self._names)}")
        cells = (pyarrow.array([*map(text_of, each)], pyarrow.string()) for each in rows.T)
        columns = dict(zip(self._names, cells, strict=True))
        values, wrong, unknown = read_as_known(columns, self.encoded)
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
        config = recorded(state["config"])
        model = _built(config, record)
    averaged = weights_in(state, model.state_dict().keys())[0].state
    load_all(model, {**state["model"], **averaged})
    layout = torch.channels_last if config.channels_last and not plain else torch.contiguous_format
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    computed = config.amp if amp == "recorded" else amp
    precision = Precision(computed, device)
    preprocess = Preprocess(
        config.dataset, record["data"], device, segments=config.task.TARGETS == "mask"
    )
    trained = TrainedModel(model, record, state["config"], preprocess, precision.autocast)
    trained.workers = state.get("workers", ())
    return trained.eval()


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
