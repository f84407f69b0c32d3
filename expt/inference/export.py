"""A run's model as a file for other programs, checked against the model itself before it is there."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from expt.config import secrets
from expt.config.parse import recorded
from expt.data.tree import leaves, mapped
from expt.errors import ConfigError, RunFailed
from expt.inference import described
from expt.inference.load import TrainedModel, importable_from_here, rebuilt, saved
from expt.inference.prepared import prepared
from expt.inference.samples import samples
from expt.inference.scales import Undone, scales_of, undoes
from expt.runs.files import take_name
from expt.tasks.task import Facts

Format = Literal["torch_export", "onnx"]
SAMPLES = 64
"""Of which the file's outputs are compared with the model's."""
LARGE = 100.0
"""An output from which on float32 has no digits left for an absolute tolerance."""
METADATA = "expt.json"
"""In a file of torch.export: what ONNX has as metadata."""

Call = Callable[[Sequence[Any]], Sequence[Tensor]]
"""From the tensors of a batch to those of the outputs."""


class Exported(NamedTuple):
    """A file that has passed its check."""

    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    goes_in: str
    comes_out: str
    """What the numbers mean; empty where only the task knows."""
    source: str
    """Of the samples that it was checked with; see Samples."""
    num_samples: int
    batches: tuple[int, ...]
    """The sizes of the batches that it was checked with."""
    difference: float
    """The largest."""
    allowed: float
    epoch: int


def export(
    run: Path,
    file: Path,
    format: Format,
    *,
    which: str = "best",
    batch_size: int | None = None,
    preprocess: bool = False,
    tolerance: float = 1e-4,
    force: bool = False,
) -> Exported:
    """Write the model of a run to `file`, for batches of any size, or of one.

    With `preprocess` the file takes pixels in [0, 1], or rows as they stand in the table,
    normalises them itself, and gives a regression's numbers in the targets' own units. It is there
    only where its outputs are those of the model, to `tolerance`; LARGE ones by their size. Raises
    ConfigError for what cannot be done, RunFailed where the export or the check fails."""
    record, state = saved(run, which)
    model = rebuilt(record, state, torch.device("cpu"), plain=True)
    expected_of: nn.Module = rebuilt(record, state, torch.device("cpu"), plain=True).model
    with importable_from_here():
        config = recorded(state["config"])
        found = samples(
            config, record["data"], max(SAMPLES, batch_size or 0), normalised=not preprocess
        )
        task = config.task.build(Facts(shapes=record["data"], class_names=model.class_names))
    if task.phases:
        raise ConfigError(
            f"{run}: a model of several phases has no one output that could be exported"
        )
    module, scales, units = model.model, scales_of(config.dataset, record["data"]), None
    if preprocess:
        module, expected_of = prepared(model, config.dataset, record["data"]), _Preprocessed(model)
        if undoes(config.task, scales):
            module = units = Undone(module, scales.targets.values())
    arguments = _called_with(module, task, found.batch)
    number = len(next(leaves(arguments)))
    sizes = (batch_size,) if batch_size else tuple(dict.fromkeys((1, min(3, number), number)))
    about = described.metadata(
        run, model, config, record["data"], state["position"]["epoch"], preprocess=preprocess
    )
    dims = {} if batch_size else _dynamic(record["data"])
    with torch.no_grad(), _beside(file) as beside:
        shown = _cut(arguments, batch_size or max(2, number))
        names = _written(format, beside, module, shown, dims, about)
        allowed, difference = tolerance, 0.0
        call = _call_of(format, beside)
        for size in sizes:
            part = _cut(arguments, size)
            wanted = [*leaves(expected_of(*part))]
            got = call([*leaves(part)])
            if (
                units is not None
            ):  # compared as the model gives them: what is allowed is of a deviation
                got = [
                    units.standardised(each).to(like.dtype)
                    for each, like in zip(got, wanted, strict=True)
                ]
            largest = max((float(each.abs().max()) for each in wanted), default=0.0)
            allowed = max(allowed, tolerance * largest / LARGE)
            difference = max(difference, _difference(wanted, got))
        if not difference <= allowed:  # nan too
            raise RunFailed(
                f"{file}: is not written: its outputs differ from the model's by up to"
                f" {difference:.2g}, and {allowed:.1g} is allowed; --tolerance allows more"
            )
        _publish(beside, file, force=force)
    position = state["position"]["epoch"]
    words = described.words(config, record["data"], model.class_names, preprocess=preprocess)
    return Exported(
        file, *names, *words, found.source, number, sizes, difference, allowed, position
    )


class _Preprocessed(nn.Module):
    """The model after its own `preprocess`."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self._trained = model

    def forward(self, samples: Tensor) -> Any:
        given = self._trained.preprocess(samples)
        return self._trained(
            given if samples.dim() > 2 else given.flatten(1)
        )  # rows, as the loaders have them


def _called_with(module: nn.Module, task: Any, batch: Any) -> tuple[Any, ...]:
    """What the task calls the model with.

    Raises ConfigError where that is more than tensors by their place.
    """
    calls: list[tuple[Any, ...]] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in args):
            given = ", ".join([*(type(arg).__name__ for arg in args), *kwargs])
            raise ConfigError(
                f"the task calls the model with {given}; only tensors by their place can be"
                " exported"
            )
        calls.append(args)
        return module(*args)

    with torch.no_grad():
        task.forward(called, batch)
    return calls[0]


def _cut(arguments: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The first `size` samples, the same ones again where there are fewer."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.repeat(-(-size // len(tensor)), *[1] * (tensor.dim() - 1))[:size].clone()

    found: tuple[Any, ...] = mapped(cut, arguments)
    return found


def _dynamic(trained_on: Mapping[str, Any]) -> dict[int, Any]:
    """The dimensions of a tensor that may have other sizes."""
    dims = {0: torch.export.Dim("batch")}
    return dims | (
        {1: torch.export.Dim("tokens", max=trained_on["context"])}
        if "vocab_size" in trained_on
        else {}
    )


def _written(
    format: Format,
    file: Path,
    module: nn.Module,
    arguments: tuple[Any, ...],
    dims: Mapping[int, Any],
    about: Mapping[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the file; its inputs and outputs in words. Raises RunFailed where torch cannot."""
    dynamic: Any = mapped(lambda _: dict(dims) or None, arguments)
    try:
        with _quiet():
            program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
            if format == "onnx":
                _write_onnx(program, file, about, len([*leaves(arguments)]))
            else:
                torch.export.save(program, str(file), extra_files={METADATA: json.dumps(about)})
            outputs = module(*arguments)
    except Exception as error:  # what torch's exporters raise is of many kinds
        told = secrets.said(error)
        mend = "; --batch-size N may do for one size" if dims else ""
        raise RunFailed(f"{file.name}: the model cannot be exported ({told}){mend}") from error
    return tuple(
        tuple(_in_words(each, dims) for each in leaves(tree)) for tree in (arguments, outputs)
    )  # type: ignore[return-value]


def _write_onnx(program: Any, file: Path, about: Mapping[str, str], number: int) -> None:
    names = ["input"] if number == 1 else [f"input_{index}" for index in range(number)]
    found = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
    assert found is not None
    found.model.metadata_props.update({f"expt.{key}": value for key, value in about.items()})
    found.save(str(file), external_data=False)


def _in_words(tensor: Tensor, dims: Mapping[int, Any]) -> str:
    shape = ", ".join(
        dims[place].__name__ if place in dims else str(size)
        for place, size in enumerate(tensor.shape)
    )
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]"


def _call_of(format: Format, file: Path) -> Call:
    """What the file computes, read from the disk."""
    if format == "torch_export":
        module = torch.export.load(str(file)).module()
        return lambda tensors: [*leaves(module(*tensors))]
    onnxruntime: Any = importlib.import_module("onnxruntime")  # an extra
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return call


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest; infinite where the shapes differ."""
    if [each.shape for each in wanted] != [each.shape for each in got]:
        return float("inf")
    return max(float((one - other).abs().max()) for one, other in zip(wanted, got, strict=True))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and its exporters say of themselves."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A file of that name in a folder of its own beside, which is gone in the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.parent))
    except OSError as error:
        raise ConfigError(
            f"{file.parent}: {error.strerror}; name another file by --output FILE"
        ) from error
    try:
        yield folder / file.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(beside: Path, file: Path, *, force: bool) -> None:
    if force:
        beside.replace(file)
        return
    try:
        take_name(beside, file)
    except FileExistsError:
        raise ConfigError(f"{file}: is there by now; --force replaces it") from None
