"""Tensors that workers write in parts, by torch.distributed.checkpoint.

Torch's own description of the parts is a pickle, so it is never read: a file of JSON says the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from expt.config import secrets
from expt.errors import CheckpointError
from expt.machine import available_memory
from expt.runs import checkpoint_file, safetensors
from expt.runs.paths import write_atomically

INDEX = "index.json"


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
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
