"""A run's model asked about what a person has: what it predicts of each sample, a batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from expt.config.schema import RunConfig
from expt.data.loading import Batch
from expt.errors import ConfigError, OutOfMemory
from expt.inference import reading, sources, split
from expt.inference.answers import Answers, Form, Likelihoods, form_of
from expt.inference.load import TrainedModel, importable_from_here, load
from expt.inference.plan import Plan
from expt.inference.reading import Chunk
from expt.tasks.task import Facts, Task

_NUMBERS, _MOST = 10_000_000, 1024
"""A batch's inputs, and its samples, where nothing is said of its size: 40 MB of float32."""


class Predictor:
    """The run's model on its device, and the samples that are left out because they could not be
    read.
    """

    def __init__(self, plan: Plan) -> None:
        """Raises ConfigError and CheckpointError, see `load`."""
        self._plan, asked = plan, plan.asked
        self.device = _device(asked.device)
        self.model: TrainedModel = load(asked.run, asked.which, device=self.device, amp=asked.amp)
        with importable_from_here():
            self._task = _task(plan.config, plan)
        if self._task.phases:
            raise ConfigError(
                f"{asked.run}: a model of several phases says nothing of a sample; use expt.load in"
                " Python"
            )
        self.form: Form = form_of(plan)
        self.seen = 0
        """Samples so far, with those that are left out."""
        self.skipped: list[str] = []
        """Why a sample was left out, a line for each."""

    def __iter__(self) -> Iterator[Answers]:
        """In the order of the samples.

        Raises ConfigError for what can't be read or does not fit the model.
        """
        answers = self._answers()
        yield from self.form.joined(answers) if isinstance(self.form, Likelihoods) else answers

    def _answers(self) -> Iterator[Answers]:
        with _multiplying_as(self._plan.config), importable_from_here():
            for chunk in self._chunks():
                self.seen += len(chunk.about) + len(chunk.skipped)
                self.skipped += chunk.skipped
                if chunk.about:
                    yield self._answer(chunk)

    @torch.no_grad()
    def _answer(self, chunk: Chunk) -> Answers:
        batch = Batch(chunk.inputs, chunk.targets, len(chunk.about))
        try:
            with self.model.autocast():
                outputs = self._task.forward(self.model.model, batch)
        except torch.OutOfMemoryError as error:
            told = str(error).partition(".")[0]
            raise OutOfMemory(
                f"{told}; use a smaller --batch-size than {len(chunk.about)}"
            ) from error
        arrays = self.form.arrays(self._task.predict(outputs), chunk.targets)
        return Answers(chunk.about, arrays, chunk.sizes)

    def _chunks(self) -> Iterator[Chunk]:
        plan, preprocess, device = self._plan, self.model.preprocess, self.device
        size = plan.asked.batch_size
        if plan.asked.split is not None:
            return split.chunks(plan.config, plan.record, plan.asked.split, device, size)
        if plan.kind is sources.TEXTS:
            context = int(plan.data["context"])
            return reading.texts(
                plan.files, device, context, size or max(1, _NUMBERS // (context * 256))
            )
        size = size or _batch_size(plan)
        if plan.features is not None:
            return reading.rows(plan.files, plan.features, preprocess, size)
        if plan.samples:
            return reading.arrays(plan.samples, preprocess, size)
        return reading.pictures(plan.files, preprocess, device, size)


def _batch_size(plan: Plan) -> int:
    height, width = plan.data.get("image_size", (1, 1))
    numbers = (
        plan.samples[0].array[:1].size
        if plan.samples
        else plan.data.get("channels", 1) * height * width
    )
    return max(1, min(_MOST, _NUMBERS // max(1, numbers)))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: this torch does not reach the GPU; expt doctor says why"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: this machine has none; use --device cpu")
    return torch.device(name)


def _task(config: RunConfig, plan: Plan) -> Task:
    task: Task = config.task.build(Facts(shapes=plan.data))
    return task


@contextlib.contextmanager
def _multiplying_as(config: RunConfig) -> Iterator[None]:
    """While entered, matrices are multiplied as precisely as in the run."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(config.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
