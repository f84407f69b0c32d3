"""The state of training, and its checkpoints: rank 0 writes them, or each worker its shards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from expt import progress
from expt.config.schema import RunConfig
from expt.data.loader import Loader
from expt.data.loading import leaves
from expt.machine import available_memory
from expt.models.partial_load import load_all
from expt.runs import checkpoint, checkpoint_file
from expt.runs.checkpoint import Like, map_leaves
from expt.runs.paths import RunPaths
from expt.tasks.sums import Sums
from expt.training import collectives, random_state
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position, trained_names
from expt.training.optimizer_state import adapt, train_at
from expt.training.own_state import load_own_state, own_state
from expt.training.parameter_groups import members
from expt.training.sharding import gather_state, is_sharded, local, scatter_state, shard_as

State = Mapping[str, Any]
TRAINED = "training_weights"
"""The key of weights that an optimizer trains at, where others are used; see in_use."""
ROOM = 0.5
"""The share of free memory within which one worker gathers a sharded checkpoint."""


class Checkpoints:
    """The checkpoints that one worker writes."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, learner: Learner, worker: Worker
    ) -> None:
        self._wanted, self._paths, self._worker = config.checkpoint.sharded, paths, worker
        self._shards = learner.strategy.shards
        may_be_sharded = self._shards > 1 and self._wanted is not False
        self._in_parts: bool | None = None if may_be_sharded else False
        self._writer = checkpoint.Writer(
            paths.last,
            paths.best,
            keep=config.checkpoint.keep,
            is_first=worker.rank == 0,
            group=dist.new_group(backend="gloo") if may_be_sharded else None,  # for its thread
        )

    @progress.phase("writing the checkpoint")
    def wait(self) -> None:
        """Wait until everything is written, and raise the first error."""
        self._writer.wait()

    @progress.phase("writing the checkpoint")
    def save(
        self,
        state: Mapping[str, Any],
        about: Callable[[], Mapping[str, Any]],
        *,
        bests: Sequence[int] = (),
        waits: bool = False,
    ) -> None:
        """Begin to write `state` and rank 0's `about`, as the last checkpoint; a collective.

        If it is one of the best, `bests` are the steps of all that are kept, the best first. A call
        that `waits` until all is written needs no copy.
        """
        parts, owned, is_first = None, waits, self._worker.rank == 0
        if self._writes_parts(state):
            parts = self._new_folder(state["position"]["step"])
            room = ROOM * available_memory() / self._worker.local_world_size
            shards_bytes = sum(local(one).nbytes for one in leaves(state) if is_sharded(one))
            owned = waits = waits or shards_bytes > room
        elif self._shards > 1:
            state, owned = gather_state(state, keep=is_first), True
        if is_first:
            state = {**state, **checkpoint.copied(about())}
        if is_first or parts:
            self._writer.save(state, bests=bests, parts=parts, owned=owned)
        if waits:
            self._writer.wait()  # before training changes it

    def _new_folder(self, step: int) -> Path:
        """Return a folder for the workers' parts of a step's checkpoint; a collective."""
        folder = None
        if self._worker.rank == 0:
            self._paths.checkpoints.mkdir(exist_ok=True)
            folder = checkpoint_file.free_folder(self._paths.checkpoints, step)
        return self._paths.checkpoints / collectives.from_rank_0(folder)

    def _writes_parts(self, state: Mapping[str, Any]) -> bool:
        """Return whether each worker writes its shards, as decided at the first checkpoint."""
        if self._in_parts is None:
            size = sum(one.numel() * one.element_size() for one in leaves(state))
            lacks = self._worker.rank == 0 and size > ROOM * available_memory()
            wanted = self._wanted is True or lacks
            self._in_parts = any(collectives.max_across_workers([wanted]))
        return self._in_parts


@dataclass(frozen=True)
class Snapshot:
    """The state of training after a step, with that of random numbers."""

    learner: Learner
    position: Position
    sums: Sums
    worker: Worker
    loader: Loader | None = None
    """That of the training samples."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after a step; a collective."""
        mine = {
            "rng": random_state.state_dict(self.worker.device),
            **self.sums.state_dict(),
            **own_state(self.learner.task),
            **self._of_loader(),
        }
        return {
            **self._of_learner(),
            "skipped_steps": self.learner.precision.skipped.item(),
            "position": self.position.state_dict(),
            "workers": collectives.gather_across_workers(mine),
        }

    def _of_loader(self) -> dict[str, Any]:
        return {} if self.loader is None else own_state(self.loader)

    def _of_learner(self) -> dict[str, Any]:
        learner = self.learner
        now = trained_names(learner.module)
        ema = {} if learner.ema is None else {"ema": learner.ema.state_dict()}
        return {
            "model": learner.module.state_dict(),
            "requires_grad": {name: name in now for name in now ^ learner.trained},
            **ema,
            "optimizer": learner.optimizer.state_dict(),
            "scheduler": learner.scheduler.state_dict(),
            "scaler": learner.precision.scaler.state_dict(),
        }

    def refuse_unreadable(self) -> None:
        """Raise ConfigError for state that a checkpoint can't hold."""
        own_state(self.learner.task)  # which raise the same
        self._of_loader()
        for key, state in self._of_learner().items():
            checkpoint.refuse_unreadable(state, key)

    def load_state_dict(self, state: State) -> None:
        """Load `state`, maybe of another number of workers."""
        learner = self.learner
        self.load_weights(state)
        learner.optimizer.load_state_dict(adapt(learner.optimizer, state["optimizer"]))
        schedule = dict(state["scheduler"])
        if isinstance(learner.scheduler, OneCycleLR):  # this run may have more epochs
            for key in ("total_steps", "_schedule_phases", "_ends"):
                schedule.pop(key, None)
        learner.scheduler.load_state_dict(schedule)
        if state["scaler"]:  # amp=true may have been bf16, which has none, and be fp16 here
            learner.precision.scaler.load_state_dict(state["scaler"])
        self.position.load_state_dict(state["position"])
        self.load_workers(state["workers"], sums=True, random=True)
        if TRAINED in state:
            train_at(learner.optimizer, state[TRAINED])

    def load_workers(self, workers: Sequence[State], *, sums: bool, random: bool) -> None:
        """Load each worker's task, its sums of the epoch and its random numbers."""
        rank = self.worker.rank
        load_own_state(self.learner.task, workers, self.worker.device, rank)
        if self.loader is not None:
            load_own_state(self.loader, workers, self.worker.device, rank)
        if sums and len(workers) == self.worker.world_size:
            self.sums.load_state_dict(workers[rank])
        elif sums and rank == 0:  # only their total over all workers counts
            self.sums.load_state_dict(_total(workers))
        if random and rank < len(workers):
            random_state.load_state_dict(workers[rank]["rng"], self.worker.device)

    def read(
        self, path: Path, *, only: Collection[str] = (), numbered: Sequence[str] = ()
    ) -> State:
        """Return rank 0's checkpoint at `path`, with the worker's shards; a collective.

        Weights are those of the file, if all workers see it. `only` names the keys to return;
        `numbered` names the parameters in the order of its optimizer, by default that of now.
        """
        like = self._like(numbered)
        load = functools.partial(checkpoint.load, path, only=only)
        return read_together(path, self.worker, lambda like: load(like=like), like)

    def spread(self, state: State | None) -> State:
        """Return rank 0's `state` on every worker, its shard of sharded tensors; a collective."""
        found: State = scatter_state(state, self._like(), self.worker.device)
        return found

    def _like(self, numbered: Sequence[str] = ()) -> Like:
        """Return the sharded tensors by key; a parameter stands for its optimizer state."""
        named = dict(self.learner.module.named_parameters())  # weights of others are refused later
        parameters = map(named.get, numbered)
        every = enumerate(parameters if numbered else members(self.learner.optimizer.param_groups))
        found: dict[str, Tensor | None] = {f"optimizer/state/{index}": one for index, one in every}
        for key, module in (("model", self.learner.module), ("ema", self.learner.ema)):
            known = {} if module is None else module.state_dict()
            found |= {f"{key}/{name}": one for name, one in known.items()}
        return lambda key: found.get(key, found.get("/".join(key.split("/")[:3])))

    def is_there(self, path: Path) -> bool:
        """Return whether rank 0 has a checkpoint at `path`; a collective."""
        return collectives.from_rank_0(path.exists())

    def load_best(self, path: Path) -> None:
        """Load the weights of the checkpoint at `path`, if rank 0 has one; a collective."""
        if self.is_there(path):
            self.load_weights(self.read(path, only=("model", "ema")))

    def load_weights(self, state: State) -> None:
        """Load the model of `state` and its moving average; without one it begins as the model."""
        load_all(self.learner.module, state["model"])
        ema = self.learner.ema
        if ema is not None and "ema" in state:
            load_all(ema, state["ema"])
        elif ema is not None:
            load_all(ema.module, state["model"])
        for name, value in state.get("requires_grad", {}).items():
            self.learner.module.get_parameter(name).requires_grad_(value)


def read_together(
    path: Path, worker: Worker, read: Callable[[Like], State], like: Like = lambda _: None
) -> State:
    """Return the state that `read` reads of rank 0's file, with shards; a collective.

    All workers read where all see the same file, else rank 0 sends all of it. `read` gets the
    patterns for the tensors of a sharded checkpoint.
    """
    before, state = checkpoint_file.stamp(path), None
    try:
        state = read(like)
    except Exception:  # many classes: of a file that only rank 0 has
        if not worker.rank:
            raise
    seen = (None,) if state is None else (before, checkpoint_file.stamp(path))
    if len({*itertools.chain(*collectives.gather_across_workers(seen))}) == 1:
        return cast(State, map_leaves(functools.partial(_held, like), state))
    found: State = scatter_state(None if worker.rank else read(lambda _: None), like, worker.device)
    return found


def _held(like: Like, key: str, value: Any) -> Any:
    """Return this worker's shard, the weights of the file, or a copy of a tensor that changes."""
    if not isinstance(value, Tensor) or is_sharded(value):
        return value
    found = shard_as(like(key), value)
    is_weight = key.startswith(("model/", "ema/"))
    return value.clone() if found is value and not is_weight else found


def _total(workers: Sequence[State]) -> dict[str, list[float]]:
    total = {
        key: torch.tensor([one[key] for one in workers], dtype=torch.float64).sum(0).tolist()
        for key in ("sums", "finite", "logged")
    }
    peaks = torch.tensor([worker.get("peaks", ()) for worker in workers], dtype=torch.float64)
    return {**total, "peaks": peaks.amax(0).tolist()} if peaks.numel() else total
