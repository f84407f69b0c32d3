"""The predictions of a run's model for each sample, in batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import cast

import torch

from expt import errors, machine
from expt.data import build
from expt.data.loading import Batch, LoaderOptions, mapped
from expt.features import Answers
from expt.inference.ensemble import Ensemble, Member
from expt.inference.inputs import Piece
from expt.inference.load import importable_from_here, load
from expt.inference.plan import Plan
from expt.runs.request import Split, Trained
from expt.tasks.task import Facts
from expt.training.devices import held_by_others
from expt.training.own_state import load_own_state
from expt.training.precision import precision_kept, set_precision


class Predictor:
    """The runs' models on their device, and the samples that could not be read."""

    def __init__(self, plan: Plan) -> None:
        """Load the models. Raise ConfigError as `load` does."""
        self._plan, self.device = plan, _device(plan.device)
        with _faults_in_words(self.device), importable_from_here(plan.record):
            members = [self._member(*pair) for pair in zip(plan.runs, plan.ways, strict=True)]
        self._average = Ensemble(members, plan.flips)
        self._task = members[0].task
        self.form = plan.form
        self.seen = 0
        """Samples so far, with those that are left out."""
        self.skipped: list[str] = []
        """Why a sample was left out, a line each."""

    def _member(self, run: Trained, way: int) -> Member:
        plan = self._plan
        model = load(
            run.run, run.which, device=self.device, amp=plan.amp, trust_code=plan.trust_code
        )
        task = run.config.task.build(Facts(targets=run.features.targets))
        load_own_state(task, model.workers, self.device)
        if task.phases:
            raise errors.ConfigError(
                f"{run.run}: a model of several phases is used by expt.load only"
            )
        return Member(model, task, way)

    def __iter__(self) -> Iterator[Answers]:
        """Yield answers in the order of the samples.

        Raise ConfigError for samples that can't be read or do not fit the model.
        """
        return map(self.form.named_apart, self.form.joined(self._answers()))

    def _answers(self) -> Iterator[Answers]:
        plan = self._plan
        with precision_kept(), importable_from_here(plan.record), _faults_in_words(self.device):
            set_precision(plan.config.matmul_precision)
            for ways in plan.rounds:
                for pieces in zip(*map(self._pieces, ways), strict=True):
                    first = pieces[0]
                    if any(len(each.about) != len(first.about) for each in pieces):
                        line = next(each.skipped[0] for each in pieces if each.skipped)
                        raise errors.DataError(f"{line}; other runs can read it: use one run")
                    self.seen += len(first.about) + len(first.skipped)
                    self.skipped += first.skipped
                    if first.about:
                        yield self._answer(dict(zip(ways, pieces, strict=True)))

    @torch.no_grad()
    def _answer(self, pieces: Mapping[int, Piece]) -> Answers:
        first = next(iter(pieces.values()))
        inputs = {way: piece.samples for way, piece in pieces.items()}
        if self._plan.split is None:  # those of a split are prepared already
            ways = self._average.members
            inputs = {way: ways[way].trained.preprocess(inputs[way]) for way in inputs}
        targets = mapped(lambda one: one.to(self.device), first.targets)
        outputs, batch = self._average(self._task, Batch(inputs, targets, len(first.about)))
        decoded = self.form.decoded(self._task.predict(outputs), batch.targets)
        if wrong := {len(each) for each in decoded[0].values()} - {len(first.about)}:
            raise errors.ConfigError(
                f"the task predicts {wrong.pop()} rows for {len(first.about)} samples; give one for"
                " each"
            )
        return Answers(first.about, *decoded, first.sizes)

    def _pieces(self, way: int) -> Iterator[Piece]:
        """Yield samples as they are read for a run, and all that prepare them equally."""
        plan = self._plan
        if plan.split is not None:
            return self._split(way, plan.split, plan.batch_size)
        return plan.readers[way].pieces(plan.batch_size or plan.inputs.at_once)

    def _split(self, way: int, split: str, size: int | None) -> Iterator[Piece]:
        """Yield a part of a run's own dataset as its evaluations had it."""
        run, part = self._plan.runs[way], cast("Split", split)
        config, dataset = run.config, run.config.dataset
        dataset.prepare(config.task, learns=False)
        then, now = run.record.get("content", {}).get("data"), dataset.fingerprint()
        if then is not None and now is not None and then != now:
            errors.warn("the dataset's files are other than those of the run")
        options = LoaderOptions(
            batch_size=config.batch_size,
            eval_batch_size=size or self._plan.config.samples_per_evaluation,
            device=self.device,
            channels_last=config.channels_last,
        )
        workers = min(machine.usable_cpus(), 8)
        found = build.load(
            dataset, config.task, part, run.features, options, own=True, num_workers=workers
        )
        (loader,) = found.loaders
        build.keep_doubles(self._average.members[way].trained, [loader])
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
