"""What one moment of training consists of."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from expt.models.partial_load import load_all
from expt.runs import checkpoint, checkpoint_file
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.optimizer_state import adapted
from expt.training.sharding import Place, scattered
from expt.worker import random_state

State = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """All that training changes from step to step, random numbers included; saved and loaded
    together.
    """

    learner: Learner
    position: Position
    sums: Sums
    worker: Worker

    def state_dict(self) -> dict[str, Any]:
        """The state after a step; a collective, which every worker must join."""
        mine = {"rng": random_state.state_dict(self.worker.device), **self.sums.state_dict()}
        learner = self.learner
        return {
            "model": learner.module.state_dict(),
            **({} if learner.ema is None else {"ema": learner.ema.state_dict()}),
            "optimizer": learner.optimizer.state_dict(),
            "scheduler": learner.scheduler.state_dict(),
            "scaler": learner.precision.scaler.state_dict(),
            "skipped_steps": learner.precision.skipped.item(),
            "position": self.position.state_dict(),
            "workers": collectives.gather_across_workers(mine),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, also with another number of workers; one that is new has random
        numbers of its own.
        """
        learner = self.learner
        self.load_weights(state)
        learner.optimizer.load_state_dict(adapted(learner.optimizer, state["optimizer"]))
        _load_schedule(learner, state["scheduler"])
        if state[
            "scaler"
        ]:  # amp=true may have been bf16 there, which has none, and be fp16 on this GPU
            learner.precision.scaler.load_state_dict(state["scaler"])
        self.position.load_state_dict(state["position"])
        self.load_workers(state["workers"], sums=True, random=True)

    def load_workers(self, workers: Sequence[State], *, sums: bool, random: bool) -> None:
        """What each worker had counted of the epoch, and its random numbers."""
        rank = self.worker.rank
        if sums and len(workers) == self.worker.world_size:
            self.sums.load_state_dict(workers[rank])
        elif sums and rank == 0:  # only their total over all workers counts
            self.sums.load_state_dict(_total(workers))
        if random and rank < len(workers):
            random_state.load_state_dict(workers[rank]["rng"], self.worker.device)

    def config_of(self, path: Path) -> State:
        """The settings of the run that wrote the checkpoint at `path`, which rank 0 reads; a
        collective.
        """
        read = checkpoint.load(path, lazily=True)["config"] if self.worker.rank == 0 else None
        return collectives.from_rank_0(read, self.worker.device)

    def read(
        self, path: Path, *, only: Collection[str] = (), written_by: Optimizer | None = None
    ) -> State:
        """The checkpoint at `path`, which rank 0 reads, on every worker; of sharded tensors each
        gets its part.

        A collective. With `only` there is nothing but these of its keys. Its optimiser numbers
        parameters as `written_by`, or that of now, does."""
        sharded = self.learner.shards > 1
        read = checkpoint.load(path, lazily=sharded) if self.worker.rank == 0 else None
        if not sharded:
            return collectives.from_rank_0(read, self.worker.device)
        if read is not None and only:
            read = {
                key: value for key, value in read.items() if key in {*only, checkpoint_file.PARTS}
            }
        patterns = self._patterns(written_by or self.learner.optimizer)
        found: State = checkpoint.filled(
            path, scattered(read, patterns.get, self.worker.device), patterns.get
        )
        return found

    def spread(self, state: State | None) -> State:
        """Return rank 0's `state` on every worker, its shard of sharded tensors; a collective."""
        if self.learner.shards == 1:
            return collectives.from_rank_0(state, self.worker.device)
        patterns = self._patterns(self.learner.optimizer)
        found: State = scattered(state, patterns.get, self.worker.device)
        return found

    def _patterns(self, optimizer: Optimizer) -> _Slots:
        """The tensors that are sharded, by where a state with `optimizer`'s has them, or others of
        their shape.
        """
        learner = self.learner
        modules: dict[str, nn.Module] = {"model": learner.module}
        if learner.ema is not None:
            modules["ema"] = learner.ema
        found = {
            (key, name): one
            for key, module in modules.items()
            for name, one in module.state_dict().items()
        }
        parameters = itertools.chain.from_iterable(
            group["params"] for group in optimizer.param_groups
        )
        slots = _Slots({("optimizer", "state", index): one for index, one in enumerate(parameters)})
        slots.update(found)
        return slots

    def is_there(self, path: Path) -> bool:
        """Whether rank 0 has a checkpoint at `path`; a collective."""
        return collectives.from_rank_0(path.exists(), self.worker.device)

    def load_best(self, path: Path) -> None:
        """The weights of the checkpoint at `path`; those of now stay if rank 0 has none there.

        A collective.
        """
        if self.learner.shards > 1:
            if self.is_there(path):
                self.load_weights(self.read(path, only=("model", "ema")))
            return
        if self.worker.rank == 0 and path.exists():
            self.load_weights(checkpoint.load(path))
        collectives.broadcast_parameters(self.learner.evaluated)

    def load_weights(self, state: State) -> None:
        """The model of `state`, and its moving average where there is one."""
        load_all(self.learner.module, state["model"])
        if self.learner.ema is not None:
            load_all(self.learner.ema, state["ema"])


class _Slots(dict[Place, torch.Tensor]):
    """By the place of a parameter that of each of its optimiser's values, too."""

    def get(self, place: Place, default: Any = None) -> Any:
        return super().get(
            place, super().get(place[:3], default)
        )  # also of those in a list or dict of them


def _total(workers: Sequence[State]) -> dict[str, list[float]]:
    rows = {key: [worker[key] for worker in workers] for key in ("sums", "finite", "logged")}
    return {
        key: torch.tensor(numbers, dtype=torch.float64).sum(0).tolist()
        for key, numbers in rows.items()
    }


def _load_schedule(learner: Learner, saved: State) -> None:
    kept = dict(saved)
    if isinstance(
        learner.scheduler, OneCycleLR
    ):  # its length is that of this run, which may have more epochs
        kept = {
            key: value
            for key, value in saved.items()
            if key not in ("total_steps", "_schedule_phases", "_ends")
        }
    learner.scheduler.load_state_dict(kept)
