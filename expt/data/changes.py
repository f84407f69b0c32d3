"""Find attributes that custom code changes and that no saved state holds.

An object is seen by its trace: a text or bytes for a value, a dict or a tuple of traces for a
container, and None where it is not looked at, so that no change is seen there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import re
import sys
import types
import zlib
from collections.abc import Container, Mapping, Set
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from expt.config.own_code import PREFIX, is_installed, own_files

_COMPARED = 4096
"""Numbers of a tensor, or characters of a text, that are compared."""
_ADDED_UP = 10_000_000
"""The most numbers of a tensor or array whose checksum is compared, too."""
_OBJECTS = 512
"""Objects of an attribute that are looked at."""
_OF_TORCH = {name for name in vars(nn.Module()) if not name.endswith("_hooks")}
_OF_TORCH |= {"_step_count", "_last_lr"}  # a scheduler makes new ones
_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
Trace: TypeAlias = Any
"""A str, bytes, a dict or tuple of traces, or None; it stays equal while the object does."""
Traces: TypeAlias = dict[str, Trace]
"""Those of attributes, by name."""


def attributes(one: Any) -> dict[str, Any]:
    """Return the attributes and slots of an object, or the globals of a module of Python.

    Those of an nn.Module are without its parameters and modules, and the products of prune.
    """
    if isinstance(one, type | types.ModuleType):
        return {name: value for name, value in vars(one).items() if not name.startswith("__")}
    found = {name: getattr(one, name) for name in _slots(type(one)) if hasattr(one, name)}  # type: ignore[arg-type]
    found |= getattr(one, "__dict__", {})
    if isinstance(one, nn.Module | LRScheduler):
        found = {name: value for name, value in found.items() if name not in _OF_TORCH}
    if not isinstance(one, nn.Module):
        return found
    for parameter, _ in one.named_parameters(recurse=False):
        name = re.sub("_(orig|g|v)$", "", parameter)  # of prune, weight_norm, ...
        if isinstance(found.get(name), Tensor):
            del found[name]
    return found | dict(one.named_buffers(recurse=False))


@functools.cache
def _slots(kind: type) -> set[str]:
    named = (one for each in kind.__mro__ for one in vars(each).items())
    return {name for name, value in named if isinstance(value, types.MemberDescriptorType)}


def _traces(one: object, seen: dict[int, object]) -> Traces:
    """Return the traces of the attributes of `one`; adds its objects to `seen`, by id.

    Objects that are in there before are left out, such as those of a checkpoint.
    """
    found: Traces = {}
    for name, value in attributes(one).items():
        with contextlib.suppress(Exception):  # of an odd class, such as one without a repr
            found[name] = _trace(value, seen, _OBJECTS + len(seen))
    return found


class Watched:
    """An object, and how its attributes were when the watch began."""

    def __init__(self, one: Any, known: Mapping[int, object], *methods: str) -> None:
        """Take the names of the `methods` that save and load its state, if it has them."""
        self._one, self._methods = one, methods
        self._before = _traces(one, dict(known))
        copied, memo = attributes(one) if methods else {}, dict(known)
        self._copies = {name: _copy(each, memo) for name, each in copied.items()}

    def lost(self, known: Mapping[int, object]) -> list[str]:
        """Return the attributes that have changed, and that a saved state does not bring back."""
        now = _traces(self._one, dict(known))
        then = self._before  # one that is new was only made late
        names = [name for name in then if name in now and _differ(then[name], now[name])]
        if not names or not self._methods:
            return names
        save, load = self._methods
        twin = copy.copy(self._one)
        for name, value in self._copies.items():  # known objects were not copied
            own = copy.copy(value) if isinstance(value, dict | list) else value
            object.__setattr__(twin, name, own)
        shared = _traces(twin, dict(known))  # such as objects in a function's closure
        getattr(twin, load)(getattr(self._one, save)())
        loaded = _traces(twin, dict(known))
        # It is loaded if it is as now, and was not before.
        return [n for n in names if not (loaded.get(n) == now[n] != shared.get(n))]


def own_modules_and_classes() -> dict[str, Any]:
    """Return the person's own modules and the classes in them, which may have a state, too."""
    names = [*own_files(), *(each for each in sys.modules if each.startswith(PREFIX))]
    found: dict[str, Any] = {name: sys.modules[name] for name in names}
    for name in names:
        for value in vars(sys.modules[name]).copy().values():
            if issubclass(type(value), type) and value.__module__ == name:  # a proxy may raise
                found[f"{name}.{value.__qualname__}"] = value
    return found


def _copy(value: Any, memo: dict[int, object]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a generator, ...
        return value


def _differ(before: Trace, after: Trace) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):  # a cache gets more keys
        return any(_differ(before[key], after[key]) for key in before.keys() & after.keys())
    if isinstance(before, tuple) and isinstance(after, tuple):
        pairs = zip(before, after, strict=False)
        return len(before) != len(after) or any(_differ(*pair) for pair in pairs)
    return before is not None and before != after


def trace(value: Any) -> Trace:
    """Return the trace of an object that has not been looked at."""
    return _trace(value, {}, _OBJECTS)


def _trace(value: Any, seen: dict[int, object], most: int) -> Trace:
    if isinstance(value, str | bytes) and len(value) > _COMPARED:
        return hashlib.blake2b(value.encode() if isinstance(value, str) else value).digest()
    if isinstance(value, str | bytes | int | float | complex | bool | np.generic):
        return repr(value)
    if value is None or isinstance(value, _CODE) or id(value) in seen or len(seen) > most:
        return None
    seen[id(value)] = value  # kept, so that nothing else gets its id
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()  # its bytes are addresses
    if isinstance(value, Tensor | np.ndarray):
        return digest(value)
    if isinstance(value, nn.Module):  # its parts don't count: a large one is no end
        parts = dict(value.named_modules())
        inside = {**seen, **{id(part): part for part in parts.values()}}
        return {
            name: {**_traces(part, inside), **_parameters(part, seen)}
            for name, part in parts.items()
        }
    if isinstance(value, Mapping):
        some = [*value][:_OBJECTS]
        return {repr(key): _trace(value[key], seen, most) for key in some}
    if isinstance(value, list | tuple):
        step = max(1, len(value) // _OBJECTS)
        return (str(len(value)), *(_trace(each, seen, most) for each in value[::step]))
    if isinstance(value, Set):
        return str(len(value)), *sorted(map(repr, itertools.islice(value, _OBJECTS)))
    return _of_object(value, seen, most)


def _parameters(module: nn.Module, seen: Container[int]) -> Traces:
    own = module.named_parameters(recurse=False)
    return {name: digest(each) for name, each in own if id(each) not in seen}


def _of_object(value: Any, seen: dict[int, object], most: int) -> Trace:
    """Look into any object, such as a generator, as pickle and deepcopy would.

    A custom function is seen by its closure, its defaults and its attributes.
    """
    try:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame  # None at its end
            return frame and _trace((frame.f_lasti, dict(frame.f_locals)), seen, most)
        if isinstance(value, types.FunctionType):
            if is_installed(value.__code__.co_filename):
                return (_trace(vars(value).get("__wrapped__"), seen, most),)
            held = [*(cell.cell_contents for cell in value.__closure__ or ())]
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return tuple(_trace(each, seen, most) for each in (*held, vars(value) or None))
        found = value.__reduce_ex__(5)  # without a copy of large buffers
        parts = [*found[1:3], *([*each] if each else None for each in found[3:5])]
    except Exception:  # an open file, a lock, an iterator, ...
        return _trace(getattr(value, "__dict__", None), seen, most)
    return None if isinstance(found, str) else tuple(_trace(part, seen, most) for part in parts)


def digest(value: Tensor | np.ndarray[Any, Any]) -> bytes | None:
    """Return a digest of type, shape and numbers; of many, some and a checksum."""
    try:
        flat = value.reshape(-1)
        every: Any = flat if _COMPARED < len(flat) <= _ADDED_UP else flat[:0]
        parts: Any = (flat[:: max(1, len(flat) // _COMPARED)], every)
        if isinstance(value, Tensor):
            tensors = (each.detach().cpu().contiguous() for each in parts)
            parts = (each.view(torch.uint8).numpy() for each in tensors)
        some, whole = (each.tobytes() for each in parts)
        about = f"{value.dtype} {[*value.shape]} {zlib.adler32(whole)}".encode()
        return hashlib.blake2b(about + some, digest_size=16).digest()
    except Exception:  # sparse, meta, ...
        return None
