"""A run's model asked about what a person has: what it predicts of each sample, in batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expt import machine
from expt.data import build
from expt.data.loading import Batch, LoaderOptions, to_device
from expt.data.plain_text import opened
from expt.errors import (
    ConfigError,
    DataError,
    OutOfMemory,
    RunFailed,
    first_line,
    is_out_of_memory,
    listed,
    warn,
)
from expt.features import NO_TARGET, Answers
from expt.inference.load import TrainedModel, importable_from_here, load
from expt.inference.plan import PICTURES, ROWS, SAMPLES, TEXTS, Plan
from expt.runs.request import Split
from expt.tasks.task import Facts
from expt.training.devices import held_by_others
from expt.training.precision import precision_kept, set_precision
from expt.training.task_state import load_task_state

T = TypeVar("T")
_NUMBERS, _MOST = 10_000_000, 1024
"""A batch's inputs, and its samples, where nothing is said of its size: 40 MB of float32."""
_AHEAD = 2
"""Batches of pictures that are read while one is computed."""


class Chunk(NamedTuple):
    """Some samples, in order."""

    about: Sequence[Mapping[str, str | int]]
    inputs: Any
    """On the device, as the model takes them."""
    targets: Any = None
    """On the device, where they are known."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of pictures as they lie."""


class Predictor:
    """The run's model on its device, and the samples that could not be read."""

    def __init__(self, plan: Plan) -> None:
        """Load the model. Raise ConfigError as `load` does."""
        self._plan, self.device = plan, _device(plan.device)
        with _faults_in_words(self.device), importable_from_here(plan.record):
            self.model: TrainedModel = load(
                plan.run, plan.which, device=self.device, amp=plan.amp, trust_code=plan.trust_code
            )
            self._task = plan.config.task.build(Facts(targets=plan.features.targets))
            load_task_state(self._task, self.model.workers, self.device)
        if self._task.phases:
            raise ConfigError(f"{plan.run}: a model of several phases is used by expt.load only")
        self.form = plan.form
        self.seen = 0
        """Samples so far, with those that are left out."""
        self.skipped: list[str] = []
        """Why a sample was left out, a line each."""

    def __iter__(self) -> Iterator[Answers]:
        """Yield answers in the order of the samples.

        Raise ConfigError for what can't be read or does not fit the model.
        """
        return self.form.joined(self._answers())

    def _answers(self) -> Iterator[Answers]:
        with (
            precision_kept(),
            importable_from_here(self._plan.record),
            _faults_in_words(self.device),
        ):
            set_precision(self._plan.config.matmul_precision)
            for chunk in self._chunks():
                self.seen += len(chunk.about)
                yield self._answer(chunk)

    def _skip(self, lines: Sequence[str]) -> None:
        self.seen += len(lines)
        self.skipped += lines

    @torch.no_grad()
    def _answer(self, chunk: Chunk) -> Answers:
        with self.model.autocast():
            batch = Batch(chunk.inputs, chunk.targets, len(chunk.about))
            outputs = self._task.forward(self.model.model, batch)
        decoded = self.form.decoded(self._task.predict(outputs), chunk.targets)
        return Answers(chunk.about, *decoded, chunk.sizes)

    def _chunks(self) -> Iterator[Chunk]:
        plan, size = self._plan, self._plan.batch_size
        if plan.split is not None:
            return self._split(plan.split, size)
        if plan.kind is TEXTS:
            context = plan.features.shapes["context"]
            return self._texts(context, size or max(1, _NUMBERS // (context * 256)))
        shapes = plan.features.shapes
        numbers = shapes.get("channels", 1) * math.prod(shapes.get("image_size", ()))
        if plan.samples and plan.kind is not ROWS:
            numbers = plan.samples[0].array[:1].size
        size = size or max(1, min(_MOST, _NUMBERS // max(1, numbers)))
        return self._several(size) if plan.samples else self._pictures(size)

    def _split(self, split: str, size: int | None) -> Iterator[Chunk]:
        """Yield a part of the run's own dataset as its evaluations had it."""
        config, record = self._plan.config, self._plan.record
        dataset = config.dataset
        if hasattr(dataset, "transforms"):
            dataset = dataclasses.replace(dataset, transforms=None)  # of training
        dataset.prepare(config.task, learns=False)
        then, now = record.get("content", {}).get("data"), dataset.fingerprint()
        if then is not None and now is not None and then != now:
            warn("the dataset's files are other than those of the run")
        options = LoaderOptions(
            batch_size=config.batch_size,
            eval_batch_size=size or config.samples_per_evaluation,
            device=self.device,
            channels_last=config.channels_last,
        )
        workers, part = min(machine.usable_cpus(), 8), cast("Split", split)
        (loader,) = build.load(
            *(dataset, config.task, part, self._plan.features, options),
            own=True,
            num_workers=workers,
        ).loaders
        build.keep_doubles(self.model, [loader])
        about, numbers = dataset.origin(config.task, split), loader.numbers()
        for batch in loader.evaluation():
            here = itertools.islice(numbers, batch.size)
            yield Chunk([about(index) for index in here], batch.inputs, batch.targets)

    def _pictures(self, size: int) -> Iterator[Chunk]:
        """Yield pictures, decoded by threads ahead of the model."""
        preprocess = self.model.preprocess

        def read(path: str) -> tuple[str, Tensor, tuple[int, int]] | str:
            try:
                pixels, (width, height) = preprocess.picture(path)
                return path, pixels, (height, width)
            except DataError as error:
                return str(error)

        for found in _ahead(read, self._plan.files, size):
            self._skip([each for each in found if isinstance(each, str)])
            if good := [each for each in found if not isinstance(each, str)]:
                paths, pixels, sizes = zip(*good, strict=True)
                inputs = preprocess(to_device(torch.stack(pixels), self.device))
                yield Chunk([{"path": path} for path in paths], inputs, sizes=sizes)

    def _several(self, size: int) -> Iterator[Chunk]:
        """Yield the samples of arrays, or the rows of tables."""
        kind = self._plan.kind
        name, first = ("row", 1) if kind is ROWS else ("index", 0)
        in_unit = kind is PICTURES and not self._plan.config.dataset.custom_class
        for samples in self._plan.samples:
            path, start = samples.path, 0
            for array, wrong, beside in samples.pieces(size):
                skipped = sorted(wrong.items())
                self._skip([f"{path}: row {start + at + 1}: {why}" for at, why in skipped])
                good = [at for at in range(len(array)) if at not in wrong]
                piece = array[good]  # always a copy: files are mapped read-only
                about: list[Mapping[str, str | int]] = [
                    {"path": path, name: start + at + first, **{x: beside[x][at] for x in beside}}
                    for at in good
                ]
                start += len(array)
                if in_unit:
                    _check_unit(path, piece)
                if kind is SAMPLES and piece.dtype == np.float64:
                    piece = piece.astype(np.float32)
                if good:
                    yield Chunk(about, self.model.preprocess(piece))

    def _texts(self, context: int, size: int) -> Iterator[Chunk]:
        """Yield lines that are not blank, in windows as an evaluation has them, in their order."""
        windows = (
            ({"path": path, "line": number}, window)
            for path in self._plan.files
            for number, tokens in _lines(path, self._plan.config.dataset)
            for window in _windows(tokens, context)
        )
        while several := list(itertools.islice(windows, size)):
            about, tokens = zip(*several, strict=True)
            inputs = [torch.from_numpy(window[:-1]) for window in tokens]
            targets = [torch.from_numpy(window[1:]) for window in tokens]
            known = pad_sequence(inputs, batch_first=True)
            wanted = pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)
            yield Chunk(about, to_device(known, self.device), to_device(wanted, self.device))


@contextlib.contextmanager
def _faults_in_words(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemory where memory of the device does not suffice, RunFailed where it fails."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            if isinstance(error, torch.AcceleratorError):
                raise RunFailed(first_line(error)) from error
            raise
        others = held_by_others(device.index) if device.type == "cuda" else ""
        fix = others or "use a smaller --batch-size, or --device cpu"
        raise OutOfMemory(f"{first_line(error).partition('. ')[0]}; {fix}") from error


def _lines(path: str, dataset: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the tokens of each line, as the run's texts were read."""
    try:
        if dataset.tokens == "bytes":
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    yield number, np.frombuffer(line.rstrip(b"\r\n"), np.uint8)
        else:
            with opened(Path(path)) as text:
                for number, words in enumerate(text, 1):
                    yield number, np.array(dataset.encode(words.rstrip("\r\n")), np.int64)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def _windows(tokens: np.ndarray, context: int) -> Iterator[np.ndarray]:
    if len(tokens) == 1:  # nothing follows that could be likely
        yield np.array([tokens[0], NO_TARGET])
    for start in range(0, len(tokens) - 1, context):
        yield tokens[start : start + context + 1].astype(np.int64)


def _check_unit(path: str, piece: np.ndarray) -> None:
    low, high = piece.min(), piece.max()
    if piece.dtype.kind == "f" and not (low >= 0 and high <= 1):
        raise ConfigError(f"{path}: holds floats from {low:g} to {high:g}, expected 0 to 1")


def _ahead(read: Callable[[str], T], paths: Sequence[str], size: int) -> Iterator[list[T]]:
    """Yield what `read` returns of each path, `size` at a time, while the next are being read."""
    threads = ThreadPoolExecutor(min(machine.usable_cpus(), 16))
    pending = collections.deque[Iterator[T]]()
    try:
        for start in range(0, len(paths), size):
            pending.append(threads.map(read, paths[start : start + size]))
            if len(pending) > _AHEAD:
                yield list(pending.popleft())
        while pending:
            yield list(pending.popleft())
    finally:
        threads.shutdown(cancel_futures=True)


def _device(name: str) -> torch.device:
    """Return the device; by default the first GPU that can be used.

    Raises ConfigError where torch has none of that name, RunFailed where it can't be used.
    """
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count()) if torch.cuda.is_available()]
    known, faults = f"use --device {listed(['cpu', *gpus])}", list[RunFailed]()
    for each in (gpus or ["cpu"]) if name == "auto" else [name]:
        try:
            device = torch.device(each)
            if gpus and device.type == "cuda" and (device.index or 0) >= len(gpus):
                raise RuntimeError(f"there are {len(gpus)} GPUs")
            with _faults_in_words(device):
                found = torch.empty(1, device=device).device  # memory of it is the first use
            if found.type == "cuda":
                torch.cuda.set_device(found)  # else torch begins to use the first one, too
        except RunFailed as error:
            faults.append(type(error)(f"--device {each}: {error}"))
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"--device {each}: {first_line(error)}; {known}") from error
        else:
            for fault in faults:
                warn(f"{fault}; {each} is used")
            return found
    raise type(faults[0])(f"{'; '.join(map(str, faults))}; {known}")
