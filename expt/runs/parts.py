"""The parts of a sharded checkpoint: a folder of torch.distributed.checkpoint beside the file that
names it.

That file is a checkpoint as any other, but for tensors that workers held parts of: in their places
it has their keys."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expt.config import secrets
from expt.errors import CheckpointError
from expt.machine import available_memory
from expt.runs.parts_folder import PARTS

_AT = "in_parts"
"""The one key of what stands in a tensor's place: of the tensor's own key."""
_SAFE = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": (
        {
            "Size",
            "float32",
            "float64",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        }
        | {"complex64", "complex128"}
    ),
    "torch.serialization": {"_get_layout"},
    "builtins": {"set"},
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath", "Path"},
}
"""What the description of the parts may be made of, which torch reads with pickle; None is all of a
module.
"""


def parted(
    state: Any, is_part: Callable[[Any], bool], *, copies: bool, path: tuple[Any, ...] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """`state` with a key in the place of each tensor that is a part, and the tensors by their keys,
    in `copies`.
    """
    if isinstance(state, Tensor) and is_part(state):
        key, part = "/".join(map(str, path)), state.detach()
        if copies:
            part = part.clone() if part.device.type == "cpu" else part.cpu()
        return {_AT: key}, {key: part}
    if isinstance(state, Mapping):
        found = {
            key: parted(value, is_part, copies=copies, path=(*path, key))
            for key, value in state.items()
        }
        return {key: rest for key, (rest, _) in found.items()}, _joined(found.values())
    if isinstance(state, list | tuple):
        several = [
            parted(value, is_part, copies=copies, path=(*path, at))
            for at, value in enumerate(state)
        ]
        return type(state)(rest for rest, _ in several), _joined(several)
    return state.clone() if isinstance(state, Tensor) else state, {}


def _joined(several: Any) -> dict[str, Tensor]:
    return {key: tensor for _, parts in several for key, tensor in parts.items()}


def write(folder: Path, parts: Mapping[str, Tensor], group: Any) -> None:
    """Write this worker's `parts` of each tensor; a collective of the process group `group`."""
    import torch.distributed.checkpoint as dcp

    # Of torch 2.10 about itself. To put the filters back is not for a thread, as this is one.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(folder), process_group=group)


def filled(
    path: Path,
    state: Mapping[str, Any],
    like: Callable[[tuple[Any, ...]], Any] | None = None,
    *,
    without: Collection[str] = (),
) -> Any:
    """`state`, which the file at `path` holds, with its tensors again, on the CPU, but `without`
    these of its keys.

    Of what is `like` a sharded one it is this worker's part, where that is. No collective. Raises
    CheckpointError where there is no room for whole ones, or a part is not there."""
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

    def part_like(place: tuple[Any, ...], key: str) -> Any:
        pattern = like(place) if like else None
        sharded: Any = pattern if hasattr(pattern, "to_local") else None
        return sharded if sharded is not None and sharded.shape == known[key].size else None

    def num_bytes(place: tuple[Any, ...], key: str) -> int:
        """Of the whole, where it is to be one."""
        about = known[key]
        return (
            0
            if part_like(place, key) is not None
            else about.size.numel() * about.properties.dtype.itemsize
        )

    def target(place: tuple[Any, ...], key: str) -> Tensor:
        about, pattern = known[key], part_like(place, key)
        dtype: torch.dtype = about.properties.dtype
        if pattern is None:
            targets[key] = torch.empty(about.size, dtype=dtype)
        else:
            targets[key] = torch.empty_like(pattern, dtype=dtype, requires_grad=False)
        return targets[key]

    _refuse_too_large(path, sum(num_bytes(*each) for each in _places(rest)))
    whole = _replaced(rest, target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
        try:
            dcp.load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                raise cause from None
            raise CheckpointError(
                f"{path}: {folder} can't be read ({secrets.said(cause)})"
            ) from error
    return whole


def _places(state: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Where keys stand for tensors, and these."""
    found: list[tuple[tuple[Any, ...], str]] = []

    def note(place: tuple[Any, ...], key: str) -> Tensor:
        found.append((place, key))
        return torch.empty(0)

    _replaced(state, note)
    return found


def _replaced(
    state: Any, target: Callable[[tuple[Any, ...], str], Tensor], place: tuple[Any, ...] = ()
) -> Any:
    if isinstance(state, Mapping):
        if state.keys() == {_AT}:
            return target(place, state[_AT])
        return {key: _replaced(value, target, (*place, key)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(
            _replaced(value, target, (*place, index)) for index, value in enumerate(state)
        )
    return state


def _refuse_too_large(path: Path, num_bytes: int) -> None:
    if num_bytes > (room := available_memory()):
        raise CheckpointError(
            f"{path}: is sharded, and its whole tensors need more than the {room / 1e9:.1f} GB that"
            " this process may still take; go on from it with strategy=fsdp on more workers, or"
            " use it where there is more memory"
        )


def _reader(folder: Path) -> Any:
    """torch's, which runs no code that the description of the parts may hold."""
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
