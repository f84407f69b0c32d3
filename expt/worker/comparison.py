"""Compare a sharded model, or a custom optimizer, with the whole model before the first epoch.

The model of the run and a whole one take the same two steps on the run's first samples, in float32
and with the same random numbers: gradients, weights after each update, buffers and the outputs of
an evaluation must be equal but for rounding. Between the steps the run's model is saved, and loaded
into another one.

After each comparison the run's model is given the whole one's values, so that rounding errors don't
add up, and a tolerance is that of one computation.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from expt import progress
from expt.config import constraints, groups, secrets, user_class
from expt.config.schema import RunConfig
from expt.data.build import Data, keep_doubles
from expt.data.loading import Batch, leaves
from expt.errors import ConfigError, ExptError, RunFailed
from expt.machine import available_memory
from expt.runs import checkpoint
from expt.tasks.extra_metrics import ExtraMetrics
from expt.tasks.sums import Sums
from expt.training import collectives, loop, random_state, sharding
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.optimizer_state import switch
from expt.training.precision import precision_kept, set_precision
from expt.training.sharding import gather_state, local, num_parameters, shard_as
from expt.training.strategy import can_be_cut, copied, part_of
from expt.worker import build
from expt.worker.checkpoints import Snapshot
from expt.worker.copies import Copies
from expt.worker.diagnosis import in_words, lost_peers
from expt.worker.sum_check import check_sums

SCALE = 100.0
"""The factor of gradients: a clip, for instance, has an effect on large ones."""
FEW = 8
"""The samples of each worker in a step."""
GRADIENTS, UPDATES = {"cpu": 1e-5, "cuda": 1e-4}, {"cpu": 1e-4, "cuda": 1e-3}
"""Tolerances: of gradients as a share of the largest of all parameters, since kernels round by
where a tensor lies in memory; of an update as a share of its own largest number."""
NEXT = 4
"""The float numbers by which equal weights may be apart."""
LARGE, COPIES, ROOM = 20_000_000, 10, 0.5
"""The parameters beyond which fewer blocks are compared, the float32 copies of a comparison, and
the share of free memory that it may take."""
BLOCKS = ("layers", "num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth", "num_blocks")
"""Keywords of models for their number of blocks."""
KEEP_STATE = (
    "let the optimizer keep all its state in self.state, made as by torch.zeros_like(parameter):"
    " loaded, it has the device and the type of its parameter"
)


@progress.phase("comparing sharded steps with whole ones")
def compare(config: RunConfig, data: Data, worker: Worker) -> str | None:
    """Return the compared model ("whole", "fewer_blocks", "nothing"); None if there is no need.

    Raises ConfigError where the run would train to other weights than a whole model, and RunFailed
    where its steps fail. A collective; restores the states of random numbers.
    """
    if not (config.is_sharded or _custom_optimizers(config)):
        return None
    samples = min(config.batch_size, data.train.size) // worker.world_size
    plain = replace(
        config,
        amp=False,
        compile=False,
        callbacks=(),
        on_nan="stop",
        gradient_accumulation=min(config.micro_batches, 2 if samples >= 4 else 1),
        ddp=replace(config.ddp, shared_memory=False, comm_hook=None, find_unused_parameters=True),
        sharding=replace(config.sharding, param_dtype="auto", reduce_dtype="float32"),
    )
    with random_state.kept(worker.device), precision_kept():
        set_precision("highest")
        torch.backends.cudnn.benchmark = False
        compared = _run(plain, data, worker)
    gc.collect()  # two models with reference cycles
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
    if compared == "nothing":
        lacks = "was not compared with a whole model before the first epoch"
        if config.is_sharded:
            lacks += ", nor were the sums of a custom task checked"
        worker.warn(f"{_where(config)}: {lacks}")
    return compared


def _run(config: RunConfig, data: Data, worker: Worker) -> str:
    """Compare; return the compared model, as `compare`."""
    with _quiet():
        chosen = _choose(config, data, worker)
    if chosen is None:
        return "nothing"
    settings, model = chosen
    with _quiet():
        comparison = _Comparison(settings, data, worker)
    comparison.check_sums()
    with _quiet():
        return model if comparison.run() else "nothing"


def _custom_optimizers(config: RunConfig) -> list[str]:
    every = groups.optimizers(config.optimizer)
    named = [each.target for each in every if isinstance(each, constraints.Target)]
    found = {name: user_class.resolve(name, Optimizer) for name in named}
    return [name for name in named if not found[name].__module__.startswith("torch.")]


def _where(config: RunConfig) -> str:
    if config.is_sharded:
        return f"strategy={config.strategy}"
    return f"optimizer._target_={_custom_optimizers(config)[0]}"


def _few(batch: Batch, config: RunConfig, worker: Worker) -> Batch:
    """Return a few samples of a batch; unequal numbers by worker if the run may have them."""
    size = batch.size
    if can_be_cut(batch):
        may_differ = not config.drop_last and config.batch_norm != "sync" and worker.world_size > 1
        size = min(size, FEW)
        if may_differ and worker.rank == 0 and size > 2:
            size -= 1
        batch = part_of(batch, slice(size))
    counted = torch.tensor(0.0 if batch.weightless else size, device=worker.device)
    return batch._replace(global_size=int(collectives.sum_across_workers(counted).item()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence output and warnings, which the run's own model repeats."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _choose(config: RunConfig, data: Data, worker: Worker) -> tuple[RunConfig, str] | None:
    """Return the settings to compare, and the name of their model; None if memory lacks.

    A large model has fewer blocks. A collective.
    """

    def size(config: RunConfig) -> int:
        make = build.module_maker(config, data, fetch=False)
        return num_parameters(sharding.build_empty(make, worker.device))

    numbers, smaller = size(config), _with_fewer_blocks(config)
    if numbers > LARGE and smaller:
        numbers, config = size(smaller), smaller
    room = available_memory() / worker.local_world_size
    if worker.device.type == "cuda":
        room = torch.cuda.mem_get_info(worker.device)[0]
    lacks = float(4 * COPIES * numbers > ROOM * room)
    if collectives.max_across_workers([lacks])[0]:
        return None
    return config, "fewer_blocks" if config is smaller else "whole"


def _with_fewer_blocks(config: RunConfig) -> RunConfig | None:
    """Return settings of the same class with two blocks; None where no keyword says how many."""
    model = config.model
    known: Any = model.kwargs if isinstance(model, constraints.Target) else vars(model)
    fewer: dict[str, Any] = {
        key: 2 for key in BLOCKS if isinstance(known.get(key), int) and known[key] > 2
    }
    if isinstance(hidden := known.get("hidden"), list | tuple) and len(hidden) > 2:
        fewer["hidden"] = hidden[:2]
    if not fewer:
        return None
    if isinstance(model, constraints.Target):
        fewer = {"kwargs": {**known, **fewer}}
    return replace(config, model=replace(model, **fewer))


class _Comparison:
    """The steps of a whole model and of the run's model."""

    def __init__(self, config: RunConfig, data: Data, worker: Worker) -> None:
        self._config, self._data, self._worker = config, data, worker
        self._is_loaded = False
        """True if the run's model was saved and loaded."""
        self._found: list[str] = []
        self._whole = self._build(replace(config, strategy="ddp"))
        keep_doubles(self._whole.module, [data.train])
        self._all = next(iter(data.train.epoch(1)))
        self._samples = _few(self._all, config, worker)
        with self._failing():
            self._tested = self._build(config)

    def _build(self, config: RunConfig) -> Learner:
        random_state.seed(config.seed)
        built = build.build_learner(config, self._data, self._worker, begins=False)
        return replace(built, extra_metrics=ExtraMetrics({}))

    def _seed(self) -> None:
        random_state.seed(self._config.seed + 1 + self._worker.rank)  # both drop out the same

    def check_sums(self) -> None:
        """Check the sums of a custom task on the whole model: a sharded one can't be copied."""
        if self._config.is_sharded and isinstance(self._config.task, constraints.Target):
            copies = Copies(self._whole, self._worker.device)
            check_sums(copies, self._all, warns=self._worker.rank == 0)

    def run(self) -> bool:
        """Take all steps; return False if a step has several updates or forward passes."""
        if self._whole.phases or self._whole.has_closure:
            return False
        self._begin()
        self._samples = self._fitting_samples()
        total_steps = self._config.total_steps(len(self._data.train))
        self._step(advances=total_steps > 0)
        self._worker.beat()
        self._is_loaded = True
        with self._failing():
            self._resume()
        self._check_weights("weights")
        self._step(advances=total_steps > 1)
        self._worker.beat()
        if self._config.is_sharded:
            self._check_outputs()
        return True

    @torch.no_grad()
    def _begin(self) -> None:
        """Make zero weights nonzero, so that all have gradients; give both models the same."""
        random_state.seed(self._config.seed)
        for parameter in self._whole.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
        collectives.broadcast_parameters(self._whole.module)
        self._give_whole()

    def _fitting_samples(self) -> Batch:
        """Return few samples, or the whole batch for a model that takes no other."""
        failed = False
        try:
            parts = self._whole.module, self._whole.task, copied(self._samples)
            module, task, batch = copy.deepcopy(parts)
            task.training_loss(task.forward(module, batch), batch)
        except ExptError:
            raise
        except Exception:  # many classes: it needs a number of samples
            failed = True
        return self._all if any(collectives.gather_across_workers(failed)) else self._samples

    @torch.no_grad()
    def _give_whole(self, share: float = 1.0) -> None:
        """Set both models to `share` times the whole one's weights, so that a hidden copy shows."""
        for _, full, mine in self._parameters():
            full.mul_(share if full.requires_grad else 1.0)
            local(mine).copy_(_as_held(full.detach(), mine))
        for _, buffer, own in self._buffers():
            own.copy_(buffer)

    def _step(self, *, advances: bool) -> None:
        starts = [one.detach().clone() for one in self._whole.module.parameters()]
        self._gradients(self._whole)
        if self._config.is_sharded:
            with self._failing():
                self._gradients(self._tested)
            self._check_gradients()
        else:  # an optimizer is compared, not a model
            for _, full, mine in self._parameters():
                mine.grad = None if full.grad is None else full.grad.mul_(SCALE).clone()
        self._update(self._whole, advances)
        with self._failing(KEEP_STATE if self._is_loaded else ""):
            self._update(self._tested, advances)
        self._check_weights("update", starts)
        if self._config.is_sharded:
            for name, buffer, own in self._buffers():
                self._expect(f"buffer {name}", own, buffer, self._share(buffer) * _size(buffer))
            self._agree()
        self._give_whole(share=0.95)

    def _gradients(self, learner: Learner) -> None:
        learner.strategy.model.train()
        self._seed()
        loop.accumulate_gradients(learner, copied(self._samples), lambda *_: None)

    def _update(self, learner: Learner, advances: bool) -> None:
        self._seed()
        switch(learner.optimizer, "train")
        learner.precision.update(learner.optimizer, learner.module.parameters())
        switch(learner.optimizer, "eval")
        if advances and not isinstance(learner.scheduler, ReduceLROnPlateau):
            learner.scheduler.step()
        learner.strategy.finish_step()
        collectives.broadcast(learner.module.buffers())
        if learner.ema is not None:
            learner.ema.update_parameters(learner.module)

    @torch.no_grad()
    def _check_gradients(self) -> None:
        """Raise where gradients differ; then give both models the same, SCALE times as large."""
        gradients = (full.grad for _, full, _ in self._parameters())
        largest = max((_size(one) for one in gradients if one is not None), default=0.0)
        for name, full, mine in self._parameters():
            if full.requires_grad:
                grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
                expected = torch.zeros_like(full) if full.grad is None else full.grad
                held, allowed = _as_held(expected, grad), self._share(full, GRADIENTS) * largest
                self._expect(f"gradient of {name}", local(grad), held, allowed)
                if mine.grad is not None:
                    local(grad).copy_(held * SCALE)
                if full.grad is not None:
                    full.grad.mul_(SCALE)
        self._agree()

    @torch.no_grad()
    def _check_weights(self, what: str, starts: list[Tensor] | None = None) -> None:
        """Raise where weights differ by more than rounding and a share of their move."""
        for index, (name, full, mine) in enumerate(self._parameters()):
            held = _as_held(full, mine)
            moved = _size(full - starts[index]) if starts is not None else 0.0
            allowed = NEXT * _eps(full) * held.abs() + self._share(full) * moved
            self._expect(f"{what} of {name}", local(mine), held, allowed)
        self._agree()

    def _resume(self) -> None:
        """Load the state of the run's model into a new one, through a checkpoint."""
        worker, is_first = self._worker, self._worker.rank == 0
        sums = Sums(self._tested.task, worker.device)
        snapshot = Snapshot(self._tested, Position(1, 1), sums, worker)
        snapshot.refuse_unreadable()
        state: Any = snapshot.state_dict()
        if self._tested.strategy.shards > 1:
            state = gather_state(state, keep=is_first)
        state = checkpoint.load(checkpoint.dumps(state)) if is_first else None
        self._tested = self._build(self._config)
        snapshot = replace(snapshot, learner=self._tested)
        snapshot.load_state_dict(snapshot.spread(state))

    def _check_outputs(self) -> None:
        """Raise where the outputs or the loss of an evaluation differ."""
        expected, what = self._outputs(self._whole), "output in an evaluation"
        with self._failing():
            outputs = self._outputs(self._tested)
        for mine, full in zip(outputs, expected, strict=True):
            self._expect(what, mine, full, self._share(full, GRADIENTS) * _size(full))
        self._agree()

    @torch.no_grad()
    def _outputs(self, learner: Learner) -> list[Tensor]:
        self._seed()
        collectives.broadcast(learner.evaluated.buffers())
        outputs = learner.task.forward(learner.evaluated.eval(), batch := copied(self._samples))
        loss, _ = learner.task.loss(outputs, batch)
        return [one if one.is_complex() else one.double() for one in (*leaves(outputs), loss)]

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield the name of each parameter, the whole model's, and the run's."""
        whole, tested = self._whole.module.named_parameters(), self._tested.module.parameters()
        return ((name, full, mine) for (name, full), mine in zip(whole, tested, strict=True))

    def _buffers(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each buffer, the whole model's, and the run's."""
        whole, tested = self._whole.module.named_buffers(), self._tested.module.buffers()
        return ((name, full, mine) for (name, full), mine in zip(whole, tested, strict=True))

    def _share(self, tensor: Tensor, least: Mapping[str, float] = UPDATES) -> float:
        return max(least[self._worker.device.type], NEXT * _eps(tensor))

    def _expect(self, what: str, found: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
        """Note where numbers differ by more than `allowed`."""
        apart = (found - expected).abs()
        if not bool(((apart <= allowed) | ~expected.isfinite()).all()):
            self._found.append(
                f"the {what} differs from that of the whole model, by {_size(apart):.2g} where it"
                f" is at most {_size(expected):.2g}"
            )

    def _agree(self) -> None:
        """Raise where any worker has found a difference; a collective."""
        mine, self._found = self._found[:1], []
        first = next(itertools.chain(*collectives.gather_across_workers(mine)), None)
        if first is not None:
            problem = f"{_where(self._config)}: {first}{self._when}"
            raise ConfigError(f"{problem}; {self._fix_for(first)}")

    def _fix_for(self, difference: str) -> str:
        is_of_update = difference.startswith("the update")
        every = groups.optimizers(self._config.optimizer)
        if is_of_update and any(isinstance(one, groups.MuonRule) for one in every):
            return "Muon enlarges the rounding of bfloat16; use strategy=ddp, or adamw"
        if is_of_update and self._is_loaded:
            return KEEP_STATE
        return (
            "some code takes a worker's part of a tensor for the whole, or keeps or changes another"
            " copy of it; use strategy=ddp"
        )

    @property
    def _when(self) -> str:
        return ", after it was saved and loaded" if self._is_loaded else ""

    @contextlib.contextmanager
    def _failing(self, fix: str = "") -> Iterator[None]:
        """Name the comparison in errors of the run's model or optimizer."""
        try:
            yield
        except Exception as error:
            known = in_words(error, self._config)
            if isinstance(known, ExptError) or lost_peers(error, self._worker):
                raise
            if self._config.is_sharded and not fix:
                fix = "the whole model does not; use strategy=ddp"
            fails = f"{_where(self._config)}: fails before the first epoch{self._when}"
            if fix:
                fails += f"; {fix}"
            raise RunFailed(f"{fails}\n{secrets.said(error)}") from error


def _as_held(full: Tensor, mine: Tensor) -> Tensor:
    """Return the part of `full` that this worker holds of `mine`."""
    return local(shard_as(mine, full))


def _size(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _eps(tensor: Tensor) -> float:
    known = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if known else 0.0
