"""The predictions of a run's model for each sample, in batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import cast

import torch

from expt import errors, machine
from expt.data import build
from expt.data.loading import Batch, LoaderOptions
from expt.features import Answers
from expt.inference.inputs import Piece
from expt.inference.load import TrainedModel, importable_from_here, load
from expt.inference.plan import Plan
from expt.runs.request import Split
from expt.tasks.task import Facts
from expt.training.devices import held_by_others
from expt.training.precision import precision_kept, set_precision
from expt.training.task_state import load_task_state


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
            raise errors.ConfigError(
                f"{plan.run}: a model of several phases is used by expt.load only"
            )
        self.form = plan.form
        self.seen = 0
        """Samples so far, with those that are left out."""
        self.skipped: list[str] = []
        """Why a sample was left out, a line each."""

    def __iter__(self) -> Iterator[Answers]:
        """Yield answers in the order of the samples.

        Raise ConfigError for samples that can't be read or do not fit the model.
        """
        return map(self.form.named_apart, self.form.joined(self._answers()))

    def _answers(self) -> Iterator[Answers]:
        with (
            precision_kept(),
            importable_from_here(self._plan.record),
            _faults_in_words(self.device),
        ):
            set_precision(self._plan.config.matmul_precision)
            for piece in self._pieces():
                self.seen += len(piece.about)
                yield self._answer(piece)

    @torch.no_grad()
    def _answer(self, piece: Piece) -> Answers:
        with self.model.autocast():
            batch = Batch(piece.samples, piece.targets, len(piece.about))
            outputs = self._task.forward(self.model.model, batch)
        decoded = self.form.decoded(self._task.predict(outputs), piece.targets)
        if wrong := {len(each) for each in decoded[0].values()} - {len(piece.about)}:
            raise errors.ConfigError(
                f"the task predicts {wrong.pop()} rows for {len(piece.about)} samples; give one for"
                " each"
            )
        return Answers(piece.about, *decoded, piece.sizes)

    def _pieces(self) -> Iterator[Piece]:
        """Yield samples as the model takes them, on the device."""
        plan = self._plan
        if plan.split is not None:
            yield from self._split(plan.split, plan.batch_size)
            return
        for piece in plan.inputs.pieces(plan.batch_size or plan.inputs.at_once):
            self.seen += len(piece.skipped)
            self.skipped += piece.skipped
            if piece.about:
                targets = piece.targets if piece.targets is None else piece.targets.to(self.device)
                yield piece._replace(samples=self.model.preprocess(piece.samples), targets=targets)

    def _split(self, split: str, size: int | None) -> Iterator[Piece]:
        """Yield a part of the run's own dataset as its evaluations had it."""
        config, record = self._plan.config, self._plan.record
        dataset = config.dataset
        dataset.prepare(config.task, learns=False)
        then, now = record.get("content", {}).get("data"), dataset.fingerprint()
        if then is not None and now is not None and then != now:
            errors.warn("the dataset's files are other than those of the run")
        options = LoaderOptions(
            batch_size=config.batch_size,
            eval_batch_size=size or config.samples_per_evaluation,
            device=self.device,
            channels_last=config.channels_last,
        )
        part, features = cast("Split", split), self._plan.features
        workers = min(machine.usable_cpus(), 8)
        found = build.load(
            dataset, config.task, part, features, options, own=True, num_workers=workers
        )
        (loader,) = found.loaders
        build.keep_doubles(self.model, [loader])
        about, numbers = dataset.origin(config.task, split), loader.numbers()
        for batch in loader.evaluation():
            here = itertools.islice(numbers, batch.size)
            yield Piece([about(at) for at in here], batch.inputs, targets=batch.targets)


@contextlib.contextmanager
def _faults_in_words(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemory where memory of the device does not suffice, RunFailed where it fails."""
    try:
        yield
    except RuntimeError as error:
        if not errors.is_out_of_memory(error):
            if isinstance(error, torch.AcceleratorError):
                raise errors.RunFailed(errors.first_line(error)) from error
            raise
        others = held_by_others(device.index) if device.type == "cuda" else ""
        fix = others or "use a smaller --batch-size, or --device cpu"
        raise errors.OutOfMemory(f"{errors.first_line(error).partition('. ')[0]}; {fix}") from error


def _device(name: str) -> torch.device:
    """Return the device; by default the first GPU that can be used.

    Raises ConfigError where torch has none of that name, RunFailed where it can't be used.
    """
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count()) if torch.cuda.is_available()]
    known, faults = f"use --device {errors.listed(['cpu', *gpus])}", list[errors.RunFailed]()
    for each in (gpus or ["cpu"]) if name == "auto" else [name]:
        try:
            device = torch.device(each)
            if gpus and device.type == "cuda" and (device.index or 0) >= len(gpus):
                raise RuntimeError(f"there are {len(gpus)} GPUs")
            with _faults_in_words(device):
                found = torch.empty(1, device=device).device  # memory of it is the first use
            if found.type == "cuda":
                torch.cuda.set_device(found)  # else torch begins to use the first one, too
        except errors.RunFailed as error:
            faults.append(type(error)(f"--device {each}: {error}"))
        except (RuntimeError, AssertionError) as error:
            raise errors.ConfigError(
                f"--device {each}: {errors.first_line(error)}; {known}"
            ) from error
        else:
            for fault in faults:
                errors.warn(f"{fault}; {each} is used")
            return found
    raise type(faults[0])(f"{'; '.join(map(str, faults))}; {known}")
