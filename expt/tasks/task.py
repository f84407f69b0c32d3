"""A task: a model's outputs turned into the loss that is minimized and the metrics reported.

The driver imports the modules of this package that configure a task, and no torch.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from expt.errors import ConfigError, described, first_line
from expt.features import Anything, Feature, at_least_single
from expt.late import torch

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.loading import Batch


Sum: TypeAlias = "tuple[Tensor, Tensor | float]"
"""A sum over a batch, on its device, and its weight: the number of samples, tokens, pixels, ..."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the training data (see DataInfo) and the run that a task may need."""

    targets: Feature = field(default_factory=Anything)
    class_counts: Sequence[int] = ()
    label_smoothing: float = 0.0
    trains: bool = False
    """True if training losses are computed, by the weights of classes."""


class Task(ABC):
    """The loss that a step computes, and the metrics.

    A custom task is a subclass, with its metrics named in YAML: in conf/task/robust.yaml

        _target_: tasks.Robust
        metrics: {mae: min}

    and in tasks.py

        class Robust(expt.Task):
            def loss(self, outputs, batch):
                return functional.huber_loss(outputs, batch.targets, reduction="sum"), len(outputs)

            def measure(self, outputs, batch):
                return {"mae": ((outputs - batch.targets).abs().sum(), len(outputs))}

    Whatever the number of workers and of micro-batches, a step minimizes the sum of the losses of
    the *global* batch divided by the sum of their weights, and a metric is the sum over a split
    divided by the sum of its weights.
    """

    metrics: Mapping[str, str] = {}
    """The metrics without the loss, and the better direction of each, `min` or `max`; the YAML of a
    custom task names them."""
    reductions: Mapping[str, Literal["last", "max", "min"]] = {}
    """The numbers of `measure` that are no sums, such as a temperature or a queue's length, and how
    they are reduced: the last one, the largest or the smallest. Of several workers' last ones it is
    the largest.
    """
    weight_is_samples = False
    """True if the loss's weight is the number of samples. It is then known before the step, and not
    summed over all workers."""
    phases: Mapping[str, str] = {}
    """The updates that a step is made of, where they are several; see PhasedTask."""

    @property
    def sums(self) -> Mapping[str, int]:
        """The sums that `measure` returns, with the number of values of each; one per metric."""
        return {name: 1 for name in self.metrics if name not in self.reductions}

    def forward(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the model's outputs for a batch."""
        return model(batch.inputs)

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Sum:
        """Return the summed loss [] and its weight."""

    def training_loss(self, outputs: Any, batch: Batch) -> Sum:
        """Return the loss that a step minimizes, if it is not the one that an evaluation reports.

        A loss that looks at the whole global batch, such as SimCLR's, gathers the outputs here,
        where each worker has as many (`drop_last=true`): torch.distributed.nn.functional.all_gather
        returns the gradients.
        """
        return self.loss(outputs, batch)

    def measure(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return the sums of the other metrics, without gradients; see `sums`.

        A metric in `reductions` is a number without a weight. One that is measured rarely may be
        left out where `batch.progress.measures(name)` is false.
        """
        return {}

    def predict(self, outputs: Any) -> Any:
        """Return the predictions that `expt predict` writes: the outputs, unless overridden.

        A tensor [B, ...], or containers of such.
        """
        return outputs

    def mean_outputs(self, several: Sequence[Any]) -> Any:
        """Return outputs whose prediction is the mean of those of several models, for one batch.

        The mean of each tensor, unless overridden: by the tasks whose outputs are logits it is that
        of the probabilities. Tensors of integers or of true and false must be equal in all.
        """
        from expt.data.loading import leaves, mapped

        def mean(first: Tensor) -> Tensor:
            stacked = next(each)
            if first.is_floating_point() or first.is_complex():
                return stacked.mean(0)
            if (stacked != first).any():
                raise ConfigError(
                    f"{named} have {described(first)}, which has no mean where models differ; {fix}"
                )
            return first

        named = f"task {type(self).__name__}: its outputs"
        fix = "give the task a method mean_outputs"
        try:
            each = iter([*map(torch.stack, zip(*map(leaves, several), strict=True))])
        except (RuntimeError, TypeError, ValueError) as error:  # of other shapes, or no tensors
            raise ConfigError(f"{named} have no mean ({first_line(error)}); {fix}") from error
        return mapped(mean, several[0])

    def predictions(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        """Return predictions and targets for a torchmetrics.Metric of `task.metrics`."""
        return outputs, batch.targets

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that this worker's task carries from step to step, for checkpoints.

        It has tensors, numbers, strings, None, and lists and dicts of those: a hidden state, a
        queue, the steps of a warm-up. It may be empty before the state begins.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load a state that `state_dict` returned on this worker, before a resumed run trains.

        If the run had fewer workers, it is another worker's state. It is empty after an evaluation
        that began a state where there was none.
        """

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return metrics that are not averages, from the quotients of all sums.

        These are lists where a sum has several values.
        """
        return {}


def mean_of_logits(several: Sequence[Tensor], dim: int) -> Tensor:
    """Return the logarithm of the mean of the probabilities of classes along `dim`."""
    logarithms = torch.stack([at_least_single(logits).log_softmax(dim) for logits in several])
    return logarithms.logsumexp(0) - math.log(len(several))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of those of some classes; nan of none."""
    return sum(values) / len(values) if values else math.nan


class PhasedTask(Task):
    """A task whose step has `phases`, each an update by a loss over parameters of its own.

    A GAN in 2 lines of YAML and 14 of Python; its dataset gives {"image": ..., "noise":
    torch.randn(32)}, the same on any number of workers, because a sample's draws depend on the
    sample only, and its model has a `generator` and a `discriminator`:

        _target_: gan.Adversarial
        metrics: {generator: min, d_real: max}

        class Adversarial(expt.PhasedTask):
            phases = {"discriminator": "^discriminator", "generator": "^generator"}

            def phase(self, name, model, batch, outputs):
                if name == "generator":
                    fake = model.discriminator(outputs["images"])
                    return functional.softplus(-fake).sum(), len(fake)
                outputs["images"] = model.generator(batch.inputs["noise"])
                real = model.discriminator(batch.inputs["image"])
                fake = model.discriminator(outputs["images"])
                outputs["d_real"] = real.sigmoid().sum(), len(real)
                return (functional.softplus(-real) + functional.softplus(fake)).sum(), len(fake)

    The one optimizer leaves parameters without a gradient as they are, its state included, so that
    it is one for each phase; other learning rates or optimizers come from `optimizer.groups`. The
    reported loss is that of the first phase; the others are metrics by their names.
    """

    phases: Mapping[str, str] = {}
    """The phases in their order: a name, and a regular expression found in the names of the
    parameters that it trains. A phase's gradients reach no others, without `detach`.
    """

    @abstractmethod
    def phase(self, name: str, model: Any, batch: Batch, outputs: dict[str, Any]) -> Sum:
        """Return a phase's summed loss [] and its weight; without gradients in evaluations.

        Values that it puts into `outputs` are there in the step's later phases, with their graph;
        an entry with the name of a metric, a sum and its weight, is measured. `model` and its parts
        may be called in any way, as often as needed.
        """

    def forward(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the losses of all phases, by name, and their other outputs."""
        outputs: dict[str, Any] = {}
        for name in self.phases:
            outputs[name] = self.phase(name, model, batch, outputs)
        return outputs

    def loss(self, outputs: Any, batch: Batch) -> Sum:
        """Return the loss of the first phase."""
        first: Sum = outputs[next(iter(self.phases))]
        return first

    def measure(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return the outputs that `metrics` names."""
        return {name: outputs[name] for name in (*self.sums, *self.reductions) if name in outputs}


@contextlib.contextmanager
def train_mode(model: torch.nn.Module) -> Iterator[None]:
    """Let a model compute in an evaluation as in training.

    Some give their losses only there, such as torchvision's detectors. Its batch norms and dropouts
    stay as in the evaluation. Random numbers that it draws are the same in each call, and those
    after the call are as without it, as are the model's buffers.
    """
    nn = torch.nn
    left_alone = (
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.Dropout, nn.Dropout1d,
        nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    )  # fmt: skip
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, one, one.clone())
        for module in modes
        for name, one in module.named_buffers(recurse=False)
    ]
    devices = {one.device for one in model.parameters() if one.is_cuda}
    with torch.random.fork_rng([*devices]):
        torch.manual_seed(0)
        try:
            for module in modes:
                module.training = module.training or not isinstance(module, left_alone)
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for module, name, one, value in buffers:
                one.data.copy_(value)
                setattr(module, name, one)
