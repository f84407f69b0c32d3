"""Checks of custom code in its first steps: its outputs, its metrics, and its state."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expt.config import constraints, groups
from expt.config.schema import RunConfig
from expt.data import changes
from expt.data.build import keep_doubles
from expt.data.changes import Watched
from expt.data.checked_samples import in_words
from expt.data.loader import IndexLoader, Loader
from expt.data.loading import named_leaves
from expt.errors import ConfigError, described, listed
from expt.tasks.task import Task
from expt.training import collectives, random_state
from expt.training.callback import Callback
from expt.training.collectives import Worker
from expt.training.learner import Learner, trained_names
from expt.training.optim import parts_of
from expt.worker.rank_health import UNEQUAL

FEW = 2
"""Samples on which metrics are tried."""
_Own = tuple[str, str, object]
"""The key of a custom class, the place of an object of it in messages, and the object."""


class FirstSteps:
    """Compares custom code after the first step with itself at a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        worker: Worker,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._learner, self._worker = learner, worker
        self._steps, self._epochs = 0, 0
        self._shapes = _shapes(learner.module)
        self._parameters = {id(each): each for each in learner.module.parameters()}
        self._watched: dict[str, Watched] = {}
        self._reported: set[str] | None = None
        self._objects = _own_objects(config, learner, callbacks)
        self._is_custom = bool(self._objects) or isinstance(config.model, constraints.Target)

    def step(self) -> None:
        """Check the model after the first step, and note the state of custom code.

        Raises ConfigError for parameters made in the step, and for untrained tensors.
        """
        self._steps += 1
        if self._steps == 1:
            self.refuse_late()
            self._report_untrained()
            self._watched = self._watch()

    def _watch(self) -> dict[str, Watched]:
        """Return the state of custom code as it is now."""
        watched, known = {where: one for _, where, one in self._objects}, self._known()
        if self._is_custom:
            watched |= changes.own_modules_and_classes()
        return {where: Watched(one, known, *_methods(one)) for where, one in watched.items()}

    def refuse_late(self) -> None:
        """Raise ConfigError for parameters that forward passes have made, resized or removed."""
        module = self._learner.module
        late = {name for name, _ in _shapes(module).items() ^ self._shapes.items()}
        if self._learner.strategy.shards == 1:
            named = module.named_parameters()
            late |= {name for name, each in named if id(each) not in self._parameters}
        if late:
            raise ConfigError(
                f"model: {listed(sorted(late))}: made, resized or removed in a forward pass, so"
                " that no optimizer trains it or no checkpoint can be loaded; make it in __init__,"
                " as large as it gets; if its size is not known there, use a lazy layer such as"
                " nn.LazyLinear"
            )
        changed = sorted(trained_names(module) ^ self._learner.trained)
        if changed and self._learner.strategy.world_size > self._learner.strategy.shards == 1:
            raise ConfigError(f"model: {listed(changed)}: requires_grad has changed: {UNEQUAL}")

    def _report_untrained(self) -> None:
        """Raise ConfigError for tensors of the model that get gradients and are not parameters."""
        for key, where, owner in self._objects:
            names = [
                name
                for attribute, value in changes.attributes(owner).items()
                for name, one in named_leaves(value, f"{where}.{attribute}")
                if one.is_leaf and one.grad is not None and id(one) not in self._parameters
            ]
            problem = (
                f"{listed(names)}: gets gradients, but no optimizer trains it and no checkpoint"
                " holds it; make it an nn.Parameter or a submodule of the model, several an"
                " nn.ModuleList or nn.ModuleDict, or freeze it by requires_grad_(False)"
            )
            if names and key == "model":
                raise ConfigError(problem)
            if names and key == "task":
                self._worker.warn(problem)

    def end(self, *, within_epoch: bool) -> None:
        """Warn of any worker's state that a checkpoint lacks: at the first, and after two epochs.

        Evaluations and callbacks may change some, too, and state of each sample changes in the
        second epoch. A collective.
        """
        self.refuse_late()
        if self._steps < 2 or (within_epoch and self._reported is not None):
            return
        every = itertools.chain(*collectives.gather_across_workers(self._lost()))
        reported = self._reported or set()
        lost = [name for name in dict.fromkeys(every) if name not in reported]
        self._reported = {*reported, *lost}
        self._epochs += not within_epoch
        # Attributes that later steps have made may change, too:
        self._watched = self._watch() if self._epochs < 2 else {}
        if lost:
            self._worker.warn(
                f"{listed(lost)}: changes while training, and no checkpoint holds it: a resumed run"
                " begins it again; keep it in state_dict and load_state_dict of a task, an"
                " optimizer, a scheduler or a callback, or in a model's buffer, or get_extra_state"
                " and set_extra_state"
            )

    def _lost(self) -> list[str]:
        """Return the state that a checkpoint lacks; random numbers stay as they were."""
        device, known = next(self._learner.module.parameters()).device, self._known()
        lost = list[str]()
        with random_state.kept(device):
            for where, watched in self._watched.items():
                try:
                    lost += [f"{where}.{name}" for name in watched.lost(known)]
                except Exception as error:
                    raise in_words(error, f"loading the state of {where}") from error
        return lost

    def _known(self) -> dict[int, object]:
        """Return the objects that a checkpoint has, by their identity."""
        module, optimizer = self._learner.module, self._learner.optimizer
        found = [*module.modules(), *module.state_dict(keep_vars=True).values()]
        for each in (optimizer, *parts_of(optimizer)):
            found += [each, each.state, each.param_groups]
        found.append(self._learner.scheduler)
        return {id(each): each for each in found}


def _own_objects(config: RunConfig, learner: Learner, callbacks: Sequence[Callback]) -> list[_Own]:
    """Return the objects of custom classes; of a sharded model no module."""
    found, custom = list[_Own](), constraints.Target
    if isinstance(config.task, custom):
        found.append(("task", "task", learner.task))
    if isinstance(config.scheduler, custom):
        found.append(("scheduler", "scheduler", learner.scheduler))
    if any(isinstance(each, custom) for each in groups.optimizers(config.optimizer)):
        for n, part in enumerate(parts_of(learner.optimizer)):
            where = "optimizer" if part is learner.optimizer else f"optimizer.{n}"
            found.append(("optimizer", where, part))
    if isinstance(config.model, custom) and not config.is_sharded:
        named = learner.module.named_modules()
        found += (("model", f"model.{name}".rstrip("."), part) for name, part in named)
    found += (("callbacks", f"callbacks.{n}", one) for n, one in enumerate(callbacks))
    return found


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters and buffers that a checkpoint holds."""
    held = module.state_dict().keys()  # with the values of get_extra_state, which may grow
    named = module.named_parameters, module.named_buffers
    tensors = itertools.chain(*(each(remove_duplicate=False) for each in named))
    return {name: each.shape for name, each in tensors if name in held}


def _methods(one: object) -> tuple[str, ...]:
    """Return the names of an object's own methods to save and load its state."""
    if isinstance(one, nn.Module):
        own = type(one).get_extra_state is not nn.Module.get_extra_state
        return ("get_extra_state", "set_extra_state") if own else ()
    # Of no attribute that a subclass adds.
    theirs = Task.state_dict, Optimizer.state_dict, Callback.state_dict
    own = isinstance(one, Task | Optimizer | Callback) and type(one).state_dict not in theirs
    return ("state_dict", "load_state_dict") if own or isinstance(one, LRScheduler) else ()


def check_first_output(module: nn.Module, target: str, num_classes: int, worker: Worker) -> None:
    """Check in the first forward pass that a custom model gives scores of the classes."""

    def check(_: nn.Module, __: object, output: object) -> None:
        hook.remove()
        where = f"model._target_={target}: gives"
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            fix = "return one tensor, [samples, num_classes]"
            raise ConfigError(f"{where} {described(output)}; {fix}")
        outputs = output.shape[1]
        gives = f"{where} {outputs} outputs for each sample, and there are {num_classes} classes"
        fix = "give its last layer num_classes outputs; a constructor with that parameter gets it"
        if outputs < num_classes:
            raise ConfigError(f"{gives}; {fix}")
        if outputs > num_classes:
            worker.warn(f"{gives}: the surplus ones are never right; {fix}")
        totals = output.detach().float().sum(1)
        if output.min() >= 0 and (totals - 1).abs().max() < 1e-4:
            worker.warn(
                f"{where} probabilities, and cross-entropy takes logits; leave out the softmax"
            )

    hook = module.register_forward_hook(check)


@torch.no_grad()
def check_metrics(learner: Learner, loader: Loader | None) -> None:
    """Try `task.metrics` on the first samples, and raise ConfigError for one that fails."""
    if not learner.extra_metrics.names or learner.compiled:  # it would compile once more
        return
    if not isinstance(loader, IndexLoader) or loader.is_stream:
        return
    keep_doubles(learner.module, [loader])
    batch = next(loader.first(FEW))
    with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        # A batch may change their state
        module, task = copy.deepcopy((learner.evaluated, learner.task))
        with learner.precision.autocast():
            outputs = task.forward(module.eval(), batch)
        learner.extra_metrics.try_out(task, outputs, batch)
