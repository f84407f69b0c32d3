"""What one moment of training consists of: taken from a learner, and put back into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.metrics import Sums
from expt.worker import random_state


def take(learner: Learner, position: Position, sums: Sums, worker: Worker) -> dict[str, Any]:
    """The state of training after a step; a collective, which every worker must join."""
    mine = {
        "rng": random_state.rng_state(worker.device),
        "sums": sums.values.tolist(),
        "logged": sums.logged.tolist(),
    }
    return {
        "model": learner.module.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": learner.scheduler.state_dict(),
        "scaler": learner.precision.scaler.state_dict(),
        "position": dataclasses.asdict(position),
        "workers": collectives.gather_across_workers(mine),
    }


def put_back(state: Mapping[str, Any], learner: Learner, position: Position, sums: Sums, worker: Worker) -> None:
    """Go on from `state`, also with another number of workers; one that was not there keeps its own random numbers."""
    learner.module.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    _put_back_schedule(learner, state["scheduler"])
    learner.precision.scaler.load_state_dict(state["scaler"])
    for name, value in state["position"].items():
        setattr(position, name, value)
    workers = state["workers"]
    if len(workers) == worker.world_size:
        sums.put_back(workers[worker.rank]["sums"], workers[worker.rank]["logged"])
    elif worker.rank == 0:  # only their total over all workers counts
        sums.put_back(*(torch.tensor([w[key] for w in workers]).double().sum(0).tolist() for key in ("sums", "logged")))
    if worker.rank < len(workers):
        random_state.set_rng_state(workers[worker.rank]["rng"], worker.device)


def _put_back_schedule(learner: Learner, saved: Mapping[str, Any]) -> None:
    kept = dict(saved)
    if isinstance(learner.scheduler, OneCycleLR):  # its length is that of this run, which may have more epochs
        kept = {key: value for key, value in saved.items() if key not in ("total_steps", "_schedule_phases")}
    learner.scheduler.load_state_dict(kept)
