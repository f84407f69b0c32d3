"""Checkpoints with their tensors: written in a thread, and loaded.

A sharded checkpoint is a file as any other, but for tensors that workers hold in parts: in
their places it has keys into a folder next to it, written by torch.distributed.checkpoint. Torch's
own description of the parts is a pickle, so it is never read: a file of JSON says the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy as shallow
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from expt.config import secrets
from expt.errors import CheckpointError, ConfigError
from expt.machine import available_memory
from expt.runs import checkpoint_file, safetensors
from expt.runs.checkpoint_file import PARTS
from expt.runs.paths import write_atomically
from expt.runs.safetensors import DTYPES

Like: TypeAlias = Callable[[str], Tensor | None]
"""A function from a tensor's key to the sharded tensor that it is loaded into, or None."""
LONG = 1000
"""The length from which a list of numbers becomes a tensor, since each reader parses the header."""
_NAMES = {getattr(torch, name): short for short, name in DTYPES.items()}


def save(path: Path, state: Mapping[str, Any], *, keep: int = 0) -> None:
    """Write `state` as `expt.runs.checkpoint_file.write` does."""
    checkpoint_file.write(path, lambda file: _dump(file, state), keep=keep)


def dumps(state: Mapping[str, Any]) -> memoryview:
    """Return the content of a file of `state`."""
    _dump(file := io.BytesIO(), state)
    return file.getbuffer()


def _dump(file: IO[bytes], state: Mapping[str, Any]) -> None:
    packed = _Packed()
    texts = {key: packed.json(value, key) for key, value in state.items()}
    safetensors.write(file, texts, packed.tensors)


def refuse_unreadable(state: Any, key: str) -> None:
    """Raise ConfigError, naming its place, for a value that no checkpoint can hold."""
    _Packed().json(state, key)


class _Packed:
    """State as JSON, and its tensors by name; those in the same memory are one."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, torch.Size, Callable[[], memoryview]]] = {}
        self._known = dict[Any, Any]()

    def json(self, value: Any, key: str) -> Any:
        """Return JSON of a value, which comes back with its type; see safetensors."""
        value = value.item() if isinstance(value, np.generic) else value
        kind = type(value)
        tag = f"${kind.__name__}"
        if kind in (type(None), bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:
            return {tag: str(value)}
        if kind is list:
            return self._list(value, key)
        if kind in (tuple, set, frozenset, torch.Size):
            return {tag: self._list([*value], key)}
        if kind is complex:
            return {tag: self._list([value.real, value.imag], key)}
        if kind in (dict, OrderedDict, Counter):
            return self._dict(value, key)
        if kind is bytes:
            return {tag: self._name(torch.from_numpy(np.frombuffer(value, np.uint8).copy()), key)}
        if kind is torch.dtype and value in _NAMES:
            return {tag: _NAMES[value]}
        if hasattr(value, "to_local"):  # each worker writes its part
            return {"$part": key}
        if kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            if value.dtype == torch.complex128:
                return {"$complex128": self.json(torch.view_as_real(value.resolve_conj()), key)}
            if value.dtype in _NAMES:
                return self._tensor(value.detach().resolve_conj().resolve_neg(), key)
        about = f" of {value.dtype}, {value.layout}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            f"{key.replace('/', '.')}: a checkpoint can't hold a {kind.__module__}"
            f".{kind.__qualname__}{about}; let state_dict return numbers, strings, tensors, and"
            " lists and dicts of them, and load_state_dict take these"
        )

    def _list(self, value: list[Any], key: str) -> Any:
        is_long = len(value) >= LONG and {*map(type, value)} in ({int}, {float})
        if is_long and (numbers := np.array(value)).dtype in (np.int64, np.float64):
            return {"$list": self._name(torch.from_numpy(numbers), key)}
        return [self.json(one, f"{key}/{index}") for index, one in enumerate(value)]

    def _dict(self, value: Mapping[Any, Any], key: str) -> Any:
        items = [(name, self.json(one, f"{key}/{name}")) for name, one in value.items()]
        if type(value) is Counter:
            return {"$Counter": [[self.json(name, key), one] for name, one in items]}
        if all(type(name) is str and not name.startswith("$") for name in value):
            return dict(items)
        return {"$dict": [[self.json(name, key), one] for name, one in items]}

    def _tensor(self, value: Tensor, key: str) -> Any:
        usual = torch.empty(value.shape, device="meta").stride()
        if value.stride() == usual or not _is_dense(value.shape, value.stride()):
            return {"$tensor": self._name(value, key)}
        return {"$tensor": self._name(value, key), "stride": [*value.stride()]}

    def _name(self, value: Tensor, key: str) -> str:
        """Have a tensor written, and return its name in the file."""
        memory = _memory_of(value)
        if memory not in self._known:
            name = re.sub(r"^workers/(\d+)", r"rank\1", key).replace("/", ".")
            name = name.encode(errors="replace").decode()
            while name in self.tensors:  # {"a.b": ...} and {"a": {"b": ...}}
                name += "_"
            self.tensors[name] = _NAMES[value.dtype], value.shape, lambda: _bytes_of(value)
            self._known[memory] = name
        found: str = self._known[memory]
        return found


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of these strides fills its memory, in whatever order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _memory_of(value: Tensor) -> Any:
    """Return a key that is equal for tensors that have the same numbers in the same memory."""
    if hasattr(value, "to_local") or not value.numel():
        return id(value)
    how = value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
    return value.device, value.data_ptr(), how


def _bytes_of(value: Tensor) -> memoryview:
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def map_leaves(change: Callable[[str, Any], Any], state: Any, key: str = "") -> Any:
    """Return nested dicts, lists and tuples with `change` of each value and its key, as a/0/b."""
    before = f"{key}/" if key else ""
    if type(state) in (dict, OrderedDict):
        return {name: map_leaves(change, one, f"{before}{name}") for name, one in state.items()}
    if type(state) in (list, tuple):
        items = enumerate(state)
        return type(state)(map_leaves(change, one, f"{before}{index}") for index, one in items)
    return change(key, state)


def load(
    source: Path | memoryview, *, only: Collection[str] = (), like: Like = lambda _: None
) -> dict[str, Any]:
    """Return the state that `save` wrote, on the CPU; its tensors stay on the disk until used.

    It has `only` some keys, if there are any. Of a sharded checkpoint a tensor that is to be `like`
    a sharded one is this worker's part. No collective. Raises CheckpointError where there is no
    room for whole ones, or a part is missing.
    """
    file = safetensors.File(source)
    decoders: dict[str, Callable[[Any], Any]] = {
        "$tensor": tensor_of,
        "$complex128": torch.view_as_complex,
        "$Size": torch.Size,
        "$dtype": lambda name: getattr(torch, DTYPES[name]),
    }
    about = file.state(only=[PARTS]).get(PARTS)
    if about is None or not isinstance(source, Path):
        return file.state(only=only, decoders=decoders)
    parts = Parts(source, about)
    decoders["$part"] = lambda key: parts.tensor(key, like(key))
    found = file.state(only=only, without=[PARTS], decoders=decoders)
    parts.fill()
    return found


def tensor_of(stored: safetensors.Tensor) -> Tensor:
    """Return a tensor of a file, in the memory that it is mapped to."""
    dtype: torch.dtype = getattr(torch, DTYPES[stored.dtype])
    if not stored.data.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(stored.data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:  # in a file of another program
        flat = flat.clone()
    found = flat.view(dtype).view(stored.shape)
    if not stored.stride:
        return found
    if not _is_dense(stored.shape, stored.stride):
        raise ValueError(f"strides {stored.stride}")
    return torch.empty_strided(stored.shape, stored.stride, dtype=dtype).copy_(found)


class Writer:
    """A writer of checkpoints in a thread, one at a time; the next call raises its error.

    A sharded one is a folder of parts, and a file that names them, which rank 0 writes last: until
    then the one before it counts.
    """

    def __init__(
        self, last: Path, best: Path, *, keep: int, is_first: bool = True, group: Any = None
    ) -> None:
        """Write files where this worker `is_first`, and parts by a `group` of gloo of its own."""
        self._last, self._best, self._keep = last, best, keep
        self._is_first, self._group = is_first, group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._step: int | None = None  # of the last checkpoint

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises the error of the last file."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def save(
        self,
        state: Mapping[str, Any],
        *,
        bests: Sequence[int] = (),
        parts: Path | None = None,
        owned: bool = False,
    ) -> None:
        """Copy `state` unless it is `owned`, and return; training may change it at once.

        Its shards are written into the folder `parts` by all workers. If it is one of the best,
        `bests` are the steps of all that are kept, the best first.
        """
        self.wait()
        copy = state if owned else copied(state)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        event = None if gpu is None else torch.cuda.Event()
        if event:
            event.record()

        def write() -> None:
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)  # else a thread takes memory of the first one
                if event:
                    event.synchronize()
                about = self._write_parts(parts, copy) if parts else {}
                step = copy["position"]["step"]
                if self._is_first:
                    if self._step is None and self._last.exists():  # a resumed run's
                        with contextlib.suppress(CheckpointError):
                            self._step = checkpoint_file.read(self._last)["position"]["step"]
                    keep = 0 if step == self._step else self._keep
                    save(self._last, {**copy, **about}, keep=keep)
                    self._step = step
                if self._is_first and bests:
                    checkpoint_file.keep_among(self._last, step, self._best, bests)
            except Exception as error:
                self._error = error
            except BaseException as error:  # torch's CheckpointException is not an Exception
                said = str(error).strip().splitlines() or [type(error).__name__]
                self._error = checkpoint_file.not_written(self._last, said[-1])
            finally:
                if self._is_first and parts:  # half written ones take room
                    checkpoint_file.remove_unnamed(self._last.parent)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_parts(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        found = dict[str, Any]()
        map_leaves(found.__setitem__, state)
        shards = {key: value for key, value in found.items() if hasattr(value, "to_local")}
        with checkpoint_file.disk_in_words(folder):
            write_parts(folder, shards, self._group)
        return {PARTS: checkpoint_file.parts_in(folder)} if self._is_first else {}


def copied(state: Any) -> Any:
    """Return `state` with its own tensors; those of a GPU go into pinned memory, under way."""
    copies = dict[Any, Tensor]()

    def copy(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return shallow(value)  # a set, which training may change
        if (key := _memory_of(value)) not in copies:
            copies[key] = _copy(value.detach())
        return copies[key]

    return map_leaves(copy, state)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    if hasattr(tensor, "to_local"):
        return tensor.cpu()
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


INDEX = "index.json"


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this worker's part of each tensor; a collective of the process group `group`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex

    # Of torch 2.10 about itself. To put the filters back is not for a thread, as this is one.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    writer = dcp.FileSystemWriter(folder)
    written: Any = dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    if group.rank() == 0:
        rows = []
        for key, about in written.state_dict_metadata.items():
            dtype = str(about.properties.dtype).removeprefix("torch.")
            for chunk in about.chunks:
                at = written.storage_data[MetadataIndex(key, chunk.offsets)]
                place = at.relative_path, at.offset, at.length
                rows.append((key, dtype, about.size, chunk.offsets, chunk.sizes, *place))
        write_atomically(folder / INDEX, json.dumps(rows))


class Parts:
    """A reader of some tensors of a sharded checkpoint."""

    def __init__(self, path: Path, parts: Mapping[str, Any]) -> None:
        """Find the `parts` of the checkpoint at `path`. Raise CheckpointError if one is missing."""
        from torch.distributed.checkpoint import metadata as of_torch

        names = {file.name for file in checkpoint_file.parts_of(path, parts)}
        self._path, self._folder = path, path.parent / parts["folder"]
        self._targets, self._num_bytes, self._room = dict[str, Tensor](), 0, available_memory()
        self._known: Any = of_torch.Metadata({}, storage_data={})
        with safetensors.in_words(self._folder / INDEX):
            for key, dtype, *shapes, name, offset, length in json.loads(
                (self._folder / INDEX).read_text()
            ):
                shape, *chunk = map(torch.Size, shapes)
                properties = of_torch.TensorProperties(dtype=getattr(torch, dtype))
                about: Any = of_torch.TensorStorageMetadata(properties, shape, [])
                about = self._known.state_dict_metadata.setdefault(key, about)
                about.chunks.append(of_torch.ChunkStorageMetadata(*chunk))
                place = of_torch.MetadataIndex(key, chunk[0])
                self._known.storage_data[place] = SimpleNamespace(
                    relative_path=name, offset=offset, length=length, transform_descriptors=None
                )
                if name not in names:
                    raise ValueError(f"{name} is no part of the checkpoint")

    def tensor(self, key: str, pattern: Any) -> Tensor:
        """Return a tensor that `fill` fills: this worker's part if `pattern` is sharded, or all.

        Raises CheckpointError where there is no room for whole ones.
        """
        about = self._known.state_dict_metadata[key]
        dtype: torch.dtype = about.properties.dtype
        if hasattr(pattern, "to_local") and pattern.shape == about.size:
            found = torch.empty_like(pattern, dtype=dtype, requires_grad=False)
        else:
            self._num_bytes += about.size.numel() * dtype.itemsize
            if self._num_bytes > self._room:
                raise CheckpointError(
                    f"{self._path}: is sharded, and its whole tensors need more than the"
                    f" {self._room / 1e9:.1f} GB that this process may still take; continue it with"
                    " strategy=fsdp on more workers, or use it where there is more memory"
                )
            found = torch.empty(about.size, dtype=dtype)
        return self._targets.setdefault(key, found)

    def fill(self) -> None:
        """Read the tensors; no collective. Raise CheckpointError for damaged parts."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        known = self._known

        class Reader(dcp.FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return known

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
            try:
                dcp.load(self._targets, storage_reader=Reader(self._folder), no_dist=True)
            except CheckpointException as error:  # which is not an Exception
                cause = next(iter(error.failures.values()))[0]
                if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                    raise cause from None
                raise CheckpointError(
                    f"{self._path}: {self._folder} can't be read ({secrets.said(cause)})"
                ) from error
