"""A safetensors file whose header has all other state as JSON, written and read without torch.

Each key of the state is an entry of the header's metadata. A tensor is `{"$tensor": NAME}` in the
JSON, and a value that JSON lacks is tagged, as in `{"$tuple": [1, 2]}`. The checksums (CRC-32) of
the header and of each tensor come first.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from expt.errors import CheckpointError, ConfigError, first_line

_NAMES = "BOOL U8 I8 U16 I16 F16 BF16 U32 I32 F32 U64 I64 F64 C64 F8_E4M3 F8_E5M2 F8_E8M0"
_OF_TORCH = (
    "bool uint8 int8 uint16 int16 float16 bfloat16 uint32 int32 float32 uint64 int64 float64"
    " complex64 float8_e4m3fn float8_e5m2 float8_e8m0fnu"
)
DTYPES = dict(zip(_NAMES.split(), _OF_TORCH.split(), strict=True))
"""Torch's names of the types of numbers."""
SIZES = {name: int(re.findall(r"\d+", f"{name} 8")[0]) // 8 for name in DTYPES}
"""The bytes of a number of each type."""
MARK = b'{"__metadata__":{"crc32":"'
"""The beginning of a header; the sums follow, of eight digits each."""
MOST_HEADER = 100_000_000
"""The largest size of a header that the format allows [bytes]."""
BLOCK = 2**22
_whole = set[tuple[int, int, int]]()  # checked files: one, or a link to it, is read once
Decoders = Mapping[str, Callable[[Any], Any]]
_DECODERS: Decoders = {
    **{f"${kind.__name__}": kind for kind in (tuple, set, frozenset, float, dict)},
    "$complex": lambda parts: complex(*parts),
    "$Counter": lambda pairs: Counter(dict(pairs)),
    "$bytes": lambda tensor: bytes(tensor.data),
    "$list": lambda tensor: tensor.data.cast({"I64": "q", "F64": "d"}[tensor.dtype]).tolist(),
    **dict.fromkeys(("$tensor", "$part", "$dtype", "$Size", "$complex128"), lambda known: known),
}


class Tensor(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: list[int]
    data: memoryview
    """Its numbers in C order."""
    stride: list[int]
    """The strides that it had, if they were others; else empty."""


def write(
    file: IO[bytes],
    state: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Collection[int], Callable[[], memoryview]]],
) -> None:
    """Write state that is JSON already into an empty file, with `tensors` by name.

    Each has a dtype, a shape, and a function that returns its numbers in C order.
    """
    ordered = sorted(tensors.items(), key=lambda item: -SIZES[item[1][0]])  # so each is aligned
    entries = dict[str, Any]()
    end = 0
    for name, (dtype, shape, _) in ordered:
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    metadata = {"format": "pt", **{key: _dumped(value) for key, value in state.items()}}
    rest = f'",{_dumped(metadata)[1:]}' + (f",{_dumped(entries)[1:]}" if entries else "}")
    size = len(MARK) + 8 * (1 + len(ordered)) + len(rest)
    padding = -size % 8
    rest, size = rest + " " * padding, size + padding
    if size > MOST_HEADER:
        raise ConfigError(
            f"a checkpoint: its state without tensors takes {size:,} bytes, and at most"
            f" {MOST_HEADER:,} are allowed; keep less in custom code"
        )
    file.seek(8 + size)
    sums = b"".join(_written(file, read()) for _, (_, _, read) in ordered) + rest.encode()
    file.seek(0)
    file.write(size.to_bytes(8, "little") + MARK + _digits(zlib.crc32(MARK + sums)) + sums)


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _written(file: IO[bytes], data: memoryview) -> bytes:
    crc = 0
    for begin in range(0, len(data), BLOCK):
        crc = zlib.crc32(data[begin : begin + BLOCK], crc)
        file.write(data[begin : begin + BLOCK])
    return _digits(crc)


def _digits(crc: int) -> bytes:
    return b"%08x" % crc


class _Wrong(Exception):
    """A file is none that `write` writes; the text says why."""


@contextlib.contextmanager
def in_words(where: object) -> Iterator[None]:
    """Raise CheckpointError for anything that is wrong with the file `where`."""
    try:
        yield
    except _Wrong as error:
        raise CheckpointError(f"{where}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{where}: can't be read ({error.strerror})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{where}: its header is not as expt writes it ({said})") from error


class File:
    """A file of any program, mapped into memory, whose header is neither damaged nor forged."""

    def __init__(self, source: Path | memoryview) -> None:
        """Read the header of a file, or of its content. Raise CheckpointError for a wrong one."""
        self._source = source
        with in_words(source):
            data = source if isinstance(source, memoryview) else _mapped(source)
            header = _header(data)
            self.is_ours = header.startswith(MARK)
            """True if `write` has written it, with sums."""
            own, rest = header[len(MARK) : len(MARK) + 8], header[len(MARK) + 8 :]
            if self.is_ours and own != _digits(zlib.crc32(rest, zlib.crc32(MARK))):
                raise _Wrong("its header is damaged")
            entries = _loads(header)
            self._texts: dict[str, str] = entries.pop("__metadata__", {})
            self.tensors = _tensors(entries, data[8 + len(header) :])
            """The tensors by name, in their order."""
            self.sums = re.findall("." * 8, self._texts.pop("crc32", ""))[1:]
            """The checksums of the tensors."""
            self._texts.pop("format", None)

    def state(
        self,
        *,
        only: Collection[str] = (),
        without: Collection[str] = (),
        decoders: Decoders = _DECODERS,
    ) -> dict[str, Any]:
        """Return the state; `only` some keys, if there are any, and not those `without`.

        By `decoders` of tags values are torch's. Raises CheckpointError for a file that `write` has
        not written.
        """
        known = {**_DECODERS, **decoders}

        def value(found: dict[str, Any]) -> Any:
            tag = next(iter(found), "")
            if not tag.startswith("$"):
                return found
            of = found[tag]
            if tag in ("$tensor", "$bytes", "$list"):
                of = self.tensors[of]._replace(stride=found.get("stride", []))
            return known[tag](of)

        if not self.is_ours:
            raise CheckpointError(f"{self._source}: is of another program, or damaged")
        keys = [key for key in self._texts if key not in without and (not only or key in only)]
        with in_words(self._source):
            return {key: _loads(self._texts[key], value) for key in keys}


def _loads(text: str | bytes, value: Callable[[dict[str, Any]], Any] = lambda found: found) -> Any:
    """Return JSON with the `value` of each object; raise where readers would not agree on it."""

    def of_pairs(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _Wrong("its header has a key twice")
        return value(found)

    def refuse(word: str) -> Any:
        raise _Wrong(f"its header has {word}, which is not JSON")

    return json.loads(text, object_pairs_hook=of_pairs, parse_constant=refuse)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise _Wrong("is empty")
        # Private: a change in place changes no file.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _header(data: memoryview) -> bytes:
    size = int.from_bytes(data[:8], "little")
    if bytes(data[8:9]) != b"{":
        raise _Wrong("is no safetensors file")
    if size > MOST_HEADER:
        raise _Wrong(f"its header has {size:,} bytes, and at most {MOST_HEADER:,} are allowed")
    if 8 + size > len(data):
        raise _Wrong(f"is truncated: its header has {size:,} bytes")
    return bytes(data[8 : 8 + size])


def _tensors(entries: Mapping[str, Any], data: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a header's `entries`, which are to fill `data`."""
    found, end = dict[str, Tensor](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        are_sizes = all(type(number) is int and number >= 0 for number in (*shape, begin, stop))
        if not are_sizes or begin != end or stop - begin != math.prod(shape) * SIZES[dtype]:
            raise _Wrong(
                f"{name} can't be at {begin} to {stop}, with the shape {shape} in {dtype}, after"
                f" tensors that end at {end}"
            )
        found[name], end = Tensor(dtype, shape, data[begin:stop], []), stop
    if len(data) != end:
        change = "truncated" if len(data) < end else "longer than it was written"
        raise _Wrong(f"is {change}: its tensors have {len(data):,} bytes, and not {end:,}")
    return found


def check(path: Path) -> None:
    """Raise CheckpointError where a byte is not as it was written."""
    with in_words(path), path.open("rb") as file:
        about = os.fstat(file.fileno())
        if (stamp := (about.st_dev, about.st_ino, about.st_mtime_ns)) in _whole:
            return
        found = File(path)
        found.state()
        file.seek(-sum(tensor.data.nbytes for tensor in found.tensors.values()), os.SEEK_END)
        buffer = memoryview(bytearray(BLOCK))  # mapped, all of the file would be this process's
        for (name, tensor), expected in zip(found.tensors.items(), found.sums, strict=True):
            crc, left = 0, tensor.data.nbytes
            while left and (num := file.readinto(buffer[: min(left, BLOCK)])):
                crc, left = zlib.crc32(buffer[:num], crc), left - num
            if left or _digits(crc).decode() != expected:
                raise _Wrong(f"the tensor {name} is damaged")
        _whole.add(stamp)
