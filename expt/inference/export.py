"""A run's model as a file for other programs, or as a folder for transformers or peft.

It is compared with the model before it is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from expt import progress
from expt.config import secrets
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.data import build
from expt.data.loading import Batch, LoaderOptions, leaves, mapped
from expt.errors import (
    ConfigError,
    DataError,
    ExptError,
    RunFailed,
    described,
    listed,
    type_name,
    warn,
)
from expt.features import Columns, Feature, Features, Image, Tokens
from expt.inference.load import TrainedModel, importable_from_here, located, read, rebuilt
from expt.inference.writing import new_file, new_folder
from expt.models.hugging_face import HuggingFace, quiet
from expt.runs.paths import RunPaths
from expt.tasks.task import Facts
from expt.training.own_state import load_own_state

Format = Literal["torch_export", "onnx"]
SAMPLES = 64
"""The samples whose outputs by the file are compared with the model's."""
LARGE = 100.0
"""An output from which on float32 has no digits left for an absolute tolerance."""
METADATA = "expt.json"
"""The name of the metadata in a torch.export file."""
_TEXTS, _TOKENS = 8, 12
"""The sizes of the random batch by which the folder is checked."""


class Complete(nn.Module):
    """A model of pixels in [0, 1], float32 [N, C, H, W], or of a table's rows, float32 [N, F].

    Numbers come out in the targets' own units, as float64, which keeps the digits of those far from
    0.
    """

    def __init__(self, trained: TrainedModel, targets: Feature) -> None:
        super().__init__()
        if not isinstance(inputs := trained.features.inputs, Columns | Image):
            raise ConfigError("--preprocess: the run's samples go in as they are; leave it out")
        if coarse := getattr(inputs, "coarse", []):
            fix = "leave --preprocess out, and standardise in float64"
            warn(f"--preprocess: the numbers of {listed(coarse)} are too large for float32; {fix}")
        self.model, self._preprocess, self._targets = trained.model, trained.preprocess, targets
        self._has_units = targets.unit_width > 0

    def forward(self, samples: Tensor) -> Any:
        """Return the outputs of the model, in units."""
        given = self._preprocess(samples)
        output = self.model(given if samples.dim() > 2 else given.flatten(1))
        return self._targets.in_units(output) if self._has_units else output

    def without_units(self, output: Tensor) -> Tensor:
        """Return the outputs of the model before they were put into units."""
        return self._targets.from_units(output).float() if self._has_units else output


@progress.phase("exporting")
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
) -> dict[str, str]:
    """Write the model of a run to `file`, for batches of any size, or of one; describe it.

    With `preprocess` the file takes pixels in [0, 1], or rows as they stand in the table (a text as
    its place among the categories, nan for a gap), encodes and normalises them itself, and gives a
    regression's numbers in the targets' own units. It is
    written only if its outputs equal the model's, to `tolerance`; LARGE ones by their size.

    Raise ConfigError where it cannot be done, RunFailed where the export or the check fails.
    """
    record, path = located(run, which)
    state, cpu = read(path), torch.device("cpu")
    trained = rebuilt(record, state, cpu, plain=True)
    with importable_from_here(record):
        config = recorded(state["config"])
        number = max(SAMPLES, batch_size or 0)
        batch, source = _samples(config, record["data"], trained, number, preprocess)
        task = config.task.build(Facts(targets=trained.features.targets))
        load_own_state(task, trained.workers, cpu)
    if task.phases:
        raise ConfigError(f"{run}: a model of several phases has no one output to export")
    inputs, targets = trained.features.inputs, config.task.outputs(trained.features.targets)
    module = Complete(trained, targets).eval() if preprocess else trained.model
    arguments = _called_with(module, task, batch)
    number = len(next(leaves(arguments)))
    sizes = (batch_size,) if batch_size else tuple(dict.fromkeys((1, min(3, number), number)))
    epoch, dims = state["position"]["epoch"], dict[int, Any]()
    if not batch_size:
        dims[0] = torch.export.Dim("batch")
        if isinstance(inputs, Tokens):
            dims[1] = torch.export.Dim("tokens", max=inputs.context)
    about = _metadata(run, trained, config, epoch, preprocess)
    with torch.no_grad(), new_file(file, force=force) as beside:
        shown = _cut(arguments, batch_size or max(2, number))
        given, outputs = _write(format, Path(beside.name), module, shown, dims, about)
        call = _call_of(format, Path(beside.name))
        parts = [_cut(arguments, size) for size in sizes]
        allowed, difference = compared(module, call, parts, tolerance)
        _refuse_other(file, allowed, difference, "--tolerance allows more")
    meaning = f"{targets.outputs}; names and scales are in the file's metadata"
    return {
        "takes": f"{given}, and gives {outputs}",
        **({"out": meaning} if targets.outputs else {}),
        "weights": f"of epoch {epoch}, the {which}",
        "checked": f"{sizes[-1]} samples {source}, in batches of {', '.join(map(str, sizes))}",
        "difference": f"at most {difference:.2g}, and {allowed:.2g} is allowed",
    }


def _samples(
    config: RunConfig, data: Mapping[str, Any], trained: TrainedModel, number: int, preprocess: bool
) -> tuple[Batch, str]:
    """Return up to `number` samples of the run's dataset, or random ones, and their origin.

    Nothing is downloaded. To `preprocess`, images are pixels in [0, 1], and rows [N, F] as they
    stand in the table. Raise ConfigError where the shape of samples is not known.
    """
    if preprocess and isinstance(inputs := trained.features.inputs, Columns) and inputs.encoded:
        rows = inputs.drawn_as_read(number, torch.Generator().manual_seed(0))
        return Batch(rows, None, number), "at random"
    dataset, features = config.dataset, trained.features
    left_out = {key: False for key in ("download", "cache") if hasattr(dataset, key)}
    dataset = dataclasses.replace(dataset, **left_out)
    if preprocess:
        dataset = dataclasses.replace(dataset, mean=None, std=None)
        features = Features(*(each.unscaled for each in features))
    split = next(part for part in ("test", "val", "train") if data.get(f"{part}_size"))
    options = LoaderOptions(batch_size=number, device=torch.device("cpu"), eval_batch_size=number)
    try:
        dataset.prepare(config.task, learns=False)
        found = build.load(dataset, config.task, split, features, options, own=True)  # type: ignore[arg-type]
        build.keep_doubles(trained, found.loaders)
        batch = next(iter(found.evaluation()), None)
        if batch is None:
            raise DataError(f"{dataset.label}: has no samples")
    except (ExptError, OSError, ImportError) as error:
        inputs = trained.features.inputs
        scaled = inputs if preprocess else inputs.unscaled
        if (drawn := scaled.drawn(number, torch.Generator().manual_seed(0))) is None:
            raise ConfigError(
                f"what the model takes is not known without its dataset: {error}"
            ) from error
        return Batch(drawn, None, number), "at random"
    inputs, targets = mapped(lambda tensor: tensor[:number], (batch.inputs, batch.targets))
    return Batch(inputs, targets, number), f"of {split}"


def _metadata(
    run: Path, trained: TrainedModel, config: RunConfig, epoch: int, preprocess: bool
) -> dict[str, str]:
    """Return the metadata of the file, each value in JSON."""
    inputs, targets = trained.features
    about: dict[str, Any] = {
        "class_names": trained.class_names,
        "feature_names": inputs.names,
        "target_names": () if trained.class_names else targets.columns,
        "encoded": getattr(inputs, "encoded", {}),
        "preprocess": preprocess,
        "run": run.resolve().name,
        "epoch": epoch,
    }
    if not preprocess:
        scales = {"features": inputs.scales, "targets": targets.scales}
        about |= {"mean": config.dataset.mean, "std": config.dataset.std}
        about["standardised"] = {key: value for key, value in scales.items() if value}
        about["means"] = getattr(inputs, "means", {})
        about["target_transform"] = getattr(targets, "transform", "") or None
    return {key: json.dumps(v) for key, v in about.items() if v not in (None, (), [], {})}


def _called_with(module: nn.Module, task: Any, batch: Any) -> tuple[Any, ...]:
    """Return the arguments of the task's call: tensors by their place, else ConfigError."""
    calls: list[tuple[Any, ...]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in args):
            given = ", ".join([*map(described, args), *kwargs])
            raise ConfigError(
                f"the task calls the model with {given}; only tensors by their place can be"
                " exported, and a model of transformers by --format huggingface"
            )
        calls.append(args)

    with torch.no_grad(), module.register_forward_pre_hook(note, with_kwargs=True):
        task.forward(module, batch)
    if not calls:
        raise ConfigError("the task calls a method of the model; only its call can be exported")
    return calls[0]


def _cut(arguments: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return the first `size` samples, the same ones again where there are fewer."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.repeat(-(-size // len(tensor)), *[1] * (tensor.dim() - 1))[:size].clone()

    found: tuple[Any, ...] = mapped(cut, arguments)
    return found


def _write(
    format: Format,
    file: Path,
    module: nn.Module,
    arguments: tuple[Any, ...],
    dims: Mapping[int, Any],
    about: Mapping[str, str],
) -> tuple[str, str]:
    """Write the file; return its inputs and outputs in words. Raise RunFailed if torch can't."""
    dynamic: Any = mapped(lambda _: dict(dims) or None, arguments)
    try:
        with _quiet():
            program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
            if format == "onnx":
                number = len([*leaves(arguments)])
                names = ["input"] if number == 1 else [f"input_{index}" for index in range(number)]
                found = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
                assert found is not None
                found.model.metadata_props.update({f"expt.{k}": v for k, v in about.items()})
                found.save(str(file), external_data=False)
            else:
                buffer = io.BytesIO()  # into a file torch aborts where the disk is full
                torch.export.save(program, buffer, extra_files={METADATA: json.dumps(about)})
                file.write_bytes(buffer.getbuffer())
            outputs = module(*arguments)
    except OSError:  # the disk's
        raise
    except Exception as error:  # torch's exporters raise many kinds
        hint = "; --batch-size N may do for one size" if dims else ""
        raise RunFailed(f"the model cannot be exported ({secrets.said(error)}){hint}") from error
    return _in_words(arguments, dims), _in_words(outputs, dims)


def _in_words(tree: Any, dims: Mapping[int, Any]) -> str:
    """Return the type and the shape of each tensor."""
    found = []
    for tensor in leaves(tree):
        named = {place: dim.__name__ for place, dim in dims.items()}
        shape = [named.get(place, str(size)) for place, size in enumerate(tensor.shape)]
        found.append(f"{type_name(tensor)} [{', '.join(shape)}]")
    return ", ".join(found)


def _call_of(format: Format, file: Path) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Return a function that applies the file on the disk to a batch's tensors."""
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


def compared(
    module: Callable[..., Any],
    call: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    parts: Sequence[tuple[Any, ...]],
    tolerance: float,
) -> tuple[float, float]:
    """Return the difference of outputs that is allowed, and the largest one; nan if one is."""
    sizes, differences = list[Tensor](), list[Tensor]()
    for part in parts:
        wanted, got = [*leaves(module(*part))], [*call(part)]
        if isinstance(module, Complete):  # compared as the model gives them: in deviations
            wanted, got = ([*map(module.without_units, each)] for each in (wanted, got))
        if [each.shape for each in wanted] != [each.shape for each in got]:
            return tolerance, math.inf
        for one, other in zip(wanted, got, strict=True):
            sizes.append(one.abs().max().double())
            differences.append((one - other).abs().max().double())
    largest = float(torch.stack(sizes).max())
    return tolerance * max(1.0, largest / LARGE), float(torch.stack(differences).max())


def _refuse_other(output: Path, allowed: float, difference: float, fix: str) -> None:
    """Raise RunFailed for outputs that differ from the model's."""
    if not difference <= allowed:  # nan too
        raise RunFailed(
            f"{output}: is not written: its outputs differ from the model's by up to"
            f" {difference:.2g}, and {allowed:.1g} is allowed; {fix}"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@progress.phase("exporting")
def export_folder(
    run: Path,
    folder: Path,
    *,
    which: str = "best",
    adapters: bool = False,
    tolerance: float = 1e-4,
) -> dict[str, str]:
    """Write the model of a run to a folder, with its tokenizer and classes; describe it.

    Adapters are merged into the weights, or with `adapters` written alone, for peft. The folder is
    there only if the model that is loaded from it gives equal outputs, to `tolerance`. Raise
    ConfigError for other models, RunFailed where the check fails.
    """
    record, path = located(run, which)
    state = read(path)
    module = rebuilt(record, state, torch.device("cpu"), plain=True).model
    model = recorded(state["config"]).model
    if not isinstance(module, HuggingFace):
        raise ConfigError(
            f"--format huggingface: the run's model is model={model.name}; use torch_export or onnx"
        )
    has_adapters = hasattr(module.model, "merge_and_unload")
    if adapters and not has_adapters:
        raise ConfigError("--adapters: the run trained all weights; leave it out")
    inputs = _random_inputs(module)
    with torch.no_grad(), quiet(), new_folder(folder) as beside:
        wanted = module(inputs)
        if adapters:
            _name_base(module, model)
        if (own := RunPaths(run).tokenizer).is_dir():  # with a configuration, which is not kept
            shutil.copytree(own, beside, dirs_exist_ok=True)
        _save(module, beside, merge=has_adapters and not adapters)
        other = _loaded(module, beside, adapters=adapters)
        allowed, difference = compared(
            lambda *_: wanted, lambda part: [*leaves(other(*part))], [(inputs,)], tolerance
        )
        is_merged = has_adapters and not adapters  # of tied weights it changes both
        fix = "--adapters leaves them apart" if is_merged else "--tolerance allows more"
        _refuse_other(folder, allowed, difference, fix)
    class_name = type(_body(module)).__name__
    by = f"peft, and {class_name}" if adapters else f"{class_name}.from_pretrained"
    return {
        "loaded by": by,
        "weights": f"of epoch {state['position']['epoch']}, the {which}",
        "difference": f"at most {difference:.2g}, and {allowed:.2g} is allowed",
    }


def _body(module: HuggingFace) -> Any:
    model = module.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _random_inputs(module: HuggingFace) -> dict[str, torch.Tensor]:
    body = _body(module)
    own, known = body.config.get_text_config(), len(body.get_input_embeddings().weight)
    size = min(_TOKENS, getattr(own, "max_position_embeddings", None) or _TOKENS)
    ids = torch.randint(known, (_TEXTS, size), generator=torch.Generator().manual_seed(0))
    if isinstance(end := own.eos_token_id, int):  # which T5 and BART look for in each text
        ids[ids == end] = (end + 1) % known
        ids[:, -1] = end
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _name_base(module: HuggingFace, config: Any) -> None:
    """Have the adapters name the published model by its place, or its name and commit."""
    (settings,) = module.model.peft_config.values()
    commit = module.base.get("commit")
    settings.base_model_name_or_path = config.path if commit else module.base["folder"]
    settings.revision = commit


def _save(module: HuggingFace, folder: Path, *, merge: bool) -> None:
    transformers: Any = importlib.import_module("transformers")
    body, model = _body(module), module.model
    if "generation" in module.base and body.can_generate():
        body.generation_config = transformers.GenerationConfig.from_dict(module.base["generation"])
    if merge:
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    body.config.save_pretrained(folder)


def _loaded(module: HuggingFace, folder: Path, *, adapters: bool) -> HuggingFace:
    """Return the model that others load from the folder."""
    kind, own = type(_body(module)), _body(module).config
    if not adapters:
        model = kind.from_pretrained(folder, dtype=torch.float32)
    else:
        peft: Any = importlib.import_module("peft")
        whole = kind.from_pretrained(
            module.base["folder"], config=own, dtype=torch.float32, ignore_mismatched_sizes=True
        )
        model = peft.PeftModel.from_pretrained(whole, folder)
    return HuggingFace(model.eval(), module.base, (), ())
