"""Checkpoints with their tensors: written atomically with a checksum, loaded with weights_only.

A sharded checkpoint is a file as any other, but for tensors of which each worker holds a part: in
their places it has keys into a folder of torch.distributed.checkpoint next to it.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import threading
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expt.config import secrets
from expt.errors import CheckpointError, ConfigError
from expt.machine import available_memory
from expt.runs import checkpoint_file
from expt.runs.checkpoint_file import PARTS

_AT = "in_parts"
"""The one key of what is in a tensor's place: of the tensor's own key."""
_TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
_SAFE = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "bool", "complex64", "complex128", *_TYPES},
    "torch.serialization": {"_get_layout"},
    "builtins": {"set"},
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath", "Path"},
}
"""Names that the pickled description of parts may hold, by module; None is all of a module."""


def save(path: Path, state: Mapping[str, Any], *, keep: int = 0) -> None:
    """Write `state` as `expt.runs.checkpoint_file.write` does."""
    # By name: torch then writes without holding up the training thread.
    checkpoint_file.write(
        path, lambda beside: torch.save(without_numpy(state), str(beside)), keep=keep
    )


Place: TypeAlias = tuple[Any, ...]
"""The keys and indices that lead to a value in nested containers."""


def mapped(state: Any, change: Callable[[Any, Place], Any], place: Place = ()) -> Any:
    """Return nested containers with what `change` makes of each key, and each value and its place.

    What is in the place of a part is a value, too.
    """
    if isinstance(state, Mapping) and state.keys() != {_AT}:
        items = ((key, mapped(below, change, (*place, key))) for key, below in state.items())
        found = {change(key, place): below for key, below in items}
        return collections.Counter(found) if isinstance(state, collections.Counter) else found
    if isinstance(state, list | tuple):
        return type(state)(mapped(each, change, (*place, i)) for i, each in enumerate(state))
    return change(state, place)


def without_numpy(state: Any) -> Any:
    """Return nested containers with Python's numbers in place of NumPy's, as `load` has them."""
    return mapped(state, lambda value, _: value.item() if isinstance(value, np.generic) else value)


_GIVEN_BACK: set[type] = {Tensor, torch.nn.Parameter}
"""Types of which a value was written and read by this process; tensors are written apart."""


def refuse_unreadable(state: Any, place: str) -> None:
    """Raise ConfigError, naming its place, for what `load` would not give back as `save` got it.

    One value of each type is written and read.
    """
    state = state.item() if isinstance(state, np.generic) else state
    kind = type(state)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        for key, value in state.items():
            refuse_unreadable(key, place)
            refuse_unreadable(value, f"{place}.{key}")
    elif kind in (list, tuple):
        for index, value in enumerate(state):
            refuse_unreadable(value, f"{place}.{index}")
    elif kind not in _GIVEN_BACK and not hasattr(state, "to_local"):
        if not _is_given_back(state):
            raise ConfigError(
                f"{place}: a checkpoint can't hold a {kind.__module__}.{kind.__qualname__}; let"
                " state_dict return numbers, strings, tensors, and lists and dicts of them, and"
                " load_state_dict take these"
            )
        _GIVEN_BACK.add(kind)


def _is_given_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(without_numpy([value]), file)
        checkpoint_file.read(file)
        file.seek(0)
        (found,) = torch.load(file, weights_only=True)
    except Exception:  # what pickle raises is of many kinds
        return False
    return type(found) is type(value)


def load(path: Path, *, lazily: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the state that `save` wrote, on the CPU; its tensors stay on the disk until used.

    A sharded one is read whole, but for the keys `without`, unless `lazily`: that has keys in place
    of tensors. No pickled code is run.
    """
    # A Namespace, a mere record, is in what torchvision's scripts write.
    with torch.serialization.safe_globals([argparse.Namespace]):
        # Given explicitly: the environment can turn the default off.
        state: dict[str, Any] = torch.load(
            str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    return state if lazily else filled(path, state, without=without)


class _InThread:
    """Writes in a thread, one checkpoint at a time; the next call raises what went wrong."""

    def __init__(self, last: Path, best: Path, *, keep: int) -> None:
        self._last, self._best, self._keep = last, best, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_read_back = False

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises what went wrong."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _begin(self, write: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(
            target=self._note_error, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _note_error(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error

    def _publish(self, state: Mapping[str, Any], bests: Sequence[int]) -> None:
        """Save `state` as the last, and among the best if it is; `bests` are all of their steps."""
        save(self._last, state, keep=self._keep)
        if not self._has_read_back:
            load(self._last, lazily=True)
            self._has_read_back = True
        if bests:
            checkpoint_file.keep_among(self._last, state["position"]["step"], self._best, bests)


class Writer(_InThread):
    """Writes whole checkpoints, from a copy."""

    def save(
        self,
        state: Mapping[str, Any],
        *,
        bests: Sequence[int] = (),
        owned: bool = False,
    ) -> None:
        """Copy `state` unless it is `owned`, and return; training may change it at once.

        Where it is one of the best, `bests` are the steps of all that are kept, the best first.
        """
        self.wait()
        copy = state if owned else copied(state)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        event = None if gpu is None else torch.cuda.Event()
        if event:
            event.record()

        def write() -> None:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # else a thread takes memory of the first one
            if event:
                event.synchronize()
            self._publish(copy, bests)

        self._begin(write)


class ShardedWriter(_InThread):
    """One worker's side of writing checkpoints of which each worker has a part.

    The file that names the parts is written last, by rank 0: until then the one before it counts.
    """

    def __init__(self, last: Path, best: Path, *, keep: int, group: Any) -> None:
        """`group` is a process group of gloo that nothing else uses."""
        super().__init__(last, best, keep=keep)
        self._group = group

    def save(
        self,
        state: Mapping[str, Any] | None,
        tensors: Mapping[str, Tensor],
        folder: str,
        *,
        bests: Sequence[int] = (),
        target: Path | None = None,
    ) -> None:
        """Return while all workers write `tensors` into `folder`, then rank 0 its `state`.

        As `target`, or as the last checkpoint; the others give no `state`.
        """
        into, checkpoints = self._last.parent / folder, self._last.parent

        def write() -> None:
            try:
                with checkpoint_file.full_disk_in_words(into):
                    _write_parts(into, tensors, self._group)
                if state is not None:
                    known = {**state, PARTS: checkpoint_file.described(into)}
                    if target is None:
                        self._publish(known, bests)
                    else:
                        save(target, known)
            finally:  # what is half written takes room, and nothing names it
                if state is not None:
                    checkpoint_file.remove_unnamed(checkpoints)

        self._begin(write)

    def _note_error(self, write: Callable[[], None]) -> None:
        try:
            super()._note_error(write)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            said = str(error).strip().splitlines() or [type(error).__name__]
            self._error = checkpoint_file.not_written(self._last, said[-1])


def _write_parts(folder: Path, parts: Mapping[str, Tensor], group: Any) -> None:
    """Write this worker's `parts` of each tensor; a collective of the process group `group`."""
    import torch.distributed.checkpoint as dcp

    # Of torch 2.10 about itself. To put the filters back is not for a thread, as this is one.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(folder), process_group=group)


def copied(state: Any) -> Any:
    """Return `state` with its own tensors; those of a GPU go into pinned memory, under way."""
    return mapped(state, lambda value, _: _copy(value) if isinstance(value, Tensor) else value)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cuda":
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned.copy_(tensor.detach(), non_blocking=True)
    return tensor.detach().clone()


def parted(
    state: Any, is_part: Callable[[Any], bool], *, copies: bool
) -> tuple[Any, dict[str, Tensor]]:
    """Return `state` with keys in place of tensors that are parts, and the tensors by their keys.

    With `copies` they are copies.
    """
    tensors = dict[str, Tensor]()

    def rest(value: Any, place: Place) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_part(value):
            return value.clone()
        key, part = "/".join(map(str, place)), value.detach()
        if copies:
            part = part.clone() if part.device.type == "cpu" else part.cpu()
        tensors[key] = part
        return {_AT: key}

    return mapped(state, rest), tensors


def filled(
    path: Path,
    state: Mapping[str, Any],
    like: Callable[[Place], Any] | None = None,
    *,
    without: Collection[str] = (),
) -> Any:
    """Return `state`, read from `path`, with its tensors on the CPU, but for the keys `without`.

    A tensor that is to be `like` a sharded one is this worker's part. No collective. Raises
    CheckpointError where there is no room for whole ones, or a part is missing.
    """
    if PARTS not in state:
        return state
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    folder = path.parent / state[PARTS]["folder"]
    if missing := [name for name in state[PARTS]["files"] if not (folder / name).is_file()]:
        raise CheckpointError(f"{path}: {folder / missing[0]} is missing, which holds a part of it")
    reader = _reader(folder)
    known = reader.read_metadata().state_dict_metadata
    rest = {key: value for key, value in state.items() if key not in {PARTS, *without}}
    targets: dict[str, Tensor] = {}
    num_bytes, room = 0, available_memory()

    def target(value: Any, place: Place) -> Any:
        nonlocal num_bytes
        if not isinstance(value, Mapping):
            return value
        key = value[_AT]
        about = known[key]
        pattern: Any = like(place) if like else None
        dtype: torch.dtype = about.properties.dtype
        if hasattr(pattern, "to_local") and pattern.shape == about.size:
            targets[key] = torch.empty_like(pattern, dtype=dtype, requires_grad=False)
        else:
            num_bytes += about.size.numel() * dtype.itemsize
            if num_bytes > room:
                raise CheckpointError(
                    f"{path}: is sharded, and its whole tensors need more than the"
                    f" {room / 1e9:.1f} GB that this process may still take; continue it with"
                    " strategy=fsdp on more workers, or use it where there is more memory"
                )
            targets[key] = torch.empty(about.size, dtype=dtype)
        return targets[key]

    whole = mapped(rest, target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
        try:
            dcp.load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # which is not an Exception
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                raise cause from None
            said = secrets.said(cause)
            raise CheckpointError(f"{path}: {folder} can't be read ({said})") from error
    return whole


def _reader(folder: Path) -> Any:
    """Return torch's reader, which runs no code that the description of the parts may hold."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            metadata: Any = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            return metadata

    return Reader(folder)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        names = _SAFE.get(module, set())
        if names is not None and name not in names:
            raise CheckpointError(
                f"the description of a sharded checkpoint holds {module}.{name}, and is not trusted"
            )
        return super().find_class(module, name)
