"""A run's checkpoints, written by rank 0; of a sharded model by it or by all workers, as memory has
room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from expt.config.schema import RunConfig
from expt.errors import CheckpointError
from expt.machine import available_memory
from expt.runs import checkpoint, checkpoint_file
from expt.runs.checkpoint import ShardedWriter
from expt.runs.paths import RunPaths
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.sharding import gathered, is_sharded, local, map_tensors

ROOM = 0.5
"""Of the memory that is left: what all of a checkpoint's tensors may take for one worker to gather
them.
"""


class Checkpoints:
    """One worker's side of it."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, learner: Learner, worker: Worker
    ) -> None:
        self._wanted, self._paths, self._worker = config.checkpoint.sharded, paths, worker
        self._shards = learner.shards
        self._whole = checkpoint.Writer(paths.last, paths.best, keep=config.checkpoint.keep)
        self._parted: ShardedWriter | None = None
        if self._shards > 1 and self._wanted is not False:
            group = dist.new_group(backend="gloo")  # its own, for it is used in a thread
            self._parted = ShardedWriter(
                paths.last, paths.best, keep=config.checkpoint.keep, group=group
            )
        self._in_parts: bool | None = None

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises what went wrong."""
        self._whole.wait()
        if self._parted:
            self._parted.wait()

    def save(
        self,
        state: Mapping[str, Any],
        about: Callable[[], Mapping[str, Any]],
        *,
        is_best: bool = False,
        keeps_best: bool = False,
        target: Path | None = None,
    ) -> None:
        """Begin to write `state`, with what rank 0 has to say `about` it; as `target`, or as the
        last. A collective.
        """
        owned = self._shards > 1
        if owned and self._parted and self._writes_parts(state):
            self._save_parts(
                self._parted, state, about, is_best=is_best, keeps_best=keeps_best, target=target
            )
            return
        if owned:
            self._refuse_lack_of_room(state)
            state = gathered(state, keep=self._worker.rank == 0)
        if self._worker.rank:
            return
        known = {**state, **_as_it_is(about())}
        if target is not None:
            checkpoint.save(target, known)
        else:
            self._whole.save(known, is_best=is_best, keeps_best=keeps_best, owned=owned)

    def _save_parts(
        self,
        writer: ShardedWriter,
        state: Mapping[str, Any],
        about: Callable[[], Mapping[str, Any]],
        *,
        is_best: bool,
        keeps_best: bool,
        target: Path | None,
    ) -> None:
        copies = _own_bytes(state) < ROOM * available_memory() / self._worker.local_world_size
        rest, tensors = checkpoint.parted(state, is_sharded, copies=copies)
        mine, folder = self._worker.rank == 0, None
        if mine:
            self._paths.checkpoints.mkdir(parents=True, exist_ok=True)
            folder = checkpoint_file.free_folder(self._paths.checkpoints, state["position"]["step"])
        folder = collectives.from_rank_0(folder, self._worker.device)
        known = {**rest, **_as_it_is(about())} if mine else None
        writer.save(known, tensors, folder, is_best=is_best, keeps_best=keeps_best, target=target)
        if not copies:
            writer.wait()  # training is to change none of them before

    def _writes_parts(self, state: Mapping[str, Any]) -> bool:
        """Asked once: what does not fit at the first checkpoint will not at the next."""
        if self._in_parts is None:
            lacks = self._worker.rank == 0 and _num_bytes(state) > ROOM * available_memory()
            wanted = self._wanted is True or lacks
            self._in_parts = (
                collectives.max_across_workers([float(wanted)], self._worker.device)[0] > 0
            )
        return self._in_parts

    def _refuse_lack_of_room(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where one worker can't gather it all."""
        needed, room = _num_bytes(state), available_memory()
        if self._worker.rank == 0 and needed > room:
            raise CheckpointError(
                f"{self._paths.last}: {needed / 1e9:.1f} GB of tensors must be gathered for one"
                f" file, and this worker may take {room / 1e9:.1f} GB more; use"
                " checkpoint.sharded=true, by which each worker writes its part"
            )


def _as_it_is(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy: a thread writes it, and training does not wait."""
    return cast(Mapping[str, Any], map_tensors(lambda _, tensor: tensor.detach().clone(), about))


def _num_bytes(state: Mapping[str, Any]) -> int:
    """Of the whole tensors, wherever their parts are."""
    return _sum_of_tensors(state, lambda tensor: tensor.numel() * tensor.element_size())


def _own_bytes(state: Mapping[str, Any]) -> int:
    """Of this worker's parts."""
    return _sum_of_tensors(state, lambda tensor: local(tensor).nbytes if is_sharded(tensor) else 0)


def _sum_of_tensors(state: Mapping[str, Any], size: Callable[[Tensor], int]) -> int:
    sizes: list[int] = []

    def note(_: object, tensor: Tensor) -> torch.Tensor:
        sizes.append(size(tensor))
        return tensor

    map_tensors(note, state)
    return sum(sizes)
