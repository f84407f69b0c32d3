"""A model whose parameters, gradients and optimiser states are shared out among workers: torch's
`fully_shard`.

Its parameters are DTensors, of which each worker holds a part [rows of the first dimension]. A part
of the model, a unit, is gathered for its forward and its backward pass, and dropped again. So each
forward pass is a collective."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from expt.data.loading import Batch
from expt.errors import ConfigError, did_you_mean
from expt.models.blocks import CONTAINERS, blocks
from expt.training import batch_norm
from expt.training.collectives import Worker, max_across_workers, sum_across_workers

Fill = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""From some parameters or buffers of a model to what they are to hold, on the worker's device."""
LEAST_SHARE = 0.02
"""Of a model's numbers: what a layer outside of all blocks has at least to be a unit by itself."""


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of it: all, unless it is sharded."""
    part: Any = tensor
    return cast(Tensor, part.to_local()) if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, which is asked without importing that."""
    return hasattr(tensor, "to_local")


def whole(tensor: Tensor) -> Tensor:
    """All of it on every worker: where it is sharded, a collective."""
    part: Any = tensor
    return cast(Tensor, part.full_tensor()) if is_sharded(tensor) else tensor


def sum_over_shards(values: Tensor, shards: int, world_size: int) -> Tensor:
    """The sum of `values` of each worker's part of a model that is cut into so many; a collective."""
    return sum_across_workers(values) / (world_size // shards)  # replicas of a part say the same


def shard(
    module: nn.Module,
    worker: Worker,
    *,
    shards: int,
    units: Sequence[nn.Module],
    values: Fill,
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Cut `module` into so many parts, one for each worker of a group of neighbours; the groups are
    replicas.

    `units` are gathered one at a time; what is in none of them is gathered with the whole. `values`
    gives what each of its tensors is to hold: for a unit's parameters just before that is cut, so
    that no worker has all of them. In `param_dtype` they travel and compute, in `reduce_dtype`
    their gradients are averaged; None is that of the parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas = worker.world_size // shards
    sizes, names = (
        ((shards,), ("shard",)) if replicas == 1 else ((replicas, shards), ("replicate", "shard"))
    )
    mesh = init_device_mesh(worker.device.type, sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    _fill_buffers(module, values)
    for unit in units:
        _fill_parameters(unit, values)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    _fill_parameters(module, values)
    # What the whole has beside its units is needed again at once, at the start of the backward
    # pass.
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=None if reshard_after_forward else False,
    )
    if worker.device.type == "cpu":
        for part in units_of(module).values():
            part.set_force_sum_reduction_for_comms(True)  # not every gloo knows how to average


def units_of(module: nn.Module) -> dict[str, Any]:
    """By their names the parts of a sharded `module` that are gathered at a time, and itself."""
    from torch.distributed.fsdp import FSDPModule

    return {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}


@torch.no_grad()
def _fill_parameters(module: nn.Module, values: Fill) -> None:
    """Give those that are not sharded yet their values; what modules share they share after it."""
    wanted = [parameter for parameter in module.parameters() if not is_sharded(parameter)]
    full = values([parameter.detach() for parameter in wanted])
    filled = {
        parameter: nn.Parameter(tensor.contiguous(), requires_grad=parameter.requires_grad)
        for parameter, tensor in zip(wanted, full, strict=True)
    }
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter in filled:
                setattr(part, name, filled[parameter])


def _fill_buffers(module: nn.Module, values: Fill) -> None:
    """Give all buffers inside `module`, which stay the tensors that they are, their values."""
    buffers = list(module.buffers())
    for buffer, tensor in zip(buffers, values(buffers), strict=True):
        buffer.data = tensor


def spread_as(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives this worker's part of a whole tensor, shared out as `parameter` is."""
    from torch.distributed.tensor import distribute_tensor

    of: Any = parameter
    return lambda whole: distribute_tensor(
        whole.to(local(parameter).device), of.device_mesh, of.placements, src_data_rank=None
    )


@torch.no_grad()
def copy_shares(source: nn.Module, target: nn.Module) -> None:
    """Let `target` hold what this worker has of `source`, a model of the same making."""
    pairs = zip(
        itertools.chain(source.parameters(), source.buffers()),
        itertools.chain(target.parameters(), target.buffers()),
        strict=True,
    )
    for mine, other in pairs:
        local(other).copy_(local(mine))


def choose_units(module: nn.Module, wrap: str | int | Sequence[str]) -> list[nn.Module]:
    """What of `module` is gathered at a time, the innermost first.

    "auto" is its blocks, and layers beside them, or of a model without blocks, that have a good
    part of its numbers. A number is the least that a unit has. Regular expressions match whole
    names of modules. Raises ConfigError for one that matches none, or what can be no unit."""
    if isinstance(wrap, str):
        chosen = _blocks_and_large_layers(module)
    elif isinstance(wrap, int):
        chosen = _of_size(module, wrap)
    else:
        chosen = _matched(module, wrap)
    return [chosen[name] for name in sorted(chosen, key=lambda name: -name.count("."))]


def own_parameters(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Of each of `units`, as from `choose_units`, what is gathered with it; in the model's order."""
    taken = set[nn.Parameter]()
    own: dict[nn.Module, list[nn.Parameter]] = {}
    for unit in units:
        own[unit] = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own[unit])
    return [own[part] for part in module.modules() if part in own]


def gathered_dtype(module: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    """What param_dtype=auto means where `dtype` is that of mixed precision; None is that of the
    parameters.
    """
    return (
        None if batch_norm.is_in(module) else dtype
    )  # its statistics are float32, and it takes no others beside them


def _blocks_and_large_layers(module: nn.Module) -> dict[str, nn.Module]:
    chosen = blocks(module)
    least = LEAST_SHARE * _size(module)
    for name, layer in module.named_modules():
        inside = any(name.startswith(f"{block}.") for block in chosen)
        if (
            name
            and not inside
            and name not in chosen
            and _is_layer(layer)
            and _size(layer) >= least
        ):
            chosen[name] = layer
    within_attention = {
        f"{name}."
        for name, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    }
    return {
        name: unit
        for name, unit in chosen.items()
        if not _shared_name(module, name)
        and not name.startswith(tuple(within_attention))  # computes by itself
    }


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _of_size(module: nn.Module, least: int) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}

    def rest(name: str, part: nn.Module) -> int:
        """The numbers of `part` that are in no unit."""
        own = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        below = sum(
            rest(f"{name}.{child}".lstrip("."), module) for child, module in part.named_children()
        )
        if (
            own + below < least
            or not name
            or isinstance(part, CONTAINERS)
            or _shared_name(module, name)
        ):
            return own + below
        chosen[name] = part
        return 0

    rest("", module)
    if not chosen:
        raise ConfigError(
            f"sharding.wrap={least}: no module within the model has so many parameters, of"
            f" {_size(module)} in all; use fewer, or sharding.wrap=auto"
        )
    return chosen


def _matched(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    named = {name: part for name, part in module.named_modules() if name and _size(part)}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        where = f"sharding.wrap=[{pattern}]"
        found = [name for name in named if re.fullmatch(pattern, name)]
        if not found:
            shown = ", ".join([*named][:4])
            hint = (
                did_you_mean(pattern.replace("\\", ""), named)
                or f" There are {len(named)}, such as {shown}."
            )
            raise ConfigError(f"{where}: is the name of no module with parameters.{hint}")
        for name in found:
            if isinstance(named[name], CONTAINERS):
                kind = type(named[name]).__name__
                raise ConfigError(
                    f"{where}: {name} is a {kind}, which is never called; use '{name}\\.[^.]+' for"
                    " its elements"
                )
            if shared := _shared_name(module, name):
                raise ConfigError(
                    f"{where}: {name} shares {shared} with another module, and both must be"
                    " gathered together; leave it out"
                )
            chosen[name] = named[name]
    return chosen


def _shared_name(module: nn.Module, unit: str) -> str | None:
    """The name of a parameter inside `unit` that is outside of it too."""
    inside = set(module.get_submodule(unit).parameters())
    named = module.named_parameters(remove_duplicate=False)
    return next(
        (name for name, one in named if one in inside and not name.startswith(f"{unit}.")), None
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextlib.contextmanager
def without_reduction(module: Any) -> Iterator[None]:
    """Within it gradients are added up where they are, whole, and wait for a backward pass outside
    of it.
    """
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def in_step(
    batches: Iterable[Batch], module: nn.Module, blank: Callable[[int], Batch], device: torch.device
) -> Iterator[Batch]:
    """The batches of this worker's evaluation of `module`, and weightless ones until no other
    worker has any more.

    `blank` gives a batch of so many samples.
    """
    iterator = iter(batches)
    try:
        while True:
            batch = next(iterator, None)
            if not max_across_workers([float(batch is not None)], device)[0]:
                return
            yield blank(1)._replace(weightless=True) if batch is None else batch
    finally:
        part: Any
        for part in module.modules():
            if hasattr(part, "reshard"):
                part.reshard()  # what a backward pass would have done


def outline(module: nn.Module) -> nn.Module:
    """A copy of `module`, which is not sharded yet, whose parameters have no values and take no
    memory.
    """
    empty = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    return copy.deepcopy(module, cast("dict[int, Any]", empty))
