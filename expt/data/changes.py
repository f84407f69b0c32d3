"""Find attributes that custom code changes and that no saved state holds."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from expt.config.own_code import PREFIX, is_installed, own_files
from expt.data.seeding import preserved_generators, seed_all
from expt.errors import listed

MOST, MANY, FEW = 4096, 10_000_000, 512
"""The numbers of a tensor that are compared, and that are added up; the objects of an attribute."""
_OF_TORCH = {name for name in vars(nn.Module()) if not name.endswith("_hooks")}
_OF_TORCH |= {"_step_count", "_last_lr"}  # a scheduler makes new ones
LIMIT_S = 0.2
"""Seconds in which samples are read, to see whether that changes anything."""
_DRAW = (
    "draw from the global generators of torch, NumPy and Python, which are seeded for each sample"
)
_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
Prints = Mapping[str, Any]
"""A digest of each attribute, in containers, that stays equal while the attribute does."""


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
        found.pop(parameter.rpartition("_")[0], None)
    return found | dict(one.named_buffers(recurse=False))


@functools.cache
def _slots(kind: type) -> set[str]:
    named = (one for each in kind.__mro__ for one in vars(each).items())
    return {name for name, value in named if isinstance(value, types.MemberDescriptorType)}


def _prints(one: object, seen: dict[int, object]) -> Prints:
    """Return the prints of the attributes of `one`; adds its objects to `seen`, by id.

    Objects that are in there before are left out, such as those of a checkpoint.
    """
    found: dict[str, Any] = {}
    for name, value in attributes(one).items():
        with contextlib.suppress(Exception):  # of an odd class, such as one without a repr
            found[name] = _print(value, seen, FEW + len(seen))
    return found


class Watched:
    """An object, and how its attributes were when the watch began."""

    def __init__(self, one: Any, known: Mapping[int, object], *methods: str) -> None:
        """Take the names of the `methods` that save and load its state, if it has them."""
        self._one, self._methods = one, methods
        self._before = _prints(one, dict(known))
        copied, memo = attributes(one) if methods else {}, dict(known)
        self._copies = {name: _copy(each, memo) for name, each in copied.items()}

    def lost(self, known: Mapping[int, object]) -> list[str]:
        """Return the attributes that have changed, and that a saved state does not bring back."""
        now = _prints(self._one, dict(known))
        then = self._before  # one that is new was only made late
        names = [name for name in then if name in now and _differ(then[name], now[name])]
        if not names or not self._methods:
            return names
        save, load = self._methods
        twin = copy.copy(self._one)
        for name, value in self._copies.items():  # known objects were not copied
            own = copy.copy(value) if isinstance(value, dict | list) else value
            object.__setattr__(twin, name, own)
        shared = _prints(twin, dict(known))  # such as objects in a function's closure
        getattr(twin, load)(getattr(self._one, save)())
        loaded = _prints(twin, dict(known))
        return [name for name in names if not now[name] == loaded.get(name) != shared.get(name)]


def own_code() -> dict[str, Any]:
    """Return the person's own modules and the classes in them, which may have a state, too."""
    names = [*own_files(), *(each for each in sys.modules if each.startswith(PREFIX))]
    found: dict[str, Any] = {name: sys.modules[name] for name in names}
    for name in names:
        for value in vars(sys.modules[name]).copy().values():
            if issubclass(type(value), type) and value.__module__ == name:  # a proxy may raise
                found[f"{name}.{value.__qualname__}"] = value
    return found


def unseeded(
    reads: Iterable[Callable[[], Any]], objects: Mapping[str, Any], *, again: bool = True
) -> Iterator[str]:
    """Yield a warning where `reads`, which read samples, change these objects or own code.

    Else yield one where a sample that is read `again` after the same seeds is another. As many are
    read as can be in LIMIT_S, one at least.
    """
    watched = {where: Watched(one, {}) for where, one in {**own_code(), **objects}.items()}
    ends, drew, looked = time.monotonic() + LIMIT_S, 0, 0
    with preserved_generators():
        for seed, read in enumerate(reads):  # a seed each: a dataset may keep samples
            with contextlib.suppress(Exception):  # training reports the error
                drew += len({repr(_read_seeded(read, seed)) for _ in range(1 + again)}) > 1
            looked += 1
            if time.monotonic() > ends:
                break
    lost = [f"{where}.{name}" for where, each in watched.items() for name in each.lost({})]
    if lost:
        yield (
            f"reading a sample changes {listed(lost)}, which no checkpoint holds and each reading"
            f" process has a copy of; {_DRAW}"
        )
    elif drew:
        yield (
            f"{drew} of {looked} samples that were read twice, after the same seeds, were others"
            f" the second time, so that no run can be repeated or resumed to the bit; {_DRAW}"
        )


def _read_seeded(read: Callable[[], Any], seed: int) -> Any:
    seed_all(seed)
    return _print(read(), {}, FEW)


def _copy(value: Any, memo: dict[int, object]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a generator, ...
        return value


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):  # a cache gets more keys
        return any(_differ(before[key], after[key]) for key in before.keys() & after.keys())
    if isinstance(before, tuple) and isinstance(after, tuple):
        pairs = zip(before, after, strict=False)
        return len(before) != len(after) or any(_differ(*pair) for pair in pairs)
    return before is not None and before != after


def _print(value: Any, seen: dict[int, object], most: int) -> Any:
    if isinstance(value, str | bytes) and len(value) > MOST:
        return hashlib.blake2b(value.encode() if isinstance(value, str) else value).digest()
    if isinstance(value, str | bytes | int | float | complex | bool | np.generic):
        return repr(value)
    if value is None or isinstance(value, _CODE) or id(value) in seen or len(seen) > most:
        return None
    seen[id(value)] = value  # kept, so that nothing else gets its id
    if isinstance(value, Tensor | np.ndarray):
        return digest(value)
    if isinstance(value, nn.Module):  # its parts don't count: a large one is no end
        parts = dict(value.named_modules())
        inside = {**seen, **{id(part): part for part in parts.values()}}
        return {name: _of_module(part, inside) for name, part in parts.items()}
    if isinstance(value, Mapping):
        some = [*value][:FEW]
        return {repr(key): _print(value[key], seen, most) for key in some}
    if isinstance(value, list | tuple):
        step = max(1, len(value) // FEW)
        return (str(len(value)), *(_print(each, seen, most) for each in value[::step]))
    if isinstance(value, Set):
        return str(len(value)), *sorted(map(repr, itertools.islice(value, FEW)))
    return _of_object(value, seen, most)


def _of_module(one: nn.Module, seen: dict[int, object]) -> Prints:
    return {**_prints(one, seen), **{n: digest(p) for n, p in one.named_parameters(recurse=False)}}


def _of_object(value: Any, seen: dict[int, object], most: int) -> Any:
    """Look into any object, such as a generator, as pickle and deepcopy would.

    A custom function is seen by its closure, its defaults and its attributes.
    """
    try:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame  # None at its end
            return frame and _print((frame.f_lasti, dict(frame.f_locals)), seen, most)
        if isinstance(value, types.FunctionType):
            if is_installed(value.__code__.co_filename):
                return (_print(vars(value).get("__wrapped__"), seen, most),)
            held = [*(cell.cell_contents for cell in value.__closure__ or ())]
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return tuple(_print(each, seen, most) for each in (*held, vars(value) or None))
        found = value.__reduce_ex__(5)  # without a copy of large buffers
        parts = [*found[1:3], *([*each] if each else None for each in found[3:5])]
    except Exception:  # an open file, a lock, an iterator, ...
        return _print(getattr(value, "__dict__", None), seen, most)
    return None if isinstance(found, str) else tuple(_print(part, seen, most) for part in parts)


def digest(value: Tensor | np.ndarray[Any, Any]) -> Any:
    """Return a digest of the numbers; of many, some are compared."""
    try:
        flat, total = value.reshape(-1), ""
        some: Any = flat[:: max(1, len(flat) // MOST)]
        if isinstance(flat, Tensor):
            total = str(flat.detach().sum().item()) if MOST < len(flat) <= MANY else ""
            some = some.detach().cpu().contiguous().view(torch.uint8).numpy()
        found = hashlib.blake2b(some.tobytes(), digest_size=16).digest()
        return [str(value.dtype), [*value.shape], total, found]
    except Exception:  # sparse, meta, ...
        return None
